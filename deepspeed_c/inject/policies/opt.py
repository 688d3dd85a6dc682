"""OPT: separate projections with biases. There is no module around the two layers of the MLP."""

from deepspeed_c.inject.policy import Heads, Rule, policy


@policy("opt")
class OPT:
    heads = (Heads(r"self_attn", widths=("embed_dim",), keys=()),)
    rules = (
        Rule(r"self_attn\.q_proj", "column", ("queries",)),
        Rule(r"self_attn\.[kv]_proj", "column", ("keys",)),
        Rule(r"self_attn\.out_proj", "row", ("queries",)),
        # The MLP lies in the layer itself, so the norms are beside cut matrices.
        Rule(r"layers\.\d+\.(?:self_attn|final)_layer_norm", "skip"),
        Rule(r"layers\.\d+\.fc1", "column"),
        Rule(r"layers\.\d+\.fc2", "row"),
    )
    loss = "causal"
