"""GPT-NeoX: query, key and value of each head lie together."""

from deepspeed_c.inject.policy import Heads, Rule, Stream, policy


@policy("gpt_neox")
class GPTNeoX:
    heads = (Heads(r"attention", keys=()),)
    rules = (
        Rule(r"attention\.query_key_value", "column", ("queries", "keys", "keys"), is_interleaved=True),
        Rule(r"attention\.dense", "row", ("queries",)),
        Rule(r"mlp\.dense_h_to_4h", "column"),
        Rule(r"mlp\.dense_4h_to_h", "row"),
    )
    stream = Stream("layers", ("attention", "mlp"), "final_layer_norm")
    loss = "causal"
