"""The optimizer of an engine that only evaluates."""

from __future__ import annotations

from typing import Any

from deepspeed_c.zero.layout.unit import Slot, Unit

__all__ = ["NoOptimizer"]


class NoOptimizer:
    """Takes the place of ``ZeroOptimizer`` in an engine that does not train. It has no units, gets no gradients, and
    adds nothing to checkpoints.
    """

    units: tuple[Unit, ...] = ()
    slots: tuple[Slot, ...] = ()
    has_window = False
    face = optimizer = scaler = last_facts = None
    loss_scale = 1.0

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []

    def saved_options(self) -> dict[str, Any]:
        """Empty, so that a checkpoint says that there was no optimizer."""
        return {}

    def get_global_grad_norm(self) -> None:
        """None, as before the first step."""

    def zero_grad(self) -> None:
        """Does nothing: there are no gradients."""

    def keep_edits(self) -> None:
        """No masters follow the weights."""

    def note_weights(self) -> None:
        """Does nothing: there are no masters."""

    def refresh_fp32_params(self) -> None:
        """No masters follow the weights."""

    def settle(self, *, frees_copies: bool = False) -> None:
        """Does nothing: there are no updates ahead of a step."""

    def drop_spare_buffers(self) -> None:
        """Does nothing: there are no buffers of gradients."""

    def sums_of(self, unit: Unit) -> list[Any]:
        """Empty: there are no gradients."""
        return []

    def release(self) -> None:
        """Does nothing: parameters have no hooks."""

    def close(self) -> None:
        """Does nothing: there is nothing to release."""
