"""``torch.optim.Optimizer`` whose methods do not import ``torch._dynamo``, for programs that may never compile."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Optimizer"]


def _without_dynamo(name: str) -> Callable[..., Any]:
    """The method ``name`` of ``torch.optim.Optimizer``, which torch keeps from being traced by
    ``torch._disable_dynamo``.

    That decorator imports ``torch._dynamo`` at the first call, and with it ``torch.distributed.tensor``,
    ``torch.distributed.fsdp`` and sympy: 1.5 s of CPU, nearly as much as torch itself. Nothing can be traced before
    ``torch._dynamo`` is imported, so until then the undecorated function does the same.
    """
    decorated = getattr(torch.optim.Optimizer, name)
    plain = getattr(decorated, "__wrapped__", decorated)

    @functools.wraps(decorated)
    def method(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        call = decorated if "torch._dynamo" in sys.modules else plain
        return call(self, *args, **kwargs)

    return method


class Optimizer(torch.optim.Optimizer):
    """Base class of the optimizers of this package."""

    add_param_group = _without_dynamo("add_param_group")
    zero_grad = _without_dynamo("zero_grad")
    state_dict = _without_dynamo("state_dict")
    load_state_dict = _without_dynamo("load_state_dict")
