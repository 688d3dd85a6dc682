"""Select the slots of this host for a launch, by DeepSpeed's hostfiles and its --include / --exclude grammar, for one
host.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence

from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.options import DEFAULT_HOSTFILE, Options

__all__ = ["is_this_host", "parse_filter", "read_hostfile", "select_slots"]

SEVERAL_HOSTS_FIX = (
    "leave one host (--include HOST or --num_nodes 1), or start the script on every host with torchrun or, under "
    "Slurm, `srun python SCRIPT ...`"
)


def select_slots(options: Options, devices: Sequence[int] | None) -> list[int]:
    """The slots to start one process each on, in order.

    ``devices`` are the numbers of this host's slots. None means a host without accelerators. There a slot is just a
    process, and the user may ask for any number of slots. Raises ``LaunchError`` if the request includes other hosts,
    or slots that this host does not have.
    """
    pool = _pool(options, devices)
    wanted = parse_filter(options.include or options.exclude, "--include" if options.include else "--exclude")
    if options.include:
        if devices is None and options.hostfile is None and "localhost" in pool:
            pool["localhost"] = sorted({*pool["localhost"], *(wanted.get("localhost") or [])})
        chosen = {host: _known_slots(pool, host, slots) for host, slots in wanted.items()}
        chosen = {host: chosen[host] for host in pool if host in chosen}
    elif options.exclude:
        without = {host: set(_known_slots(pool, host, slots)) for host, slots in wanted.items()}
        chosen = {host: [s for s in slots if s not in without.get(host, ())] for host, slots in pool.items()}
    else:
        chosen = dict(pool)
        if options.num_nodes is not None:
            chosen = dict(list(chosen.items())[: options.num_nodes])
    chosen = {host: slots for host, slots in chosen.items() if slots}
    if not chosen:
        raise LaunchError("nothing is left to run on", where=f"--exclude {options.exclude}", fix="exclude less")
    if len(chosen) > 1:
        raise LaunchError(
            f"this version launches one host, and {len(chosen)} are asked for: {', '.join(chosen)}",
            fix=SEVERAL_HOSTS_FIX,
        )
    (host, slots), *_ = chosen.items()
    if not is_this_host(host):
        raise LaunchError(
            f"the host {host!r} is not this one", fix="run deepspeed_c there, or with torchrun on every host"
        )
    if options.num_procs is not None and options.num_procs != len(slots):
        if options.num_procs > len(slots):
            raise LaunchError(
                f"{options.num_procs} processes are asked for, and there are {len(slots)} slots ({_listed(slots)})",
                where="--num_procs",
                fix=f"ask for at most {len(slots)}; or hide the devices (CUDA_VISIBLE_DEVICES=) to train on the CPU",
            )
        slots = slots[: options.num_procs]
    return slots


def _pool(options: Options, devices: Sequence[int] | None) -> dict[str, list[int]]:
    """Host -> its slots, from the hostfile; without a hostfile, this host only."""
    path = options.hostfile or (DEFAULT_HOSTFILE if os.path.isfile(DEFAULT_HOSTFILE) else None)
    if path is None:
        return {"localhost": list(range(options.num_procs or 1) if devices is None else devices)}
    pool = {host: list(range(n)) for host, n in read_hostfile(path).items()}
    for host, slots in pool.items():
        if devices is not None and is_this_host(host) and len(slots) > len(devices):
            raise LaunchError(
                f"{host} has {len(slots)} slots there, and this host has {len(devices)} devices",
                where=path,
                fix="correct it",
            )
        if devices is not None and is_this_host(host):
            pool[host] = list(devices[: len(slots)])
    return pool


def _known_slots(pool: Mapping[str, list[int]], host: str, slots: list[int] | None) -> list[int]:
    if host not in pool:
        raise LaunchError(f"there is no host {host!r}; known: {', '.join(pool)}", where="--include/--exclude")
    if slots is None:
        return pool[host]
    for slot in slots:
        if slot not in pool[host]:
            raise LaunchError(
                f"{host} has no slot {slot}; it has {_listed(pool[host])}",
                where="--include/--exclude",
                fix="name one of those",
            )
    return slots


def _listed(slots: Sequence[int]) -> str:
    return ", ".join(map(str, slots)) or "none"


def parse_filter(text: str, where: str = "filter") -> dict[str, list[int] | None]:
    """``HOST[:SLOT,SLOT...][@HOST...]`` as host -> sorted slots; None for all slots of a host.

    >>> parse_filter("worker-0@worker-1:2,0,2")
    {'worker-0': None, 'worker-1': [0, 2]}
    """
    wanted: dict[str, list[int] | None] = {}
    for node in text.split("@") if text else ():
        match = re.fullmatch(r"([^:\s]+)(?::(\d+(?:,\d+)*))?", node)
        if match is None:
            raise LaunchError(f"{node!r} is not of the form HOST or HOST:SLOT,SLOT", where=f"{where} {text}")
        host, slots = match.group(1), match.group(2)
        if slots is None:
            wanted[host] = None
        elif wanted.setdefault(host, []) is not None:
            wanted[host] = sorted({*wanted[host], *map(int, slots.split(","))})
    return wanted


def read_hostfile(path: str) -> dict[str, int]:
    """Host -> number of slots, in the order of the file: lines of ``HOST slots=N``, ``#`` begins a comment."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"cannot be read: {error}", where=f"--hostfile {path}") from error
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"(\S+)\s+slots=(\d+)", text)
        if match is None:
            raise LaunchError(f"{line.strip()!r} is not of the form HOST slots=N", where=f"{path}, line {number}")
        host, slots = match.group(1), int(match.group(2))
        if host in hosts:
            raise LaunchError(
                f"{host} is there a second time", where=f"{path}, line {number}", fix="remove one of the lines"
            )
        if slots < 1:
            raise LaunchError(
                f"{host} has no slot", where=f"{path}, line {number}", fix="remove the line, or give it slots"
            )
        hosts[host] = slots
    if not hosts:
        raise LaunchError("names no host", where=path, fix="add a line such as `localhost slots=2`")
    return hosts


def is_this_host(name: str) -> bool:
    """Whether the name or address leads to an interface of this machine."""
    if name in ("localhost", socket.gethostname(), socket.gethostname().split(".")[0]):
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)  # succeeds only for an address of this host
        except OSError:
            continue
        return True
    return False
