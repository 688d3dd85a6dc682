"""Collectives by a backend of ``torch.distributed`` itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from deepspeed_c.comm.transports.described import as_bytes
from deepspeed_c.comm.transports.transport import Transport
from deepspeed_c.comm.work import Handle, Work

if TYPE_CHECKING:
    from deepspeed_c.comm.collectives import Collectives

__all__ = ["TorchBackend", "all_gather_single", "reduce_scatter_single"]

# torch 2.13 renamed these two functions and warns about the old names; torch 2.10 has only the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchBackend(Transport):
    """A backend made for large machines (NCCL), which does each collective best itself."""

    def __init__(self, name: str) -> None:
        self.name = name

    def reduce_scatter(
        self, comm: Collectives, flat: torch.Tensor, out: torch.Tensor, scale: float, accumulate: bool, label: str
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

    def all_gather(self, comm: Collectives, flat: torch.Tensor, label: str) -> Work:
        handle = all_gather_single(as_bytes(flat), as_bytes(comm.own_slice(flat)), group=comm.group, async_op=True)
        return Work([handle], kept=[flat], what=f"all_gather of {flat.numel()} {flat.dtype}")

    def all_reduce(self, comm: Collectives, flat: torch.Tensor, scale: float, label: str) -> Work:
        handle = dist.all_reduce(flat, group=comm.group, async_op=True)
        finish = None if scale == 1.0 else lambda: comm.reduce([flat], scale, False, flat)
        return Work([handle], finish=finish, kept=[flat], what=f"all_reduce of {flat.numel()} {flat.dtype}")

    def broadcast(self, comm: Collectives, tensor: torch.Tensor, src: int, label: str) -> Handle:
        return dist.broadcast(as_bytes(tensor), comm.global_ranks[src], group=comm.group, async_op=True)

    def add_up(self, comm: Collectives, tensor: torch.Tensor, label: str) -> Handle:
        return dist.all_reduce(tensor, group=comm.group, async_op=True)

    def all_to_all(
        self,
        comm: Collectives,
        flat: torch.Tensor,
        out: torch.Tensor,
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        label: str,
    ) -> Handle:
        sizes = [[n * flat.element_size() for n in splits] for splits in (out_splits, in_splits)]
        return dist.all_to_all_single(as_bytes(out), as_bytes(flat), *sizes, group=comm.group, async_op=True)

    def shift(
        self, comm: Collectives, sent: torch.Tensor, to: int, received: torch.Tensor, source: int, label: str
    ) -> list[Handle]:
        """Both directions at once. A message without elements is not sent."""
        ways = [(dist.isend, sent, to), (dist.irecv, received, source)]
        # One call for both messages: a backend with one stream would wait for the first message before it starts the
        # other.
        messages = [
            dist.P2POp(way, as_bytes(tensor), comm.global_ranks[peer], group=comm.group)
            for way, tensor, peer in ways
            if tensor.numel()
        ]
        return list(dist.batch_isend_irecv(messages)) if messages else []

    def message(
        self, comm: Collectives, tensor: torch.Tensor, src: int, dst: int, tag: int, label: str
    ) -> Handle | None:
        if not tensor.numel():
            return None
        way, peer = (dist.isend, dst) if src == comm.rank else (dist.irecv, src)
        return way(as_bytes(tensor), comm.global_ranks[peer], group=comm.group, tag=tag)
