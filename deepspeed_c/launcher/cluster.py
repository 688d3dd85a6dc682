"""A launch on several hosts: starts the host agents by a runner, waits for them, and says how the launch ended.

The launching command holds the agents' store, and need not run on one of the hosts. Everything that a rank prints
reaches it through the runner's program.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import replace
from types import FrameType
from typing import IO, TYPE_CHECKING, BinaryIO, final

from deepspeed_c.background import BackgroundThread
from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.addresses import own_address
from deepspeed_c.launcher.agent import run_host
from deepspeed_c.launcher.exports import exports
from deepspeed_c.launcher.hostfile import is_this_host
from deepspeed_c.launcher.job import SIGNALS, Job, name_of, new_token
from deepspeed_c.launcher.options import Options
from deepspeed_c.launcher.output import log_name, log_stamp
from deepspeed_c.launcher.runners.runner import HostRunner, python_path
from deepspeed_c.listening import listening_socket
from deepspeed_c.logging import write_line
from deepspeed_c.scheduled import DEFAULT_PORT

if TYPE_CHECKING:
    from deepspeed_c.launcher.meeting import Chair

__all__ = ["launch_on_hosts", "launch_without_runner"]

FAREWELL_STEPS = 5
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
    with _Signals() as signals, _RunnerProcess(runner, job) as process:
        # Now, while the agents start: this import takes as long as all that they do.
        from deepspeed_c.launcher.meeting import Chair
        from deepspeed_c.launcher.run import explain, set_up_logging

        set_up_logging(options.log_level)
        store = _store_at(listening.detach(), job.store)
        chair = Chair(store, job.token, list(hosts), process.said)
        try:
            _preside(chair, process, signals)
            process.wait(END_SECONDS)
        finally:
            process.kill()
        if chair.failure is not None:
            explain(chair.failure, job.world_size if chair.has_begun else 0)
        elif signals.n_taken and chair.code == 0:
            write_line("deepspeed_c: all ranks ended by themselves, with exit code 0", sys.stderr)
        del store  # the agents have read the exit code
    return chair.code


def _store_at(listening: int, address: tuple[str, int]):
    from torch.distributed import TCPStore

    return TCPStore(*address, is_master=True, wait_for_workers=False, master_listen_fd=listening)


def _preside(chair: Chair, process: _RunnerProcess, signals: _Signals) -> None:
    """Read reports and write orders until the launch is over."""
    ended_at: float | None = None
    while not chair.is_over:
        for number in signals.take():
            chair.signal(number)
        chair.step()
        for host, code in process.take_ends():
            chair.end_of_agent(host, code)
        if ended_at is None and process.has_ended():
            ended_at = time.monotonic()
        # The agents end a moment before their runner. If they do not report it, they are lost with it.
        if ended_at is not None and time.monotonic() - ended_at > 2 * chair.period and not chair.is_over:
            chair.fail(_early_end(chair, process))
        time.sleep(chair.period)
    chair.step()


def _early_end(chair: Chair, process: _RunnerProcess):
    from deepspeed_c.launcher.meeting import Failure

    code = process.exit_code()
    how = f"{process.name} ended with exit code {code}" if code >= 0 else f"{process.name} was ended by signal {-code}"
    if chair.missing:
        return chair.absent(chair.missing, f"did not come: {how}")
    return Failure("", code if code > 0 else 1, f"{how} before the ranks had ended", tail=process.said(""))


def launch_without_runner(options: Options, hosts: Mapping[str, list[int]]) -> int:
    """Start the ranks of this host, as number --node_rank of ``hosts``; the same command runs on each host.

    The host of number 0 holds the agents' store, and says how the launch ended. Returns the exit code, the same on all
    hosts. Raises LaunchError for a number that is too large, or an address that is missing or of another host.
    """
    from deepspeed_c.env import read_env

    index = options.node_rank or 0
    if index >= len(hosts):
        raise LaunchError(
            f"is {index}, and there are {len(hosts)} hosts", where="--node_rank", fix="hosts are numbered from 0"
        )
    address = options.master_addr or next(iter(hosts))
    if options.master_addr is None and options.hostfile is None and len(hosts) > 1:
        raise LaunchError("is missing", where="--master_addr", fix="give an address of host 0 that all hosts reach")
    port = options.master_port or DEFAULT_PORT
    job = Job(
        # The ranks' store takes another port.
        options=replace(options, master_addr=address if index == 0 else None, master_port=None, gather_logs=False),
        hosts=dict(hosts),
        environment={},
        folder=os.getcwd(),
        token=read_env().run_token or "",
        store=(address, port),
    )
    if index:
        return run_host(job, job.place(index))
    from deepspeed_c.launcher.meeting import Chair
    from deepspeed_c.launcher.run import explain, open_store

    _wait_for_name(address)
    store = open_store(address, port)
    chair = Chair(store, job.token, list(hosts), lambda _: "")
    left = threading.Event()
    thread = BackgroundThread(_preside_alone, chair, left, name="dsc_chair", end=left.set, limit_s=END_SECONDS)
    thread.start()
    code = run_host(job, job.place(0))
    thread.join()
    if chair.failure is not None:
        explain(chair.failure, job.world_size if chair.has_begun else 0)
    return code


def _wait_for_name(address: str) -> None:
    """Wait until the name of this host is known: a new pod's name may take a while."""
    from deepspeed_c.launcher.meeting import COME_SECONDS

    end = time.monotonic() + COME_SECONDS
    while time.monotonic() < end:
        try:
            socket.getaddrinfo(address, None)
        except OSError:
            time.sleep(1)
            continue
        return


def _preside_alone(chair: Chair, left: threading.Event) -> None:
    """Preside until the launch is over, or this process is about to end."""
    n_steps = 0
    while n_steps < FAREWELL_STEPS and not left.wait(chair.period):
        n_steps += chair.is_over  # until the other agents have read the exit code
        chair.step()


@final
class _Signals:
    """Signals of this process, kept until they are taken. Restores the handlers at its end."""

    def __init__(self) -> None:
        self._pending: list[int] = []
        self.n_taken = 0
        self._handlers = {number: signal.getsignal(number) for number in SIGNALS}

    def __enter__(self) -> _Signals:
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


@final
class _RunnerProcess:
    """The runner's program, with threads that pass on what it prints."""

    def __init__(self, runner: HostRunner, job: Job) -> None:
        self.name = runner.name
        # Label -> host; pdsh's labels lack the user of USER@HOST.
        self._hosts = {name_of(host): host for host in job.hosts} if runner.labels_hosts() else {}
        self._strips_labels = job.options.tag_output or job.options.gather_logs
        self._logs = _Logs(job) if job.options.gather_logs else None
        self._said: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=SAID_LINES))
        self._ends: list[tuple[str, int]] = []
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self._folder = tempfile.TemporaryDirectory(prefix="deepspeed_c_")  # only this user may enter it
        job_file = os.path.join(self._folder.name, "job")
        with open(job_file, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(job.to_json() + "\n")
        start = runner.start(job, job_file)
        try:
            self._process = subprocess.Popen(
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

    def __enter__(self) -> _RunnerProcess:
        for stream, target in ((self._process.stdout, sys.stdout.buffer), (self._process.stderr, sys.stderr.buffer)):
            # A pipe that a left-behind process holds open is not waited for: its reader is in no C++ code.
            carry = (self._carry, stream, target)
            thread = BackgroundThread(*carry, name="dsc_runner", end=self._over.set, limit_s=_MOMENT_SECONDS)
            thread.start()
            self._threads.append(thread)
        return self

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
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _carry(self, stream: IO[bytes], target: BinaryIO) -> None:
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
