"""Adam (arXiv 1412.6980) and AdamW (arXiv 1711.05101)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from deepspeed_c.ops.optim import FusedOptimizer

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class _Adam(FusedOptimizer):
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    q8_dtypes: ClassVar[dict[str, torch.dtype]] = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
    option_names: ClassVar[tuple[str, ...]] = ("state_dtype", "adam_w_mode")

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        bias_correction: bool,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        amsgrad: bool,
        adam_w_mode: bool,
        state_dtype: torch.dtype | None,
    ) -> None:
        self.adam_w_mode = bool(adam_w_mode)
        if amsgrad:
            raise self._error("the AMSGrad variant is not supported", fix="set amsgrad=False")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": False,
        }
        super().__init__(params, defaults, state_dtype=state_dtype)

    @property
    def kind(self) -> str:
        return "adamw" if self.adam_w_mode else "adam"


class FusedAdam(_Adam):
    """Adam or AdamW over parameters on any device, moments in ``state_dtype`` (by default the parameters'; int8: of 8
    bits, on the host).

    ``adam_w_mode`` chooses decoupled weight decay (AdamW) or L2 regularisation (Adam). ``set_grad_none`` is the default
    of ``zero_grad``'s ``set_to_none``.

    State: ``step``, ``exp_avg``, ``exp_avg_sq``, as in torch.optim.Adam, whose state dicts load here and the other way
    round.
    """

    option_names: ClassVar[tuple[str, ...]] = ("state_dtype", "adam_w_mode", "set_grad_none")
    is_fused_in_deepspeed = True
    config_types = ("adam", "adamw")

    @classmethod
    def from_config(
        cls, kind: str, groups: list[dict[str, Any]], params: dict[str, Any], names: Mapping[int, str]
    ) -> Any:
        """Uses torch's own class, with torch's states, if ``torch_adam`` is set."""
        if kind == "adamw":
            params["adam_w_mode"] = True
        if not params.pop("torch_adam", False):
            return cls(groups, **params)
        params.pop("state_dtype", None)
        return (torch.optim.AdamW if params.pop("adam_w_mode", True) else torch.optim.Adam)(groups, **params)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        *,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        self.set_grad_none = set_grad_none
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            adam_w_mode=adam_w_mode,
            state_dtype=state_dtype,
        )

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


class DeepSpeedCPUAdam(_Adam):
    """Adam or AdamW with moments in float32, for parameters of any dtype (``fp32_optimizer_states=False``: in the
    parameters' dtype).

    State: ``step``, ``exp_avg``, ``exp_avg_sq``, as in torch.optim.Adam, whose state dicts load here and the other way
    round.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            adam_w_mode=adamw_mode,
            state_dtype=torch.float32 if fp32_optimizer_states else None,
        )
