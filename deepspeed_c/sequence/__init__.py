"""Sequence parallelism: each rank holds a part of every sequence, and attention works across ranks
(docs/concepts/sequence.md)."""

from deepspeed_c.sequence.plans import ExchangePlan, HeadPlan, SequenceCut, TokenRun, plan_exchange, plan_heads
from deepspeed_c.sequence.ring import ring_attention
from deepspeed_c.sequence.ring_plan import Block, RingPlan, RingTraffic, plan_ring

__all__ = [
    "Block",
    "ExchangePlan",
    "HeadPlan",
    "RingPlan",
    "RingTraffic",
    "SequenceCut",
    "TokenRun",
    "plan_exchange",
    "plan_heads",
    "plan_ring",
    "ring_attention",
]
