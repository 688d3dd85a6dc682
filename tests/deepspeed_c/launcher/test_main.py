"""The command line as a user calls it. Real launches are checked by their output, their exit codes, and the processes
and files that they leave."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepspeed_c.launcher import main as command_line
from deepspeed_c.launcher.commands import COMMANDS, find_command
from deepspeed_c.launcher.main import main
from tests import fresh
from tests.network import answers, own_address
from tests.ranks import free_port

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_SECONDS = 300

# Prints the arguments and the environment of a rank as a line of JSON.
SHOW = """
import json, os, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS EXTRA".split()
seen = {name: os.environ.get(name) for name in names}
line = json.dumps({**seen, "args": sys.argv[1:], "cores": sorted(os.sched_getaffinity(0)), "pid": os.getpid()})
os.write(1, (line + chr(10)).encode())
"""

# Records the process id, and the id of a child that would outlive the process, then waits. Signals in argv[2] are only
# noted.
WAIT = """
import os, signal, subprocess, sys, time
rank, folder = os.environ["RANK"], sys.argv[1]
def note(number, frame):
    with open(os.path.join(folder, "signal" + rank), "a") as file:
        file.write(str(number) + " ")
    if sys.argv[3] == "exit":
        sys.exit(0)
for number in sys.argv[2].split(","):
    signal.signal(int(number), note)
child = subprocess.Popen(["sleep", "1000"])
with open(os.path.join(folder, "tmp" + rank), "w") as file:
    file.write(str(os.getpid()) + " " + str(child.pid))
os.rename(os.path.join(folder, "tmp" + rank), os.path.join(folder, "pids" + rank))
while True:
    time.sleep(0.05)
    if rank == sys.argv[4] and all(os.path.exists(os.path.join(folder, "pids" + r)) for r in "01"):
        sys.stderr.write("the reason is here" + chr(10))
        sys.exit(7)
