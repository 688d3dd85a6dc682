"""compat/launcher_runner.py: hostfiles, filters and options under DeepSpeed's names.

The expected values are those of DeepSpeed 0.19.6, except where a comment says so.
"""

from __future__ import annotations

import base64
import json
import logging

import pytest

from deepspeed_c.compat import launcher_runner as runner
from deepspeed_c.errors import LaunchError
from deepspeed_c.logging import logger
from tests import fresh

POOL = {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1, 2, 3], "worker-2": [0, 1]}


def test_a_hostfile_is_read(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# ours\nworker-1 slots=16\n\nworker-0 slots=8 max_slots=16\n")
    found = runner.fetch_hostfile(str(file))
    assert list(found.items()) == [("worker-1", 16), ("worker-0", 8)]
    assert runner._parse_hostfile(file.read_text().splitlines(keepends=True)) == found


def test_without_a_hostfile_there_is_none(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.WARNING, logger=logger.name):
        assert runner.fetch_hostfile(str(tmp_path / "none")) is None
    assert str(tmp_path / "none") in caplog.text


@pytest.mark.parametrize("text", ["", "\n#\n", "a slots=1\na slots=2", "worker-0", "worker-0 slots=x", "a:"])
def test_bad_hostfiles_are_errors_that_deepspeeds_callers_catch(text):
    for kind in (ValueError, LaunchError):
        with pytest.raises(kind):
            runner._parse_hostfile(text.split("\n"))


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("", "", POOL),
        ("worker-0@worker-1:0,2", "", {"worker-0": [0, 1, 2, 3], "worker-1": [0, 2]}),
        ("worker-1:2,0@worker-0:1", "", {"worker-0": [1], "worker-1": [0, 2]}),
        ("worker-2:1,1,1", "", {"worker-2": [1]}),
        ("", "worker-1:0", {**POOL, "worker-1": [1, 2, 3]}),
        ("", "worker-1", {"worker-0": [0, 1, 2, 3], "worker-2": [0, 1]}),
        ("", "worker-2:0,1@worker-0:3", {"worker-0": [0, 1, 2], "worker-1": [0, 1, 2, 3]}),
        ("", "worker-0@worker-1@worker-2", {}),
    ],
    ids=range(8),
)
def test_filters(include, exclude, expected):
    before = json.dumps(POOL)
    found = runner.parse_resource_filter(POOL, include_str=include, exclude_str=exclude)
    counted = runner.parse_inclusion_exclusion({host: len(slots) for host, slots in POOL.items()}, include, exclude)
    print(found, counted, expected)
    assert list(found.items()) == list(expected.items())
    assert list(counted.items()) == list(expected.items())  # DeepSpeed leaves nothing of a host that is included whole
    assert json.dumps(POOL) == before


@pytest.mark.parametrize(
    ("include", "exclude", "text"),
    [
        ("worker-0", "worker-1", "exclude each other"), ("worker-3", "", "worker-3"), ("", "worker-3:0", "worker-3"),
        ("worker-2:2", "", "no slot 2"), ("", "worker-2:0,9", "no slot 9"), ("worker-2:x", "", "worker-2:x"),
    ],
)  # fmt: skip
def test_bad_filters(include, exclude, text):
    with pytest.raises(ValueError, match=text):
        runner.parse_resource_filter(POOL, include_str=include, exclude_str=exclude)


def test_node_lists():
    assert runner.parse_node_config_list("worker-0@worker-1:2,0,2") == {"worker-0": [], "worker-1": [0, 2]}


def test_world_info():
    text = runner.encode_world_info(POOL)
    assert json.loads(base64.urlsafe_b64decode(text)) == POOL
    # of DeepSpeed
    assert runner.encode_world_info({"a": [0, 1]}) == "eyJhIjogWzAsIDFdfQ=="


DEFAULTS = dict(
    **dict.fromkeys(("num_nodes", "num_gpus", "node_rank", "min_elastic_nodes", "max_elastic_nodes"), -1),
    **dict.fromkeys(("module", "no_python", "no_local_rank", "no_ssh", "no_ssh_check", "force_multi"), False),
    **dict.fromkeys(("save_pid", "elastic_training", "bind_cores_to_rank", "quiet"), False),
    **dict.fromkeys(("include", "exclude", "autotuning", "master_addr", "launcher_args"), ""),
    **dict.fromkeys(("bind_core_list", "ssh_port", "venv_script")),
    hostfile="/job/hostfile",
    master_port=29500,
    launcher="pdsh",
    enable_each_rank_log="None",
)


def test_options_have_deepspeeds_names_and_defaults():
    found = vars(runner.parse_args(["train.py", "--lr", "-1"]))
    assert {name: found[name] for name in DEFAULTS} == DEFAULTS
    assert (found["user_script"], found["user_args"]) == ("train.py", ["--lr", "-1"])


def test_options_that_are_given(monkeypatch):
    words = ["--num_gpus", "2", "--num_nodes", "3", "--master_port", "7", "--hostfile", "h", "-q", "t.py"]
    monkeypatch.setattr("sys.argv", ["deepspeed", *words])
    found = runner.parse_args()
    assert (found.num_gpus, found.num_nodes, found.master_port, found.hostfile) == (2, 3, 7, "h")
    assert (found.quiet, found.log_level) == (True, "error")


def test_variables():
    assert {"MLFLOW", "PYTHON", "MV2", "UCX", "NCCL"} <= set(runner.EXPORT_ENVS)
    assert runner.EXCLUDE_ENVS == {"AISC_JOB_NAME": ["NCCL_IB_HCA", "UCX_NET_DEVICES"]}


def test_main_refuses_words_with_the_error_of_deepspeed(capsys):
    """As an error if a program calls it, and as a message if it is the command of the process."""
    words = ["--num_nodes", "1", "-i", "localhost", "foo.py"]
    with pytest.raises(ValueError, match="--include and --exclude say how many processes to start"):
        runner.main(args=words)
    with pytest.raises(SystemExit) as stop, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["deepspeed", *words])
        runner.main()
    assert stop.value.code == 2 and "Fix: drop one of them" in capsys.readouterr().err


def test_main_ends_the_process_with_the_code_of_a_failed_rank(tmp_path):
    script = tmp_path / "exits.py"
    script.write_text("raise SystemExit(7)\n")
    words = ["--num_procs", "1", str(script)]
    done = fresh.run(["-c", f"from deepspeed_c.compat.launcher_runner import main; main({words})"])
    print(done.stdout, done.stderr)
    assert done.returncode == 7
