"""Attributes by dotted paths, as ``deepspeed.compression.helper`` offers them."""

from __future__ import annotations

from functools import reduce
from typing import Any

__all__ = ["recursive_getattr", "recursive_setattr"]


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return the object at the path ``a.b.0.c`` from ``model``. Raises AttributeError."""
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set the attribute at the path to ``module``. All parts of the path except the last must exist. Raises
    AttributeError."""
    *path, last = module_name.split(".")
    setattr(reduce(getattr, path, model), last, module)
