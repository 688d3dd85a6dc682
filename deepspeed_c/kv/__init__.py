"""Keys and values of generation in blocks: a cache for models of transformers, and attention over it."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["attention", "cache", "ragged"]


def __getattr__(name: str) -> Any:
    """The modules that import transformers, when they are used first."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
