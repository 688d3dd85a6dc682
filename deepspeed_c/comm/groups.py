"""Process groups: how ranks find each other, and the ranks' numbers in a group.

A group forms in two steps. First all ranks sign in at a ``torch.distributed`` store (``_meet``). Then
``torch.distributed`` builds its group over that store. So an error can name a rank that never comes, instead of leaving
the other ranks to wait in silence.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from deepspeed_c.comm.discover import DEFAULT_PORT, LaunchPlace, discover, local_rank_of
from deepspeed_c.comm.leaving import wait_at_exit
from deepspeed_c.env import read_env
from deepspeed_c.errors import CommError
from deepspeed_c.listening import is_loopback, listening_socket
from deepspeed_c.logging import logger, set_rank

__all__ = [
    "ARRIVAL_TIMEOUT",
    "DEFAULT_TIMEOUT",
    "default_backend",
    "destroy_process_group",
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "init_distributed",
    "initialize_mesh_device",
    "is_available",
    "is_initialized",
    "mpi_discovery",
    "new_group",
    "new_group_of",
    "require_initialized",
]

# Limit of one collective, where the caller gives none: 10 minutes as in DeepSpeed 0.19.6. DEEPSPEED_TIMEOUT
# (minutes) overrides it.
DEFAULT_TIMEOUT = timedelta(minutes=10)
# Limit of init_distributed's wait for all ranks, where the caller gives none.
ARRIVAL_TIMEOUT = timedelta(seconds=60)

_MAX_RANKS_NAMED = 16
_LINGER = timedelta(seconds=2)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Starts ``torch.distributed`` unless it runs already; every process of the job calls it.

    The place of this process comes from ``rank`` and ``world_size`` if given, otherwise from the environment of
    torchrun, the deepspeed_c launcher, Open MPI, MVAPICH2, PMI (MPICH, Intel MPI), Slurm or Kubernetes (PyTorchJob,
    Trainer, indexed Jobs). With none of them, it is the only process, and takes no port. RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR and MASTER_PORT are set in the environment where they were missing, because other libraries read them.

    dist_backend: a ``torch.distributed`` backend. The default is gloo, and with an accelerator ``cpu:gloo,cuda:nccl``
    (or the accelerator's own backend).
    distributed_port: port of rank 0 where MASTER_PORT is not set.
    timeout: limit of one collective, and of the wait for all ranks. The defaults are ``DEFAULT_TIMEOUT`` and
    ``ARRIVAL_TIMEOUT``.
    init_method: ``env://``, ``tcp://host:port`` or ``file:///path``.
    dist_init_required: False means that ``torch.distributed`` must have been started before.
    config: a configuration with a ``comms_logger`` section (see ``configure``).

    Raises ``CommError`` when the environment is incomplete or contradictory, the port is taken, or ranks do not come in
    time.
    """
    if config is not None:
        from deepspeed_c.comm.comm import configure  # comm.py stands on this module

        configure(deepspeed_config=config)
    wait_at_exit()
    if dist.is_initialized():
        _check_same_place(rank, world_size)
        set_rank(dist.get_rank())
        return
    if dist_init_required is False:
        raise CommError(
            "torch.distributed is not initialised, and dist_init_required=False forbids to do it here",
            where="init_distributed",
            fix="call deepspeed_c.init_distributed() first, or leave dist_init_required unset",
        )
    if timeout is not None and (not isinstance(timeout, timedelta) or timeout <= timedelta(0)):
        raise CommError(
            f"timeout is {timeout!r}", where="init_distributed", fix="pass a positive datetime.timedelta, or None"
        )
    place = _place(rank, world_size, init_method, auto_mpi_discovery, distributed_port)
    backend = dist_backend or default_backend()
    _check_backend(backend)
    limit, arrival = _limits(timeout)
    try:
        if place.world_size == 1:
            store, n_before = dist.HashStore(), 0
        else:
            store, n_before = _meet(_open_store(place, init_method, arrival), place, arrival)
        local_rank = place.local_rank if place.local_rank is not None else n_before
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=limit)
    except CommError:
        raise
    except (RuntimeError, ValueError) as error:
        raise CommError(
            f"torch.distributed could not form a group of {place.world_size} ranks over {backend}: {error}",
            where=f"rank {place.rank}, {_address(place)}",
            fix="see the reason above; all ranks need the same backend, and to reach each other over the network",
        ) from error
    set_rank(place.rank)
    _publish(place, local_rank)
    if verbose and place.rank == 0:
        logger.info(
            "torch.distributed: %d rank(s) over %s (%s), timeout %g s",
            place.world_size,
            backend,
            place.source,
            limit.total_seconds(),
        )


