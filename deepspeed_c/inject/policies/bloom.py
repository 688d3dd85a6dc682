"""BLOOM: interleaved heads. The model computes ALiBi's biases for all heads, and each rank takes those of its heads."""

from deepspeed_c.inject.policy import Heads, Rule, policy


@policy("bloom")
class Bloom:
    heads = (Heads(r"self_attention", widths=("hidden_size", "split_size"), per_head=("alibi",)),)
    rules = (
        Rule(r"self_attention\.query_key_value", "column", ("queries", "keys", "keys"), is_interleaved=True),
        Rule(r"self_attention\.dense", "row", ("queries",)),
        Rule(r"mlp\.dense_h_to_4h", "column"),
        Rule(r"mlp\.dense_4h_to_h", "row"),
    )
    loss = "causal"
