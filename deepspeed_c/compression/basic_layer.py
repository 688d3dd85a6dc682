"""Layers whose weight and input are quantized in the forward: linear layers, also cut over tensor-parallel ranks, and
embeddings. Linear layers that are not cut may also be pruned.

A user's module becomes such a layer by a change of its class (``compress``), so its parameters, names, hooks and ties
stay, and plain state dicts fit. The gradient passes the rounding unchanged (straight-through estimator).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed_c.compression.levels import Levels, grid_of, on_grid, quantize_rows
from deepspeed_c.compression.pruning import Kind, Pruner
from deepspeed_c.compression.steps import AppliedSteps
from deepspeed_c.errors import ModelError
from deepspeed_c.inject.layers import LinearAllreduce, LinearLayer
from deepspeed_c.inject.swap import swap_class

__all__ = [
    "ActivationRule",
    "ColumnParallelLinear_Compress",
    "CompressedLayer",
    "Embedding_Compress",
    "LinearLayer_Compress",
    "QuantAct",
    "Quantization",
    "RowParallelLinear_Compress",
    "WeightRule",
    "check_finite",
    "compressed_layers",
    "quantize_weight",
]

# Seeds of stochastic rounding are this constant with the step above the layer's number.
_SEED = 0x6A09_E667_0000_0000


@dataclass(frozen=True, kw_only=True)
class WeightRule:
    """How a weight is quantized."""

    bits: int
    """8 or 4."""
    n_groups: int
    """Number of equal groups of consecutive elements of this rank's part; each has one scale."""
    is_symmetric: bool
    levels: Levels = "deepspeed"
    is_stochastic: bool
    first_step: int
    """Number of applied steps before it starts."""
    index: int
    """Number of the weight in the model: another stream of random numbers for each. All ranks count alike."""
    offset: int = 0
    """Position of the part's first element among the random numbers of the whole weight."""

    def seed(self, step: int) -> int:
        """The seed of the weight's random numbers at a step: the same on all ranks and at each ZeRO stage."""
        return _SEED ^ (step << 24 | self.index)


@dataclass(frozen=True, kw_only=True)
class ActivationRule:
    """How the input of a linear layer is quantized."""

    bits: int
    """8 or 4."""
    is_symmetric: bool
    levels: Levels = "deepspeed"
    is_static: bool
    """Whether the range is a running range of all inputs, not the range of each row."""
    first_step: int
    """Number of applied steps before it starts."""


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """The rules of one layer."""

    name: str
    """The layer's name in the model."""
    plain_class: type[nn.Module]
    """The class that the module had."""
    steps: AppliedSteps
    weight: WeightRule | None = None
    activations: ActivationRule | None = None
    pruners: tuple[Pruner, ...] = ()
    """One for each technique that prunes the layer."""

    @property
    def is_empty(self) -> bool:
        return self.weight is None and self.activations is None and not self.pruners


def scale_type_of(weight: Tensor) -> str:
    """The dtype of scales: the weight's, as files with quantized weights have it."""
    return str(weight.dtype).removeprefix("torch.")


def check_finite(weight: Tensor, name: str, fix: str) -> None:
    """Raises ModelError if the weight of layer ``name`` has NaN or inf. fix: what to do about it."""
    if not weight.detach().isfinite().all():
        what = "the weight has NaN or inf, so that no scale and no order fits it"
        raise ModelError(what, where=f"{name}.weight", fix=fix)


def quantize_weight(weight: Tensor, rule: WeightRule, seed: int | None = None) -> Tensor:
    """The quantized weight in its own shape and dtype. seed: None rounds to the nearest."""
    if weight.numel() == 0:
        return weight
    return quantize_rows(
        weight.reshape(rule.n_groups, -1),
        rule.bits,
        levels=rule.levels,
        is_symmetric=rule.is_symmetric,
        scale_type=scale_type_of(weight),
        seed=seed,
        offset=rule.offset,
    ).view(weight.shape)


def _in_range(x: Tensor, limits: Tensor, bits: int, levels: Levels, is_symmetric: bool) -> Tensor:
    """x [...] quantized in the range ``limits`` [2]. A range without a width leaves x as it is."""
    if x.numel() == 0:
        return x
    low, high = limits.view(2, 1, 1)
    grid = grid_of(low, high, bits, levels=levels, is_symmetric=is_symmetric)
    has_width = torch.maximum(low.abs(), high.abs()) > 0 if is_symmetric else low < high
    return torch.where(has_width.view(()), on_grid(x.reshape(1, -1), grid).view(x.shape), x)


