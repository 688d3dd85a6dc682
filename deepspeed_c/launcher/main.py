"""The command line: runs the command that its first word names, and makes exit codes of errors."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Sequence

from deepspeed_c.errors import DeepSpeedCError
from deepspeed_c.launcher.commands import find_command

__all__ = ["main", "report_errors"]

EXIT_USAGE = 2  # nothing was started; as argparse
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell says it
EXIT_NO_READER = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``deepspeed_c`` with ``argv`` (without the program's name; default: ``sys.argv[1:]``) and return its exit
    code.

    A launch returns 0 when every rank did. Otherwise it returns the exit code of the rank that failed first (128 + n
    for a rank that signal n ended). It returns 128 + n when signal n stopped the launcher and the ranks did not all end
    with 0 by themselves. If nothing could be started, it returns 2, with the reason on stderr.

    When the reader of the output has gone (``deepspeed_c config show FILE | head -1``), the command ends without a
    word. It returns 141, as a shell says of programs that SIGPIPE ends: Python ignores that signal and raises instead.
    """
    return report_errors(lambda: _main(list(sys.argv[1:] if argv is None else argv)))


def report_errors(command: Callable[[], int]) -> int:
    """Run a command of ours, and return an exit code however it ends; a typed error becomes its message on stderr.
    """
    try:
        code = _run_command(command)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # here rather than when the interpreter ends, which would complain
        return code
    except BrokenPipeError:
        if not _lost_reader():
            raise  # another pipe's
        return EXIT_NO_READER


def _lost_reader() -> bool:
    """Whether nobody reads stdout or stderr any more; the rest of their buffers then goes nowhere."""
    lost = False
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed before the start
            continue
        watch = select.poll()
        watch.register(stream.fileno(), 0)
        if any(events & (select.POLLERR | select.POLLHUP) for _, events in watch.poll(0)):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
            lost = True
    return lost


def _main(words: list[str]) -> int:
    command, arguments = find_command(words)
    return command(arguments)


def _run_command(command: Callable[[], int]) -> int:
    try:
        return command()
    except DeepSpeedCError as error:
        print(f"deepspeed_c: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED  # before the ranks' supervisor took over: there is nothing to stop
    except SystemExit as stop:
        # argparse has printed its help (0) or its message (2)
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else EXIT_USAGE
