"""Llama and families built like it: separate projections, gated MLP, rotary positions."""

from deepspeed_c.inject.policy import Heads, Rule, Stream, policy


@policy("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "olmo", "stablelm", "starcoder2")
class Llama:
    """RMS norms of single heads (Qwen3) are whole, and are used on the rank's heads only."""

    heads = (Heads(r"self_attn"),)
    rules = (
        Rule(r"self_attn\.q_proj", "column", ("queries",)),
        Rule(r"self_attn\.[kv]_proj", "column", ("keys",)),
        Rule(r"self_attn\.[qk]_norm", "shared", ("queries",)),
        Rule(r"self_attn\.o_proj", "row", ("queries",)),
        Rule(r"mlp\.(gate_proj|up_proj|c_fc)", "column"),
        Rule(r"mlp\.(down_proj|c_proj)", "row"),
    )
    stream = Stream("layers", ("self_attn", "mlp"), "norm")
    loss = "causal"
