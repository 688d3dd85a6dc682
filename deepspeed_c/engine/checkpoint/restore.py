"""Fills an engine from a checkpoint of any format and arrangement of ranks. Each rank reads the ranges that it holds
straight into their places.

First a plan is made, which finds everything that does not fit. Nothing is overwritten before the plan is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from deepspeed_c import _C
from deepspeed_c.checkpoint.experts import join_expert_groups
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, LogicalTensor, Read, Source
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.engine.checkpoint.boxes import plan_reads
from deepspeed_c.engine.checkpoint.contents import Named
from deepspeed_c.engine.no_optimizer import NoOptimizer
from deepspeed_c.engine.trainable import KeptState
from deepspeed_c.errors import CheckpointError, StateError
from deepspeed_c.inject.cut import Cut
from deepspeed_c.ops.scope import declaration
from deepspeed_c.zero.layout.cuts import cut_of
from deepspeed_c.zero.layout.experts import expert_ranks_of, holders_of
from deepspeed_c.zero.layout.layout import Layout
from deepspeed_c.zero.layout.unit import Fragment, Slot, Unit
from deepspeed_c.zero.states.optimizer import ZeroOptimizer
from deepspeed_c.zero.weights.kinds import check_saved, is_description
from deepspeed_c.zero.weights.param import shape_of

__all__ = ["LoadOptions", "RestorePlan", "plan_restore"]

NAMES_SHOWN = 5

# Makes tensors for states. Returns the reads that fill them, and a function to call after the reads.
MakeRoom = Callable[[], tuple[Sequence[Read], Callable[[], None]]]


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What to load: the options of ``load_checkpoint``."""

    strict: bool = True
    optimizer: bool = True
    """Whether to load groups, loss scale, random numbers, and the place in the data."""
    states: bool = True
    """Whether to load moments and step counts. An engine without an optimizer has no place for them."""
    masters: bool = True
    """Whether to load the checkpoint's master weights; otherwise masters are made from its 16-bit weights."""
    same_batch: bool = False
    """Whether to refuse a checkpoint of a run whose section ``elasticity`` differs."""


@dataclass(kw_only=True)
class RestorePlan:
    """The reads of a load, and the actions before and after them."""

    reads: list[Read] = field(default_factory=list)
    before: list[Callable[[], Sequence[Read]]] = field(default_factory=list)
    """Functions that make tensors for optimizer states and return the reads that fill them."""
    streams: list[Callable[[Source], None]] = field(default_factory=list)
    """Functions that read states which do not stay in memory, one bucket after the other."""
    after: list[Callable[[], None]] = field(default_factory=list)
    """Functions that copy from temporary memory to the final places. They involve no other rank."""
    rooms: dict[tuple[Unit, int], MakeRoom] = field(default_factory=dict)
    """As ``before``, for buckets that are streamed."""
    stored: dict[tuple[Unit, int], list[tuple[LogicalTensor, Fragment]]] = field(default_factory=dict)
    """Reads that fill weights in a file, by bucket."""
    gathers: list[tuple[Unit, int]] = field(default_factory=list)
    """Buckets of whole weights to gather afterwards (collective), because each rank reads only its slice of them."""
    dormant: dict[torch.nn.Parameter, KeptState] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    """Trained parameters without an optimizer state in the checkpoint."""

    def run(self, source: Source) -> None:
        """Runs the reads. Raises CheckpointError if data cannot be read; parts that were overwritten before stay
        overwritten."""
        reads = list(self.reads)
        for step in self.before:
            reads += step()
        source.read(reads)
        with torch.no_grad():
            for step in self.after:
                step()
        for (unit, bucket), found in self.stored.items():
            with unit.weights.open(bucket):
                _read_now(source, ((weight, f.slot.cut, f.begin, unit.weight_piece(f)) for weight, f in found))
        for stream in self.streams:
            stream(source)

    def read(self, tensor: LogicalTensor, cut: Cut | None, begin: int, into: torch.Tensor) -> None:
        """Adds the reads that fill ``into`` with a part of ``tensor``, from the part's element ``begin`` on."""
        reads, after = plan_reads(tensor, cut, begin, into)
        self.reads += reads
        self.after += after

    def finish(self) -> None:
        """Gathers weights that are whole on every rank. Collective; call it when all ranks have read their slices."""
        for unit, bucket in self.gathers:
            unit.gather_weights(bucket, label=f"weights of bucket {bucket}").wait()


