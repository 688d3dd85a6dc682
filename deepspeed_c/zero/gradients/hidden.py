"""Gradients that callers do not find in ``param.grad``, because the engine holds them as shards or in another dtype."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from deepspeed_c.errors import StateError
from deepspeed_c.zero.weights.grad_face import GRAD

if TYPE_CHECKING:
    from deepspeed_c.zero.layout.unit import Slot

__all__ = ["HiddenGradients"]


class HiddenGradients:
    """Finds gradients that callers have assigned to the parameters of ``slots``. The engine would not use them."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._slots = list(slots)

    def check(self, where: str) -> None:
        """Raises StateError if ``param.grad`` of a parameter is set between two passes. ``where``: the call that needs
        the gradients."""
        # Classes of parameters that notice reads answer torch functions, and torch asks them at each read of ``grad``.
        # A step would spend five times the time here.
        with torch._C.DisableTorchFunctionSubclass():
            assigned = next((slot for slot in self._slots if GRAD.__get__(slot.param) is not None), None)
        if assigned is not None:
            raise StateError(
                f"param.grad of {assigned.name} was assigned; this engine holds its gradients as shards, or in another dtype, and would not notice the assignment",
                where=where,
                fix="call deepspeed_c.utils.safe_set_full_grad(param, value) between backward and step instead",
            )
