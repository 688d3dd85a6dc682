"""DeepSeek: latent attention, and routed and shared experts. Down projections of the attention stay whole."""

from deepspeed_c.inject.policy import Heads, Rule, policy


@policy("deepseek_v2", "deepseek_v3")
class DeepSeek:
    """The rotary key is a part of the output of ``kv_a_proj_with_mqa``. All heads use it (arXiv 2405.04434, section
    2.1).
    """

    heads = (Heads(r"self_attn", groups=()),)
    rules = (
        Rule(r"self_attn\.(q_proj|q_b_proj|kv_b_proj)", "column", ("queries",)),
        Rule(r"self_attn\.kv_a_proj_with_mqa", "latent", ("queries",)),
        Rule(r"self_attn\.o_proj", "row", ("queries",)),
        Rule(r"mlp\.experts", "experts"),
        Rule(r"mlp(\.shared_experts)?\.(gate_proj|up_proj)", "column"),
        Rule(r"mlp(\.shared_experts)?\.down_proj", "row"),
    )
    loss = "causal"