"""


def environment_with(env):
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")}
    # With this, slots are processes even on a machine with accelerators
    return {**environment, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **(env or {})}


def start(*argv, env=None, **keywords):
    return subprocess.Popen(
        [sys.executable, "-m", "deepspeed_c", *map(str, argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment_with(env),
        **keywords,
    )


def end(process):
    try:
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def run(*argv, cwd=None, env=None):
    """A launch that ends by itself. The launcher has imported torch already; ranks are new interpreters."""
    done = fresh.run(["-m", "deepspeed_c", *map(str, argv)], cwd=cwd, env=environment_with(env))
    return done.returncode, done.stdout, done.stderr


def shown(*argv, **keywords):
    """Launches SHOW. Returns the reports of the ranks, in order."""
    code, out, err = run(*argv, **keywords)
    assert code == 0, err
    return sorted(map(json.loads, out.splitlines()), key=lambda seen: int(seen["RANK"]))


def wait_for(condition, what):
    limit = time.monotonic() + TIMEOUT_SECONDS
    while not (value := condition()):
        assert time.monotonic() < limit, f"{what} did not happen"
        time.sleep(0.02)
    return value


def pids_in(folder, n_ranks=2):
    def read():
        files = [folder / f"pids{rank}" for rank in range(n_ranks)]
        return all(file.exists() for file in files) and [int(p) for file in files for p in file.read_text().split()]

    return wait_for(read, "the start of the ranks")


def assert_gone(pids):
    def exists(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    wait_for(lambda: not any(map(exists, pids)), f"the end of {pids}")


@pytest.fixture
def script(tmp_path):
    """Writes a script and returns its path."""

    def write(text, name="t.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


# ---- in this process: refusals before anything starts ----


def test_no_script(capsys):
    assert main([]) == 2
    assert "which script?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["no_such.py"], "deepspeed_c: no_such.py: there is no such script"),
        (["--num_nodes", "2", __file__], "--no_ssh --node_rank I"),
        (["--include", "localhost:x", __file__], "is not of the form"),
        (["--hostfile", "none", __file__], "--hostfile none: cannot be read"),
    ],
)
def test_refused_with_what_where_and_fix(argv, text, capsys):
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert text in err and "Traceback" not in err, err


def test_help_and_errors_need_no_torch():
    code = (
        "import sys; from deepspeed_c.launcher.main import main\n"
        "assert main(['--help']) == 0 and main(['no_such.py']) == 2 and main(['--num_gpus', '0', 'x.py']) == 2\n"
        "assert main(['config', '--help']) == 0\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, env=env, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    assert done.returncode == 0, done.stderr


def test_config_command(tmp_path, capsys):
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_sise": 4}')
    assert main(["config", "check", str(file)]) != 0
    shown_text = capsys.readouterr()
    assert "train_batch_size" in shown_text.out + shown_text.err


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_has_gone_ends_a_command_quietly(tmp_path, stream):
    """A pipe like ``... | head -1`` or ``... 2>&1 | head -1``, except that its reader is gone from the beginning."""
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"train_batch_size": 4} if stream == "stdout" else {"train_batch_siz": 4}))
    read, write = os.pipe()
    os.close(read)
    other = {"stdout": "stderr", "stderr": "stdout"}[stream]
    command = [sys.executable, "-m", "deepspeed_c", "config", "show", "--all", str(path)]
    done = subprocess.run(
        command, cwd=ROOT, timeout=TIMEOUT_SECONDS, check=False, **{stream: write, other: subprocess.PIPE}
    )
    os.close(write)
    assert (done.returncode, getattr(done, other)) == (128 + signal.SIGPIPE, b"")


def test_a_pipe_of_another_kind_that_breaks_is_not_hidden(monkeypatch):
    def command(arguments):
        raise BrokenPipeError("the ranks' own")

    monkeypatch.setattr(command_line, "find_command", lambda words: (command, words[1:]))
    with pytest.raises(BrokenPipeError, match="the ranks' own"):
        main(["config"])


@pytest.mark.parametrize("name", [*COMMANDS, "script.py"])
def test_each_word_finds_its_command(name, capsys):
    command, words = find_command([name, "--help"])
    assert words == (["--help"] if name in COMMANDS else [name, "--help"])
    with pytest.raises(SystemExit) as stop:
        command(["--help"])
    assert stop.value.code == 0
    told = f"usage: deepspeed_c {name}" if name in COMMANDS else "usage: deepspeed_c [OPTIONS] SCRIPT"
    assert told in capsys.readouterr().out.replace('eval "$(', "").replace("\n", " "), name


def test_help_has_a_line_for_each_command(capsys):
    assert main(["--help"]) == 0
    _, _, told = capsys.readouterr().out.partition("Other commands:")
    words = [re.search(r"deepspeed_c (\w+)", line)[1] for line in told.partition("\n\n")[0].splitlines()[1:]]
    assert list(dict.fromkeys(words)) == list(COMMANDS), words


# ---- environment and arguments of ranks ----


def test_environment_and_arguments(script, tmp_path):
    path = script(SHOW, "with space.py")
    words = ["--deepspeed", "a b", "", "--", "-x", "$HOME", "'q\"", "--num_gpus", "ä"]
    ranks = shown("--num_procs", 2, path, *words, env={"EXTRA": "kept"}, cwd=tmp_path)
    assert [r["args"] for r in ranks] == [[f"--local_rank={rank}", *words] for rank in (0, 1)]
    assert [(r["RANK"], r["LOCAL_RANK"], r["WORLD_SIZE"], r["LOCAL_WORLD_SIZE"]) for r in ranks] == [
        ("0", "0", "2", "2"),
        ("1", "1", "2", "2"),
    ]
    assert [r["EXTRA"] for r in ranks] == ["kept"] * 2
    assert {r["MASTER_ADDR"] for r in ranks} == {"127.0.0.1"}
    assert len({r["MASTER_PORT"] for r in ranks}) == 1 and int(ranks[0]["MASTER_PORT"]) > 0
    threads = max(len(os.sched_getaffinity(0)) // 2, 1)
    assert {int(r["OMP_NUM_THREADS"]) for r in ranks} <= set(range(1, threads + 1))
    assert len({r["pid"] for r in ranks}) == 2


def test_one_process_without_accelerators_and_omp_of_the_user(script):
    (rank,) = shown("--no_local_rank", script(SHOW), env={"OMP_NUM_THREADS": "11"})
    assert (rank["WORLD_SIZE"], rank["args"], rank["OMP_NUM_THREADS"]) == ("1", [], "11")


def test_module_slots_and_port(script, tmp_path):
    script("", "pkg.py")
    script(SHOW, "mod.py")
    port = free_port()
    ranks = shown("--include", "localhost:0,2", "--master_port", port, "--module", "mod", "x", cwd=tmp_path)
    assert [r["args"] for r in ranks] == [["--local_rank=0", "x"], ["--local_rank=1", "x"]]
    assert {r["MASTER_PORT"] for r in ranks} == {str(port)}


def test_program_and_hostfile(script, tmp_path):
    path = script('#!/bin/sh\necho "$RANK/$WORLD_SIZE $1 $2"\n', "prog")
    path.chmod(0o755)
    hosts = script("localhost slots=2\n", "hosts")
    code, out, err = run("--no_python", "--hostfile", hosts, "./prog", "a b", cwd=tmp_path)
    assert (code, sorted(out.splitlines())) == (0, ["0/2 --local_rank=0 a b", "1/2 --local_rank=1 a b"]), err


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be divided")
def test_bound_cores(script):
    first, second = sorted(os.sched_getaffinity(0))[:2]
    cores = f"{first},{second}"
    ranks = shown("--num_procs", 2, "--bind_cores_to_rank", "--bind_core_list", cores, script(SHOW))
    assert [(r["cores"], r["OMP_NUM_THREADS"]) for r in ranks] == [([first], "1"), ([second], "1")]


# Meets the other ranks. Then each rank writes a line of JSON: the sum over ranks, its token, and the addresses where it
# and its launcher listen. Stays until the file argv[2] exists.
MEET = """
import json, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
t = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(t)
def listening(pid):
    fds = os.scandir(f"/proc/{pid}/fd")
    inodes = {os.readlink(fd.path)[8:-1] for fd in fds if os.path.islink(fd.path) and os.readlink(fd.path).startswith("socket:[")}
    rows = [line.split() for name in ("tcp", "tcp6") for line in open("/proc/net/" + name).read().splitlines()[1:]]
    return [row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]
