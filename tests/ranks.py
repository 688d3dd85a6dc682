"""Runs test bodies on groups of ranks that stay alive between tests, and never lets a rank hang the run.

    from tests.ranks import run_ranks

    def body(rank, world, factor):        # top level of an importable file
        t = torch.ones(3) * rank * factor
        torch.distributed.all_reduce(t)
        return t.tolist()

    def test_sum():
        assert run_ranks(2, body, 10) == [[10.0] * 3] * 2

A test with one body and nothing to compare is the body itself:

    @pytest.mark.parametrize("factor", [1, 10])
    @on_ranks(2)
    def test_product(rank, world, factor):
        ...

[Note: zygote] Importing torch and the engine costs seconds, so one process per test session, the zygote, imports them
once and forks the ranks of every group, and the programs of fresh.py. (The zygote never runs an operator, so it has no threads that a fork would
lose.) A group of ranks then costs milliseconds, and killing one after a failure is cheap. The zygote is the parent of
all ranks: when its connection to the test session closes, for any reason, it kills every process group that it made.
``preload`` names a module with further imports that take seconds. Groups with the same ``preload`` are forked from a
separate zygote. Programs that test an import of the package are forked from one with torch alone.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import importlib.util
import inspect
import itertools
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # in the zygote, which runs this file by its path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tests.hosts import Hosts
from tests.waits import ended, exit_status

__all__ = ["Outcome", "RanksFailed", "on_ranks", "run_ranks", "stop_ranks", "zygote_pids"]

# These limits only end ranks that hang, so they are long: several test sessions may share two cores. Other waits end as
# soon as possible.
START_TIMEOUT_SECONDS = 240.0  # importing torch on a cold, busy machine
BODY_TIMEOUT_SECONDS = 240.0
GRACE_SECONDS = 20.0  # time for the other ranks to finish after a failure
STACK_DUMP_SECONDS = 10.0  # time for a rank to write its stacks before it is killed
STORE_TIMEOUT_SECONDS = 900  # longer than any test, because run_ranks decides when a group ends
LOOK_SECONDS = 0.5  # between checks of silent ranks: a rank stopped by a signal stays silent


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one rank: ``kind`` is "returned", "raised", "died" or "hung"."""

    rank: int
    kind: str
    value: Any = None
    """The body's return value."""
    exception: BaseException | None = None
    """The body's exception, if it can be pickled."""
    text: str = ""
    """The traceback ("raised"), the exit code or signal ("died"), or the stacks of all its threads ("hung")."""


