"""Weights of 8 bits for inference: one int8 value an element, and one fp32 scale a row of the weight [out, in].

The scale of a row is its largest absolute value / 127, and a value is round(weight / scale), to nearest even. So a
weight is off by at most half its row's scale. A product is y = (x @ values^T) * scale + bias: the values are exact in
bf16 and fp32, so rows are scaled after the sum. Weights are never widened as a whole: a product widens them block by
block, or torch's kernel reads the int8 values themselves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import ConfigError, ModelError, StateError
from deepspeed_c.inject.layers import (
    LinearAllreduce,
    LinearLayer,
    LmHeadLinearAllreduce,
    RowPicker,
    TensorParallelLayer,
    is_transposed,
    product_of,
)
from deepspeed_c.ops.autocast import cast_by_autocast
from deepspeed_c.zero.weights.kinds import is_codes

__all__ = ["Int8Linear", "Int8Product", "QuantReport", "int8_weights", "quantize_weights"]

LARGEST = 127  # values are symmetric: -128 is not used
# Bytes of the weights that a product widens at a time. 4 MiB stay in a core's second-level cache or near it; blocks of
# 16 rows cost twice the time, a whole fp32 weight would be four times the memory of its int8 values.
BLOCK_BYTES = 4 << 20
# Up to this many rows of x, torch's kernel for int8 weights is faster than widening them. Beyond, the matrix product of
# wide weights uses the cache better.
FEW_ROWS = 32
# torch's kernel reads beyond the end of rows of other lengths, and has crashed on them.
KERNEL_GRAIN = 64


@dataclass
class QuantReport:
    """What ``quantize_weights`` did."""

    quantized: list[str] = field(default_factory=list)
    """Names of the weights that are int8 now."""
    kept: dict[str, str] = field(default_factory=dict)
    """The matrices that keep their dtype: name -> reason."""
    bytes_before: int = 0
    bytes_after: int = 0
    """Bytes of all parameters and scales of this rank."""

    def __str__(self) -> str:
        mib = 1 << 20
        return (
            f"{len(self.quantized)} weights are int8, {len(self.kept)} matrices keep their dtype:"
            f" {self.bytes_before / mib:.1f} MiB -> {self.bytes_after / mib:.1f} MiB"
        )


class Int8Product(torch.nn.Module):
    """The function of a linear layer whose weight is int8: (x, weight [out, in], bias) to y. It holds the scales."""

    def __init__(self, scale: torch.Tensor, dtype: torch.dtype, label: str) -> None:
        """scale: fp32 [out]. dtype: products are computed in it."""
        super().__init__()
        self.dtype, self.label = dtype, label
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """y [..., out] in the dtype of x [..., in], or autocast's."""
        if not x.is_floating_point():
            raise StateError(
                f"its input is {x.dtype}: the model casts its input to the weight's dtype, which is int8 now",
                where=self.label,
                fix=f"keep this layer as it is: quantize_weights(model, keep=[{self.label!r}])",
            )
        (x,) = cast_by_autocast(x)
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).to(self.dtype)
        y = self._sums(rows, weight) * self.scale  # fp32
        if bias is not None:
            y = y + bias
        return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])

    def _sums(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``rows`` [n, in] @ ``weight``^T, without scales."""
        n_out, n_in = weight.shape
        is_small = self.dtype is torch.bfloat16 and 0 < rows.shape[0] <= FEW_ROWS and n_out > 0
        has_kernel = rows.device.type == "cpu" and n_in > 0 and n_in % KERNEL_GRAIN == 0 and weight.is_contiguous()
        # The kernel has no derivative, and a prompt may be trained through frozen layers.
        if is_small and has_kernel and not (rows.requires_grad and torch.is_grad_enabled()):
            # The kernel takes scales in bf16, which would be off by up to 2^-9: ours are multiplied in afterwards.
            return torch._weight_int8pack_mm(rows.contiguous(), weight, rows.new_ones(n_out))
        n_block = max(1, BLOCK_BYTES // max(1, n_in * self.dtype.itemsize))
        blocks = [rows @ weight[i : i + n_block].to(self.dtype).t() for i in range(0, max(n_out, 1), n_block)]
        return torch.cat(blocks, dim=1) if len(blocks) != 1 else blocks[0]

    def _apply(self, fn: Any, recurse: bool = True) -> Int8Product:
        # A cast of the model (model.bfloat16()) is meant for weights: a scale of 8 bits would be off by 2^-9.
        scale = self.scale
        super()._apply(fn, recurse)
        if self.scale.dtype is not torch.float32:
            self.scale = scale.to(self.scale.device)
        return self

    def extra_repr(self) -> str:
        return f"int8 weights, products in {self.dtype}"


def _refuse_wide_weight(
    module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *lists: list[str]
) -> None:
    """A hook before a state dict is loaded. Weights of other dtypes would lose their fractions in int8 values."""
    weight = state_dict.get(f"{prefix}weight")
    if weight is not None and weight.dtype is not torch.int8:
        *_, errors = lists
        errors.append(
            f"{prefix}weight: {weight.dtype} in the state dict, int8 in the model. Fix: load weights before quantize_weights"
        )


class Int8Linear(torch.nn.Linear):
    """A linear layer that is not cut, with an int8 weight [out, in]."""

    def __init__(self, module: torch.nn.Module, product: Int8Product) -> None:
        """module: the layer, whose weight is int8 [out, in] already."""
        torch.nn.Module.__init__(self)  # Linear's own would allocate a weight
        self.weight, self.bias, self.product = module.weight, module.bias, product
        self.out_features, self.in_features = self.weight.shape
        # The same dictionaries are kept, so that the hooks' handles can still remove the hooks.
        hooks = {name: value for name, value in vars(module).items() if re.fullmatch(r"_forward_.*hooks.*", name)}
        self.__dict__.update(hooks)
        self.train(module.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.weight, self.bias)


class _Layer(NamedTuple):
    """A layer that will be quantised."""

    name: str
    module: torch.nn.Module
    ranks: Collectives | None  # these hold parts of each row of the weight; None: rows are whole

    @property
    def rows(self) -> torch.Tensor:
        """The weight as [out, in]."""
        weight = self.module.weight.detach()
        return weight.t() if _is_transposed(self.module) else weight


def _is_transposed(module: torch.nn.Module) -> bool:
    """Whether the weight of a linear layer, or of a cut layer, is [in, out]."""
    return module.is_transposed if isinstance(module, TensorParallelLayer) else is_transposed(module)


@torch.no_grad()
def quantize_weights(
    model: torch.nn.Module, *, dtype: torch.dtype = torch.bfloat16, keep: Sequence[str] = ()
) -> QuantReport:
    """Replace the weight of each linear layer of ``model`` by int8 values and a scale per row, in place.

    Output layers, tied weights, layers that transformers keeps in fp32, and layers whose weight is read by another
    module than their own keep their dtype, and so does everything that is no linear layer.

    dtype: bf16 or fp32; products are computed in it. keep: names of layers, or of modules that contain layers, to leave
    as they are.

    The call is collective if ``model`` is cut over tensor-parallel ranks. Raises, on all ranks and before anything is
    changed, ConfigError for another dtype or an unknown name in ``keep``, StateError if the model is quantised already,
    and ModelError for a weight with NaN or inf or without data.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(
            f"{dtype} cannot hold sums of int8 products"
            if dtype is torch.float16
            else f"{dtype} is no dtype of products",
            where="quantize_weights: dtype",
            fix="pass torch.bfloat16 or torch.float32",
        )
    if any(isinstance(module, Int8Product) for module in model.modules()):
        raise StateError("its weights are int8 already", where=type(model).__name__, fix="quantise a model once")
    modules = dict(model.named_modules())
    unknown = [name for name in keep if name not in modules]
    if unknown:
        raise ConfigError(
            f"the model has no module {unknown[0]!r}", where="quantize_weights: keep", fix="name modules in full"
        )
    report = QuantReport(bytes_before=_n_bytes(model))
    layers = list(_find_layers(model, keep, report))
    largest = _largest(model, layers)
    for layer, row_max in zip(layers, largest, strict=True):
        _quantize(model, layer, row_max, dtype)
        report.quantized.append(f"{layer.name}.weight")
    report.bytes_after = _n_bytes(model)
    return report


def int8_weights(model: torch.nn.Module) -> dict[str, bool]:
    """The names of the weights that ``quantize_weights`` would make int8, and whether each is [in, out]. The model's
    tensors may be on the meta device.
    """
    return {f"{layer.name}.weight": _is_transposed(layer.module) for layer in _find_layers(model, (), QuantReport())}


def _n_bytes(model: torch.nn.Module) -> int:
    scales = (module.scale for module in model.modules() if isinstance(module, Int8Product))
    return sum(tensor.nbytes for tensor in (*model.parameters(), *scales))


def _find_layers(model: torch.nn.Module, keep: Sequence[str], report: QuantReport) -> Iterator[_Layer]:
    """Find the layers to quantise. The reason for each other matrix is written to ``report``."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    heads = _output_layers(model)
    in_fp32 = _names_in_fp32(model)
    for param, (name, *others) in names.items():
        if param.dim() < 2 or not param.is_floating_point() or is_codes(param):
            continue
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        parent = model.get_submodule(owner.rpartition(".")[0])
        is_cut = isinstance(module, TensorParallelLayer)
        if others:
            reason = f"tied: it is {others[0]} as well"
        elif last != "weight" or not (is_cut or product_of(module) is not None):
            reason = f"{type(module).__name__} is no linear layer"
        elif module in heads or isinstance(module, LmHeadLinearAllreduce):
            reason = "the output layer"
        elif in_fp32 is not None and in_fp32.search(f".{name}."):
            reason = "transformers keeps it in fp32"
        elif any(f"{owner}.".startswith(f"{kept}.") for kept in keep):
            reason = "keep names it"
        elif "forward" in vars(module):
            reason = "another forward was put in the place of the layer's own"
        elif _reads_weights_of_children(parent):
            reason = f"{type(parent).__name__} reads it without the layer's forward"
        else:
            # A cut along the input cuts the rows of the weight.
            ranks = module.ranks.comm if isinstance(module, LinearAllreduce) and module.ranks.n_ranks > 1 else None
            yield _Layer(owner, module, ranks)
            continue
        report.kept[name] = reason


def _reads_weights_of_children(parent: torch.nn.Module) -> bool:
    # Both have paths that pass the weights of their layers to one operator for all.
    return isinstance(parent, (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer))


def _output_layers(model: torch.nn.Module) -> set[torch.nn.Module]:
    found = set()
    for module in model.modules():
        get = getattr(module, "get_output_embeddings", None)
        if get is None:
            continue
        try:
            found.add(get())
        except (AttributeError, NotImplementedError):
            continue  # a model without an output layer
    return found


def _names_in_fp32(model: torch.nn.Module) -> re.Pattern[str] | None:
    """The parts of names that transformers keeps in fp32, as its own search for them reads a part."""
    parts = set()
    for module in model.modules():
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            parts.update(getattr(module, attribute, None) or ())
    return re.compile(rf"\.({'|'.join(sorted(parts))})\.") if parts else None


def _largest(model: torch.nn.Module, layers: list[_Layer]) -> list[torch.Tensor]:
    """The largest absolute value of each row of each weight, fp32; of whole rows, if ranks have parts of them.

    Raises ModelError, on all ranks alike, for a weight that has no data, or NaN or inf.
    """
    found, problem = [], None
    for layer in layers:
        rows = layer.rows
        if rows.is_meta:
            problem = problem or (f"{layer.name}.weight", "it has no data: it is on the meta device")
        elif 0 in rows.shape:
            found.append(rows.new_zeros(rows.shape[0], dtype=torch.float32))
        else:
            low, high = rows.aminmax(dim=1)
            found.append(torch.maximum(-low, high).float())
            if problem is None and not found[-1].isfinite().all():
                problem = (f"{layer.name}.weight", "it has NaN or inf")
    comm = next(
        (m.ranks.comm for m in model.modules() if isinstance(m, TensorParallelLayer) and m.ranks.n_ranks > 1), None
    )
    problems = [problem] if comm is None else comm.gather_objects(problem, label="weights to quantise")
    for rank, each in enumerate(problems):
        if each is not None:
            where, what = each
            raise ModelError(
                f"{what} on tensor-parallel rank {rank}" if len(problems) > 1 else what,
                where=where,
                fix="load weights that are finite before they are quantised",
            )
    shared = [row_max for layer, row_max in zip(layers, found, strict=True) if layer.ranks is not None]
    if comm is not None and shared:
        flat = torch.stack(comm.all_gather_list(torch.cat(shared), label="scales of int8 weights")).amax(dim=0)
        for row_max, whole in zip(shared, flat.split([len(each) for each in shared]), strict=True):
            row_max.copy_(whole)
    return found


def _quantize(model: torch.nn.Module, layer: _Layer, row_max: torch.Tensor, dtype: torch.dtype) -> None:
    rows, scale = layer.rows, row_max / LARGEST
    values = torch.empty(rows.shape, dtype=torch.int8, device=rows.device)
    # Half of the widened block's bytes: the division makes a second one.
    n_block = max(1, BLOCK_BYTES // 2 // max(1, rows.shape[1] * 4))
    for i in range(0, rows.shape[0], n_block):
        block, by = rows[i : i + n_block].float(), scale[i : i + n_block, None]
        # Rows of scale 0 divide zeros, or values below 127 of the least fp32 number, by 1. The scales of subnormal
        # rows are so coarse that a quotient may exceed 127.
        values[i : i + n_block] = (block / torch.where(by > 0, by, 1)).round_().clamp_(-LARGEST, LARGEST)
    param, module = layer.module.weight, layer.module
    param.requires_grad_(False)
    is_cut = isinstance(module, TensorParallelLayer)
    # A cut Conv1D keeps its shape [in, out]. Its memory is [out, in], as products read it.
    param.data = values.t() if is_cut and module.is_transposed else values
    picker: RowPicker | None = module.picker if isinstance(module, LinearLayer) else None
    product = Int8Product(scale if picker is None else picker.pick(scale, 0), dtype, layer.name)
    if is_cut:
        module.multiply_by(product)
    else:
        module = Int8Linear(module, product)
        parent, _, last = layer.name.rpartition(".")
        model.get_submodule(parent).register_module(last, module)
    module.register_load_state_dict_pre_hook(_refuse_wide_weight)
