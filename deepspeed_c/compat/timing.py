"""Names of the engine's timers in DeepSpeed's log lines, and a timer of two events, as in ``deepspeed.utils.timer``."""

from __future__ import annotations

from typing import Any

__all__ = [
    "BACKWARD_GLOBAL_TIMER",
    "BACKWARD_INNER_GLOBAL_TIMER",
    "BACKWARD_INNER_MICRO_TIMER",
    "BACKWARD_MICRO_TIMER",
    "BACKWARD_REDUCE_GLOBAL_TIMER",
    "BACKWARD_REDUCE_MICRO_TIMER",
    "FORWARD_GLOBAL_TIMER",
    "FORWARD_MICRO_TIMER",
    "STEP_GLOBAL_TIMER",
    "STEP_MICRO_TIMER",
    "TIME_EPSILON",
    "CudaEventTimer",
]

FORWARD_MICRO_TIMER = "fwd_microstep"
FORWARD_GLOBAL_TIMER = "fwd"
BACKWARD_MICRO_TIMER = "bwd_microstep"
BACKWARD_GLOBAL_TIMER = "bwd"
BACKWARD_INNER_MICRO_TIMER = "bwd_inner_microstep"
BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER = "bwd_allreduce_microstep"
BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce"
STEP_MICRO_TIMER = "step_microstep"
STEP_GLOBAL_TIMER = "step"
TIME_EPSILON = 1e-6  # seconds


class CudaEventTimer:
    """The time between two recorded events of an accelerator (``get_accelerator().Event``)."""

    def __init__(self, start_event: Any, end_event: Any) -> None:
        self.start_event, self.end_event = start_event, end_event

    def get_elapsed_msec(self) -> float:
        """Milliseconds between the events. Waits for the second event."""
        self.end_event.synchronize()
        return self.start_event.elapsed_time(self.end_event)
