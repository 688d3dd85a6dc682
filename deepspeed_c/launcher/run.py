"""Starts the ranks of a plan, waits until they end, and reports which rank failed and why.

torchelastic (``torch.distributed.elastic``) starts the processes and their groups, and ends them after a failure or a
signal, as ``torch.distributed.run`` does. The ranks meet at its store at MASTER_PORT. The launcher opens this store, so
no other program can take the port between its choice and its use. No rendezvous of agents is needed, because there is
one host and no restart.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shlex
import shutil
import signal
import socket
import stat
import sys
import tempfile
import uuid
from collections.abc import Iterator
from typing import TextIO

from torch.distributed import DistNetworkError, TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler

from deepspeed_c.env import RUN_TOKEN
from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.output import Output
from deepspeed_c.launcher.plan import Plan
from deepspeed_c.listening import is_loopback, listening_socket
from deepspeed_c.logging import write_line

__all__ = ["launch"]

POLL_SECONDS = 0.02
FAILURE_GRACE_SECONDS = 5  # short, because the other ranks most likely wait for the failed rank
TOKEN_BYTES = 32
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # torchelastic's default

logger = logging.getLogger("deepspeed_c.launcher")


def launch(plan: Plan) -> int:
    """Run the plan to its end and return the exit code (see ``main.main``).

    On return all ranks have ended and are reaped. After a failure or a signal, the processes that ranks had started
    have ended too. Raises ``LaunchError`` if the ranks could not be started; then no rank is left running.
    """
    _set_up_logging(plan.log_level)
    store = _open_store(plan)
    with (
        _pid_file(plan.save_pid),
        Output(len(plan.ranks), log_dir=plan.log_dir, has_labels=plan.tag_output) as output,
        tempfile.TemporaryDirectory(prefix="deepspeed_c_") as folder,
    ):
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        ranks = _RankProcesses(plan, store.port, output, folder)
        try:
            code = _supervise(ranks, plan, output)
        finally:
            ranks.abandon()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        for path in output.log_paths:
            logger.info("log: %s", path)
        return code


def _supervise(ranks: _RankProcesses, plan: Plan, output: Output) -> int:
    try:
        ranks.start()
        for rank, pid in ranks.pids().items():
            logger.info("rank %d is process %d: %s", rank, pid, shlex.join(plan.ranks[rank].command))
        result = ranks.wait(period=POLL_SECONDS)
        _ignore_signals()  # all ranks have ended: there is no process to pass a signal to
    except SignalException as stop:
        write_line(f"deepspeed_c: {stop.sigval.name}: passed on to the ranks, which have {plan.grace:g} s", sys.stderr)
        ranks.stop(stop.sigval, plan.grace)
        output.finish()
        if all(code == 0 for code in ranks.exit_codes()):
            write_line("deepspeed_c: all ranks ended by themselves, with exit code 0", sys.stderr)
            return 0
        return 128 + stop.sigval
    if not result.failures:
        return 0
    # The first failure in order of detection; the other ranks failed or were stopped later. Time stamps are whole
    # seconds, too coarse for an order
    rank, failure = next(iter(result.failures.items()))
    ranks.kill_groups()
    output.finish()
    _explain(rank, failure.pid, failure.exitcode, len(plan.ranks), output)
    return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode


def _explain(rank: int, pid: int, exitcode: int, n_ranks: int, output: Output) -> None:
    if exitcode >= 0:
        how = f"failed with exit code {exitcode}"
    else:
        how = f"was ended by {signal.Signals(-exitcode).name}"
        if exitcode == -signal.SIGKILL:
            how += " (the kernel does that when memory runs out)"
    others = (
        "" if n_ranks == 1 else "; the other rank was stopped" if n_ranks == 2 else "; the other ranks were stopped"
    )
    lines = [f"deepspeed_c: rank {rank} (process {pid}) {how}{others}"]
    if output.log_paths:
        lines.append(f"Its log is {output.log_paths[rank]}")
    if tail := output.tail(rank):
        lines += [
            f"Last lines of {'its log' if output.log_paths else 'its stderr'}:",
            *(f"  {t}" for t in tail.splitlines()),
        ]
    write_line("\n".join(lines), sys.stderr)


class _RankProcesses(SubprocessContext):
    """torchelastic's group of processes, with a start and an end that leave no process behind."""

    def __init__(self, plan: Plan, port: int, output: Output, folder: str) -> None:
        # nohup, and a shell that starts a command with &, ignore signals: these stay ignored, here and in the ranks
        self._ignored = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
        shared = {
            "MASTER_ADDR": plan.master_addr,
            "MASTER_PORT": str(port),
            # With this variable, torch's env:// rendezvous joins the launcher's store instead of opening another at the
            # port
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": str(uuid.uuid4()),
            # Passed in the environment, which only this user can read. Every user can read a command line.
            RUN_TOKEN: secrets.token_hex(TOKEN_BYTES),
            **_network_environment(plan.master_addr),
            **_terminal_size(),
        }
        super().__init__(
            name="rank",
            entrypoint=plan.ranks[0].command[0],
            args={i: rank.command[1:] for i, rank in enumerate(plan.ranks)},
            envs={i: {**shared, **rank.environment} for i, rank in enumerate(plan.ranks)},
            logs_specs=_LogsSpecs(output, folder),
        )

    def _start(self) -> None:
        for number in self._ignored:  # torchelastic has just installed its handlers
            signal.signal(number, signal.SIG_IGN)
        try:
            with _deferred_signals():
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
        except (OSError, ValueError) as error:
            self.abandon()
            raise LaunchError(f"a rank cannot be started: {error}", where=self.entrypoint) from error

    def close(self, death_sig: signal.Signals | None = None, timeout: int = FAILURE_GRACE_SECONDS) -> None:
        """Close as torchelastic does. torchelastic calls this after a rank has failed; the default timeout is for this
        case."""
        super().close(death_sig, timeout)

    def stop(self, death_sig: signal.Signals, grace: float) -> None:
        """Pass the signal on to the ranks. Kill them after ``grace`` seconds, or at once on a second signal. No process
        is left."""
        try:
            self.close(death_sig, grace)
        except SignalException as again:
            write_line(f"deepspeed_c: {again.sigval.name} once more: killing the ranks", sys.stderr)
        _ignore_signals()
        self.close(signal.SIGKILL)
        self.kill_groups()

    def exit_codes(self) -> list[int | None]:
        """The exit code of each rank, in the form of ``Popen.returncode``."""
        return [handler.proc.poll() for handler in self.subprocess_handlers.values()]

    def kill_groups(self) -> None:
        """Kill the processes that ended ranks have left behind (each rank is the leader of a process group)."""
        for pid in self.pids().values():
            _kill_group(pid)

    def abandon(self) -> None:
        """Kill all ranks after an error of the launcher itself. Otherwise do nothing."""
        for handler in self.subprocess_handlers.values():
            if handler.proc.poll() is None:
                _kill_group(handler.proc.pid)
                handler.proc.wait()


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


def _open_store(plan: Plan) -> TCPStore:
    """Listen at the master address alone.

    By default torch listens at every address of the host, without authentication.
    """
    try:
        listening = listening_socket(plan.master_addr, plan.master_port or 0)
        port = listening.getsockname()[1]
        return TCPStore(
            plan.master_addr, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
    except (DistNetworkError, OSError) as error:
        if isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
            raise LaunchError(
                f"is not an address of this host: {error}",
                where=f"--master_addr {plan.master_addr}",
                fix="leave it out",
            ) from error
        reason = str(error).splitlines()[0]
        raise LaunchError(
            f"cannot be used: {reason}",
            where=f"port {plan.master_port or ''} of {plan.master_addr}",
            fix="leave out --master_port, and a free one is chosen",
        ) from error


def _network_environment(master_addr: str) -> dict[str, str]:
    """Ranks that meet at a loopback address have no peers on other hosts. gloo then also listens at the loopback
    address, not at the address of the host's name.
    """
    if is_loopback(master_addr) and not os.environ.get("GLOO_SOCKET_IFNAME"):
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


def _set_up_logging(level: str) -> None:
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
