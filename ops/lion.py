"""Lion (arXiv 2302.06675, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from deepspeed_c.ops.optim import FusedOptimizer

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class FusedLion(FusedOptimizer):
    """Lion over parameters on any device, momentum in ``state_dtype`` (by default the parameters'; int8: of 8 bits, on
    the host).

    State: ``step``, ``exp_avg``.
    """

    kind = "lion"
    config_types = ("lion",)
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg",)
    q8_dtypes: ClassVar[dict[str, torch.dtype]] = {"exp_avg": torch.int8}
    option_names: ClassVar[tuple[str, ...]] = ("state_dtype", "set_grad_none")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        *,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        self.set_grad_none = set_grad_none
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, state_dtype=state_dtype)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        grad_scaler: Any = None,
    ) -> Any:
        """One step over ``p.grad``.

        The arguments after ``closure`` exist only for DeepSpeed's signature; use ``fused_step`` instead of them.
        """
        self._refuse_arguments(grads=grads, output_params=output_params, scale=scale, grad_norms=grad_norms)
        return super().step(closure)


class DeepSpeedCPULion(FusedOptimizer):
    """Lion with a float32 momentum (``fp32_optimizer_states=False``: in the parameters' dtype).

    State: ``step``, ``exp_avg``.
    """

    kind = "lion"
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg",)
    q8_dtypes: ClassVar[dict[str, torch.dtype]] = {"exp_avg": torch.int8}

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params,
            {"lr": lr, "betas": betas, "weight_decay": weight_decay},
            state_dtype=torch.float32 if fp32_optimizer_states else None,
        )
