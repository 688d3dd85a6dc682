"""Hostfiles and --include / --exclude give hosts and slots, or an error that names the wrong word."""

from __future__ import annotations

import socket

import pytest

from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.hostfile import is_this_host, parse_filter, read_hostfile, select_hosts
from deepspeed_c.launcher.options import parse_options


def select(*argv, devices=None):
    """Of the only host."""
    (slots,) = hosts(*argv, devices=devices).values()
    return slots


def hosts(*argv, devices=None):
    return select_hosts(parse_options([*argv, "t.py"]), devices)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", {}),
        ("a", {"a": None}),
        ("a:0", {"a": [0]}),
        ("a:2,0,2", {"a": [0, 2]}),
        ("worker-0@worker-1:0,2", {"worker-0": None, "worker-1": [0, 2]}),
        ("a:1@a:0", {"a": [0, 1]}),
        ("a:1@a", {"a": None}),
        ("a@a:1", {"a": None}),
    ],
)
def test_filter_grammar(text, wanted):
    assert parse_filter(text) == wanted


@pytest.mark.parametrize("text", [":0", "a:", "a:x", "a:0,", "a:-1", "a:0@", "@", "a b", "a:0:1", "a:0;1"])
def test_malformed_filter(text):
    with pytest.raises(LaunchError) as caught:
        parse_filter(text, "--include")
    assert f"--include {text}" in str(caught.value)


def test_hostfile_with_comments(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# comment\n\n  b slots=2  # two\r\na\tslots=16\n")
    assert list(read_hostfile(str(path)).items()) == [("b", 2), ("a", 16)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "names no host"),
        ("# nothing\n", "names no host"),
        ("a\n", "line 1"),
        ("a slots=1\nb slots=x\n", "line 2"),
        ("a slots=1 b\n", "line 1"),
        ("a slots=1\na slots=2\n", "a second time"),
        ("a slots=0\n", "no slot"),
    ],
)
def test_bad_hostfile(tmp_path, text, reason):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(LaunchError) as caught:
        read_hostfile(str(path))
    assert reason in str(caught.value) and str(path) in str(caught.value)


def test_missing_and_binary_hostfile(tmp_path):
    with pytest.raises(LaunchError, match="cannot be read"):
        read_hostfile(str(tmp_path / "none"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LaunchError, match="cannot be read"):
        read_hostfile(str(tmp_path / "binary"))


def test_this_host():
    assert is_this_host("localhost") and is_this_host("127.0.0.1") and is_this_host(socket.gethostname())
    assert not is_this_host("192.0.2.1")  # TEST-NET-1: no host has it
    assert not is_this_host("no-such-host.invalid")
    assert not is_this_host("a" * 70)  # too long for a name


@pytest.mark.parametrize(
    ("argv", "devices", "slots"),
    [
        ([], None, [0]),
        (["--num_procs", "3"], None, [0, 1, 2]),
        (["-i", "localhost:0,2"], None, [0, 2]),
        (["-i", "localhost"], None, [0]),
        ([], [0, 1, 2, 3], [0, 1, 2, 3]),
        ([], [2, 5], [2, 5]),
        (["--num_gpus", "1"], [2, 5], [2]),
        (["-i", "localhost:5"], [2, 5], [5]),
        (["-i", "localhost:3,1@localhost:0"], [0, 1, 2, 3], [0, 1, 3]),
        (["-e", "localhost:1"], [0, 1, 2], [0, 2]),
        (["--num_nodes", "1"], [0, 1], [0, 1]),
    ],
)
def test_slots(argv, devices, slots):
    assert select(*argv, devices=devices) == slots


@pytest.mark.parametrize(
    ("argv", "devices", "text"),
    [
        (["--num_gpus", "3"], [0, 1], "there are 2 slots (0, 1)"),
        (["-i", "localhost:2"], [0, 1], "no slot 2; it has 0, 1"),
        (["-i", "worker-0:0"], [0, 1], "no host 'worker-0'; known: localhost"),
        (["-e", "localhost"], [0, 1], "nothing is left"),
        (["-e", "localhost:0"], None, "nothing is left"),
        (["-e", "localhost:1"], None, "no slot 1"),
    ],
)
def test_slots_that_are_not_there(argv, devices, text):
    with pytest.raises(LaunchError) as caught:
        select(*argv, devices=devices)
    assert text in str(caught.value), caught.value


def test_hostfile_of_this_host_alone(tmp_path):
    path = tmp_path / "hosts"
    path.write_text(f"{socket.gethostname()} slots=3\n")
    assert select("-H", str(path)) == [0, 1, 2]
    assert select("-H", str(path), "--num_gpus", "2") == [0, 1]
    assert select("-H", str(path), "-i", f"{socket.gethostname()}:1") == [1]
    assert select("-H", str(path), devices=[4, 5, 6, 7]) == [4, 5, 6]
    with pytest.raises(LaunchError, match="2 devices"):
        select("-H", str(path), devices=[0, 1])
    with pytest.raises(LaunchError, match="3 slots"):
        select("-H", str(path), "--num_gpus", "4")


@pytest.fixture
def three(tmp_path):
    """A hostfile: b with 4 slots, a with 2, c with 1."""
    path = tmp_path / "hosts"
    path.write_text("b slots=4\na slots=2\nc:1\n")
    return str(path)


@pytest.mark.parametrize(
    ("argv", "chosen"),
    [
        ([], {"b": [0, 1, 2, 3], "a": [0, 1], "c": [0]}),
        (["--num_nodes", "2"], {"b": [0, 1, 2, 3], "a": [0, 1]}),
        (["--num_gpus", "1"], {"b": [0], "a": [0], "c": [0]}),
        (["--num_nodes", "2", "--num_gpus", "2"], {"b": [0, 1], "a": [0, 1]}),
        (["-i", "a@b:3,1"], {"b": [1, 3], "a": [0, 1]}),
        (["-i", "c"], {"c": [0]}),
        (["-e", "b:0,2@c"], {"b": [1, 3], "a": [0, 1]}),
        (["-e", "b@a:0"], {"a": [1], "c": [0]}),
    ],
)
def test_several_hosts_in_the_order_of_the_file(three, argv, chosen):
    got = hosts("-H", three, *argv)
    assert list(got.items()) == list(chosen.items())


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--num_nodes", "4"], "4 hosts are asked for"),
        (["--num_gpus", "2"], "1 slots (0) on c"),
        (["-i", "d"], "no host 'd'"),
        (["-i", "a:2"], "a has no slot 2; it has 0, 1"),
        (["-e", "a@b@c"], "nothing is left"),
    ],
)
def test_several_hosts_that_are_not_there(three, argv, text):
    with pytest.raises(LaunchError) as caught:
        hosts("-H", three, *argv)
    assert text in str(caught.value), caught.value


def test_the_nearest_name_is_told(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("worker-0 slots=1\nworker-1 slots=1\n")
    with pytest.raises(LaunchError, match="did you mean 'worker-1'"):
        hosts("-H", str(path), "-i", "worker1")


def test_without_a_hostfile_several_hosts_start_themselves():
    with pytest.raises(LaunchError, match="2 hosts are asked for") as caught:
        hosts("--num_nodes", "2")
    assert "--hostfile" in caught.value.fix and "--no_ssh" in caught.value.fix
    alike = hosts("--no_ssh", "--node_rank", "1", "--num_nodes", "2", "--num_gpus", "3")
    assert list(alike.values()) == [[0, 1, 2]] * 2
