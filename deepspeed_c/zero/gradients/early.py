"""Hooks on parameters that run before any hook of a user. They announce a backward pass before any other hook runs, and
scale the gradients for the hooks after them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from deepspeed_c.zero.layout.unit import Slot

__all__ = ["EarlyHooks"]


class EarlyHooks:
    """A tensor hook on each of some parameters, in front of all other hooks.

    If a gradient arrives while no pass is running, the hook calls ``begin`` with the parameter. The hook multiplies the
    gradient by the factor of the pass, so that hooks of users see the gradient of loss / accumulation steps, as in a
    hand-written loop.
    """

    def __init__(self, begin: Callable[[torch.nn.Parameter], None]) -> None:
        self._begin = begin
        self._handles: dict[Slot, torch.utils.hooks.RemovableHandle] = {}
        self._factor = 1.0
        self._is_in_backward = False

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._handles

    def __len__(self) -> int:
        return len(self._handles)

    def watch(self, slots: Iterable[Slot]) -> None:
        """Puts such a hook in front of all other hooks of the parameters of ``slots``."""
        for slot in slots:
            if slot not in self._handles:
                hooks = slot.param._backward_hooks or {}
                others = dict(hooks)
                hooks.clear()
                self._handles[slot] = slot.param.register_hook(self._hook(slot.param))
                # Autograd calls hooks in the order of insertion, and ignores ``move_to_end``.
                slot.param._backward_hooks.update(others)

    def _hook(self, param: torch.nn.Parameter) -> Callable[[torch.Tensor], torch.Tensor | None]:
        def hook(grad: torch.Tensor) -> torch.Tensor | None:
            if not self._is_in_backward:
                self._begin(param)
            return grad * self._factor if self._is_in_backward and self._factor != 1.0 else None

        return hook

    def begin_pass(self, factor: float) -> None:
        self._factor, self._is_in_backward = factor, True

    def end_pass(self) -> None:
        self._is_in_backward = False

    def close(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
