"""Adagrad (Duchi, Hazan and Singer 2011)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from deepspeed_c.ops.optim import FusedOptimizer

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(FusedOptimizer):
    """Adagrad with a float32 sum. With ``fp32_optimizer_states=False`` the sum has the parameters' dtype, and with
    ``state_dtype`` the given dtype.

    State: ``step``, ``sum``, as in torch.optim.Adagrad. Each of the two classes loads state dicts of the other, with
    ``lr_decay`` and ``maximize``.
    """

    kind = "adagrad"
    config_types = ("adagrad",)
    q8_refusal: ClassVar[str] = (
        "Adagrad's sum only grows, and stops once a square is less than half a code's step of it"
    )
    state_names: ClassVar[tuple[str, ...]] = ("sum",)

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        *,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        if amsgrad:
            raise self._error("there is no AMSGrad variant of Adagrad", fix="set amsgrad=False")
        super().__init__(
            model_params,
            {
                "lr": lr,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                # torch.optim.Adagrad reads these options from a state dict that it loads.
                "lr_decay": 0.0,
                "initial_accumulator_value": 0.0,
                "maximize": False,
            },
            state_dtype=state_dtype if state_dtype is not None or not fp32_optimizer_states else torch.float32,
        )