seen = {"sum": int(t), "token": os.environ["DSC_RUN_TOKEN"], "port": os.environ["MASTER_PORT"], "pids": [os.getpid(), os.getppid()]}
seen |= {"listening": listening(os.getpid()), "launcher": listening(os.getppid())}
os.write(1, (json.dumps(seen) + chr(10)).encode())  # in one piece: print would mix with the other rank's
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
dist.destroy_process_group()
"""
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}  # 127.0.0.1 and ::1, as /proc/net writes them


def test_ranks_meet_at_the_launchers_store_which_listens_at_the_loopback_alone(script, tmp_path):
    path, go = script(MEET), tmp_path / "go"
    environ = {"GLOO_SOCKET_IFNAME": "", "TMPDIR": str(tmp_path)}
    options = ["--num_procs", 2, "--no_local_rank", "--save_pid", "--log_level", "debug"]
    launches = [start(*options, *more, path, go, env=environ) for more in ([], ["--master_addr", "::1"])]
    seen = [[json.loads(launch.stdout.readline()) for _ in range(2)] for launch in launches]
    shown = b"".join(file.read_bytes() for file in tmp_path.glob("*.deepspeed"))
    for ranks in seen:
        assert [rank["sum"] for rank in ranks] == [3, 3]
        for rank in ranks:
            assert rank["listening"] and set(rank["listening"]) <= LOOPBACK, rank
            assert len(rank["launcher"]) == 1 and set(rank["launcher"]) <= LOOPBACK, rank
            shown += b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in rank["pids"])
        port = int(ranks[0]["port"])
        addresses = {"127.0.0.1", "::1", "127.0.0.2", own_address()} - {None}
        assert {address for address in addresses if answers(address, port)} <= {"127.0.0.1", "::1"}
        assert sum(answers(address, port) for address in addresses) == 1
    go.touch()
    for code, _, err in map(end, launches):
        assert code == 0, err
        shown += err.encode()
    tokens = {rank["token"] for ranks in seen for rank in ranks}
    assert len(tokens) == 2 and all(len(token) == 64 for token in tokens), "one for each run"
    assert not any(token.encode() in shown for token in tokens), "in a command line, a log or a file"


def test_port_in_use(script, tmp_path):
    path = script(f"open({str(tmp_path / 'started')!r}, 'w')")
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        code, _, err = run("--master_port", other.getsockname()[1], path)
    assert code == 2 and "cannot be used" in err and "leave out --master_port" in err, err
    assert "Traceback" not in err
    assert not (tmp_path / "started").exists()


# ---- output ----


def test_output_is_live(script, tmp_path):
    path = script(
        "import os, sys, time\n"
        "print('out', flush=True); print('err', file=sys.stderr)\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
    )
    process = start("--no_local_rank", path, tmp_path / "go")
    assert (process.stdout.readline(), process.stderr.readline()) == ("out\n", "err\n")
    assert process.poll() is None
    (tmp_path / "go").touch()
    assert end(process) == (0, "", "")


# ---- the end of a run ----


def test_failure_ends_all_and_says_why(script, tmp_path):
    # Rank 0 only notes SIGTERM, so it has to be killed. Both ranks have started a child process.
    process = start("--num_procs", 2, "--no_local_rank", script(WAIT), tmp_path, signal.SIGTERM.value, "stay", "1")
    pids = pids_in(tmp_path)
    code, _, err = end(process)
    assert code == 7, err
    report = err[err.index("deepspeed_c: ") :]
    assert report.splitlines()[0].startswith(f"deepspeed_c: rank 1 (process {pids[2]}) failed with exit code 7"), err
    assert "  the reason is here" in report
    assert (tmp_path / "signal0").read_text() == "15 "
    assert_gone(pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(script, tmp_path, number):
    process = start("--num_procs", 2, "--no_local_rank", script(WAIT), tmp_path, number.value, "exit", "-")
    pids = pids_in(tmp_path)
    process.send_signal(number)
    code, _, err = end(process)
    # These ranks exit with 0 on the signal, as after a save before preemption.
    assert code == 0 and "all ranks ended by themselves" in err and "Traceback" not in err, err
    assert [(tmp_path / f"signal{rank}").read_text() for rank in (0, 1)] == [f"{number.value} "] * 2
    assert_gone(pids)


def test_grace_ends_with_sigkill(script, tmp_path):
    # The grace is long enough for a rank to note the signal, even on a busy machine.
    process = start("--num_procs", 2, "--grace", 5, "--no_local_rank", script(WAIT), tmp_path, "15", "stay", "-")
    pids = pids_in(tmp_path)
    process.send_signal(signal.SIGTERM)
    code, _, err = end(process)
    assert code == 143, err
    assert [(tmp_path / f"signal{rank}").read_text() for rank in (0, 1)] == ["15 "] * 2
    assert_gone(pids)


def test_second_signal_kills_at_once(script, tmp_path):
    process = start("--num_procs", 2, "--grace", 1000, "--no_local_rank", script(WAIT), tmp_path, "2,15", "stay", "-")
    pids = pids_in(tmp_path)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: all((tmp_path / f"signal{rank}").exists() for rank in (0, 1)), "passing on")
    process.send_signal(signal.SIGTERM)
    code, _, err = end(process)
    assert code == 130 and "killing the ranks" in err, err
    assert_gone(pids)


def test_nohup_is_respected(script, tmp_path):
    def ignore():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    path = script(
        "import os, sys, time\n"
        "open(sys.argv[1], 'w').close()\n"
        "while not os.path.exists(sys.argv[2]): time.sleep(0.01)\n"
    )
    process = start("--no_local_rank", path, tmp_path / "up", tmp_path / "go", preexec_fn=ignore)
    wait_for((tmp_path / "up").exists, "the start")
    status = Path(f"/proc/{process.pid}/status").read_text()
    ignored = int(next(line for line in status.splitlines() if line.startswith("SigIgn:")).split()[1], 16)
    assert ignored & 1 << (signal.SIGHUP - 1), status
    process.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    assert end(process)[0] == 0
