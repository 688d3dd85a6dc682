"""The packages of monitors. A package is imported only when its monitor is enabled."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

from deepspeed_c.errors import MissingPackageError

__all__ = ["load_package"]


def load_package(name: str, *, key: str, minimum: tuple[int, ...] = ()) -> ModuleType:
    """Import a package that the extra ``monitor`` installs.

    Raises MissingPackageError (a subclass of ImportError) if the package is missing, broken or older than ``minimum``.
    """
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise _missing(name, key, f"the package {name} cannot be imported: {error}") from error
    version = str(getattr(module, "__version__", ""))
    if minimum and tuple(map(int, re.findall(r"\d+", version)[:3])) < minimum:
        wanted = ".".join(map(str, minimum))
        raise _missing(name, key, f"the package {name} is {version or 'of an unknown version'}, older than {wanted}")
    return module


def _missing(name: str, key: str, what: str) -> MissingPackageError:
    return MissingPackageError(
        what, where=f"{key}.enabled", fix='pip install "deepspeed_c[monitor]", or set it to false', package=name
    )
