"""A launch on several hosts: starts the host agents by a runner, and passes on what they print and the signals of the
launching command. ``presiding.py`` waits for the agents and says how the launch ended.

The launching command need not run on one of the hosts. Everything that a rank prints reaches it through the runner's
program.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict, deque
from collections.abc import Mapping
from types import FrameType
from typing import IO, BinaryIO, final

from deepspeed_c.background import BackgroundThread
from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.addresses import own_address
from deepspeed_c.launcher.exports import exports
from deepspeed_c.launcher.hostfile import is_this_host
from deepspeed_c.launcher.job import SIGNALS, Job, name_of, new_token
from deepspeed_c.launcher.options import Options, check_rounds
from deepspeed_c.launcher.output import log_name, log_stamp
from deepspeed_c.launcher.runners.runner import HostRunner, Start, python_path
from deepspeed_c.listening import listening_socket
from deepspeed_c.logging import write_line

__all__ = ["END_SECONDS", "RunnerProcess", "Signals", "launch_on_hosts"]

END_SECONDS = 10  # for the runner's program, after all agents have ended
_MOMENT_SECONDS = 0.1
SAID_LINES = 20
PDSH_END = re.compile(rb"pdsh@[^:]*: ([^:]*): .* exited with exit code (\d+)")
LABEL = re.compile(rb"\[([^\[\]\s:]+):rank(\d+)\]: ")


def launch_on_hosts(options: Options, hosts: Mapping[str, list[int]], runner: HostRunner) -> int:
    """Start the ranks of all hosts by the runner, and wait for their end. Returns the exit code.

    Raises LaunchError if the runner is not installed, or cannot do what is asked.
    """
    runner.check()
    check_rounds(options, len(hosts))
    address = own_address(name_of(next((host for host in hosts if not is_this_host(host)), "")))
    listening = listening_socket(address, 0)
    job = Job(
        options=options,
        hosts=dict(hosts),
        environment={**exports(), "PYTHONPATH": python_path()},
        folder=os.getcwd(),
        token=new_token(),
        store=(address, listening.getsockname()[1]),
    )
    with Signals() as signals, RunnerProcess(runner, job) as process:
        # Now, while the agents start: this import takes as long as all that they do.
        from deepspeed_c.launcher.presiding import preside

        return preside(job, listening.detach(), process, signals)


@final
class Signals:
    """Signals of this process, kept until they are taken. Restores the handlers at its end."""

    def __init__(self) -> None:
        self._pending: list[int] = []
        self.n_taken = 0
        self._handlers = {number: signal.getsignal(number) for number in SIGNALS}

    def __enter__(self) -> Signals:
        for number, handler in self._handlers.items():
            if handler is not signal.SIG_IGN:  # under nohup SIGHUP stays ignored
                signal.signal(number, self._keep)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _keep(self, number: int, _: FrameType | None) -> None:
        self._pending.append(number)  # nothing else: a second signal may come within this call

    def take(self) -> list[int]:
        """The signals since the last call."""
        taken, self._pending = self._pending, []
        self.n_taken += len(taken)
        for number in taken:
            name = signal.Signals(number).name
            how = "passed on to the ranks of all hosts; a second signal kills them"
            write_line(f"deepspeed_c: {name}: {how}", sys.stderr)
        return taken


def _popen(start: Start) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            start.command,
            env={**os.environ, **start.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Of its own: signals of the terminal reach the launching command alone, which passes them on.
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"cannot be started: {error}", where=start.command[0]) from error


@final
class RunnerProcess:
    """The runner's program, with threads that pass its output on."""

    def __init__(self, runner: HostRunner, job: Job) -> None:
        self.name, self._runner, self._job = runner.name, runner, job
        # Label -> host; pdsh's labels lack the user of USER@HOST.
        self._hosts = {name_of(host): host for host in job.hosts} if runner.labels_hosts() else {}
        self._strips_labels = job.options.tag_output or job.options.gather_logs
        self._logs = _Logs(job) if job.options.gather_logs else None
        self._said: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=SAID_LINES))
        self._ends: list[tuple[str, int]] = []
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self._silent: set[str] = set()
        self._folder = tempfile.TemporaryDirectory(prefix="deepspeed_c_")  # only this user may enter it
        self._job_file = os.path.join(self._folder.name, "job")
        with open(self._job_file, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(job.to_json() + "\n")
        if job.options.elastic_training:
            runner.start_again(job, self._job_file, next(iter(job.hosts)))  # whether the runner can
        self._process = _popen(runner.start(job, self._job_file))
        self._again: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> RunnerProcess:
        self._carry_streams(self._process, "")
        return self

    def _carry_streams(self, process: subprocess.Popen[bytes], host: str) -> None:
        """Pass the output of a program on. host: its only host; "" for all."""
        for stream, target in ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)):
            # A pipe that a left-behind process holds open is not waited for: its reader is in no C++ code.
            carry = (self._carry, stream, target, host)
            thread = BackgroundThread(*carry, name="dsc_runner", end=self._over.set, limit_s=_MOMENT_SECONDS)
            thread.start()
            self._threads.append(thread)

    def start_again(self, host: str) -> None:
        """Start the agent of a host anew, beside the others."""
        self._silent.add(host)
        self._again[host] = _popen(self._runner.start_again(self._job, self._job_file, host))
        self._carry_streams(self._again[host], host)

    def is_starting_again(self, host: str) -> bool:
        """Whether an agent that ``start_again`` has started on the host may still run."""
        return host in self._again and self._again[host].poll() is None

    def show(self, host: str) -> None:
        """Show lines about a host again: its agent has come. Until then, each try would print that the host
        cannot be reached."""
        self._silent.discard(host)

    def __exit__(self, *_: object) -> None:
        self.kill()
        for thread in self._threads:
            thread.join(END_SECONDS)  # the pipes may be open in a process that the runner has left behind
        if self._logs is not None:
            self._logs.close()
        self._folder.cleanup()

    def said(self, host: str) -> str:
        """The last lines about ``host``; about all, if the runner does not say which host a line is from."""
        lines = self._said[host] if self._hosts and host else (t for said in self._said.values() for t in said)
        return "\n".join(lines)

    def take_ends(self) -> list[tuple[str, int]]:
        """(host, exit code) of the agents that have ended since the last call with another code than 0, as far as the
        runner says so."""
        taken, self._ends = self._ends, []
        return taken

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def exit_code(self) -> int:
        """As ``Popen.returncode``."""
        return self._process.wait()

    def wait(self, seconds: float) -> None:
        """Wait for its end, for at most so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def kill(self) -> None:
        """End the program and what it has started here."""
        for process in (self._process, *self._again.values()):
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _carry(self, stream: IO[bytes], target: BinaryIO, only: str) -> None:
        for line in stream:
            if self._over.is_set():  # the end of the interpreter needs the locks of the standard streams
                return
            host, rest = self._split(line)
            if self._logs is not None and (match := LABEL.match(rest)):
                self._logs.write(int(match[2]), rest[match.end() :])
                continue
            if target is sys.stderr.buffer:
                if end := PDSH_END.match(line):  # the launching command's message tells more
                    self._ends.append((self._hosts.get(end[1].decode(), ""), int(end[2])))
                    continue
                self._said[host].append(rest.decode(errors="replace").rstrip())
                if only in self._silent:
                    continue
            with contextlib.suppress(OSError):  # the terminal was closed: go on reading, or the ranks would block
                target.write(rest if self._strips_labels else line)
                target.flush()

    def _split(self, line: bytes) -> tuple[str, bytes]:
        """(host, rest) of a line that the runner's program has labelled."""
        label, colon, rest = line.partition(b": ")
        host = self._hosts.get(label.decode(errors="replace"), "") if colon else ""
        return (host, rest) if host else ("", line)


@final
class _Logs:
    """The log files of all ranks, on the launching host."""

    def __init__(self, job: Job) -> None:
        folder, stamp = job.options.enable_each_rank_log or ".", log_stamp()
        self._lock = threading.Lock()
        self._files: list[BinaryIO] = []
        try:
            os.makedirs(folder, exist_ok=True)
            for rank in range(job.world_size):
                self._files.append(open(os.path.join(folder, log_name(stamp, rank)), "wb", buffering=0))  # noqa: SIM115
        except OSError as error:
            self.close()
            raise LaunchError(f"cannot be written: {error}", where=f"--enable_each_rank_log {folder}") from error

    def write(self, rank: int, data: bytes) -> None:
        with self._lock:
            self._files[rank].write(data)

    def close(self) -> None:
        for file in self._files:
            file.close()