class RanksFailed(AssertionError):
    """At least one rank did not return; ``outcomes`` has an entry for each rank."""

    def __init__(self, name: str, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        failed = [outcome for outcome in outcomes if outcome.kind != "returned"]
        lines = [f"{name}: {len(failed)} of {len(outcomes)} ranks failed"]
        for outcome in failed:
            lines.append(f"--- rank {outcome.rank} {outcome.kind}\n{outcome.text.rstrip()}")
        super().__init__("\n".join(lines))


def run_ranks(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = BODY_TIMEOUT_SECONDS,
    fresh: bool = False,
    grace: float = GRACE_SECONDS,
    preload: str = "",
    hosts: tuple[int, ...] = (),
) -> list[Any]:
    """Calls ``fn(rank, world, *args)`` on every rank of a gloo group and returns the results by rank.

    ``fn`` is a top-level function; ``args`` and results are pickled. Every body starts from seed 0, one thread, the
    default dtype, the environment and working directory that the group was started with, and with ``torch.distributed``
    initialised. ``fresh=True`` gives the call a new group, which ends with the call; it is for bodies that kill ranks
    or change global state. ``timeout`` (seconds) covers the whole call; after it, ranks that are still busy dump their
    stacks and are killed. After one rank has failed, the others get ``grace`` seconds, unless all remaining ranks are
    stopped by a signal. ``preload`` names a module that was imported before the ranks were forked. ``hosts`` gives the
    number of each rank's host, for ranks on several hosts (tests/hosts.py; ``why_no_hosts`` says whether hosts can be
    made). Raises ``RanksFailed`` if a rank fails; the next call then starts a new group.
    """
    if "<" in fn.__qualname__ or "." in fn.__qualname__:
        raise TypeError(f"{fn.__qualname__} is not a top-level function, so a rank cannot import it")
    if fn.__module__ == "__main__":
        raise TypeError(
            f"{fn.__qualname__} is of __main__: ranks import the file of a body by its name, and would run the script anew; put it"
            " into a module, and call run_ranks from a test or under pytest"
        )
    if fresh:
        group = _Group(world, preload, hosts)
        try:
            return group.call(fn, args, timeout, grace)
        finally:
            group.stop()
    group = _groups.get((world, preload, hosts))
    if group is None or not group.is_usable:
        group = _groups[world, preload, hosts] = _Group(world, preload, hosts)
    try:
        return group.call(fn, args, timeout, grace)
    finally:
        if not group.is_usable:
            group.stop()


def on_ranks(world: int | None = None, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a test of a body for ``run_ranks(world, body, **options)``. pytest gives the arguments after ``rank`` and
    ``world``, and also ``world`` where it is None here."""

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        parameters = list(inspect.signature(body).parameters.values())[2:]
        names = [parameter.name for parameter in parameters]

        @functools.wraps(body)
        def test(**given: Any) -> None:
            run_ranks(given["world"] if world is None else world, body, *(given[name] for name in names), **options)

        of_world = [] if world is not None else [inspect.Parameter("world", inspect.Parameter.KEYWORD_ONLY)]
        test.__signature__ = inspect.Signature(parameters + of_world)  # type: ignore[attr-defined]
        test.body_for_ranks = body  # type: ignore[attr-defined]
        return test

    return decorate


def stop_ranks() -> None:
    """Ends every group and every zygote. The next ``run_ranks`` starts anew."""
    for group in _groups.values():
        group.stop()
    _groups.clear()
    while _zygotes:
        _zygotes.popitem()[1].stop()


def zygote_pids() -> list[int]:
    """The processes that fork ranks and programs for this session."""
    return [zygote.pid for zygote in _zygotes.values()]


# ---- in the test session -------------------------------------------------------------------------------------------


class _Zygote:
    """The session's end of the process that forks ranks."""

    def __init__(self, preload: str, has_package: bool) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = dict(os.environ)
        # Ranks share the machine with each other and with other test sessions. A BLAS that starts threads when it is
        # imported would also make the zygote unsafe to fork.
        env.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
        env["GLOO_SOCKET_IFNAME"] = "lo"
        env["PYTHONUNBUFFERED"] = "1"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno()), preload, str(int(has_package))],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=env,
                start_new_session=True,  # so that ^C reaches only the test session, which then stops the ranks
            )
        self._socket = ours
        self._lock = threading.Lock()  # a test may start programs in several threads
        ours.settimeout(START_TIMEOUT_SECONDS)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, fd: int, *streams: int, runs: str = "rank") -> int:
        """Forks a rank, or a program of fresh.py with its three standard streams, that communicates over ``fd``.

        Returns its process id, which is also the id of its process group.
        """
        return self._ask(("fork", runs), [fd, *streams])

    def reap(self, pid: int) -> int:
        """Kill the rest of the rank's process group and return the rank's exit code (-n for signal n)."""
        return self._ask(("reap", pid))

    def _ask(self, request: tuple[Any, ...], fds: list[int] | None = None) -> int:
        try:
            with self._lock:
                socket.send_fds(self._socket, [pickle.dumps(request)], fds or [])
                reply = self._socket.recv(1 << 16)
        except OSError as error:
            raise RuntimeError(f"the process that forks ranks does not answer ({error}); see its stderr") from error
        if not reply:
            raise RuntimeError("the process that forks ranks has ended; its stderr says why")
        return pickle.loads(reply)

    def stop(self) -> None:
        self._socket.close()  # the zygote kills all ranks and exits
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            ended(self._process)


def zygote_of(preload: str, has_package: bool = True) -> _Zygote:
    """The zygote that has imported ``preload``, and deepspeed_c or torch alone. It is started if there is none."""
    key = (preload, has_package)
    with _zygotes_lock:
        if key in _zygotes and not _zygotes[key].is_alive:
            _zygotes.pop(key).stop()
        if key not in _zygotes:
            _zygotes[key] = _Zygote(preload, has_package)
        return _zygotes[key]


