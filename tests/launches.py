"""Checks of launches on two simulated hosts, the same for each runner. A function is one launch of four ranks."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import fresh
from tests.ssh_hosts import SshHosts, why_no_ssh
from tests.waits import output_of

__all__ = ["check_failure", "check_ranks", "check_sigterm", "mpi_hosts"]

SECONDS = 200
SECRET = "se cret, x=y  'z\" $HOME %h"
ARGUMENTS = ["a b", 'q"x', "$HOME", "%h", ""]
SIGTERM = 15

GPT = Path(__file__).parent / "deepspeed_c" / "launcher" / "gpt_steps.py"

_RANKS = """
import json, os, socket, sys, time
import torch
import torch.distributed as dist

folder, *arguments = sys.argv[1:]
sys.path.insert(0, GPT_FOLDER)
import gpt_steps
losses = gpt_steps.train()
total = torch.tensor([2.0 ** dist.get_rank()])
dist.all_reduce(total)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
seen = dict(numbers=[int(os.environ[name]) for name in names], host=socket.gethostname(), folder=os.getcwd(),
            total=total.item(), losses=losses, arguments=arguments, value=os.environ.get("DSC_TEST_SECRET"), job=os.environ.get("DSC_LAUNCH_JOB"),
            mpi=[name for name in os.environ if name.startswith(("OMPI_COMM", "PMI", "HYDI"))])
path = f"{folder}/rank{dist.get_rank()}"
with open(path + ".new", "w") as file:
    json.dump(seen, file)
os.rename(path + ".new", path)
sys.stdout.write(f"rank {dist.get_rank()} is here\\n")
while not os.path.exists(f"{folder}/go"):
    time.sleep(0.05)
dist.destroy_process_group()
"""

_WAITS = """
import os, subprocess, sys, time

rank, folder, fails = os.environ["RANK"], sys.argv[1], sys.argv[2] == "fail"
child = subprocess.Popen(["sleep", "1000"])
open(f"{folder}/waits{rank}", "w").close()
while not all(os.path.exists(f"{folder}/waits{i}") for i in range(4)):
    time.sleep(0.05)
if fails and rank == "3":
    sys.exit(7)
time.sleep(1000)
"""


def check_ranks(hosts: SshHosts, words: Sequence[str], folder: Path, env: Mapping[str, str] = {}) -> None:
    """Ranks find their places, arguments and variables, and one another, and train as one process does. ``ps`` shows no
    value on any host.
    """
    before = _processes(hosts)
    launch = _launch(hosts, words, _RANKS, folder, ARGUMENTS, env)
    paths = [folder / f"rank{rank}" for rank in range(4)]
    _wait(launch, lambda: all(path.exists() for path in paths))
    shown = [line for lines in _processes(hosts) for line in lines]
    (folder / "go").touch()
    out, err = launch.communicate(timeout=SECONDS)
    assert launch.returncode == 0, f"exit code {launch.returncode}: {out}{err}"
    here = sorted(line for line in out.splitlines() if line.endswith("is here"))
    assert here == [f"rank {i} is here" for i in range(4)], out
    for rank, path in enumerate(paths):
        seen = json.loads(path.read_text())
        assert seen.pop("losses") == pytest.approx(losses_of_one_process(), rel=1e-5)
        place = {"numbers": [rank, rank % 2, 4, 2], "host": f"host-{rank // 2}", "folder": str(folder)}
        wanted = {**place, "total": 15.0, "arguments": ARGUMENTS, "value": SECRET, "job": None, "mpi": []}
        assert seen == wanted, f"rank {rank}: {seen} instead of {wanted}"
    assert not [line for line in shown if "se cret" in line or '"token"' in line]
    _check_nothing_left(hosts, before)


def check_failure(hosts: SshHosts, words: Sequence[str], folder: Path, env: Mapping[str, str] = {}) -> None:
    """A launch ends with the exit code of the failing rank. Its message names the rank and its host, and the runner's
    program adds none.
    """
    before = _processes(hosts)
    launch = _launch(hosts, words, _WAITS, folder, ["fail"], env)
    out, err = launch.communicate(timeout=SECONDS)
    assert launch.returncode == 7, f"exit code {launch.returncode}: {out}{err}"
    assert "rank 3 (process" in err and "on host-1) failed with exit code 7" in err, err
    assert "mpirun" not in err and "srun: error" not in err and "BAD TERMINATION" not in err, err
    _check_nothing_left(hosts, before)


def check_sigterm(
    hosts: SshHosts, words: Sequence[str], folder: Path, cancel: Callable[[], object] | None = None
) -> None:
    """SIGTERM for the launching command ends the ranks of both hosts, and their children.

    cancel: call this instead, which sends SIGTERM to the agents.
    """
    before = _processes(hosts)
    launch = _launch(hosts, words, _WAITS, folder, ["wait"], {})
    _wait(launch, lambda: all((folder / f"waits{rank}").exists() for rank in range(4)))
    running = [len([line for line in lines if "sleep 1000" in line]) for lines in _processes(hosts)]
    assert running == [2, 2], running
    if cancel is not None:
        cancel()
    else:
        hosts.signal(0, "-m deepspeed_c --grace", SIGTERM)
    out, err = launch.communicate(timeout=SECONDS)
    assert launch.returncode == 128 + SIGTERM, f"exit code {launch.returncode}: {out}{err}"
    assert ("its agent was ended by SIGTERM" if cancel else "SIGTERM: passed on to the ranks of all hosts") in err, err
    _check_nothing_left(hosts, before)


@cache
def losses_of_one_process() -> list[float]:
    """The losses of tests/deepspeed_c/launcher/gpt_steps.py without other ranks."""
    done = fresh.run([GPT], check=True)
    return json.loads(done.stdout.split("losses ")[1])


def mpi_hosts(program: str, package: str) -> SshHosts:
    """Two hosts for a runner that starts ``program`` over ssh. Skips the test where they cannot be made."""
    reason = why_no_ssh()
    if not reason and shutil.which(program) is None:
        reason = f"no network namespace can be made here: {package} is not installed"
    if reason:
        pytest.skip(reason)
    return SshHosts(2)


def _launch(
    hosts: SshHosts, words: Sequence[str], script: str, folder: Path, arguments: Sequence[str], env: Mapping[str, str]
) -> Any:
    (folder / "script.py").write_text(script.replace("GPT_FOLDER", repr(str(GPT.parent))))
    root = str(Path(__file__).resolve().parents[1])
    launched = ["--grace", "20", "--no_local_rank", *words, str(folder / "script.py"), str(folder), *arguments]
    return hosts.launch(0, launched, cwd=folder, env={"DSC_TEST_SECRET": SECRET, "PYTHONPATH": root, **env})


def _processes(hosts: SshHosts) -> list[set[str]]:
    found = [hosts.processes(i).items() for i in range(len(hosts))]
    return [{f"{pid} {line}" for pid, line in lines if "<defunct>" not in line} for lines in found]


def _wait(launch: Any, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        if launch.poll() is not None or time.monotonic() > deadline:
            launch.kill()
            raise AssertionError(f"the ranks did not start (exit code {launch.returncode}): {output_of(launch)}")
        time.sleep(0.05)


def _check_nothing_left(hosts: SshHosts, before: list[set[str]]) -> None:
    """slurmstepd and sshd end a moment after the launch."""
    deadline = time.monotonic() + 20
    while (after := _processes(hosts)) != before and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [sorted(lines - at_first) for lines, at_first in zip(after, before, strict=True)]
    assert left == [[], []], left
