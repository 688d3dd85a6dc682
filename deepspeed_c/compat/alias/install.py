"""Make deepspeed_c importable as ``deepspeed``, and deepspeed_c.mii as ``mii``, in this process and its children, by a
folder on the import path. Programs that only look for an installed ``deepspeed`` import nothing.

The folder (``shim/``) holds a package of each name, which replaces itself by ours when it is imported, and metadata
with the versions. The folder ``bin/`` holds DeepSpeed's programs for child processes. Nothing is installed into
the environment.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import PathFinder

from deepspeed_c.compat.alias.finder import ROOTS, install_finders, is_active
from deepspeed_c.compat.alias.version import API_VERSION, MII_VERSION
from deepspeed_c.env import read_env
from deepspeed_c.errors import AliasError

__all__ = ["BIN", "SHIM", "activate", "environment", "find_real", "install_as_deepspeed", "refuse_real"]

SHIM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shim")
BIN = os.path.join(os.path.dirname(SHIM), "bin")  # DeepSpeed's programs, for PATH
FORCE = "DSC_ALIAS_FORCE"
PYTHON = "DSC_ALIAS_PYTHON"

# Package that is replaced -> its name in texts, the name of its distribution, the version that the replacement tells.
_REPLACED = {"deepspeed": ("DeepSpeed", "deepspeed", API_VERSION), "mii": ("MII", "deepspeed-mii", MII_VERSION)}

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
    """Make ``import deepspeed`` mean this package and ``import mii`` its part for serving, in this process and its
    children (by ``PYTHONPATH``).

    Call it before transformers, accelerate, trl or lightning are imported. A second call does nothing.

    Args:
        force: hide a real DeepSpeed or MII that is installed, for this process and its children only.

    Raises:
        AliasError: a real DeepSpeed or MII is installed or imported, or a package of that list has been imported before
            and found no DeepSpeed.
    """
    if is_visible():
        if SHIM not in sys.path:  # a planner puts the path back after each run of a script
            sys.path.insert(0, SHIM)
        return
    for name, (title, *_) in _REPLACED.items():
        if name in sys.modules and not is_active(name):
            raise AliasError(
                f"{title} has been imported already, from {getattr(sys.modules[name], '__file__', None)}",
                where="install_as_deepspeed",
                fix=f"call it before anything imports {name}",
            )
    if not force:
        refuse_real("install_as_deepspeed", "pass force=True to hide it for this process and its children")
    late = next((name for module, name in _DECIDE_AT_IMPORT.items() if module in sys.modules), None)
    if late is not None and find_real("deepspeed") is None:
        raise AliasError(
            f"{late} has been imported already and found no DeepSpeed, which it remembers",
            where="install_as_deepspeed",
            fix=f"call it before the first import of {late}, or start the program with `deepspeed_c run`",
        )
    os.environ.update(environment(os.environ, force))
    sys.path.insert(0, SHIM)
    importlib.invalidate_caches()


def is_visible() -> bool:
    """Whether ``import deepspeed`` and ``import mii`` already give this package in this process."""
    return all(is_active(name) if name in sys.modules else _is_found(name) for name in _REPLACED)


def _is_found(name: str) -> bool:
    spec = PathFinder.find_spec(name, sys.path)
    return spec is not None and spec.origin == os.path.join(SHIM, name, "__init__.py")


def find_real(name: str) -> str | None:
    """Path of an installed real package ``deepspeed`` or ``mii``, rather than of a shim of this package.

    None if there is none. Imports nothing.
    """
    elsewhere = [path for path in sys.path if not _is_shim(path)]
    for finder in sys.meta_path:
        path = elsewhere if finder is PathFinder else None
        spec = finder.find_spec(name, path)
        # A spec without an origin is a folder of that name without __init__.py, such as a folder of configuration files
        if spec is not None and spec.origin is not None:
            return spec.origin
    return None


def _is_shim(path: str) -> bool:
    # The shim of another installation counts too: the search is for the real DeepSpeed.
    return os.path.normpath(path).endswith(os.path.join("", "deepspeed_c", "compat", "alias", "shim"))


def refuse_real(where: str, how_to_force: str, names: Iterable[str] = tuple(_REPLACED)) -> None:
    """Raise AliasError if a real ``deepspeed`` or ``mii`` is installed; ``names`` limits the search."""
    for name in names:
        title, distribution, _ = _REPLACED[name]
        if path := find_real(name):
            raise AliasError(
                f"a real {title} is installed, which would be hidden: {path}",
                where=where,
                fix=f"uninstall it (pip uninstall {distribution}), or {how_to_force}",
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


def activate(name: str) -> None:
    """Replace the module ``name``, which is ``deepspeed`` or ``mii``, by the package that answers to it.

    The shim calls this while it is being imported.

    Raises:
        AliasError: a real package of that name is on this interpreter's path too, and the user did not ask to hide it.
    """
    if read_env().alias_force != "1":
        how = f"set {FORCE}=1 to hide it (`deepspeed_c run --force` does)"
        refuse_real(f"import {name}", how, (name,))
    package = importlib.import_module(ROOTS[name])
    # Programs compare the version with the releases of the package.
    package.__version__ = _REPLACED[name][2]
    sys.modules[name] = package
    install_finders()
