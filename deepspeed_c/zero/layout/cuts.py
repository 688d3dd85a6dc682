"""A rank may hold a part of a parameter: its place in the logical tensor, and the ranks that sum gradients in addition
to the data-parallel ranks. Tensor-parallel ranks hold parts of one layer (``tp_cut``), ranks along ep some of the
experts of a stack (``expert_cut``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import ModelError
from deepspeed_c.inject.cut import Cut, CutBox
from deepspeed_c.zero.weights.param import shape_of, state_of

__all__ = [
    "check_cuts",
    "cut_of",
    "mark_tied",
    "numel_alike",
    "read_marks",
    "summed_over",
    "take_sums_over",
    "tensor_cut_of",
    "tied_over",
]


def cut_of(param: torch.Tensor) -> Cut | None:
    """The part of its logical tensor that ``param`` is; None for a whole parameter."""
    cut = tensor_cut_of(param)
    return getattr(param, "expert_cut", None) if cut is None else cut


def tensor_cut_of(param: torch.Tensor) -> Cut | None:
    """The part of its logical tensor that ``param`` is on a tensor-parallel rank; None where all these ranks hold the
    same tensor."""
    return getattr(param, "tp_cut", None)


def summed_over(param: torch.Tensor, n_ranks: int) -> Sequence[int]:
    """The tensor-parallel ranks that must add up their contributions to the gradient of ``param``; there are
    ``n_ranks`` in all. For a cut parameter they are the holders of a copy of the same heads. For a whole parameter that
    each rank uses on a part of the data (``tp_sum_gradients``) they are all ranks. One rank or none: there is nothing
    to sum."""
    cut = tensor_cut_of(param)
    if cut is not None:
        return cut.copies
    return range(n_ranks) if getattr(param, "tp_sum_gradients", False) else range(1)


def tied_over(param: torch.Tensor) -> Sequence[int]:
    """The pipeline ranks that have a copy of ``param`` in one of their layers and sum its gradient
    (``pipe_tied_ranks``). Empty if only one rank has the parameter."""
    return getattr(param, "pipe_tied_ranks", ())


def mark_tied(param: torch.Tensor, ranks: Sequence[int]) -> None:
    """Stores in ``param`` the pipeline ranks that have a copy of it in one of their layers."""
    param.pipe_tied_ranks = tuple(ranks)


def numel_alike(param: torch.Tensor) -> int:
    """The average number of elements of ``param`` on a rank that holds a part of it. These ranks use it for decisions
    that they must make alike: it is the same on all of them, even if their parts have different sizes."""
    cut = cut_of(param)
    return shape_of(param).numel() if cut is None else cut.logical_shape.numel() // cut.n_ranks


def check_cuts(model: torch.nn.Module, tp: Collectives) -> None:
    """Raises ModelError if ``model`` has been cut already over other ranks than ``tp``."""
    for name, param in model.named_parameters():
        cut = tensor_cut_of(param)
        if cut is not None and (cut.n_ranks, cut.rank) != (tp.world_size, tp.rank):
            raise ModelError(
                f"is part {cut.rank} of {cut.n_ranks} of a logical tensor, and this is tensor-parallel rank {tp.rank} of"
                f" {tp.world_size}",
                where=name,
                fix="use as many tensor-parallel ranks as it was cut over, or build the model anew",
            )


def take_sums_over(model: torch.nn.Module) -> None:
    """Removes the hooks that sum gradients over copies when there is no engine. From now on this engine's buckets sum
    them."""
    for param in model.parameters():
        hook = vars(param).pop("tp_sum_hook", None)
        if hook is not None:
            hook.remove()


def read_marks(model: torch.nn.Module, tp: Collectives) -> None:
    """Sets ``tp_cut`` on the parameters of a model that was cut by hand. Such parameters have only the marks of
    Megatron's layers: ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride``. Ranks may hold parts of
    different sizes.

    Collective over ``tp``, the ranks that hold the model together. Raises ModelError for marks that fit no tensor, and
    if ``zero.Init`` has sharded a part over ranks that hold other parts.
    """
    marked = {
        name: param
        for name, param in model.named_parameters()
        if getattr(param, "tensor_model_parallel", False) and tensor_cut_of(param) is None
    }
    if tp.world_size == 1:
        return
    others = set(tp.global_ranks) - {tp.global_rank}
    for name, param in marked.items():
        state = state_of(param)
        if state is not None and not others.isdisjoint(state.comm.global_ranks):
            raise ModelError(
                f"zero.Init has sharded it over ranks {list(state.comm.global_ranks)}, of which {sorted(others)} hold"
                " other parts of it: these are lost",
                where=name,
                fix="pass zero.Init(mpu=...) or data_parallel_group=..., the ranks that hold the same part",
            )
    shapes = tp.gather_objects([tuple(shape_of(param)) for param in marked.values()], label="shapes of cut parameters")
    for i, (name, param) in enumerate(marked.items()):
        dim, stride = getattr(param, "partition_dim", 0), getattr(param, "partition_stride", 1)
        param.tp_cut = _cut(name, [of_rank[i] for of_rank in shapes], dim, stride, tp.rank)


def _cut(name: str, shapes: Sequence[tuple[int, ...]], dim: int, stride: int, rank: int) -> Cut:
    """The part of rank ``rank`` if the ranks hold ``shapes``. Each rank holds ``stride`` runs along ``dim``; the runs
    are dealt out to the ranks in turn."""
    mine, n_dims = shapes[rank], len(shapes[rank])
    others = [(*shape[:dim], *shape[dim + 1 :]) for shape in shapes]
    if not 0 <= dim < n_dims or stride < 1 or len(set(others)) > 1 or any(shape[dim] % stride for shape in shapes):
        raise ModelError(
            f"is marked as cut along dimension {dim} in {stride} runs, and the ranks hold the shapes {list(shapes)}",
            where=name,
            fix="set partition_dim and partition_stride to the values that it was cut with",
        )
    runs = [shape[dim] // stride for shape in shapes]
    whole = torch.Size((*mine[:dim], sum(runs) * stride, *mine[dim + 1 :]))
    size = (*mine[:dim], runs[rank], *mine[dim + 1 :])
    boxes = []
    for i in range(stride):
        local, logical = [0] * n_dims, [0] * n_dims
        local[dim], logical[dim] = i * runs[rank], i * sum(runs) + sum(runs[:rank])
        boxes.append(CutBox(tuple(local), tuple(logical), size))
    return Cut(whole, tuple(boxes), 1, rank, len(shapes), (rank,))
