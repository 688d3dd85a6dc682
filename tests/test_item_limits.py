"""Limits of items: each way in which a test, an import or an end of a session can hang ends, and the run names it.

Each case is a small suite of its own under the plugins and settings of the whole suite.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 5  # enough for an import of a small suite beside other sessions
OTHER = "\ndef test_other(): pass\n"

CONFTEST = """
import pytest
from tests import defects, item_limits

def pytest_addoption(parser):
    item_limits.add_options(parser)

def pytest_configure(config):
    config.addinivalue_line("markers", "limit(seconds, reason): longer")
    item_limits.register(config)
    defects.register(config)
"""


def run(
    folder: Path, text: str, *options: str, conftest: str = "", workers: int = 2, reader: str = ""
) -> tuple[int, str, float]:
    """Runs a suite of one file; its exit status, its output and its seconds. Nothing that it started lives afterwards.

    reader: a shell command that gets the standard output, in a pipeline as a terminal's shell starts it: in one process
    group, which pytest leads.
    """
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib -rfExX -p no:cacheprovider\n")
    (folder / "conftest.py").write_text(CONFTEST + conftest)
    (folder / "test_it.py").write_text(text)
    mark = f"dsc_limits_test_{os.getpid()}_{time.monotonic_ns()}"
    spread = ["-n", str(workers), "--reruns", "1"] if workers else []
    command = [sys.executable, "-m", "pytest", *spread, "--item-seconds", str(SECONDS), *options, "test_it.py"]
    if reader:
        command = ["bash", "-c", f'set -m -o pipefail; "$@" | ({reader})', "bash", *command]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DSC_TEST_MARK": mark}
    env = {name: value for name, value in env.items() if not name.startswith("PYTEST_")}
    begin = time.monotonic()
    with open(folder / "output", "w") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = process.wait(240)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
            pytest.fail(f"the suite hangs: {(folder / 'output').read_text()}")
    seconds = time.monotonic() - begin
    end = time.monotonic() + 20  # the limiting processes end within a second of their test processes
    while (left := living(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    output = (folder / "output").read_text()
    assert not left, f"{left} live on\n{output}"
    return code, output, seconds


def living(mark: str) -> list[str]:
    """Command lines of the processes with this mark in their environment."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and mark.encode() in Path("/proc", entry, "environ").read_bytes():
                found.append(Path("/proc", entry, "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it has ended
    return found


def counts(output: str) -> dict[str, int]:
    """The numbers of pytest's closing line."""
    closing = re.findall(r"^=+ (.* in [\d.:]+.*) =+$", output, re.MULTILINE)
    assert closing, output
    return {word.removesuffix("s"): int(n) for n, word in re.findall(r"(\d+) ([a-z]+)", closing[-1].split(" in ")[0])}


HANGS = {
    "call": "import time\ndef test_a(): time.sleep(1000)\n",
    "first_failure": (
        "import pathlib, time\ndef test_a():\n    mark = pathlib.Path('mark')\n    if not mark.exists():\n"
        "        mark.touch()\n        assert False\n    time.sleep(1000)\n"
    ),
    "teardown": (
        "import pytest, time\n@pytest.fixture\ndef thing():\n    yield\n    time.sleep(1000)\ndef test_a(thing): assert False\n"
    ),
    "setup": "import pytest, time\n@pytest.fixture\ndef thing(): time.sleep(1000)\ndef test_a(thing): pass\n",
    "fork": (
        "import os, time\ndef test_a():\n    if os.fork() == 0:\n        time.sleep(1000)\n        os._exit(0)\n    time.sleep(1000)\n"
    ),
    "lock": (  # never lets another thread of Python run
        "import ctypes\ndef test_a():\n    while True: ctypes.PyDLL(None).sleep(1000)\n"
    ),
    "sigterm": (
        "import signal, subprocess, sys\ndef test_a():\n"
        "    code = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)'\n"
        "    subprocess.Popen([sys.executable, '-c', code], start_new_session=True).wait()\n"
    ),
    "full_pipe": (
        "import subprocess, sys\ndef test_a():\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'print(10**6 * str(1))'], stdout=subprocess.PIPE)\n    child.wait()\n"
    ),
}


@pytest.mark.parametrize("case", HANGS)
def test_a_hanging_item_fails_with_its_name_and_stack_and_the_run_goes_on(case: str, tmp_path: Path) -> None:
    code, output, seconds = run(tmp_path, HANGS[case] + OTHER)
    print(output, f"{seconds:.1f} s")
    assert code == 1
    assert counts(output)["failed"] >= 1 and counts(output)["passed"] == 1
    assert "FAILED test_it.py::test_a" in output or "ERROR test_it.py::test_a" in output
    assert f"test_it.py::test_a: not ended after its limit of {SECONDS} s" in output
    assert "test_it.py" in output.split("--- process")[1], "no stack of the test"


@pytest.mark.limit(300, reason="waits for its suite's own limit")
def test_a_hanging_rank_shows_its_stack(tmp_path: Path) -> None:
    body = (
        "import time\nfrom tests.ranks import run_ranks, stop_ranks\nimport signal\n"
        "def body(rank, world):\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    time.sleep(1000 if rank else 0)\n"
        "def test_a(): run_ranks(2, body)\n"
    )
    code, output, _ = run(tmp_path, body + OTHER, "--item-seconds", "40")  # the ranks' imports take seconds
    print(output)
    assert code == 1 and counts(output) == {"failed": 1, "passed": 1, "rerun": 1}
    assert re.search(r"line \d+ in body", output), "no stack of the rank"


def test_a_test_that_kills_its_worker_fails_and_the_run_goes_on(tmp_path: Path) -> None:
    code, output, _ = run(tmp_path, "import os\ndef test_a(): os.kill(os.getpid(), 9)\n" + OTHER)
    print(output)
    assert code == 1 and counts(output) == {"failed": 1, "passed": 1, "rerun": 1}
    assert "FAILED test_it.py::test_a" in output


def test_two_hanging_items_at_once(tmp_path: Path) -> None:
    text = "import time\ndef test_a(): time.sleep(1000)\ndef test_b(): time.sleep(1000)\n"
    code, output, _ = run(tmp_path, text + OTHER)
    print(output)
    assert code == 1 and counts(output) == {"failed": 2, "passed": 1, "rerun": 2}


def test_an_item_that_hangs_once_is_listed_with_both_outcomes(tmp_path: Path) -> None:
    text = (
        "import pathlib, time\ndef test_a():\n    mark = pathlib.Path('mark')\n    if not mark.exists():\n"
        "        mark.touch()\n        time.sleep(1000)\n"
    )
    code, output, _ = run(tmp_path, text + OTHER)
    print(output)
    assert code == 0 and counts(output) == {"passed": 2, "rerun": 1}
    listed = (tmp_path / "out" / "defects.md").read_text()
    assert "not ended after its limit" in listed and "then: passed" in listed and "in test_a" in listed


def test_a_failure_that_passes_again_is_listed_with_both_outcomes(tmp_path: Path) -> None:
    text = "import pathlib\ndef test_a():\n    mark = pathlib.Path('mark')\n    seen = mark.exists()\n    mark.touch()\n    assert seen\n"
    code, output, _ = run(tmp_path, text + OTHER)
    assert code == 0 and "defects: these tests failed, and were run again" in output, output
    listed = (tmp_path / "out" / "defects.md").read_text()
    assert "assert seen" in listed and "then: passed" in listed


def test_an_import_that_hangs_ends_the_run_and_is_named(tmp_path: Path) -> None:
    code, output, seconds = run(tmp_path, "import time\ntime.sleep(1000)\n" + OTHER)
    print(output, f"{seconds:.1f} s")
    assert code == 1
    assert f"collecting test_it.py: not ended after its limit of {SECONDS} s" in output
    assert "test_it.py" in output.split("--- process")[1]


def test_the_end_of_a_session_that_hangs_is_named(tmp_path: Path) -> None:
    end = "\ndef pytest_sessionfinish(session):\n    import time\n    if hasattr(session.config, 'workerinput'): time.sleep(1000)\n"
    code, output, _ = run(tmp_path, OTHER, conftest=end)
    print(output)
    assert code == 1 and counts(output) == {"passed": 1}
    assert f"the end of the session: not ended after its limit of {SECONDS} s" in output


@pytest.mark.parametrize("case", ("call", "fork"))
def test_without_workers_the_run_ends_with_the_name_and_the_stack(case: str, tmp_path: Path) -> None:
    code, output, _ = run(tmp_path, HANGS[case] + OTHER, workers=0)
    print(output)
    assert code == -signal.SIGKILL
    assert f"test_it.py::test_a: not ended after its limit of {SECONDS} s" in output and "in test_a" in output


@pytest.mark.parametrize("workers", (0, 2))
def test_the_rest_of_a_pipeline_writes_its_end(workers: int, tmp_path: Path) -> None:
    """``run`` looks for the orphan of the test, which is in the same process group as the pipeline, and must not live."""
    text = (
        "import os, subprocess, time\ndef test_a():\n"
        "    subprocess.run('sleep 1000 & echo $! > orphan', shell=True)\n"
        "    time.sleep(1000)\n"
    )
    code, output, _ = run(tmp_path, text + OTHER, workers=workers, reader="cat > log; echo the end >> log")
    log = (tmp_path / "log").read_text()
    print(output, log)
    assert code == (1 if workers else 128 + signal.SIGKILL)
    assert log.endswith("the end\n") and "test_it.py" in output + log
    assert (tmp_path / "orphan").exists()


def test_a_marked_item_has_its_own_limit(tmp_path: Path) -> None:
    text = f"import pytest, time\n@pytest.mark.limit({SECONDS * 400}, reason='slow')\ndef test_a(): time.sleep({SECONDS * 2})\n"
    code, output, _ = run(tmp_path, text + OTHER)
    assert code == 0 and counts(output) == {"passed": 2}, output


def test_an_item_in_a_debugger_has_no_limit(tmp_path: Path) -> None:
    text = (
        "import time\ndef test_a(pytestconfig):\n    pytestconfig.hook.pytest_enter_pdb(config=pytestconfig, pdb=None)\n"
        f"    time.sleep({SECONDS * 2})\n"
    )
    code, output, _ = run(tmp_path, text + OTHER, workers=0)
    assert code == 0 and counts(output) == {"passed": 2}, output


@pytest.mark.parametrize("workers", (0, 2))
def test_a_run_ends_at_its_limit_with_names_and_a_closing_line(workers: int, tmp_path: Path) -> None:
    text = "import time\ndef test_a(): assert False\ndef test_b(): time.sleep(1000)\n"
    end = str(time.time() + 20)
    code, output, _ = run(tmp_path, text, "--item-seconds", "200", "--run-ends-at", end, workers=workers)
    print(output)
    assert code == 2 and counts(output)["failed"] == 1
    assert "FAILED test_it.py::test_a" in output
    assert "running then" in output and output.split("running then")[1].splitlines()[1] == "test_it.py::test_b"
