"""CodeGen: GPT-J's structure, but one fused projection made of four stripes of queries, values and keys."""

from deepspeed_c.inject.policy import Heads, Rule, policy

_STRIPES = 4  # mp_num of the model's own forward, which divides the number of heads by it


@policy("codegen")
class CodeGen:
    """Every rank gets heads of each stripe, so the rank's number of heads is again a multiple of four."""

    heads = (Heads(r"attn", keys=(), widths=("embed_dim",), stripes=_STRIPES),)
    rules = (
        Rule(r"attn\.qkv_proj", "column", ("queries", "keys", "keys") * _STRIPES),
        Rule(r"attn\.out_proj", "row", ("queries",) * _STRIPES),
        Rule(r"mlp\.fc_in", "column"),
        Rule(r"mlp\.fc_out", "row"),
    )
    loss = "causal"
