"""Linear layers whose weight is held as codes, with the names of compressed-tensors' formats, so that
``save_pretrained`` writes a folder that transformers loads without this package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from typing_extensions import Self

from deepspeed_c.compression.basic_layer import CompressedLayer, WeightRule, check_finite, scale_type_of
from deepspeed_c.compression.levels import codes_on, rows_grid
from deepspeed_c.errors import ConfigError, StateError, UnsupportedConfigError
from deepspeed_c.inject.swap import swap_class
from deepspeed_c.ops.quant import Quantized, dequantize, packed_linear, packed_weight, quantize
from deepspeed_c.ops.quant_reference import pack
from deepspeed_c.zero.weights.param import state_of

__all__ = [
    "CodedLinear",
    "PackFormat",
    "PackedLinear",
    "check_format",
    "check_packable",
    "group_of",
    "pack_layers",
    "packed_bytes",
]


PackFormat = Literal["pack-quantized", "int-quantized", "float-quantized"]
FORMATS: tuple[str, ...] = get_args(PackFormat)


class _WeightView(Tensor):
    """The weight of a layer that holds codes. Models read its dtype, shape and device in their forwards, which costs no
    values; an operator gets values, computed for that call. It cannot be written."""

    layer: _HoldsCodes

    @staticmethod
    def __new__(cls, layer: _HoldsCodes) -> Self:
        scales, shape = layer.weight_scale, (layer.out_features, layer.in_features)
        view = Tensor._make_wrapper_subclass(cls, shape, dtype=scales.dtype, device=scales.device)
        view.layer = layer
        return view

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].layer)
        given = {**dict(zip((each.name for each in func._schema.arguments), args)), **(kwargs or {})}
        for each in func._schema.arguments:
            is_written = each.alias_info is not None and each.alias_info.is_write
            if is_written and isinstance(given.get(each.name), cls):
                raise StateError(
                    f"{func.__name__} writes the weight of a layer that holds codes",
                    where=type(given[each.name].layer).__name__,
                    fix="edit the weights before redundancy_clean packs them",
                )
        return func(*tree_map_only(cls, _values, args), **tree_map_only(cls, _values, kwargs or {}))


def _values(view: _WeightView) -> Tensor:
    return view.layer.dequantized()


class _HoldsCodes(nn.Module, ABC):
    """A linear layer whose weight is codes. ``weight`` answers as the weight in the scales' dtype would."""

    in_features: int
    out_features: int
    weight_scale: Tensor

    @property
    def weight(self) -> Tensor:
        return _WeightView(self)

    @abstractmethod
    def dequantized(self) -> Tensor:
        """The weight's values [out, in] in the scales' dtype: a new tensor."""


