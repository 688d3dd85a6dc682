"""A lower bound of a candidate's time: the work of a step over the rates of this machine.

The bound holds for any overlap of the kinds of work, because it is the time of the slowest kind alone.
"""

from __future__ import annotations

from typing import NamedTuple

from deepspeed_c.autotuning.search import is_better

__all__ = ["BOUNDED", "MachineRates", "StepWork", "best_possible", "least_seconds", "why_beaten"]

BOUNDED = ("throughput", "latency")
"""The metrics that follow from the time of a step."""


class StepWork(NamedTuple):
    """A rank's work in a step."""

    flops: float = 0.0
    """FLOPs of the matrix products of one micro-batch, forward and backward."""
    state_bytes: float = 0.0
    """Bytes of the optimizer's states that the update reads and writes, in the memory of the device that trains."""
    link_bytes: float = 0.0
    """Bytes between host and device, in one direction: gradients of offloaded states, or their new weights."""
    peer_bytes: float = 0.0
    """Bytes that the rank sends to other devices of its host."""
    is_serial: bool = False
    """Whether the update begins after the last product."""


class MachineRates(NamedTuple):
    """A rank does no more than this in a second on this machine. A rate of 0 is unknown, and bounds nothing."""

    flops: float = 0.0
    memory: float = 0.0
    """Bytes of the memory of the device that trains."""
    link: float = 0.0
    peer: float = 0.0
    cached: float = 0.0
    """Bytes that stay in a cache, at most, and are no traffic of the memory."""


def least_seconds(work: StepWork, n_micro_batches: int, rates: MachineRates) -> float:
    """Seconds that a step takes at least; 0.0 if nothing is known."""

    def over(amount: float, rate: float) -> float:
        return amount / rate if rate > 0 else 0.0

    compute = over(work.flops * n_micro_batches, rates.flops)
    # A byte that stays in the cache saves a read and a write.
    update = over(max(work.state_bytes - 2 * rates.cached, 0.0), rates.memory)
    serial = compute + update if work.is_serial else max(compute, update)
    return max(serial, over(work.link_bytes, rates.link), over(work.peer_bytes, rates.peer))


def best_possible(metric: str, seconds: float, n_samples: int) -> float | None:
    """The metric of a step of ``n_samples`` (on all ranks) that takes ``seconds``; None without a bound."""
    if metric not in BOUNDED or seconds <= 0:
        return None
    return seconds if metric == "latency" else n_samples / seconds


def why_beaten(metric: str, seconds: float, n_samples: int, best: float) -> str:
    """Why a candidate that takes ``seconds`` at least cannot beat ``best``; "" if it may."""
    possible = best_possible(metric, seconds, n_samples)
    if possible is None or is_better(metric, possible, best):
        return ""
    if metric == "latency":
        return f"cannot beat: at least {seconds:.3g} s a step, the best takes {best:.3g} s"
    return (
        f"cannot beat: at most {possible:.3g} samples/s (at least {seconds:.3g} s a step), the best has {best:.3g}"
        " samples/s"
    )
