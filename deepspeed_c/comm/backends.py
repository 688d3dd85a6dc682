"""The engine's collectives over each backend of ``torch.distributed``, in the fastest way that the backend has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from deepspeed_c.comm.described import all_to_all_described, as_bytes, message_described, shift_described
from deepspeed_c.comm.work import Handle, Work, wait_all

if TYPE_CHECKING:
    from deepspeed_c.comm.collectives import Collectives

__all__ = [
    "GENERIC",
    "GLOO",
    "Backend",
    "all_gather_single",
    "backend_named",
    "broadcast_slices",
    "reduce_scatter_single",
]

# torch 2.13 renamed these two functions and warns about the old names; torch 2.10 has only the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _exchange_then_reduce(
    comm: Collectives, flat: torch.Tensor, out: torch.Tensor, scale: float, accumulate: bool, label: str
) -> Work:
    """Each rank receives its slice from all ranks and adds the slices up itself."""
    received = comm.scratch.take(flat.numel(), flat.dtype, flat.device)
    handle = dist.all_to_all_single(received, flat, group=comm.group, async_op=True)

    def finish() -> None:
        comm.reduce(list(received.view(comm.world_size, -1)), scale, accumulate, out)
        comm.scratch.give(received)

    return Work([handle], finish=finish, kept=[flat, out], what=f"reduce_scatter of {flat.numel()} {flat.dtype}")


def _reduce_scatter_by_backend(
    comm: Collectives, flat: torch.Tensor, out: torch.Tensor, scale: float, accumulate: bool, label: str
) -> Work:
    """The backend computes the sum, in the dtype of ``flat``. Scaling and accumulating into ``out`` happen here."""
    what = f"reduce_scatter of {flat.numel()} {flat.dtype}"
    if scale == 1.0 and not accumulate and out.dtype == flat.dtype:
        handle = reduce_scatter_single(out, flat, group=comm.group, async_op=True)
        return Work([handle], kept=[flat, out], what=what)
    received = comm.scratch.take(out.numel(), flat.dtype, flat.device)
    handle = reduce_scatter_single(received, flat, group=comm.group, async_op=True)

    def finish() -> None:
        comm.reduce([received], scale, accumulate, out)
        comm.scratch.give(received)

    return Work([handle], finish=finish, kept=[flat, out], what=what)


def broadcast_slices(comm: Collectives, flat: torch.Tensor, label: str) -> Work:
    """An all-gather made of one broadcast for each slice, all of them at once, on any backend.

    Over gloo this is 3 to 5 times as fast as gloo's all_gather, which copies into lists.
    """
    broadcast = comm.backend_of(flat).broadcast
    handles = [broadcast(comm, part, r, label) for r, part in enumerate(flat.view(comm.world_size, -1))]
    return Work(handles, kept=[flat], what=f"all_gather of {flat.numel()} {flat.dtype}")


def _all_gather_by_backend(comm: Collectives, flat: torch.Tensor, label: str) -> Work:
    handle = all_gather_single(as_bytes(flat), as_bytes(comm.own_slice(flat)), group=comm.group, async_op=True)
    return Work([handle], kept=[flat], what=f"all_gather of {flat.numel()} {flat.dtype}")


def _all_reduce_by_backend(comm: Collectives, flat: torch.Tensor, scale: float, label: str) -> Work:
    handle = dist.all_reduce(flat, group=comm.group, async_op=True)
    finish = None if scale == 1.0 else lambda: comm.reduce([flat], scale, False, flat)
    return Work([handle], finish=finish, kept=[flat], what=f"all_reduce of {flat.numel()} {flat.dtype}")


def _exchange_reduce_broadcast(comm: Collectives, flat: torch.Tensor, scale: float, label: str) -> Work:
    """Each rank sums one piece, as ``_exchange_then_reduce`` does, and sends the sum to all ranks. Lengths of pieces
    differ by at most 1.
    """
    n, rank, numel = comm.world_size, comm.rank, flat.numel()
    sizes = [numel // n + (r < numel % n) for r in range(n)]
    pieces = flat.split(sizes)
    received = comm.scratch.take(n * sizes[rank], flat.dtype, flat.device)
    handle = dist.all_to_all_single(received, flat, [sizes[rank]] * n, sizes, group=comm.group, async_op=True)
    what = f"all_reduce of {numel} {flat.dtype}"

    def finish() -> None:
        if sizes[rank]:
            comm.reduce(list(received.view(n, -1)), scale, False, pieces[rank])
        comm.scratch.give(received)
        wait_all(
            [_broadcast_by_backend(comm, piece, r, label) for r, piece in enumerate(pieces) if piece.numel()],
            what,
        )

    return Work([handle], finish=finish, kept=[flat], what=what)


def _all_reduce_gloo(comm: Collectives, flat: torch.Tensor, scale: float, label: str) -> Work:
    """f32 takes gloo's ring, which is fast and needs no scratch memory. 16-bit numbers do not: the ring adds them one
    by one and rounds at each rank.
    """
    way = _all_reduce_by_backend if flat.dtype == torch.float32 else _exchange_reduce_broadcast
    return way(comm, flat, scale, label)


def _broadcast_by_backend(comm: Collectives, tensor: torch.Tensor, src: int, label: str) -> Handle:
    return dist.broadcast(as_bytes(tensor), comm.global_ranks[src], group=comm.group, async_op=True)


def _add_up_by_backend(comm: Collectives, tensor: torch.Tensor, label: str) -> Handle:
    return dist.all_reduce(tensor, group=comm.group, async_op=True)


def _shift_by_backend(
    comm: Collectives, sent: torch.Tensor, to: int, received: torch.Tensor, source: int, label: str
) -> list[Handle]:
    """Messages between two ranks, in both directions at once. A message without elements is not sent."""
    ways = [(dist.isend, sent, to), (dist.irecv, received, source)]
    # One call for both messages: a backend with one stream would wait for the first message before it starts the other.
    messages = [
        dist.P2POp(way, as_bytes(tensor), comm.global_ranks[peer], group=comm.group)
        for way, tensor, peer in ways
        if tensor.numel()
    ]
    return list(dist.batch_isend_irecv(messages)) if messages else []


def _message_by_backend(
    comm: Collectives, tensor: torch.Tensor, src: int, dst: int, tag: int, label: str
) -> Handle | None:
    if not tensor.numel():
        return None
    way, peer = (dist.isend, dst) if src == comm.rank else (dist.irecv, src)
    return way(as_bytes(tensor), comm.global_ranks[peer], group=comm.group, tag=tag)


def _all_to_all_by_backend(
    comm: Collectives,
    flat: torch.Tensor,
    out: torch.Tensor,
    in_splits: Sequence[int],
    out_splits: Sequence[int],
    label: str,
) -> Handle:
    """The all-to-all of the backend itself."""
    sizes = [[n * flat.element_size() for n in splits] for splits in (out_splits, in_splits)]
    return dist.all_to_all_single(as_bytes(out), as_bytes(flat), *sizes, group=comm.group, async_op=True)


class Backend(NamedTuple):
    """The collectives over one backend. ``Collectives`` sends tensors by these functions only.

    Lengths are above 0, and there are at least 2 ranks. The first three functions take flat tensors, the others any
    contiguous tensors. The last argument of each is the label, which ranks compare where it costs no further message.
    """

    name: str
    """Name of the path that a collective took, in ledgers."""
    reduce_scatter: Callable[[Collectives, torch.Tensor, torch.Tensor, float, bool, str], Work]
    all_gather: Callable[[Collectives, torch.Tensor, str], Work]
    all_reduce: Callable[[Collectives, torch.Tensor, float, str], Work]
    broadcast: Callable[[Collectives, torch.Tensor, int, str], Handle]
    """The number is the rank within the group that sends."""
    add_up: Callable[[Collectives, torch.Tensor, str], Handle]
    """The sum over ranks, in place, of a few numbers: f64 or integers."""
    all_to_all: Callable[[Collectives, torch.Tensor, torch.Tensor, Sequence[int], Sequence[int], str], Handle]
    """Takes flat tensors. The sequences are the numbers of elements to each rank and from each rank."""
    shift: Callable[[Collectives, torch.Tensor, int, torch.Tensor, int, str], list[Handle]] = shift_described
    """Sends a message to one rank and receives a message from another. Arguments: the sent tensor, its receiver, the
    received tensor, its sender; ranks are numbered within the group. Either tensor may have length 0.
    """
    message: Callable[[Collectives, torch.Tensor, int, int, int, str], Handle | None] = message_described
    """Sends a tensor, or receives it. Arguments: the tensor, its sender, its receiver (ranks are numbered within the
    group), the tag. The tensor may have length 0; None: nothing is sent then.
    """
    message_path: str = ""
    """Name of the path of shifts and messages, if it is not ``name``."""


# Measured over gloo with 48 MiB and 2 / 3 ranks on 2 cores. reduce_scatter: 38 / 51 ms by all_to_all (gloo's own
# reduce_scatter: 120 ms for 64 MiB and 2 ranks). all_gather: 20-28 / 32 ms by broadcasts (gloo's own: 75-109 / 93-230).
# all_reduce of f32: 55 / 79 ms by gloo's ring (ours: 56 / 85). all_reduce of fp16: 104 / 129 ms by gloo's ring, 68 / 89
# by ours.
GLOO = Backend(
    "gloo",
    _exchange_then_reduce,
    broadcast_slices,
    _all_reduce_gloo,
    _broadcast_by_backend,
    _add_up_by_backend,
    all_to_all_described,
)
# A backend made for large machines does these collectives best itself.
GENERIC = Backend(
    "torch",
    _reduce_scatter_by_backend,
    _all_gather_by_backend,
    _all_reduce_by_backend,
    _broadcast_by_backend,
    _add_up_by_backend,
    _all_to_all_by_backend,
    _shift_by_backend,
    _message_by_backend,
)


def backend_named(name: str, device: str) -> Backend:
    """Collectives for the backend of ``torch.distributed`` of that name, for tensors of ``device`` ("cpu", "cuda")."""
    if name != "gloo":
        return GENERIC._replace(name=name)
    # gloo has collectives for tensors of accelerators, but no messages.
    return GLOO if device == "cpu" else GLOO._replace(all_to_all=_all_to_all_by_backend)
