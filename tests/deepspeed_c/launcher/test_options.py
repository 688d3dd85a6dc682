"""The launcher's options: where they end, and which exclude each other. No option is silently ignored."""

from __future__ import annotations

import pytest

from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.options import parse_options


@pytest.mark.parametrize(
    ("argv", "script", "args"),
    [
        (["train.py"], "train.py", ()),
        (["train.py", "--deepspeed", "--num_gpus", "7"], "train.py", ("--deepspeed", "--num_gpus", "7")),
        (["--num_gpus", "2", "train.py", "--", "--x", "--"], "train.py", ("--", "--x", "--")),
        (["--num_gpus=2", "--module", "pkg.train", "-h"], "pkg.train", ("-h",)),
        (["-i", "localhost:0", "-q", "train.py", "", "a b", "-"], "train.py", ("", "a b", "-")),
        (["--bind_cores_to_rank", "--bind_core_list", "0-1", "train.py"], "train.py", ()),
        (["--", "train.py", "-x"], "train.py", ("-x",)),
        (["-q", "--", "-train.py", "--"], "-train.py", ("--",)),
    ],
)
def test_everything_after_the_script_is_the_scripts(argv, script, args):
    options = parse_options(argv)
    assert (options.script, options.script_args) == (script, args)


@pytest.mark.parametrize("flag", ["--num_gpus", "--num_procs", "--num_accelerators"])
def test_three_names_for_the_number(flag):
    assert parse_options([flag, "3", "t.py"]).num_procs == 3


def test_defaults():
    options = parse_options(["t.py"])
    assert (options.num_procs, options.num_nodes, options.master_port, options.hostfile) == (None,) * 4
    assert (options.enable_each_rank_log, options.log_level, options.grace) == (None, "warning", 30.0)


@pytest.mark.parametrize("words", ["-iface eth0", "--oversubscribe", "-v", "--include x", "a b", "", "--launcher_args"])
def test_launcher_args_may_begin_with_a_dash(words):
    options = parse_options(["--launcher_args", words, "--num_gpus", "2", "t.py", "--launcher_args", "x"])
    assert (options.launcher_args, options.num_procs) == (words, 2)
    assert options.script_args == ("--launcher_args", "x")
    assert parse_options([f"--launcher_args={words}", "t.py"]).launcher_args == words


def test_deepspeeds_none_is_no_log():
    assert parse_options(["--enable_each_rank_log", "None", "t.py"]).enable_each_rank_log is None


@pytest.mark.parametrize(
    "argv", [[], ["--num_gpus", "2"], ["--num_gpus"], ["--num_gpus", "two", "t.py"], ["--nope", "t.py"]]
)
def test_what_is_not_understood_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_options(argv)
    assert stop.value.code == 2
    assert "usage: deepspeed_c" in capsys.readouterr().err


def test_no_abbreviations(capsys):
    # --num_g is a prefix of an option, which would take the script as its value.
    with pytest.raises(SystemExit):
        parse_options(["--num_g", "2", "t.py"])
    assert "--num_g" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--module", "--no_python"], "exclude each other"),
        (["-i", "localhost", "-e", "localhost:0"], "exclude each other"),
        (["-i", "localhost", "--num_gpus", "1"], "drop one"),
        (["-e", "localhost", "--num_nodes", "1"], "drop one"),
        (["--num_gpus", "0"], "at least one"),
        (["--num_gpus", "-1"], "at least one"),
        (["--num_nodes", "0"], "at least one"),
        (["--master_port", "0"], "65535"),
        (["--master_port", "65536"], "65535"),
        (["--bind_core_list", "0"], "--bind_cores_to_rank"),
        (["--grace", "-1"], "--grace"),
        (["--grace", "nan"], "--grace"),
        (["--autotuning", "tune", "--no_ssh", "--node_rank", "0"], "exclude each other"),
        (["--min_elastic_nodes", "1"], "without --elastic_training"),
        (["--heartbeat", "1"], "without --elastic_training"),
        (["--elastic_training", "--min_elastic_nodes", "0"], "at least one host"),
        (["--elastic_training", "--min_elastic_nodes", "3", "--max_elastic_nodes", "2"], "exchange them"),
        (["--elastic_training", "--heartbeat", "0.4"], "0.5 or more"),
        (["--elastic_training", "--heartbeat", "nan"], "0.5 or more"),
        (["--elastic_training", "--elastic_grace", "inf"], "--elastic_grace"),
        (["--elastic_training", "--max_restarts", "-1"], "--max_restarts"),
        (["--elastic_training", "--autotuning", "tune"], "exclude each other"),
        (["--no_ssh"], "--node_rank"),
        (["--node_rank", "0"], "--no_ssh"),
        (["--no_ssh", "--node_rank", "0", "--force_multi"], "exclude each other"),
        (["--ssh_port", "0"], "--ssh_port"),
        (["--gather_logs"], "--enable_each_rank_log"),
    ],
)
def test_typed_errors(argv, text):
    with pytest.raises(LaunchError) as caught:
        parse_options([*argv, "t.py"])
    assert text in str(caught.value), caught.value
    assert caught.value.fix


