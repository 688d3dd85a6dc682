"""Runs programs as a new interpreter would, without the seconds that its imports take.

    from tests import fresh

    done = fresh.run(["-c", "import sys, torch; print(sys.argv[1:])", "a"], env={**os.environ, "RANK": "1"}, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "['a']\n"), done.stderr

The program runs in a child that the zygote of ranks.py forks: torch, ``torch.distributed`` and
``deepspeed_c.initialize`` are imported there already, and no operator has run. A program has its own environment, working
directory, arguments, ``sys.path``, standard streams and process group. With ``has_package=False`` the child has imported
torch alone. Such programs test an import of deepspeed_c, by one of its paths or without one of its parts.

A test starts ``sys.executable`` itself if its subject is one of these, in which the child differs from a new process:

* the imports of a process that must not have torch or a part of it, the time of imports, or a module that hides torch;
* variables that are read at an import: ``OMP_NUM_THREADS`` is 1, and ``DSC_LOG`` comes from the test session;
* the command line of the process, signals, and the end of the interpreter (handlers of ``atexit`` do run);
* the memory of the process, whose heap has the objects of the imports.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import os
import random
import runpy
import select
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

from tests import ranks

__all__ = ["ProgramFailed", "run", "run_ranks_of"]

LIMIT_SECONDS = 300.0  # only ends programs that hang


class ProgramFailed(AssertionError):
    """A program did not end in time, or its exit code is not 0 and ``check`` was given. The text has its output."""


def run(
    arguments: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    input: str | None = None,
    timeout: float = LIMIT_SECONDS,
    check: bool = False,
    preload: str = "",
    has_package: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Runs the program with the words after ``python`` on a command line: ``-c TEXT``, ``-m MODULE``, ``-`` (the text is
    ``input``) or a file, each followed by the program's arguments.

    ``env`` is the whole environment; the entries of its ``PYTHONPATH`` are in ``sys.path``. Without ``input`` standard
    input is empty. Exit codes are Python's own (-n for signal n). After ``timeout`` seconds the process group is
    killed, and ``ProgramFailed`` shows the output so far. Processes that a program leaves behind in its group are
    killed. ``preload`` names a module that was imported before the fork, for programs that import more than torch.
    ``has_package`` is whether deepspeed_c was, too.
    """
    words = [os.fspath(word) for word in arguments]
    if words[0].startswith("-") and words[0] not in ("-c", "-m", "-"):
        raise ValueError(f"{words[0]} is an option of the interpreter, which has started already")
    order = (words, dict(os.environ if env is None else env), os.path.abspath(cwd or os.getcwd()))
    zygote = ranks.zygote_of(preload, has_package)
    with contextlib.ExitStack() as stack:
        # Files, and no pipes: nobody must read while the program runs, and the output so far is there at any time.
        streams = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        streams[0].write((input or "").encode())
        streams[0].seek(0)
        ours, theirs = socket.socketpair()
        with theirs:
            pid = zygote.fork(theirs.fileno(), *(stream.fileno() for stream in streams), runs="program")
        with Connection(ours.detach()) as connection:
            try:
                with contextlib.suppress(BrokenPipeError):  # it has died already
                    connection.send(order)
                is_late = not _has_ended(pid, timeout)
            finally:
                code = zygote.reap(pid)
        out, err = (_text(stream) for stream in streams[1:])
    if is_late or (check and code):
        how = f"still busy after {timeout:g} s" if is_late else f"exit code {code}"
        raise ProgramFailed(f"{' '.join(words)}: {how}\n--- output\n{out}\n--- errors\n{err}")
    return subprocess.CompletedProcess([sys.executable, *words], code, out, err)


def run_ranks_of(
    world: int,
    arguments: Sequence[str | os.PathLike[str]],
    *,
    cwd: str | os.PathLike[str],
    preload: str = "",
    is_told: bool = False,
) -> list[subprocess.CompletedProcess[str]]:
    """Runs the program as ``world`` ranks of this host, with the environment that the launcher gives them. is_told: also
    with its argument ``--local_rank=N`` behind the script.

    A rank that fails does not end the others. Only the limit does so.
    """
    n_first = 1 if not os.fspath(arguments[0]).startswith("-") else 2
    env = {**os.environ, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ranks.free_port()), "OMP_NUM_THREADS": "1"}

    def start(rank: int) -> subprocess.CompletedProcess[str]:
        of_rank = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        told = [f"--local_rank={rank}"] if is_told else []
        return run([*arguments[:n_first], *told, *arguments[n_first:]], env=of_rank, cwd=cwd, preload=preload)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(start, range(world)))


def _has_ended(pid: int, timeout: float) -> bool:
    """Whether the process, a child of the zygote, becomes a zombie in that time."""
    fd = os.pidfd_open(pid)
    try:
        return bool(select.select([fd], [], [], timeout)[0])
    finally:
        os.close(fd)


def _text(stream: io.BufferedRandom) -> str:
    stream.seek(0)
    return io.TextIOWrapper(stream, encoding="utf-8", errors="replace").read()


# ---- in the child --------------------------------------------------------------------------------------------------


def program_main(connection: Connection, *streams: int) -> None:
    """The child of the zygote becomes the program, and never returns into the zygote's frames."""
    code = 1
    try:
        with contextlib.suppress(PermissionError):
            os.setpgid(0, 0)
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
            os.close(fd)
        os.set_inheritable(connection.fileno(), False)
        words, environment, cwd = connection.recv()
        connection.close()
        _prepare(environment, cwd)
        code = _exit_code(words)
        # The order of a Python that ends.
        threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001  the process ends here: the last chance to say why
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)


def _prepare(environment: dict[str, str], cwd: str) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    ranks.restore_path(environment.get("PYTHONPATH", ""))
    importlib.invalidate_caches()
    if (of_package := sys.modules.get("deepspeed_c.logging")) is not None:
        with contextlib.suppress(ValueError):
            of_package.set_rank(int(environment.get("RANK", "0")))
    # Other programs of this zygote have the same state. Python itself reseeds only its own generator.
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _exit_code(words: list[str]) -> int:
    """Runs the program as ``__main__``."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = sys.modules["builtins"]
    sys.orig_argv = [sys.executable, *words]
    how, rest = words[0], words[1:]
    try:
        if how == "-m":
            sys.argv = ["-m", *rest[1:]]
            sys.path.insert(0, os.getcwd())
            runpy._run_module_as_main(rest[0])
        elif how in ("-c", "-"):
            sys.argv = [how, *(rest[1:] if how == "-c" else rest)]
            sys.path.insert(0, "")
            text, name = (rest[0], "<string>") if how == "-c" else (sys.stdin.read(), "<stdin>")
            if how == "-":
                main.__file__ = name
            exec(compile(text, name, "exec", dont_inherit=True), main.__dict__)  # noqa: S102
        else:
            sys.argv = [how, *rest]
            sys.path.insert(0, os.path.dirname(os.path.realpath(how)))
            main.__file__ = os.path.join(os.getcwd(), how)
            with io.open_code(main.__file__) as file:
                code = compile(file.read(), main.__file__, "exec", dont_inherit=True)
            exec(code, main.__dict__)  # noqa: S102
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001  the program's own, which Python prints too
        frames = error.__traceback__.tb_next if error.__traceback__ else None  # without the frame of this function
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        return 1
    return 0