def _read_now(source: Source, wanted: Iterable[tuple[LogicalTensor, Cut | None, int, torch.Tensor]]) -> None:
    plans = [plan_reads(*each) for each in wanted]
    source.read([read for reads, _ in plans for read in reads])
    with torch.no_grad():
        for _, after in plans:
            for step in after:
                step()


class _Finder:
    """Looks up a parameter's tensors in a source, under any of its names."""

    def __init__(self, source: Source, named: Named) -> None:
        self.source = source
        self.other_names: dict[str, list[str]] = {}
        for alias, name in named.aliases.items():
            self.other_names.setdefault(name, []).append(alias)
        self.kinds: dict[str, list[str]] = {}
        for kind, name in source.tensors:
            self.kinds.setdefault(name, []).append(kind)
        self.used: set[str] = set()

    def name_of(self, name: str) -> str | None:
        """The source's name of the model's ``name``."""
        candidates = (name, *self.other_names.get(name, ()))
        found = [
            known
            for candidate in candidates
            for known in (candidate, self.source.aliases.get(candidate))
            if known in self.kinds
        ]
        # The source may hold a tied weight under each of its names.
        self.used.update(found)
        return found[0] if found else None

    def weight(self, name: str, dtype: torch.dtype) -> LogicalTensor | None:
        """The tensor to fill a weight of ``dtype`` from: the saved weight if it has this dtype, otherwise the saved
        master, which has full precision.
        """
        weight, master = self.source.tensors.get((PARAM, name)), self.source.tensors.get((MASTER, name))
        if weight is not None and (weight.dtype == dtype or master is None):
            return weight
        return master

    def master(self, name: str) -> LogicalTensor | None:
        return self.source.tensors.get((MASTER, name)) or self.source.tensors.get((PARAM, name))

    def states(self, name: str) -> dict[str, LogicalTensor]:
        return {
            kind: self.source.tensors[kind, name]
            for kind in self.kinds.get(name, ())
            if kind not in (PARAM, MASTER, BUFFER)
        }


def plan_restore(
    source: Source,
    module: torch.nn.Module,
    named: Named,
    layout: Layout,
    optimizer: ZeroOptimizer | NoOptimizer,
    mesh: Mesh,
    options: LoadOptions,
) -> RestorePlan:
    """Makes the plan of a load and changes nothing. Raises one StateError that names everything that does not fit the
    model or the optimizer."""
    problems = _name_groups(source, named, layout) if options.states else []
    plan, finder = RestorePlan(), _Finder(source, named)
    problems += _plan_codes(plan, module, source)
    placed: set[int] = set()
    by_bucket: dict[tuple[Unit, int], dict[Slot, str]] = {}
    for unit in (*layout.trained, *layout.frozen):
        for slot in unit.slots:
            placed.add(id(slot.param))
            name = finder.name_of(slot.name)
            if name is None:
                plan.missing.append(slot.name)
                continue
            found = finder.weight(name, unit.dtype)
            if found is None or not _fits(found, slot.logical_shape, slot.name, problems):
                continue
            by_bucket.setdefault((unit, slot.bucket), {})[slot] = name
            _plan_weights(plan, finder, unit, slot, name, options)
    plan.gathers = list(by_bucket)
    for name, tensor in named.tensors.items():
        if id(tensor) in placed:
            continue
        known = finder.name_of(name)
        if known is None:
            plan.missing.append(name)
            continue
        if is_description(name):
            continue
        found = source.tensors.get((BUFFER, known)) or finder.weight(known, tensor.dtype)
        if found is not None and _fits(found, _logical_shape(tensor), name, problems):
            _plan_whole(plan, tensor, found)
    _plan_dormant(plan, finder, named, layout, mesh, options)
    # Other ranks check the names of other pipeline stages and of other experts.
    for name in named.names:
        finder.name_of(name)
    plan.unexpected = [name for name in finder.kinds if name not in finder.used]
    if options.states:
        problems += _plan_states(plan, finder, optimizer, by_bucket)
    _plan_streams(plan, finder, optimizer, by_bucket, options)
    frozen = {name for name, tensor in named.tensors.items() if not tensor.requires_grad}
    missing = [name for name in plan.missing if not (source.state.get("excludes_frozen") and name in frozen)]
    if options.strict:
        problems += [f"missing: {name}" for name in missing] + [f"unexpected: {name}" for name in plan.unexpected]
    if problems:
        more = f"; and {len(problems) - NAMES_SHOWN} more" if len(problems) > NAMES_SHOWN else ""
        raise StateError(
            f"the checkpoint does not fit: {'; '.join(problems[:NAMES_SHOWN])}{more}",
            where=source.where,
            fix="load the model that was saved; pass load_module_strict=False for missing and unexpected names,"
            " load_optimizer_states=False for another optimizer",
        )
    return plan


