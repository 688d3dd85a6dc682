"""Freezing and unfreezing of parameters during a run. This changes the layout, and masters and optimizer states move to
the new layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import ModelError
from deepspeed_c.ops.scope import declaration
from deepspeed_c.zero.states.optimizer import ZeroOptimizer
from deepspeed_c.zero.weights.kinds import is_codes
from deepspeed_c.zero.weights.param import join_pieces, shape_of

__all__ = ["KeptState", "assign_groups", "match_names", "put_states", "take_states"]


class KeptState(NamedTuple):
    """Master and states of one parameter: this rank's flat pieces, split over ``comm`` as in the previous layout. Other
    ranks may hold copies of the same pieces."""

    name: str
    group: int
    begins: list[int]
    numels: list[int]
    master: torch.Tensor
    pieces: dict[str, torch.Tensor]
    counts: dict[str, Any]
    comm: Collectives
    speaks: bool
    """Whether this rank's copy counts; of several ranks with the same pieces only one counts."""


def match_names(model: torch.nn.Module, names: Iterable[str], pipeline: Collectives) -> set[str]:
    """Names of the parameters of the whole model that match ``names`` (names or shell patterns). ``pipeline``: the
    ranks whose models together are the whole.

    Raises ModelError if a name matches no parameter, if one of them is the name of codes, or if no parameter would be
    trained. Collective over ``pipeline``, whose ranks raise alike.
    """
    # Names of parameters, and whether they can be trained.
    mine = {name: p.is_floating_point() and not is_codes(p) for name, p in model.named_parameters()}
    params: dict[str, bool] = {}
    for of_rank in [mine] if pipeline.world_size == 1 else pipeline.gather_objects(mine, label="names of parameters"):
        params |= of_rank
    known = list(params)
    chosen: set[str] = set()
    patterns = [names] if isinstance(names, str) else list(names)
    for pattern in patterns:
        found = {name for name in known if name == pattern or fnmatchcase(name, pattern)}
        if not found:
            raise ModelError(
                f"no parameter is named {pattern!r}",
                where="set_trainable",
                fix=f"names are as model.named_parameters() gives them, such as {known[0]!r}" if known else "",
            )
        chosen |= found
    for name in sorted(chosen):
        if not params[name]:
            raise ModelError(
                f"{name} has codes of a quantized weight, and codes have no gradient",
                where="set_trainable",
                fix="name the parameters of adapters instead",
            )
    if not chosen:
        raise ModelError(
            "nothing would be left to train", where="set_trainable", fix="name at least one parameter or pattern"
        )
    return chosen


def take_states(
    optimizer: ZeroOptimizer, dormant: Mapping[torch.nn.Parameter, KeptState]
) -> tuple[dict[torch.nn.Parameter, KeptState], dict[torch.nn.Parameter, int]]:
    """Copies of masters and states of trained and formerly trained parameters, and the group of each parameter."""
    kept = dict(dormant)
    for slot in sorted(optimizer.reducer.slots, key=lambda slot: slot.order):
        begins, numels = slot.unit.ranges_of(slot)
        with slot.unit.states.open(slot.bucket, writes=False):
            master = optimizer.pieces.local(slot, None)
            pieces, counts = optimizer.pieces.named(slot)
            kept[slot.param] = KeptState(
                slot.name,
                slot.unit.group,
                begins,
                numels,
                torch.empty(0, dtype=slot.unit.master_dtype) if master is None else master.detach().clone(),
                {key: piece.detach().clone() for key, piece in pieces.items()},
                {key: value.clone() if torch.is_tensor(value) else value for key, value in counts.items()},
                slot.unit.comm,
                slot.unit.speaks,
            )
    return kept, {param: state.group for param, state in kept.items()}


def assign_groups(
    model: torch.nn.Module, base: torch.optim.Optimizer, groups: Mapping[torch.nn.Parameter, int]
) -> None:
    """Puts the parameters that now require gradients into the base optimizer's groups, and clears its state."""
    base.state.clear()
    for group in base.param_groups:
        group["params"] = []
    for param in model.parameters():
        if not param.requires_grad:
            continue
        index = groups.get(param)
        if index is None:
            is_matrix = len(shape_of(param)) >= 2
            scope_of = declaration(base).scope_of_group
            groups_of_kind = (i for i in range(len(base.param_groups)) if (scope_of(i) == "matrix") == is_matrix)
            index = next(groups_of_kind, 0)
        base.param_groups[index]["params"].append(param)


def _states_everywhere(
    kept: Mapping[torch.nn.Parameter, KeptState], comm: Collectives
) -> dict[str, tuple[dict[str, torch.dtype], dict[str, Any]]]:
    """Names and dtypes of the states, and the counts, of every parameter. They are exchanged, because a rank that owned
    nothing of a parameter does not know them."""
    mine = {
        state.name: ({key: piece.dtype for key, piece in state.pieces.items()}, state.counts)
        for state in kept.values()
        if state.pieces or state.counts
    }
    merged: dict[str, tuple[dict[str, torch.dtype], dict[str, Any]]] = {}
    for theirs in comm.gather_objects(mine, label="optimizer states"):
        for name, known in theirs.items():
            merged.setdefault(name, known)
    return merged


def put_states(optimizer: ZeroOptimizer, kept: Mapping[torch.nn.Parameter, KeptState]) -> None:
    """Writes masters and states to the parameters that are trained in the new layout, one parameter at a time.
    Collective."""
    known = _states_everywhere(kept, optimizer.comm)
    states: dict[Any, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {}
    for slot in sorted(optimizer.reducer.slots, key=lambda slot: slot.order):
        state = kept.get(slot.param)
        if state is None:
            continue
        fragment = slot.unit.fragment_of.get(slot)

        def mine(piece: torch.Tensor, state=state, slot=slot, fragment=fragment) -> torch.Tensor | None:
            whole = join_pieces(piece, state.begins, state.numels, state.comm, slot.unit.device, state.name)
            return None if fragment is None else whole.narrow(0, fragment.begin, fragment.numel)

        master = mine(state.master)
        if master is not None:
            with slot.unit.states.open(slot.bucket), torch.no_grad():
                present = optimizer.pieces.local(slot, None)
                # The master is only used if it still agrees with the weight: a weight that was replaced while it was
                # frozen is newer.
                if torch.equal(master.to(slot.unit.dtype), present.to(slot.unit.dtype)):
                    present.copy_(master)
        dtypes, counts = known.get(state.name, ({}, {}))
        pieces = {}
        for key, dtype in dtypes.items():
            pieces[key] = mine(state.pieces.get(key, torch.empty(0, dtype=dtype, device=slot.unit.device)))
        if fragment is not None and (pieces or counts):
            states[slot] = pieces, counts
    for unit in optimizer.units:
        for bucket in range(unit.n_buckets):
            with unit.states.open(bucket):
                optimizer.pieces.put(unit, bucket, states)
