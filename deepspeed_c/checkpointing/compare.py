"""Which module of a layer gives other values when the layer is run again (``"check": true``)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_flatten

from deepspeed_c import _C
from deepspeed_c.errors import RecomputeError

__all__ = ["Trace", "digest"]


def digest(tensor: torch.Tensor) -> int:
    """CRC-32C of a tensor's values."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not flat.nbytes:
        return 0
    return _C.crc32c((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))


def _digests(nest: Any) -> tuple[int, ...]:
    return tuple(digest(leaf) for leaf in tree_flatten(nest)[0] if torch.is_tensor(leaf))


class Trace:
    """What goes into and comes out of each module that a layer calls, in the order of the calls."""

    def __init__(self, label: str, module: torch.nn.Module | None) -> None:
        self._label, self._module = label, module
        self._steps: list[tuple[int, ...]] = []
        self._open: list[torch.nn.Module] = []
        self._n_repeated = 0
        self._is_repeating = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The layer's forward runs within."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        self._open = []
        try:
            yield
        finally:
            before.remove()
            after.remove()

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """It runs again within. Raises RecomputeError at the first value that differs."""
        self._is_repeating, self._n_repeated = True, 0
        with self.recording():
            yield

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        self._step(_digests(args))
        self._open.append(module)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        # Called once more, without an output, where the layer ends early or raises.
        if output is not None:
            self._step(_digests(output))
        if self._open and self._open[-1] is module:
            self._open.pop()

    def _step(self, found: tuple[int, ...]) -> None:
        if not self._is_repeating:
            self._steps.append(found)
            return
        i, self._n_repeated = self._n_repeated, self._n_repeated + 1
        if i < len(self._steps) and self._steps[i] != found:
            raise self.difference()

    def difference(self) -> RecomputeError:
        """The error for a value that differs now, in the module that runs."""
        return RecomputeError(
            f"{self._name()} computes other values than in forward",
            where=f"recomputation of {self._label}",
            fix="let it draw random numbers from torch's generators or those of get_cuda_rng_tracker() only (of Python's"
            ' with "python_random": true), and keep nothing between two calls that changes what it computes',
        )

    def _name(self) -> str:
        if not self._open:
            return "the layer itself"
        module = self._open[-1]
        names = {} if self._module is None else {id(m): name for name, m in self._module.named_modules()}
        name = names.get(id(module), "")
        return f"module {name!r} ({type(module).__name__})" if name else f"a {type(module).__name__}"
