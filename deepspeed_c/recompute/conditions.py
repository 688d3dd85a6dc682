"""The conditions of a forward, restored while it is run again: random numbers, autocast, the settings of an engine."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.recompute.active import current, entered
from deepspeed_c.recompute.rng import device_state, get_cuda_rng_tracker, restore_device_state
from deepspeed_c.recompute.statistics import statistics_stay

__all__ = ["Conditions"]


_replaying = threading.RLock()


class _RandomStates:
    """States of all random generators that a layer may draw from.

    with_python: includes Python's ``random``.
    """

    __slots__ = ("_cpu", "_device", "_python", "_tracker")

    def __init__(self, device: torch.device | None, *, with_python: bool) -> None:
        self._cpu = torch.get_rng_state()
        self._device = None if device is None else (device, device_state(device))
        self._tracker = get_cuda_rng_tracker().get_states()
        self._python = random.getstate() if with_python else None

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._device is not None:
            restore_device_state(self._device[1], self._device[0])
        get_cuda_rng_tracker().set_states(self._tracker)
        if self._python is not None:
            random.setstate(self._python)


def _accelerator() -> torch.device | None:
    device = torch.device(get_accelerator().current_device_name())
    return None if device.type == "cpu" else device


def _autocast_of(device_type: str) -> tuple[str, bool, torch.dtype]:
    return device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


class Conditions:
    """The conditions at the time of construction."""

    __slots__ = ("_active", "_autocasts", "_caches", "_device", "_random", "_with_python")

    def __init__(self, *, with_python: bool = False) -> None:
        device = self._device = _accelerator()
        self._active = current()
        self._with_python = with_python
        self._random = _RandomStates(device, with_python=with_python)
        types = ("cpu",) if device is None else ("cpu", device.type)
        self._autocasts = [_autocast_of(device_type) for device_type in types]
        self._caches = torch.is_autocast_cache_enabled()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Runs the body of the context under these conditions. Afterwards all generators continue from their states
        before it, and running statistics of norms keep the values that the forward left.

        Generators belong to the process, so one thread at a time uses this.
        """
        with _replaying:
            yield from self._replay()

    def _replay(self) -> Iterator[None]:
        now = _RandomStates(self._device, with_python=self._with_python)
        with ExitStack() as stack:
            stack.callback(now.restore)
            self._random.restore()
            stack.enter_context(entered(self._active))
            stack.enter_context(statistics_stay())
            for autocast in self._autocasts:
                if autocast != _autocast_of(autocast[0]):
                    stack.enter_context(self._autocast(*autocast))
            yield

    def _autocast(self, device_type: str, is_enabled: bool, dtype: torch.dtype) -> Any:
        return torch.autocast(device_type, dtype=dtype, enabled=is_enabled, cache_enabled=self._caches)
