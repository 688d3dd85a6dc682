"""The contents of an engine's checkpoint, and which bytes each rank writes. Each byte is written exactly once, and all
ranks write about equally many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deepspeed_c import checkpoint as files
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, ParamInfo
from deepspeed_c.comm.axes import PP, TOKENS
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.engine.checkpoint.boxes import BoxPart, box_parts
from deepspeed_c.engine.no_optimizer import NoOptimizer
from deepspeed_c.engine.trainable import KeptState
from deepspeed_c.errors import CheckpointError
from deepspeed_c.inject.cut import Cut
from deepspeed_c.zero.layout.cuts import cut_of, tied_over
from deepspeed_c.zero.layout.experts import ExpertNames, expert_ranks_of, holders_of
from deepspeed_c.zero.layout.layout import Layout
from deepspeed_c.zero.layout.unit import Fragment, Slot, Unit
from deepspeed_c.zero.states.optimizer import ZeroOptimizer
from deepspeed_c.zero.weights.kinds import names_beside
from deepspeed_c.zero.weights.param import shape_of

if TYPE_CHECKING:
    from deepspeed_c.checkpoint.native.save import Deferred, OwnedPiece

__all__ = ["Named", "Reading", "held_pieces", "names_of", "names_of_all", "owned_pieces", "param_infos"]

# Size above which a tensor with a copy on every rank is split among the ranks for writing. A smaller tensor is not
# worth two entries in the checkpoint.
UNCUT_BYTES = 1 << 16


class Named(NamedTuple):
    """The tensors of a module's state dict."""

    tensors: dict[str, torch.Tensor]
    """First name -> parameter (the object itself) or persistent buffer."""
    aliases: dict[str, str]
    """Other names of tied weights, name -> first name."""
    names: list[str]
    """First names, in the module's order."""
    others: dict[str, Any]
    """The entries of a module's state dict that are not tensors (``get_extra_state``)."""
    expert_ranks: dict[str, int]
    """The number of ranks that hold different experts, by the first name of an expert's tensor. Experts that are on all
    ranks are left out."""
    beside: set[str]
    """First names of the tensors that belong to codes."""


def names_of_all(named: Named, mesh: Mesh) -> Named:
    """``named`` with the names, aliases and other entries of all stages of a pipeline. The tensors are still this
    rank's only.

    Collective if there is a pipeline.
    """
    if mesh.size(PP) == 1:
        return named
    names: dict[str, None] = {}
    aliases: dict[str, str] = {}
    others: dict[str, Any] = {}
    mine = (named.names, named.aliases, named.others)
    for of_stage in mesh.pipeline.gather_objects(mine, label="names of all stages"):
        names.update(dict.fromkeys(of_stage[0]))
        aliases.update(of_stage[1])
        others.update(of_stage[2])
    return named._replace(names=list(names), aliases=aliases, others=others)


def names_of(module: torch.nn.Module) -> Named:
    """The tensors of a module under the names of its state dict, with experts numbered over all ranks. Tied tensors are
    listed once. The names are those of all ranks' experts, the tensors this rank's only."""
    numbered = ExpertNames(module)
    first: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    others: dict[str, Any] = {}
    names: dict[str, None] = {}
    expert_ranks: dict[str, int] = {}
    for own, value in module.state_dict(keep_vars=True).items():
        name, everyone = numbered.logical(own), numbered.on_all_ranks(own)
        if not torch.is_tensor(value):
            others[name] = value
        elif first.setdefault(id(value), own) == own:
            tensors[name] = value
            names.update(dict.fromkeys(everyone))
            if len(everyone) > 1:
                expert_ranks[name] = len(everyone)
        else:
            aliases.update(zip(everyone, numbered.on_all_ranks(first[id(value)])))
    return Named(tensors, aliases, list(names), others, expert_ranks, names_beside(module, tensors))


class _Whole(NamedTuple):
    """A tensor with a copy on every rank."""

    kind: str
    name: str
    tensor: torch.Tensor


