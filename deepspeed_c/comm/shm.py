"""Ranks that share a host exchange CPU tensors through shared memory, below the calls of ``Collectives``.

[Note: one connection a group] A process group has one connection for all engines that use the group. Engines use it in
turn or at the same time, in an order that is the same on all ranks. All ranks make the connection together when the
group is first used, and it is closed with the group. Either all ranks have the connection, or no rank has it and all
ranks know the same reason. Data from the operating system shows whether the ranks are on one host; after that each rank
has to open the memory of all others. Ranks of several hosts make a ``Hierarchy`` in the same way, if at least one host
has several ranks.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from deepspeed_c import _C
from deepspeed_c.buffers import ordinary_memory
from deepspeed_c.comm.backends import Backend
from deepspeed_c.comm.groups import timeout_of
from deepspeed_c.comm.hierarchy import Hierarchy
from deepspeed_c.comm.ledger import SHM, ranks_in_words
from deepspeed_c.comm.work import Handle, Work
from deepspeed_c.errors import CommError
from deepspeed_c.logging import logger

if TYPE_CHECKING:
    from deepspeed_c.comm.collectives import Collectives

__all__ = ["REFUSALS", "Connection", "LocalTransport", "as_tensor", "connect", "discard", "first_refusal"]

LocalTransport = Literal["auto", "shm", "off"]
"""The configuration key ``comm.local``."""

# Errors of the binding where ranks cannot share memory: the system lacks a feature, no memory is left, or another user
# owns the memory.
REFUSALS = (MemoryError, OSError, ValueError, RuntimeError)


_SHIFT_TAG = -1  # callers' tags are not negative


class _Failed:
    """A collective that could not be started: ``wait`` raises the error, as for a started collective that fails."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error


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


def _in_world(text: str, ranks: Sequence[int]) -> str:
    """``text`` with ``rank 1`` of a group replaced by that rank's number in the world."""
    return re.sub(r"\brank (\d+)\b", lambda found: f"rank {ranks[int(found[1])]}", text)


