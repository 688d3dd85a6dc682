"""Late gradients, which come after the reduction of their bucket, and the buckets that wait for such gradients.

All ranks learn from flags, summed over the ranks, which parameters were late on any rank. In the next window the
buckets of these parameters *wait*: they are launched after all other buckets, when backward ends. So late gradients
cost an extra collective only in the first window in which they come. A bucket stops waiting after a window without late
gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepspeed_c import _C
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.logging import logger
from deepspeed_c.zero.gradients.slots import SlotTable

if TYPE_CHECKING:
    from deepspeed_c.zero.layout.unit import Slot

# Most late parameters that the log message about them names.
MAX_NAMES = 8

__all__ = ["LateBuckets"]


class LateBuckets:
    """Buckets that are reduced again in this window, or launched last in the next one.

    Flags are one number for each parameter, in order of registration. ``flags`` gives this rank's own; the other
    methods take their sums over ``stage``, the ranks that hold the same layers.
    """

    def __init__(self, slots: SlotTable, path: _C.GradientPath, stage: Collectives) -> None:
        self._slots, self._path, self._stage = slots, path, stage
        self._after_turn = stage.world_size + 1  # more than the sum of all ranks' flags for SEEN
        self._late = (self._after_turn + 1) ** 2  # more than the sum of all ranks' other flags
        weighed = (
            (_C.GradientPath.SEEN, 1),
            (_C.GradientPath.SEEN_AFTER, self._after_turn),
            (_C.GradientPath.SEEN_LATE, self._late),
        )
        # State of a parameter's gradient -> the flag that is summed over ranks.
        self._flag_of = [float(sum(n for bit, n in weighed if seen & bit)) for seen in range(8)]
        self.may_come = True
        """Whether the next reduced pass may have late gradients; alike on all ranks."""
        self.waiting: set[int] = set()
        """Buckets that are launched after all others; alike on all ranks."""
        self._is_replanned = False  # the order of backward has changed in this window
        self._found: set[int] = (
            set()
        )  # trackers of parameters whose gradients have come after their turn in this window
        self._has_told = False

    def begin_window(self) -> None:
        """From now on flags are those of the present order of backward."""
        self._is_replanned, self._found = False, set()

    def flags(self) -> list[float]:
        """This rank's flag of each parameter."""
        seen = self._path.seen()
        return [self._flag_of[seen[slot.tracker_index]] for slot in self._slots.registered]

    def sum_flags(self) -> list[float]:
        """The flags in a collective of their own."""
        return self._stage.sum_numbers(self.flags(), label="late gradients")

    def unused(self, flags: Sequence[float]) -> list[Slot]:
        """The parameters without a gradient on any rank."""
        return [slot for slot, flag in zip(self._slots.registered, flags) if not flag]

    def buckets(self, flags: Sequence[float]) -> list[int]:
        """The buckets with late gradients on any rank. They need another reduction."""
        return sorted({self._slots.bucket_of(slot) for slot in self._at_least(self._late, flags)})

    def names(self, flags: Sequence[float]) -> str:
        """The names of the parameters with late gradients on any rank."""
        return _names_of(self._at_least(self._late, flags))

    def plan(self, flags: Sequence[float]) -> None:
        """Makes the buckets whose gradients came after their turn on some rank wait in the next window, and no other
        buckets."""
        # It is called again if a window is finished again, and an edit of a gradient has cleared flags meanwhile.
        self._found |= {slot.tracker_index for slot in self._at_least(self._after_turn, flags)}
        slots = [slot for slot in self._slots.registered if slot.tracker_index in self._found]
        self._have_waiting({self._slots.bucket_of(slot) for slot in slots})
        # The flags of a window whose order has changed at its end say nothing of the new order.
        self.may_come = bool(slots) or self._is_replanned
        if slots and not self._has_told:
            self._has_told = True
            logger.info(
                "gradients of %s came again after their buckets had been reduced (a second use, as under reentrant checkpointing, or a second"
                " backward); as long as such gradients come, their %d of %d buckets are reduced after the others",
                _names_of(slots),
                len(self.waiting),
                len(self._slots.buckets),
            )

    def forget(self) -> None:
        """Lets no bucket wait any more. Called on all ranks when the order of backward is planned anew: gradients that
        were late in the old order may be in time in the new order, and others late."""
        self._have_waiting(set())
        self.may_come = self._is_replanned = True

    def await_all_of(self, i: int, *, is_complete: bool) -> None:
        """Makes bucket ``i`` wait in this window if a gradient of it is missing on any rank at its turn. is_complete:
        whether this rank has all of them. Collective."""
        if self._stage.sum_numbers([float(not is_complete)], label="missing gradients")[0]:
            self._have_waiting(self.waiting | {i})

    def _at_least(self, least: int, flags: Sequence[float]) -> list[Slot]:
        return [slot for slot, flag in zip(self._slots.registered, flags) if flag >= least]

    def _have_waiting(self, buckets: set[int]) -> None:
        for i in self.waiting ^ buckets:
            self._path.set_waiting(i, i in buckets)
        self.waiting = buckets


def _names_of(slots: Sequence[Slot]) -> str:
    names = ", ".join(slot.name for slot in slots[:MAX_NAMES])
    return f"{names} and {len(slots) - MAX_NAMES} more parameters" if len(slots) > MAX_NAMES else names
