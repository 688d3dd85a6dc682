"""The table of transports.

[Note: one connection a group] A process group has one connection for all engines that use the group. Engines use it in
turn or at the same time, in an order that is the same on all ranks. All ranks make the connection together when the
group is first used, and it is closed with the group. Either all ranks have the connection, or no rank has it and all
ranks know the same reason.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from deepspeed_c.comm.transports import shared_memory, two_levels
from deepspeed_c.comm.transports.gloo import Gloo
from deepspeed_c.comm.transports.hosts import Hosts, NotConnectedError
from deepspeed_c.comm.transports.torch_backend import TorchBackend
from deepspeed_c.comm.transports.transport import Transport
from deepspeed_c.errors import CommError
from deepspeed_c.logging import logger

if TYPE_CHECKING:
    from deepspeed_c.comm.collectives import Collectives
    from deepspeed_c.config.parallel import LocalTransport

__all__ = ["connect", "connected", "cpu_backend", "of_backend"]

# Transports of CPU tensors that the ranks of a group connect by themselves, the best first: the functions connect them,
# or raise NotConnectedError.
_CONNECTED: tuple[Callable[[Hosts], Transport], ...] = (shared_memory.connect, two_levels.connect)

# Transports by a backend of ``torch.distributed``, by its name and the type of the device. Others are ``TorchBackend``.
_BACKENDS: dict[str, Callable[[str], Transport]] = {"gloo": Gloo}


def of_backend(name: str, device_type: str) -> Transport:
    """The transport by the backend of ``torch.distributed`` of that name, for tensors of ``device_type``."""
    make = _BACKENDS.get(name)
    return TorchBackend(name) if make is None else make(device_type)


class _Outcome(NamedTuple):
    """Result of the attempt to connect the ranks of a group: the same on all of them."""

    transport: Transport | None
    reason: str
    """Why not all of the ranks share memory; "" if they do."""


# One outcome for each group, success or failure. The outcome goes with the group.
_outcomes: weakref.WeakKeyDictionary[Any, _Outcome] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def connect(comm: Collectives, wish: LocalTransport) -> Transport | None:
    """The transport that the ranks of ``comm``, at least two, have connected; None where there is none but torch's.

    Collective at the first call for a group. Raises ``CommError`` on all ranks where ``wish`` is "shm" and some of the
    ranks do not share memory.
    """
    if wish == "off":
        return None
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
    return outcome.transport


def connected(group: dist.ProcessGroup | None) -> Transport | None:
    """The transport that the ranks of ``group`` have connected already; None where there is none."""
    with _lock:
        outcome = _outcomes.get(dist.group.WORLD if group is None else group)
    return None if outcome is None else outcome.transport


_cpu_backends: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()


def cpu_backend(group: dist.ProcessGroup) -> str | None:
    """The name of the group's backend for CPU tensors; None where it has none."""
    try:
        return _cpu_backends[group]
    except KeyError:
        name = dict(part.split(":", 1) for part in dist.get_backend_config(group).split(",")).get("cpu")
        with _lock:
            _cpu_backends[group] = name
        return name


def _try(comm: Collectives, group: dist.ProcessGroup) -> _Outcome:
    backend = cpu_backend(group)
    if backend != "gloo":
        return _Outcome(None, f"the group's backend for CPU tensors is {backend or 'none'}, not gloo")
    hosts = Hosts(comm, group)
    reasons: list[str] = []
    for make in _CONNECTED:
        try:
            return _Outcome(make(hosts), reasons[0] if reasons else "")
        except NotConnectedError as error:
            reasons += [error.reason] if error.reason else []
    return _Outcome(None, reasons[-1])


def _tell(outcome: _Outcome) -> None:
    if outcome.transport is None:
        logger.info("ranks talk over torch.distributed, not through shared memory: %s", outcome.reason)
    elif outcome.reason:
        logger.info("%s: %s", outcome.reason, outcome.transport.in_words())
