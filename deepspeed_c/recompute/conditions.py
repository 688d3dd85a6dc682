"""The conditions of a forward, restored while it is run again: random numbers, autocast, the settings of an engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.recompute.active import current, entered
from deepspeed_c.recompute.rng import RandomStates
from deepspeed_c.recompute.statistics import statistics_stay

__all__ = ["Conditions"]


_replaying = threading.RLock()


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
        self._random = RandomStates(device, with_python=with_python)
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
        now = RandomStates(self._device, with_python=self._with_python)
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
