"""Training that loses hosts and ranks: losses of an undisturbed run, and each sample in one step that counts."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.deepspeed_c.engine.test_other_worlds import BATCH
from tests.deepspeed_c.launcher import elastic_steps
from tests.deepspeed_c.launcher.test_elastic import SECONDS, Running, nothing_is_left
from tests.ssh_hosts import SshHosts, why_no_ssh
from tests.waits import ran

SCRIPT = elastic_steps.__file__
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
OPTIONS = ("--elastic_training", "--elastic_grace", "1", "--no_local_rank")


@pytest.fixture
def hosts(request):
    if why := why_no_ssh():
        pytest.skip(why)
    with SshHosts(getattr(request, "param", 3)) as made:
        yield made


def steps_of(folder: Path) -> dict[int, tuple[list[int], float, list[float]]]:
    """Each step of the last round that has it, all ranks together."""
    found: dict[int, tuple[int, list]] = {}
    for path in folder.glob("round*-rank*"):
        number = int(path.name.removeprefix("round").partition("-")[0])
        for line in path.read_text().splitlines():
            if not line.endswith("]"):
                continue  # the rank was killed while it wrote
            step, samples, loss, lr = json.loads(line)
            before = found.get(step, (number, []))
            if number >= before[0]:
                found[step] = (number, [*(before[1] if before[0] == number else []), (samples, loss, lr)])
    return {
        step: (sorted(sample for samples, *_ in ranks for sample in samples), *ranks[0][1:])
        for step, (_, ranks) in found.items()
    }


def undisturbed(folder: Path, n_steps: int, stage: int) -> dict[int, tuple[list[int], float, list[float]]]:
    """The same script in one process."""
    folder.mkdir()
    (folder / "hurry").touch()
    command = [sys.executable, SCRIPT, str(folder), str(n_steps), str(stage)]
    subprocess.run(command, check=True, timeout=SECONDS, env=ENVIRONMENT)
    return steps_of(folder)


def check(folder: Path, n_steps: int, stage: int) -> None:
    got, expected = steps_of(folder), undisturbed(folder / "straight", n_steps, stage)
    assert got.keys() == expected.keys() == set(range(1, n_steps + 1))
    for step, (samples, loss, lr) in expected.items():
        assert got[step][0] == samples, f"step {step}: samples {got[step][0]}, undisturbed {samples}"
        assert got[step][1] == pytest.approx(loss, rel=1e-5, abs=1e-8), (
            f"step {step}: loss {got[step][1]}, undisturbed {loss}"
        )
        assert got[step][2] == lr, f"step {step}: learning rate {got[step][2]}, undisturbed {lr}"
    counts = torch.bincount(torch.tensor([sample for samples, *_ in got.values() for sample in samples]))
    n_epochs = n_steps * BATCH // elastic_steps.N_SAMPLES
    assert counts.min() >= n_epochs and counts.max() <= n_epochs + 1, counts.tolist()


def step_now(folder: Path) -> int:
    """The last step that any rank has noted."""
    lines = [path.read_text().splitlines() for path in folder.glob("round*-rank*")]
    return max((json.loads(each[-1])[0] for each in lines if each and each[-1].endswith("]")), default=0)


def wait_for_step(folder: Path, step: int, run: Running) -> None:
    deadline = time.monotonic() + SECONDS
    while step_now(folder) < step:
        assert time.monotonic() < deadline and run.processes[0].poll() is None, run.lines
        time.sleep(0.05)


@pytest.mark.always
@pytest.mark.limit(500, reason="starts eight ranks in three rounds, and waits for the signs of a lost link")
def test_a_host_dies_after_step_6_and_comes_back(hosts, tmp_path):
    n_steps = 150
    words = ["--hostfile", hosts.hostfile((1, 1, 1)), *OPTIONS, SCRIPT, str(tmp_path), str(n_steps), "2"]
    run = Running(hosts.launch(0, words))
    wait_for_step(tmp_path, 6, run)
    hosts[1].unplug()
    hosts.signal(1, "launcher.agent", signal.SIGKILL)
    run.wait_for("begins with 2 of 3 hosts")
    wait_for_step(tmp_path, 9, run)
    hosts[1].plug()
    hosts.signal(0, "ssh_config host-1 exec", signal.SIGKILL)  # otherwise it takes ssh some time to notice
    run.wait_for("begins with 3 of 3 hosts")
    (tmp_path / "hurry").touch()
    assert run.end() == [0], run.lines
    nothing_is_left(hosts)
    check(tmp_path, n_steps, 2)


@pytest.mark.limit(900, reason="ten rounds, each with three ranks")
@pytest.mark.parametrize("hosts", [2], indirect=True)
@pytest.mark.parametrize("seed", [0, 1])
def test_processes_are_killed_at_random_moments(hosts, tmp_path, seed):
    rng, n_steps = random.Random(seed), 800
    words = ["--hostfile", hosts.hostfile((1, 2)), *OPTIONS, "--max_restarts", "100", "--min_elastic_nodes", "2"]
    run = Running(hosts.launch(0, [*words, SCRIPT, str(tmp_path), str(n_steps), str(rng.choice([1, 3]))]))
    for _ in range(10):
        wait_for_step(tmp_path, step_now(tmp_path) + 1, run)
        time.sleep(rng.uniform(0, 3))  # into a step, a save, the end of a round or the beginning of the next
        host, text = rng.choice([(0, f"-u {SCRIPT}"), (1, f"-u {SCRIPT}"), (1, "agent --host host-1")])
        if pids := list(hosts.processes(host, text)):
            hosts[host].run(["kill", "-9", str(rng.choice(pids))])
    (tmp_path / "hurry").touch()
    assert run.end() == [0], run.lines
    nothing_is_left(hosts)
    check(tmp_path, n_steps, 1)


def test_the_same_under_torchrun(tmp_path):
    n_steps = 60
    command = [
        shutil.which("torchrun", path=str(Path(sys.executable).parent)),
        "--nnodes",
        "1",
        "--nproc-per-node",
        "2",
    ]
    command += ["--max-restarts", "3", SCRIPT, str(tmp_path), str(n_steps), "2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=ENVIRONMENT
    )
    run = Running(process)
    try:
        wait_for_step(tmp_path, 8, run)
        found = ran(["pgrep", "-P", str(process.pid)], check=True).stdout
        os.kill(int(found.split()[-1]), signal.SIGKILL)
        wait_for_step(tmp_path, 12, run)
        (tmp_path / "hurry").touch()
        assert run.end() == [0], run.lines
    finally:
        if process.poll() is None:
            process.kill()
    check(tmp_path, n_steps, 2)
