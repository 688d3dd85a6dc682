"""Threads of this package end before the interpreter does. New interpreters show it: their ends are the subject."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_c.background import BackgroundThread
from tests.waits import joined

PACKAGE = Path(__file__).resolve().parents[2] / "deepspeed_c"
SECONDS = 200

# The interpreter frees the server while it ends, so that the call of the thread comes back just then.
IN_A_STORE = """
import sys, threading
from datetime import timedelta
from torch.distributed import TCPStore
from deepspeed_c.background import BackgroundThread

def store(**kind):
    return TCPStore("127.0.0.1", wait_for_workers=False, timeout=timedelta(seconds=200), **kind)

server = store(port=0, is_master=True)
seen = store(port=server.port, is_master=False)

def wait(client):
    client.add("n_calls", 1)
    client.get("absent")
    print("ended", flush=True)

args = (wait, store(port=server.port, is_master=False))
if sys.argv[1] == "ours":
    BackgroundThread(*args, name="t", end=lambda: seen.set("absent", "now"), limit_s=100).start()
else:
    threading.Thread(target=wait, args=args[1:], daemon=True).start()
while seen.add("n_calls", 0) < 1:
    pass
sys.exit(3)
"""


def ran(text: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text, *words], check=False, capture_output=True, text=True, timeout=SECONDS
    )


def test_a_thread_inside_a_store_ends_before_the_interpreter():
    done = ran(IN_A_STORE, "ours")
    assert (done.returncode, done.stdout, done.stderr) == (3, "ended\n", "")


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 lets such threads hang")
def test_a_daemon_thread_inside_a_store_aborts_the_process():
    """The reason for the class: without it the same program fails."""
    done = ran(IN_A_STORE, "Python's")
    assert done.returncode == -6 and "terminate called" in done.stderr, (done.returncode, done.stderr)


STUBBORN = """
import atexit, threading, time

told = []
# Registered first, so it runs last. One after the other, the threads would take 5 s.
atexit.register(lambda: print(len(told), 1 <= time.monotonic() - told[0] < 5))
from deepspeed_c.background import BackgroundThread

for i in range(5):
    BackgroundThread(threading.Event().wait, name="t", end=lambda: told.append(time.monotonic()), limit_s=1).start()
gone = BackgroundThread(int, name="t", end=lambda: print("told a thread that has ended"), limit_s=100)
gone.start()
gone.join()
"""


def test_threads_that_do_not_end_are_waited_for_together_and_up_to_their_limit():
    done = ran(STUBBORN)
    assert (done.returncode, done.stdout, done.stderr) == (0, "5 True\n", "")


FORKED = """
import os, sys, threading
from deepspeed_c.background import BackgroundThread

BackgroundThread(threading.Event().wait, name="t", end=lambda: print("told in", os.getpid()), limit_s=0).start()
child = os.fork()
if child:
    print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print("I am", os.getpid())
sys.stdout.flush()
"""


def test_a_forked_child_tells_no_thread_of_its_parent():
    done = ran(FORKED)
    ended, name, told = done.stdout.splitlines()
    assert ended == "child ended with 0" and told == name.replace("I am", "told in"), done


def test_it_gets_its_arguments_and_is_a_daemon():
    found = []
    thread = BackgroundThread(found.append, 7, name="a name", end=found.clear, limit_s=0)
    assert not thread.is_alive() and thread.daemon and thread.name == "a name"
    thread.start()
    joined(thread)
    assert found == [7]


# Other threads of the package, and how each ends. threading.Thread in these files is not a daemon.
OTHERS = {
    "background.py: class BackgroundThread(threading.Thread)": "the class itself",
    "checkpoint/native/background.py: threading.Thread": "no daemon: the interpreter waits until the checkpoint is whole",
    "launcher/compare.py: ThreadPoolExecutor": "a block joins its threads",
    "launcher/compare.py: threading.Timer": "no daemon, and cancelled in the same call",
    "rollout/openai.py: ThreadPoolExecutor": "a block joins its threads, each of which ends with timeout_s",
    "zero/states/ahead.py: ThreadPoolExecutor": "the interpreter waits for the update that runs",
}


def threads_in(text: str) -> list[tuple[str, bool]]:
    """(the name of each thread or pool that a file makes, whether it is a daemon)."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            found += [
                (f"class {node.name}({ast.unparse(base)})", False)
                for base in node.bases
                if ast.unparse(base).split(".")[-1] == "Thread"
            ]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in (
                "threading.Thread",
                "Thread",
                "threading.Timer",
                "Timer",
                "ThreadPoolExecutor",
                "futures.ThreadPoolExecutor",
            ):
                is_daemon = any(word.arg == "daemon" and ast.unparse(word.value) != "False" for word in node.keywords)
                found.append((name, is_daemon))
    return found


def test_every_thread_of_the_package_has_an_end():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name, is_daemon in threads_in(path.read_text(encoding="utf-8")):
            found[f"{path.relative_to(PACKAGE)}: {name}"] = is_daemon
    assert set(found) == set(OTHERS), "start a BackgroundThread, or say how the thread ends"
    assert not any(found.values()), found


def test_the_rule_sees_threads():
    text = "threading.Thread(target=f, daemon=True)\nclass A(threading.Thread): pass\nThreadPoolExecutor(1)\nThread(daemon=False)"
    assert threads_in(text) == [
        ("class A(threading.Thread)", False),
        ("threading.Thread", True),
        ("ThreadPoolExecutor", False),
        ("Thread", False),
    ]
