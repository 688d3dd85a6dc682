"""Forwards in which a row has the same bits in any company: other rows, other pieces, another number of threads.

Attention over blocks computes so already. Of torch's operators on a CPU two kinds do not: products, whose order of sums
depends on the number of rows, and activations whose last elements run other code than those before them. A forward in
the mode ``Deterministic`` runs operators of the core in their place. ``require_row_wise`` proves that no further
operator of a model is of these kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_c.errors import FeatureError
from deepspeed_c.ops import nn

__all__ = ["Deterministic", "require_row_wise"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_product = torch.ops.deepspeed_c.nn_product

# Operators of torch with independent rows: an element is a function of its row alone, in any place and by any
# instruction set. test_deterministic.py measures them.
_MOVES = (
    *("alias", "view", "_unsafe_view", "_reshape_alias", "as_strided", "expand", "slice", "select", "narrow", "split"),
    *(
        "split_with_sizes",
        "unbind",
        "t",
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "detach",
        "lift_fresh",
        "flip",
    ),
    *("stack", "cat", "clone", "copy_", "_to_copy", "repeat", "repeat_interleave", "constant_pad_nd", "roll"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    *("zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "fill", "fill_", "zero_", "arange"),
    *(
        "scalar_tensor",
        "_local_scalar_dense",
        "embedding",
        "index",
        "index_select",
        "index_put",
        "index_put_",
        "gather",
    ),
    *("scatter", "scatter_", "index_copy", "index_copy_", "index_add", "index_add_", "masked_fill", "masked_fill_"),
    *("where", "nonzero", "one_hot", "masked_select", "tril", "triu", "index_fill", "index_fill_"),
)
_COUNTS = (
    *("eq", "ne", "lt", "le", "gt", "ge", "all", "any", "bitwise_and", "bitwise_or", "bitwise_not", "logical_and"),
    *(
        "logical_or",
        "logical_not",
        "isinf",
        "isnan",
        "floor_divide",
        "remainder",
        "histc",
        "bincount",
        "sort",
        "argsort",
    ),
    *("topk", "argmax", "argmin", "max", "min", "amax", "amin", "cumsum"),
)
_ELEMENTS = (
    *("add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_", "neg", "abs", "pow", "square", "sqrt"),
    *("reciprocal", "clamp", "clamp_", "clamp_min", "clamp_max", "minimum", "maximum", "exp", "tanh", "cos", "sin"),
    *("relu", "relu_", "sign"),
)
_ROWS = ("sum", "mean", "_softmax", "native_layer_norm", "_fused_rms_norm")
_ROW_WISE = frozenset((*_MOVES, *_COUNTS, *_ELEMENTS, *_ROWS))
_MULTIPLIED_POWERS = (1, 2, 3)
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm"))


class Deterministic(TorchFunctionMode):
    """Products and activations of torch run as operators of the core, which give a row the same bits in any company.

    Dense tensors in float32, bfloat16 and float16 in host memory, without gradients.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (own := _OWN.get(function)) is not None:
            found = own(*args, **(kwargs or {}))
            if found is not None:
                return found
        return function(*args, **(kwargs or {}))


def _has_kernel(*tensors: Any) -> bool:
    """Whether the core has operators for these tensors."""
    first = tensors[0]
    if not torch.is_tensor(first) or first.dtype not in _DTYPES:
        return False
    return all(torch.is_tensor(x) and x.device.type == "cpu" and x.dtype is first.dtype for x in tensors)


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """x [..., terms] times weight [terms, columns], plus bias [columns]; None where the core has no product for them."""
    operands = (x, weight) if bias is None else (x, weight, bias)
    if not _has_kernel(*operands) or weight.dim() != 2 or not x.dim() or (bias is not None and bias.dim() != 1):
        return None
    if 1 not in weight.stride() and weight.numel() > 1:
        weight = weight.contiguous()
    y = _product(x.reshape(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], weight.shape[1])