class Connection:
    """The shared memory of one process group, as its ranks use it."""

    def __init__(self, group: Any, process_group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        """group: a ``_C.ShmGroup`` that has attached, to be closed with ``process_group``. ranks: the ranks' numbers in
        the world.
        """
        self._group, self._ranks = group, ranks
        self._is_part = list(ranks) != list(range(len(ranks)))
        # For those who still hold this connection: the process group has ended for all ranks, and so has their shared
        # memory.
        self._end = weakref.ref(process_group, lambda _: group.close())
        self._has_warned = False
        self.backend = Backend(
            SHM,
            reduce_scatter=self._reduce_scatter,
            all_gather=self._all_gather,
            all_reduce=self._all_reduce,
            broadcast=self._broadcast,
            add_up=self._add_up,
            all_to_all=self._all_to_all,
            shift=self._shift,
            message=self._message,
        )

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

    def start(self, name: str, *args: Any) -> Handle:
        """Starts the collective ``name`` of ``_C.ShmGroup``. If it cannot be started, the error comes from ``wait``."""
        try:
            work = getattr(self._group, name)(*args)
        except RuntimeError as error:  # an earlier failure has ended the connection
            work = _Failed(error)
        return _OfPart(work, self._ranks) if self._is_part else work

    def _reduce_scatter(
        self, comm: Collectives, flat: torch.Tensor, out: torch.Tensor, scale: float, accumulate: bool, label: str
    ) -> Work:
        handle = self.start("reduce_scatter", flat, out, scale, accumulate, label)
        return Work([handle], kept=[flat, out], what=f"reduce_scatter of {flat.numel()} {flat.dtype}")

    def _all_gather(self, comm: Collectives, flat: torch.Tensor, label: str) -> Work:
        handle = self.start("all_gather", flat, label)
        return Work([handle], kept=[flat], what=f"all_gather of {flat.numel()} {flat.dtype}")

    def _all_reduce(self, comm: Collectives, flat: torch.Tensor, scale: float, label: str) -> Work:
        handle = self.start("all_reduce", flat, "sum", scale, False, label)
        return Work([handle], kept=[flat], what=f"all_reduce of {flat.numel()} {flat.dtype}")

    def _broadcast(self, comm: Collectives, tensor: torch.Tensor, src: int, label: str) -> Handle:
        return self.start("broadcast", tensor.view(-1), src, True, label)

    def _add_up(self, comm: Collectives, tensor: torch.Tensor, label: str) -> Handle:
        return self.start("all_reduce", tensor.view(-1), "sum", 1.0, True, label)

    def _all_to_all(
        self,
        comm: Collectives,
        flat: torch.Tensor,
        out: torch.Tensor,
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        label: str,
    ) -> Handle:
        return self.start("all_to_all", flat, out, list(in_splits), list(out_splits), label)

    def _shift(
        self, comm: Collectives, sent: torch.Tensor, to: int, received: torch.Tensor, source: int, label: str
    ) -> list[Handle]:
        # Messages without elements are sent too, so that lengths are compared.
        return [
            self.start("send", sent, to, _SHIFT_TAG, label),
            self.start("receive", received, source, _SHIFT_TAG, label),
        ]

    def _message(self, comm: Collectives, tensor: torch.Tensor, src: int, dst: int, tag: int, label: str) -> Handle:
        way, peer = ("send", dst) if src == comm.rank else ("receive", src)
        return self.start(way, tensor, peer, tag, label)


# The memory of all connections by its address.
_blocks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def as_tensor(block: _C.ShmBuffer | _C.ShmPart) -> torch.Tensor:
    """The bytes of an object of the binding. The tensor keeps the object alive; the memory is returned when nobody
    holds the object.
    """
    tensor = torch.frombuffer(block, dtype=torch.uint8)
    _blocks[tensor.data_ptr()] = block
    return tensor


def discard(storage: torch.UntypedStorage) -> None:
    """Returns to the system the memory of a storage that a connection has allocated.

    The storage keeps its length, which torch cannot change. It then holds zeros, and takes memory again when it is
    written to.
    """
    _blocks[storage.data_ptr()].discard()


class _Outcome(NamedTuple):
    """Result of the attempt to connect the ranks of a group: the same on all of them."""

    connection: Connection | Hierarchy | None
    reason: str
    """Why some of the ranks do not share memory; "" if all do."""


# One outcome for each group, success or failure. The outcome goes with the group.
_outcomes: weakref.WeakKeyDictionary[Any, _Outcome] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def connect(comm: Collectives, wish: Literal["auto", "shm"]) -> Connection | Hierarchy | None:
    """The connection of the ranks of ``comm``, at least two; None where no two of them can share memory.

    Collective at the first call for a group. Raises ``CommError`` on all ranks where ``wish`` is "shm" and some of the
    ranks do not share memory.
    """
    group = dist.group.WORLD if comm.group is None else comm.group
    with _lock:
        outcome = _outcomes.get(group)
    if outcome is None:
        outcome = _try(comm, group)
        with _lock:
            _outcomes[group] = outcome
        if comm.rank == 0:
            _tell(outcome)
    if outcome.reason and wish == "shm":
        raise CommError(
            f"the ranks cannot share memory: {outcome.reason}",
            where='"comm": {"local": "shm"}',
            fix='write "auto", which takes gloo between hosts then, or start all ranks on one host as one user',
        )
    return outcome.connection


def _tell(outcome: _Outcome) -> None:
    if isinstance(outcome.connection, Hierarchy):
        counts = ", ".join(str(len(ranks)) for ranks in outcome.connection.places.hosts)
        logger.info(
            "%s with %s ranks: they talk through shared memory inside each, over gloo between", outcome.reason, counts
        )
    elif outcome.connection is None:
        logger.info("ranks talk over torch.distributed, not through shared memory: %s", outcome.reason)


def _try(comm: Collectives, group: dist.ProcessGroup) -> _Outcome:
    backend = dict(part.split(":", 1) for part in dist.get_backend_config(group).split(",")).get("cpu")
    if backend != "gloo":
        return _Outcome(None, f"the group's backend for CPU tensors is {backend or 'none'}, not gloo")
    marks = comm.gather_objects(_this_host(), label="host")
    apart = _apart(marks)
    hosts = _by_host(marks)
    if not all(mark.boot for mark in marks) or max(map(len, hosts)) == 1:
        return _Outcome(None, apart)
    # A hierarchy has two ends on each host, the first for callers and the second for its thread.
    n_ends = 1 if len(hosts) == 1 else 2
    mine = next(ranks for ranks in hosts if comm.rank in ranks)
    seconds = timeout_of(group).total_seconds()
    made: list[Any] = []
    refusal, addresses = "", []
    try:
        if len(mine) > 1:
            made = [_C.ShmGroup(mine.index(comm.rank), len(mine), seconds) for _ in range(n_ends)]
        addresses = [end.address for end in made]
    except REFUSALS as error:
        refusal = str(error)
    told = comm.gather_objects((refusal, addresses, uuid.uuid4().hex), label="shared memory")
    reason = first_refusal([said[0] for said in told], comm.global_ranks)
    if not reason:
        try:
            for i, end in enumerate(made):
                end.attach([told[rank][1][i] for rank in mine])
        except REFUSALS as error:
            refusal = _in_world(str(error), [comm.global_ranks[rank] for rank in mine])
        # No rank closes before all ranks have attached.
        reason = first_refusal(comm.gather_objects(refusal, label="shared memory"), comm.global_ranks)
    between: dist.ProcessGroup | None = None
    if not reason and len(hosts) > 1:
        try:
            between = _between(comm, group, told[0][2])
        except RuntimeError as error:
            refusal = f"no connection between the hosts: {error}"
        reason = first_refusal(comm.gather_objects(refusal, label="hosts"), comm.global_ranks)
    if reason:
        for end in made:
            end.close()
        return _Outcome(None, reason)
    connections = [Connection(end, group, [comm.global_ranks[rank] for rank in mine]) for end in made]
    if between is None:
        return _Outcome(connections[0], "")
    ends = (connections[0], connections[1]) if connections else None
    return _Outcome(Hierarchy(group, hosts, comm.rank, ends, between, comm.global_ranks), apart)


def _between(comm: Collectives, group: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    """A gloo group of the same ranks that no other code uses. It ends with its last reference. ``name`` must be unique.
    """
    store = dist.PrefixStore(f"deepspeed_c/hosts/{name}", dist.distributed_c10d._get_default_store())
    return dist.ProcessGroupGloo(store, comm.rank, comm.world_size, timeout_of(group))


class _HostMarks(NamedTuple):
    name: str
    boot: str
    """Boot id of the running kernel; "" where the system does not say."""
    network: str
    """The network namespace."""


def _this_host() -> _HostMarks:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return _HostMarks(socket.gethostname(), boot, os.readlink("/proc/self/ns/net"))
    except OSError:
        return _HostMarks(socket.gethostname(), "", "")


def _apart(hosts: Sequence[_HostMarks]) -> str:
    """The reason why these ranks (``hosts`` by rank of the group) are not on one host; "" if they are."""
    first = hosts[0]
    for rank, host in enumerate(hosts):
        if not host.boot:
            return f"the system of {host.name} does not say whether ranks share it"
        if host.boot != first.boot:
            return f"ranks run on several hosts ({first.name} and {host.name})"
        if host.network != first.network:
            return f"ranks run in several network namespaces of {first.name}, as on several hosts"
    return ""


def _by_host(marks: Sequence[_HostMarks]) -> list[list[int]]:
    """The ranks of each host, ascending; hosts by their lowest ranks."""
    hosts: dict[tuple[str, str], list[int]] = {}
    for rank, mark in enumerate(marks):
        hosts.setdefault((mark.boot, mark.network), []).append(rank)
    return list(hosts.values())


def first_refusal(refusals: Sequence[str], ranks: Sequence[int]) -> str:
    """The first refusal among the ranks of a group, with the numbers in the world (``ranks``) of all ranks that have
    one; "" if no rank has one.
    """
    refused = [i for i, refusal in enumerate(refusals) if refusal]
    return f"{ranks_in_words([ranks[i] for i in refused])}: {refusals[refused[0]]}" if refused else ""
