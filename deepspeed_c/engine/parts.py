"""Puts whole tensors together from the parts of ranks, brings together the experts of all ranks, and takes a rank's own
from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from deepspeed_c.comm.axes import EP
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.errors import StateError
from deepspeed_c.inject.cut import Cut
from deepspeed_c.zero.layout.cuts import cut_of, tensor_cut_of
from deepspeed_c.zero.layout.experts import ExpertNames, expert_ranks_of
from deepspeed_c.zero.weights.param import shape_of

__all__ = ["Parts", "take_parts"]


class _HeldParts(NamedTuple):
    """The ranks that together hold a logical tensor, and the part of each."""

    comm: Collectives
    cuts: list[Cut]


class Parts:
    """The parts that the ranks of ``mesh`` hold of the ``tensors`` of ``module``: cuts over tensor-parallel ranks, and
    experts. The constructor is collective."""

    def __init__(self, module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], mesh: Mesh) -> None:
        self._mesh = mesh
        self._experts = ExpertNames(module)
        self._holders: dict[str, _HeldParts] = {}
        mine = {name: cut for name, tensor in tensors.items() if (cut := tensor_cut_of(tensor)) is not None}
        self._add(mesh.tensors, mine)
        sizes = {name: expert_ranks_of(tensor) for name, tensor in tensors.items() if name not in mine}
        for n_ranks in sorted(set(sizes.values()) - {1}):
            stacks = {
                name: cut for name in sizes if sizes[name] == n_ranks and (cut := cut_of(tensors[name])) is not None
            }
            self._add(mesh.with_experts(n_ranks).along(EP), stacks)

    def _add(self, comm: Collectives, mine: Mapping[str, Cut]) -> None:
        everyone = comm.gather_objects(mine, label="cuts of parameters")
        self._holders |= {name: _HeldParts(comm, [cuts[name] for cuts in everyone]) for name in mine}

    def is_spread(self, name: str) -> bool:
        """Whether ``everyone`` needs other ranks for this tensor. The same on all ranks."""
        return name in self._holders or len(self.names(name)) > 1

    def names(self, name: str) -> list[str]:
        """The names of the tensors that ``everyone`` yields for ``name``: one for each rank that holds another expert
        under this name."""
        return self._experts.on_all_ranks(name)

    def everyone(self, name: str, part: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) for this rank's ``part`` of the tensor ``name``, and for the other experts that other
        ranks call by this name. Collective over all ranks of the mesh: iterate to the end."""
        whole = self.whole(name, part)
        names = self.names(name)
        if len(names) == 1:
            yield name, whole
            return
        ep = self._mesh.with_experts(len(names)).along(EP)
        for rank, logical in enumerate(names):
            sent = (
                whole.contiguous()
                if rank == ep.rank
                else torch.empty_like(whole, memory_format=torch.contiguous_format)
            )
            ep.broadcast(sent, rank, label=logical)
            yield logical, sent

    def shape(self, name: str, tensor: torch.Tensor) -> torch.Size:
        """The shape of the whole tensor."""
        holders = self._holders.get(name)
        return torch.Size(shape_of(tensor)) if holders is None else holders.cuts[0].logical_shape

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole tensor that this rank's ``part`` belongs to, in the part's dtype; ``part`` itself if it is whole.
        Collective over the ranks that hold the model together."""
        holders = self._holders.get(name)
        if holders is None:
            return part
        comm, cuts = holders
        sent = part.new_zeros(max(cut.local_shape.numel() for cut in cuts))
        sent.narrow(0, 0, part.numel()).copy_(part.reshape(-1))
        whole = part.new_empty(cuts[0].logical_shape)
        for cut, flat in zip(cuts, comm.all_gather_list(sent, label=f"parts of {name}")):
            cut.put(flat.narrow(0, 0, cut.local_shape.numel()).view(cut.local_shape), whole)
        return whole


def take_parts(module: torch.nn.Module, whole: Mapping[str, Any], *, strict: bool = False) -> Mapping[str, Any]:
    """A copy of the state dict ``whole`` with what this rank holds. This rank's part replaces each tensor that
    ``module`` holds only a part of; a tensor that has the part's shape already stays as it is. This rank's experts,
    under its own names, replace the experts of all ranks.

    Raises StateError, if ``strict``, on all ranks alike where experts of any rank are missing.
    """
    whole = _take_experts(module, whole, strict)
    cuts = {
        name: cut for name, tensor in module.state_dict(keep_vars=True).items() if (cut := cut_of(tensor)) is not None
    }
    if not cuts:
        return whole
    return {
        name: cuts[name].take(value)
        if name in cuts and torch.is_tensor(value) and value.shape == cuts[name].logical_shape
        else value
        for name, value in whole.items()
    }


def _take_experts(module: torch.nn.Module, whole: Mapping[str, Any], strict: bool) -> Mapping[str, Any]:
    numbered = ExpertNames(module)
    if not numbered or not numbered.has_all(whole):
        return whole
    own = {numbered.logical(name): name for name in module.state_dict(keep_vars=True)}
    everyone = {name: None for local in own.values() for name in numbered.on_all_ranks(local)}
    missing = [name for name in everyone if name not in whole]
    if strict and missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise StateError(
            f"the state dict does not fit the model: missing: {', '.join(missing[:5])}{more}",
            where="load_module_state_dict",
            fix="load the state dict of all experts, or pass strict=False for what is missing",
        )
    others = everyone.keys() - own.keys()
    return {own.get(name, name): value for name, value in whole.items() if name not in others}
