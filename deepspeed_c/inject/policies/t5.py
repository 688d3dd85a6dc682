"""T5: encoder, decoder and cross attention alike; the table of position biases is cut by heads."""

from deepspeed_c.inject.policy import Heads, Rule, policy


@policy("t5", "mt5")
class T5:
    heads = (Heads(r"(SelfAttention|EncDecAttention)", widths=("inner_dim",)),)
    rules = (
        Rule(r"Attention\.q", "column", ("queries",)),
        Rule(r"Attention\.[kv]", "column", ("keys",)),
        Rule(r"Attention\.o", "row", ("queries",)),
        Rule(r"Attention\.relative_attention_bias", "slice", ("queries",)),
        Rule(r"DenseReluDense\.wi(_[01])?", "column"),
        Rule(r"DenseReluDense\.wo", "row"),
    )
