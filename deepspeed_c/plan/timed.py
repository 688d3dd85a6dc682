"""Calls of operators that another process can make again, with tensors of the same kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

__all__ = ["TensorLike", "TimedOperator", "Unknown", "timed_operator_of"]


@dataclass(frozen=True)
class TensorLike:
    """A tensor without its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        is_contiguous = self.stride == torch.empty(self.shape, device="meta").stride()
        laid_out = "" if is_contiguous else f":{','.join(map(str, self.stride))}"
        return f"{_short(self.dtype)}[{','.join(map(str, self.shape))}]{laid_out}"


@dataclass(frozen=True)
class Unknown:
    """An argument that cannot be made again, such as a generator of random numbers."""

    type_name: str


class TimedOperator(NamedTuple):
    """A call of an operator that a process of its own can make again."""

    name: str
    """As in ``aten.addmm.default``."""
    args: Any
    """Its arguments, with a TensorLike for each tensor."""
    kwargs: Any

    @property
    def signature(self) -> str:
        """The name and the arguments, in one line."""
        words = [_written(each) for each in self.args]
        words += [f"{key}={_written(each)}" for key, each in self.kwargs.items()]
        return f"{self.name}({', '.join(words)})"


def timed_operator_of(func: Any, args: Any, kwargs: Mapping[str, Any] | None = None) -> TimedOperator:
    """Describes a call of an operator of ``torch.ops``, as a dispatch mode sees it, with real or fake tensors."""
    return TimedOperator(str(func), tree_map(_described, tuple(args)), tree_map(_described, dict(kwargs or {})))


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorLike(tuple(value.shape), tuple(value.stride()), value.dtype)
    plain = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
    return value if value is None or isinstance(value, plain) else Unknown(type(value).__name__)


def _written(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_written, value))}]"
    return _short(value) if isinstance(value, torch.dtype) else str(value)


def _short(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    for long, short in (("complex", "c"), ("float", "f"), ("uint", "u"), ("int", "i"), ("bool", "b8")):
        name = name.replace(long, short)
    return name
