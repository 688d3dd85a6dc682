"""Compares a layer that is run again with its forward: the outputs of each layer once and, with ``"check": true``, the
values of each of its modules in each run.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_flatten

from deepspeed_c import _C
from deepspeed_c.errors import RecomputeError

__all__ = ["Outputs", "OutputsOnce", "Trace", "digest"]


def digest(tensor: torch.Tensor) -> int:
    """CRC-32C of a tensor's values."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not flat.nbytes:
        return 0
    return _C.crc32c((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))


def _digests(nest: Any) -> tuple[int, ...]:
    return tuple(digest(leaf) for leaf in tree_flatten(nest)[0] if torch.is_tensor(leaf))


def _difference(name: str, label: str) -> RecomputeError:
    return RecomputeError(
        f"{name} computes other values than in forward",
        where=f"recomputation of {label}",
        fix="let it draw random numbers from torch's generators or those of get_cuda_rng_tracker() only (of Python's"
        ' with "python_random": true), and keep nothing between two calls that changes what it computes',
    )


# Number of elements that a sketch processes at a time, so that it takes little memory.
_SKETCHED = 1 << 18
# Relative tolerance of a tensor's norm. Kernels that add in no fixed order differ by far less, and other random numbers
# by far more.
_TOLERANCE = 2e-3


def _sketch(tensor: torch.Tensor) -> torch.Tensor | None:
    """Projections of a tensor on two waves, and the sum of its squares: in float64, on the tensor's device. None for a
    tensor without data.
    """
    has_data = not (tensor.is_meta or isinstance(tensor, FakeTensor) or is_functorch_wrapped_tensor(tensor))
    if not has_data or tensor.layout != torch.strided:
        return None
    tensor = tensor.detach()
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    waves = torch.arange(min(flat.numel(), _SKETCHED), dtype=torch.float32, device=flat.device)
    waves = torch.stack([torch.cos(0.7 * waves), torch.sin(0.3 * waves + 1)])
    found = torch.zeros(3, dtype=torch.float64, device="cpu" if flat.device.type == "mps" else flat.device)
    for part in flat.split(_SKETCHED):
        part = part.float()
        found[:2] += (waves[:, : part.numel()] * part).sum(1)
        found[2] += part.square().sum()
    return found


def _is_alike(was: torch.Tensor | None, now: torch.Tensor | None) -> bool:
    if was is None or now is None:
        return True
    was, now = was.tolist(), now.tolist()
    if not all(map(math.isfinite, (*was, *now))):
        return True  # inf and NaN are reported elsewhere
    bound = _TOLERANCE * math.sqrt(max(was[2], now[2]))
    return all(abs(a - b) <= bound for a, b in zip(was[:2], now[:2], strict=True))


class Outputs:
    """A summary of the outputs of one call of a layer: a few numbers for each tensor.

    is_exact: every bit counts. compared: a function to call when the outputs are compared.
    """

    def __init__(self, label: str, *, is_exact: bool, compared: Callable[[], None] = lambda: None) -> None:
        self._label, self._is_exact, self._compared = label, is_exact, compared
        self._numbers: list[Any] | None = None

    @torch.no_grad()
    def _numbers_of(self, outputs: Any) -> list[Any]:
        tensors = [leaf for leaf in tree_flatten(outputs)[0] if torch.is_tensor(leaf)]
        return [digest(tensor) if self._is_exact else _sketch(tensor) for tensor in tensors]

    def note(self, outputs: Any) -> None:
        """Notes the outputs of the forward."""
        self._numbers = self._numbers_of(outputs)

    def compare(self, outputs: Any) -> None:
        """Compares the outputs of the recomputation. Raises RecomputeError where they differ."""
        if self._numbers is None:
            return
        self._compared()
        found = self._numbers_of(outputs)
        is_same = self._is_exact and found == self._numbers
        if not self._is_exact and len(found) == len(self._numbers):
            is_same = all(map(_is_alike, self._numbers, found))
        if not is_same:
            raise _difference("the layer", self._label)


class OutputsOnce:
    """The layers that have been compared. Each layer is compared once, at its first recomputation."""

    # The largest number of forwards of a layer whose outputs are noted while no backward comes.
    _MOST = 4

    def __init__(self) -> None:
        self._n_looked: dict[Any, int] = {}

    def of(self, key: Any, label: str) -> Outputs | None:
        """A summary to fill for a call of the layer ``key``; None where the call need not be compared."""
        n_looked = self._n_looked.get(key, 0)
        if n_looked >= self._MOST:
            return None
        self._n_looked[key] = n_looked + 1
        return Outputs(label, is_exact=False, compared=lambda: self._settle(key))

    def _settle(self, key: Any) -> None:
        self._n_looked[key] = self._MOST


class Trace:
    """The inputs and outputs of each module that a layer calls, in the order of the calls."""

    def __init__(self, label: str, module: torch.nn.Module | None) -> None:
        self._label, self._module = label, module
        self._steps: list[tuple[int, ...]] = []
        self._open: list[torch.nn.Module] = []
        self._n_repeated = 0
        self._is_repeating = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The context of the layer's forward."""
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
        """The context of the layer's second run. Raises RecomputeError at the first value that differs."""
        self._is_repeating, self._n_repeated = True, 0
        with self.recording():
            yield

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        self._step(_digests(args))
        self._open.append(module)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        # Called once more, without an output, if the layer ends early or raises.
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
        """The error for a value that differs in the second run, in the module that runs."""
        return _difference(self._name(), self._label)

    def _name(self) -> str:
        if not self._open:
            return "the layer itself"
        module = self._open[-1]
        names = {} if self._module is None else {id(m): name for name, m in self._module.named_modules()}
        name = names.get(id(module), "")
        return f"module {name!r} ({type(module).__name__})" if name else f"a {type(module).__name__}"
