"""GPT-BigCode (StarCoder): GPT-2's structure with one fused projection. With multi_query, all heads share one key head."""

from deepspeed_c.inject.policy import Heads, Rule, policy


@policy("gpt_bigcode")
class GPTBigCode:
    heads = (Heads(r"attn", keys=("kv_heads",), widths=("embed_dim", "split_size")),)
    rules = (
        Rule(r"attn\.c_attn", "column", ("queries", "keys", "keys"), is_interleaved="multi_query"),
        Rule(r"attn\.c_proj", "row", ("queries",)),
        Rule(r"mlp\.c_fc", "column"),
        Rule(r"mlp\.c_proj", "row"),
    )
    loss = "causal"
