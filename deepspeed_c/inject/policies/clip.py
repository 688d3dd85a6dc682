"""CLIP: the same kinds of layers in both towers, but a different number of heads in each tower."""

from deepspeed_c.inject.policy import Heads, Rule, policy


@policy("clip", "clip_text_model", "clip_vision_model")
class Clip:
    heads = (Heads(r"self_attn", widths=("embed_dim",)),)
    rules = (
        Rule(r"self_attn\.q_proj", "column", ("queries",)),
        Rule(r"self_attn\.[kv]_proj", "column", ("keys",)),
        Rule(r"self_attn\.out_proj", "row", ("queries",)),
        Rule(r"mlp\.fc1", "column"),
        Rule(r"mlp\.fc2", "row"),
    )
