"""DeepSpeed's helpers around ``torch.compile``, under DeepSpeed's names (``deepspeed.runtime.compiler``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.compat.torch_version import is_compile_supported, required_torch_version

__all__ = ["compile", "compiled_autograd", "disable", "enable", "is_compile_supported", "is_compiling"]

Function = TypeVar("Function", bound=Callable[..., Any])


def is_compiling() -> bool:
    """Whether ``torch.compile`` is tracing the caller."""
    return torch.compiler.is_compiling()


def disable(func: Function) -> Function:
    """``func``, which no compiler traces: a graph ends before each call of it."""
    return torch.compiler.disable(func)


def enable(min_version: str | Callable[..., Any] | None = None) -> Any:
    """A decorator that lets a compiler trace a function only from torch ``min_version`` on ("2.7.0"). Without a
    version, as ``@enable`` or ``@enable()``, it changes nothing.
    """
    if callable(min_version):
        return min_version

    def decorate(func: Function) -> Function:
        is_new = min_version is None or required_torch_version(min_version=min_version)
        return func if is_new else disable(func)

    return decorate


@contextmanager
def compiled_autograd(enabled: bool, kwargs: dict[str, Any]) -> Iterator[None]:
    """Within it, backward passes are traced and compiled as they run, if ``enabled`` and if the caller is not traced
    itself. kwargs: arguments of ``torch.compile``; its backend is the accelerator's.
    """
    if not enabled or is_compiling():
        yield
        return
    from deepspeed_c.compile.torch_internals import compiling_backward  # importing torch's compiler takes seconds

    with compiling_backward(torch.compile(backend=get_accelerator().get_compile_backend(), **kwargs)):
        yield


def compile() -> Callable[..., Any]:
    """``torch.compile``"""
    return torch.compile
