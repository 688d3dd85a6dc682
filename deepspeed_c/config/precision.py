"""Sections fp16, bf16, torch_autocast, data_types, amp and msamp: the number formats for storage and computation."""

from typing import Annotated, Literal

import msgspec

from .keys import DType, NonNeg, NonNegFloat, Positive, Section, acts, asks, tunes

__all__ = ["Amp", "Bf16", "DataTypes", "Fp16", "MsAmp", "TorchAutocast"]

ScalePower = Annotated[int, msgspec.Meta(ge=0, le=126)]


class Fp16(Section, kw_only=True):
    """fp16 weights and gradients with fp32 master weights and a loss scale."""

    enabled: Annotated[bool, acts("Train in fp16.", auto="fill")] = False
    auto_cast: Annotated[bool, acts("Cast floating-point inputs to fp16.")] = False
    loss_scale: Annotated[NonNegFloat, acts("Factor on the loss; 0 means a dynamic one.")] = 0.0
    initial_scale_power: Annotated[ScalePower, acts("The first dynamic scale is 2 to this power.")] = 16
    loss_scale_window: Annotated[NonNeg, acts("Steps without overflow before the scale doubles.")] = 1000
    hysteresis: Annotated[Positive, acts("Overflows until the scale halves.")] = 2
    consecutive_hysteresis: Annotated[bool, acts("A step without overflow refills the hysteresis.")] = False
    min_loss_scale: Annotated[NonNeg, acts("The dynamic scale never falls below this.")] = 1
    fp16_master_weights_and_grads: Annotated[bool, asks("Keep master weights in fp16.", "fp16_master")] = False

    @property
    def is_dynamic(self) -> bool:
        """Whether the loss scale adapts itself."""
        return self.loss_scale == 0

    @property
    def initial_scale(self) -> float:
        """The loss scale of the first step."""
        return float(2**self.initial_scale_power) if self.is_dynamic else self.loss_scale


class Bf16(Section, kw_only=True):
    """bf16 weights and gradients with fp32 master weights."""

    enabled: Annotated[bool, acts("Train in bf16.", auto="fill")] = False
    immediate_grad_update: Annotated[bool, acts("Add gradients to the fp32 accumulator as they appear.")] = False
    check_grad_overflow: Annotated[bool, acts("Skip a step whose gradients hold inf or NaN.")] = True
    bf16_master_weights_and_grads: Annotated[bool, acts("Keep master weights in bf16 (stages 1 to 3).")] = False
    bf16_optimizer_states: Annotated[bool, acts("Keep moments in bf16; needs bf16_master_weights_and_grads.")] = False


class TorchAutocast(Section, kw_only=True):
    """Forward under torch.autocast, weights in fp32."""

    enabled: Annotated[bool, acts("Run forward under torch.autocast.")] = False
    dtype: Annotated[DType, acts("The format that autocast computes in.")] = "bf16"
    lower_precision_safe_modules: Annotated[
        tuple[str, ...],
        acts("Classes (dotted names) whose gradients are reduced in that format too."),
    ] = (
        "torch.nn.modules.linear.Linear",
        "torch.nn.modules.conv.Conv1d",
        "torch.nn.modules.conv.Conv2d",
        "torch.nn.modules.conv.Conv3d",
    )


class DataTypes(Section, kw_only=True):
    """Formats that do not follow from fp16 or bf16."""

    grad_accum_dtype: Annotated[
        DType | None, acts("Format gradients are accumulated in; null: that of the weights.")
    ] = None
    param_dtype: Annotated[DType | None, acts("Format of the weights; must be that of fp16, bf16 or neither.")] = None
    buffer_dtype: Annotated[DType | None, acts("Format that buffers are cast to; null leaves them.")] = None
    keep_in_fp32_modules: Annotated[
        Literal["auto"] | tuple[str, ...],
        acts(
            "Buffers that stay fp32 under bf16 and fp16, also in zero.Init. A list has patterns of their names: * stands"
            " for any characters, and a pattern may match anywhere in a full name. auto: those that the model names in"
            " _keep_in_fp32_modules_strict and, under fp16, in _keep_in_fp32_modules. []: none. Parameters are cast.",
            auto="value",
        ),
    ] = "auto"


class Amp(Section, kw_only=True):
    """Apex AMP; the keys are the arguments of apex.amp.initialize."""

    enabled: Annotated[bool, asks("Train with Apex AMP.", "amp")] = False
    opt_level: Annotated[str, tunes("O0 to O3.", "amp")] = "O1"
    cast_model_type: Annotated[str | None, tunes("Format of the model.", "amp")] = None
    patch_torch_functions: Annotated[bool | None, tunes("Patch torch functions.", "amp")] = None
    keep_batchnorm_fp32: Annotated[bool | None, tunes("Keep batch norm in fp32.", "amp")] = None
    master_weights: Annotated[bool | None, tunes("Keep fp32 master weights.", "amp")] = None
    loss_scale: Annotated[float | str | None, tunes('A number or "dynamic".', "amp")] = None
    cast_model_outputs: Annotated[str | None, tunes("Format of the outputs.", "amp")] = None
    num_losses: Annotated[Positive, tunes("Losses with a scale of their own.", "amp")] = 1
    verbosity: Annotated[NonNeg, tunes("0 for silence.", "amp")] = 1
    min_loss_scale: Annotated[float | None, tunes("Floor of the dynamic scale.", "amp")] = None
    max_loss_scale: Annotated[float, tunes("Ceiling of the dynamic scale.", "amp")] = 2.0**24


class MsAmp(Section, kw_only=True):
    """MS-AMP fp8 training, as accelerate writes it."""

    enabled: Annotated[bool, asks("Train with MS-AMP.", "msamp")] = False
    opt_level: Annotated[str, tunes("O1 to O3.", "msamp")] = "O2"
