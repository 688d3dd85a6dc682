"""Tests of programs that the zygote forks: each is compared with what a new interpreter does."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import fresh, ranks
from tests.fresh import ProgramFailed

ROOT = Path(__file__).resolve().parent.parent

# Differences are exceptions of a program, so that both interpreters must print the same.
SHOW = """
import json, os, sys
said = {"argv": sys.argv, "cwd": os.getcwd(), "path": sys.path, "environment": dict(os.environ), "name": __name__,
        "file": globals().get("__file__"), "orig_argv": sys.orig_argv[1:], "stdin": sys.stdin.read()}
print(json.dumps(said, sort_keys=True))
"""

ENDINGS = {
    "nothing": "",
    "code": "import sys; sys.exit(7)",
    "large code": "raise SystemExit(256 + 3)",
    "none": "raise SystemExit",
    "text": "raise SystemExit('this is wrong')",
    "exception": "def f():\n    return 1 / 0\nf()",
    "exception from another": "try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('b') from error",
    "syntax": "a b",
    "hook": "import sys\nsys.excepthook = lambda *_: print('hook')\nraise ValueError",
    "_exit": "import os; os._exit(9)",
    "kill": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminate": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "atexit": "import atexit\natexit.register(print, 'first')\natexit.register(print, 'second')\nprint('last line')",
    "thread": "import threading, time\n"
    "def late():\n    time.sleep(0.2)\n    print('thread')\n"
    "threading.Thread(target=late).start()\nprint('main')",
    "file descriptors": "import os\nos.write(1, b'one')\nos.write(2, b'two')\nos.system('echo three')",
    "bytes that are no text": "import os\nos.write(1, b'a\\r\\nb\\xff')",
    "child": "import os\npid = os.fork()\nif pid == 0:\n    raise SystemExit(4)\n"
    "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
    "pool": "import multiprocessing\nprint(multiprocessing.get_context('fork').Pool(2).map(abs, [-1, -2]))",
    "pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
}


def plain(arguments: list[str], **settings: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=300,
        **settings,
    )


def assert_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.05)
                continue
        return
    raise AssertionError(f"process {pid} still runs")


@pytest.mark.parametrize("how", ["-c", "-m", "-", "file", "folder entry"])
def test_a_program_finds_what_a_new_interpreter_gives_it(how: str, tmp_path: Path) -> None:
    for folder in ("work", "other", "scripts"):
        (tmp_path / folder).mkdir()
    for folder in ("work", "scripts"):
        (tmp_path / folder / "show.py").write_text(SHOW)
    words = {
        "-c": ["-c", SHOW], "-m": ["-m", "show"], "-": ["-"], "file": ["show.py"],
        "folder entry": ["../scripts/show.py"],
    }  # fmt: skip
    # The environment of a shell has other variables than the test session.
    env = {"PATH": "/bin", "PYTHONPATH": f"{tmp_path}/other:relative", "A": "b c", "LC_ALL": "C.UTF-8"}
    given = {"cwd": tmp_path / "work", "env": env, "input": SHOW if how == "-" else "a line\nand another"}
    found, wanted = (start([*words[how], "--a", "b c"], **given) for start in (fresh.run, plain))
    assert (found.returncode, found.stderr, wanted.returncode) == (0, "", 0), found.stderr + wanted.stderr
    assert json.loads(found.stdout) == json.loads(wanted.stdout)


@pytest.mark.parametrize("text", ENDINGS.values(), ids=ENDINGS.keys())
def test_it_ends_as_in_a_new_interpreter(text: str) -> None:
    found, wanted = fresh.run(["-c", text]), plain(["-c", text])
    assert (found.returncode, found.stdout, found.stderr) == (wanted.returncode, wanted.stdout, wanted.stderr)


def test_a_traceback_shows_the_file_of_the_program_only(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("def f():\n    raise ValueError('here')\nf()\n")
    found, wanted = (start(["wrong.py"], cwd=tmp_path) for start in (fresh.run, plain))
    assert "in f\n    raise ValueError('here')" in found.stderr
    assert (found.returncode, found.stderr) == (1, wanted.stderr)
    missing = fresh.run(["missing.py"], cwd=tmp_path)
    assert missing.returncode != 0 and "missing.py" in missing.stderr


def test_torch_is_there_and_has_not_run() -> None:
    text = (
        "import sys, threading; there = 'torch' in sys.modules and 'deepspeed_c.initialize' in sys.modules; import torch\n"
        "print(there, threading.active_count(), torch.initial_seed() == torch.default_generator.initial_seed())\n"
        "print(torch.distributed.is_initialized(), (torch.ones(300, 300) @ torch.ones(300, 300))[0, 0].item())"
    )
    assert fresh.run(["-c", text], check=True).stdout == "True 1 True\nFalse 300.0\n"


def test_a_module_is_there_in_programs_that_name_it() -> None:
    text = "import sys; print('tabnanny' in sys.modules)"
    assert fresh.run(["-c", text], preload="tabnanny").stdout == "True\n"
    assert fresh.run(["-c", text]).stdout == "False\n"


def test_a_program_without_the_package_has_torch_alone() -> None:
    text = (
        "import sys; n = len([name for name in sys.modules if name.partition('.')[0] in ('deepspeed_c', 'pytest')])\n"
        "has = [name in sys.modules for name in ('torch', 'torch._dynamo', 'deepspeed_c')]\n"
        "from deepspeed_c import logging; print(n, has, logging.get_dist_msg('here', [-1]))"
    )
    environment = {**os.environ, "RANK": "3"}
    wanted = plain(["-c", "import torch\n" + text], env=environment)
    assert wanted.stdout == "0 [True, False, False] [Rank 3] here\n", wanted
    assert fresh.run(["-c", text], env=environment, has_package=False).stdout == wanted.stdout
    assert fresh.run(["-c", text], env=environment).stdout.split(" ", 1)[1] == "[True, True, True] [Rank 3] here\n"


def test_nothing_of_the_test_session_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("deepspeed_c")
    monkeypatch.setattr(logger, "level", logging.CRITICAL)
    monkeypatch.setenv("DSC_OF_THE_SESSION", "1")
    ranks.run_ranks(2, _leave_a_mark)
    text = (
        "import os, deepspeed_c, torch.distributed as dist; from deepspeed_c.logging import logger, get_dist_msg\n"
        "print(logger.level, get_dist_msg('here', [-1]), dist.is_initialized(), 'DSC_OF_THE_SESSION' in os.environ,\n"
        "      hasattr(deepspeed_c, 'mark'), len(os.listdir('/proc/self/fd')))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DSC_")}
    # The descriptors are the standard streams, and the listed folder.
    assert fresh.run(["-c", text], env=environment).stdout == "20 [Rank 0] here False False False 4\n"
    assert fresh.run(["-c", text], env={**environment, "RANK": "2"}).stdout == "30 [Rank 2] here False False False 4\n"


def _leave_a_mark(rank: int, world: int) -> None:
    import deepspeed_c

    deepspeed_c.mark = rank


def test_programs_draw_other_numbers() -> None:
    text = "import random, numpy; print(random.random(), numpy.random.random())"
    one, two = (fresh.run(["-c", text], check=True).stdout.split() for _ in range(2))
    assert not set(one) & set(two)


def test_much_output_comes_whole() -> None:
    done = fresh.run(["-c", "import sys; print('a' * 3_000_000); print('b' * 2_000_000, file=sys.stderr)"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "a" * 3_000_000 + "\n", "b" * 2_000_000 + "\n")
    assert fresh.run(["-c", "print(len(input()))"], input="c" * 2_000_000).stdout == "2000000\n"


def test_the_limit_kills_the_group_and_shows_the_output(tmp_path: Path) -> None:
    text = (
        "import os, subprocess, sys, time\nchild = subprocess.Popen(['sleep', '1000'])\n"
        "open('pids', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "print('so far'); print('an error', file=sys.stderr)\ntime.sleep(1000)"
    )
    start = fresh.run
    with pytest.raises(ProgramFailed, match=r"(?s)still busy after 3 s.*so far.*an error"):
        start(["-c", text, "word"], timeout=3, cwd=tmp_path)
    for pid in (tmp_path / "pids").read_text().split():
        assert_gone(int(pid))
    assert fresh.run(["-c", "print(1)"]).stdout == "1\n"


def test_a_process_that_is_left_behind_is_not_waited_for() -> None:
    done = fresh.run(["-c", "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)"])
    assert_gone(int(done.stdout))


def test_check_raises_with_the_output() -> None:
    with pytest.raises(ProgramFailed, match=r"(?s)exit code 3.*said"):
        fresh.run(["-c", "print('said'); raise SystemExit(3)"], check=True)


def test_options_of_the_interpreter_are_refused() -> None:
    with pytest.raises(ValueError, match="-O is an option"):
        fresh.run(["-O", "-c", ""])


def test_programs_of_several_ranks_run_at_once(tmp_path: Path) -> None:
    text = (
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "t = torch.ones(3) * (dist.get_rank() + 1); dist.all_reduce(t); print(t.tolist()); dist.destroy_process_group()"
    )
    done = fresh.run_ranks_of(3, ["-c", text], cwd=tmp_path)
    assert [rank.stdout for rank in done] == ["[6.0, 6.0, 6.0]\n"] * 3, done


def test_ranks_are_told_their_number_as_the_launcher_tells_them(tmp_path: Path) -> None:
    (tmp_path / "said.py").write_text("import os, sys; print(sys.argv[1:], os.environ['LOCAL_RANK'])")
    for words in (["said.py"], ["-m", "said"]):
        done = fresh.run_ranks_of(2, [*words, "--a"], cwd=tmp_path, is_told=True)
        assert [rank.stdout for rank in done] == [f"['--local_rank={i}', '--a'] {i}\n" for i in (0, 1)], done


def test_the_zygote_keeps_no_descriptor_of_a_program() -> None:
    fresh.run(["-c", ""])
    folder = Path(f"/proc/{ranks.zygote_of('')._process.pid}/fd")
    before = len(list(folder.iterdir()))
    for _ in range(3):
        fresh.run(["-c", ""])
    assert len(list(folder.iterdir())) == before
