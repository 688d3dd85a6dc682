"""The parameters of a base optimizer over shards (entries). An entry is this rank's slice of a bucket, or its piece of
one parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from deepspeed_c.errors import OptimizerError
from deepspeed_c.ops.scope import declaration
from deepspeed_c.zero.layout.unit import Fragment, Unit
from deepspeed_c.zero.states.codec import Codec

__all__ = ["COUNTERS", "Entry", "keep_parameters", "must_see_pieces", "point_at_shards", "split_entry"]

# States of torch's optimizers that belong to a parameter as a whole and not to its elements. They have no dimension;
# the other states of a parameter without dimensions have none either, so names must tell them apart.
COUNTERS = ("step", "mu_product", "eta", "mu")


class Entry(NamedTuple):
    """One tensor that the base optimizer sees: this rank's slice of a bucket, or its piece of one parameter."""

    param: torch.nn.Parameter
    unit: Unit
    bucket: int
    fragment: Fragment | None

    def part_of(self, slices: list[torch.Tensor]) -> torch.Tensor:
        """The entry's elements in ``slices``, a list of this rank's slices of gradients or weights."""
        if self.fragment is None:
            return slices[self.bucket]
        return self.unit.piece(slices, self.fragment).view(self.param.shape)


def must_see_pieces(base: torch.optim.Optimizer, *, is_sharded: bool, allow_untested: bool) -> bool:
    """Whether the base must get parameters one by one (True), or may get slices that hold many parameters (False).

    Raises OptimizerError if it may get neither: it is not known to be elementwise, and parameters are cut over ranks.
    """
    scope = declaration(base).scope
    if scope == "element":
        return False
    if not is_sharded or scope is not None:
        return True
    if allow_untested and not type(base).__module__.startswith("torch."):
        return False
    raise OptimizerError(
        f"{type(base).__name__} is not known to be elementwise, so it cannot be applied to pieces of parameters",
        where="optimizer with zero_optimization.stage >= 1",
        fix="use stage 0, or an elementwise optimizer (Adam, AdamW, SGD, ...); for a class of your own that is elementwise set"
        ' "zero_allow_untested_optimizer": true',
    )


def point_at_shards(base: torch.optim.Optimizer, units: Sequence[Unit], *, allow_untested: bool) -> list[Entry]:
    """Replaces the parameters in the base optimizer's groups by entries over this rank's master weights, and gives the
    base's states to the entries."""
    is_sharded = any(unit.is_cut or unit.has_parts for unit in units)
    sees_pieces = must_see_pieces(base, is_sharded=is_sharded, allow_untested=allow_untested)
    old_state = dict(base.state)
    base.state.clear()
    entries: list[Entry] = []
    for index, group in enumerate(base.param_groups):
        mine = [e for unit in units if unit.group == index for e in _entries_of(unit, sees_pieces)]
        group["params"] = [entry.param for entry in mine]
        entries += mine
    if old_state:
        _adopt_state(base, entries, old_state)
    return entries


def keep_parameters(base: torch.optim.Optimizer, units: Sequence[Unit]) -> list[Entry]:
    """Entries that are the model's own parameters. These are whole on each rank and their own masters, so the base
    optimizer keeps its groups and states."""
    for values in base.state.values():
        for key, value in values.items():
            if torch.is_tensor(value):  # parameters are contiguous now and may not have been before
                values[key] = value.contiguous()
    return [Entry(f.slot.param, unit, f.slot.bucket, f) for unit in units for f in unit.fragments]


def _entries_of(unit: Unit, sees_pieces: bool) -> list[Entry]:
    if not sees_pieces:
        return [
            Entry(torch.nn.Parameter(unit.master[bucket]), unit, bucket, None)
            for bucket in range(unit.n_buckets)
            if unit.slice_elems[bucket]
        ]
    return [_piece_entry(unit, fragment) for fragment in unit.fragments]


def _piece_entry(unit: Unit, fragment: Fragment) -> Entry:
    piece = unit.piece(unit.master, fragment)
    if fragment.numel == fragment.slot.numel:
        piece = piece.view(fragment.slot.shape)
    return Entry(torch.nn.Parameter(piece), unit, fragment.slot.bucket, fragment)


def split_entry(base: torch.optim.Optimizer, entry: Entry, codec: Codec) -> list[Entry]:
    """Replaces the entry of a slice by one entry for each parameter piece in the slice, and gives each its part of the
    states."""
    unit, begin = entry.unit, entry.unit.shard_offset[entry.bucket]
    pieces = [_piece_entry(unit, f) for f in unit.fragments if f.slot.bucket == entry.bucket]
    codec.split(unit.group, entry.param, [(piece.param, piece.fragment.shard_begin - begin) for piece in pieces])
    for group in base.param_groups:
        at = next((i for i, p in enumerate(group["params"]) if p is entry.param), None)
        if at is not None:
            group["params"][at : at + 1] = [piece.param for piece in pieces]
    return pieces


def _adopt_state(
    base: torch.optim.Optimizer, entries: Sequence[Entry], old: dict[torch.nn.Parameter, dict[str, Any]]
) -> None:
    """Gives the entries their parts of the states of whole parameters. The base optimizer has such states if it was
    resumed or makes states early."""
    for entry in entries:
        fragments = (
            [entry.fragment]
            if entry.fragment is not None
            else [f for f in entry.unit.fragments if f.slot.bucket == entry.bucket]
        )
        known = [f for f in fragments if old.get(f.slot.param)]
        if not known:
            continue
        if len(known) < len(fragments):
            missing = next(f.slot.name for f in fragments if f not in known)
            raise OptimizerError(
                "the optimizer has state for some parameters and none for others, which share a bucket",
                where=missing,
                fix="pass a fresh optimizer, or one that has stepped all of its parameters",
            )
        new = base.state[entry.param]
        begin = entry.unit.shard_offset[entry.bucket]
        for key, value in old[known[0].slot.param].items():
            if torch.is_tensor(value) and value.shape == known[0].slot.shape and key not in COUNTERS:
                whole = torch.zeros(entry.param.numel(), dtype=value.dtype, device=entry.param.device)
                for f in fragments:
                    at = 0 if entry.fragment is not None else f.shard_begin - begin
                    piece = old[f.slot.param][key].reshape(-1).narrow(0, f.begin, f.numel)
                    whole.narrow(0, at, f.numel).copy_(piece)
                new[key] = whole.view(entry.param.shape)
                continue
            for f in known[1:]:
                other = old[f.slot.param][key]
                if (torch.is_tensor(value) and not torch.equal(value, other)) or (
                    not torch.is_tensor(value) and value != other
                ):
                    raise OptimizerError(
                        f"the optimizer's {key!r} differs between parameters ({value} and {other})",
                        where=f.slot.name,
                        fix="pass a fresh optimizer, or one that has stepped all of its parameters equally often",
                    )
            new[key] = value
