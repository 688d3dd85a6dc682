"""Starts the ranks of a plan, waits until they end, and reports which rank failed and why.

torchelastic (``torch.distributed.elastic``) starts the processes and their groups, and ends them after a failure or a
signal, as ``torch.distributed.run`` does. The ranks meet at its store at MASTER_PORT. The launcher opens this store, so
no other program can take the port between its choice and its use. With several hosts, ``Meeting`` says when to start
the ranks, and what happened on the other hosts.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from torch.distributed import DistNetworkError, TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler

from deepspeed_c.env import RUN_TOKEN, STEP_FILE, read_env
from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.job import SIGNALS, new_token
from deepspeed_c.launcher.meeting import Failure, Meeting
from deepspeed_c.launcher.output import Output
from deepspeed_c.launcher.plan import Plan
from deepspeed_c.listening import is_loopback, listening_socket
from deepspeed_c.logging import write_line
from deepspeed_c.step_file import StepFile

__all__ = ["explain", "launch", "open_store", "set_up_logging"]

POLL_SECONDS = 0.02
GUARD = str(Path(__file__).parents[1] / "guard.py")
EXIT_LOST = 1  # the launching command is lost, so its exit code is not known
FAILURE_GRACE_SECONDS = 5  # short, because the other ranks most likely wait for the failed rank

logger = logging.getLogger("deepspeed_c.launcher")


def launch(plan: Plan, meeting: Meeting | None = None) -> int:
    """Run the plan to its end and return the exit code (see ``main.main``).

    meeting: with the agents of the other hosts; the exit code then counts only where their chair says none. None for a
    launch on this host alone. On return all ranks of this host have ended and are reaped. After a failure or a signal,
    the processes that ranks had started have ended too. Raises ``LaunchError`` if the ranks could not be started; then
    no rank is left running.
    """
    set_up_logging(plan.log_level)
    store = open_store(plan.master_addr, plan.master_port) if plan.opens_store else None
    master = (plan.master_addr, store.port) if store is not None else None
    if meeting is not None:
        master = meeting.begin(master)
        if master is None:
            meeting.end(has_all_zeros=False, was_stopped=True)
            return 0
    with (
        _pid_file(plan.save_pid),
        Output(
            range(plan.first_rank, plan.first_rank + len(plan.ranks)),
            host=plan.host,
            log_dir=plan.log_dir,
            has_labels=plan.tag_output,
            is_merged=plan.gathers_logs,
        ) as output,
        tempfile.TemporaryDirectory(prefix="deepspeed_c_") as folder,
    ):
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        ranks = _RankProcesses(plan, master, output, folder, meeting)
        try:
            code = _supervise(ranks, plan, output, meeting)
        finally:
            ranks.abandon()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            ranks.close_step_files()
        for path in output.log_paths:
            logger.info("log: %s", path)
        return code


def _supervise(ranks: _RankProcesses, plan: Plan, output: Output, meeting: Meeting | None) -> int:
    try:
        ranks.start()
        for rank, pid in ranks.pids().items():
            logger.info("rank %d is process %d: %s", plan.first_rank + rank, pid, shlex.join(plan.ranks[rank].command))
        while (result := ranks.wait(timeout=0)) is None:
            if meeting is not None:
                ranks.note_progress(meeting)
                if _ends_by_order(ranks, plan, output, meeting):
                    return _end(ranks, meeting, was_stopped=True)
            time.sleep(POLL_SECONDS)
        _ignore_signals()  # all ranks have ended: there is no process to pass a signal to
    except SignalException as stop:
        write_line(f"deepspeed_c: {stop.sigval.name}: passed on to the ranks, which have {plan.grace:g} s", sys.stderr)
        ranks.stop(stop.sigval, plan.grace)
        output.finish()
        if meeting is not None:
            if not ranks.have_all_zeros():  # not by an order, so nobody else knows (scancel, or kill on one host)
                how = f"host {meeting.name}: its agent was ended by {stop.sigval.name}"
                meeting.fail(Failure(meeting.name, 128 + stop.sigval, how))
            return _end(ranks, meeting, 128 + stop.sigval, is_leaving=True)
        if ranks.have_all_zeros():
            write_line("deepspeed_c: all ranks ended by themselves, with exit code 0", sys.stderr)
            return 0
        return 128 + stop.sigval
    if not result.failures:
        return 0 if meeting is None else _end(ranks, meeting)
    ranks.kill_groups()
    output.finish()
    # The first failure in order of detection; the other ranks failed or were stopped later. Time stamps are whole
    # seconds, too coarse for an order
    failure = ranks.failure(next(iter(result.failures)))
    if meeting is None:
        explain(failure, len(plan.ranks))
        return failure.code
    meeting.fail(failure)
    return _end(ranks, meeting, failure.code)


def _ends_by_order(ranks: _RankProcesses, plan: Plan, output: Output, meeting: Meeting) -> bool:
    """Whether the launching command ended the ranks of this host: by a signal, after a failure elsewhere, or because
    it is lost.
    """
    orders, problem, must_stop = meeting.orders, meeting.lost(), meeting.must_stop()
    if problem:
        end = (
            "; no round follows, because the launching host holds the store of the launch" if meeting.is_elastic else ""
        )
        write_line(f"deepspeed_c: host {meeting.name}: {problem}; its ranks are stopped{end}", sys.stderr)
    if not (problem or must_stop or orders.signal):
        return False
    number = orders.signal if orders.signal and not must_stop else signal.SIGTERM
    are_well = not problem and (orders.signal or orders.is_gentle)
    grace = plan.grace if are_well else FAILURE_GRACE_SECONDS
    ranks.stop(signal.Signals(number), grace, is_hurried=lambda: meeting.orders.kill)
    output.finish()
    return True


def _end(
    ranks: _RankProcesses,
    meeting: Meeting,
    code: int = EXIT_LOST,
    *,
    was_stopped: bool = False,
    is_leaving: bool = False,
) -> int:
    """Report that the ranks of this host have ended. Returns ``code``: it counts where the chair says none."""
    if not meeting.is_elastic:  # otherwise a host may leave while it waits for the next round
        _ignore_signals()
    ranks.note_progress(meeting)
    meeting.end(has_all_zeros=ranks.have_all_zeros(), was_stopped=was_stopped, is_leaving=is_leaving)
    return code


def explain(failure: Failure, n_ranks: int) -> None:
    """Print how the launch failed, with the last lines of the rank. n_ranks: how many had been started."""
    others = "" if n_ranks < 2 else "; the other rank was stopped" if n_ranks == 2 else "; the other ranks were stopped"
    lines = [f"deepspeed_c: {failure.how}{others}"]
    if failure.log:
        lines.append(f"Its log is {failure.log}")
    if failure.tail:
        lines += [f"Last lines of {'its log' if failure.log else 'its stderr'}:"]
        lines += [f"  {line}" for line in failure.tail.splitlines()]
    write_line("\n".join(lines), sys.stderr)


class _RankProcesses(SubprocessContext):
    """torchelastic's group of processes, with a start and an end that leave no process behind."""

    def __init__(
        self, plan: Plan, master: tuple[str, int], output: Output, folder: str, meeting: Meeting | None
    ) -> None:
        self._plan, self._output, self._meeting = plan, output, meeting
        self._guard: subprocess.Popen[str] | None = None
        # nohup, and a shell that starts a command with &, ignore signals: these stay ignored, here and in the ranks
        self._ignored = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
        shared = {
            "MASTER_ADDR": master[0],
            "MASTER_PORT": str(master[1]),
            # With this variable, torch's env:// rendezvous joins the launcher's store instead of opening another at the
            # port
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(plan.n_restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(plan.max_restarts),
            "TORCHELASTIC_RUN_ID": str(uuid.uuid4()),
            # Passed in the environment, which only this user can read. Every user can read a command line.
            RUN_TOKEN: plan.token or new_token(),
            **_network_environment(master[0]),
            **_terminal_size(),
        }
        self._step_files: list[StepFile] = []
        if meeting is not None and meeting.is_elastic:
            paths = [os.path.join(folder, f"step{i}") for i in range(len(plan.ranks))]
            self._step_files = [StepFile.create(path) for path in paths]
            steps = [{STEP_FILE: path} for path in paths]
        else:
            steps = [{}] * len(plan.ranks)
        super().__init__(
            name="rank",
            entrypoint=plan.ranks[0].command[0],
            args={i: rank.command[1:] for i, rank in enumerate(plan.ranks)},
            envs={i: {**shared, **steps[i], **rank.environment} for i, rank in enumerate(plan.ranks)},
            logs_specs=_LogsSpecs(output, folder),
        )

    def _start(self) -> None:
        for number in self._ignored:  # torchelastic has just installed its handlers
            signal.signal(number, signal.SIG_IGN)
        try:
            with _deferred_signals():
                # Before the ranks, so that none of them inherits its pipe: the pipe ends with this process.
                self._guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", GUARD], stdin=subprocess.PIPE, text=True, start_new_session=True
                )
                # Each handler is put into the list at once, so that the started processes are known if a later process
                # cannot be started. torchelastic's own _start does not do this. (/proc cannot replace the list: the
                # environment of a process that has just started its program is empty there for a moment.)
                for rank in range(self.nprocs):
                    self.subprocess_handlers[rank] = get_subprocess_handler(
                        entrypoint=self.entrypoint,
                        args=self.args[rank],
                        env=self.envs[rank],
                        stdout=self.stdouts[rank],
                        stderr=self.stderrs[rank],
                        local_rank_id=rank,
                    )
                    self._tell_guard(str(self.subprocess_handlers[rank].proc.pid))
        except (OSError, ValueError) as error:
            self.abandon()
            raise LaunchError(f"a rank cannot be started: {error}", where=self.entrypoint) from error

    def close(self, death_sig: signal.Signals | None = None, timeout: int = FAILURE_GRACE_SECONDS) -> None:
        """Close as torchelastic does. torchelastic calls this after a rank has failed; the default timeout is for this
        case."""
        if self._meeting is not None:
            failed = [rank for rank, code in enumerate(self.exit_codes()) if code]
            if failed and death_sig is None:
                self._meeting.fail(self.failure(failed[0], has_tail=False))  # before the other ranks have ended
        super().close(death_sig, timeout)

    def stop(self, death_sig: signal.Signals, grace: float, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Pass the signal on to the ranks. Kill them after ``grace`` seconds, or at once on a second signal or when
        ``is_hurried()``. No process is left."""
        end = time.monotonic() + grace
        try:
            self._pass_on(death_sig)
            while None in self.exit_codes() and time.monotonic() < end and not is_hurried():
                time.sleep(POLL_SECONDS)
        except SignalException as again:
            write_line(f"deepspeed_c: {again.sigval.name} once more: killing the ranks", sys.stderr)
        _ignore_signals()
        self.close(signal.SIGKILL)
        self.kill_groups()

    def _pass_on(self, number: signal.Signals) -> None:
        for handler in self.subprocess_handlers.values():
            if handler.proc.poll() is None:
                handler.close(death_sig=number)

    def exit_codes(self) -> list[int | None]:
        """The exit code of each rank, in the form of ``Popen.returncode``."""
        return [handler.proc.poll() for handler in self.subprocess_handlers.values()]

    def note_progress(self, meeting: Meeting) -> None:
        """Tell the chair what the first rank of this host has written to its step file."""
        if self._step_files:
            meeting.note(self._step_files[0].n_saves, self._step_files[0].min_seconds)

    def close_step_files(self) -> None:
        for file in self._step_files:
            file.close()

    def have_all_zeros(self) -> bool:
        """Whether all ranks have ended with exit code 0."""
        return all(code == 0 for code in self.exit_codes())

    def failure(self, i: int, *, has_tail: bool = True) -> Failure:
        """How the ``i``-th rank of this host failed."""
        process = self.subprocess_handlers[i].proc
        code = process.returncode
        if code >= 0:
            how = f"failed with exit code {code}"
        else:
            how = f"was ended by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                how += " (the kernel does that when memory runs out)"
        on = f" on {self._plan.host}" if self._plan.host else ""
        return Failure(
            self._plan.host,
            code if code >= 0 else 128 - code,
            f"rank {self._plan.first_rank + i} (process {process.pid}{on}) {how}",
            tail=self._output.tail(i) if has_tail else "",
            log=self._output.log_paths[i] if self._output.log_paths else "",
            step=self._step_files[i].step if self._step_files else 0,
        )

    def kill_groups(self) -> None:
        """Kill the processes that ended ranks have left behind (each rank is the leader of a process group)."""
        for pid in self.pids().values():
            _kill_group(pid)

    def abandon(self) -> None:
        """Kill all ranks after an error of the launcher itself. Otherwise only end the guard."""
        for handler in self.subprocess_handlers.values():
            if handler.proc.poll() is None:
                _kill_group(handler.proc.pid)
                handler.proc.wait()
        if self._guard is not None:
            self._tell_guard("end")
            self._guard.communicate()
            self._guard = None

    def _tell_guard(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it was killed: the ranks do not need it
            self._guard.stdin.write(line + "\n")
            self._guard.stdin.flush()


class _LogsSpecs(DefaultLogsSpecs):
    """torchelastic's folders (for the error file of ``@record``), with the streams going to ``Output``."""

    def __init__(self, output: Output, folder: str) -> None:
        super().__init__(log_dir=folder)
        self._output = output

    def reify(self, envs):  # torch's signature
        destination = super().reify(envs)
        for rank in envs:
            destination.stdouts[rank], destination.stderrs[rank] = self._output.paths(rank)
        return destination


@contextlib.contextmanager
def _deferred_signals() -> Iterator[None]:
    """Delay signals until the end of the context. A signal between the starts of two ranks would leave the first rank
    behind."""
    pending: list[int] = []
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda n, _: pending.append(n))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if pending:
        signal.raise_signal(pending[0])