def _place(
    rank: int, world_size: int, init_method: str | None, auto_mpi_discovery: bool, distributed_port: int
) -> LaunchPlace:
    if (rank >= 0) != (world_size >= 0):
        raise CommError(
            f"rank={rank} and world_size={world_size}: one is given without the other",
            where="init_distributed",
            fix="pass both, or neither and let the launcher's environment say",
        )
    if rank < 0:
        environ: dict[str, str] = dict(os.environ)
        if init_method is not None and init_method.startswith("tcp://"):
            host, port = _tcp_address(init_method)
            environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
        elif init_method is not None and init_method != "env://":
            environ["MASTER_ADDR"] = init_method  # such a method needs none
            environ.pop("MASTER_PORT", None)
        return discover(environ, distributed_port=distributed_port, auto_mpi_discovery=auto_mpi_discovery)
    given = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    of_launcher = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    given.update({name: value for name, value in os.environ.items() if name in of_launcher})
    if init_method is not None and init_method.startswith("tcp://"):
        host, port = _tcp_address(init_method)
        given.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    elif init_method is not None and init_method != "env://":
        given["MASTER_ADDR"] = init_method
        given.pop("MASTER_PORT", None)
    return discover(given, distributed_port=distributed_port)._replace(source="arguments")


def _tcp_address(init_method: str) -> tuple[str, int]:
    try:
        parts = urlsplit(init_method)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise CommError(
            f"{init_method!r} names no host and port", where="init_method", fix="write tcp://HOST:PORT, or use env://"
        )
    return host, port


def _limits(timeout: timedelta | None) -> tuple[timedelta, timedelta]:
    """(limit of one collective, limit of the wait for all ranks)"""
    if timeout is not None:
        return timeout, timeout
    minutes = read_env().timeout_minutes
    return (DEFAULT_TIMEOUT if minutes is None else timedelta(minutes=minutes)), ARRIVAL_TIMEOUT


