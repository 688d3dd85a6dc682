"""Mixtral and Qwen's mixtures: experts are cut along their inner dimension, the router stays whole."""

from deepspeed_c.inject.policy import Heads, Rule, policy


@policy("mixtral", "qwen2_moe", "qwen3_moe")
class Mixtral:
    """Every rank has a part of every expert."""

    heads = (Heads(r"self_attn"),)
    rules = (
        Rule(r"self_attn\.q_proj", "column", ("queries",)),
        Rule(r"self_attn\.[kv]_proj", "column", ("keys",)),
        Rule(r"self_attn\.[qk]_norm", "shared", ("queries",)),
        Rule(r"self_attn\.o_proj", "row", ("queries",)),
        Rule(r"mlp\.experts", "experts"),
        Rule(r"mlp(\.shared_expert)?\.(gate_proj|up_proj)", "column"),
        Rule(r"mlp(\.shared_expert)?\.down_proj", "row"),
    )
    loss = "causal"
