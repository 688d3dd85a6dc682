"""The numbers of trained parameters and of their buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from deepspeed_c import _C

if TYPE_CHECKING:
    from deepspeed_c.zero.layout.unit import Slot, Unit

__all__ = ["SlotTable"]


class SlotTable(Sequence["Slot"]):
    """The slots of ``units`` by number. Buckets are numbered in the order in which backward completes them, and slots
    in the order of their buckets (``tracker_index``).

    ``buckets``: (unit, bucket of the unit) by number. ``registered``: the slots in order of registration. This order is
    the same on all ranks. The order of buckets may not be: tensor-parallel ranks may have parts of different sizes, and
    then their buckets differ.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        entries: list[tuple[int, Unit, int]] = []
        for unit in units:
            for b in range(unit.n_buckets):
                # Backward runs from the last parameter to the first, so the first one registered completes the bucket.
                last = min((slot.order for slot in unit.bucket_slots[b]), default=0)
                entries.append((-last, unit, b))
        entries.sort(key=lambda entry: entry[0])
        self.buckets: list[tuple[Unit, int]] = [(unit, b) for _, unit, b in entries]
        self._slots: list[Slot] = []
        self._bucket_of: list[int] = []
        for number, (unit, b) in enumerate(self.buckets):
            for slot in unit.bucket_slots[b]:
                slot.tracker_index = len(self._slots)
                self._slots.append(slot)
                self._bucket_of.append(number)
        self.registered = sorted(self._slots, key=lambda slot: slot.order)
        self._of_param = {id(slot.param): slot for slot in self._slots}

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    @overload
    def __getitem__(self, i: int) -> Slot: ...

    @overload
    def __getitem__(self, i: slice) -> list[Slot]: ...

    def __getitem__(self, i: int | slice) -> Slot | list[Slot]:
        return self._slots[i]

    def find(self, tensor: Any) -> Slot | None:
        """The slot whose parameter is ``tensor``; None for another tensor."""
        return self._of_param.get(id(tensor))

    def bucket_of(self, slot: Slot) -> int:
        """The number of the slot's bucket."""
        return self._bucket_of[slot.tracker_index]

    def make_path(self) -> _C.GradientPath:
        """The path that takes the gradients of these slots from autograd into their buckets."""
        places = [
            (number, slot.offset - slot.unit.bucket_begin[slot.bucket], slot.numel)
            for slot, number in zip(self._slots, self._bucket_of)
        ]
        return _C.GradientPath(places, len(self.buckets))

    def clear(self) -> None:
        """Forgets all slots."""
        self._slots.clear()
        self._of_param.clear()
