"""The factor of a backward pass, and the number that the optimizer's step multiplies sums with."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TYPE_CHECKING

import torch

from deepspeed_c.zero.gradients.early import EarlyHooks
from deepspeed_c.zero.gradients.slots import SlotTable

if TYPE_CHECKING:
    from deepspeed_c.zero.layout.unit import Slot

__all__ = ["PassScaling"]


class PassScaling:
    """Multiplies gradients by the factor of their pass (1 / accumulation steps), once.

    If hooks of users see gradients, or callers do, early hooks multiply, so the factor is applied before those see
    them. Otherwise the first pass of a window leaves its factor to the optimizer's step (``window_factor``), and later
    passes are multiplied by their factor divided by it as they are collected.

    begin_before: called by an early hook with a parameter whose gradient arrives while no pass is running.
    """

    def __init__(
        self, slots: SlotTable, shown: Container[Slot], begin_before: Callable[[torch.nn.Parameter], None]
    ) -> None:
        self._slots = slots
        self._hooks = EarlyHooks(begin_before)
        self._hooks.watch(slot for slot in slots if slot in shown)
        self.window_factor: float | None = None
        """The factor that is left to the optimizer's step; None before the first pass of a window."""
        # The pass's factor divided by the window's. ``_early_ratio`` is for gradients that early hooks have multiplied
        # by the pass's factor already: 1 divided by the window's.
        self._ratio = self._early_ratio = 1.0

    def begin_pass(self, factor: float) -> None:
        hooks = self._hooks
        if factor != 1.0:
            with torch._C.DisableTorchFunctionSubclass():  # as in ``HiddenGradients.check``
                hooked = [slot for slot in self._slots if slot.param._backward_hooks]
            hooks.watch(hooked)
        if self.window_factor is None:
            self.window_factor = 1.0 if hooks else factor
        self._ratio = factor / self.window_factor
        self._early_ratio = 1.0 / self.window_factor
        hooks.begin_pass(factor)

    def end_pass(self) -> None:
        self._hooks.end_pass()

    def end_window(self) -> None:
        self.window_factor = None

    def is_early(self, slot: Slot) -> bool:
        """Whether an early hook multiplies the gradient of ``slot``."""
        return slot in self._hooks

    def ratio_of(self, slot: Slot) -> float:
        """The number by which a gradient that arrives is multiplied when it is collected."""
        return self._early_ratio if slot in self._hooks else self._ratio

    @property
    def is_plain(self) -> bool:
        """Whether all gradients of the pass are collected as they arrive."""
        return self._early_ratio == 1.0 and (self._ratio == 1.0 or len(self._hooks) == len(self._slots))

    def close(self) -> None:
        self._hooks.close()
