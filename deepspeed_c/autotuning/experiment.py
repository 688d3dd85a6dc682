"""One experiment: a folder with a configuration, the launch of the user's script with it, and what came of it.

Files of the folder: ``ds_config.json``, ``exp.json`` (what was started, and how it ended), ``cmd.txt``, ``stdout.log``,
``stderr.log``, and ``metrics.json``, which the engine writes (``deepspeed_c/engine/experiment.py``).
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed_c.autotuning.space import Candidate, get
from deepspeed_c.cgroups import MemoryGroup, memory_group
from deepspeed_c.config.tuning import Autotuning
from deepspeed_c.engine.experiment import progress_path, write_json
from deepspeed_c.errors import ConfigError
from deepspeed_c.guarded import ended
from deepspeed_c.quantity import as_binary

__all__ = [
    "Launch",
    "Result",
    "arguments_for",
    "config_index",
    "last_lines",
    "metric_path",
    "prepare",
    "run_experiment",
]

_CONFIG_FLAGS = ("--deepspeed_config", "--deepspeed")
_OF_RUNS = ("auto_resume", "every", "preemption")
_TAIL_LINES = 20
_STOP_SECONDS = 40.0  # more than the launcher gives its ranks
_MEASURED = ("enabled", "start_profile_step", "end_profile_step", "metric")
_POLL_SECONDS = 0.1


class Launch(NamedTuple):
    """How the user starts the script."""

    options: tuple[str, ...]
    """Words of the launcher, without --autotuning."""
    script: str
    arguments: tuple[str, ...]
    n_ranks: int
    n_local: int
    """Most ranks of one host."""
    is_file: bool = True
    """Whether the script is a Python file, not a module or a program."""

    def command(self, arguments: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "deepspeed_c", *self.options, self.script, *arguments]

    def shown(self, arguments: Sequence[str]) -> str:
        """The command as a user types it."""
        return shlex.join(["deepspeed_c", *self.options, self.script, *arguments])


class Result(NamedTuple):
    """Result of a candidate: its metrics, or why it has none."""

    name: str
    metrics: dict[str, Any] | None = None
    problem: str = ""
    seconds: float = 0.0
    is_reused: bool = False
    """Whether an earlier search ran it."""
    is_stuck: bool = False
    """Whether it was ended because it took no step for too long."""

    def value(self, metric: str) -> float | None:
        found = None if self.metrics is None else self.metrics.get(metric)
        return found if isinstance(found, (int, float)) else None


def config_index(arguments: Sequence[str]) -> tuple[int, str]:
    """(index of the argument that names the configuration file, the part of the argument before the name).

    Raises ConfigError if no argument names one.
    """
    for flag in _CONFIG_FLAGS:
        for i, word in enumerate(arguments):
            if word.startswith(f"{flag}="):
                return i, f"{flag}="
            names_file = flag != "--deepspeed" or (i + 1 < len(arguments) and arguments[i + 1].endswith(".json"))
            if word == flag and i + 1 < len(arguments) and names_file:
                return i + 1, ""
    raise ConfigError(
        "the script's arguments name no configuration file",
        where="--autotuning",
        fix="start the script with --deepspeed_config FILE (for scripts of the Trainer: --deepspeed FILE.json)",
    )


def arguments_for(
    arguments: Sequence[str], path: str, config: Mapping[str, Any], mappings: Mapping[str, str]
) -> list[str]:
    """The script's arguments with another configuration file. mappings: dotted key -> the script's option that takes
    its value too."""
    words = list(arguments)
    i, prefix = config_index(words)
    words[i] = prefix + path
    for key, flag in mappings.items():
        value = get(config, key.strip())
        if value is None or value == "auto":
            continue
        flag, text = flag.strip(), str(value)
        joined = [i for i, word in enumerate(words) if word.startswith(f"{flag}=")]
        if joined:
            words[joined[0]] = f"{flag}={text}"
        elif flag in words[:-1]:
            words[words.index(flag) + 1] = text
        else:
            words += [flag, text]
    return words


def metric_path(folder: Path) -> str:
    """The metric file of an experiment, from its folder."""
    return str(folder / "metrics.json")


def prepare(candidate: Candidate, launch: Launch, folder: Path, mappings: Mapping[str, str]) -> list[str]:
    """Writes the candidate's configuration into its folder, and returns the script's arguments."""
    config = {**candidate.config, "autotuning": dict(candidate.config["autotuning"])}
    config["autotuning"]["metric_path"] = metric_path(folder)
    if isinstance(config.get("checkpoint"), Mapping):
        # An experiment neither goes on from the user's checkpoints nor adds its own to them.
        config["checkpoint"] = {key: value for key, value in config["checkpoint"].items() if key not in _OF_RUNS}
    path = folder / "ds_config.json"
    write_json(path, config)
    return arguments_for(launch.arguments, str(path), config, mappings)


def run_experiment(
    candidate: Candidate,
    launch: Launch,
    folder: Path,
    mappings: Mapping[str, str],
    watch: Callable[[int], object] = lambda n_steps: None,
    host_limit: int | None = None,
) -> Result:
    """Runs a candidate to its end, unless its folder has the result of the same configuration and command.

    It has succeeded if its exit code is 0 and its metric file is there. It is ended if it takes no step in
    ``max_minutes_without_step``. watch: called several times a second with the number of its steps so far. host_limit:
    bytes that its processes on this host may take together, in a control group where one can be made.
    """
    folder = folder.absolute()
    earlier = _read(folder / "exp.json")
    arguments = prepare(candidate, launch, folder, mappings)
    command = launch.command(arguments)
    entry = {"name": candidate.name, "ds_config": candidate.config, "command": command}
    metrics = _read(folder / "metrics.json")
    if earlier and metrics and earlier.get("exit_code") == 0 and _measured(earlier) == _measured(entry):
        return Result(candidate.name, metrics, seconds=earlier.get("seconds", 0.0), is_reused=True)
    (folder / "metrics.json").unlink(missing_ok=True)
    write_json(folder / "exp.json", entry)
    (folder / "cmd.txt").write_text(launch.shown(arguments) + "\n", encoding="utf-8")
    begin = time.monotonic()
    minutes = candidate.config["autotuning"].get("max_minutes_without_step", Autotuning().max_minutes_without_step)
    limited = nullcontext() if host_limit is None else memory_group(f"deepspeed_c_tuner_{os.getpid()}", host_limit)
    with limited as group:
        code = _run(command, folder, 60.0 * minutes, watch, group)
        n_killed = 0 if group is None else group.n_killed()
    seconds = time.monotonic() - begin
    metrics, problem = _read(folder / "metrics.json"), ""
    if code is None:
        problem, metrics = f"no step in {minutes} minutes", None
    elif code != 0 and n_killed:
        problem, metrics = f"out of memory: killed by its cgroup at {host_limit} bytes ({as_binary(host_limit)})", None
    elif code != 0:
        problem, metrics = f"exit code {code}", None
    elif metrics is None:
        problem = (
            "the script ended and wrote no metric: it takes fewer steps than autotuning.end_profile_step + 1,"
            " or does not pass its configuration file to initialize"
        )
    tail = last_lines(folder / "stderr.log", _TAIL_LINES) if problem else []
    write_json(folder / "exp.json", {**entry, "exit_code": code, "seconds": seconds, "problem": problem, "tail": tail})
    return Result(candidate.name, metrics, problem, seconds, is_stuck=code is None)


def _measured(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An experiment's entry without the keys of the section that say how to search; its metrics depend on the rest."""
    config = entry.get("ds_config") or {}
    section = {key: (config.get("autotuning") or {}).get(key) for key in _MEASURED}
    return {"command": entry.get("command"), "ds_config": {**config, "autotuning": section}}


