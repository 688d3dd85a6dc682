"""``zero_grad`` of a module whose gradients are stored by an engine and not in ``param.grad``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

__all__ = ["hook_zero_grad"]

_NAME = "zero_grad"

Drop = Callable[[list[torch.nn.Parameter]], None]


class _ZeroGrad:
    """Replaces the method in a module's ``__dict__``. It has one function for each engine, which drops that engine's
    gradients.

    Copies and pickles of the module have the method of their class again.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)
        self.drops: list[Drop] = []

    def __call__(self, set_to_none: bool = True) -> None:
        """Do what ``torch.nn.Module.zero_grad`` does, and drop the engines' gradients of the module in the present
        window."""
        module = self._module()
        type(module).zero_grad(module, set_to_none)
        params = list(module.parameters())
        for drop in self.drops:
            drop(params)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = self._module()
        copied = memo.get(id(module), module)
        return partial(type(copied).zero_grad, copied)

    def __reduce__(self) -> Any:
        module = self._module()
        return partial, (type(module).zero_grad, module)


def hook_zero_grad(model: torch.nn.Module, drop: Drop) -> Callable[[], None]:
    """Makes ``zero_grad()`` of ``model``, and of modules in it, call ``drop`` with the module's parameters. Returns a
    function that undoes this."""
    modules = list(model.modules())
    for module in modules:
        if not isinstance(module.__dict__.get(_NAME), _ZeroGrad):
            module.__dict__[_NAME] = _ZeroGrad(module)
        module.__dict__[_NAME].drops.append(drop)

    def stop() -> None:
        for module in modules:
            mine = module.__dict__.get(_NAME)
            if isinstance(mine, _ZeroGrad) and drop in mine.drops:
                mine.drops.remove(drop)
                if not mine.drops:
                    del module.__dict__[_NAME]
        modules.clear()

    return stop
