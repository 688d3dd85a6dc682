"""GPT-OSS: attention sinks are cut with their heads. Experts have biases, and their gate and up alternate column by
column.
"""

from deepspeed_c.inject.policy import Heads, Rule, policy


@policy("gpt_oss")
class GPTOSS:
    heads = (Heads(r"self_attn"),)
    rules = (
        Rule(r"self_attn", "heads", ("queries",), params=("sinks",)),
        Rule(r"self_attn\.q_proj", "column", ("queries",)),
        Rule(r"self_attn\.[kv]_proj", "column", ("keys",)),
        Rule(r"self_attn\.o_proj", "row", ("queries",)),
        Rule(r"mlp\.experts", "experts"),
    )
    loss = "causal"
