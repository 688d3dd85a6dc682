"""Ranks that share a host exchange CPU tensors through shared memory."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from deepspeed_c import _C
from deepspeed_c.buffers import ordinary_memory
from deepspeed_c.comm.groups import timeout_of
from deepspeed_c.comm.transports.blocks import as_tensor
from deepspeed_c.comm.transports.hosts import Hosts, NotConnectedError
from deepspeed_c.comm.transports.transport import Transport
from deepspeed_c.comm.work import Handle, Work
from deepspeed_c.logging import logger

if TYPE_CHECKING:
    from deepspeed_c.comm.collectives import Collectives

__all__ = ["SHIFT_TAG", "SharedMemory", "connect", "engine_tag", "open_ends"]

# Tags of messages that users send by ``deepspeed_c.comm`` are not negative. The engines' own tags are.
SHIFT_TAG = -1


def engine_tag(tag: int) -> int:
    """The tag, in shared memory, of a message with a tag of the engine's."""
    return SHIFT_TAG - 1 - tag


class _Failed:
    """A collective that could not be started: ``wait`` raises the error, as for a started collective that fails."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error

    def is_done(self) -> bool:
        return True


class _OfPart:
    """A collective of a group whose ranks have other numbers in the world. Its error names ranks by their numbers in
    the world.
    """

    def __init__(self, work: Handle, ranks: Sequence[int]) -> None:
        self._work, self._ranks = work, ranks

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise RuntimeError(_in_world(str(error), self._ranks)) from error

    def is_done(self) -> bool:
        return self._work.is_done()


def _in_world(text: str, ranks: Sequence[int]) -> str:
    """``text`` with ``rank 1`` of a group replaced by that rank's number in the world."""
    return re.sub(r"\brank (\d+)\b", lambda found: f"rank {ranks[int(found[1])]}", text)


