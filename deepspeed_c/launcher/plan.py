"""Turn the user's options into a plan for one host: one command and one environment for each of its ranks, checked
before anything runs.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from deepspeed_c.env import read_env
from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.cores import split_cores, threads_per_rank
from deepspeed_c.launcher.hostfile import is_this_host, select_hosts
from deepspeed_c.launcher.job import HostPlace
from deepspeed_c.launcher.options import Options

__all__ = ["Devices", "Plan", "RankPlan", "find_devices", "make_plan"]

LOOPBACK = "127.0.0.1"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
BIND = str(Path(__file__).with_name("bind.py"))


@dataclass(frozen=True, slots=True)
class Devices:
    """The accelerators that a new process would see."""

    kind: str
    """torch's name of the device type: "cuda", "xpu", ..."""
    names: tuple[str, ...]
    """The devices' names in CUDA_VISIBLE_DEVICES. Names that are numbers also number the slots."""

    @property
    def slots(self) -> list[int]:
        return (
            [int(name) for name in self.names] if all(map(str.isdecimal, self.names)) else list(range(len(self.names)))
        )


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One process: its command, and the variables that are added to the launcher's environment."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The input of ``run.launch``."""

    ranks: tuple[RankPlan, ...]
    """The ranks of this host."""
    first_rank: int = 0
    host: str = ""
    """Name of this host in the hostfile, if the launch has several."""
    token: str = ""
    """The secret of the run; "": a new one."""
    n_restarts: int = 0
    """Rounds of the launch before this."""
    max_restarts: int = 0
    opens_store: bool = True
    """Whether the ranks' store is on this host: that of rank 0."""
    master_addr: str
    master_port: int | None
    """None: any free port."""
    log_dir: str | None
    tag_output: bool
    gathers_logs: bool = False
    """Whether the launching host writes the logs, from labelled lines."""
    grace: float
    """Seconds between passing on a signal and SIGKILL."""
    save_pid: bool
    log_level: str


def make_plan(
    options: Options,
    devices: Devices | str | None = "find",
    *,
    place: HostPlace | None = None,
    environment: Mapping[str, str] = {},
    token: str = "",
    n_restarts: int = 0,
) -> Plan:
    """Decide what to start on this host. ``devices`` is for tests: None stands for a host without accelerators.

    place: of this host among several; None: it is the only one. environment: more variables for every rank. token: the
    secret of the run. n_restarts: rounds before this.

    Raises ``LaunchError`` for every error that the launcher can detect: a missing script, an unknown
    host or slot, too few cores, an address of another host, a log folder that cannot be made.
    """
    command = _command(options)
    is_first = place is None or place.first_rank == 0
    if is_first and options.master_addr is not None and not is_this_host(options.master_addr):
        raise LaunchError(
            "is not an address of this host", where=f"--master_addr {options.master_addr}", fix="leave it out"
        )
    if devices == "find":
        devices = find_devices()
    if place is None:
        slots = _slots_of_this_host(options, devices)
        place = HostPlace("", 0, slots, 0, 1, len(slots))
    elif devices is None:
        slots = place.slots
    else:
        slots = _slots_by_position(place, devices)
    shared = {**environment, **_shared_environment(devices, slots)}
    n_ranks = len(place.slots)
    cores = split_cores(n_ranks, options.bind_core_list) if options.bind_cores_to_rank else None
    n_threads = len(cores[0]) if cores else threads_per_rank(n_ranks)
    if not (environment.get("OMP_NUM_THREADS") or read_env().omp_num_threads):
        # torchrun sets 1, so that every CPU operator of torch uses only one core
        shared["OMP_NUM_THREADS"] = str(n_threads)
    ranks = []
    for i in range(n_ranks):
        words = command if options.no_local_rank else (*command, f"--local_rank={i}")
        if cores:
            words = (sys.executable, "-I", "-S", BIND, ",".join(map(str, cores[i])), *words)
        ranks.append(RankPlan((*words, *options.script_args), {**shared, **_rank_environment(i, place)}))
    gathers_logs = options.gather_logs and bool(place.name)
    return Plan(
        ranks=tuple(ranks),
        first_rank=place.first_rank,
        host=place.name,
        token=token,
        n_restarts=n_restarts,
        max_restarts=options.max_restarts if options.elastic_training else 0,
        opens_store=is_first,
        master_addr=options.master_addr or LOOPBACK,
        master_port=options.master_port,
        log_dir=None if gathers_logs else _log_dir(options.enable_each_rank_log),
        tag_output=options.tag_output,
        gathers_logs=gathers_logs,
        grace=options.grace,
        save_pid=options.save_pid,
        log_level=options.log_level,
    )