def _plan_codes(plan: RestorePlan, module: torch.nn.Module, source: Source) -> list[str]:
    """Checks that saved codes have the model's format, and adds what lies beside them in a text. Returns the
    mismatches."""

    def read(name: str) -> torch.Tensor:
        saved = source.tensors[BUFFER, name]
        held = torch.empty(saved.shape, dtype=saved.dtype)
        source.read([Read(saved, 0, held.view(-1))])
        return held

    try:
        problems, take = check_saved(module, [name for kind, name in source.tensors if kind == BUFFER], read)
    except CheckpointError as error:
        return [f"{error.where}: {error.what}"]
    plan.after.append(take)
    return problems


def _name_groups(source: Source, named: Named, layout: Layout) -> list[str]:
    """Tells the source the names of the parameters in the optimizer's groups, because some formats store states without
    names, and some split groups. Returns the mismatches."""
    finder = _Finder(source, named)
    groups = [[finder.name_of(name) for name in of_group] for of_group in layout.groups]
    names = [[name for name in of_group if name is not None] for of_group in groups]
    join_expert_groups(source, names)
    if names != groups:
        return []  # because of missing parameters, which are reported elsewhere
    try:
        source.name_groups(names)
    except CheckpointError as error:
        return [f"{error.where}: {error.what}"]
    return []


def _logical_shape(tensor: torch.Tensor) -> torch.Size:
    cut = cut_of(tensor)
    return shape_of(tensor) if cut is None else cut.logical_shape


def _fits(found: LogicalTensor, shape: Iterable[int], name: str, problems: list[str]) -> bool:
    if tuple(found.shape) != tuple(shape):
        problems.append(f"{name} has shape {tuple(found.shape)}, the model's has {tuple(shape)}")
        return False
    return True


def _plan_weights(plan: RestorePlan, finder: _Finder, unit: Unit, slot: Slot, name: str, options: LoadOptions) -> None:
    weight, fragment = finder.weight(name, unit.dtype), unit.fragment_of.get(slot)
    if fragment is None:
        return
    piece = unit.weight_piece_at_hand(fragment)
    if piece is None:
        plan.stored.setdefault((unit, slot.bucket), []).append((weight, fragment))
    else:
        plan.read(weight, slot.cut, fragment.begin, piece)
    if not unit.states.needs_open(slot.bucket):
        master = unit.master_piece(fragment)
        if master is not None:
            source = finder.master(name) if options.masters else weight
            plan.read(source, slot.cut, fragment.begin, master)


