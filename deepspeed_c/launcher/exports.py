"""The variables that ranks on all hosts get: those of the launching command with certain prefixes, and the lines of
``.deepspeed_env`` files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from deepspeed_c.errors import LaunchError

__all__ = ["ENVIRONMENT_FILE", "PREFIXES", "environment_file_paths", "exports", "parse_environment_file"]

# DeepSpeed's prefixes (those that its accelerators add too), and those of the parts of torch that ranks read.
PREFIXES = (
    *("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "LD_LIBRARY", "PATH"),
    *("DLTS_", "NEBULA_"),
    *("DSC_", "DS_", "DEEPSPEED_", "TORCH", "GLOO", "OMP_", "MKL_", "HF_", "TRANSFORMERS_"),
)
ENVIRONMENT_FILE = ".deepspeed_env"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def exports(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables for ranks on every host.

    A line of a file wins over the launching command's own variable; the file in the working directory over that in the
    home folder. ``DS_ENV_FILE`` names another file: a name in those folders, or a path. Raises LaunchError for a line
    that is no assignment, or a file that cannot be read.
    """
    environ = os.environ if environ is None else environ
    # DSC_LAUNCH_JOB and the like belong to one run.
    found = {
        name: value
        for name, value in environ.items()
        if name.startswith(PREFIXES) and not name.startswith(("DSC_LAUNCH", "DSC_RUN"))
    }
    for path in environment_file_paths(environ):
        found.update(parse_environment_file(path))
    return found


def environment_file_paths(environ: Mapping[str, str]) -> list[Path]:
    """The files with variables that exist, in the order in which they are read."""
    name = environ.get("DS_ENV_FILE") or ENVIRONMENT_FILE
    folders = [Path.home(), Path.cwd()]
    paths = [Path(name).expanduser()] if os.sep in name else [folder / name for folder in folders]
    unique = dict.fromkeys(path.absolute() for path in paths)
    return [path for path in unique if path.is_file()]


def parse_environment_file(path: Path) -> dict[str, str]:
    """Name -> value, from lines such as ``NCCL_DEBUG=INFO``, ``export A="b c"`` and ``URL=http://h?x=1``.

    Blank lines and lines that begin with # are skipped. A value ends with its line. Quotes around a whole value are
    removed. Nothing is expanded. Raises LaunchError for other lines, with file and number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"cannot be read: {error}", where=str(path)) from error
    return dict(_assignments(lines, path))


def _assignments(lines: Iterable[str], path: Path) -> Iterable[tuple[str, str]]:
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.removeprefix("export ").partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not _NAME.fullmatch(name):
            raise LaunchError(f"{text!r} is not of the form NAME=VALUE", where=f"{path}, line {number}")
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        yield name, value