def default_backend() -> str:
    """gloo for the CPU, together with the backend of the accelerator if there is one (nccl for CUDA)."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "gloo"
    own = dist.get_default_backend_for_device(accelerator.type)
    return "gloo" if own == "gloo" else f"cpu:gloo,{accelerator.type}:{own}"


def _check_backend(backend: str) -> None:
    for part in backend.split(","):
        name = part.split(":")[-1].strip()
        if not dist.is_backend_available(name):
            raise CommError(
                f"this torch has no {name!r} backend",
                where=f"dist_backend={backend!r}",
                fix='leave dist_backend unset, or use "gloo" on CPU',
            )


def _check_same_place(rank: int, world_size: int) -> None:
    have = dist.get_rank(), dist.get_world_size()
    if rank >= 0 and world_size >= 0 and (rank, world_size) != have:
        raise CommError(
            f"asked to be rank {rank} of {world_size}, but torch.distributed runs here as rank {have[0]} of {have[1]}",
            where="init_distributed",
            fix="leave rank and world_size out, or call destroy_process_group() first",
        )


def _address(place: LaunchPlace) -> str:
    return f"{place.master_addr}:{place.master_port}" if place.master_port else str(place.master_addr)


def _open_store(place: LaunchPlace, init_method: str | None, timeout: timedelta) -> dist.Store:
    if init_method is not None and not init_method.startswith(("env://", "tcp://")):
        store, _, _ = next(dist.rendezvous(init_method, place.rank, place.world_size, timeout=timeout))
        return store
    # torchrun's agent, if there is one, listens at MASTER_PORT itself; otherwise rank 0 does.
    has_agent = read_env().agent_store == str(True)
    is_host = place.rank == 0 and not has_agent
    listening = _listening_socket(place) if is_host else None
    try:
        store = dist.TCPStore(
            place.master_addr,
            place.master_port,
            place.world_size,
            is_master=is_host,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=not has_agent,
            master_listen_fd=None if listening is None else listening.detach(),
        )
        # torchrun starts the ranks anew at the store that those before them have used.
        attempt = f"deepspeed_c/attempt{read_env().restart_count}of{place.world_size}"
        return dist.PrefixStore(attempt, store) if has_agent else store
    except RuntimeError as error:
        if is_host:
            raise CommError(
                f"rank 0 cannot listen on port {place.master_port}: {error}",
                where=_address(place),
                fix="another process (an earlier run?) holds the port: end it, or choose another"
                " with MASTER_PORT or --master_port",
            ) from error
        raise CommError(
            f"rank {place.rank} of {place.world_size} could not reach rank 0"
            f" within {timeout.total_seconds():g} s: {error}",
            where=_address(place),
            fix="check that rank 0 runs and that MASTER_ADDR and MASTER_PORT name its host;"
            " pass a longer timeout= for slow starts",
        ) from error


def _listening_socket(place: LaunchPlace) -> socket.socket | None:
    """Listens at the address by which the other ranks reach this one; None: torch listens at all addresses.

    None where other hosts know this host by an address that it does not have itself: a translated address, or a name
    that means the loopback here and something else there. None also if the port is taken: torch then finds a store of
    this process at the port, or reports the error.
    """
    try:
        bound = listening_socket(str(place.master_addr), int(place.master_port or 0))
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None
        raise CommError(
            f"rank 0 cannot listen on port {place.master_port}: {error}",
            where=_address(place),
            fix="choose another with MASTER_PORT or --master_port",
        ) from error
    if is_loopback(bound.getsockname()[0]) and not is_loopback(str(place.master_addr)):
        bound.close()
        return None
    return bound


def _meet(store: dist.Store, place: LaunchPlace, timeout: timedelta) -> tuple[dist.Store, int]:
    """Waits until all ranks have signed in. Returns the store for the group, and the number of lower ranks on this
    host.

    A store can outlive a group (as the store of torchrun's agent does), so every group that this process forms uses its
    own round of keys.
    """
    rank, world_size = place.rank, place.world_size
    me = f"{socket.gethostname()} pid {os.getpid()}"
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        owner = store.compare_set(f"deepspeed_c/owner/{rank}", "", me).decode()
        if owner != me:
            raise CommError(
                f"two processes say that they are rank {rank}: {owner} and {me}",
                where=_address(place),
                fix="give every process its own RANK; if an earlier run is still alive, end it"
                " or choose another MASTER_PORT",
            )
        round_ = store.add(f"deepspeed_c/round/{rank}", 1)
        prefix = f"deepspeed_c/{round_}"
        store.set(f"{prefix}/here/{rank}", me)
        verdict = f"{prefix}/verdict"
        if store.add(f"{prefix}/n_here", 1) == world_size:
            store.compare_set(verdict, "", "all")
        try:
            store.wait([verdict], timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except dist.DistStoreError:
            missing = [r for r in range(world_size) if not store.check([f"{prefix}/here/{r}"])]
            named = ", ".join(map(str, missing[:_MAX_RANKS_NAMED])) + (", ..." if missing[_MAX_RANKS_NAMED:] else "")
            # The other ranks are told too, so that all ranks stop with the same message.
            store.compare_set(
                verdict,
                "",
                f"{world_size - len(missing)} of {world_size} ranks came within {timeout.total_seconds():g} s;"
                f" missing: rank {named}",
            )
        outcome = store.get(verdict).decode()
        if outcome != "all":
            _linger(store, prefix, rank)
            raise CommError(
                outcome,
                where=f"rank {rank}, {_address(place)}",
                fix="look at the output of the missing ranks; pass a longer timeout= if they start slowly",
            )
        n_before = 0
        if place.local_rank is None:
            hosts = [store.get(f"{prefix}/here/{r}").decode().rsplit(" pid ", 1)[0] for r in range(rank)]
            n_before = hosts.count(me.rsplit(" pid ", 1)[0])
    except CommError:
        raise
    except RuntimeError as error:
        raise CommError(
            f"rank {rank} of {world_size} lost rank 0 while the ranks gathered: {error}",
            where=_address(place),
            fix="look at rank 0's output: it has stopped",
        ) from error
    return dist.PrefixStore(f"{prefix}/group", store), n_before


def _linger(store: dist.Store, prefix: str, rank: int) -> None:
    """Keeps rank 0, which may own the store, until all ranks that came have read the reason for stopping."""
    if store.add(f"{prefix}/n_read", 1) == store.add(f"{prefix}/n_here", 0):
        store.set(f"{prefix}/all_read", "")
    if rank == 0:
        try:
            store.wait([f"{prefix}/all_read"], _LINGER)
        except dist.DistStoreError:
            return  # a rank has ended without reading the reason; the store need not live for it


def _publish(place: LaunchPlace, local_rank: int) -> None:
    os.environ.setdefault("RANK", str(place.rank))
    os.environ.setdefault("WORLD_SIZE", str(place.world_size))
    os.environ.setdefault("LOCAL_RANK", str(local_rank))
    if place.master_port:
        os.environ.setdefault("MASTER_ADDR", str(place.master_addr))
        os.environ.setdefault("MASTER_PORT", str(place.master_port))


def mpi_discovery(distributed_port: int = DEFAULT_PORT, verbose: bool = True) -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the variables of MPI, PMI or Slurm.

    A process without these variables gets rank 0 of 1. Raises ``CommError`` as ``init_distributed`` does.
    """
    others = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    place = discover(others, distributed_port=distributed_port)
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.local_rank if place.local_rank is not None else 0),
        MASTER_ADDR=place.master_addr or "127.0.0.1",
        MASTER_PORT=str(place.master_port or distributed_port),
    )
    if verbose:
        logger.info("%s: rank %d of %d, rank 0 at %s", place.source, place.rank, place.world_size, _address(place))


