"""Finds a parameter's master and states: which tensor of the base optimizer holds them, and which of its elements are
this rank's piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from deepspeed_c.errors import StateError
from deepspeed_c.zero.layout.unit import Fragment, Slot, Unit
from deepspeed_c.zero.states.codec import codec_of
from deepspeed_c.zero.states.entries import COUNTERS, Entry, split_entry

__all__ = ["Pieces"]


def _copy(value: Any) -> Any:
    return value.clone() if torch.is_tensor(value) else value


def _alike(a: tuple[Mapping, Mapping], b: tuple[Mapping, Mapping]) -> bool:
    """Whether two parameters' states have the same names, dtypes and counts, so that one tensor can hold both."""
    return a[0] == b[0] and a[1].keys() == b[1].keys() and all(bool(a[1][key] == b[1][key]) for key in a[1])


class Pieces:
    """Looks up and replaces masters and states of a base optimizer, by parameter.

    If tensors are offloaded, the caller opens their home (``Unit.states``) first.``Pieces`` calls ``settle`` before it
    reads or replaces a state, because an update may have run ahead of the step.
    """

    def __init__(self, base: torch.optim.Optimizer, entries: list[Entry], settle: Callable[[], None]) -> None:
        self._base, self.entries, self._settle = base, entries, settle
        self.codec = codec_of(base)
        self._by_bucket: dict[tuple[Unit, int], list[Entry]] = {}
        for entry in entries:
            self._by_bucket.setdefault((entry.unit, entry.bucket), []).append(entry)

    @property
    def _states(self) -> Mapping[torch.Tensor, dict[str, Any]]:
        self._settle()
        return self._base.state

    def entries_of(self, unit: Unit, bucket: int) -> list[Entry]:
        """The base's parameters for a bucket; empty if this rank's slice holds only padding."""
        return self._by_bucket.get((unit, bucket), [])

    def clear(self) -> None:
        self.entries.clear()
        self._by_bucket.clear()

    def split(self, unit: Unit, bucket: int) -> None:
        """Replaces a bucket's single entry by one entry for each parameter, with a step count of its own."""
        self._settle()
        entries = self._by_bucket[unit, bucket]
        if entries[0].fragment is None:
            pieces = split_entry(self._base, entries[0], self.codec)
            # By identity: == would compare tensors.
            at = next(i for i, entry in enumerate(self.entries) if entry is entries[0])
            self.entries[at : at + 1] = pieces
            self._by_bucket[unit, bucket] = pieces

    @staticmethod
    def _at(fragment: Fragment) -> int:
        """First element of a fragment within this rank's slice of its bucket."""
        return fragment.shard_begin - fragment.slot.unit.shard_offset[fragment.slot.bucket]

    def _entry(self, slot: Slot) -> Entry:
        entries = self._by_bucket[slot.unit, slot.bucket]
        if entries[0].fragment is None:
            return entries[0]
        return next(entry for entry in entries if entry.fragment.slot is slot)

    def _begin(self, entry: Entry, fragment: Fragment) -> int:
        """First element of a fragment within the base's parameter."""
        return self._at(fragment) if entry.fragment is None else 0

    def local(self, slot: Slot, key: str | None) -> torch.Tensor | None:
        """This rank's piece of a parameter's master (``key`` None) or named state, flat; None if the rank owns nothing
        of the parameter. ``are_views`` says whether the piece is a view.

        Raises StateError if the optimizer keeps no tensor of that name for the parameter.
        """
        fragment = slot.unit.fragment_of.get(slot)
        if fragment is None:
            return None
        if key is None:
            return slot.unit.piece(slot.unit.master, fragment)
        entry = self._entry(slot)
        state = self._states.get(entry.param, {})
        value = state.get(key)
        if not torch.is_tensor(value) or value.numel() != entry.param.numel():
            names = sorted(k for k, v in state.items() if torch.is_tensor(v) and v.numel() == entry.param.numel())
            raise StateError(
                f"the optimizer keeps no state {key!r}",
                where=slot.name,
                fix=f"names are {names}" if names else "state exists after the first step",
            )
        begin = self._begin(entry, fragment)
        return self.codec.elements(entry.param, key, begin, begin + fragment.numel)

    def named(self, slot: Slot) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """This rank's piece of each state of a parameter (``local``), and the states that belong to the parameter as a
        whole. Both are empty if the rank owns nothing of the parameter."""
        kinds, counts = self.kinds(slot)
        return {key: self.local(slot, key) for key in kinds}, counts

    def kinds(self, slot: Slot) -> tuple[dict[str, torch.dtype], dict[str, Any]]:
        """Names and dtypes of a parameter's states as ``local`` returns them, and its counts. The states may be
        offloaded."""
        if slot not in slot.unit.fragment_of:
            return {}, {}
        entry = self._entry(slot)
        state = self._states.get(entry.param, {})
        kinds: dict[str, torch.dtype] = {}
        counts: dict[str, Any] = {}
        for key, value in self.codec.named(state):
            if torch.is_tensor(value) and value.numel() == entry.param.numel() and key not in COUNTERS:
                kinds[key] = self.codec.dtype(value)
            else:
                counts[key] = value
        return kinds, counts

    def are_views(self, unit: Unit, bucket: int, key: str | None) -> bool:
        """Whether ``local`` returns a view of the state ``key`` that may be read and written at any time. It does not
        if it makes a copy, or if the tensor lives in a file."""
        return not unit.states.needs_open(bucket) and (key is None or self.codec.gives_views)

    def keep(self, slot: Slot, key: str, piece: torch.Tensor) -> None:
        """Stores ``piece``, a result of ``local`` that the caller has edited."""
        entry = self._entry(slot)
        self.codec.keep(entry.param, key, self._begin(entry, slot.unit.fragment_of[slot]), piece)

    def open(self, unit: Unit, bucket: int) -> tuple[Callable[[Slot, str], torch.Tensor], Callable[[], None]]:
        """(place, close): ``place(slot, key)`` returns the flat tensor to write a piece of a state to, and ``close()``
        stores what has been written."""
        self._settle()
        whole: dict[tuple[torch.nn.Parameter, str], torch.Tensor] = {}

        def place(slot: Slot, key: str) -> torch.Tensor:
            entry, fragment = self._entry(slot), unit.fragment_of[slot]
            at = entry.param, key
            if at not in whole:
                whole[at] = self.codec.whole(*at)
            return whole[at].reshape(-1).narrow(0, self._begin(entry, fragment), fragment.numel)

        def close() -> None:
            for (param, key), values in whole.items():
                self.codec.put(param, key, values)

        return place, close

    def make(
        self, unit: Unit, bucket: int, known: Mapping[Slot, tuple[Mapping[str, torch.dtype], Mapping[str, Any]]]
    ) -> None:
        """Makes states for a bucket's parameters: tensors with the names and dtypes in ``known``, and copies of the
        counts in it.

        Fill the tensors with ``open`` afterwards. A tensor that is not filled holds zeros or its old values. Parameters
        that are not in ``known`` have no state afterwards."""
        slots = [f.slot for f in unit.fragments if f.slot.bucket == bucket]
        if not slots:
            return
        present = [known[slot] for slot in slots if slot in known]
        held = {e.param: self._states.pop(e.param, {}) for e in self._by_bucket[unit, bucket]}
        if not present:
            return
        if self._by_bucket[unit, bucket][0].fragment is None and not (
            len(present) == len(slots) and all(_alike(present[0], other) for other in present)
        ):
            self.split(unit, bucket)
        for entry in self._by_bucket[unit, bucket]:
            slot = slots[0] if entry.fragment is None else entry.fragment.slot
            if slot in known:
                dtypes, counts = known[slot]
                self._states[entry.param] = {key: _copy(value) for key, value in counts.items()}
                self.codec.make(unit.group, entry.param, dtypes, held.get(entry.param, {}))

    def add(self, slot: Slot, key: str, value: torch.Tensor) -> None:
        """Sets a state that does not have the parameter's shape. Only for unsharded states."""
        self._states[self._entry(slot).param][key] = value

    def put(
        self, unit: Unit, bucket: int, states: Mapping[Slot, tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]]
    ) -> None:
        """Sets the states of a bucket's parameters in the base optimizer, in the form that ``named`` returns.
        Parameters that are not in ``states`` have no state afterwards."""
        self.make(
            unit,
            bucket,
            {
                slot: ({k: piece.dtype for k, piece in pieces.items()}, counts)
                for slot, (pieces, counts) in states.items()
            },
        )
        with torch.no_grad():
            place, close = self.open(unit, bucket)
            for slot, (pieces, _) in states.items():
                if slot.unit is unit and slot.bucket == bucket and slot in unit.fragment_of:
                    for key, piece in pieces.items():
                        place(slot, key).copy_(piece)
            close()