class Reading:
    """Reads states from a file into memory while they are saved. A bucket stays in memory until a piece of another
    bucket is read, or until ``close``."""

    def __init__(self) -> None:
        self._open, self._key = ExitStack(), None

    def of(
        self,
        key: tuple[str, Unit, int],
        dtype: torch.dtype,
        fragment: Fragment,
        resident: Callable[[], AbstractContextManager],
        read: Callable[[], torch.Tensor],
    ) -> Deferred:
        """A fragment that is read later by ``read`` within the context ``resident``. Fragments with the same ``key``
        share one such context."""

        def read_resident() -> torch.Tensor:
            if self._key != key:
                self.close()
                self._open.enter_context(resident())
                self._key = key
            return read()

        return files.save.Deferred(dtype, fragment.numel, read_resident)

    def close(self) -> None:
        self._key = None
        self._open.close()


def owned_pieces(
    named: Named,
    layout: Layout,
    optimizer: ZeroOptimizer | NoOptimizer,
    dormant: Mapping[torch.nn.Parameter, KeptState],
    mesh: Mesh,
    *,
    reading: Reading,
    exclude_frozen: bool,
) -> list[OwnedPiece]:
    """The pieces that this rank writes: its shards, and its part of the tensors that are the same on all ranks. States
    in a file are read through ``reading``.

    Buffers may differ between ranks (running means). The buffers of the first rank with the same layers and experts are
    saved, as other libraries do.
    """
    pieces: list[OwnedPiece] = []
    copies: list[_Whole] = []
    placed: set[int] = set()
    for unit in (*layout.trained, *layout.frozen):
        is_frozen = unit in layout.frozen
        for slot in unit.slots:
            placed.add(id(slot.param))
            whole = copies if _is_first_of_tied(slot.param, mesh) else []
            if not (is_frozen and exclude_frozen):
                _add_unit_weights(unit, slot, reading, pieces, whole)
            if not is_frozen:
                _add_states(unit, slot, optimizer, reading, pieces, whole)
    for param, state in dormant.items():
        if not (exclude_frozen and not param.requires_grad):
            pieces += _dormant_pieces(param, state)
    for i, (name, tensor) in enumerate(named.tensors.items()):
        if id(tensor) in placed or (exclude_frozen and name in named.beside):
            continue
        cut = cut_of(tensor)
        n_expert_ranks = named.expert_ranks.get(name) or expert_ranks_of(tensor)
        if n_expert_ranks > 1:
            pieces += _expert_pieces(name, tensor, i, holders_of(mesh, n_expert_ranks), mesh, exclude_frozen)
        elif not isinstance(tensor, torch.nn.Parameter):
            if mesh.stage.rank == 0 and _is_first_of_tied(tensor, mesh):
                pieces.append(files.save.OwnedPiece(BUFFER, name, tuple(tensor.shape), 0, tensor.detach().reshape(-1)))
        elif exclude_frozen and not tensor.requires_grad:
            continue
        elif cut is None:
            if _is_first_of_tied(tensor, mesh):
                copies.append(_Whole(PARAM, name, tensor.detach()))
        elif (
            cut.copies[0] == cut.rank
            and mesh.index(*TOKENS) == i % mesh.size(*TOKENS)
            and _is_first_of_tied(tensor, mesh)
        ):
            pieces += _cut_pieces(PARAM, name, tensor.shape, 0, tensor.detach().reshape(-1), cut)
    pieces += _share_out(copies, mesh.stage.rank, mesh.stage.world_size)
    return pieces