def test_options_for_several_hosts():
    words = [
        "--launcher",
        "PDSH",
        "--launcher_args",
        "-x 'a b'",
        "--ssh_port",
        "2222",
        "--venv_script",
        "v",
        "--no_ssh_check",
    ]
    options = parse_options([*words, "--force_multi", "--num_nodes", "3", "t.py"])
    assert (options.launcher, options.launcher_args, options.ssh_port) == ("pdsh", "-x 'a b'", 2222)
    assert (options.venv_script, options.force_multi, options.num_nodes) == ("v", True, 3)
    options = parse_options(["--no_ssh", "--node_rank", "1", "t.py"])
    assert (options.no_ssh, options.node_rank) == (True, 1)


POD = {"PET_NODE_RANK": "1", "PET_NNODES": "3", "PET_NPROC_PER_NODE": "2"}
POD |= {"PET_MASTER_ADDR": "pod-0", "PET_MASTER_PORT": "29400"}
STEP = {"SLURM_NODEID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[07-08]"}
COMPLETION = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "train-0"}


@pytest.mark.parametrize(
    ("environ", "words", "expected"),
    [
        (POD, [], (1, 3, 2, "pod-0", 29400)),
        (STEP, [], (1, 2, None, "gpu07", None)),
        (COMPLETION, [], (2, 4, None, "train-0", None)),
        ({**STEP, **POD}, [], (1, 3, 2, "pod-0", 29400)),
        # options win
        (POD, ["--node_rank=0", "--num_procs=1", "--num_nodes=2", "--master_port=7"], (0, 2, 1, "pod-0", 7)),
        (POD, ["--master_addr", "a"], (1, 3, 2, "a", 29400)),
        (POD, ["--node_rank", "0", "--num_nodes", "2", "--master_addr", "a"], (0, 2, None, "a", None)),
        # a hostfile counts hosts and slots
        (POD, ["--hostfile", "h"], (1, None, None, "pod-0", 29400)),
        (POD, ["--include", "h"], (1, None, None, "pod-0", 29400)),
    ],
    ids=range(9),
)
def test_without_ssh_a_scheduler_says_which_host_this_is(environ, words, expected, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = parse_options(["--no_ssh", *words, "t.py"])
    shown = (found.node_rank, found.num_nodes, found.num_procs, found.master_addr, found.master_port)
    print(shown, expected)
    assert shown == expected
    # only --no_ssh asks
    other = parse_options(["t.py"])
    assert (other.node_rank, other.num_nodes, other.master_addr, other.master_port) == (None,) * 4


def test_help_is_complete(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_options(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for word in (
        "--num_gpus",
        "--include",
        "--bind_cores_to_rank",
        "--enable_each_rank_log",
        "--no_ssh",
        "deepspeed_c report",
    ):
        assert word in text, word
    assert "--no_ssh_check" not in text  # accepted, and needless
    assert max(map(len, text.splitlines())) <= 132, [line for line in text.splitlines() if len(line) > 132]