class _Group:
    """``world`` ranks with one process group. The group is usable until a rank fails."""

    def __init__(self, world: int, preload: str, hosts: tuple[int, ...]) -> None:
        self._zygote = zygote_of(preload)
        self.world = world
        self.is_usable = True
        self._pid_of_session = os.getpid()
        self._folder = tempfile.mkdtemp(prefix="dsc_ranks_")
        self._connections: list[Connection] = []
        self._pids: list[int] = []
        self._hosts: Hosts | None = None
        self._port = port = free_port()
        try:
            self._hosts = Hosts(max(hosts) + 1) if hosts else None
            for rank in range(world):
                ours, theirs = socket.socketpair()
                with theirs:
                    self._pids.append(self._zygote.fork(theirs.fileno()))
                connection = Connection(ours.detach())
                self._connections.append(connection)
                place = None if self._hosts is None else self._hosts.place(rank, hosts)
                connection.send((rank, world, port, self._folder, os.getcwd(), place))
        except BaseException:
            self.stop()
            raise
        # The first call has this time in addition, because the ranks connect in it.
        self._start_seconds = START_TIMEOUT_SECONDS

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float, grace: float) -> list[Any]:
        file = inspect.getsourcefile(fn)
        where = (fn.__module__, os.path.abspath(file) if file else None, fn.__qualname__)
        request = pickle.dumps((where, list(sys.path), pickle.dumps(args)))
        if self._start_seconds:
            self._await_ready()
        outcomes: list[Outcome | None] = [None] * self.world
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(request)
            except OSError:
                outcomes[rank] = self._died(rank)
        deadline = time.monotonic() + timeout
        limit = f"the timeout of {timeout:g} s"
        while pending := [rank for rank in range(self.world) if outcomes[rank] is None]:
            left = deadline - time.monotonic()
            has_failed = any(outcome is not None and outcome.kind != "returned" for outcome in outcomes)
            # Checked before the wait, so that messages sent between the check and the wait are still received.
            is_stopped = has_failed and all(_is_stopped(self._pids[rank]) for rank in pending)
            ready = wait([self._connections[rank] for rank in pending], min(max(left, 0), LOOK_SECONDS))
            if not ready and left > LOOK_SECONDS and not is_stopped:
                continue
            if not ready:
                limit = "a signal has stopped it" if is_stopped else limit
                for outcome in self._hung(pending, limit):
                    outcomes[outcome.rank] = outcome
                break
            for connection in ready:
                rank = self._connections.index(connection)
                outcomes[rank] = outcome = self._receive(rank)
                if outcome.kind != "returned" and time.monotonic() + grace < deadline:
                    deadline = time.monotonic() + grace
                    limit = f"{grace:g} s after rank {rank} {outcome.kind}"
        if any(outcome.kind != "returned" for outcome in outcomes):
            self.is_usable = False
            raise RanksFailed(f"{where[0]}.{where[2]}", outcomes)
        return [outcome.value for outcome in outcomes]

    def _await_ready(self) -> None:
        deadline = time.monotonic() + self._start_seconds
        self._start_seconds = 0.0
        for rank, connection in enumerate(self._connections):
            problem = None
            if not connection.poll(max(deadline - time.monotonic(), 0)):
                problem = self._hung([rank], "the time to start")[0]
            else:
                outcome = self._receive(rank)
                problem = outcome if outcome.kind != "returned" else None
            if problem:
                self.is_usable = False
                raise RanksFailed("starting the group", [problem])

    def _receive(self, rank: int) -> Outcome:
        try:
            kind, payload, text, is_clean = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            return self._died(rank)
        if not is_clean:
            self.is_usable = False
        if kind == "returned":
            return Outcome(rank, kind, value=pickle.loads(payload))
        return Outcome(rank, kind, exception=pickle.loads(payload) if payload else None, text=text)

    def _died(self, rank: int) -> Outcome:
        code = self._zygote.reap(self._pids[rank])
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        stacks = self._stacks(rank)  # faulthandler writes to this file on SIGSEGV and similar signals
        return Outcome(rank, "died", text=f"{how}\n{stacks}")

    def _hung(self, ranks: list[int], limit: str) -> list[Outcome]:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)
        end = time.monotonic() + STACK_DUMP_SECONDS
        stacks, before = {rank: self._stacks(rank) for rank in ranks}, None
        # Waits until each rank has finished writing. Ranks stopped by a signal write nothing.
        while time.monotonic() < end and (
            stacks != before or not all(stacks[rank].rstrip() or _is_stopped(self._pids[rank]) for rank in ranks)
        ):
            time.sleep(0.1)
            stacks, before = {rank: self._stacks(rank) for rank in ranks}, stacks
        return [Outcome(rank, "hung", text=f"still busy after {limit}\n{stacks[rank]}") for rank in ranks]

    def _stacks(self, rank: int) -> str:
        try:
            return Path(self._folder, f"stacks_{rank}").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def stop(self) -> None:
        """Kills the ranks, reaps them and removes the group's folder. May be called twice."""
        if (claim := _claims.pop(self._port, None)) is not None:
            claim.close()
        self.is_usable = False
        if self._pid_of_session != os.getpid():
            return  # a child that the test session forked does not own the ranks
        for connection in self._connections:
            connection.close()
        if self._zygote.is_alive:
            for pid in self._pids:
                self._zygote.reap(pid)
        self._connections, self._pids = [], []
        if self._hosts is not None:
            self._hosts.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process. Without /proc this is unknown, and the process counts as busy."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


