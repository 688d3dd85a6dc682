"""Random numbers of a cut model. Inside the cut region ranks draw different numbers, outside all draw alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deepspeed_c.inject.ranks import TensorRanks

__all__ = ["DropoutRegion"]


class DropoutRegion:
    """Random numbers inside the cut region: each rank draws different numbers. After it all draw alike again.

    Where the region begins, the rank's generator is seeded from the shared generator. So a region that is computed
    again draws the same numbers, no matter which code restores the generator, and a checkpoint needs only the shared
    state.
    """

    def __init__(self, ranks: TensorRanks) -> None:
        self._rank = ranks.rank
        self._shared: torch.Tensor | None = None

    def enter(self, device: torch.device, *, ends: bool = True) -> None:
        """ends: whether ``leave`` will follow. If a layer inside the region is computed again, the code that recomputes
        the layer restores the generator.
        """
        if self._shared is not None:
            return
        seed = int(torch.randint(2**62, (1,), device=device))
        if ends:
            self._shared = _generator(device).get_state()
        _generator(device).manual_seed(seed + self._rank)

    def leave(self, device: torch.device) -> None:
        if self._shared is not None:
            _generator(device).set_state(self._shared)
            self._shared = None

    @contextmanager
    def drawn_alike(self, device: torch.device) -> Iterator[None]:
        """Within this context, random numbers are the same on all ranks even inside the region."""
        if self._shared is None:
            yield
            return
        generator = _generator(device)
        own = generator.get_state()
        generator.set_state(self._shared)
        try:
            yield
        finally:
            self._shared = generator.get_state()
            generator.set_state(own)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return torch.get_device_module(device).default_generators[device.index]