def held_pieces(
    named: Named,
    layout: Layout,
    optimizer: ZeroOptimizer | NoOptimizer,
    dormant: Mapping[torch.nn.Parameter, KeptState],
    *,
    reading: Reading,
) -> Iterator[OwnedPiece]:
    """The pieces of weights, masters and states that this rank holds, whoever writes them. Ranks that hold copies of
    the same elements list them in the same pieces. Buffers are left out, since ranks may differ in them.

    States and weights in a file are read through ``reading``.
    """
    placed: set[int] = set()
    for unit in (*layout.trained, *layout.frozen):
        for slot in unit.slots:
            placed.add(id(slot.param))
            yield from _held_of_slot(unit, slot, optimizer if unit in layout.trained else None, reading)
    for param, state in dormant.items():
        yield from _kept_pieces(param, state)
    for name, tensor in named.tensors.items():
        if id(tensor) not in placed and isinstance(tensor, torch.nn.Parameter):
            yield from _cut_pieces(PARAM, name, tensor.shape, 0, tensor.detach().reshape(-1), cut_of(tensor))


def _held_of_slot(unit: Unit, slot: Slot, optimizer: ZeroOptimizer | None, reading: Reading) -> Iterator[OwnedPiece]:
    fragment = unit.fragment_of.get(slot)
    if unit.flat_param is not None:  # whole on every rank, even if masters are cut
        yield from _cut_pieces(PARAM, slot.name, slot.shape, 0, slot.view(unit.flat_param).reshape(-1), slot.cut)
    elif fragment is not None:
        data = _weights(unit, fragment, reading)
        yield from _cut_pieces(PARAM, slot.name, slot.shape, fragment.begin, data, slot.cut)
    elif slot.numel == 0:
        yield from _cut_pieces(PARAM, slot.name, slot.shape, 0, torch.empty(0, dtype=unit.dtype), slot.cut)
    if optimizer is None or fragment is None:
        return
    kinds, counts = optimizer.pieces.kinds(slot)
    for kind, data in _states(unit, fragment, kinds, optimizer, reading):
        yield from _cut_pieces(kind, slot.name, slot.shape, fragment.begin, data, slot.cut)
    for key, value in _whole_counts(unit, slot, counts):
        yield files.save.OwnedPiece(key, slot.name, tuple(value.shape), 0, value.reshape(-1))


def _expert_pieces(
    name: str, tensor: torch.Tensor, index: int, holders: Collectives, mesh: Mesh, exclude_frozen: bool
) -> Iterator[OwnedPiece]:
    """The pieces of experts' tensors outside units, if this is the one of their holders that writes them. The first of
    them writes buffers; they take turns with parameters that are not trained."""
    is_param = isinstance(tensor, torch.nn.Parameter)
    turn = index % holders.world_size if is_param else 0
    is_left_out = is_param and exclude_frozen and not tensor.requires_grad
    if holders.rank == turn and mesh.tensors.rank == 0 and not is_left_out:
        kind = PARAM if is_param else BUFFER
        yield from _cut_pieces(kind, name, tensor.shape, 0, tensor.detach().reshape(-1), cut_of(tensor))


def _is_alike(unit: Unit, slot: Slot) -> bool:
    """Whether all ranks with the same layers hold the whole parameter."""
    return not unit.is_cut and slot.cut is None and expert_ranks_of(slot.param) == 1


def _is_first_of_tied(tensor: torch.Tensor, mesh: Mesh) -> bool:
    """Whether this rank writes a tensor that several stages of a pipeline may hold."""
    tied = tied_over(tensor)
    return not tied or mesh.index(PP) == tied[0]


def _cut_pieces(
    kind: str, name: str, shape: Sequence[int], begin: int, data: torch.Tensor | Deferred, cut: Cut | None
) -> Iterator[OwnedPiece]:
    """Pieces of the logical tensor for elements from ``begin`` on of a parameter of ``shape``, or of one of its states.
    ``cut`` says which part of the logical tensor the parameter is."""
    if cut is None:
        yield files.save.OwnedPiece(kind, name, tuple(shape), begin, data)
        return
    for part in box_parts(cut, begin, data.numel()):
        if isinstance(data, torch.Tensor):
            of_box = part.take(data)
        else:
            of_box = data._replace(n_elems=part.numel, read=partial(_take, part, data))
        yield files.save.OwnedPiece(kind, name, tuple(cut.logical_shape), part.begin, of_box, part.box)