_groups: dict[tuple[int, str, tuple[int, ...]], _Group] = {}  # by number of ranks, preloaded module and hosts
_zygotes: dict[tuple[str, bool], _Zygote] = {}  # by preloaded module, and whether the package is imported
_zygotes_lock = threading.Lock()
atexit.register(stop_ranks)


# These lie below the ports that Linux assigns to connecting sockets, which may be taken between the check and the use.
FIRST_PORT, LAST_PORT = 10000, 29000
_ports = itertools.count(random.SystemRandom().randrange(LAST_PORT - FIRST_PORT))
_claims: dict[int, socket.socket] = {}  # by port


def free_port() -> int:
    """A port that is unused, and that no other test session on this host gets before this process ends.

    Bodies that initialise from the environment need a port, and so do programs. (A group of ranks connects through a
    file and needs no port.) A rank binds the port some time after this choice. Until then an abstract socket named
    after the port tells other sessions and other workers of this session that the port is taken.
    """
    while True:
        port = FIRST_PORT + next(_ports) % (LAST_PORT - FIRST_PORT)
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with socket.socket() as probe, contextlib.suppress(OSError):
            claim.bind(f"\0deepspeed_c test port {port}")
            probe.bind(("", port))
            _claims[port] = claim
            return port
        claim.close()


# ---- in the zygote -------------------------------------------------------------------------------------------------

_preloaded_path: list[str] = []  # sys.path entries that the preloaded module added; ranks keep them
_python_path: list[
    str
] = []  # sys.path of an interpreter without a script and without PYTHONPATH; programs begin with it


def restore_path(variable: str) -> None:
    """Gives ``sys.path`` the entries of ``variable``, a PYTHONPATH, and the entries of every interpreter."""
    sys.path[:] = [*_entries(variable), *_python_path]


def _entries(variable: str) -> list[str]:
    return list(dict.fromkeys(map(os.path.abspath, variable.split(os.pathsep)))) if variable else []


def _zygote_main(control: socket.socket, preload: str, has_package: bool) -> None:
    named = _entries(os.environ.get("PYTHONPATH", ""))
    _python_path.extend(entry for entry in sys.path[1:] if entry not in named)
    # Imports that every rank needs: a process's first optimizer imports torch._dynamo, which takes 2 s. Imports of a
    # body's file and of an engine take 0.4 s for every rank of a fresh group, and twice that without cached bytecode.
    of_package = ("torch._dynamo", "torch.distributed", "pytest", "deepspeed_c.initialize")
    for module in (*(of_package if has_package else ("torch",)), "tests.fresh"):
        importlib.import_module(module)
    if preload:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        before = list(sys.path)
        importlib.import_module(preload)
        _preloaded_path.extend(entry for entry in sys.path if entry not in before)

    # Objects present now live as long as the ranks: freezing them saves 0.1 s in each garbage collection before a body,
    # and their pages stay shared.
    gc.collect()
    gc.freeze()
    codes: dict[int, int] = {}
    alive: set[int] = set()
    try:
        while True:
            message, fds, _, _ = socket.recv_fds(control, 1 << 16, 4)
            if not message:
                return
            request = pickle.loads(message)
            if request[0] == "fork":
                pid = os.fork()
                if pid == 0:
                    control.close()
                    main = _rank_main if request[1] == "rank" else sys.modules["tests.fresh"].program_main
                    main(Connection(fds[0]), *fds[1:])  # never returns
                for fd in fds:
                    os.close(fd)
                with contextlib.suppress(PermissionError, ProcessLookupError):
                    os.setpgid(pid, pid)  # here and in the child, because either may run first
                alive.add(pid)
                codes.pop(pid, None)  # an earlier process may have had this id: ids repeat after 32,768 processes
                control.send(pickle.dumps(pid))
            else:
                pid = request[1]
                if pid not in codes:
                    codes[pid] = _end(pid)
                    alive.discard(pid)
                control.send(pickle.dumps(codes[pid]))
    finally:
        for pid in alive:
            _end(pid)


