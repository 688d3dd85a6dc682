"""Checkpoints: saving, loading and converting them.

The modules that save and load are imported on first use: a rank that starts has nothing to save yet.
"""

from __future__ import annotations

import importlib
from types import ModuleType

# Attributes that need no import of their own.
_MODULES = {
    "commit": "native.commit",
    "deepspeed": "formats.deepspeed",
    "model_folder": "formats.model_folder",
    "open": "open",
    "reader": "native.reader",
    "save": "native.save",
    "state": "native.state",
    "stream": "formats.stream",
}


def __getattr__(name: str) -> ModuleType:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = globals()[name] = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    return module
