"""Stochastic gradient descent with momentum, as torch.optim.SGD defines it."""

from __future__ import annotations

from typing import Any, ClassVar

from deepspeed_c.ops.optim import FusedOptimizer

__all__ = ["FusedSGD"]


class FusedSGD(FusedOptimizer):
    """SGD over parameters on any device; ``momentum_buffer`` is in the parameters' dtype and exists where momentum is not 0.

    State: ``step``, ``momentum_buffer``. torch.optim.SGD keeps no step; its state dicts load here and the other way round.
    """

    kind = "sgd"
    state_names: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

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
        super().__init__(params, defaults)

    def names_of_states(self, group: int) -> tuple[str, ...]:
        return self.state_names if self.param_groups[group]["momentum"] != 0 else ()