def _end(pid: int) -> int:
    """Kills the process group of a rank and returns how the rank ended.

    If the rank had already ended, this is its own exit code.
    """
    # A rank that is exiting closes its socket before it becomes a zombie. The wait lets it report its own exit code.
    for _ in range(20):
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is not None:
            break
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return exit_status(pid)


# ---- in a rank -----------------------------------------------------------------------------------------------------


def _rank_main(connection: Connection) -> None:
    code = 1
    try:
        with contextlib.suppress(PermissionError):
            os.setpgid(0, 0)
        _serve(connection)
        code = 0
    except BaseException:  # noqa: BLE001  the process ends here: the last chance to say why
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # The rank must not return into the zygote's frames nor run the zygote's exit handlers.
        os._exit(code)


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    rank, world, port, folder, cwd, place = connection.recv()
    stacks = open(os.path.join(folder, f"stacks_{rank}"), "w")  # noqa: SIM115  faulthandler needs it for good
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    os.chdir(cwd)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if place is not None:
        place.enter()
    # The package was imported in the zygote, which has no rank.
    importlib.import_module("deepspeed_c.logging").set_rank(rank)
    environment = dict(os.environ)
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_timedelta(STORE_TIMEOUT_SECONDS))
    dist.barrier()
    world_group = dist.group.WORLD
    connection.send_bytes(pickle.dumps(("returned", pickle.dumps(None), "", True)))
    while True:
        try:
            where, path, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        _clean(torch, cwd, environment)
        payload: bytes | None
        try:
            fn = _import(where, path)
            value = fn(rank, world, *pickle.loads(args))
            kind, payload, text = "returned", pickle.dumps(value), ""
            del value
        except BaseException as error:  # noqa: BLE001  whatever a body raises is reported, SystemExit too
            kind, payload, text = "raised", _pickled(error), traceback.format_exc()
        # State that a body leaves in torch.distributed (a group not destroyed, the world destroyed) would affect the
        # next body. A group of ranks with such state is not used again.
        is_clean = dist.is_initialized() and dist.group.WORLD is world_group and len(_known_groups(dist)) == 1
        connection.send_bytes(pickle.dumps((kind, payload, text, is_clean)))


def _known_groups(dist: Any) -> Any:
    return dist.distributed_c10d._world.pg_map


def _clean(torch: Any, cwd: str, environment: dict[str, str]) -> None:
    os.chdir(cwd)
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if (groups := sys.modules.get("deepspeed_c.utils.groups")) is not None:
        groups.set_mesh(None)  # the mesh of the newest engine stays when that engine has ended
    # Objects that earlier bodies left for good (imported modules) are scanned once here instead of before each later
    # body.
    gc.collect()
    gc.freeze()
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    torch.manual_seed(0)


def _import(where: tuple[str, str | None, str], path: list[str]) -> Callable[..., Any]:
    """The function by module and name.

    A test file that sys.path does not reach is loaded from its file under the module's name.
    """
    name, file, qualname = where
    sys.path[:] = [*_preloaded_path, *path]
    module = sys.modules.get(name)
    if module is None or (file and os.path.abspath(getattr(module, "__file__", None) or "") != file):
        sys.modules.pop(name, None)
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            spec = None
        if file is None or (spec is not None and spec.origin and os.path.abspath(spec.origin) == file):
            module = importlib.import_module(name)
        else:
            spec = importlib.util.spec_from_file_location(name, file)
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    fn = getattr(module, qualname)
    return getattr(fn, "body_for_ranks", fn)


def _pickled(error: BaseException) -> bytes | None:
    """The pickled exception, or None if it cannot be unpickled (many exceptions with their own constructor cannot)."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except (pickle.PickleError, TypeError, AttributeError, ValueError):
        return None
    return data


def _timedelta(seconds: float) -> Any:
    from datetime import timedelta

    return timedelta(seconds=seconds)


if __name__ == "__main__":
    # Called in the module under its importable name, so that each side can unpickle objects of the other.
    importlib.import_module("tests.ranks")._zygote_main(
        socket.socket(fileno=int(sys.argv[1])), sys.argv[2], sys.argv[3] == "1"
    )
