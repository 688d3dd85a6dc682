"""T5: the same rules for encoder, decoder and cross attention. The table of position biases is cut by heads."""

from deepspeed_c.inject.policy import Heads, Rule, policy


@policy("t5", "mt5")
class T5:
    heads = (Heads(r"(SelfAttention|EncDecAttention)", widths=("inner_dim",)),)
    rules = (
        Rule(r"(SelfAttention|EncDecAttention)\.q", "column", ("queries",)),
        Rule(r"(SelfAttention|EncDecAttention)\.[kv]", "column", ("keys",)),
        Rule(r"(SelfAttention|EncDecAttention)\.o", "row", ("queries",)),
        Rule(r"(SelfAttention|EncDecAttention)\.relative_attention_bias", "slice", ("queries",)),
        Rule(r"DenseReluDense\.wi(_[01])?", "column"),
        Rule(r"DenseReluDense\.wo", "row"),
    )
