"""launcher/exports.py: which variables ranks on all hosts get, and how a line of .deepspeed_env is read."""

from __future__ import annotations

import json
import os

import pytest

from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.exports import exports, parse_environment_file

# EXPORT_ENVS of DeepSpeed 0.19.6, with the names that its CUDA accelerator adds. EXCLUDE_ENVS is below.
EXPORT_ENVS = (
    *("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL"),
    *("DLTS_JOB_ID", "DLTS_NUM_WORKER", "NEBULA_PERSISTENT_STORAGE_PATH", "NEBULA_PERSISTENT_TIME_INTERVAL"),
    *("AML_RUN_ID", "AZUREML_RUN_TOKEN", "AZUREML_WORKSPACE_SCOPE", "AZUREML_EXPERIMENT_SCOPE"),
    *("AZUREML_RUN_HISTORY_SERVICE_ENDPOINT", "AZUREML_RUN_ID", "NEBULA_MEMORY_BUFFER_SIZE"),
    *("AZUREML_PARAMETER_ITPJOB_NAME", "FC_TASKROLE_NAME", "FC_TASK_INDEX", "MASTER_HOST", "LOCAL_HOST"),
    *("AZUREML_BLOB_ACCOUNT_NAME", "AZUREML_BLOB_ACCOUNT_KEY"),
)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """(home folder, working directory), both empty."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    return home, here


def test_variables_of_deepspeeds_prefixes(folders):
    environ = {name + suffix: name for name in EXPORT_ENVS for suffix in ("", "_MORE")}
    assert exports(environ) == environ


def test_which_variables_stay_at_home(folders):
    away = {"NCCL_DEBUG": "INFO", "DSC_LOG": "debug", "OMP_NUM_THREADS": "3", "HF_HOME": "/h", "UCX_NET_DEVICES": "a"}
    here = {"HOME": "/h", "USER": "u", "SSH_AUTH_SOCK": "s", "RANK": "1", "MASTER_ADDR": "m", "MY_NCCL": ""}
    # of one run, or of one rank of another launcher
    here |= {"DSC_LAUNCH_JOB": "{}", "DSC_RUN_TOKEN": "t", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert exports({**away, **here}) == away


def test_hosts_of_aisc_keep_their_network_devices(folders):
    # EXCLUDE_ENVS of DeepSpeed
    environ = {"NCCL_IB_HCA": "mlx5_0", "UCX_NET_DEVICES": "a", "NCCL_DEBUG": "INFO"}
    assert exports(environ) == environ
    assert exports({**environ, "AISC_JOB_NAME": "j"}) == {"NCCL_DEBUG": "INFO"}


def test_values_that_are_no_text_pass_through_the_job(folders):
    value = os.fsdecode(b"/data/\xff\xfe\n\"'$(x)")
    assert json.loads(json.dumps(exports({"HF_HOME": value}))) == {"HF_HOME": value}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("\n\n  \n", {}),
        ("A=1", {"A": "1"}),
        ("A=1\n\nB=2\n", {"A": "1", "B": "2"}),  # DeepSpeed stops at a blank line
        ("# A=1\n  # B=2\nC=3", {"C": "3"}),
        ("export A=1\nexport\tB=2\n  export   C=3", {"A": "1", "B": "2", "C": "3"}),
        ("exportA=1\nexport=2", {"exportA": "1", "export": "2"}),
        ("A=\"b c\"\nB='d  e'", {"A": "b c", "B": "d  e"}),
        ('A="it\'s"\nB=\'say "x"\'', {"A": "it's", "B": 'say "x"'}),
        ('A="b" "c"\nB="', {"A": '"b" "c"', "B": '"'}),
        ("A=\"\"\nB=''\nC=", {"A": "", "B": "", "C": ""}),
        ("URL=http://h?x=1&y=2==", {"URL": "http://h?x=1&y=2=="}),
        ("A = b c  ", {"A": "b c"}),
        ("A=a # b", {"A": "a # b"}),
        ("A=$HOME `x` \\n", {"A": "$HOME `x` \\n"}),
        ("A=1\r\n\r\nB='2'\r\n", {"A": "1", "B": "2"}),
        ("A=1\nA=2", {"A": "2"}),
        ("\ufeffA=\u00fc", {"A": "\u00fc"}),  # the mark that Windows puts in front
        ("A=x\u2028y\x0cz\x85", {"A": "x\u2028y\x0cz"}),
    ],
    ids=range(19),
)
def test_lines_of_a_file(text, expected, tmp_path):
    file = tmp_path / "env"
    file.write_bytes(text.encode())
    found = parse_environment_file(file)
    print(found, expected)
    assert found == expected


@pytest.mark.parametrize(
    ("text", "number", "line"),
    [
        ("A=1\n\n# x\nNCCL_DEBUG INFO\n", 4, "NCCL_DEBUG INFO"),
        ("=1", 1, "=1"),
        ("export =1", 1, "export =1"),
        ("A-B=1", 1, "A-B=1"),
        ("1A=1", 1, "1A=1"),
        ("A B=1", 1, "A B=1"),
        ("export", 1, "export"),
        ("A=1\r\nb\r\n", 2, "b"),
        ("A=x\0y", 1, "A=x\\x00y"),
    ],
    ids=range(9),
)
def test_a_bad_line_is_named(text, number, line, tmp_path):
    file = tmp_path / "env"
    file.write_bytes(text.encode())
    with pytest.raises(LaunchError) as caught:
        parse_environment_file(file)
    print(caught.value)
    assert caught.value.where == f"{file}, line {number}"
    assert f"'{line}'" in caught.value.what
    assert caught.value.fix


def test_a_file_that_is_no_text_is_named(tmp_path):
    file = tmp_path / "env"
    file.write_bytes(b"A=\xff")
    with pytest.raises(LaunchError, match="cannot be read") as caught:
        parse_environment_file(file)
    assert caught.value.where == str(file)


def test_files_win_over_the_environment_and_the_nearer_file_wins(folders):
    home, here = folders
    environ = {"NCCL_DEBUG": "0", "NCCL_A": "0", "NCCL_B": "0"}
    assert exports(environ) == environ
    (home / ".deepspeed_env").write_text("NCCL_DEBUG=1\nNCCL_A=1\nFREE=1\n")
    assert exports(environ) == {"NCCL_DEBUG": "1", "NCCL_A": "1", "NCCL_B": "0", "FREE": "1"}
    (here / ".deepspeed_env").write_text("NCCL_DEBUG=2\n")
    assert exports(environ) == {"NCCL_DEBUG": "2", "NCCL_A": "1", "NCCL_B": "0", "FREE": "1"}


def test_a_bad_line_ends_the_launch(folders):
    _, here = folders
    (here / ".deepspeed_env").write_text("A\n")
    with pytest.raises(LaunchError, match="NAME=VALUE"):
        exports({})


def test_another_file(folders, tmp_path):
    home, here = folders
    (here / ".deepspeed_env").write_text("A=default\n")
    (home / "vars").write_text("A=home\nB=home\n")
    (here / "vars").write_text("A=here\n")
    (here / "conf").mkdir()
    (here / "conf" / "env").write_text("A=conf\n")
    (tmp_path / "far").write_text("A=far\n")
    for name, expected in (
        ("vars", {"A": "here", "B": "home"}),
        ("conf/env", {"A": "conf"}),
        (str(tmp_path / "far"), {"A": "far"}),
        ("~/vars", {"A": "home", "B": "home"}),
        ("", {"A": "default"}),
    ):
        found = exports({"DS_ENV_FILE": name})
        print(name, found)
        assert found == {**expected, "DS_ENV_FILE": name}
    with pytest.raises(LaunchError, match="no such file") as caught:
        exports({"DS_ENV_FILE": "nowhere"})
    assert "DS_ENV_FILE=nowhere" in caught.value.where and str(home) in str(caught.value)


def test_the_default_is_the_environment_of_this_process(folders, monkeypatch):
    monkeypatch.setenv("NCCL_TEST_OF_EXPORTS", "1")
    assert exports()["NCCL_TEST_OF_EXPORTS"] == "1"
