"""The optimizer of a checkpoint of DeepSpeed without ZeRO, whose parameters have numbers instead of names."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from deepspeed_c.checkpoint.experts import expert_name
from deepspeed_c.checkpoint.formats.deepspeed.model_file import ModelStates, get_entry
from deepspeed_c.checkpoint.formats.deepspeed.names import Comparison, match_flat, match_names
from deepspeed_c.checkpoint.formats.deepspeed.pieces import StoredPiece, is_count
from deepspeed_c.checkpoint.formats.torch_file import StoredTensor
from deepspeed_c.errors import CheckpointError

__all__ = ["Flat", "Unnamed"]

FIX_ORDER = "build the optimizer with the groups it was saved with, in that order"


class Flat(NamedTuple):
    """The flat tensor of a group (a sub-group at stage 3) on one rank, with the optimizer's states of it."""

    master: StoredTensor
    states: dict[str, Any]


class _Slot(NamedTuple):
    """The optimizer's entry under one number."""

    shape: tuple[int, ...] | None
    """None if nothing tells the value: the optimizer has no states."""
    master: StoredPiece | None
    states: dict[str, StoredPiece]
    counts: dict[str, Any]


class Unnamed:
    """The optimizer of a stage 0 checkpoint, whose parameters have numbers."""

    def __init__(
        self, where: str, model: ModelStates, wrapped: Mapping[str, Any], optimizer: Mapping[str, Any]
    ) -> None:
        self.where, self.model, self.optimizer = where, model, optimizer
        states = get_entry(optimizer, "state", Mapping, where)
        groups = get_entry(optimizer, "param_groups", (list, tuple), where)
        self.names_saved = [group.get("param_names") for group in groups]
        # DeepSpeed's engine moves experts into groups of their own, if it makes the optimizer.
        self._are_of_experts = [bool(group.get("moe")) for group in groups]
        self._is_split = any(self._are_of_experts)
        self.has_names = all(isinstance(names, (list, tuple)) for names in self.names_saved)
        # Fused fp16 has one flat tensor for each group. The file does not say how the tensor is composed, so this is
        # found by trying.
        self.flat_masters = wrapped.get("fp32_groups_flat")
        self.slots: list[list[_Slot]] = []
        if self.flat_masters is not None:
            self.flats = [
                Flat(flat, states.get(group["params"][0] if group["params"] else -1, {}))
                for flat, group in zip(self.flat_masters, groups, strict=True)
            ]
            return
        masters = wrapped.get("fp32_groups") or [[None] * len(group["params"]) for group in groups]
        for group, of_group in zip(groups, masters, strict=True):
            if len(group["params"]) != len(of_group):
                raise CheckpointError("its optimizer's groups and master weights differ in number", where=where)
            self.slots.append(
                [self._slot(states.get(i, {}), master) for i, master in zip(group["params"], of_group, strict=True)]
            )

    def _slot(self, states: Mapping[str, Any], master: StoredTensor | None) -> _Slot:
        tensors = {key: value for key, value in states.items() if isinstance(value, StoredTensor) and key != "step"}
        whole = {key: value for key, value in tensors.items() if value.shape != ()}
        if not whole and (master is None or master.shape == ()):
            # A weight without dimensions, whose states have no dimensions either.
            whole = tensors
        counts = {key: value for key, value in states.items() if key not in whole and is_count(value)}
        shapes = {tuple(value.shape) for value in whole.values()} | (
            {tuple(master.shape)} if master is not None else set()
        )
        if len(shapes) > 1:
            raise CheckpointError(
                f"an optimizer state has the shapes {sorted(shapes)} for one weight",
                where=self.where,
                fix="optimizers with factored states are not read; load the weights alone",
            )
        return _Slot(
            next(iter(shapes), None),
            None if master is None else StoredPiece(0, master.n_elems, master, 0),
            {key: StoredPiece(0, value.n_elems, value, 0) for key, value in whole.items()},
            counts,
        )

    def _candidates(self, aliases: Mapping[str, str]) -> list[tuple[str, StoredTensor]]:
        buffers = set(self.model.buffers)
        return [
            (name, stored)
            for name, stored in self.model.module.items()
            if isinstance(stored, StoredTensor) and name not in buffers and name not in aliases
        ]

    def find_names(self, aliases: Mapping[str, str]) -> list[list[str]] | str:
        """The names of each group's parameters in its order, or why they cannot be known."""
        candidates = self._candidates(aliases)
        if self.flat_masters is not None:
            found = match_flat(candidates, [flat.master for flat in self.flats], self._may_be_in)
            if isinstance(found, list):
                self.slots = self._cut_flats(found)
            return found
        if self.has_names:
            names = [list(of_group) for of_group in self.names_saved]
            self.check(names)
            return names
        return match_names(
            candidates,
            [[slot.shape for slot in of_group] for of_group in self.slots],
            [[slot.master.stored if slot.master else None for slot in of_group] for of_group in self.slots],
            self._may_be_in,
        )

    def _may_be_in(self, group: int, name: str) -> bool:
        """Whether the parameter ``name`` may belong to the group. Some optimizers have groups for experts only."""
        return not self._is_split or self._are_of_experts[group] == (expert_name(name) is not None)

    def _cut_flats(self, names: Sequence[Sequence[str]]) -> list[list[_Slot]]:
        sizes = [sum(self.model.tensor(name).n_elems for name in of_group) for of_group in names]
        wanted = [flat.master.n_elems for flat in self.flats]
        if sizes != wanted:
            raise CheckpointError(
                f"its groups have {wanted} elements, and those named {sizes}", where=self.where, fix=FIX_ORDER
            )
        slots = []
        for flat, of_group in zip(self.flats, names, strict=True):
            at = 0
            counts = {key: value for key, value in flat.states.items() if is_count(value)}
            whole = {
                key: value
                for key, value in flat.states.items()
                if isinstance(value, StoredTensor) and not is_count(value)
            }
            slots.append([])
            for name in of_group:
                stored = self.model.tensor(name)
                n = stored.n_elems
                pieces = {key: StoredPiece(0, n, value, at) for key, value in whole.items()}
                slots[-1].append(_Slot(tuple(stored.shape), StoredPiece(0, n, flat.master, at), pieces, counts))
                at += n
        return slots

    def check(self, names: Sequence[Sequence[str]]) -> None:
        """Assigns ``names`` to the groups' parameters.

        Raises CheckpointError if they do not fit in number, shape or value.
        """
        agree = Comparison([(name, self.model.tensor(name)) for of_group in names for name in of_group])
        slots = self._cut_flats(names) if self.flat_masters is not None else self._without_frozen(names)
        i = 0
        for of_group, of_slots in zip(names, slots, strict=True):
            for name, slot in zip(of_group, of_slots, strict=True):
                shape = tuple(self.model.tensor(name).shape)
                if slot.shape is not None and slot.shape != shape:
                    raise CheckpointError(
                        f"has shape {shape}, and the optimizer's state in its place {slot.shape}",
                        where=f"{self.where}, {name}",
                        fix=FIX_ORDER,
                    )
                if slot.master is not None and not agree(i, slot.master.stored, slot.master.first):
                    raise CheckpointError(
                        "is not what its master weight is when it is rounded",
                        where=f"{self.where}, {name}",
                        fix=FIX_ORDER,
                    )
                i += 1
        self.slots = slots

    def _without_frozen(self, names: Sequence[Sequence[str]]) -> list[list[_Slot]]:
        """The groups' slots. A group with too many loses the slots of frozen parameters, which have a number and no
        state.
        """
        kept = [
            of_slots
            if len(of_slots) == len(of_group)
            else [slot for slot in of_slots if slot.shape is not None or slot.counts]
            for of_slots, of_group in itertools.zip_longest(self.slots, names, fillvalue=())
        ]
        if [len(of_group) for of_group in names] != [len(of_slots) for of_slots in kept]:
            raise CheckpointError(
                f"its optimizer's groups have {[len(of_group) for of_group in self.slots]} parameters, and {[len(of_group) for of_group in names]} are named",
                where=self.where,
                fix=FIX_ORDER,
            )
        return kept