class PackedLinear(_HoldsCodes):
    """A linear layer whose weight is packed codes, code + 2^(bits - 1) in ``bits`` bits, the first in the lowest ones.

    Buffers: ``weight_packed`` int32 [rows, ceil(columns * bits / 32)], ``weight_scale`` [rows, groups of a row] in the
    weight's dtype, ``weight_shape`` int64 [2], and for an asymmetric weight ``weight_zero_point`` int32 [ceil(rows *
    bits / 32), groups of a row], packed down the rows (else None).
    """

    bits: int

    @classmethod
    def take_over(cls, module: nn.Module, rule: WeightRule, kept: Tensor | None = None) -> None:
        """Make ``module``, which has passed ``check_packable``, a layer of this class, in place. kept: where the weight
        is not pruned; None: everywhere."""
        weight = module.weight.detach()
        swap_class(module, cls)
        module._pack(weight, rule, kept)

    @classmethod
    def without_values(cls, module: nn.Linear, bits: int, group: int | None, *, is_symmetric: bool) -> None:
        """Make ``module``, which is on the meta device, a layer of this class, in place. group: elements of a row that
        share a scale, of which a row is a multiple; None: the whole row."""
        rows, columns = module.weight.shape
        n_groups = 1 if group is None else columns // group
        n_words, n_down = (-(-n * bits // 32) for n in (columns, rows))
        empty = module.weight.detach().new_empty
        zeros = None if is_symmetric else empty((n_down, n_groups), dtype=torch.int32)
        swap_class(module, cls)
        words, shape = empty((rows, n_words), dtype=torch.int32), empty(2, dtype=torch.int64)
        module._hold(bits, words, empty((rows, n_groups)), zeros, shape)

    def _pack(self, weight: Tensor, rule: WeightRule, kept: Tensor | None) -> None:
        codes, scales, zeros = _quantized(weight, rule, f"int{rule.bits}", kept)
        down = None if zeros is None else _packed(zeros.T, rule.bits).T.contiguous()
        self._hold(rule.bits, _packed(codes, rule.bits), scales, down, torch.tensor(weight.shape))

    def _hold(self, bits: int, packed: Tensor, scales: Tensor, zero_points: Tensor | None, shape: Tensor) -> None:
        self.bits = bits
        del self._parameters["weight"]
        self.register_buffer("weight_packed", packed)
        self.register_buffer("weight_scale", scales)
        self.register_buffer("weight_shape", shape)
        self.register_buffer("weight_zero_point", zero_points)

    def forward(self, x: Tensor) -> Tensor:
        return packed_linear(
            x,
            self.weight_packed,
            self.weight_scale,
            self.bias,
            bits=self.bits,
            group=self.in_features // self.weight_scale.shape[1],
            zero_points=self.weight_zero_point,
        )

    def dequantized(self) -> Tensor:
        scales, n_cols = self.weight_scale, self.in_features
        group = n_cols // scales.shape[1]
        words, zeros = self.weight_packed, self.weight_zero_point
        return packed_weight(words, scales, self.bits, group, n_cols, scales.dtype, zeros)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"


class CodedLinear(_HoldsCodes):
    """A linear layer whose weight is codes of a byte each.

    Buffers: ``weight`` int8 or float8_e4m3fn [rows, columns], ``weight_scale`` [rows, groups of a row] in the dtype
    that the weight had, and for an asymmetric weight ``weight_zero_point`` int8 [rows, groups of a row] (else None).
    The attribute ``codes`` is the first of them; ``weight`` stands for the values.
    """

    @classmethod
    def take_over(cls, module: nn.Module, rule: WeightRule, kept: Tensor | None = None, *, is_float: bool) -> None:
        """Make ``module``, which has passed ``check_packable``, a layer of this class, in place. kept: as in
        ``PackedLinear``. is_float: codes are numbers of 8 bits with a fraction, not integers."""
        weight = module.weight.detach()
        swap_class(module, cls)
        module._encode(weight, rule, kept, is_float)

    def _encode(self, weight: Tensor, rule: WeightRule, kept: Tensor | None, is_float: bool) -> None:
        codes, scales, zeros = _quantized(weight, rule, "e4m3" if is_float else f"int{rule.bits}", kept)
        del self._parameters["weight"]
        # register_buffer refuses a name that the class has.
        self._buffers["weight"] = codes.to(torch.float8_e4m3fn if is_float else torch.int8)
        self.register_buffer("weight_scale", scales)
        self.register_buffer("weight_zero_point", None if zeros is None else zeros.to(torch.int8))

    @property
    def codes(self) -> Tensor:
        return self._buffers["weight"]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Casts of a model do not reach the codes, which each dtype of 16 bits represents."""
        dtype = self.codes.dtype
        super()._apply(fn, recurse)
        self._buffers["weight"] = self.codes.to(dtype)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantized(), self.bias)

    def dequantized(self) -> Tensor:
        n_cols, scales = self.in_features, self.weight_scale
        format_name = "int8" if self.codes.dtype == torch.int8 else "e4m3"
        group = max(n_cols // scales.shape[1], 1)
        codes = Quantized(self.codes, scales.float(), self.weight_zero_point, format_name, group, n_cols)
        return dequantize(codes, scales.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, codes={self.codes.dtype}"


def _quantized(
    weight: Tensor, rule: WeightRule, format_name: str, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes as floats [rows, columns], scales in the weight's dtype, zero points as floats or None), both [rows,
    groups of a row]. kept: where codes do not stand for 0; None: everywhere."""
    groups = weight.reshape(rule.n_groups, -1)
    if rule.levels == "deepspeed" and format_name != "e4m3":
        grid = rows_grid(groups, rule.bits, rule.levels, rule.is_symmetric, scale_type_of(weight))
        codes, scales, zeros = codes_on(groups, grid), grid.scales, grid.zero_points
    else:
        quantized = quantize(groups, format_name, symmetric=rule.is_symmetric, scale_type=scale_type_of(weight))
        ones = torch.ones_like(quantized.scales)
        codes = dequantize(quantized._replace(scales=ones, zero_points=None))
        scales, zeros = quantized.scales, quantized.zero_points
    # A row that lies within a group of several rows gets that group's numbers.
    n_repeated = max(groups.shape[1] // weight.shape[1], 1)
    scales, zeros = (
        None if each is None else each.float().repeat_interleave(n_repeated, 0).view(len(weight), -1)
        for each in (scales, zeros)
    )
    codes = codes.view(weight.shape)
    if kept is not None:
        nothing = 0.0 if zeros is None else zeros.repeat_interleave(weight.shape[1] // zeros.shape[1], 1)
        codes = torch.where(kept, codes, nothing)
    return codes, scales.to(weight.dtype), zeros


def _packed(codes: Tensor, bits: int) -> Tensor:
    """int32 [rows, ceil(columns * bits / 32)] of codes that are given as floats [rows, columns]."""
    unsigned = pack(codes) if bits == 4 else F.pad((codes + 128).to(torch.uint8), (0, -codes.shape[1] % 4))
    return unsigned.flatten().view(torch.int32).view(len(codes), unsigned.shape[1] // 4)


def group_of(weight: Tensor, rule: WeightRule) -> int:
    """Elements of a row that share a scale; 0: the whole row. -1: groups are neither rows nor parts of rows."""
    n_columns, n_each = weight.shape[1], weight.numel() // rule.n_groups
    if n_each % n_columns == 0:
        return 0
    return n_each if n_columns % n_each == 0 else -1


def packed_bytes(weight: Tensor, rule: WeightRule) -> int:
    """Bytes of the buffers that hold ``weight`` when it is packed. ``group_of`` it is not negative."""
    n_rows, n_columns = weight.shape
    n_groups = n_columns // (group_of(weight, rule) or n_columns)
    words = n_rows * -(-n_columns * rule.bits // 32)
    if not rule.is_symmetric:
        words += -(-n_rows * rule.bits // 32) * n_groups
    return words * torch.int32.itemsize + n_rows * n_groups * weight.itemsize + 2 * torch.int64.itemsize


def check_format(pack: bool | str) -> str | None:
    """The format that ``redundancy_clean``'s argument names; None: none. Raises ConfigError for another name."""
    name = FORMATS[0] if pack is True else pack
    if name is not False and name not in FORMATS:
        raise ConfigError(
            f"there is no format {name!r}", where="pack", fix=f"pass True, False or one of {', '.join(FORMATS)}"
        )
    return name or None


def check_packable(layers: Mapping[str, CompressedLayer], format_name: str) -> None:
    """Raises before anything changes. StateError: the schedule has not begun, or the weight is sharded; ConfigError:
    groups that compressed-tensors cannot name; UnsupportedConfigError: what is not built."""
    for name, layer in layers.items():
        _check_layer(name, layer, is_float=format_name == "float-quantized")


def _check_layer(name: str, layer: CompressedLayer, *, is_float: bool) -> None:
    rules, weight = layer.quantization, layer.weight
    if not layer.weight_quantization_enabled:
        raise StateError(
            f"the quantization of its weight begins at step {rules.weight.first_step}, and this is step "
            f"{rules.steps.count}",
            where=name,
            fix='train past schedule_offset before packing, or write "schedule_offset": 0 for weights that were trained',
        )
    if state_of(weight) is not None:
        raise StateError(
            "its weight is sharded", where=name, fix="load the weights into a model without an engine, and pack that"
        )
    if rules.activations is not None or rules.plain_class is not nn.Linear:
        raise UnsupportedConfigError(
            "only torch.nn.Linear without quantized activations is packed",
            where=name,
            fix="leave activation_quantization out, or pass pack=False",
        )
    if is_float and not (rules.weight.bits == 8 and rules.weight.is_symmetric):
        raise UnsupportedConfigError(
            "float-quantized is for symmetric weights of 8 bits",
            where=name,
            fix='write "target_bits": 8 and "quantization_type": "symmetric", or pass another format',
        )
    check_finite(weight, name, "load a checkpoint from before they came up")
    if group_of(weight, rules.weight) < 0:
        raise ConfigError(
            f"groups of {weight.numel() // rules.weight.n_groups} elements of {name}.weight {list(weight.shape)} are neither rows nor parts of "
            "rows",
            where="compression_training.weight_quantization.shared_parameters.quantize_groups",
            fix=f"write {len(weight)} for a scale for each row, or leave the layer out",
        )
    if not is_float and rules.weight.levels == "deepspeed" and not rules.weight.is_symmetric and weight.numel():
        _check_zero_points(name, weight, rules.weight)


def _check_zero_points(name: str, weight: Tensor, rule: WeightRule) -> None:
    """DeepSpeed's asymmetric range need not include 0, and the formats hold zero points as codes."""
    groups, half = weight.detach().reshape(rule.n_groups, -1), 2 ** (rule.bits - 1)
    grid = rows_grid(groups, rule.bits, rule.levels, rule.is_symmetric, scale_type_of(weight))
    is_beside = (grid.zero_points < -half) | (grid.zero_points >= half)
    if is_beside.any():
        first = int(is_beside.flatten().nonzero()[0])
        raise UnsupportedConfigError(
            f"the zero point {int(grid.zero_points[first])} of group {first} is no code of {rule.bits} bits: the range of the "
            "group does not include 0",
            where=f"{name}.weight",
            fix='train with "levels": "compressed-tensors", whose ranges include 0, or pass pack=False',
        )


class _Scheme(NamedTuple):
    """The common properties of the layers of one of the configuration's groups."""

    bits: int
    group: int
    """Elements of a row that share a scale; 0: the whole row."""
    is_symmetric: bool

    def section(self, *, is_float: bool) -> dict[str, Any]:
        section = {
            "num_bits": self.bits,
            "type": "float" if is_float else "int",
            "symmetric": self.is_symmetric,
            "strategy": "group" if self.group else "channel",
        }
        return {**section, "group_size": self.group} if self.group else section


def pack_layers(
    root: nn.Module, layers: Mapping[str, CompressedLayer], format_name: str, kept: Mapping[str, Tensor]
) -> None:
    """Pack the layers, which have passed ``check_packable``, and write config.quantization_config if ``root`` has a
    config. kept: where the weights of pruned layers are not 0, by name."""
    is_float = format_name == "float-quantized"
    groups: dict[_Scheme, list[str]] = {}
    for name, layer in layers.items():
        rule = layer.quantization.weight
        scheme = _Scheme(rule.bits, group_of(layer.weight, rule), rule.is_symmetric)
        groups.setdefault(scheme, []).append(name)
        layer.keep_weight()  # gives the layer its own class back
        if format_name == "pack-quantized":
            PackedLinear.take_over(layer, rule, kept.get(name))
        else:
            CodedLinear.take_over(layer, rule, kept.get(name), is_float=is_float)
    config = getattr(root, "config", None)
    if config is not None and layers:
        section = {
            "quant_method": "compressed-tensors",
            "format": format_name,
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{i}": {"targets": names, "format": format_name, "weights": scheme.section(is_float=is_float)}
                for i, (scheme, names) in enumerate(groups.items())
            },
            "ignore": [name for name, module in root.named_modules() if isinstance(module, nn.Linear)],
        }
        config.update({"quantization_config": section})
