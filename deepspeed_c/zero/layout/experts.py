"""Experts that are spread over ranks along the axis ep: the number of ranks that their parameters differ over, and
their names by global number.

A rank numbers its own experts from 0, so one name stands for another expert on each rank along ep. Layouts and
checkpoints use the expert's number among all experts instead. Such a name is the same for any number of ranks. Experts
that lie stacked in one parameter have one name anyway: a rank holds a part of the stack (``cut_of_stack``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from deepspeed_c.comm.axes import COPIES, EP, SHARDS, TOKENS, WITHIN_STAGE
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.errors import CommError, ModelError
from deepspeed_c.inject.cut import Cut, CutBox

__all__ = [
    "ExpertNames",
    "check_experts",
    "connect_holders",
    "cut_of_stack",
    "cuts_of_all",
    "expert_ranks_of",
    "holders_of",
    "mark_stack",
]

# DeepSpeed's name for the list of a layer's experts on one rank.
_LIST = "deepspeed_experts"
_IN_LIST = re.compile(rf"{_LIST}\.(\d+)(?=\.)")
_GROUP_NAME = re.compile(r"ep_size_([1-9]\d*)")


def expert_ranks_of(param: torch.Tensor) -> int:
    """The number of ranks that the experts of a layer are spread over, from the marks of one expert's parameter:
    ``allreduce`` (False) and ``group_name`` ("ep_size_4"). 1 for a parameter that is no expert's.

    Raises ModelError for marks that do not give the number.
    """
    if getattr(param, "allreduce", True):
        return 1
    name = getattr(param, "group_name", None)
    found = _GROUP_NAME.fullmatch(str(name))
    if found is None:
        raise ModelError(
            f"a parameter of shape {tuple(param.shape)} is marked as an expert's (allreduce = False), and its group_name"
            f" is {name!r}",
            where="expert parameters",
            fix='set group_name to "ep_size_N", with the number N of ranks that the experts are spread over',
        )
    return int(found[1])


def holders_of(mesh: Mesh, n_ranks: int, axes: Sequence[str] = TOKENS) -> Collectives:
    """The ranks along ``axes`` that hold the same experts as this rank, if experts are spread over ``n_ranks`` ranks.
    By default they see different tokens. Collective at the first call, as ``Mesh.along`` is."""
    return mesh.with_experts(n_ranks).along(*(axis for axis in axes if axis != EP))


def connect_holders(mesh: Mesh, n_ranks: int) -> None:
    """Makes the groups for experts that are spread over ``n_ranks`` ranks: those that together hold the experts, and
    those that hold the same experts, or the same shards of them. Collective over the mesh.

    All stages of a pipeline make them, whether they have experts or not: torch names a group after the number of groups
    that a rank has made.
    """
    mesh.with_experts(n_ranks).along(EP)
    for axes in (TOKENS, SHARDS, COPIES, WITHIN_STAGE):
        holders_of(mesh, n_ranks, axes)


def cut_of_stack(shape: torch.Size, dim: int, n_runs: int, rank: int, n_ranks: int) -> Cut:
    """The part that rank ``rank`` of ``n_ranks`` holds of a stack of experts: the same share of each of ``n_runs`` runs
    along ``dim``. A run has an element, or a block, of every expert in turn."""
    run = shape[dim] // n_runs
    share = run // n_ranks
    size = (*shape[:dim], share, *shape[dim + 1 :])
    boxes = []
    for i in range(n_runs):
        local, logical = [0] * len(shape), [0] * len(shape)
        local[dim], logical[dim] = i * share, i * run + rank * share
        boxes.append(CutBox(tuple(local), tuple(logical), size))
    return Cut(shape, tuple(boxes), 1, rank, n_ranks, (rank,))


def mark_stack(param: torch.nn.Parameter, cut: Cut) -> None:
    """Marks ``param`` as the part ``cut`` of a stack of experts."""
    param.expert_cut, param.allreduce, param.group_name = cut, False, f"ep_size_{cut.n_ranks}"


def cuts_of_all(cut: Cut) -> list[Cut]:
    """The parts of all ranks of the stack that ``cut`` is a part of."""
    shape, size = cut.logical_shape, cut.boxes[0].size
    dim = next((dim for dim in range(len(shape)) if shape[dim] != size[dim]), 0)
    return [cut_of_stack(shape, dim, len(cut.boxes), rank, cut.n_ranks) for rank in range(cut.n_ranks)]


class _ExpertList(NamedTuple):
    """The experts of one layer on this rank."""

    first: int  # number of the first of them among the layer's experts
    n_local: int
    n_ranks: int


class ExpertNames:
    """The names of a module's tensors with experts numbered over all ranks."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._lists: dict[str, _ExpertList] = {}
        for name, layer in module.named_modules(remove_duplicate=False):
            experts = getattr(layer, _LIST, None)
            if isinstance(experts, torch.nn.ModuleList):
                n_ranks = max((expert_ranks_of(param) for param in experts.parameters()), default=1)
                prefix = f"{name}.{_LIST}" if name else _LIST
                self._lists[prefix] = _ExpertList(getattr(layer, "first_expert", 0), len(experts), n_ranks)

    def __bool__(self) -> bool:
        """Whether any experts are spread over ranks."""
        return any(found.n_ranks > 1 for found in self._lists.values())

    def n_ranks(self, name: str) -> int:
        """The number of ranks that the tensor ``name`` differs over; 1 for a tensor that is no expert's."""
        split = self._split(name)
        return 1 if split is None else split[1].n_ranks

    def is_experts(self, name: str) -> bool:
        """Whether ``name`` is the name of an expert's tensor."""
        return self._split(name) is not None

    def logical(self, name: str) -> str:
        """The name with the expert's number among all experts, for this rank's own ``name``."""
        split = self._split(name)
        if split is None:
            return name
        prefix, found, local, rest = split
        return f"{prefix}.{found.first + local}{rest}"

    def on_all_ranks(self, name: str) -> list[str]:
        """The logical names of the tensor that each rank along ep calls ``name``, in the order of these ranks."""
        split = self._split(name)
        if split is None:
            return [name]
        prefix, found, local, rest = split
        return [f"{prefix}.{rank * found.n_local + local}{rest}" for rank in range(found.n_ranks)]

    def has_all(self, names: Iterable[str]) -> bool:
        """Whether ``names``, of a state dict, are those of all experts, and not only of one rank's."""
        return any(split is not None and split[2] >= split[1].n_local for split in map(self._split, names))

    def _split(self, name: str) -> tuple[str, _ExpertList, int, str] | None:
        """(prefix of the list, the list, number, rest of the name) of an expert's tensor."""
        for found in _IN_LIST.finditer(name):
            prefix = name[: found.start() + len(_LIST)]
            if prefix in self._lists:
                return prefix, self._lists[prefix], int(found[1]), name[found.end() :]
        return None


def check_experts(model: torch.nn.Module, mesh: Mesh) -> list[int]:
    """The numbers of ranks that experts of ``model`` are spread over, in ascending order.

    Raises ModelError where experts cannot be spread so over the ranks of ``mesh``.
    """
    found: set[int] = set()
    for name, param in model.named_parameters():
        if getattr(param, "allreduce", True):
            continue
        n_ranks = expert_ranks_of(param)
        try:
            mesh.with_experts(n_ranks)
        except CommError as error:
            raise ModelError(error.what, where=f"{name}: ep_size", fix=error.fix) from error
        found.add(n_ranks)
    return sorted(found)