def _linear(input: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
    return _multiply(input, weight.t(), bias)


def _matmul(input: Any, other: Any, **out: Any) -> torch.Tensor | None:
    return None if out or not torch.is_tensor(other) else _multiply(input, other, None)


def _addmm(input: Any, mat1: Any, mat2: Any, **scales: Any) -> torch.Tensor | None:
    return None if scales else _multiply(mat1, mat2, input)


def _int8(x: Any, weight: Any, scales: Any) -> torch.Tensor | None:
    """x [rows, terms] times int8 weight [columns, terms]. Few rows widen it too, because more rows do."""
    y = _multiply(x, weight.to(x.dtype).t(), None)
    return None if y is None else y * scales


def _grouped(
    input: Any,
    mat2: Any,
    *,
    offs: torch.Tensor | None = None,
    bias: Any = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """Rows [tokens, terms] in runs that end at ``offs``, each times its own matrix of mat2 [runs, terms, columns]."""
    if offs is None or bias is not None or out_dtype not in (None, input.dtype) or mat2.dim() != 3 or input.dim() != 2:
        return None
    if not _has_kernel(input, mat2):
        return None
    y = input.new_zeros(input.shape[0], mat2.shape[2])
    begin = 0
    for weight, end in zip(mat2, offs.tolist(), strict=True):
        if end > begin:
            y[begin:end] = _multiply(input[begin:end], weight, None)
        begin = end
    return y


def _activate(act: nn.Act, input: Any, inplace: bool = False) -> torch.Tensor | None:
    if not _has_kernel(input) or not input.dim() or not input.shape[-1]:
        return None
    found = nn.bias_act(input, None, act)
    return input.copy_(found) if inplace else found


def _gelu(input: Any, approximate: str = "none") -> torch.Tensor | None:
    return _activate("gelu_tanh" if approximate == "tanh" else "gelu", input)


_OWN: dict[Any, Callable[..., torch.Tensor | None]] = {
    torch.nn.functional.linear: _linear,
    torch._C._nn.linear: _linear,
    **dict.fromkeys((torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.addmm, torch.Tensor.addmm), _addmm),
    torch.nn.functional.silu: partial(_activate, "silu"),
    **dict.fromkeys((torch.sigmoid, torch.Tensor.sigmoid, torch.nn.functional.sigmoid), partial(_activate, "sigmoid")),
    **dict.fromkeys((torch.nn.functional.gelu, torch._C._nn.gelu), _gelu),
    torch._weight_int8pack_mm: _int8,
    **{
        function: _grouped
        for function in (getattr(torch, "_grouped_mm", None), getattr(torch.nn.functional, "grouped_mm", None))
        if function is not None
    },
}


class _Watched(TorchDispatchMode):
    """Notes the operators that may give a row other bits in other company."""

    def __init__(self) -> None:
        super().__init__()
        self.others: dict[str, None] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if not _is_row_wise(operator, args):
            self.others[str(operator)] = None
        return operator(*args, **(kwargs or {}))


def _is_row_wise(operator: Any, args: tuple) -> bool:
    space, _, name = operator._schema.name.partition("::")
    if space != "aten":
        return space == "deepspeed_c"
    tensors = [each for each in args if torch.is_tensor(each)]
    if not any(each.is_floating_point() for each in tensors):
        return True
    if name in _PRODUCTS:
        return tensors[-1].shape[-2] == 1  # one term: no sum
    if name == "pow":
        return not torch.is_tensor(args[1]) and args[1] in _MULTIPLIED_POWERS
    if name == "rsqrt":  # in 16 bits the last elements are rounded twice
        return tensors[0].dtype in (torch.float32, torch.float64)
    return name in _ROW_WISE


@contextmanager
def require_row_wise(family: str) -> Iterator[None]:
    """Context of a forward of a model. Raises FeatureError that names the operators whose rows may depend on others."""
    with _Watched() as seen:
        yield
    if seen.others:
        raise FeatureError(
            f"{family} runs {', '.join(seen.others)}, whose results may depend on the other sequences of a batch",
            where="deterministic",
            fix="set deterministic to false for this model",
        )