def _take(part: BoxPart, data: Deferred) -> torch.Tensor:
    return part.take(data.read())


def _add_unit_weights(unit: Unit, slot: Slot, reading: Reading, pieces: list[OwnedPiece], copies: list[_Whole]) -> None:
    fragment = unit.fragment_of.get(slot)
    is_stored = unit.weights.needs_open(slot.bucket)
    if _is_alike(unit, slot) and not is_stored:
        data = torch.empty(0, dtype=unit.dtype) if fragment is None else unit.weight_piece(fragment)
        copies.append(_Whole(PARAM, slot.name, data.view(slot.shape)))
        return
    if not _writes(unit, slot):
        return
    if fragment is None:
        # No rank owns elements of an empty parameter, so one rank records that it exists.
        if slot.numel == 0 and unit.comm.rank == 0:
            pieces += _cut_pieces(PARAM, slot.name, slot.shape, 0, torch.empty(0, dtype=unit.dtype), slot.cut)
        return
    data = _weights(unit, fragment, reading)
    pieces += _cut_pieces(PARAM, slot.name, slot.shape, fragment.begin, data, slot.cut)


def _weights(unit: Unit, fragment: Fragment, reading: Reading) -> torch.Tensor | Deferred:
    """A fragment's elements of the weights, flat."""
    bucket = fragment.slot.bucket
    if not unit.weights.needs_open(bucket):
        return unit.weight_piece(fragment)
    return reading.of(
        ("weights", unit, bucket),
        unit.dtype,
        fragment,
        partial(unit.weights.open, bucket, writes=False),
        partial(unit.weight_piece, fragment),
    )


def _writes(unit: Unit, slot: Slot) -> bool:
    """Whether this rank writes a parameter's pieces. The ranks that hold the same pieces take turns, parameter by
    parameter."""
    return slot.index % unit.n_copies == unit.copy_index


def _add_states(
    unit: Unit,
    slot: Slot,
    optimizer: ZeroOptimizer,
    reading: Reading,
    pieces: list[OwnedPiece],
    copies: list[_Whole],
) -> None:
    fragment = unit.fragment_of.get(slot)
    if fragment is None:
        return
    kinds, counts = optimizer.pieces.kinds(slot)
    for kind, data in _states(unit, fragment, kinds, optimizer, reading):
        if _is_alike(unit, slot) and isinstance(data, torch.Tensor):
            copies.append(_Whole(kind, slot.name, data.view(slot.shape)))
        elif _writes(unit, slot):
            pieces += _cut_pieces(kind, slot.name, slot.shape, fragment.begin, data, slot.cut)
    for key, value in _whole_counts(unit, slot, counts):
        if _is_alike(unit, slot):
            copies.append(_Whole(key, slot.name, value))
        elif _writes(unit, slot):
            pieces.append(files.save.OwnedPiece(key, slot.name, tuple(value.shape), 0, value.reshape(-1)))


def _states(
    unit: Unit, fragment: Fragment, kinds: Mapping[str, torch.dtype], optimizer: ZeroOptimizer, reading: Reading
) -> Iterator[tuple[str, torch.Tensor | Deferred]]:
    """(kind, a fragment's elements, flat) of the masters, where the parameter is not its own master, and of each state
    of the optimizer. kinds: as ``Pieces.kinds`` returns them. Elements that are no view of the state's own memory are
    read through ``reading``."""
    slot = fragment.slot
    for key in kinds:
        if key in (PARAM, MASTER, BUFFER):
            raise CheckpointError(
                f"the optimizer calls a state {key!r}", where=slot.name, fix="such a name is taken; rename it"
            )
    if unit.master_piece(fragment) is not None:
        kinds = {MASTER: unit.master_dtype, **kinds}
    for kind, dtype in kinds.items():
        key = None if kind == MASTER else kind
        if optimizer.pieces.are_views(unit, slot.bucket, key):
            yield kind, optimizer.pieces.local(slot, key)
        else:
            yield (
                kind,
                reading.of(
                    ("states", unit, slot.bucket),
                    dtype,
                    fragment,
                    partial(unit.states.open, slot.bucket, writes=False),
                    partial(optimizer.pieces.local, slot, key),
                ),
            )


