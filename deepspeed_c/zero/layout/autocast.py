"""The names of ``deepspeed.runtime.torch_autocast``: the dtype of autocast, and of the gradients of each parameter
under it. An engine with the section ``torch_autocast`` calls ``note_autocast``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from deepspeed_c.config.precision import TorchAutocast

__all__ = [
    "get_all_comm_dtypes",
    "get_autocast_dtype",
    "get_comm_dtype",
    "get_default_autocast_lower_precision_modules",
    "has_comm_dtype",
    "is_autocast_initialized",
    "note_autocast",
]

_DTYPE_OF_GRADIENT = "comm_dtype"  # DeepSpeed's name for the attribute of a parameter
_noted: list[torch.dtype] = []


def note_autocast(dtype: torch.dtype, params: Iterable[torch.nn.Parameter]) -> None:
    """Record that an engine computes in ``dtype`` by autocast, and may reduce the gradients of these parameters in
    it."""
    _noted[:] = [dtype]
    for param in params:
        param.__dict__[_DTYPE_OF_GRADIENT] = dtype


def is_autocast_initialized() -> bool:
    """Whether this process has made an engine with autocast."""
    return bool(_noted)


def get_autocast_dtype() -> torch.dtype | None:
    """The dtype of autocast of the last engine; None without one."""
    return _noted[0] if _noted else None


def has_comm_dtype(param: torch.nn.Parameter) -> bool:
    """Whether the gradient of ``param`` may be reduced in the dtype of autocast."""
    return hasattr(param, _DTYPE_OF_GRADIENT)


def get_comm_dtype(param: torch.nn.Parameter) -> torch.dtype:
    """The dtype in which the gradient of ``param`` may be reduced."""
    return getattr(param, _DTYPE_OF_GRADIENT, param.dtype)


def get_all_comm_dtypes(params: Iterable[torch.nn.Parameter]) -> set[torch.dtype]:
    """The dtypes in which the gradients of these parameters may be reduced."""
    return {get_comm_dtype(param) for param in params}


def get_default_autocast_lower_precision_modules() -> list[str]:
    """The classes whose gradients may be reduced in the dtype of autocast, if the configuration names none."""
    return list(TorchAutocast().lower_precision_safe_modules)
