"""Falcon: groups of query heads next to their key head, or (7B) many query heads and one key head."""

from deepspeed_c.inject.policy import Heads, Rule, policy


@policy("falcon")
class Falcon:
    """The weight of the multi-query projection stays whole where ranks share the key head."""

    heads = (Heads(r"self_attention", widths=("hidden_size", "split_size"), per_head=("alibi", "attention_mask")),)
    rules = (
        Rule(r"self_attention\.query_key_value", "column", ("queries", "keys", "keys"), is_interleaved="multi_query"),
        Rule(r"self_attention\.dense", "row", ("queries",)),
        Rule(r"mlp\.dense_h_to_4h", "column"),
        Rule(r"mlp\.dense_4h_to_h", "row"),
    )
    loss = "causal"
