"""Elastic launches: a round ends with a host or a rank, and the next goes on with the hosts that are left."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.runners import RUNNERS, find_runner
from tests.ssh_hosts import ABSENT, SshHosts, why_no_ssh

ORDERLY = str(Path(__file__).parent / "orderly.py")
SECONDS = 200
ELASTIC = ("--elastic_training", "--elastic_grace", "1", "--no_local_rank")


@pytest.fixture(scope="module", autouse=True)
def _ssh():
    """Hosts are tried when the first test begins: collecting the tests makes none."""
    if why := why_no_ssh():
        pytest.skip(why)


class Running:
    """Processes of launching commands, whose output is read as it comes."""

    def __init__(self, *processes) -> None:
        self.processes, self.lines = processes, []
        streams = [stream for process in processes for stream in (process.stdout, process.stderr)]
        self.threads = [threading.Thread(target=self._read, args=(stream,), daemon=True) for stream in streams]
        for thread in self.threads:
            thread.start()

    def _read(self, stream) -> None:
        for line in stream:
            self.lines.append(line.rstrip("\n"))

    def wait_for(self, text: str, n: int = 1) -> None:
        deadline = time.monotonic() + SECONDS
        while sum(text in line for line in self.lines) < n:
            alive = any(process.poll() is None for process in self.processes)
            assert time.monotonic() < deadline and alive, (text, self.lines)
            time.sleep(0.02)

    def end(self) -> list[int]:
        codes = [process.wait(SECONDS) for process in self.processes]
        for thread in self.threads:
            thread.join(SECONDS)
        return codes


def launch(hosts: SshHosts, folder: Path, *words: str, slots=(1, 1, 1)) -> Running:
    words = ("--hostfile", hosts.hostfile(slots), *ELASTIC, *words, ORDERLY, str(folder))
    return Running(hosts.launch(0, words))


TEXTS = ("orderly.py", "launcher.agent", "guard.py", "pdsh -S", "deepspeed_c --")


def nothing_is_left(hosts: SshHosts) -> None:
    deadline = time.monotonic() + SECONDS
    while found := [p for i in range(len(hosts)) for text in TEXTS for p in hosts.processes(i, text).values()]:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


@pytest.mark.limit(400, reason="waits for the signs of a lost link, and for ssh to notice it")
def test_a_host_dies_and_comes_back(tmp_path):
    with SshHosts(3) as hosts:
        run = launch(hosts, tmp_path, slots=(1, 2, 1))
        run.wait_for("of 4 in round 1", 4)
        hosts[1].unplug()  # first, so that nobody hears of the end of its processes
        hosts.signal(1, "launcher.agent", signal.SIGKILL)
        run.wait_for("of 2 in round 2", 2)
        assert any(
            "host host-1: no sign for 8 s" in line and "round 2 begins with 2 of 3 hosts" in line for line in run.lines
        ), run.lines
        (tmp_path / "save2").touch()  # before the host is back: not a reason to take it in
        hosts[1].plug()
        run.wait_for("host host-1 is back: it is taken in after the next checkpoint")
        time.sleep(1)
        assert not any("in round 3" in line for line in run.lines), run.lines
        # The step file counts up in one step here, so a rank of the round has to see the second checkpoint.
        (tmp_path / "again2").touch()
        run.wait_for("of 4 in round 3", 4)
        places = sorted(line.partition("up ")[2] for line in run.lines if "in round 3" in line)
        assert places == [f"{i} of 4 in round 3 on host-{n}" for i, n in enumerate((0, 1, 1, 2))]
        (tmp_path / "go3").touch()
        assert run.end() == [0], run.lines
        nothing_is_left(hosts)


@pytest.fixture(scope="module")
def made_hosts():
    with SshHosts(2) as made:
        yield made


@pytest.fixture
def hosts(made_hosts):
    """Two hosts; processes that a failed test leaves there are killed."""
    yield made_hosts
    for i in range(len(made_hosts)):
        for text in reversed(TEXTS):
            made_hosts.signal(i, text, signal.SIGKILL)


def test_an_agent_is_killed_and_started_again(hosts, tmp_path):
    run = launch(hosts, tmp_path, "--min_elastic_nodes", "2", slots=(1, 2))
    run.wait_for("of 3 in round 1", 3)
    assert hosts.signal(1, "agent --host host-1", signal.SIGKILL)
    run.wait_for("of 3 in round 2", 3)  # two hosts are needed, so the agent was waited for
    assert any("the agent of host host-1 was lost (exit code" in line for line in run.lines), run.lines
    (tmp_path / "go2").touch()
    assert run.end() == [0], run.lines
    nothing_is_left(hosts)


def test_a_rank_that_fails_at_the_same_step_again_ends_the_run(hosts, tmp_path):
    for number, step in ((1, 5), (2, 7), (3, 7), (4, 7)):
        (tmp_path / f"fail{number}-1-{step}").touch()
    run = launch(hosts, tmp_path, slots=(1, 1))
    assert run.end() == [9], run.lines
    assert any("failed with exit code 9, after step 7 for the third time in a row" in line for line in run.lines)
    assert sum("round 5" in line for line in run.lines) == 0 and "  bad luck" in run.lines
    nothing_is_left(hosts)


@pytest.mark.parametrize("saves", [False, True], ids=["nothing is saved", "each round saves"])
def test_failures_are_counted_until_a_checkpoint_is_saved(hosts, tmp_path, saves):
    for number in range(1, 5):
        (tmp_path / f"{'fail' if number < 4 else 'go'}{number}{f'-1-{number}' if number < 4 else ''}").touch()
        if saves:
            (tmp_path / f"save{number}").touch()
    run = launch(hosts, tmp_path, "--max_restarts", "2", slots=(2,))
    assert run.end() == [0 if saves else 9], run.lines
    assert any("--max_restarts allows no more" in line for line in run.lines) is not saves
    nothing_is_left(hosts)


def test_a_run_begins_without_a_host_that_does_not_start(hosts, tmp_path):
    run = launch(hosts, tmp_path, slots={"host-0": 1, ABSENT: 1, "host-1": 1})
    run.wait_for("of 2 in round 1", 2)
    (tmp_path / "go1").touch()
    assert run.end() == [0], run.lines
    nothing_is_left(hosts)


def test_a_signal_ends_the_whole_launch(hosts, tmp_path):
    run = launch(hosts, tmp_path, slots=(1, 1))
    run.wait_for("of 2 in round 1", 2)
    assert hosts.signal(0, "deepspeed_c --hostfile", signal.SIGTERM)
    assert run.end() == [128 + signal.SIGTERM], run.lines
    assert not any("round 2" in line for line in run.lines)
    nothing_is_left(hosts)


def test_a_pod_leaves_and_comes_back(hosts, tmp_path):
    words = ["--hostfile", hosts.hostfile((1, 1)), "--no_ssh", "--master_addr", hosts[0].address, *ELASTIC]
    first, second = (hosts.launch(i, [*words, "--node_rank", str(i), ORDERLY, str(tmp_path)]) for i in (0, 1))
    run, pod = Running(first), Running(second)
    run.wait_for("of 2 in round 1")
    pod.wait_for("of 2 in round 1")
    assert hosts.signal(1, "deepspeed_c --hostfile", signal.SIGTERM)
    assert pod.end() == [128 + signal.SIGTERM], pod.lines
    run.wait_for("of 1 in round 2")
    assert any("host host-1 was asked to end, and leaves; round 2 begins" in line for line in run.lines), run.lines
    pod = Running(hosts.launch(1, [*words, "--node_rank", "1", ORDERLY, str(tmp_path)]))
    run.wait_for("host host-1 is back")
    (tmp_path / "save2").touch()
    run.wait_for("of 2 in round 3")
    pod.wait_for("of 2 in round 3")
    (tmp_path / "go3").touch()
    assert (run.end(), pod.end()) == ([0], [0]), (run.lines, pod.lines)
    nothing_is_left(hosts)


def test_the_host_of_the_store_cannot_be_lost(hosts, tmp_path):
    words = ["--hostfile", hosts.hostfile((1, 1)), "--no_ssh", "--master_addr", hosts[0].address, *ELASTIC]
    first, second = (hosts.launch(i, [*words, "--node_rank", str(i), ORDERLY, str(tmp_path)]) for i in (0, 1))
    run, pod = Running(first), Running(second)
    run.wait_for("of 2 in round 1")
    pod.wait_for("of 2 in round 1")
    assert hosts.signal(0, "deepspeed_c --hostfile", signal.SIGKILL)
    assert (run.end(), pod.end()) == ([-signal.SIGKILL], [1]), (run.lines, pod.lines)
    assert any(
        "host host-1: the launching command is lost" in line
        and "no round follows, because the launching host holds the store of the launch" in line
        for line in pod.lines
    ), pod.lines
    nothing_is_left(hosts)


def test_one_host_alone_needs_no_ssh(hosts, tmp_path):
    (tmp_path / "fail1-0-1").touch()
    (tmp_path / "go2").touch()
    run = Running(hosts.launch(0, ["--num_procs", "2", *ELASTIC, ORDERLY, str(tmp_path)]))
    assert run.end() == [0], run.lines
    assert sum("of 2 in round 2" in line for line in run.lines) == 2
    nothing_is_left(hosts)


@pytest.mark.parametrize("name", sorted(set(RUNNERS) - {"pdsh"}))
def test_a_runner_that_ends_all_hosts_with_one_is_refused(name):
    with pytest.raises(LaunchError, match="ends the agents of all hosts when one host is lost") as caught:
        find_runner(name).start_again(None, "", "host-1")
    assert name in caught.value.where and "--no_ssh" in caught.value.fix


def test_more_hosts_are_asked_for_than_there_are(hosts, tmp_path):
    run = launch(hosts, tmp_path, "--min_elastic_nodes", "3", slots=(1, 1))
    assert run.end() == [2]
    assert any("is 3, and there are 2 hosts" in line for line in run.lines), run.lines
