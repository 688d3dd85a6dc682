"""The pipes between ranks and terminal: every byte arrives, in order and at once. A broken output stops no rank."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import time
from pathlib import Path

import pytest

from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher import output as output_module
from deepspeed_c.launcher.output import Output
from tests.open_files import open_files


def write(path, data):
    with open(path, "wb", buffering=0) as pipe:
        view = memoryview(data)
        while view:
            view = view[pipe.write(view) :]


def test_stderr_arrives_and_is_remembered(capfd):
    with Output(range(2)) as output:
        assert [output.paths(rank)[0] for rank in (0, 1)] == ["", ""]
        write(output.paths(1)[1], b"one\nno end")
        output.finish()
        assert (output.tail(0), output.tail(1)) == ("", "one\nno end")
    assert capfd.readouterr() == ("", "one\nno end")


def test_output_comes_while_the_rank_runs(tmp_path):
    with Output(range(1), log_dir=str(tmp_path)) as output:
        write(output.paths(0)[1], b"now")
        end = time.monotonic() + 200
        while not (text := Path(output.log_paths[0]).read_bytes()) and time.monotonic() < end:
            time.sleep(0.01)
        assert text == b"now"


def write_and_wait(output, stream, data):
    """Write to the pipe, and wait until the thread has read everything."""
    write(output.paths(stream)[1], data)
    fd = next(s.read_fd for s in output._streams if s.rank == stream and s.target == 2)
    end = time.monotonic() + 200
    while struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0]:
        assert time.monotonic() < end, "nobody reads"
        time.sleep(0.001)


def test_lines_of_two_ranks_do_not_mix_on_the_terminal(capfd, monkeypatch):
    """Each line comes in two writes, the words and the end of the line, as from ``print`` without a buffer."""
    monkeypatch.setattr(output_module, "HOLD_SECONDS", 1000.0)
    with Output(range(2)) as output:
        write_and_wait(output, 0, b"took")
        write_and_wait(output, 1, b"to")
        write_and_wait(output, 0, b" 4")
        write_and_wait(output, 1, b"ok 5\nok")
        write_and_wait(output, 0, b" batches\n")
        write_and_wait(output, 1, b" 6")
        output.finish()
        assert [output.tail(rank) for rank in (0, 1)] == ["took 4 batches", "took 5\nok 6"]
    assert capfd.readouterr().err == "took 5\ntook 4 batches\nok 6"


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_prompt_without_the_end_of_its_line_is_shown(capfd, n_ranks):
    with Output(range(n_ranks)) as output:
        write(output.paths(0)[1], b"10%\r20%")
        end, seen = time.monotonic() + 200, ""
        while "20%" not in seen:
            assert time.monotonic() < end, seen
            seen += capfd.readouterr().err
            time.sleep(0.01)
    assert seen + capfd.readouterr().err == "10%\r20%"


def test_much_more_than_a_pipe_holds(tmp_path):
    data = os.urandom(3 << 20) + b"end"
    with Output(range(1), log_dir=str(tmp_path)) as output:
        write(output.paths(0)[0], data)
        output.finish()
        assert Path(output.log_paths[0]).read_bytes() == data


def test_log_has_both_streams_in_order(tmp_path, capfd):
    with Output(range(2), log_dir=str(tmp_path)) as output:
        out, err = output.paths(1)
        with open(out, "wb", buffering=0) as o, open(err, "wb", buffering=0) as e:
            for i in range(100):
                (o if i % 2 else e).write(b"%d\n" % i)
    assert Path(output.log_paths[1]).read_text() == "".join(f"{i}\n" for i in range(100))
    assert Path(output.log_paths[0]).read_text() == ""
    assert [os.path.basename(path)[-10:] for path in output.log_paths] == ["_rank0.log", "_rank1.log"]
    assert capfd.readouterr() == ("", "")


def test_labels(capfd):
    with Output(range(2), has_labels=True) as output:
        write(output.paths(0)[0], b"a\nb")
        write(output.paths(1)[1], b"10%\r20%\r")
        output.finish()
    out, err = capfd.readouterr()
    assert out == "[rank0]: a\n[rank0]: b\n"
    assert err == "[rank1]: 10%\r[rank1]: 20%\r"


def test_tail_is_bounded_and_of_whole_lines():
    with Output(range(1)) as output:
        # Write 4,000 lines of 16 bytes to a target that accepts nothing. Only the tail is checked.
        output._streams[0].target = -1
        write(output.paths(0)[1], b"".join(b"line %010d\n" % i for i in range(4000)))
        output.finish()
        lines = output.tail(0).splitlines()
    assert len(lines) == output_module.TAIL_LINES
    assert lines[-1] == "line 0000003999"


def test_tail_of_one_endless_line_and_of_bytes_that_are_no_text():
    with Output(range(1)) as output:
        output._streams[0].target = -1
        write(output.paths(0)[1], b"\xff\xfe bad\nend")
        output.finish()
        assert output.tail(0) == "�� bad\nend"


def test_broken_log_does_not_block_the_rank(tmp_path, capfd):
    with Output(range(1), log_dir=str(tmp_path)) as output:
        with open("/dev/full", "wb") as full:
            os.dup2(full.fileno(), output._streams[0].target)
        write(output.paths(0)[1], b"x" * (1 << 20))  # returns only if the thread reads
        output.finish()
        assert output.tail(0).endswith("x")
    assert capfd.readouterr().err.count("rank 0 can no longer write to its log file") == 1


def test_no_descriptor_is_left(tmp_path):
    before = open_files()
    for _ in range(3):
        with Output(range(4), log_dir=str(tmp_path)) as output:
            write(output.paths(3)[1], b"x")
    assert open_files() == before


def test_end_does_not_wait_for_a_process_that_was_left_behind():
    with Output(range(1)) as output:
        output._streams[0].target = -1
        with open(output.paths(0)[1], "wb"):  # the pipe is still open, as by a daemon that the rank started
            output.finish()  # returns


def test_log_folder_that_is_gone(tmp_path):
    with pytest.raises(LaunchError, match="cannot be set up"):
        Output(range(1), log_dir=str(tmp_path / "none"))