class QuantAct(nn.Module):
    """Quantizes activations in a running range, which training forwards move and which is saved as ``x_min_max`` [2]."""

    def __init__(
        self, act_range_momentum: float = 0.95, quant_mode: str = "symmetric", *, levels: Levels = "deepspeed"
    ) -> None:
        """act_range_momentum: weight of the range before, at each update. quant_mode: "symmetric" or "asymmetric".
        levels: "deepspeed" or "compressed-tensors"."""
        super().__init__()
        self.act_range_momentum, self.quant_mode, self.levels = act_range_momentum, quant_mode, levels
        self.register_buffer("x_min_max", torch.zeros(2))

    def forward(self, x: Tensor, num_bits: int, *args: Any) -> Tensor:
        """x in any shape, quantized to ``num_bits`` (8 or 4). Further arguments are ignored, as in DeepSpeed."""
        # A recomputed forward, which runs within a backward, has moved the range before.
        if self.training and x.numel() and torch._C._current_graph_task_id() == -1:
            self._move(x.detach())
        return _in_range(x, self.x_min_max, num_bits, self.levels, self.quant_mode == "symmetric")

    def _move(self, x: Tensor) -> None:
        new, old, kept = torch.stack(torch.aminmax(x)).to(self.x_min_max), self.x_min_max, self.act_range_momentum
        moved = torch.where(old[0] == old[1], new, old * kept + new * (1 - kept))
        # A step that overflows is skipped, and must not move the range either.
        old.copy_(torch.where(new.isfinite().all(), moved, old))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """A state dict of the plain model has no range."""
        state_dict.setdefault(f"{prefix}x_min_max", self.x_min_max)
        super()._load_from_state_dict(state_dict, prefix, *args)


class CompressedLayer(nn.Module):
    """The part that all compressed layers share. A layer that was made by hand has no rules, and computes as the plain
    layer does."""

    quantization: Quantization | None = None

    @classmethod
    def take_over(cls, module: nn.Module, quantization: Quantization) -> None:
        """Make ``module`` a layer of this class, in place."""
        swap_class(module, cls)
        module._begin(quantization)

    def _begin(self, quantization: Quantization) -> None:
        self.quantization = quantization
        rule = quantization.activations
        if rule is not None and rule.is_static:
            mode = "symmetric" if rule.is_symmetric else "asymmetric"
            act = QuantAct(quant_mode=mode, levels=rule.levels)
            self.activation_quantizer = act.to(self.weight.device).train(self.training)

    def keep_weight(self) -> None:
        """Drop the weight's rule. Without another rule the module gets its own class back."""
        self._keep(replace(self.quantization, weight=None))

    def _keep(self, rules: Quantization) -> None:
        self.quantization = rules
        if rules.is_empty:
            del self.quantization
            swap_class(self, rules.plain_class)

    @property
    def weight_quantization_enabled(self) -> bool:
        """Whether the schedule has reached the weight's quantization."""
        rules = self.quantization
        return rules is not None and rules.weight is not None and rules.steps.count >= rules.weight.first_step

    @property
    def activation_quantization_enabled(self) -> bool:
        """Whether the schedule has reached the input's quantization."""
        rules = self.quantization
        return rules is not None and rules.activations is not None and rules.steps.count >= rules.activations.first_step

    def _seed(self) -> int | None:
        rules = self.quantization
        is_drawn = rules.weight.is_stochastic and self.training
        return rules.weight.seed(rules.steps.count) if is_drawn else None

    def _quantized(self, weight: Tensor) -> Tensor:
        if not self.weight_quantization_enabled:
            return weight
        return quantize_weight(weight, self.quantization.weight, self._seed())

    def _activations(self, x: Tensor) -> Tensor:
        """The input [..., n_features]: one range for each row, or the running range."""
        if not self.activation_quantization_enabled or x.shape[-1] == 0:
            return x
        rule = self.quantization.activations
        if rule.is_static:
            return self.activation_quantizer(x, rule.bits)
        return quantize_rows(x, rule.bits, levels=rule.levels, is_symmetric=rule.is_symmetric)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(self._activations(x), self._quantized(weight), bias)

    def extra_repr(self) -> str:
        rules = self.quantization
        weight = None if rules is None or rules.weight is None else rules.weight.bits
        activations = None if rules is None or rules.activations is None else rules.activations.bits
        return f"{super().extra_repr()}, weight_bits={weight}, activation_bits={activations}"


