"""``send``, ``recv``, ``isend`` and ``irecv`` of ``deepspeed_c.comm``, with the signatures of ``torch.distributed``.

[Note: which way] A message of a tensor in host memory goes through shared memory if all ranks of its group have
connected that (``initialize`` and ``zero.Init`` connect it), and otherwise as a described message over gloo. Both ends
take the same way, because connecting is collective. Other tensors go by ``torch.distributed``.

[Note: both ends] Neither way is that of ``torch.distributed.send`` and ``recv``: these carry no descriptions. A rank
whose other end is such a call would wait in silence until the time limit of the group. So a thread tells of messages
that have waited for long, and ends when none waits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_c.background import BackgroundThread
from deepspeed_c.comm.agreed import is_over_gloo
from deepspeed_c.comm.groups import timeout_of
from deepspeed_c.comm.transports import table
from deepspeed_c.comm.transports.described import N_USER_TAGS, Members, UserMessage
from deepspeed_c.comm.transports.shared_memory import SharedMemory
from deepspeed_c.logging import logger

__all__ = ["irecv", "isend", "recv", "send"]

_POLL_S = (20e-6, 1e-3)  # the first and the longest time between two looks for a message from anyone
_MOMENT_S = 1.0  # more than a line of the log takes
_LONG_S = 10.0  # a message that has waited for longer is told of


class _Waits:
    """The waits for messages of this process."""

    def __init__(self) -> None:
        self._since: dict[object, tuple[float, str]] = {}
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_over = threading.Event()  # the interpreter ends

    @contextlib.contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Tells of ``what`` if the block takes long."""
        key = object()
        with self._lock:
            self._since[key] = time.monotonic(), what
            if self._thread is None:
                name, limit_s = "deepspeed_c messages", _MOMENT_S
                self._thread = BackgroundThread(self._watch, name=name, end=self._is_over.set, limit_s=limit_s)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                del self._since[key]

    def _watch(self) -> None:
        told: set[float] = set()
        is_idle = False
        while not self._is_over.wait(_LONG_S / 4):
            with self._lock:
                waits = list(self._since.values())
                if not waits and is_idle:
                    self._thread = None
                    return
            is_idle = not waits
            for since, what in waits:
                if time.monotonic() - since > _LONG_S and since not in told:
                    told.add(since)
                    logger.warning(
                        "%s has not come in %.0f s. If the other rank has called for it: both ends of a message have"
                        " to be calls of deepspeed_c.comm (deepspeed.comm), or both of torch.distributed",
                        what,
                        time.monotonic() - since,
                    )


_waits = _Waits()


class _GlooMessage:
    """A message over gloo, with the methods of a handle of ``torch.distributed``."""

    def __init__(self, message: UserMessage, tensor: torch.Tensor, what: str) -> None:
        self._message, self._tensor, self._what = message, tensor, what
        self._is_done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._is_done:
            with _waits.of(self._what):
                self._message.wait(timeout)
            self._is_done = True
        return True

    def is_completed(self) -> bool:
        return self._is_done

    def _source_rank(self) -> int:
        return self._message.source


class _SharedMessage:
    """A message in shared memory, with the methods of a handle of ``torch.distributed``."""

    def __init__(self, handle: Any, tensor: torch.Tensor, src: int, what: str) -> None:
        self._handle, self._tensor, self._src, self._what = handle, tensor, src, what

    def wait(self, timeout: Any = None) -> bool:
        with _waits.of(self._what):
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
                self._message = _SharedMessage(handle, self._tensor, src, _receiving(None, self._tag))
        return self._message

    def wait(self, timeout: Any = None) -> bool:
        pause, deadline = _POLL_S[0], time.monotonic() + self._limit_s
        with _waits.of(_receiving(None, self._tag)):
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


_Message = _GlooMessage | _SharedMessage | _FromAnyone


def _shared(group: dist.ProcessGroup | None) -> SharedMemory | None:
    transport = table.connected(group)
    return transport if isinstance(transport, SharedMemory) else None


def _is_ours(tensor: Any, peer: int | None, group: dist.ProcessGroup | None, tag: int) -> bool:
    """Whether a message takes one of our ways. The others go by torch, which also refuses arguments that make no sense."""
    if not is_over_gloo(tensor, group) or tensor.layout != torch.strided or not tensor.is_contiguous():
        return False
    if tag < 0 or peer == dist.get_rank():
        return False
    if tag >= N_USER_TAGS:
        raise ValueError(f"tag is {tag}, must be below {N_USER_TAGS}")
    return True


def isend(tensor: torch.Tensor, dst: int, group: dist.ProcessGroup | None = None, tag: int = 0) -> Any:
    if not _is_ours(tensor, dst, group, tag):
        return dist.isend(tensor, dst, group=group, tag=tag)
    return _started_send(tensor, dst, group, tag)


def irecv(tensor: torch.Tensor, src: int | None = None, group: dist.ProcessGroup | None = None, tag: int = 0) -> Any:
    if not _is_ours(tensor, src, group, tag):
        return dist.irecv(tensor, src, group=group, tag=tag)
    return _started_recv(tensor, src, group, tag)


def send(tensor: torch.Tensor, dst: int, group: dist.ProcessGroup | None = None, tag: int = 0) -> None:
    if not _is_ours(tensor, dst, group, tag):
        return dist.send(tensor, dst, group=group, tag=tag)
    _started_send(tensor, dst, group, tag).wait()
    return None


def recv(tensor: torch.Tensor, src: int | None = None, group: dist.ProcessGroup | None = None, tag: int = 0) -> int:
    if not _is_ours(tensor, src, group, tag):
        return dist.recv(tensor, src, group=group, tag=tag)
    message = _started_recv(tensor, src, group, tag)
    message.wait()
    if src is not None:
        return src
    return dist.get_global_rank(dist.group.WORLD if group is None else group, message._source_rank())


def _started_send(tensor: torch.Tensor, dst: int, group: dist.ProcessGroup | None, tag: int) -> _Message:
    memory, flat, what = _shared(group), tensor.detach().view(-1), f"the message of tag {tag} to rank {dst}"
    if memory is None:
        message = UserMessage(Members.of(group), tag)
        message.give(flat, _in_group(dst, group))
        message.start()
        return _GlooMessage(message, flat, what)
    if memory.owns(flat):
        # It would be read where it lies when the receiver waits. With torch a receiver may wait for something else
        # first, and the sender for its message.
        flat = flat.clone()
    return _SharedMessage(memory.send(flat, _in_group(dst, group), tag, ""), flat, dist.get_rank(group), what)


def _started_recv(tensor: torch.Tensor, src: int | None, group: dist.ProcessGroup | None, tag: int) -> _Message:
    memory, flat, what = _shared(group), tensor.detach().view(-1), _receiving(src, tag)
    if memory is None:
        message = UserMessage(Members.of(group), tag)
        if src is None:
            message.expect_anyone(flat)
        else:
            message.expect(flat, _in_group(src, group))
            message.start()
        return _GlooMessage(message, flat, what)
    if src is None:
        return _FromAnyone(memory, flat, group, tag)
    peer = _in_group(src, group)
    return _SharedMessage(memory.receive(flat, peer, tag, ""), flat, peer, what)


def _receiving(src: int | None, tag: int) -> str:
    return f"the message of tag {tag} from {'any rank' if src is None else f'rank {src}'}"


def _in_group(rank: int, group: dist.ProcessGroup | None) -> int:
    return rank if group is None else dist.get_group_rank(group, rank)
