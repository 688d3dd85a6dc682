"""Copy the output of ranks to the terminal or to log files as it arrives, and remember the last lines."""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import BinaryIO, final

from deepspeed_c.background import BackgroundThread
from deepspeed_c.errors import LaunchError
from deepspeed_c.logging import write_line

__all__ = ["Output", "label_of", "log_name", "log_stamp"]

# Time to wait for the rest of an unfinished line (a prompt, a progress bar) before the first part is shown. During this
# time no line of another rank is printed in between.
HOLD_SECONDS = 0.1
TAIL_BYTES = 16 << 10
TAIL_LINES = 30
READ_BYTES = 64 << 10
_MOMENT_SECONDS = 0.1  # for the rest of the output, where the interpreter ends inside the block
DRAIN_READS = 32  # limit for each pipe at the end: enough to empty a pipe


def label_of(rank: int, host: str = "") -> bytes:
    """The label of a rank's lines; host: its name, if the launch has several."""
    return f"[{host}:rank{rank}]: ".encode() if host else f"[rank{rank}]: ".encode()


def log_stamp() -> str:
    """The time in the names of log files."""
    return time.strftime("%Y%m%d%H%M%S")


def log_name(stamp: str, rank: int) -> str:
    """The name of a rank's log file."""
    return f"{stamp}_rank{rank}.log"


@dataclass(slots=True, eq=False)
class _Stream:
    """One pipe from one rank, and the target of its bytes."""

    index: int
    """Which rank of this host."""
    rank: int
    read_fd: int
    target: int
    """File descriptor; -1 after writing to it has failed (the terminal was closed, the disk is full)."""
    label: bytes = b""
    """Prefix of every line. With a label only whole lines are passed on, without a time limit."""
    is_shared: bool = False
    """Whether other ranks write to the target. Unfinished lines are then held back for a moment."""
    is_remembered: bool = True
    pending: bytearray = field(default_factory=bytearray)
    show_at: float = 0.0
    """Time at which ``pending`` is shown although its line is unfinished, by ``time.monotonic``."""


