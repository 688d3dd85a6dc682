"""comm/position.py: a rank describes itself, and finds out about other processes on its host."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time

import msgspec
import pytest
import torch.distributed as dist

from deepspeed_c.comm.ledger import Ledger
from deepspeed_c.comm.position import Position, Presence, life_of, locate, own_presence, take_position
from tests.waits import LIMIT_SECONDS, ended, first_line, joined, zombie

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="no /proc: processes are not looked up")


def from_a_thread(function, wait):
    """Call ``function`` in a thread while the main thread waits in ``wait(answers)``, and return its result."""
    answers, main = queue.Queue(), threading.main_thread().ident

    def run():
        while not is_waiting(sys._current_frames()[main]):
            time.sleep(0.001)
        answers.put(function())

    def is_waiting(frame):
        # The frame must be that of the wait itself, not of a function that is called on the way and returns.
        if frame.f_code.co_name not in ("wait", "barrier"):
            return False
        while frame is not None and frame.f_code is not wait.__code__:
            frame = frame.f_back
        return frame is not None

    thread = threading.Thread(target=run)
    thread.start()
    answer = wait(answers)
    joined(thread)
    return answer


def test_the_users_line_comes_first_and_then_where_it_leads():
    def wait_here(answers):
        return answers.get(timeout=LIMIT_SECONDS)

    where, dist_call = from_a_thread(locate, wait_here)
    assert "test_position.py:" in where and " in wait_here (in " in where, where
    assert "in wait)" in where, where
    assert dist_call == ""


def test_a_call_of_torch_is_known():
    # Compile a function that waits as if it were in the source of torch's collectives.
    scope = {}
    code = "def barrier(answers):\n    while not answers.queue:\n        pass\n    return answers.get()\n"
    exec(compile(code, dist.distributed_c10d.__file__, "exec"), scope)  # noqa: S102
    where, dist_call = from_a_thread(locate, scope["barrier"])
    assert dist_call == "barrier", (where, dist_call)
    assert "test_position.py:" in where and "(in " not in where, "the line that called it, and not where it waits"


def test_a_position_travels():
    ledger = Ledger("0", [0, 1])
    for i in range(100):
        ledger.enter("all-gather", i, "w").end()
    ledger.phase = "step"
    waiting = ledger.enter("all-reduce", 8, "v")
    waiting.begin_wait()
    sub = Ledger("5", [1])
    sub.make_part_of(ledger, "dp_shard")
    position = take_position(1, 2, [ledger, sub], {0: "runs"})
    back = msgspec.json.decode(msgspec.json.encode(position), type=Position)
    assert back == position
    group = back.group("0")
    assert group is not None and group.ranks == [] and group.last == 101 and len(group.recent) == 64
    assert [(c.seq, c.op, c.label, c.phase, c.state) for c in group.blocking] == [
        (101, "all-reduce", "v", "step", "waiting")
    ]
    assert 0 <= group.blocking[0].seconds < 200
    assert back.group("5") is not None and back.group("5").ranks == [1] and back.group("5").last == 0
    assert (group.axes, back.group("5").axes) == ("", "dp_shard")
    assert back.group("6") is None and back.neighbours == {0: "runs"}


@needs_proc
def test_life_of_a_process():
    me = own_presence()
    assert me.pid == os.getpid() and life_of(me) == "runs"
    assert life_of(msgspec.structs.replace(me, started=me.started + 1)) == "gone", "another process got its number"
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(1000)"], stdout=subprocess.PIPE
    )
    try:
        first_line(child)
        with open(f"/proc/{child.pid}/stat") as f:
            theirs = Presence(me.host, child.pid, int(f.read().rpartition(")")[2].split()[19]))
        assert life_of(theirs) == "runs"
        child.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 200
        while life_of(theirs) != "stopped" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert life_of(theirs) == "stopped"
        child.kill()
        zombie(child.pid)
        assert life_of(theirs) == "gone", "a zombie has ended"
        ended(child)
        assert life_of(theirs) == "gone"
    finally:
        child.kill()
        ended(child)
        child.stdout.close()
