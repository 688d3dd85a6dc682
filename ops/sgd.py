"""Stochastic gradient descent with momentum, as torch.optim.SGD defines it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from deepspeed_c.ops.optim import FusedOptimizer

__all__ = ["FusedSGD"]


class FusedSGD(FusedOptimizer):
    """SGD over parameters on any device; ``momentum_buffer`` is in ``state_dtype`` (by default the parameters'; int8:
    of 8 bits, on the host) and exists where momentum is not 0.

    State: ``step``, ``momentum_buffer``. torch.optim.SGD keeps no step; each of the two classes loads state dicts of
    the other.
    """

    kind = "sgd"
    config_types = ("sgd",)
    state_names: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    q8_dtypes: ClassVar[dict[str, torch.dtype]] = {"momentum_buffer": torch.int8}

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise self._error(
                f"nesterov with momentum {momentum} and dampening {dampening}",
                fix="nesterov needs momentum > 0 and dampening 0",
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, state_dtype=state_dtype)

    def names_of_states(self, group: int) -> tuple[str, ...]:
        return self.state_names if self.param_groups[group]["momentum"] != 0 else ()
