"""Puts functions of a test between autograd and the hooks that take gradients. They see or change each gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from deepspeed_c.zero.gradients.intake import GradientIntake
from deepspeed_c.zero.layout.unit import Slot

__all__ = ["Hook", "wrapped"]

Hook = Callable[[torch.Tensor], None]


@contextmanager
def wrapped(wrap: Callable[[Slot, Hook], Hook], *engines: Any) -> Iterator[None]:
    """Within the context autograd calls ``wrap(slot, hook)`` instead of each hook of ``engines``, and of each
    engine that is made meanwhile."""
    make = GradientIntake._hook
    before: list[tuple[dict[int, Hook], int, Hook]] = []
    for engine in engines:
        reducer = engine._optimizer.reducer
        for slot, handle in zip(reducer.slots, reducer.intake._handles, strict=True):
            hooks = slot.param._post_accumulate_grad_hooks
            before.append((hooks, handle.id, hooks[handle.id]))
            hooks[handle.id] = wrap(slot, hooks[handle.id])
    try:
        with mock.patch.object(GradientIntake, "_hook", lambda self, slot: wrap(slot, make(self, slot))):
            yield
    finally:
        for hooks, number, hook in before:
            if number in hooks:
                hooks[number] = hook
