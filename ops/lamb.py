"""LAMB (arXiv 1904.00962, algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed_c.ops.optim import NormedOptimizer
from deepspeed_c.ops.sums import N_LIMBS, exact_squares

__all__ = ["FusedLamb"]


class FusedLamb(NormedOptimizer):
    """LAMB over parameters on any device, moments in ``state_dtype`` (by default the parameters').

    The trust ratio of each parameter is kept within ``min_coeff`` and ``max_coeff``. ``max_grad_norm`` takes effect
    where ``step`` is given ``grad_norms``. State: ``step``, ``exp_avg``, ``exp_avg_sq``. ``eps_inside_sqrt`` is
    refused: eps is added to the root, as in the paper.
    """

    kind = "lamb"
    config_types = ("lamb",)
    q8_refusal: ClassVar[str] = (
        "LAMB makes its update from the states as they are stored, so that it would be rounded with them"
    )
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        *,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        if amsgrad:
            raise self._error("there is no AMSGrad variant of LAMB", fix="set amsgrad=False")
        if eps_inside_sqrt:
            raise self._error(
                "eps_inside_sqrt is not supported", fix="set eps_inside_sqrt=False; eps is added to the root"
            )
        self._ratios: list[Tensor] = []
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults, state_dtype=state_dtype)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._ratios = []

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: float = 1.0,
        grad_norms: Any = None,
    ) -> Any:
        """One step.

        ``grads`` (tensors if there is one group, otherwise a list of lists) replace ``p.grad`` and are divided by
        ``scale``. ``output_params``, in the same form, receive the updated weights. ``grad_norms`` (one a group) are
        norms of the scaled gradients: with the group's ``max_grad_norm`` they clip.
        """
        self._ratios = []
        if grads is None and output_params is None and grad_norms is None and scale == 1.0:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = self._by_group(grads) or [[p.grad for p in group["params"]] for group in self.param_groups]
        copies = self._by_group(output_params)
        self.begin_step(
            p for group, some in zip(self.param_groups, given) for p, g in zip(group["params"], some) if g is not None
        )
        for index, (group, some) in enumerate(zip(self.param_groups, given)):
            chosen = [j for j, g in enumerate(some) if g is not None]
            self.step_tensors(
                index,
                [group["params"][j] for j in chosen],
                [some[j] for j in chosen],
                [copies[index][j] for j in chosen] if copies else [],
                1.0 / self._divisor(group, float(scale), None if grad_norms is None else grad_norms[index]),
            )
        return loss

    def _by_group(self, tensors: Any) -> list[list[Any]] | None:
        if tensors is None:
            return None
        tensors = list(tensors)
        is_flat = not tensors or tensors[0] is None or torch.is_tensor(tensors[0])
        lists = [tensors] if is_flat else [list(some) for some in tensors]
        expected = [len(group["params"]) for group in self.param_groups]
        if [len(some) for some in lists] != expected:
            raise self._error(
                f"lists of {[len(some) for some in lists]} tensors for groups of {expected} parameters",
                fix="pass one tensor a parameter, in one list a group",
            )
        return lists

    @staticmethod
    def _divisor(group: dict[str, Any], scale: float, grad_norm: Any) -> float:
        limit = float(group["max_grad_norm"])
        if limit <= 0.0 or grad_norm is None:
            return scale
        excess = (float(grad_norm) / scale + 1e-6) / limit
        return scale * max(1.0, excess)

    def get_lamb_coeffs(self) -> list[float]:
        """The trust ratios of the parameters that the last step updated, in the order of the update."""
        return [ratio for ratios in self._ratios for ratio in ratios.tolist()]

    def begin_step(self, params: Iterable[Tensor] | None = None) -> None:
        self._ratios = []
        super().begin_step(params)

    @torch.no_grad()
    def exact_norms(
        self,
        group: int,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        copies: Sequence[Tensor | None] = (),
        grad_scale: float = 1.0,
    ) -> Tensor:
        """As :meth:`norms`, with sums that do not depend on how parameters are cut into pieces.

        Returns int64 [n, 2, ``ops.sums.N_LIMBS``], the limbs of both sums. A sum with an element that is not finite has
        a negative limb.
        """
        self.norms(group, params, grads, copies, grad_scale)
        rows = [[param, self._update_of(group, param)] for param in params]
        limbs = [[exact_squares([tensor.reshape(-1)]) for tensor in row] for row in rows]
        table = torch.tensor([[each.tolist() for each in row] for row in limbs], dtype=torch.int64)
        table = table.view(len(rows), 2, N_LIMBS + 1)
        return torch.where(table[..., -1:] > 0, -(2**52), table[..., :-1])

    def _update_of(self, group: int, param: Tensor) -> Tensor:
        """The update of a parameter before its ratio, float32, from moments that :meth:`norms` has updated. Each
        operation rounds by itself, so an element has the same bits in every piece."""
        options, state = self.param_groups[group], self.state[param]
        (step,) = self._opened([param])
        beta1, beta2 = options["betas"]
        correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if options["bias_correction"] else (1.0, 1.0)
        root = state["exp_avg_sq"].float().sqrt().add_(options["eps"] * math.sqrt(correction2))
        update = state["exp_avg"].float().mul(math.sqrt(correction2) / correction1).div_(root)
        return update.add_(param.float().mul(options["weight_decay"]))

    def _note_ratios(self, ratios: Tensor) -> None:
        self._ratios.append(ratios)
