"""The one place that gives a module of a user's another ``forward``, or a model another ``loss_function``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

__all__ = ["swap_forward", "swap_loss"]

_OWN_LOSS = "_loss_function"  # transformers' property ``loss_function`` reads this attribute first


def swap_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Let ``module`` run ``forward`` instead of its own from now on, hooks included. Returns the function that undoes
    it; swaps of one module are undone the last one first."""
    undo = partial(_put_back, module, "forward", vars(module).get("forward"))
    module.forward = forward
    return undo


def swap_loss(model: torch.nn.Module, loss: Callable[..., Any]) -> Callable[[], None]:
    """Let ``model``, a model of transformers, compute its loss by ``loss`` from now on. Returns as ``swap_forward``."""
    undo = partial(_put_back, model, _OWN_LOSS, vars(model).get(_OWN_LOSS))
    model.loss_function = loss
    return undo


def _put_back(module: torch.nn.Module, name: str, before: Any) -> None:
    if before is None:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = before
