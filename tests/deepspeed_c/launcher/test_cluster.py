"""Launches on several hosts: simulated hosts with ssh servers, real pdsh, real agents.

Every end of a launch gives the right exit code and message, and leaves no process on any host.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.launches import losses_of_one_process
from tests.ssh_hosts import ABSENT, SshHosts, why_no_ssh

FOLDER = Path(__file__).parent
GPT, SLEEPER = str(FOLDER / "gpt_steps.py"), str(FOLDER / "sleeper.py")
LAUNCHER = "deepspeed_c --"
SECONDS = 200


@pytest.fixture(scope="module", autouse=True)
def _ssh():
    """Hosts are tried when the first test begins: collecting the tests makes none."""
    if why := why_no_ssh():
        pytest.skip(why)


@pytest.fixture(scope="module")
def hosts():
    with SshHosts(2) as made:
        yield made


class Launch:
    """A running ``deepspeed_c`` on host 0."""

    def __init__(self, hosts: SshHosts, *words: str, slots=(2, 2), host: int = 0, **options) -> None:
        self.hosts = hosts
        self.process = hosts.launch(host, ["--hostfile", hosts.hostfile(slots), *words], **options)
        self.out, self.err = [], []
        self.threads = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for thread in self.threads:
            thread.start()

    def _read(self, stream, lines) -> None:
        for line in stream:
            lines.append(line.rstrip("\n"))

    def wait_for(self, text: str, n: int) -> None:
        deadline = time.monotonic() + SECONDS
        while sum(text in line for line in self.out) < n:
            assert time.monotonic() < deadline and self.process.poll() is None, (self.out, self.err)
            time.sleep(0.02)

    def end(self) -> int:
        code = self.process.wait(SECONDS)
        for thread in self.threads:
            thread.join(SECONDS)
        return code

    @property
    def message(self) -> str:
        """What the launching command said itself."""
        lines = "\n".join(self.err)
        return lines[lines.find("deepspeed_c: ") :]


def left(hosts, *numbers: int) -> dict[int, str]:
    """Processes of a launch on the hosts."""
    found: dict[int, str] = {}
    for i in numbers:
        for text in ("sleeper.py", "sleep 86431", "launcher.agent", "guard.py", "pdsh -S"):
            found.update(hosts.processes(i, text))
    return found


def nothing_is_left(hosts, *numbers: int) -> None:
    deadline = time.monotonic() + SECONDS
    while (found := left(hosts, *numbers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found == {}


@pytest.mark.always
def test_a_run_over_two_hosts_trains_as_one_process(hosts, tmp_path):
    words = ["it's", 'a "b" $HOME', "%h", ""]
    (tmp_path / ".deepspeed_env").write_text("# comment\n\nexport A_VALUE=\"x = 1 'y'\"\n")
    launch = Launch(hosts, "--tag_output", GPT, *words, cwd=tmp_path, env={"NCCL_MINE": "a b", "OTHER": "c"})
    assert launch.end() == 0, launch.err
    want = losses_of_one_process()
    (line,) = [line for line in launch.out if "losses" in line]
    assert line.startswith("[host-0:rank0]: ")
    got = json.loads(line.split("losses ")[1])
    print(got, want)
    assert got == pytest.approx(want, rel=1e-5)
    seen = sorted(
        (json.loads(line.split("seen ")[1]) for line in launch.out if "seen" in line), key=lambda s: s["rank"]
    )
    assert [(s["rank"], s["host"], s["env"]["LOCAL_RANK"], s["env"]["GROUP_RANK"]) for s in seen] == [
        (0, "host-0", "0", "0"),
        (1, "host-0", "1", "0"),
        (2, "host-1", "0", "1"),
        (3, "host-1", "1", "1"),
    ]
    for i, rank in enumerate(seen):
        env = rank["env"]
        assert rank["args"] == [f"--local_rank={i % 2}", *words]
        assert (env["A_VALUE"], env["NCCL_MINE"], env["WORLD_SIZE"]) == ("x = 1 'y'", "a b", "4")
        assert env["MASTER_ADDR"] == hosts[0].address and env["GLOO_SOCKET_IFNAME"] == "eth0"
        assert env["PWD"] == str(tmp_path)
    assert len({rank["env"]["DSC_RUN_TOKEN"] for rank in seen}) == 1
    nothing_is_left(hosts, 0, 1)


def test_the_first_failing_rank_ends_all(hosts, tmp_path):
    logs = tmp_path / "logs"
    words = ["--enable_each_rank_log", str(logs), "--gather_logs", SLEEPER, "--fail", "3", "7", str(tmp_path)]
    launch = Launch(hosts, *words, slots={"root@host-1": 1, "root@host-0": 3}, host=1)
    assert launch.end() == 7
    assert "rank 3 (process " in launch.message and "on root@host-0) failed with exit code 7" in launch.message
    assert "bad luck" in launch.message
    written = sorted(logs.iterdir())
    assert [path.read_text().splitlines()[0] for path in written] == [f"up {i}" for i in range(4)]
    assert "bad luck" in written[3].read_text()
    nothing_is_left(hosts, 0, 1)


def test_no_secret_is_shown(hosts):
    launch = Launch(hosts, SLEEPER, env={"DS_SECRET_KEY": "hunter2", "HF_TOKEN": "hunter2"})
    launch.wait_for("up", 4)
    shown = [line for i in (0, 1) for line in hosts.processes(i).values()]
    assert any("launcher.agent" in line for line in shown)
    assert not [line for line in shown if "hunter2" in line or "DSC_RUN_TOKEN" in line]
    hosts.signal(0, LAUNCHER, signal.SIGINT)
    assert launch.end() == 130
    nothing_is_left(hosts, 0, 1)


@pytest.mark.always
def test_sigterm_lets_the_ranks_save(hosts):
    launch = Launch(hosts, "--tag_output", SLEEPER, "--save")
    launch.wait_for("up", 4)
    hosts.signal(0, LAUNCHER, signal.SIGTERM)
    assert launch.end() == 0
    assert sorted(line for line in launch.out if "saved" in line) == [
        f"[host-{rank // 2}:rank{rank}]: saved {rank}" for rank in range(4)
    ]
    nothing_is_left(hosts, 0, 1)


def test_a_second_signal_kills(hosts):
    launch = Launch(hosts, SLEEPER, "--deaf")
    launch.wait_for("up", 4)
    hosts.signal(0, LAUNCHER, signal.SIGTERM)
    deadline = time.monotonic() + SECONDS
    while "passed on" not in launch.message and time.monotonic() < deadline:
        time.sleep(0.02)
    hosts.signal(0, LAUNCHER, signal.SIGHUP)
    assert launch.end() == 128 + signal.SIGTERM
    nothing_is_left(hosts, 0, 1)


def test_what_is_deaf_is_killed_after_the_grace(hosts):
    launch = Launch(hosts, "--grace", "0.5", SLEEPER, "--deaf")
    launch.wait_for("up", 4)
    hosts.signal(0, LAUNCHER, signal.SIGTERM)
    assert launch.end() == 128 + signal.SIGTERM
    nothing_is_left(hosts, 0, 1)


@pytest.mark.parametrize("lost", ["the launching command", "pdsh", "an agent"])
def test_a_process_of_the_launcher_is_killed(hosts, lost):
    launch = Launch(hosts, SLEEPER)
    launch.wait_for("up", 4)
    host, text = {
        "the launching command": (0, LAUNCHER),
        "pdsh": (0, "pdsh -S"),
        "an agent": (1, "agent --host host-1"),
    }[lost]
    assert hosts.signal(host, text, signal.SIGKILL)
    code = launch.end()
    if lost == "pdsh":
        assert code == 1 and "pdsh was ended by signal 9 before the ranks had ended" in launch.message
    if lost == "an agent":
        assert code == 1 and "the agent of host host-1 was lost" in launch.message
    nothing_is_left(hosts, 0, 1)


def test_a_rank_is_killed(hosts):
    launch = Launch(hosts, SLEEPER)
    launch.wait_for("up", 4)
    assert hosts.signal(1, "sleeper.py --local_rank=1", signal.SIGKILL)
    assert launch.end() == 128 + signal.SIGKILL
    assert "on host-1) was ended by SIGKILL" in launch.message
    nothing_is_left(hosts, 0, 1)


def test_agents_that_refuse_say_why(hosts):
    launch = Launch(hosts, "--bind_cores_to_rank", "--bind_core_list", "0", SLEEPER)
    assert launch.end() == 2
    assert "host host-" in launch.message and "core" in launch.message
    nothing_is_left(hosts, 0, 1)


def test_a_host_that_cannot_be_reached(hosts):
    launch = Launch(hosts, SLEEPER, slots={"host-0": 1, ABSENT: 1})
    assert launch.end() != 0
    assert f"host {ABSENT} did not come" in launch.message
    assert ABSENT in launch.message.split("Last lines")[1]
    nothing_is_left(hosts, 0, 1)


def test_the_same_command_on_each_host(hosts, tmp_path):
    path = hosts.hostfile([1, 1])
    words = ["--hostfile", path, "--no_ssh", "--master_addr", hosts[0].address]
    processes = [
        hosts.launch(i, [*words, "--node_rank", str(i), SLEEPER, "--fail", "1", "9", str(tmp_path)]) for i in (1, 0)
    ]
    outputs = [process.communicate(timeout=SECONDS) for process in processes]
    assert [process.returncode for process in processes] == [9, 9], outputs
    assert "rank 1 (process " in outputs[1][1]
    nothing_is_left(hosts, 0, 1)


def test_a_host_is_lost():
    with SshHosts(2) as hosts:
        launch = Launch(hosts, SLEEPER)
        launch.wait_for("up", 4)
        hosts[1].unplug()
        assert launch.end() == 1
        assert "host host-1: no sign for" in launch.message
        nothing_is_left(hosts, 0, 1)
