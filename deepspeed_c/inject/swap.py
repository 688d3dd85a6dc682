"""The one place that gives a user's module another ``forward`` or class, or a model another ``loss_function``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

__all__ = ["swap_class", "swap_forward", "swap_loss"]

_OWN_LOSS = "_loss_function"  # transformers' property ``loss_function`` reads this attribute first


def swap_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """From now on ``module`` runs ``forward`` instead of its own forward, with its hooks. Returns the function that
    undoes the swap. Several swaps of one module must be undone in reverse order.
    """
    undo = partial(_put_back, module, "forward", vars(module).get("forward"))
    module.forward = forward
    return undo


def swap_class(module: torch.nn.Module, cls: type[torch.nn.Module]) -> None:
    """Makes ``module`` a ``cls``, in place: hooks, and all references to the module, stay. The caller sets the
    attributes that the new class needs, and swaps again to undo it.
    """
    module.__class__ = cls


def swap_loss(model: torch.nn.Module, loss: Callable[..., Any]) -> Callable[[], None]:
    """From now on ``model``, a model of transformers, computes its loss by ``loss``. Returns the function that undoes
    it.
    """
    undo = partial(_put_back, model, _OWN_LOSS, vars(model).get(_OWN_LOSS))
    model.loss_function = loss
    return undo


def _put_back(module: torch.nn.Module, name: str, before: Any) -> None:
    if before is None:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = before
