"""Writes a model that is cut into stages as one folder in Hugging Face's layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from deepspeed_c.checkpoint.formats.model_folder import ModelFolderWriter, parse_size
from deepspeed_c.comm.axes import DATA, PP, TP
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.errors import CheckpointError
from deepspeed_c.offload.place import raise_together
from deepspeed_c.zero.weights.gathered import GatheredParameters
from deepspeed_c.zero.weights.param import shape_of

__all__ = ["Joins", "save_folder"]


class Joins(Protocol):
    """Puts whole tensors together from the parts of a stage's ranks."""

    def shape(self, name: str, tensor: torch.Tensor) -> torch.Size:
        """The shape of the whole tensor."""
        ...

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole tensor. Collective over the ranks of the stage that hold parts of it."""
        ...


def save_folder(
    folder: str,
    save_beside: Callable[[str], None],
    names: Sequence[str],
    own: Mapping[str, torch.Tensor],
    mesh: Mesh,
    parts: Joins | None,
    *,
    max_shard_size: int | str,
) -> None:
    """Write the tensors ``names``. ``own``: the tensors of this rank by name; they may be sharded. ``save_beside``:
    writes the other files into a folder, on rank 0. ``parts``: None if each rank has whole tensors. Collective. Rank 0
    writes, and holds one tensor of other ranks at a time.

    Raises CheckpointError on all ranks if it cannot be written; an older model there is intact then.
    """
    parse_size(max_shard_size)  # before the first collective
    me = mesh.index(PP)
    mine = {name: (tuple(shape_of(t) if parts is None else parts.shape(name, t)), t.dtype) for name, t in own.items()}
    found = mesh.comm.gather_objects((me, mine), label="tensors to save")
    owners: dict[str, int] = {}
    forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for stage_rank, tensors in sorted(found, key=lambda pair: pair[0]):
        for name, form in tensors.items():
            owners.setdefault(name, stage_rank)
            forms.setdefault(name, form)
    problem: CheckpointError | None = None
    writer: ModelFolderWriter | None = None
    if mesh.comm.rank == 0:
        try:
            writer = ModelFolderWriter(
                folder, [(name, *forms[name]) for name in names], max_shard_size=max_shard_size
            ).__enter__()
        except CheckpointError as error:
            problem = error
    device = next(iter(own.values())).device if own else torch.device("cpu")
    try:
        is_first = mesh.index(*DATA) == 0
        # Each name is sent even if rank 0 cannot write: the other ranks wait for it.
        for name in names:
            whole = None
            with GatheredParameters([own[name]] if me == owners[name] else []):
                if is_first and me == owners[name]:
                    whole = own[name].detach() if parts is None else parts.whole(name, own[name].detach())
                if is_first and mesh.index(TP) == 0 and me in (0, owners[name]):
                    whole = _bring(name, owners[name], whole, forms[name], mesh.pipeline, device)
                if writer is not None and problem is None:
                    try:
                        writer.write(name, whole)
                    except (OSError, CheckpointError) as error:
                        problem = _as_checkpoint_error(error, folder)
        if writer is not None and problem is None:
            try:
                save_beside(writer.staging)
            except (OSError, ValueError) as error:
                problem = _as_checkpoint_error(error, folder)
    except BaseException as failure:
        if writer is not None:
            writer.__exit__(type(failure), failure, None)
        raise
    if writer is not None:
        try:
            writer.__exit__(type(problem) if problem else None, problem, None)
        except (OSError, CheckpointError) as error:
            problem = problem or _as_checkpoint_error(error, folder)
    raise_together(problem, CheckpointError, folder, mesh.comm)


def _bring(
    name: str,
    owner: int,
    whole: torch.Tensor | None,
    form: tuple[tuple[int, ...], torch.dtype],
    ranks: Collectives,
    device: torch.device,
) -> torch.Tensor:
    """Send a tensor from ``owner`` to the first rank of the pipeline, where it is returned; both call it."""
    shape, dtype = form
    data = torch.empty(shape, dtype=dtype, device=device) if whole is None else whole.contiguous()
    if owner != 0 and data.numel():
        ranks.message(data, owner, 0, label=f"save {name}").wait()
    return data


def _as_checkpoint_error(error: Exception, folder: str) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(
        f"the model could not be written: {error}", where=folder, fix="name a folder with room that you may write to"
    )
