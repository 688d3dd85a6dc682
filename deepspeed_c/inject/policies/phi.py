"""Phi: separate projections with biases. Phi-3: one projection for query, key and value, and one for gate and up."""

from deepspeed_c.inject.policy import Heads, Rule, Stream, policy


@policy("phi")
class Phi:
    heads = (Heads(r"self_attn"),)
    rules = (
        Rule(r"self_attn\.q_proj", "column", ("queries",)),
        Rule(r"self_attn\.[kv]_proj", "column", ("keys",)),
        Rule(r"self_attn\.[qk]_layernorm", "shared", ("queries",)),
        Rule(r"self_attn\.dense", "row", ("queries",)),
        Rule(r"mlp\.fc1", "column"),
        Rule(r"mlp\.fc2", "row"),
    )
    stream = Stream("layers", ("self_attn", "mlp"), "final_layernorm")
    loss = "causal"


@policy("phi3")
class Phi3:
    """The forward splits the fused output by the counts in the configuration, so these counts are set to the rank's
    own.
    """

    heads = (Heads(r"self_attn", has_own_config=True),)
    rules = (
        Rule(r"self_attn\.qkv_proj", "column", ("queries", "keys", "keys")),
        Rule(r"self_attn\.o_proj", "row", ("queries",)),
        Rule(r"mlp\.gate_up_proj", "column", ("columns", "columns")),
        Rule(r"mlp\.down_proj", "row"),
    )
    stream = Stream("layers", ("self_attn", "mlp"), "norm")
    loss = "causal"