def _slots_by_position(place: HostPlace, devices: Devices) -> list[int]:
    """The slots of a hostfile, which counts the devices that the host shows, as the host itself numbers them."""
    if place.slots[-1] >= len(devices.slots):
        raise LaunchError(
            f"{place.name} has {place.slots[-1] + 1} slots there, and the host has {len(devices.slots)} devices",
            where="--hostfile",
            fix="correct it",
        )
    return [devices.slots[slot] for slot in place.slots]


def _slots_of_this_host(options: Options, devices: Devices | None) -> list[int]:
    """The slots of a launch on this host alone."""
    (host, slots), *others = select_hosts(options, None if devices is None else devices.slots).items()
    if others or not is_this_host(host):
        raise LaunchError(
            f"the host {host!r} is not this one" if not others else "several hosts are asked for",
            fix="leave one host, this one",
        )
    return slots


def find_devices() -> Devices | None:
    """The accelerators that torch sees, or None. Creates no context on them."""
    import torch

    if not torch.accelerator.is_available():
        return None
    kind, count = torch.accelerator.current_accelerator().type, torch.accelerator.device_count()
    visible = [name.strip() for name in (read_env().visible_devices or "").split(",") if name.strip()]
    if kind != "cuda" or len(visible) < count:
        visible = [str(i) for i in range(count)]
    return Devices(kind, tuple(visible[:count]))


def _command(options: Options) -> tuple[str, ...]:
    if options.no_python:
        program = shutil.which(options.script)
        if program is None:
            raise LaunchError(
                "is not a program that can be run",
                where=options.script,
                fix="check the path and its x permission, or drop --no_python",
            )
        return (program,)
    if options.module:
        _check_module(options.script)
        return (sys.executable, "-u", "-m", options.script)
    if not os.path.exists(options.script):
        raise LaunchError(
            f"there is no such script (in {os.getcwd()})",
            where=options.script,
            fix="check the path; the launcher's own options come before it",
        )
    if os.path.isdir(options.script) and not os.path.isfile(os.path.join(options.script, "__main__.py")):
        raise LaunchError("is a folder without a __main__.py", where=options.script, fix="name the script in it")
    return (sys.executable, "-u", options.script)


def _found_by_others(name: str, path: Iterable[str] | None) -> ModuleSpec | None:
    """The module as other finders than that of ``sys.path`` know it: builtin, frozen, or installed as editable."""
    finders = (finder for finder in sys.meta_path if finder is not PathFinder and hasattr(finder, "find_spec"))
    return next((spec for finder in finders if (spec := finder.find_spec(name, path)) is not None), None)


def _check_module(name: str) -> None:
    """Look for the module as ``python -m`` would, without importing its packages."""
    path: Iterable[str] | None = [os.getcwd(), *sys.path]
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for i, part in enumerate(parts):
        full = ".".join(parts[: i + 1])
        # Only the last part of the name: for a dotted name the finder would need the imported package
        spec = PathFinder.find_spec(part, path) or _found_by_others(full, path if i else None)
        if not spec:
            raise LaunchError(
                f"there is no module {full!r}", where=f"--module {name}", fix="check its name and PYTHONPATH"
            )
        path = spec.submodule_search_locations and list(spec.submodule_search_locations)
        if path is None and i < len(parts) - 1:
            raise LaunchError(f"{full!r} is no package", where=f"--module {name}", fix="check the module's name")


def _shared_environment(devices: Devices | None, slots: Sequence[int]) -> dict[str, str]:
    if devices is None:
        return {}
    if devices.kind == "cuda":
        name_of = dict(zip(devices.slots, devices.names, strict=True))
        return {VISIBLE_DEVICES: ",".join(name_of[slot] for slot in slots)}
    if list(slots) != devices.slots[: len(slots)]:
        raise LaunchError(
            f"this version can choose among CUDA devices only, not {devices.kind}",
            where="--include/--exclude",
            fix="use --num_gpus",
        )
    return {}


def _rank_environment(local_rank: int, place: HostPlace) -> dict[str, str]:
    """The variables that torch's launcher sets, and the variables that only DeepSpeed's launcher sets. ``run.launch``
    adds address and port."""
    rank, world_size = str(place.first_rank + local_rank), str(place.world_size)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "ROLE_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(len(place.slots)),
        "ROLE_WORLD_SIZE": world_size,
        "LOCAL_SIZE": str(len(place.slots)),
        "GROUP_RANK": str(place.index),
        "GROUP_WORLD_SIZE": str(place.n_hosts),
        "CROSS_RANK": str(place.index),
        "CROSS_SIZE": str(place.n_hosts),
        "ROLE_NAME": "default",
    }


def _log_dir(path: str | None) -> str | None:
    if path is not None:
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"cannot be made: {error}", where=f"--enable_each_rank_log {path}", fix="name a folder"
            ) from error
        if not os.access(path, os.W_OK | os.X_OK):
            raise LaunchError("cannot be written", where=f"--enable_each_rank_log {path}", fix="name another folder")
    return path