def _whole_counts(unit: Unit, slot: Slot, counts: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """States whose shape differs from the parameter's (Adafactor's rows and columns), where the parameter is whole."""
    for key, value in counts.items():
        if torch.is_tensor(value) and value.numel() != 1 and not unit.is_cut and slot.cut is None:
            yield key, value


def _dormant_pieces(param: torch.nn.Parameter, state: KeptState) -> Iterator[OwnedPiece]:
    """The kept states of a parameter that was frozen during the run, split as in its last layout."""
    if state.speaks:  # otherwise another rank's copy is written
        yield from _kept_pieces(param, state)


def _kept_pieces(param: torch.nn.Parameter, state: KeptState) -> Iterator[OwnedPiece]:
    begin, shape, cut = state.begins[state.comm.rank], shape_of(param), cut_of(param)
    if state.master.numel():
        yield from _cut_pieces(MASTER, state.name, shape, begin, state.master, cut)
    for key, piece in state.pieces.items():
        if piece.numel():
            yield from _cut_pieces(key, state.name, shape, begin, piece, cut)


def _share_out(copies: Iterable[_Whole], rank: int, n_ranks: int) -> Iterator[OwnedPiece]:
    """This rank's part of tensors that all ranks hold alike: a contiguous range of their bytes. Only large tensors are
    split."""
    copies = list(copies)
    total = sum(copy.tensor.nbytes for copy in copies)
    low, high = total * rank // n_ranks, total * (rank + 1) // n_ranks
    at = 0
    for kind, name, tensor in copies:
        begin, at = at, at + tensor.nbytes
        if tensor.nbytes <= UNCUT_BYTES:
            if low <= begin < high if tensor.nbytes else rank == 0:
                yield files.save.OwnedPiece(kind, name, tuple(tensor.shape), 0, tensor.reshape(-1))
            continue
        itemsize = tensor.element_size()
        first = min(max(-(-(low - begin) // itemsize), 0), tensor.numel())
        last = min(max(-(-(high - begin) // itemsize), 0), tensor.numel())
        if last > first:
            flat = tensor.reshape(-1)
            yield files.save.OwnedPiece(kind, name, tuple(tensor.shape), first, flat.narrow(0, first, last - first))


def param_infos(
    layout: Layout, optimizer: ZeroOptimizer | NoOptimizer, dormant: Mapping[torch.nn.Parameter, KeptState], rank: int
) -> dict[str, ParamInfo]:
    """Groups and counts of the trained parameters with elements on this rank. On the first of the ranks with the same
    layers and experts, also the groups of all other parameters."""
    infos: dict[str, ParamInfo] = {}
    for unit in layout.trained:
        for slot in unit.slots:
            if slot in unit.fragment_of:
                counts = optimizer.pieces.kinds(slot)[1]
                kept = {
                    k: v
                    for k, v in counts.items()
                    if not torch.is_tensor(v) or v.numel() == 1 or unit.is_cut or slot.cut
                }
                infos[slot.name] = ParamInfo(group=unit.group, counts=kept)
            elif rank == 0 or (expert_ranks_of(slot.param) > 1 and unit.comm.rank == unit.copy_index == 0):
                infos[slot.name] = ParamInfo(group=unit.group)
    for state in dormant.values():
        if state.counts or rank == 0:
            infos.setdefault(state.name, ParamInfo(group=state.group, counts=dict(state.counts)))
    return infos
