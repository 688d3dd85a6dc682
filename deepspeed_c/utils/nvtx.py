"""Named ranges in a profiler's timeline around a function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from deepspeed_c.accelerator import get_accelerator

__all__ = ["instrument_w_nvtx"]


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func`` within a range of its name, for profilers that listen (NVTX on CUDA); plain while ``torch.compile``
    traces it.
    """

    @functools.wraps(func)
    def instrumented(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        accelerator = get_accelerator()
        accelerator.range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            accelerator.range_pop()

    return instrumented