def _ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def open_store(address: str, port: int | None) -> TCPStore:
    """A store that listens at this address alone, at any free port without one.

    By default torch listens at every address of the host, without authentication.
    """
    try:
        listening = listening_socket(address, port or 0)
        chosen = listening.getsockname()[1]
        return TCPStore(address, chosen, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    except (DistNetworkError, OSError) as error:
        if isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
            raise LaunchError(
                f"is not an address of this host: {error}", where=f"--master_addr {address}", fix="leave it out"
            ) from error
        reason = str(error).splitlines()[0]
        raise LaunchError(
            f"cannot be used: {reason}",
            where=f"port {port or ''} of {address}",
            fix="leave out --master_port, and a free one is chosen",
        ) from error


def _network_environment(master_addr: str) -> dict[str, str]:
    """Ranks that meet at a loopback address have no peers on other hosts. gloo then also listens at the loopback
    address, not at the address of the host's name.
    """
    if is_loopback(master_addr) and not read_env().gloo_interface:
        return {"GLOO_SOCKET_IFNAME": "lo"}
    return {}


def _terminal_size() -> dict[str, str]:
    """Ranks write stderr to a pipe. A progress bar cannot get the terminal's width from a pipe, but reads COLUMNS."""
    if not sys.stderr.isatty():
        return {}
    columns, lines = shutil.get_terminal_size()
    return {"COLUMNS": str(columns), "LINES": str(lines)}


@contextlib.contextmanager
def _pid_file(is_wanted: bool) -> Iterator[None]:
    if not is_wanted:
        yield
        return
    path = os.path.join(tempfile.gettempdir(), f"{os.getpid()}.deepspeed")
    with _new_pid_file(path) as file:
        file.write(str(os.getpid()))
        made = os.fstat(file.fileno())
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(path), made):
                os.remove(path)


def _new_pid_file(path: str) -> TextIO:
    """Create the file with access for this user only. Every user may write to the folder, so it may contain a link or a
    file of another user.

    A plain file of this user is replaced: an earlier process with the same process id left it behind.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(path)
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                os.remove(path)
        return os.fdopen(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w", encoding="ascii"
        )
    except OSError as error:
        raise LaunchError(
            f"cannot be made: {error.strerror}",
            where=f"--save_pid {path}",
            fix="remove what is there (a link or a file that is not yours is not written to), or name another folder in TMPDIR",
        ) from error


def set_up_logging(level: str) -> None:
    logger.setLevel(level.upper())
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("deepspeed_c: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    if level != "debug":
        # Messages such as "Sending process N closing signal" and "failed (exitcode: ...)": this launcher prints one
        # message instead
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
