"""Products of 16-bit elements on processors that have none: torch's own operators get other kernels, in this process.

Below AVX-512 torch multiplies bfloat16 and float16 by a plain loop, in up to 100 times the time of float32
(pytorch#146508); float16 also above it. ``widen_products`` puts kernels that compute in float32 before torch's kernels,
for dense tensors of the CPU: matrix products run in ``dsc_nn_product``, which keeps no float32 copy of an operand;
convolutions, attention and sums with factors run in torch's float32 kernels, between casts. Each result is rounded
once.

The kernels have torch's dispatch key BackendSelect, below autograd, autocast and the tracers of compiled graphs. So all
products of torch get them: layers of any class, experts, functions of the user, backward passes, second derivatives,
compiled graphs, recomputation. Other calls are torch's, errors included: operands of mixed dtypes or shapes, sparse
tensors, meta tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from deepspeed_c import _C  # noqa: F401  (registers the operators)

__all__ = ["widen_products"]

_aten = torch.ops.aten
_product = torch.ops.deepspeed_c.nn_product.default
_SELECTION = torch._C.DispatchKey.BackendSelect
_BELOW_SELECTION = torch._C._dispatch_keyset_full_after(_SELECTION)

_holders: Counter[torch.dtype] = Counter()
"""dtype -> how many calls of `widen_products` have not been undone."""
_library: torch.library.Library | None = None
"""The kernels, while there is a holder."""


def widen_products(dtypes: Iterable[torch.dtype]) -> Callable[[], None]:
    """From now on products of ``dtypes``, bfloat16 or float16, are computed in float32 in this process.

    Returns the function that ends it. With several calls the last end of a dtype counts.
    """
    global _library
    held = Counter(set(dtypes))
    _holders.update(held)
    if _holders and _library is None:
        _library = torch.library.Library("aten", "IMPL")
        for name, kernel in _make_kernels().items():
            _library.impl(name, kernel, _SELECTION.name, with_keyset=True)

    def end() -> None:
        global _library
        _holders.subtract(held)
        held.clear()
        for dtype in [dtype for dtype, count in _holders.items() if count == 0]:
            del _holders[dtype]
        if not _holders and _library is not None:
            _library._destroy()
            _library = None

    return end


Kernel = Callable[..., Any]


def _is_ours(keys: torch.DispatchKeySet, *operands: Tensor) -> bool:
    """Whether the operands are dense tensors of the CPU of one dtype, whose products are widened."""
    dtype = operands[0].dtype
    return (
        dtype in _holders
        and all(operand.dtype is dtype for operand in operands)
        and (keys & _BELOW_SELECTION).highestPriorityTypeId() == torch._C.DispatchKey.CPU
    )


def _fits(a: Tensor, b: Tensor, n_dims: int) -> bool:
    return a.dim() == b.dim() == n_dims and a.shape[-1] == b.shape[-2] and a.shape[:-2] == b.shape[:-2]


def _product_kernel(own: Any, n_dims: int) -> Kernel:
    """mm and bmm."""

    def kernel(keys: torch.DispatchKeySet, a: Tensor, b: Tensor) -> Tensor:
        if _is_ours(keys, a, b) and _fits(a, b, n_dims):
            return _product(a, b, None)
        return own.redispatch(keys & _BELOW_SELECTION, a, b)

    return kernel


def _sum_kernel(own: Any, n_dims: int) -> Kernel:
    """addmm and baddbmm: beta * added + alpha * a b."""

    def kernel(
        keys: torch.DispatchKeySet, added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        if not _is_ours(keys, added, a, b):
            return own.redispatch(keys & _BELOW_SELECTION, added, a, b, beta=beta, alpha=alpha)
        is_bias = beta == alpha == 1 and added.dim() == 1 and added.shape[0] == b.shape[-1]
        if is_bias and _fits(a, b, n_dims):
            return _product(a, b, added)
        return _between_casts(own, keys, (added, a, b), {"beta": beta, "alpha": alpha})

    return kernel


def _activation_kernel(own: Any, sums: Kernel) -> Kernel:
    """_addmm_activation: the sum of ``sums``, through a ReLU or a GELU. Layers of torch that don't train call it."""

    def kernel(
        keys: torch.DispatchKeySet, added: Tensor, a: Tensor, b: Tensor, *, use_gelu: bool = False, **factors: float
    ) -> Tensor:
        if not _is_ours(keys, added, a, b):
            return own.redispatch(keys & _BELOW_SELECTION, added, a, b, use_gelu=use_gelu, **factors)
        y = sums(keys, added, a, b, **factors)
        return _aten.gelu_(y) if use_gelu else y.relu_()

    return kernel


