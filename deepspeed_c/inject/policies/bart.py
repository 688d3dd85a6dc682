"""BART, and models with its layers: an encoder and a decoder with cross attention. Whisper's encoder reads sound."""

from deepspeed_c.inject.policy import Heads, Rule, policy


@policy("bart", "mbart", "marian", "whisper")
class Bart:
    heads = (Heads(r"(self|encoder)_attn", widths=("embed_dim",), keys=()),)
    rules = (
        Rule(r"(self|encoder)_attn\.q_proj", "column", ("queries",)),
        Rule(r"(self|encoder)_attn\.[kv]_proj", "column", ("keys",)),
        Rule(r"(self|encoder)_attn\.out_proj", "row", ("queries",)),
        Rule(r"layers\.\d+\.fc1", "column"),
        Rule(r"layers\.\d+\.fc2", "row"),
    )