def _plan_streams(
    plan: RestorePlan,
    finder: _Finder,
    optimizer: ZeroOptimizer | NoOptimizer,
    by_bucket: Mapping[tuple[Unit, int], Mapping[Slot, str]],
    options: LoadOptions,
) -> None:
    """Plans masters and states that live in a file between steps, or are 8-bit codes. They are read one bucket after
    the other."""
    for (unit, bucket), slots in by_bucket.items():
        if unit not in optimizer.units or optimizer.pieces.are_views(unit, bucket, "states"):
            continue
        masters: list[tuple[Slot, LogicalTensor]] = []
        if unit.states.needs_open(bucket):
            for slot, name in slots.items():
                if slot in unit.fragment_of:
                    found = finder.master(name) if options.masters else finder.weight(name, unit.dtype)
                    masters.append((slot, found))
        make_room = plan.rooms.get((unit, bucket), lambda: ([], lambda: None))
        plan.streams.append(partial(_stream, optimizer, unit, bucket, masters, make_room))


def _stream(
    optimizer: ZeroOptimizer,
    unit: Unit,
    bucket: int,
    masters: Sequence[tuple[Slot, LogicalTensor]],
    make_room: MakeRoom,
    source: Source,
) -> None:
    with unit.states.open(bucket, reads=not optimizer.broken):
        wanted = []
        for slot, tensor in masters:
            fragment = unit.fragment_of[slot]
            master = unit.master_piece(fragment)
            if master is not None:
                wanted.append((tensor, slot.cut, fragment.begin, master))
        _read_now(source, wanted)
        more, close = make_room()
        source.read(more)
        with torch.no_grad():
            close()


def _plan_whole(plan: RestorePlan, tensor: torch.Tensor, found: LogicalTensor) -> None:
    target = tensor.detach()
    if target.is_contiguous():
        plan.read(found, cut_of(tensor), 0, target.view(-1))
        return

    def make_room() -> Sequence[Read]:
        held = torch.empty(target.numel(), dtype=target.dtype)
        reads, after = plan_reads(found, cut_of(tensor), 0, held)
        plan.after += [*after, lambda: target.copy_(held.view(target.shape))]
        return reads

    plan.before.append(make_room)


def _plan_states(
    plan: RestorePlan,
    finder: _Finder,
    optimizer: ZeroOptimizer,
    by_bucket: Mapping[tuple[Unit, int], Mapping[Slot, str]],
) -> list[str]:
    """Adds the optimizer's states. Returns the mismatches."""
    problems: list[str] = []
    base, source = optimizer.optimizer, finder.source
    if not source.groups and not source.params:
        return [source.problem or "it holds no optimizer state; load_module_only=True loads the weights alone"]
    # DeepSpeed's elastic checkpoints have states but no options of the groups. The options stay unchanged then.
    if source.groups and len(source.groups) != len(base.param_groups):
        return [f"it has {len(source.groups)} optimizer groups, this optimizer {len(base.param_groups)}"]
    for (unit, bucket), slots in by_bucket.items():
        if unit not in optimizer.units:
            continue
        expected = set(base.names_of_states(unit.group)) if declaration(base).updates_buckets else None
        known: dict[Slot, tuple[dict[str, torch.dtype], Mapping[str, Any]]] = {}
        wanted: list[tuple[Slot, str, LogicalTensor]] = []
        for slot, name in slots.items():
            states = finder.states(name)
            info = source.params.get(name)
            counts = {} if info is None else info.counts
            if not states and not counts:
                plan.fresh.append(slot.name)
                continue
            if expected is not None and states.keys() != expected:
                problems.append(
                    f"{slot.name} has the optimizer states {sorted(states)}, {type(base).__name__} keeps {sorted(expected)}"
                )
                continue
            odd = {kind for kind, tensor in states.items() if tuple(tensor.shape) != tuple(slot.logical_shape)}
            if odd and (unit.is_cut or slot.cut is not None):
                problems.append(f"{min(odd)} of {slot.name} has another shape than it and cannot be sharded")
                continue
            kept = None if expected is None else base.dtype_of_state(unit.master[bucket])
            if expected is not None and "step" not in counts:
                counts = {
                    **counts,
                    "step": torch.tensor(float(source.state.get("counters", {}).get("global_steps", 0))),
                }
            known[slot] = {kind: kept or t.dtype for kind, t in states.items() if kind not in odd}, counts
            wanted += [(slot, kind, tensor) for kind, tensor in states.items()]
        make_room = partial(_make_room, optimizer, unit, bucket, known, wanted)
        if not optimizer.pieces.are_views(unit, bucket, "states"):
            plan.rooms[unit, bucket] = make_room
        else:
            plan.before.append(partial(_make_room_for_good, plan, make_room))
    return problems


