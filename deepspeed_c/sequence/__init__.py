"""One sequence over several ranks: what each of them has of it, and attention across them (docs/concepts/sequence.md)."""

from deepspeed_c.sequence.plans import ExchangePlan, HeadPlan, SequenceCut, TokenRun, plan_exchange, plan_heads

__all__ = [
    "ExchangePlan",
    "HeadPlan",
    "SequenceCut",
    "TokenRun",
    "plan_exchange",
    "plan_heads",
]
