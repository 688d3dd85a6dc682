"""The variables that ranks on all hosts get: those of the launching command with certain prefixes, and the lines of
``.deepspeed_env`` files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from deepspeed_c.env import read_env
from deepspeed_c.errors import LaunchError

__all__ = [
    "ENVIRONMENT_FILE",
    "EXCLUDED",
    "EXPORT_VARIABLE",
    "PREFIXES",
    "environment_file_paths",
    "exports",
    "parse_environment_file",
]

# DeepSpeed's prefixes, also those of its accelerators and of its services in the cloud; then the prefixes of variables
# that torch and other parts of a rank read.
PREFIXES = (
    *("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "LD_LIBRARY", "PATH"),
    *("DLTS_", "NEBULA_", "AML_RUN_ID", "AZUREML_", "FC_TASK", "MASTER_HOST", "LOCAL_HOST"),
    *("DSC_", "DS_", "DEEPSPEED_", "TORCH", "GLOO", "OMP_", "MKL_", "HF_", "TRANSFORMERS_"),
)
ENVIRONMENT_FILE = ".deepspeed_env"
# A variable of the launching command -> variables that each host has set for itself.
EXCLUDED = {"AISC_JOB_NAME": ("NCCL_IB_HCA", "UCX_NET_DEVICES")}
EXPORT_VARIABLE = "DSC_EXPORT"
"""Names of more variables, with commas between them."""

# They belong to one run, or to the launcher of one rank.
_OF_ONE_RUN = ("DSC_LAUNCH", "DSC_RUN", "TORCHELASTIC_")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def exports(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables for ranks on every host.

    A line of a file wins over the launching command's own variable, and the file in the working directory over the file
    in the home folder. ``DS_ENV_FILE`` names another file: a name in those folders, or a path. Raises LaunchError for a
    line that is no assignment, and for a file that cannot be read or that ``DS_ENV_FILE`` names in vain.
    """
    environ = os.environ if environ is None else environ
    excluded = {name for sign, names in EXCLUDED.items() if sign in environ for name in names}
    more = {name.strip() for name in environ.get(EXPORT_VARIABLE, "").split(",")}
    found = {
        name: value
        for name, value in environ.items()
        if (name.startswith(PREFIXES) or name in more) and not name.startswith(_OF_ONE_RUN) and name not in excluded
    }
    for path in environment_file_paths(environ):
        found.update(parse_environment_file(path))
    return found


def environment_file_paths(environ: Mapping[str, str]) -> list[Path]:
    """The files with variables that exist, in the order in which they are read."""
    given = read_env(environ).environment_file
    name = Path(given or ENVIRONMENT_FILE).expanduser()
    paths = [path for path in dict.fromkeys(folder / name for folder in (Path.home(), Path.cwd())) if path.is_file()]
    if given and not paths:
        raise LaunchError(
            f"there is no such file, in {Path.home()} or {Path.cwd()}",
            where=f"DS_ENV_FILE={given}",
            fix="correct the variable, or unset it",
        )
    return paths


def parse_environment_file(path: Path) -> dict[str, str]:
    """Name -> value, from lines such as ``NCCL_DEBUG=INFO``, ``export A="b c"`` and ``URL=http://h?x=1``.

    Blank lines and lines that begin with # are skipped. A value ends with its line. Quotes around a whole value are
    removed, unless it holds more of them. Nothing is expanded. Raises LaunchError for other lines, with file and
    number.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            f"cannot be read: {error}", where=str(path), fix="make it a text file in UTF-8 that you may read"
        ) from error
    return dict(_assignments(text.split("\n"), path))  # splitlines would cut values at rarer characters too


def _assignments(lines: Iterable[str], path: Path) -> Iterable[tuple[str, str]]:
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = re.sub(r"^export\s+", "", text).partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not _NAME.fullmatch(name) or "\0" in value:
            raise LaunchError(
                f"{text!r} is not of the form NAME=VALUE",
                where=f"{path}, line {number}",
                fix="correct the line, or begin it with #",
            )
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" and value[0] not in value[1:-1]:
            value = value[1:-1]
        yield name, value
