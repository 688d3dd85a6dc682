"""Make deepspeed_c importable as ``deepspeed`` in this process and its children, by a folder on the import path.
Programs that only look for an installed ``deepspeed`` import nothing.

The folder (``shim/``) holds a package ``deepspeed``, which replaces itself by deepspeed_c when it is imported, and
metadata with the version. The folder ``bin/`` holds DeepSpeed's programs for child processes. Nothing is installed into
the environment.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder

from deepspeed_c.compat.alias.finder import install_finders
from deepspeed_c.compat.alias.version import API_VERSION
from deepspeed_c.env import read_env
from deepspeed_c.errors import AliasError

__all__ = ["BIN", "SHIM", "activate", "environment", "find_real", "install_as_deepspeed"]

SHIM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shim")
BIN = os.path.join(os.path.dirname(SHIM), "bin")  # DeepSpeed's programs, for PATH
FORCE = "DSC_ALIAS_FORCE"
PYTHON = "DSC_ALIAS_PYTHON"

_PACKAGE = sys.modules["deepspeed_c"]

# Modules that check during their own import whether DeepSpeed is installed, and the names of their packages.
_DECIDE_AT_IMPORT = {
    "transformers.integrations.deepspeed": "transformers",
    "transformers.trainer": "transformers",
    "accelerate": "accelerate",
    "trl": "trl",
    "lightning.fabric.strategies.deepspeed": "lightning",
    "lightning_fabric.strategies.deepspeed": "lightning",
}


def install_as_deepspeed(force: bool = False) -> None:
    """Make ``import deepspeed`` mean this package, in this process and its children (by ``PYTHONPATH``).

    Call it before transformers, accelerate, trl or lightning are imported. A second call does nothing.

    Args:
        force: hide a real DeepSpeed that is installed, for this process and its children only.

    Raises:
        AliasError: a real DeepSpeed is installed or imported, or one of these packages has been imported before and
            found no DeepSpeed.
    """
    if is_visible():
        if SHIM not in sys.path:  # a planner puts the path back after each run of a script
            sys.path.insert(0, SHIM)
        return
    if "deepspeed" in sys.modules and sys.modules["deepspeed"] is not _PACKAGE:
        raise AliasError(
            f"DeepSpeed has been imported already, from {getattr(sys.modules['deepspeed'], '__file__', None)}",
            where="install_as_deepspeed",
            fix="call it before anything imports deepspeed",
        )
    real = find_real()
    if real is not None and not force:
        raise real_present(real, "install_as_deepspeed", "pass force=True to hide it for this process and its children")
    late = next((name for module, name in _DECIDE_AT_IMPORT.items() if module in sys.modules), None)
    if late is not None and real is None:
        raise AliasError(
            f"{late} has been imported already and found no DeepSpeed, which it remembers",
            where="install_as_deepspeed",
            fix=f"call it before the first import of {late}, or start the program with `deepspeed_c run`",
        )
    os.environ.update(environment(os.environ, force))
    sys.path.insert(0, SHIM)
    importlib.invalidate_caches()


def is_visible() -> bool:
    """Whether ``import deepspeed`` already gives this package in this process."""
    if "deepspeed" in sys.modules:
        return sys.modules["deepspeed"] is _PACKAGE
    spec = PathFinder.find_spec("deepspeed", sys.path)
    return spec is not None and spec.origin == os.path.join(SHIM, "deepspeed", "__init__.py")


def find_real() -> str | None:
    """Path of an installed real DeepSpeed, rather than of a shim of this package; None if there is none. Imports
    nothing."""
    elsewhere = [path for path in sys.path if not _is_shim(path)]
    for finder in sys.meta_path:
        path = elsewhere if finder is PathFinder else None
        spec = finder.find_spec("deepspeed", path)
        # A spec without an origin is a folder named deepspeed without __init__.py, such as a folder of configuration
        # files
        if spec is not None and spec.origin is not None:
            return spec.origin
    return None


def _is_shim(path: str) -> bool:
    # The shim of another installation counts too: the search is for the real DeepSpeed.
    return os.path.normpath(path).endswith(os.path.join("", "deepspeed_c", "compat", "alias", "shim"))


def real_present(path: str, where: str, how_to_force: str) -> AliasError:
    return AliasError(
        f"a real DeepSpeed is installed, which would be hidden: {path}",
        where=where,
        fix=f"uninstall it (pip uninstall deepspeed), or {how_to_force}",
    )


def environment(environ: Mapping[str, str], force: bool = False) -> dict[str, str]:
    """The variables, with their values, that make the alias visible to a process that is started with ``environ``."""
    if os.pathsep in SHIM:
        raise AliasError(
            f"{SHIM} cannot be put on PYTHONPATH, which is separated by {os.pathsep!r}",
            where="PYTHONPATH",
            fix="install deepspeed_c in a folder whose path does not have that character",
        )
    return {
        "PYTHONPATH": _in_front(SHIM, environ.get("PYTHONPATH", "")),
        "PATH": _in_front(BIN, environ.get("PATH", os.defpath)),
        PYTHON: sys.executable,
        **({FORCE: "1"} if force else {}),
    }


def _in_front(folder: str, present: str) -> str:
    # An empty entry means the working folder and is kept; an empty variable has no entries.
    others = [path for path in present.split(os.pathsep) if path != folder] if present else []
    return os.pathsep.join([folder, *others])


def activate() -> None:
    """Replace the module ``deepspeed`` by this package. The shim calls this while it is being imported.

    Raises:
        AliasError: a real DeepSpeed is on this interpreter's path too, and the user did not ask to hide it.
    """
    real = find_real()
    if real is not None and read_env().alias_force != "1":
        raise real_present(real, "import deepspeed", f"set {FORCE}=1 to hide it (`deepspeed_c run --force` does)")
    # Programs compare deepspeed.__version__ with DeepSpeed's releases.
    _PACKAGE.__version__ = API_VERSION
    sys.modules["deepspeed"] = _PACKAGE
    install_finders()
