"""Check once, before any other exchange, that all ranks have the same model and configuration."""

from __future__ import annotations

import hashlib

import torch

from deepspeed_c.comm.axes import PP, TOKENS, WITHIN_STAGE
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.errors import RankMismatchError
from deepspeed_c.zero.layout.cuts import tensor_cut_of, tied_over
from deepspeed_c.zero.layout.experts import ExpertNames, expert_ranks_of, holders_of
from deepspeed_c.zero.weights.kinds import beside_codes, describe_codes
from deepspeed_c.zero.weights.param import shape_of, state_of

__all__ = ["broadcast_model", "check_same_model", "check_same_text"]


def check_same_text(what: str, lines: list[str], comm: Collectives, fix: str) -> None:
    """Raises RankMismatchError on every rank alike unless all ranks pass the same lines. The error names the first line
    that differs.

    Digests are compared first: they have the same length everywhere, so that the check cannot hang on ranks whose
    lists differ.
    """
    if comm.world_size == 1:
        return
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    numbers = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 24, 4)]
    if len({tuple(row) for row in zip(*(comm.gather_numbers(n) for n in numbers))}) == 1:
        return
    everyone: list[list[str]] = comm.gather_objects(lines)
    mine, first = everyone[0], next(r for r, other in enumerate(everyone) if other != everyone[0])
    theirs = everyone[first]
    for a, b in zip(mine, theirs):
        if a != b:
            raise RankMismatchError(
                f"{what} differs: rank 0 has {a!r}, rank {first} has {b!r}", where="initialize", fix=fix
            )
    longer, rank = (mine, 0) if len(mine) > len(theirs) else (theirs, first)
    extra = longer[min(len(mine), len(theirs))]
    raise RankMismatchError(
        f"{what} differs: rank 0 has {len(mine)} entries, rank {first} has {len(theirs)}; only rank {rank} has {extra!r}",
        where="initialize",
        fix=fix,
    )


def check_same_model(model: torch.nn.Module, comm: Collectives) -> None:
    """Checks that names, shapes, dtypes and requires_grad of all parameters and buffers agree over ``comm``, the ranks
    that hold the same layers. If a parameter was cut by hand (it has Megatron's marks), its shape may differ in the cut
    dimension."""
    lines = [
        f"{name} {_shape_to_agree_on(p)} {p.dtype}{'' if p.requires_grad else ' frozen'}{_expert_group(p)}{_codes_of(p)}"
        for name, p in model.named_parameters()
    ]
    lines += [f"{name} {tuple(b.shape)} {b.dtype} buffer" for name, b in model.named_buffers()]
    check_same_text("the model", lines, comm, "build the same model on every rank, with the same parameters frozen")


def _codes_of(param: torch.nn.Parameter) -> str:
    return f", {text}" if (text := describe_codes(param)) else ""


def _expert_group(param: torch.nn.Parameter) -> str:
    return "" if getattr(param, "allreduce", True) else f" of an expert, {getattr(param, 'group_name', None)}"


def _shape_to_agree_on(param: torch.nn.Parameter) -> str:
    shape = list(map(str, shape_of(param)))
    if getattr(param, "tensor_model_parallel", False):
        dim = getattr(param, "partition_dim", 0)
        if 0 <= dim < len(shape):
            shape[dim] = "cut"
        return f"({', '.join(shape)}) tensor_model_parallel"
    return str(tuple(shape_of(param)))


def broadcast_model(model: torch.nn.Module, mesh: Mesh, device: torch.device) -> None:
    """Gives every rank the weights and buffers of the first rank with the same layers. They are sent through memory of
    ``device``. The parts of a cut parameter are sent by the first data-parallel rank, a parameter that stages share by
    the first of these stages, and an expert by the first of the ranks that hold it."""
    if mesh.comm.world_size == 1:
        return
    numbered = ExpertNames(model)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers(), *beside_codes(model).items()]:
            if state_of(tensor) is not None:
                continue  # sharded under zero.Init, from rank 0's values
            comm = mesh.stage if tensor_cut_of(tensor) is None else mesh.tokens
            if (n_ranks := max(numbered.n_ranks(name), expert_ranks_of(tensor))) > 1:
                comm = holders_of(mesh, n_ranks, WITHIN_STAGE)
            if tied := tied_over(tensor):
                comm = mesh.among(tied, PP, *(WITHIN_STAGE if tensor_cut_of(tensor) is None else TOKENS))
            data = tensor.data
            if data.numel() == 0:
                continue
            whole = data.to(device).contiguous()
            comm.broadcast(whole, 0)
            if whole.data_ptr() != data.data_ptr():
                data.copy_(whole)
