"""Collectives over gloo, in the fastest way that it has for each of them.

Measured with 48 MiB on one host of 2 cores and 2 / 3 ranks: reduce_scatter 22 / 55 ms by messages (gloo's own: 120 ms
for 64 MiB and 2 ranks), all_gather 14 / 40 ms by messages (gloo's own: 75-109 / 93-230), all_reduce of f32 55 / 79 ms
by gloo's ring (ours: 56 / 85), of fp16 104 / 129 ms by gloo's ring, 68 / 89 by ours. Over 1 Gbit/s between two hosts,
35 gathers of 4 MiB take 620 ms by messages, as long as the link needs for them, and 1100 ms by broadcasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from deepspeed_c.comm.transports.described import (
    all_to_all_described,
    as_bytes,
    collective_tag,
    message_described,
    shift_described,
)
from deepspeed_c.comm.transports.torch_backend import TorchBackend
from deepspeed_c.comm.work import FailedStart, Handle, Work, wait_all

if TYPE_CHECKING:
    from deepspeed_c.comm.collectives import Collectives

__all__ = ["Gloo"]


class Gloo(TorchBackend):
    """gloo, for tensors of the CPU or of an accelerator."""

    def __init__(self, device_type: str = "cpu") -> None:
        super().__init__("gloo")
        self._is_cpu = device_type == "cpu"

    def reduce_scatter(
        self, comm: Collectives, flat: torch.Tensor, out: torch.Tensor, scale: float, accumulate: bool, label: str
    ) -> Work:
        """Each rank receives its slice from all ranks and adds the slices up itself."""
        slices = list(flat.view(comm.world_size, -1))
        received, sources = self._places(comm, slices[comm.rank])
        handles = self._exchange(comm, slices, sources, collective_tag("reduce_scatter", flat.nbytes, label))

        def finish() -> None:
            comm.reduce(sources, scale, accumulate, out)
            comm.scratch.give(received)

        return Work(handles, finish=finish, kept=[flat, out], what=f"reduce_scatter of {flat.numel()} {flat.dtype}")

    def _places(self, comm: Collectives, own: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Scratch memory for a tensor like ``own`` from each other rank, and by rank the places there. ``own`` itself
        is in this rank's place.
        """
        received = comm.scratch.take((comm.world_size - 1) * own.numel(), own.dtype, own.device)
        places = list(received.view(comm.world_size - 1, own.numel()))
        return received, [*places[: comm.rank], own, *places[comm.rank :]]

    def _exchange(
        self,
        comm: Collectives,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        tag: int,
    ) -> list[Handle]:
        """Sends ``sent[r]`` to each other rank r and fills ``received[r]`` with what it sends. In round i each rank
        sends to the rank i places after it.

        Messages use both directions of a link at the same time, and an all_to_all one after the other. But gloo has no
        messages for tensors of accelerators.
        """
        n, rank, handles = comm.world_size, comm.rank, []
        outgoing, incoming = [as_bytes(tensor) for tensor in sent], [as_bytes(tensor) for tensor in received]
        for i in range(1, n):
            to, source = (rank + i) % n, (rank - i) % n
            if not self._is_cpu:
                sizes = [
                    [tensor.numel() if r == other else 0 for r in range(n)]
                    for tensor, other in ((incoming[source], source), (outgoing[to], to))
                ]
                handles.append(
                    dist.all_to_all_single(incoming[source], outgoing[to], *sizes, group=comm.group, async_op=True)
                )
                continue
            for way, tensor, peer in ((dist.irecv, incoming[source], source), (dist.isend, outgoing[to], to)):
                if not tensor.numel():
                    continue
                try:
                    handles.append(way(tensor, comm.global_ranks[peer], group=comm.group, tag=tag))
                except RuntimeError as error:
                    handles.append(FailedStart(error))
        return handles

    def all_gather(self, comm: Collectives, flat: torch.Tensor, label: str) -> Work:
        """gloo's own all_gather copies into lists. Of broadcasts, one for each slice, two ranks may both wait for the
        other's, so that nothing is sent.
        """
        slices = flat.view(comm.world_size, -1)
        tag = collective_tag("all_gather", flat.nbytes, label)
        handles = self._exchange(comm, [slices[comm.rank]] * comm.world_size, slices, tag)
        return Work(handles, kept=[flat], what=f"all_gather of {flat.numel()} {flat.dtype}")

    def all_reduce(self, comm: Collectives, flat: torch.Tensor, scale: float, label: str) -> Work:
        """f32 takes gloo's ring, which is fast and needs no scratch memory. 16-bit numbers do not: the ring adds them
        one by one and rounds at each rank.
        """
        if flat.dtype == torch.float32:
            return super().all_reduce(comm, flat, scale, label)
        return self._reduce_by_exchange(comm, flat, scale, label)

    def _reduce_by_exchange(self, comm: Collectives, flat: torch.Tensor, scale: float, label: str) -> Work:
        """Each rank sums one part, as in ``reduce_scatter``, and sends the sum to all ranks. Lengths of parts differ by
        at most 1.
        """
        n, rank, numel = comm.world_size, comm.rank, flat.numel()
        parts = flat.split([numel // n + (r < numel % n) for r in range(n)])
        received, sources = self._places(comm, parts[rank])
        handles = self._exchange(comm, parts, sources, collective_tag("all_reduce", flat.nbytes, label))
        what = f"all_reduce of {numel} {flat.dtype}"

        def finish() -> None:
            if parts[rank].numel():
                comm.reduce(sources, scale, False, parts[rank])
            comm.scratch.give(received)
            tag = collective_tag("all_reduce, sums", flat.nbytes, label)
            wait_all(self._exchange(comm, [parts[rank]] * n, parts, tag), what)

        return Work(handles, finish=finish, kept=[flat], what=what)

    # gloo has collectives for tensors of accelerators, but no messages.

    def all_to_all(
        self,
        comm: Collectives,
        flat: torch.Tensor,
        out: torch.Tensor,
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        label: str,
    ) -> Handle:
        if not self._is_cpu:
            return super().all_to_all(comm, flat, out, in_splits, out_splits, label)
        return all_to_all_described(comm, flat, out, in_splits, out_splits, label)

    def shift(
        self, comm: Collectives, sent: torch.Tensor, to: int, received: torch.Tensor, source: int, label: str
    ) -> list[Handle]:
        return shift_described(comm, sent, to, received, source, label)

    def message(
        self, comm: Collectives, tensor: torch.Tensor, src: int, dst: int, tag: int, label: str
    ) -> Handle | None:
        return message_described(comm, tensor, src, dst, tag, label)
