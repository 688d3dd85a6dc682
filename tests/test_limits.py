"""Every wait of a test for a process or a thread has a limit, and the limits are long, as they only end runs that hang.

Several test sessions may share two cores, and there the start of a process that imports torch has taken half a minute.
"""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parent
LEAST_SECONDS = 200
CALLS = ("run_ranks", "run", "call", "check_output", "check_call", "communicate", "join")
# ``wait`` of these ends at the limit of the collective or of the transfer, or is no wait for another process at all.
NO_PROCESSES = {
    *("handle", "request", "work", "flight", "other", "saved"),  # of collectives, of aio, of saves in the background
    *("home", "store"),  # of offloaded tensors
    "end",  # an event of the CPU as an accelerator
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_reduce", "all_to_all", "reduce_scatter"),
    *("message", "shift", "send", "receive", "isend", "irecv", "save_checkpoint", "then"),
}
FORKING = {"waits.py", "ranks.py", "fresh.py"}


def short_limits(text: str) -> list[str]:
    """``LINE: call(timeout=SECONDS)`` of each call that gives processes or threads fewer seconds."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in CALLS:
            continue
        limits = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
        if name == "join":
            limits += node.args
        for limit in limits:
            if isinstance(limit, ast.Constant) and isinstance(limit.value, int | float) and limit.value < LEAST_SECONDS:
                found.append(f"{node.lineno}: {name}(timeout={limit.value:g})")
    return found


def names_of(receiver: ast.expr) -> set[str]:
    """The last names of an expression: ``work`` of ``self.work``, of ``works["work"]``; ``send`` of ``group.send(x)``."""
    match receiver:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
            return {name}
        case ast.Subscript(value=inner) | ast.Call(func=inner):
            return names_of(inner)
        case ast.IfExp(body=one, orelse=other):
            return names_of(one) | names_of(other)
    return {""}


def is_without_limit(call: ast.Call) -> bool:
    """Whether the call waits, maybe for ever, for a process, a thread, or something that another one does."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    limit = given.get("timeout", ast.Constant(None))
    # None is the name of ``**options``, which may have a limit.
    has_limit = None in given or not (isinstance(limit, ast.Constant) and limit.value is None)
    match call.func:
        case ast.Attribute(value=ast.Name(id="os"), attr="wait" | "wait3"):
            return True
        case ast.Attribute(value=ast.Name(id="os"), attr="waitpid" | "waitid" | "wait4"):
            return "WNOHANG" not in ast.unparse(call)
        case ast.Attribute(value=ast.Name(id="subprocess"), attr="run" | "call" | "check_output" | "check_call"):
            return not has_limit
        case ast.Attribute(attr="communicate"):
            return not has_limit
        case ast.Attribute(value=receiver, attr="wait"):
            return not call.args and not has_limit and not names_of(receiver) <= NO_PROCESSES
        case ast.Attribute(attr="join"):  # strings have an argument
            return not call.args and not has_limit
        case ast.Attribute(attr="get"):  # queues; dictionaries have an argument
            return not call.args and not has_limit
    return False


def unlimited_waits(text: str, *, may_fork: bool = False) -> list[str]:
    """``LINE: CALL`` of each wait without a limit, and of each fork without an alarm."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            is_fork = ast.unparse(node.func) in ("os.fork", "os.forkpty")
            if is_without_limit(node) or (is_fork and not may_fork):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    return sorted(found, key=lambda line: int(line.partition(":")[0]))


def test_no_test_waits_without_a_limit() -> None:
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        lines = unlimited_waits(
            path.read_text(encoding="utf-8"), may_fork=path.parent == TESTS and path.name in FORKING
        )
        found += [f"tests/{path.relative_to(TESTS)}:{line}" for line in lines]
    assert found == [], "use tests/waits.py, or give a timeout\n" + "\n".join(found)


REFUSED = """
process.wait()
self.processes[0].wait()
subprocess.Popen(command).wait()
event.wait(timeout=None)
process.communicate()
process.communicate(b"input")
thread.join()
answers.get()
os.waitpid(pid, 0)
os.waitid(os.P_PID, pid, os.WEXITED)
os.wait()
os.fork()
subprocess.run(command, check=True)
subprocess.check_output(command, timeout=None)
subprocess.check_call(command)
(work if rank else process).wait()
"""
ALLOWED = """
process.wait(SECONDS)
process.wait(timeout=SECONDS)
process.communicate(b"input", timeout=SECONDS)
thread.join(SECONDS)
", ".join(names)
answers.get(timeout=SECONDS)
table.get("key")
os.waitpid(pid, os.WNOHANG)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
subprocess.run(command, check=True, timeout=SECONDS)
subprocess.run(command, **options)
work.wait()
works[3].work.wait()
state["handle"].wait()
group.all_reduce(flat, "sum").wait()
(group.send(x) if rank else group.receive(x)).wait()
"""


def test_waits_without_a_limit_are_found() -> None:
    assert unlimited_waits(REFUSED) == [f"{i}: {line}" for i, line in as_unparsed(REFUSED)]
    assert unlimited_waits(ALLOWED) == []
    assert unlimited_waits("os.fork()", may_fork=True) == []


def as_unparsed(text: str) -> list[tuple[int, str]]:
    return [(node.lineno, ast.unparse(node)) for node in ast.parse(text).body]


def test_no_test_gives_a_process_less_time_than_a_busy_machine_takes() -> None:
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        found += [f"{path.relative_to(TESTS)}:{line}" for line in short_limits(path.read_text(encoding="utf-8"))]
    assert found == [], "\n".join(found)


def test_short_limits_are_found() -> None:
    text = "run_ranks(2, f, timeout=60)\nsubprocess.run(x, timeout=300)\np.communicate(timeout=20)\nt.join(5)\n', '.join(5 * x)"
    assert short_limits(text) == ["1: run_ranks(timeout=60)", "3: communicate(timeout=20)", "4: join(timeout=5)"]
