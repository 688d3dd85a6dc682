"""``send``, ``recv``, ``isend`` and ``irecv`` of ``deepspeed_c.comm``, with the signatures of ``torch.distributed``.

[Note: which way] A message goes through shared memory if all ranks of its group have connected that (``initialize`` and
``zero.Init`` connect it) and its tensor lies in host memory, and otherwise by ``torch.distributed``. Both ends take the
same way, because connecting is collective. So both ends have to be calls of ``deepspeed_c.comm``.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_c.comm.groups import timeout_of
from deepspeed_c.comm.transports import table
from deepspeed_c.comm.transports.shared_memory import SharedMemory

__all__ = ["irecv", "isend", "recv", "send"]

_POLL_S = (20e-6, 1e-3)  # the first and the longest time between two looks for a message from anyone


class _SharedMessage:
    """A message in shared memory, with the methods of a handle of ``torch.distributed``."""

    def __init__(self, handle: Any, tensor: torch.Tensor, src: int) -> None:
        self._handle, self._tensor, self._src = handle, tensor, src

    def wait(self, timeout: Any = None) -> bool:
        self._handle.wait()
        return True

    def is_completed(self) -> bool:
        return self._handle.is_done()

    def _source_rank(self) -> int:
        return self._src


class _FromAnyone:
    """A message from the first rank that sends one."""

    def __init__(self, memory: SharedMemory, tensor: torch.Tensor, group: dist.ProcessGroup | None, tag: int) -> None:
        self._memory, self._tensor, self._tag = memory, tensor, tag
        self._limit_s = timeout_of(group).total_seconds()
        me = dist.get_rank(group)
        self._others = [rank for rank in range(dist.get_world_size(group)) if rank != me]
        self._message: _SharedMessage | None = None

    def _look(self) -> _SharedMessage | None:
        """Starts to receive a message that has come, if there is one."""
        if self._message is None:
            src = next((rank for rank in self._others if self._memory.has_message(rank, self._tag)), None)
            if src is not None:
                handle = self._memory.receive(self._tensor, src, self._tag, "")
                self._message = _SharedMessage(handle, self._tensor, src)
        return self._message

    def wait(self, timeout: Any = None) -> bool:
        pause, deadline = _POLL_S[0], time.monotonic() + self._limit_s
        while (message := self._look()) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no rank has sent a message of tag {self._tag} within {self._limit_s:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S[1])
        return message.wait()

    def is_completed(self) -> bool:
        message = self._look()
        return message is not None and message.is_completed()

    def _source_rank(self) -> int:
        return -1 if self._message is None else self._message._source_rank()


def _shared(tensor: Any, group: dist.ProcessGroup | None, tag: int) -> SharedMemory | None:
    """The shared memory for a message; None: it goes by torch, which also refuses arguments that make no sense."""
    transport = None if group == dist.GroupMember.NON_GROUP_MEMBER else table.connected(group)
    is_plain = isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.layout == torch.strided
    if not isinstance(transport, SharedMemory) or not is_plain or tag < 0 or not tensor.is_contiguous():
        return None
    return transport


def isend(tensor: torch.Tensor, dst: int, group: dist.ProcessGroup | None = None, tag: int = 0) -> Any:
    memory = _shared(tensor, group, tag)
    if memory is None or dst == dist.get_rank():
        return dist.isend(tensor, dst, group=group, tag=tag)
    flat = tensor.detach().view(-1)
    if memory.owns(flat):
        # It would be read where it lies when the receiver waits. With torch a receiver may wait for something else
        # first, and the sender for its message.
        flat = flat.clone()
    return _SharedMessage(memory.send(flat, _in_group(dst, group), tag, ""), flat, dist.get_rank(group))


def irecv(tensor: torch.Tensor, src: int | None = None, group: dist.ProcessGroup | None = None, tag: int = 0) -> Any:
    memory = _shared(tensor, group, tag)
    if memory is None or src == dist.get_rank():
        return dist.irecv(tensor, src, group=group, tag=tag)
    flat = tensor.detach().view(-1)
    if src is None:
        return _FromAnyone(memory, flat, group, tag)
    peer = _in_group(src, group)
    return _SharedMessage(memory.receive(flat, peer, tag, ""), flat, peer)


def send(tensor: torch.Tensor, dst: int, group: dist.ProcessGroup | None = None, tag: int = 0) -> None:
    if _shared(tensor, group, tag) is None or dst == dist.get_rank():
        return dist.send(tensor, dst, group=group, tag=tag)
    isend(tensor, dst, group, tag).wait()
    return None


def recv(tensor: torch.Tensor, src: int | None = None, group: dist.ProcessGroup | None = None, tag: int = 0) -> int:
    if _shared(tensor, group, tag) is None or src == dist.get_rank():
        return dist.recv(tensor, src, group=group, tag=tag)
    message = irecv(tensor, src, group, tag)
    message.wait()
    peer = message._source_rank()
    return dist.get_global_rank(dist.group.WORLD if group is None else group, peer)


def _in_group(rank: int, group: dist.ProcessGroup | None) -> int:
    return rank if group is None else dist.get_group_rank(group, rank)
