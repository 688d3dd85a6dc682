"""GPT-2: ``Conv1D`` with the weight [in, out]. Query, key and value are thirds of one projection."""

from deepspeed_c.inject.policy import Heads, Rule, Stream, policy


@policy("gpt2")
class GPT2:
    heads = (Heads(r"attn", widths=("embed_dim", "split_size")),)
    rules = (
        Rule(r"attn\.c_attn", "column", ("queries", "keys", "keys")),
        Rule(r"attn\.c_proj", "row", ("queries",)),
        Rule(r"mlp\.c_fc", "column"),
        Rule(r"mlp\.c_proj", "row"),
    )
    stream = Stream("h", ("attn", "mlp"), "ln_f")
    loss = "causal"
