"""DeepSpeed's optimizer classes, one for each stage and precision, so that ``isinstance`` works. ``ZeroOptimizer`` does
the work of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepspeed_c.config.zero import Zero
from deepspeed_c.ops.scope import declaration
from deepspeed_c.zero.layout.unit import Unit
from deepspeed_c.zero.states.attributes import ATTRIBUTES, OF_STAGE_3, OF_STAGES_1_AND_2, OF_STAGES_1_TO_3
from deepspeed_c.zero.states.entries import Entry, keep_parameters, must_see_pieces
from deepspeed_c.zero.states.optimizer import ZeroOptimizer

__all__ = [
    "BF16_Optimizer",
    "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3",
    "FP16_Optimizer",
    "FP16_UnfusedOptimizer",
    "PlainOptimizer",
    "ZeROOptimizer",
    "kind_of",
]


class ZeROOptimizer(ZeroOptimizer):
    """The optimizer of stages 1 to 3, which shard."""

    _attributes = ATTRIBUTES | OF_STAGES_1_TO_3


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Stages 1 and 2."""

    _attributes = ATTRIBUTES | OF_STAGES_1_TO_3 | OF_STAGES_1_AND_2


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """Stage 3."""

    _attributes = ATTRIBUTES | OF_STAGES_1_TO_3 | OF_STAGE_3


class BF16_Optimizer(ZeROOptimizer):
    """Stage 1 in bf16 if gradients are accumulated in fp32 (``grad_accum_dtype``) and no states are offloaded to the
    host."""


class FP16_Optimizer(ZeroOptimizer):
    """Stage 0 in fp16 or bf16, over an optimizer that DeepSpeed has in a fused version."""


class FP16_UnfusedOptimizer(ZeroOptimizer):
    """Stage 0 in fp16 or bf16, over any other optimizer."""


class PlainOptimizer(ZeroOptimizer):
    """Stage 0 in fp32. Callers hold the base optimizer itself, and its groups keep the model's own parameters, as in
    plain torch.

    Some methods of the base would not work: the ``.grad`` of its parameters is empty, and its states may be offloaded.
    Methods of this class replace those methods (``lent.py``).
    """

    @property
    def face(self) -> torch.optim.Optimizer:
        return self.optimizer

    def _point_base(self, base: torch.optim.Optimizer, units: list[Unit], *, allow_untested: bool) -> list[Entry]:
        # Raises if the base may not get parts of parameters.
        must_see_pieces(base, is_sharded=any(unit.has_parts for unit in units), allow_untested=allow_untested)
        return keep_parameters(base, units)

    def _methods_for_caller(self) -> dict[str, Callable[..., Any]]:
        return {
            "step": self._step_for_caller,
            "zero_grad": self.zero_grad,
            "add_param_group": self.add_param_group,
            "state_dict": self._state_dict_for_caller,
            "load_state_dict": self._load_for_caller,
        }

    def _step_for_caller(self, closure: Callable[[], Any] | None = None) -> None:
        # Torch's schedules warn if they step before their optimizer does. They recognise the optimizer's first step by
        # this mark.
        self._base._opt_called = True
        self.step(closure)

    def _state_dict_for_caller(self) -> dict[str, Any]:
        self._require_in_memory("state_dict")
        return type(self._base).state_dict(self._base)

    def _load_for_caller(self, state_dict: dict[str, Any]) -> None:
        self._require_in_memory("load_state_dict")
        type(self._base).load_state_dict(self._base, state_dict)
        self._begin_window()


def kind_of(
    zero: Zero, base: torch.optim.Optimizer, units: Sequence[Unit], *, is_16bit: bool, gathers_fp32: bool
) -> type[ZeroOptimizer]:
    """The class that stands for DeepSpeed's with this configuration and base. ``units``: the units of trained
    parameters. ``is_16bit``: training is in fp16 or bf16. ``gathers_fp32``: it is in bf16 and ``grad_accum_dtype`` is
    fp32."""
    if zero.sharding.parameters:
        return DeepSpeedZeroOptimizer_Stage3
    if zero.sharding.optimizer:
        on_host = zero.offload_optimizer.device == "cpu"
        is_bf16s = gathers_fp32 and not on_host and not zero.sharding.gradients
        return BF16_Optimizer if is_bf16s else DeepSpeedZeroOptimizer
    if is_16bit:
        return FP16_Optimizer if declaration(base).is_fused_in_deepspeed else FP16_UnfusedOptimizer
    # DeepSpeed has no class for states that are offloaded here, nor for 8-bit states, whose scales belong to whole
    # buckets.
    is_elsewhere = any(unit.states.label != "device" for unit in units)
    return ZeroOptimizer if is_elsewhere or declaration(base).is_quantized else PlainOptimizer
