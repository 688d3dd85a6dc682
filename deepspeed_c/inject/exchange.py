"""Messages between tensor-parallel ranks, as operators with fakes. Each call is entered in the ledger of its group.

After an operator whose name ends in ``start``, its result must not be used until ``tp_wait_`` has been called on it.
Ranks wait in the same order. ``ranks`` is the number of a ``Collectives`` (``number_of``). Tensors are float32,
bfloat16 or float16. Sums are in rank order, so they have the same bits on all ranks.

[Note: versions] torch counts the tensors that its own operators overwrite. These operators have to count by themselves:
code that keeps a product for a recomputation or a backward must notice that a sum over ranks has replaced the product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.numbered import collectives_of, number_of
from deepspeed_c.comm.work import Work
from deepspeed_c.errors import ModelError

__all__ = [
    "gather_start",
    "gathered",
    "scatter_start",
    "settle",
    "sum_",
    "sum_start",
    "token_sizes",
    "wait",
]

SUMMED = (torch.float32, torch.bfloat16, torch.float16)

# Collectives under way, by the address of their result. The tensor is kept, so that no other tensor gets the address.
_under_way: dict[int, tuple[Work, torch.Tensor]] = {}


def token_sizes(n_tokens: int, n_ranks: int) -> list[int]:
    """Number of tokens of each rank. Where the tokens do not divide, the first ranks have one token more."""
    return [n_tokens // n_ranks + (rank < n_tokens % n_ranks) for rank in range(n_ranks)]


def _check(tensor: torch.Tensor, label: str) -> None:
    if tensor.dtype not in SUMMED:
        raise ModelError(
            f"{tensor.dtype} cannot be summed over tensor-parallel ranks",
            where=label,
            fix="use float32, bfloat16 or float16",
        )


def _begin(result: torch.Tensor, work: Work) -> torch.Tensor:
    if result.numel():
        _under_way[result.data_ptr()] = work, result
    return result


def _sum(x: torch.Tensor, ranks: int, label: str) -> None:
    _check(x, label)
    increment_version(x)  # [Note: versions]
    collectives_of(ranks).all_reduce(x.view(-1), label=label).wait()


def _sum_start(x: torch.Tensor, ranks: int, label: str) -> torch.Tensor:
    _check(x, label)
    total = x.clone(memory_format=torch.contiguous_format)
    return _begin(total, collectives_of(ranks).all_reduce(total.view(-1), label=label))


def _sum_start_inplace(x: torch.Tensor, ranks: int, label: str) -> None:
    _check(x, label)
    increment_version(x)  # [Note: versions]
    _begin(x, collectives_of(ranks).all_reduce(x.view(-1), label=label))


def _gather(x: torch.Tensor, sizes: Sequence[int], dim: int, ranks: int, label: str) -> torch.Tensor:
    comm = collectives_of(ranks)
    shape = (*x.shape[:dim], max(sizes), *x.shape[dim + 1 :])
    # Collectives carry equal sizes, so a shorter part is padded.
    of_ranks = x.new_empty((len(sizes), *shape))
    mine = of_ranks[comm.rank]
    mine.narrow(dim, 0, x.shape[dim]).copy_(x)
    mine.narrow(dim, x.shape[dim], shape[dim] - x.shape[dim]).zero_()
    return _begin(of_ranks, comm.all_gather(of_ranks.view(-1), label=label))


def _scatter(x: torch.Tensor, sizes: Sequence[int], dim: int, ranks: int, label: str) -> torch.Tensor:
    _check(x, label)
    shape = (*x.shape[:dim], max(sizes), *x.shape[dim + 1 :])
    of_ranks = x.new_empty((len(sizes), *shape))
    for part, own in zip(x.split(list(sizes), dim), of_ranks, strict=True):
        own.narrow(dim, 0, part.shape[dim]).copy_(part)
        own.narrow(dim, part.shape[dim], shape[dim] - part.shape[dim]).zero_()
    total = x.new_empty(shape)
    return _begin(total, collectives_of(ranks).reduce_scatter(of_ranks.view(-1), total.view(-1), label=label))


def _wait(x: torch.Tensor) -> None:
    found = _under_way.pop(x.data_ptr(), None) if x.numel() else None
    if found is not None:
        found[0].wait()


def _nothing(*arguments: object) -> None:
    """Fake for operators that mutate their arguments: nothing happens to a fake tensor."""


def _fake_gather(x: torch.Tensor, sizes: Sequence[int], dim: int, ranks: int, label: str) -> torch.Tensor:
    return x.new_empty((len(sizes), *x.shape[:dim], max(sizes), *x.shape[dim + 1 :]))


def _fake_scatter(x: torch.Tensor, sizes: Sequence[int], dim: int, ranks: int, label: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:dim], max(sizes), *x.shape[dim + 1 :]))


def _fake_sum(x: torch.Tensor, ranks: int, label: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_LIBRARY = torch.library.Library("deepspeed_c", "FRAGMENT")
for _schema, _kernel, _fake in (
    ("tp_sum_(Tensor(a!) x, int ranks, str label) -> ()", _sum, _nothing),
    ("tp_sum_start(Tensor x, int ranks, str label) -> Tensor", _sum_start, _fake_sum),
    ("tp_sum_start_(Tensor(a!) x, int ranks, str label) -> ()", _sum_start_inplace, _nothing),
    ("tp_gather_start(Tensor x, int[] sizes, int dim, int ranks, str label) -> Tensor", _gather, _fake_gather),
    ("tp_scatter_start(Tensor x, int[] sizes, int dim, int ranks, str label) -> Tensor", _scatter, _fake_scatter),
    ("tp_wait_(Tensor(a!) x) -> ()", _wait, _nothing),
):
    _LIBRARY.define(_schema)
    _name = _schema.partition("(")[0]
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _kernel, _device)
    _LIBRARY.impl(_name, _fake, "Meta")

_ops = torch.ops.deepspeed_c


def sum_(x: torch.Tensor, comm: Collectives, label: str, *, waits: bool = True) -> None:
    """Replaces contiguous ``x`` by the sum of ``x`` over all ranks. waits: if False, the sum is there only after
    ``wait``.
    """
    (_ops.tp_sum_ if waits else _ops.tp_sum_start_)(x, number_of(comm), label)


def sum_start(x: torch.Tensor, comm: Collectives, label: str) -> torch.Tensor:
    """A new tensor that holds the sum of ``x`` over all ranks after ``wait``."""
    return _ops.tp_sum_start(x, number_of(comm), label)


def gather_start(x: torch.Tensor, sizes: Sequence[int], dim: int, comm: Collectives, label: str) -> torch.Tensor:
    """A new tensor [ranks, *shape] that holds every rank's ``x`` after ``wait``. Each ``x`` has ``sizes[rank]``
    elements along ``dim`` and is padded to the largest size. ``gathered`` joins the parts.
    """
    return _ops.tp_gather_start(x, list(sizes), dim, number_of(comm), label)


def gathered(of_ranks: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
    """The result of ``gather_start`` as one tensor: the ranks' parts one after the other along ``dim``."""
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(of_ranks, sizes, strict=True)], dim=dim)


def scatter_start(x: torch.Tensor, sizes: Sequence[int], dim: int, comm: Collectives, label: str) -> torch.Tensor:
    """A new tensor that holds this rank's part of the sum of ``x`` over all ranks after ``wait``. The part has
    ``sizes[rank]`` elements along ``dim``, and is padded to the largest size with zeros.
    """
    return _ops.tp_scatter_start(x, list(sizes), dim, number_of(comm), label)


def settle() -> None:
    """Wait for all collectives under way, in the order of their starts. Used where the code that was to wait has
    failed.
    """
    for _, result in list(_under_way.values()):
        wait(result)


def wait(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` when the collective that was started on it is over."""
    _ops.tp_wait_(x.detach())
    return x
