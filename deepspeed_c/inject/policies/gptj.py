"""GPT-J: attention and MLP side by side, separate projections."""

from deepspeed_c.inject.policy import Heads, Rule, Stream, policy


@policy("gptj")
class GPTJ:
    heads = (Heads(r"attn", widths=("embed_dim",), keys=()),)
    rules = (
        Rule(r"attn\.q_proj", "column", ("queries",)),
        Rule(r"attn\.[kv]_proj", "column", ("keys",)),
        Rule(r"attn\.out_proj", "row", ("queries",)),
        Rule(r"mlp\.fc_in", "column"),
        Rule(r"mlp\.fc_out", "row"),
    )
    stream = Stream("h", ("attn", "mlp"), "ln_f")
    loss = "causal"