@final
class Output:
    """The pipes of all ranks and the thread that empties them.

    By default a rank writes to the launcher's stdout directly, and only stderr goes through a pipe, so that the message
    after a failure can quote it. Lines of several ranks do not mix on stderr. With labels, both streams go through
    pipes. With a log folder, both go to ``DIR/TIME_rankN.log``, in the order of the rank's writes. ``paths(rank)`` are
    the files to open as the rank's stdout and stderr ("" for the launcher's own stream). This is a context manager. On
    exit, the output of ended ranks has been written, and all descriptors are closed.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        host: str = "",
        log_dir: str | None = None,
        has_labels: bool = False,
        is_merged: bool = False,
    ) -> None:
        """ranks: the numbers of the ranks. host: its name for the labels, if the launch has several. is_merged: both
        streams of a rank go to stdout, with labels and in the order of the rank's writes.
        """
        n_ranks = len(ranks)
        self._streams: list[_Stream] = []
        self._paths: list[tuple[str, str]] = []
        self._write_fds: list[int] = []
        self._tails = [bytearray() for _ in range(n_ranks)]
        self._logs: list[BinaryIO] = []
        self.log_paths: list[str] = []
        self._selector = selectors.DefaultSelector()
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = os.pipe()
        stamp = log_stamp()
        try:
            for i, rank in enumerate(ranks):
                label = label_of(rank, host) if has_labels else b""
                if log_dir is not None:
                    path = os.path.join(log_dir, log_name(stamp, rank))
                    self._logs.append(open(path, "wb", buffering=0))  # noqa: SIM115  closed by close()
                    self.log_paths.append(path)
                    both = self._pipe(_Stream(i, rank, -1, self._logs[-1].fileno(), label))
                    self._paths.append((both, both))
                elif is_merged:
                    both = self._pipe(_Stream(i, rank, -1, 1, label_of(rank, host)))
                    self._paths.append((both, both))
                else:
                    out = self._pipe(_Stream(i, rank, -1, 1, label, is_remembered=False)) if has_labels else ""
                    self._paths.append((out, self._pipe(_Stream(i, rank, -1, 2, label, is_shared=n_ranks > 1))))
        except OSError as error:
            self.close()
            raise LaunchError(f"the ranks' output cannot be set up: {error}", where=log_dir or "pipes") from error

    def _pipe(self, stream: _Stream) -> str:
        """Add a pipe. Return the path that opens its writing end; it is valid until ``close``."""
        stream.read_fd, write_fd = os.pipe()
        self._streams.append(stream)
        self._write_fds.append(write_fd)
        os.set_blocking(stream.read_fd, False)
        self._selector.register(stream.read_fd, selectors.EVENT_READ, stream)
        return f"/dev/fd/{write_fd}"

    def paths(self, i: int) -> tuple[str, str]:
        """The paths to open as stdout and stderr of the ``i``-th rank; "" stands for the launcher's own stream."""
        return self._paths[i]

    def __enter__(self) -> Output:
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = BackgroundThread(self._carry, name="dsc_output", end=self._wake, limit_s=_MOMENT_SECONDS)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()
        self.close()

    def finish(self) -> None:
        """Wait until the output of the ranks is passed on. Call this after all ranks have ended; a second call does
        nothing more."""
        if self._thread is None:
            return
        self._wake()
        self._thread.join()
        self._thread = None

    def _wake(self) -> None:
        """Let the thread empty the pipes, and end."""
        os.write(self._wake_write, b"x")

    def close(self) -> None:
        self._selector.close()
        for fd in (self._wake_read, self._wake_write, *self._write_fds, *(s.read_fd for s in self._streams)):
            with contextlib.suppress(OSError):
                os.close(fd)
        for log in self._logs:
            log.close()
        self._write_fds, self._streams, self._logs = [], [], []

    def tail(self, i: int) -> str:
        """The last lines of stderr of the ``i``-th rank, or of both streams if they go to one log file. Call this
        after ``finish``."""
        lines = self._tails[i].decode(errors="replace").splitlines()
        if len(self._tails[i]) >= TAIL_BYTES:
            lines = lines[1:] or lines  # the first line is incomplete
        return "\n".join(lines[-TAIL_LINES:])

    def _carry(self) -> None:
        while True:
            events = self._selector.select(self._show_overdue())
            is_over = False
            for key, _ in events:
                if key.data is None:
                    is_over = True  # all ranks have ended: empty the pipes, then stop
                else:
                    self._read(key.data)
            if is_over:
                for stream in self._streams:
                    for _ in range(DRAIN_READS):  # bounded: a process left behind by a rank may write forever
                        if not self._read(stream):
                            break
                    if stream.pending:
                        end = b"\n" if stream.label else b""
                        self._pass_on(stream, stream.label + bytes(stream.pending) + end)
                        stream.pending.clear()
                return

    def _show_overdue(self) -> float | None:
        """Show unfinished lines whose time is over. Return the seconds until the next unfinished line is due."""
        now, waits = time.monotonic(), []
        for stream in self._streams:
            if not stream.pending or stream.label:
                continue
            if stream.show_at <= now:
                self._pass_on(stream, bytes(stream.pending))
                stream.pending.clear()
            else:
                waits.append(stream.show_at - now)
        return min(waits, default=None)

    def _read(self, stream: _Stream) -> bool:
        """Pass on the content of the pipe. Return whether there was any content."""
        try:
            data = os.read(stream.read_fd, READ_BYTES)
        except BlockingIOError:
            return False
        if stream.is_remembered:
            tail = self._tails[stream.index]
            tail += data
            del tail[:-TAIL_BYTES]
        if not stream.label and not stream.is_shared:
            self._pass_on(stream, data)
            return bool(data)
        is_new = not stream.pending
        stream.pending += data
        end = stream.pending.rfind(b"\n") + 1
        if stream.label:
            end = max(end, stream.pending.rfind(b"\r") + 1)  # a progress bar ends its lines with a carriage return
        elif is_new or end:
            stream.show_at = time.monotonic() + HOLD_SECONDS
        lines = bytes(stream.pending[:end])
        del stream.pending[:end]
        if stream.label:
            lines = b"".join(stream.label + line for line in lines.splitlines(keepends=True))
        self._pass_on(stream, lines)
        return bool(data)

    def _pass_on(self, stream: _Stream, data: bytes) -> None:
        view = memoryview(data)
        while view and stream.target >= 0:
            try:
                view = view[os.write(stream.target, view) :]
            except BlockingIOError:
                time.sleep(0.01)  # another program made the terminal non-blocking
            except OSError as error:
                # Go on reading without writing: otherwise the pipe would fill up and block the rank
                where = "its log file" if self._logs else "the terminal"
                stream.target = -1
                with contextlib.suppress(OSError):
                    write_line(f"deepspeed_c: rank {stream.rank} can no longer write to {where}: {error}", sys.stderr)