class SharedMemory(Transport):
    """The shared memory of one process group, as its ranks use it."""

    name = "shm"

    def __init__(self, group: Any, process_group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        """group: a ``_C.ShmGroup`` that has attached, to be closed with ``process_group``. ranks: the ranks' numbers in
        the world.
        """
        self._group, self._ranks = group, ranks
        self._is_part = list(ranks) != list(range(len(ranks)))
        # For those who still hold this object: the process group has ended for all ranks, and so has their shared
        # memory.
        self._end = weakref.ref(process_group, lambda _: group.close())
        self._has_warned = False

    def allocate(self, n_bytes: int, device: torch.device) -> torch.Tensor:
        """Bytes [n_bytes], uninitialised. On the CPU the other ranks read them in place, without a copy. Where shared
        memory has no room, and on other devices, they are ordinary memory, which is copied on the way.
        """
        if device.type != "cpu" or n_bytes == 0:
            return ordinary_memory(n_bytes, device)
        try:
            block = self._group.empty(n_bytes)
        except MemoryError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("buffers lie in ordinary memory, which collectives have to copy: %s", error)
            return ordinary_memory(n_bytes, device)
        except RuntimeError:  # the group has ended, or this is a forked child: no other rank reads this memory
            return ordinary_memory(n_bytes, device)
        return as_tensor(block)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether other ranks read ``tensor`` where it lies."""
        return self._group.owns(tensor)

    def close(self) -> None:
        """Ends the connection for this rank, and tells the other ranks."""
        self._group.close()

    def why_not_joint(self) -> str:
        return ""

    def start(self, name: str, *args: Any) -> Handle:
        """Starts the collective ``name`` of ``_C.ShmGroup``. If it cannot be started, the error comes from ``wait``."""
        return self._begin(getattr(self._group, name), *args)

    def _begin(self, call: Callable[..., Handle], *args: Any) -> Handle:
        try:
            work = call(*args)
        except RuntimeError as error:  # an earlier failure has ended the connection
            work = _Failed(error)
        return _OfPart(work, self._ranks) if self._is_part else work

    def reduce_scatter(
        self, comm: Collectives, flat: torch.Tensor, out: torch.Tensor, scale: float, accumulate: bool, label: str
    ) -> Work:
        handle = self.start("reduce_scatter", flat, out, scale, accumulate, label)
        return Work([handle], kept=[flat, out], what=f"reduce_scatter of {flat.numel()} {flat.dtype}")

    def all_gather(self, comm: Collectives, flat: torch.Tensor, label: str) -> Work:
        handle = self.start("all_gather", flat, label)
        return Work([handle], kept=[flat], what=f"all_gather of {flat.numel()} {flat.dtype}")

    def all_reduce(self, comm: Collectives, flat: torch.Tensor, scale: float, label: str) -> Work:
        handle = self.start("all_reduce", flat, "sum", scale, False, label)
        return Work([handle], kept=[flat], what=f"all_reduce of {flat.numel()} {flat.dtype}")

    def broadcast(self, comm: Collectives, tensor: torch.Tensor, src: int, label: str) -> Handle:
        return self.start("broadcast", tensor.view(-1), src, True, label)

    def add_up(self, comm: Collectives, tensor: torch.Tensor, label: str) -> Handle:
        return self.start("all_reduce", tensor.view(-1), "sum", 1.0, True, label)

    def all_to_all(
        self,
        comm: Collectives,
        flat: torch.Tensor,
        out: torch.Tensor,
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        label: str,
    ) -> Handle:
        return self.start("all_to_all", flat, out, list(in_splits), list(out_splits), label)

    def shift(
        self, comm: Collectives, sent: torch.Tensor, to: int, received: torch.Tensor, source: int, label: str
    ) -> list[Handle]:
        # Messages without elements are sent too, so that lengths are compared.
        return [self.send(sent, to, SHIFT_TAG, label), self.receive(received, source, SHIFT_TAG, label)]

    def message(self, comm: Collectives, tensor: torch.Tensor, src: int, dst: int, tag: int, label: str) -> Handle:
        if src == comm.rank:
            return self.send(tensor, dst, engine_tag(tag), label)
        return self.receive(tensor, src, engine_tag(tag), label)

    def send(self, tensor: torch.Tensor, rank: int, tag: int, label: str) -> Handle:
        """Sends a contiguous tensor to ``rank`` of this host."""
        return self._begin(self._group.send, tensor, rank, tag, label)

    def receive(self, tensor: torch.Tensor, rank: int, tag: int, label: str) -> Handle:
        """Receives a contiguous tensor from ``rank`` of this host."""
        return self._begin(self._group.receive, tensor, rank, tag, label)

    def has_message(self, rank: int, tag: int) -> bool:
        """Whether a message from ``rank`` has come that was not received. Raises RuntimeError where the connection has
        ended.
        """
        return self._group.has_message(rank, tag)


def open_ends(hosts: Hosts, n_ends: int) -> list[SharedMemory]:
    """Connects the ranks of each host through shared memory, ``n_ends`` times. [] where a rank is alone on its host.

    Collective over all ranks of the group. Raises NotConnectedError.
    """
    comm, mine = hosts.comm, hosts.mine
    seconds = timeout_of(hosts.group).total_seconds()
    made: list[Any] = []

    def make() -> list[str]:
        if len(mine) > 1:
            made.extend(_C.ShmGroup(mine.index(comm.rank), len(mine), seconds) for _ in range(n_ends))
        return [end.address for end in made]

    names = [comm.global_ranks[rank] for rank in mine]
    try:
        addresses = hosts.agree(make, "shared memory")

        def attach() -> None:
            for i, end in enumerate(made):
                try:
                    end.attach([addresses[rank][i] for rank in mine])
                except RuntimeError as error:
                    raise RuntimeError(_in_world(str(error), names)) from error

        # No rank closes before all ranks have attached.
        hosts.agree(attach, "shared memory")
    except NotConnectedError:
        for end in made:
            end.close()
        raise
    return [SharedMemory(end, hosts.group, names) for end in made]


def connect(hosts: Hosts) -> SharedMemory:
    """The shared memory of ranks that are all on one host. Collective. Raises NotConnectedError."""
    if hosts.apart:
        raise NotConnectedError(hosts.apart)
    return open_ends(hosts, 1)[0]
