"""A function of the sender's own process as the receiver of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from deepspeed_c.transfer.target import WeightEntry, WeightsTarget

__all__ = ["CallTarget"]


class CallTarget(WeightsTarget):
    """Calls ``load(name, tensor)`` for each tensor."""

    def __init__(self, load: Callable[[str, torch.Tensor], Any], last: int | None) -> None:
        self._load, self._last = load, last

    def versions(self) -> list[int | None]:
        return [self._last]

    def put(self, version: int, entries: Sequence[WeightEntry], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self._load(name, tensor)
