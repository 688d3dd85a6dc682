"""`deepspeed_c report --hostfile`: what is equal once, what differs with a mark, and who does not answer."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from deepspeed_c.launcher import compare
from deepspeed_c.launcher.compare import Answer, as_json, as_text, gather_from
from deepspeed_c.launcher.main import main
from tests.ssh_hosts import SshHosts, why_no_ssh

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_SECONDS = 300


def answer(offset=0.0, *, is_whole=True, **package):
    values = {"package": {"torch": "2.8", "python": "3.11", **package}, "memory": {"available": "1 GiB"}}
    return Answer(values, offset, is_whole, "")


def marked(lines):
    return [line for line in lines if line.startswith("!")]


def test_equal_values_are_printed_once():
    lines = as_text({"a": answer(), "b": answer(0.9), "c": answer(-0.1)})
    print(*lines, sep="\n")
    assert [line.split() for line in lines if "torch" in line] == [["torch", "2.8"]]
    assert marked(lines) == [] and "  all within 1 s" in lines


def test_what_differs_is_marked_with_its_hosts():
    # Memory differs at any moment
    other = answer(torch="2.7")
    other.report["memory"] = {"available": "2 GiB"}
    lines = as_text({"a": answer(), "b": other, "c": answer()})
    print(*lines, sep="\n")
    at = lines.index("! torch")
    assert lines[at + 1 : at + 3] == ["      a, c  2.8", "      b     2.7"]
    assert marked(lines) == ["! torch"]
    assert "  available" in lines


def test_a_value_that_a_host_lacks_differs():
    lines = as_text({"a": answer(extension="/x.so"), "b": answer()})
    print(*lines, sep="\n")
    assert marked(lines) == ["! extension"] and "      b  not there" in lines


@pytest.mark.parametrize(("offsets", "apart"), [((0.0, 1.1), "1.1"), ((-3600.0, 0.0, 5.0), "3605.0")])
def test_clocks_that_are_apart_are_marked(offsets, apart):
    lines = as_text({f"h{i}": answer(offset) for i, offset in enumerate(offsets)})
    print(*lines, sep="\n")
    assert marked(lines) == [f"! up to {apart} s apart"]
    ahead = [f"      h{i}  {offset - min(offsets):.1f} s ahead" for i, offset in enumerate(offsets)]
    assert lines[-len(offsets) :] == ahead


def test_who_does_not_answer_is_named_with_what_was_said():
    lines = as_text({"a": answer(is_whole=False), "b": Answer(None, 0.0, False, "ssh: no route\nto host")})
    print(*lines, sep="\n")
    assert lines[0].startswith("1 of 2 hosts answered")
    assert marked(lines) == ["! a: the package is not complete (see above)", "! b does not answer:"]
    assert lines[-2:] == ["    ssh: no route", "    to host"]
    assert as_text({"b": Answer(None, 0.0, False, "x")})[0].startswith("0 of 1")
    shown = as_json({"a": answer(2.5), "b": Answer(None, 0.0, False, "x")})
    assert shown["b"] == {"error": "x"} and shown["a"]["clock"] == {"ahead_s": 2.5}


def python(code):
    return [sys.executable, "-c", code]


def test_a_report_is_read_behind_a_greeting():
    said = {"package": {"torch": "x"}, "clock": {"seconds": time.time() + 1000}}
    code = f"import json, sys; print('Welcome {{'); print(json.dumps({said!r}, indent=2)); sys.stderr.write('bye')"
    found = gather_from(python(code))
    print(found)
    assert found.report == {"package": {"torch": "x"}} and found.is_whole and found.said == "bye"
    assert 800 < found.offset <= 1000
    assert not gather_from(python(code + "; sys.exit(1)")).is_whole


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["/nonexistent/ssh"], "cannot be started"),
        (python("import sys; sys.exit('no such host')"), "no such host (exit code 1, without a report)"),
        (python("pass"), "no message (exit code 0"),
        (python("print('{')"), "without a report"),
        (python("print('{'); print('}')"), "without a report"),
    ],
    ids=range(5),
)
def test_no_report(command, text):
    found = gather_from(command)
    assert found.report is None and text in found.said, found


def test_a_host_that_hangs_is_given_up():
    begin = time.monotonic()
    found = gather_from(python("import sys, time; print('x', file=sys.stderr, flush=True); time.sleep(1000)"), 3.0)
    assert found.report is None and found.said.startswith("no answer within 3 s"), found
    assert time.monotonic() - begin < 200


def test_a_hostfile_that_is_not_there(capsys):
    assert main(["report", "--hostfile", "/nonexistent/hosts"]) == 2
    assert "/nonexistent/hosts" in capsys.readouterr().err


def test_exit_codes(tmp_path, monkeypatch, capsys):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    answers = {"a": answer(), "b": answer()}
    monkeypatch.setattr(compare, "gather_from", lambda command: answers[command[-2]])
    assert main(["report", "-H", str(tmp_path / "hosts")]) == 0
    answers["b"] = answer(torch="2.7")
    assert main(["report", "-H", str(tmp_path / "hosts")]) == 0
    answers["b"] = answer(is_whole=False)
    assert main(["report", "-H", str(tmp_path / "hosts")]) == 1
    answers["b"] = Answer(None, 0.0, False, "gone")
    assert main(["report", "-H", str(tmp_path / "hosts")]) == 1
    capsys.readouterr()
    assert main(["report", "--json", "-H", str(tmp_path / "hosts")]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == ["a", "b"] and shown["a"]["package"]["torch"] == "2.8" and shown["b"] == {"error": "gone"}


def test_two_hosts_and_one_that_is_not_there(tmp_path):
    if why := why_no_ssh():
        pytest.skip(why)
    version = ROOT / "deepspeed_c" / "_version.py"
    (tmp_path / "version.py").write_text('__version__ = "9.9.9"\n')
    with SshHosts(2) as hosts:
        # Another version of the package, in the file system of host 1 alone
        hosts[1].run(["mount", "--bind", str(tmp_path / "version.py"), str(version)])
        process = hosts.launch(0, ["report", "--hostfile", hosts.hostfile({"host-0": 1, "host-1": 1, "nobody": 1})])
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    print(out, err)
    lines = out.splitlines()
    assert process.returncode == 1, err
    assert lines[0].startswith("2 of 3 hosts answered")
    at = lines.index("! deepspeed_c")
    assert lines[at + 1].split()[0] == "host-0" and lines[at + 2].split() == ["host-1", "9.9.9"]
    assert "! nobody does not answer:" in lines and "resolve" in out
    assert [line for line in lines if line.strip().startswith("torch  ")] != []
    assert "  all within 1 s" in lines