def _make_room_for_good(plan: RestorePlan, make_room: MakeRoom) -> Sequence[Read]:
    reads, close = make_room()
    plan.after.append(close)
    return reads


def _make_room(
    optimizer: ZeroOptimizer,
    unit: Unit,
    bucket: int,
    known: Mapping[Slot, tuple[dict[str, torch.dtype], Mapping[str, Any]]],
    wanted: Sequence[tuple[Slot, str, LogicalTensor]],
) -> tuple[Sequence[Read], Callable[[], None]]:
    """Makes tensors for a bucket's states. Returns the reads that fill them, and a function to call after the reads."""
    optimizer.pieces.make(unit, bucket, known)
    place, close = optimizer.pieces.open(unit, bucket)
    reads: list[Read] = []
    finishing: list[Callable[[], None]] = []
    for slot, kind, tensor in wanted:
        fragment = unit.fragment_of.get(slot)
        if fragment is None:
            continue
        if kind in known[slot][0]:
            more, after = plan_reads(tensor, slot.cut, fragment.begin, place(slot, kind))
            reads += more
            finishing += after
        else:
            held = torch.empty(tensor.shape, dtype=tensor.dtype, device=unit.device)
            optimizer.pieces.add(slot, kind, held)
            reads.append(Read(tensor, 0, held.view(-1)))

    def finish() -> None:
        for step in finishing:
            step()
        close()

    return reads, finish


def _plan_dormant(
    plan: RestorePlan,
    finder: _Finder,
    named: Named,
    layout: Layout,
    mesh: Mesh,
    options: LoadOptions,
) -> None:
    """Plans the states of parameters that are frozen now and were trained earlier. The states are kept until the
    parameters are trained again."""
    if not options.states:
        return
    trained = {slot.name for unit in layout.trained for slot in unit.slots}
    for name, param in named.tensors.items():
        known = finder.name_of(name) if name not in trained and isinstance(param, torch.nn.Parameter) else None
        info = None if known is None else finder.source.params.get(known)
        states = {} if known is None else finder.states(known)
        # A master without states is kept as well: it is more precise than the weight, and a parameter that never had a
        # gradient has no states.
        has_more = bool(states) or (MASTER, known) in finder.source.tensors
        if info is None or info.group is None or not has_more or finder.master(known) is None:
            continue
        n_expert_ranks = expert_ranks_of(param)
        comm = mesh.tokens if n_expert_ranks == 1 else holders_of(mesh, n_expert_ranks)
        numel, cut = shape_of(param).numel(), cut_of(param)
        spans = [_C.shard_range(numel, comm.world_size, rank) for rank in range(comm.world_size)]
        begin, end = spans[comm.rank]
        master = torch.empty(end - begin, dtype=torch.float32, device=param.device)
        pieces = {
            kind: torch.empty(end - begin, dtype=tensor.dtype, device=param.device)
            for kind, tensor in states.items()
            if tensor.shape == tuple(_logical_shape(param))
        }
        plan.read(finder.master(known), cut, begin, master)
        for kind, piece in pieces.items():
            plan.read(states[kind], cut, begin, piece)
        plan.dormant[param] = KeptState(
            name,
            info.group,
            [low for low, _ in spans],
            [high - low for low, high in spans],
            master,
            pieces,
            dict(info.counts),
            comm,
            speaks=mesh.tensors.rank == 0 if cut is None else cut.copies[0] == cut.rank,
        )
