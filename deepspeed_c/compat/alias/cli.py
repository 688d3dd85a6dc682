"""``deepspeed_c run CMD...`` and ``deepspeed_c env``: make the alias visible to a tree of processes, or to a shell."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from deepspeed_c.compat.alias.install import environment, refuse_real
from deepspeed_c.errors import AliasError

TYPE_CHECKING = False  # instead of typing.TYPE_CHECKING: importing typing takes most of the start time
if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["env", "run"]

EXIT_USAGE = 2
EXIT_REAL_PRESENT = 3
EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND = 126, 127  # as a shell

_RUN_HELP = """usage: deepspeed_c run [--force] COMMAND [ARGUMENT ...]

Runs COMMAND so that it, and every process that it starts, sees deepspeed_c as `deepspeed`, and deepspeed_c.mii as `mii`:
    deepspeed_c run python train_hf.py --deepspeed ds_config.json
    deepspeed_c run accelerate launch --use_deepspeed train.py
    deepspeed_c run deepspeed --num_gpus 2 train.py --deepspeed ds_config.json

DeepSpeed's programs (deepspeed, ds_report, ds_io, zero_to_fp32.py ...) are found on PATH as well. The command takes this process's place: its exit code and signals are its own.

--force   hide a real DeepSpeed or MII that is installed, from these processes only; without, the exit code is 3
"""

_ENV_HELP = """usage: eval "$(deepspeed_c env [--force])"

Prints, for a POSIX shell, the variables that make Python programs see deepspeed_c as `deepspeed`, and deepspeed_c.mii as `mii`.

--force   hide a real DeepSpeed or MII that is installed; without, the exit code is 3 and nothing is printed
"""


def run(arguments: Sequence[str]) -> int:
    """Run a command in place of this process; return only if that fails."""
    force, command = _parse(arguments, _RUN_HELP)
    if not command:
        _stop(_RUN_HELP, "which command?")
    try:
        variables = _variables("run", force)
    except AliasError as error:
        return _refused(error)
    # Python ignores these two signals, and the command would inherit that: restore them.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, {**os.environ, **variables})
    except OSError as error:
        import shlex

        print(f"deepspeed_c run: {command[0]}: {error.strerror}", file=sys.stderr)
        if command[0].endswith(".py"):
            print(f"Fix: deepspeed_c run python {shlex.join(command)}", file=sys.stderr)
        return EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_NOT_EXECUTABLE


def env(arguments: Sequence[str]) -> int:
    """Print the variables as ``export`` lines."""
    force, rest = _parse(arguments, _ENV_HELP)
    if rest:
        _stop(_ENV_HELP, f"what is {rest[0]!r}?")
    try:
        variables = _variables("env", force)
    except AliasError as error:
        return _refused(error)
    import shlex  # imported here so that ``run`` does not wait for it

    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def _parse(arguments: Sequence[str], help_text: str) -> tuple[bool, list[str]]:
    """Return (whether ``--force`` is given, the arguments after the options).

    Parsed by hand, because argparse would read options of the command as options of this program.
    """
    force = False
    for i, word in enumerate(arguments):
        if word == "--":
            return force, list(arguments[i + 1 :])
        if not word.startswith("-"):
            return force, list(arguments[i:])
        if word in ("-h", "--help"):
            print(help_text, end="")
            raise SystemExit(0)
        if word != "--force":
            _stop(help_text, f"what is {word!r}?")
        force = True
    return force, []


def _stop(help_text: str, why: str) -> NoReturn:
    print(f"{help_text.splitlines()[0]}\ndeepspeed_c: {why}", file=sys.stderr)
    raise SystemExit(EXIT_USAGE)


def _variables(command: str, force: bool) -> dict[str, str]:
    if not force:
        refuse_real(f"deepspeed_c {command}", f"say `deepspeed_c {command} --force`")
    return environment(os.environ, force)


def _refused(error: AliasError) -> int:
    print(f"deepspeed_c: {error}", file=sys.stderr)
    return EXIT_REAL_PRESENT
