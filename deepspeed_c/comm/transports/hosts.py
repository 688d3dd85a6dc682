"""The ranks of a group while they connect: which of them share a host, and what each of them says of an attempt."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from deepspeed_c.comm.ledger import ranks_in_words

__all__ = ["GroupRanks", "Hosts", "NotConnectedError"]

# Errors of an attempt to share memory, or to connect: the system lacks a feature, no memory is left, another user owns
# the memory.
_REFUSALS = (MemoryError, OSError, ValueError, RuntimeError)


class NotConnectedError(Exception):
    """A transport cannot connect the ranks of a group. All ranks raise it with the same reason; "" where the transport
    is for ranks that lie otherwise.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class GroupRanks(Protocol):
    """The members of ``Collectives`` that this needs."""

    rank: int
    world_size: int
    global_ranks: Sequence[int]

    def gather_objects(self, value: Any, *, label: str = "") -> list[Any]: ...


class HostMarks(NamedTuple):
    """The words of a rank about its host."""

    name: str
    boot: str
    """Boot id of the running kernel; "" where the system does not say."""
    network: str
    """The network namespace."""


class Hosts:
    """The ranks of ``group`` by host, while they connect."""

    def __init__(self, comm: GroupRanks, group: dist.ProcessGroup) -> None:
        """Collective: the ranks tell one another of their hosts."""
        self.comm, self.group = comm, group
        marks = comm.gather_objects(_this_host(), label="host")
        self.apart = _apart(marks)
        """Why the ranks are not all on one host; "" if they are."""
        self.by_host = _by_host(marks)
        """The ranks of each host, ascending; hosts by their lowest ranks."""
        self.mine = next(ranks for ranks in self.by_host if comm.rank in ranks)
        """The ranks of this host."""

    def agree(self, attempt: Callable[[], Any], label: str) -> list[Any]:
        """Makes the attempt on each rank. Returns what it returned on each of them, by rank; that is pickled.

        Collective. Raises NotConnectedError on all ranks if it failed on one.
        """
        return agree(self.comm, attempt, label)


def agree(comm: GroupRanks, attempt: Callable[[], Any], label: str) -> list[Any]:
    """``Hosts.agree``, for ranks that are known to share a host."""
    value, refusal = None, ""
    try:
        value = attempt()
    except _REFUSALS as error:
        refusal = str(error)
    told = comm.gather_objects((refusal, value), label=label)
    refused = [rank for rank, (why, _) in enumerate(told) if why]
    if refused:
        who = ranks_in_words([comm.global_ranks[rank] for rank in refused])
        raise NotConnectedError(f"{who}: {told[refused[0]][0]}")
    return [value for _, value in told]


def _this_host() -> HostMarks:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return HostMarks(socket.gethostname(), boot, os.readlink("/proc/self/ns/net"))
    except OSError:
        return HostMarks(socket.gethostname(), "", "")


def _apart(hosts: Sequence[HostMarks]) -> str:
    """The reason why these ranks (``hosts`` by rank of the group) are not on one host; "" if they are."""
    first = hosts[0]
    for host in hosts:
        if not host.boot:
            return f"the system of {host.name} does not say whether ranks share it"
        if host.boot != first.boot:
            return f"ranks run on several hosts ({first.name} and {host.name})"
        if host.network != first.network:
            return f"ranks run in several network namespaces of {first.name}, as on several hosts"
    return ""


def _by_host(marks: Sequence[HostMarks]) -> list[list[int]]:
    hosts: dict[tuple[Any, ...], list[int]] = {}
    for rank, mark in enumerate(marks):
        # A rank whose system does not say where it runs has a host of its own.
        hosts.setdefault((mark.boot, mark.network) if mark.boot else (rank,), []).append(rank)
    return list(hosts.values())
