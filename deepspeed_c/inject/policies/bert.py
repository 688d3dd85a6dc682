"""BERT and RoBERTa. The projection after the attention belongs to another module than the heads do."""

from deepspeed_c.inject.policy import Heads, Rule, policy


@policy("bert", "roberta", "electra")
class Bert:
    heads = (Heads(r"attention", owner="self", widths=("all_head_size",)),)
    rules = (
        Rule(r"attention\.self\.query", "column", ("queries",)),
        Rule(r"attention\.self\.(key|value)", "column", ("keys",)),
        Rule(r"attention\.output\.dense", "row", ("queries",)),
        Rule(r"layer\.\d+\.intermediate\.dense", "column"),
        Rule(r"layer\.\d+\.output\.dense", "row"),
    )