class LinearLayer_Compress(CompressedLayer, nn.Linear):
    """``torch.nn.Linear`` with a pruned and quantized weight and a quantized input."""

    def _begin(self, quantization: Quantization) -> None:
        super()._begin(quantization)
        for pruner in quantization.pruners:
            pruner.begin(self)

    def forward(self, x: Tensor) -> Tensor:
        # Rounded first, as in DeepSpeed: a scale does not depend on the mask.
        return F.linear(self._activations(x), *self._pruned(self.masks(), self._quantized(self.weight)))

    def masks(self) -> dict[Kind, Tensor]:
        """The masks at the present step, of techniques that have started."""
        rules = self.quantization
        if rules is None or not rules.pruners:
            return {}
        step = rules.steps.count
        return {pruner.rule.kind: pruner.mask(self, step) for pruner in rules.pruners if pruner.is_on(step)}

    def _pruned(self, masks: dict[Kind, Tensor], weight: Tensor) -> tuple[Tensor, Tensor | None]:
        bias = self.bias
        for pruner in self.quantization.pruners if masks else ():
            mask = masks.get(pruner.rule.kind)
            if mask is not None:
                weight, bias = pruner.applied(mask, weight, bias)
        return weight, bias

    def kept(self) -> Tensor:
        """Where the weight is not pruned at the present step: bool, in its shape."""
        return self._pruned(self.masks(), torch.ones_like(self.weight))[0].bool()

    @torch.no_grad()
    def write_pruned(self, *, rounds: bool, writes_weight: bool) -> dict[Kind, Tensor]:
        """Write zeros where biases are pruned, and if ``writes_weight`` where weights are, which ``rounds`` rounds to
        their quantized values first. Returns the masks, bool."""
        masks, weight = self.masks(), self.weight
        weight, bias = self._pruned(masks, quantize_weight(weight, self.quantization.weight) if rounds else weight)
        if writes_weight:
            self.weight.copy_(weight)
        if bias is not None:
            self.bias.copy_(bias)
        return {kind: mask.bool() for kind, mask in masks.items()}

    def keep_pruned(self) -> None:
        """Drop the rules and tensors of pruning. Without another rule the module gets its own class back."""
        for name in (name for pruner in self.quantization.pruners for name in pruner.names):
            delattr(self, name)
        self._keep(replace(self.quantization, pruners=()))

    def check_weight(self, fix: str) -> None:
        """Raises ModelError if the weight has NaN or inf. fix: what to do about it."""
        check_finite(self.weight, self.quantization.name, fix)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """A state dict of the plain model has neither masks nor scores."""
        for pruner in () if self.quantization is None else self.quantization.pruners:
            pruner.fill(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        pruners = () if self.quantization is None else self.quantization.pruners
        return "".join((super().extra_repr(), *(f", {p.rule.kind}_pruning={p.rule.dense_ratio}" for p in pruners)))


class Embedding_Compress(CompressedLayer, nn.Embedding):
    """``torch.nn.Embedding`` with a quantized weight. Each row is a group."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.weight_quantization_enabled:
            return super().forward(x)
        if self._seed() is None:
            # Rows are quantized separately, so only the rows that are read have to be.
            rule = self.quantization.weight
            rows, scale_type = super().forward(x), scale_type_of(self.weight)
            return quantize_rows(
                rows, rule.bits, levels=rule.levels, is_symmetric=rule.is_symmetric, scale_type=scale_type
            )
        weight = self._quantized(self.weight)
        return F.embedding(
            x, weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )


class _CutLayer(CompressedLayer):
    """A layer that is cut over tensor-parallel ranks. Its class calls ``product`` with this rank's weight."""

    @property
    def product(self) -> Callable[..., Tensor]:
        return self._linear

    @product.setter
    def product(self, product: Callable[..., Tensor]) -> None:
        """The base class sets the plain product, which a compressed layer does not use."""


class ColumnParallelLinear_Compress(_CutLayer, LinearLayer):
    """``inject.layers.LinearLayer``, some columns on each rank, with a quantized weight and input."""


class RowParallelLinear_Compress(_CutLayer, LinearAllreduce):
    """``inject.layers.LinearAllreduce``, some rows on each rank, with a quantized weight and input. The range of an
    input row is that of this rank's part of the row."""


def compressed_layers(model: nn.Module) -> dict[str, CompressedLayer]:
    """The layers with rules, by their names in ``model``."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, CompressedLayer) and module.quantization is not None
    }
