"""MPT: query, key and value as thirds. The model computes ALiBi's biases for all heads; each rank takes those of its
heads.
"""

from deepspeed_c.inject.policy import Heads, Rule, policy


@policy("mpt")
class MPT:
    heads = (Heads(r"attn", queries=("n_heads",), keys=(), widths=("hidden_size",), per_head=("position_bias",)),)
    rules = (
        Rule(r"attn\.Wqkv", "column", ("queries", "keys", "keys")),
        Rule(r"attn\.out_proj", "row", ("queries",)),
        Rule(r"ffn\.up_proj", "column"),
        Rule(r"ffn\.down_proj", "row"),
    )
    loss = "causal"