def _cast_kernel(own: Any, n_operands: int, n_results: int = 1) -> Kernel:
    """An operator in float32: the operands, its first arguments, are cast, and the first results are cast back."""

    def kernel(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not _is_ours(keys, *args[:n_operands]):
            return own.redispatch(keys & _BELOW_SELECTION, *args, **kwargs)
        return _between_casts(own, keys, args, kwargs, n_results)

    return kernel


def _between_casts(
    own: Any, keys: torch.DispatchKeySet, args: tuple, kwargs: dict[str, Any], n_results: int = 1
) -> Any:
    dtype = args[0].dtype

    def widen(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype is dtype else value

    results = own.redispatch(
        keys & _BELOW_SELECTION, *map(widen, args), **{name: widen(value) for name, value in kwargs.items()}
    )
    if isinstance(results, Tensor):
        return results.to(dtype)
    return tuple(
        value.to(dtype) if isinstance(value, Tensor) and i < n_results else value for i, value in enumerate(results)
    )


def _kernel_with_out(own: Any, functional: Kernel, n_operands: int) -> Kernel:
    """The variant of a product that writes its result into ``out``."""

    def kernel(keys: torch.DispatchKeySet, *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        a, b = args[-2:]
        if _is_ours(keys, *args[:n_operands], out) and out.shape == (*a.shape[:-1], b.shape[-1]):
            return out.copy_(functional(keys, *args, **kwargs))
        return own.redispatch(keys & _BELOW_SELECTION, *args, out=out, **kwargs)

    return kernel


def _kernel_in_place(own: Any, functional: Kernel) -> Kernel:
    def kernel(keys: torch.DispatchKeySet, added: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
        if _is_ours(keys, added, a, b):
            return added.copy_(functional(keys, added, a, b, **kwargs))
        return own.redispatch(keys & _BELOW_SELECTION, added, a, b, **kwargs)

    return kernel


def _make_kernels() -> dict[str, Kernel]:
    found: dict[str, Kernel] = {}
    for name, n_operands, kernel in (
        ("mm", 2, _product_kernel(_aten.mm.default, 2)),
        ("bmm", 2, _product_kernel(_aten.bmm.default, 3)),
        ("addmm", 3, _sum_kernel(_aten.addmm.default, 2)),
        ("baddbmm", 3, _sum_kernel(_aten.baddbmm.default, 3)),
    ):
        found[name] = kernel
        found[f"{name}.out"] = _kernel_with_out(getattr(_aten, name).out, kernel, n_operands)
        if n_operands == 3:
            found[f"{name}_"] = _kernel_in_place(getattr(_aten, f"{name}_").default, kernel)
    own = _aten._addmm_activation
    found["_addmm_activation"] = kernel = _activation_kernel(own.default, found["addmm"])
    found["_addmm_activation.out"] = _kernel_with_out(own.out, kernel, 3)
    # The gradient of a convolution: of its input, weight and bias. Attention also returns sums of exponentials, in
    # float32 for any operands.
    for name, n_operands, n_results in (
        ("convolution", 2, 1),
        ("convolution_backward", 3, 3),
        ("_scaled_dot_product_flash_attention_for_cpu", 3, 1),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", 5, 3),
    ):
        found[name] = _cast_kernel(getattr(_aten, name).default, n_operands, n_results)
    return found
