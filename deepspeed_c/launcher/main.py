"""The command line: runs the command that the first word names, and turns errors into exit codes."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Sequence

from deepspeed_c.errors import DeepSpeedCError
from deepspeed_c.launcher.commands import find_command

__all__ = ["main", "report_errors"]

EXIT_USAGE = 2  # nothing was started; the same code as argparse's
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as in a shell
EXIT_NO_READER = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``deepspeed_c`` with ``argv`` (without the program's name; default: ``sys.argv[1:]``) and return its exit
    code.

    A launch returns 0 if every rank ended with 0. Otherwise it returns the exit code of the rank that failed first (128
    + n for a rank that signal n ended). If signal n stopped the launcher before all ranks had ended with 0, it returns
    128 + n. If nothing could be started, it returns 2 and prints the reason to stderr.

    If the reader of the output has ended (``deepspeed_c config show FILE | head -1``), the command ends without a
    message. It returns 141, the code that a shell gives to programs killed by SIGPIPE, because Python ignores this
    signal and raises an exception.
    """
    return report_errors(lambda: _main(list(sys.argv[1:] if argv is None else argv)))


def report_errors(command: Callable[[], int]) -> int:
    """Run a command and return an exit code, also after an exception. Of a typed error, only the message is printed to
    stderr.
    """
    try:
        code = _run_command(command)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # now, because a failure at interpreter exit would print an error
        return code
    except BrokenPipeError:
        if not _lost_reader():
            raise  # the error of another pipe
        return EXIT_NO_READER


def _lost_reader() -> bool:
    """Whether stdout or stderr has lost its reader. The rest of its buffer is then discarded."""
    lost = False
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # was closed before this process started
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
        return EXIT_INTERRUPTED  # interrupted before any rank was started
    except SystemExit as stop:
        # argparse has printed its help (0) or its message (2)
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else EXIT_USAGE