def _run(
    command: Sequence[str], folder: Path, limit: float, watch: Callable[[int], object], group: MemoryGroup | None
) -> int | None:
    """Runs the command in a process group of its own and in the control group, and returns its exit code; None if it
    took no step in ``limit`` seconds. No process of the process group is left."""

    steps = Path(progress_path(metric_path(folder)))
    steps.unlink(missing_ok=True)
    with open(folder / "stdout.log", "wb") as out, open(folder / "stderr.log", "wb") as err:
        # It waits until there is a guard, and until it is in its group. If the tuner dies before that, it ends.
        process = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _ && exec "$@" </dev/null', "sh", *command],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        with ended(process, _STOP_SECONDS):  # the launcher ends its ranks, which are in groups of their own
            if group is not None:
                with suppress(OSError):  # it runs without a limit
                    group.add(process.pid)
            with suppress(BrokenPipeError):
                process.stdin.write(b"\n")
                process.stdin.close()
            return process.returncode if _has_ended(process, steps, limit, watch) else None


def _has_ended(process: subprocess.Popen[bytes], steps: Path, limit: float, watch: Callable[[int], object]) -> bool:
    """Waits for the process; False if ``limit`` seconds pass without a step."""
    n_steps, since = 0, time.monotonic()
    while process.poll() is None:
        try:
            found = int(steps.read_text(encoding="ascii"))
        except (OSError, ValueError):  # not there yet, or half written
            found = n_steps
        if found != n_steps:
            n_steps, since = found, time.monotonic()
        elif time.monotonic() - since > limit:
            return False
        watch(n_steps)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_SECONDS)
    return True


def _read(path: Path) -> dict[str, Any] | None:
    """The content of a JSON file; None if it is not there, or is no object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def last_lines(path: Path, n: int) -> list[str]:
    """The last ``n`` lines of an experiment's output that are not empty."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if line.strip()][-n:]
