"""DistilBERT: BERT's layers under other names."""

from deepspeed_c.inject.policy import Heads, Rule, policy


@policy("distilbert")
class DistilBert:
    heads = (Heads(r"attention", widths=("dim",)),)
    rules = (
        Rule(r"attention\.q_lin", "column", ("queries",)),
        Rule(r"attention\.[kv]_lin", "column", ("keys",)),
        Rule(r"attention\.out_lin", "row", ("queries",)),
        Rule(r"ffn\.lin1", "column"),
        Rule(r"ffn\.lin2", "row"),
    )
