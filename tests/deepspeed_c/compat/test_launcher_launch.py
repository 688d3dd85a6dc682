"""compat/launcher_launch.py: ``python -m deepspeed.launcher.launch`` starts the ranks of one host of a launch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_c.compat import launcher_launch
from deepspeed_c.compat.launcher_launch import decode_world_info, main
from deepspeed_c.compat.launcher_runner import encode_world_info
from deepspeed_c.errors import LaunchError

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_SECONDS = 300
SCRIPT = """
import os, sys
import deepspeed
deepspeed.init_distributed(verbose=False)
e = os.environ
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK")
line = " ".join([deepspeed.__name__, *(e[name] for name in names), *sys.argv[1:]])
os.write(1, (line + chr(10)).encode())
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(*words, cwd):
    command = [sys.executable, "-m", "deepspeed_c", "run", sys.executable, "-m", "deepspeed.launcher.launch", *words]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=variables, **pipes)


def test_two_hosts_that_each_start_their_ranks(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    info, port = encode_world_info({"a": [0, 1], "b": [0]}), free_port()
    words = [f"--world_info={info}", "--master_addr=127.0.0.1", f"--master_port={port}", "--no_local_rank"]
    hosts = [start(*words, f"--node_rank={i}", "train.py", "--", "a b", cwd=tmp_path) for i in range(2)]
    done = [host.communicate(timeout=TIMEOUT_SECONDS) for host in hosts]
    lines = sorted(line for out, _ in done for line in out.splitlines() if line.startswith("deepspeed_c"))
    print(lines, *(err for _, err in done), sep="\n")
    assert [host.returncode for host in hosts] == [0, 0]
    # rank, local rank, ranks, ranks of the host, host
    assert lines == ["deepspeed_c 0 0 3 2 0 -- a b", "deepspeed_c 1 1 3 2 0 -- a b", "deepspeed_c 2 0 3 1 1 -- a b"]


@pytest.fixture
def launched(monkeypatch):
    """The arguments of each launch, none of which starts a process."""
    seen = []
    monkeypatch.setattr(launcher_launch, "launch_without_runner", lambda *given: seen.append(given) or 5)
    return seen


def test_options_become_ours(launched):
    info = encode_world_info({"a": [0, 2], "b": [1]})
    words = [f"--world_info={info}", "--node_rank=1", "--master_addr", "x", "--master_port=77", "--module"]
    words += ["--save_pid", "12", "--enable_each_rank_log=None", "--bind_cores_to_rank", "--bind_core_list=0-1"]
    words += ["--quiet", "--log_level=info"]
    assert main([*words, "pkg.train", "--master_port=1", "--", "--world_info"]) == 5
    ((options, hosts),) = launched
    assert hosts == {"a": [0, 2], "b": [1]}
    assert (options.no_ssh, options.node_rank, options.master_addr, options.master_port) == (True, 1, "x", 77)
    assert (options.script, options.script_args) == ("pkg.train", ("--master_port=1", "--", "--world_info"))
    assert (options.module, options.save_pid, options.bind_core_list) == (True, True, "0-1")
    assert (options.log_level, options.enable_each_rank_log) == ("error", None)


def test_defaults_are_deepspeeds(launched):
    assert main(["--world_info", encode_world_info({"a": [0]}), "train.py"]) == 5
    ((options, _),) = launched
    assert (options.node_rank, options.master_addr, options.master_port) == (0, "127.0.0.1", 29500)
    assert (options.save_pid, options.no_local_rank) == (False, False)


@pytest.mark.parametrize(
    "text", ["None", "", "%%%", "e30=", *(encode_world_info({"a": slots}) for slots in (2, ["0"], [], [-1], [True]))]
)
def test_world_info_that_is_broken(text, launched, capsys):
    with pytest.raises(LaunchError, match="JSON in base64") as caught:
        decode_world_info(text)
    assert caught.value.where == "--world_info" and caught.value.fix
    assert main([f"--world_info={text}", "train.py"]) == 2
    assert "--world_info" in capsys.readouterr().err and launched == []


def test_elastic_training_is_asked_for_by_its_name_there(launched):
    words = ["--enable_elastic_training", "--min_elastic_nodes", "2", "--max_elastic_nodes", "-1", "train.py"]
    assert main([f"--world_info={encode_world_info({'a': [0], 'b': [0]})}", *words]) == 5
    ((options, _),) = launched
    assert (options.elastic_training, options.min_elastic_nodes, options.max_elastic_nodes) == (True, 2, None)


def test_world_info_is_what_was_encoded():
    hosts = {"worker-1": [3, 0], "worker-0": [1]}
    assert list(decode_world_info(encode_world_info(hosts)).items()) == [("worker-1", [0, 3]), ("worker-0", [1])]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--max_elastic_nodes", "4", "train.py"], "elastic"),
        (["--nothing", "train.py"], "--nothing"),
        ([], "which script?"),
    ],
)
def test_what_is_not_there_is_refused(words, text, launched, capsys):
    assert main([f"--world_info={encode_world_info({'a': [0]})}", *words]) == 2
    assert text in capsys.readouterr().err and launched == []
