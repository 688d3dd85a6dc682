"""CodeGen: GPT-J's network, whose fused projection is four stripes of queries, values and keys."""

from deepspeed_c.inject.policy import Heads, Rule, policy

_STRIPES = 4  # mp_num of the model's own forward, which divides any number of heads by it


@policy("codegen")
class CodeGen:
    """Every rank gets heads of each stripe, so its number of heads is a multiple of four again."""

    heads = (Heads(r"attn", keys=(), widths=("embed_dim",), stripes=_STRIPES),)
    rules = (
        Rule(r"attn\.qkv_proj", "column", ("queries", "keys", "keys") * _STRIPES),
        Rule(r"attn\.out_proj", "row", ("queries",) * _STRIPES),
        Rule(r"mlp\.fc_in", "column"),
        Rule(r"mlp\.fc_out", "row"),
    )
    loss = "causal"
