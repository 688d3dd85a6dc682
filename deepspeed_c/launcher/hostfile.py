"""The hosts of a launch and their slots, by DeepSpeed's hostfiles and its --include / --exclude grammar."""

from __future__ import annotations

import difflib
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence

from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.job import name_of
from deepspeed_c.launcher.options import DEFAULT_HOSTFILES, Options
from deepspeed_c.launcher.runners import find_runner

__all__ = [
    "allocated_hosts",
    "filter_hosts",
    "hostfile_of",
    "hosts_of",
    "is_this_host",
    "parse_filter",
    "parse_hostfile",
    "read_hostfile",
    "select_hosts",
]

THIS_HOST = "localhost"


def select_hosts(options: Options, devices: Sequence[int] | None) -> dict[str, list[int]]:
    """Host -> the slots to start one process each on. Hosts have the order of the hostfile, slots are sorted.

    ``devices`` are the numbers of this host's slots. None means a host without accelerators. There a slot is just a
    process, and the user may ask for any number of slots. The slots of other hosts are those of the hostfile; the
    host itself compares them with its devices. Raises ``LaunchError`` for a host or a slot that is not in the pool.
    """
    path = hostfile_of(options)
    pool = _pool(options, path, devices)
    if options.include and devices is None and path is None and THIS_HOST in pool:
        wanted = parse_filter(options.include, "--include")
        pool[THIS_HOST] = sorted({*pool[THIS_HOST], *(wanted.get(THIS_HOST) or [])})
    if options.include or options.exclude:
        chosen = filter_hosts(pool, options.include, options.exclude)
    else:
        chosen = _first(pool, options.num_nodes, path)
    chosen = {host: slots for host, slots in chosen.items() if slots}
    if not chosen:
        raise LaunchError("nothing is left to run on", where=f"--exclude {options.exclude}", fix="exclude less")
    if options.num_procs is not None:
        chosen = {host: _first_slots(host, slots, options.num_procs) for host, slots in chosen.items()}
    return chosen


def filter_hosts(pool: Mapping[str, list[int]], include: str, exclude: str) -> dict[str, list[int]]:
    """The hosts and slots of ``pool`` that ``include`` names, or that ``exclude`` does not, in the pool's order. A host
    may be left without slots. Raises LaunchError for hosts and slots that the pool lacks.
    """
    if include:
        wanted = parse_filter(include, "--include")
        chosen = {host: _known_slots(pool, host, slots) for host, slots in wanted.items()}
        return {host: chosen[host] for host in pool if host in chosen}
    wanted = parse_filter(exclude, "--exclude")
    without = {host: set(_known_slots(pool, host, slots)) for host, slots in wanted.items()}
    return {host: [s for s in slots if s not in without.get(host, ())] for host, slots in pool.items()}


def hostfile_of(options: Options) -> str | None:
    """The path of the hostfile, or None."""
    return options.hostfile or _default_hostfile()


def _default_hostfile() -> str | None:
    return next(filter(os.path.isfile, DEFAULT_HOSTFILES), None)


def allocated_hosts(options: Options) -> dict[str, int] | None:
    """Host -> its number of slots, in the allocation of a batch system that --launcher names; None without one."""
    return None if options.no_ssh else find_runner(options.launcher).allocated(options)


def _pool(options: Options, path: str | None, devices: Sequence[int] | None) -> dict[str, list[int]]:
    """Host -> its slots, from the hostfile. Without a hostfile: the hosts of the batch system's allocation, if
    --launcher knows one; else this host, or with --no_ssh hosts that are as many as --num_nodes and have as many slots
    as this one.
    """
    allocated = allocated_hosts(options) if path is None else None
    if allocated is not None:
        return {host: list(range(n)) for host, n in allocated.items()}
    if path is None:
        slots = list(range(options.num_procs or 1) if devices is None else devices)
        if options.no_ssh and options.num_nodes is not None:
            return {f"host-{i}": slots for i in range(options.num_nodes)}
        return {THIS_HOST: slots}
    pool = {host: list(range(n)) for host, n in read_hostfile(path).items()}
    for host, slots in pool.items():
        if devices is None or not is_this_host(host):
            continue
        if len(slots) > len(devices):
            raise LaunchError(
                f"{host} has {len(slots)} slots there, and this host has {len(devices)} devices",
                where=path,
                fix="correct it",
            )
        pool[host] = list(devices[: len(slots)])
    return pool


def _first(pool: Mapping[str, list[int]], n_hosts: int | None, path: str | None) -> dict[str, list[int]]:
    if n_hosts is None:
        return dict(pool)
    if n_hosts > len(pool):
        raise LaunchError(
            f"{n_hosts} hosts are asked for, and {path or 'without a hostfile there'} "
            + (f"names {len(pool)}" if path else "is one"),
            where="--num_nodes",
            fix="name the hosts in a --hostfile (lines of `HOST slots=N`), or start the same command on each host with "
            "--no_ssh --node_rank I --master_addr ADDR",
        )
    return dict(list(pool.items())[:n_hosts])


def _first_slots(host: str, slots: list[int], n: int) -> list[int]:
    if n > len(slots):
        raise LaunchError(
            f"{n} processes are asked for, and there are {len(slots)} slots ({_listed(slots)})"
            + ("" if host == THIS_HOST else f" on {host}"),
            where="--num_procs",
            fix=f"ask for at most {len(slots)}; or hide the devices (CUDA_VISIBLE_DEVICES=) to train on the CPU",
        )
    return slots[:n]


def _known_slots(pool: Mapping[str, list[int]], host: str, slots: list[int] | None) -> list[int]:
    if host not in pool:
        raise LaunchError(
            f"there is no host {host!r}{_near(host, pool)}; known: {', '.join(pool)}", where="--include/--exclude"
        )
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


def _near(word: str, names: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, list(names), n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


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


def hosts_of(path: str | None) -> list[str]:
    """The hosts of a hostfile, or of the default hostfile. Raises LaunchError if it is not there, or bad."""
    path = path or _default_hostfile()
    if path is None:
        raise LaunchError(
            f"is not given, and there is no {' or '.join(DEFAULT_HOSTFILES)}",
            where="--hostfile",
            fix="name a file with lines of `HOST slots=N`",
        )
    return list(read_hostfile(path))


def read_hostfile(path: str) -> dict[str, int]:
    """Host -> number of slots, in the order of the file. Raises LaunchError for a file that is not there or bad."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            f"cannot be read: {error}", where=f"--hostfile {path}", fix="name a file with lines of `HOST slots=N`"
        ) from error
    return parse_hostfile(lines, path)


def parse_hostfile(lines: Iterable[str], path: str) -> dict[str, int]:
    """Host -> number of slots, from lines of ``HOST slots=N`` or, as MPICH writes them, ``HOST:N``; ``#`` begins a
    comment. Further words of Open MPI's, such as ``max_slots=N``, are skipped.

    path: for messages.
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"(\S+)\s+slots=(\d+)(?:\s+[\w-]+=\S+)*", text) or re.fullmatch(r"([^\s:]+):(\d+)", text)
        if match is None:
            raise LaunchError(
                f"{line.strip()!r} is not of the form HOST slots=N", where=f"{path}, line {number}", fix="correct it"
            )
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
    """Whether the name or address (``HOST`` or ``USER@HOST``) leads to an interface of this machine."""
    name = name_of(name)
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
