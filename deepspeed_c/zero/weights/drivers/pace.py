"""The progress of a backward decides when buckets of gradients are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepspeed_c.zero.weights.gather_unit import GatherUnit

if TYPE_CHECKING:
    from deepspeed_c.zero.gradients.reducer import GradientReducer

__all__ = ["Pace", "Progress"]

# Number of gather units that backward passes after a bucket before the bucket's gradients are sent. By then the
# gradients of the bucket's own parameters have arrived on every rank.
PACE_STEPS = 2


class Progress:
    """How far one backward has come along the ``steps`` of its plan."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = steps
        self.n_passed = 0  # number of steps of the plan that have been passed
        self.last_use = {unit: i for i, unit in enumerate(steps)}


class Pace:
    """Has ``reducer`` send each bucket when backward has left its unit behind, in the plan's order, which is the same
    on all ranks."""

    def __init__(self, groups: Sequence[GatherUnit], reducer: GradientReducer) -> None:
        self._reducer = reducer
        place = {(bucket.unit, bucket.index): i for i, bucket in enumerate(reducer.buckets)}
        self._bucket_of = {
            group.index: place[group.unit, group.bucket] for group in groups if (group.unit, group.bucket) in place
        }

    def step(self, progress: Progress) -> None:
        """Called when backward has passed a step of its plan. Sends the gradients of the unit whose last use in the
        plan was ``PACE_STEPS`` steps before."""
        passed = progress.n_passed - PACE_STEPS
        progress.n_passed += 1
        if passed < 0:
            return
        unit = progress.steps[passed]
        if progress.last_use[unit] == passed and unit in self._bucket_of:
            self._reducer.launch_bucket(self._bucket_of[unit])

    def forget(self) -> None:
        """Called when the plan of a backward has changed."""
        self._reducer.late.forget()