def is_available() -> bool:
    """Whether this torch can communicate at all."""
    return dist.is_available()


def is_initialized() -> bool:
    """Whether the default group exists (formed here or by the user)."""
    return dist.is_available() and dist.is_initialized()


def require_initialized(where: str) -> None:
    """Raises ``CommError`` unless the default group exists."""
    if not is_initialized():
        raise CommError(
            "torch.distributed is not initialised",
            where=where,
            fix="call deepspeed_c.init_distributed() (deepspeed_c.initialize() does it)",
        )


def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    """Ends ``group``, by default all groups. Does nothing when there is none."""
    if is_initialized():
        dist.destroy_process_group(group)


def new_group(ranks: Sequence[int] | None = None, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A group of global ``ranks``. All ranks of the world call this function, in the same order. ``timeout`` is as in
    ``init_distributed``.
    """
    require_initialized("new_group")
    world_size = dist.get_world_size()
    ranks = list(range(world_size)) if ranks is None else list(ranks)
    if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0 or max(ranks) >= world_size:
        raise CommError(
            f"{ranks} is no set of ranks in a world of {world_size}",
            where="new_group",
            fix=f"name at least one rank, each once, between 0 and {world_size - 1}",
        )
    # torch would fall back to its own default (30 minutes) instead of ours.
    return dist.new_group(ranks, timeout=_limits(timeout)[0])


def new_group_of(
    ranks: Sequence[int], *, backend: str | None = None, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """A new group of these global ranks. Collective over them; other ranks do not call it.

    torch names such a group after the number of groups that the rank has, so ranks with different numbers would wait
    for each other under different names. Before it is made, ranks with fewer groups make groups of their own.
    """
    if len(ranks) > 1:
        n_groups = _most_groups(ranks)
        while len(dist.distributed_c10d._world.pg_names) < n_groups:
            dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)
    return dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True)


def _most_groups(ranks: Sequence[int]) -> int:
    """The largest number of groups that one of ``ranks`` has. The first of them asks the others, through the store."""
    name = "deepspeed_c/groups/" + "_".join(map(str, ranks))
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    mine = len(dist.distributed_c10d._world.pg_names)
    if dist.get_rank() == ranks[0]:
        most = max(mine, *(int(store.get(str(rank))) for rank in ranks[1:]))
        store.set("most", str(most))
    else:
        store.set(str(dist.get_rank()), str(mine))
        most = int(store.get("most"))
    if store.add("n_read", 1) == len(ranks):  # the next time, the ranks write under the same keys
        for key in ("most", "n_read", *map(str, ranks[1:])):
            store.delete_key(key)
    return most


def timeout_of(group: dist.ProcessGroup | None = None) -> timedelta:
    """Limit of one collective of ``group``. Groups made from ``group`` should have the same limit."""
    group = dist.group.WORLD if group is None else group
    backend = group._get_backend(next(iter(group._device_types)))
    return backend.options._timeout if hasattr(backend, "options") else _limits(None)[0]


def get_world_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    require_initialized("get_world_group")
    return dist.group.WORLD


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """How many ranks ``group`` has; -1 when this process is not part of it."""
    require_initialized("get_world_size")
    return dist.get_world_size(group)


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's rank within ``group``; -1 when it is not part of it."""
    require_initialized("get_rank")
    return dist.get_rank(group)


def get_local_rank() -> int:
    """This process's number on its host: LOCAL_RANK, which ``init_distributed`` sets where the launcher did not."""
    require_initialized("get_local_rank")
    return local_rank_of(os.environ)


def get_global_rank(group: dist.ProcessGroup | None = None, group_rank: int = 0) -> int:
    """The global rank of rank ``group_rank`` of ``group``."""
    require_initialized("get_global_rank")
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: dist.ProcessGroup | None = None) -> list[int]:
    """The global ranks of all ranks of ``group``, in the group's order."""
    require_initialized("get_all_ranks_from_group")
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """A ``DeviceMesh`` over all ranks, on the accelerator if there is one, else on the CPU."""
    require_initialized("initialize_mesh_device")
    from torch.distributed.device_mesh import init_device_mesh

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return init_device_mesh(
        "cpu" if accelerator is None else accelerator.type, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names)
    )
