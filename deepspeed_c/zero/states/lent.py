"""Replaced methods of a base optimizer. An engine uses the optimizer while callers still hold it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from types import MethodType
from typing import Any

import torch

__all__ = ["LentMethods"]


class LentMethods:
    """Until ``close``, ``base.name(...)`` calls ``methods[name]`` in place of the method of its class."""

    def __init__(self, base: torch.optim.Optimizer, methods: Mapping[str, Callable[..., Any]]) -> None:
        self._base, self._names = base, list(methods)
        for name, method in methods.items():
            _stand_in(base, name, method)

    def close(self) -> None:
        for name in self._names:
            self._base.__dict__.pop(name, None)
        self._names.clear()


def _stand_in(base: torch.optim.Optimizer, name: str, call: Callable[..., Any]) -> None:
    """Replaces a method by a bound method of the optimizer, because torch's schedules expect ``step`` to be one."""

    @wraps(getattr(type(base), name))
    def method(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    if hasattr(getattr(base, name), "_wrapped_by_lr_sched"):
        # A schedule was made before and has marked ``step``; it looks for this mark.
        method._wrapped_by_lr_sched = True
    setattr(base, name, MethodType(method, base))
