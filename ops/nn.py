"""Fused operators of transformer layers, forward and backward: norms, activations, dropout, rotary positions, softmax,
attention; and products of 16-bit elements.

Each reads its operands once and keeps no intermediate result. Elements are float32, bfloat16 or float16, computed in
float32 and rounded once; results have the same bits for any number of threads and any instruction set. The formulas are
in ``dsc/nn.h``, and in PyTorch in ``deepspeed_c.ops.reference``. The latter computes the operators on devices without
kernels (``deepspeed_c.ops.placement``) and for rows without elements. Weights and biases may have any strides.

Under autocast ``attention`` casts as torch's does. A bias takes the dtype of x, and tensors that are added or
multiplied take the wider of their dtypes.

Kernels have first derivatives. A second derivative raises BackwardError, except for dropout and rotary positions, which
are linear, and for ``linear``.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from deepspeed_c import _C  # noqa: F401  (registers the operators)
from deepspeed_c.ops import fake, reference
from deepspeed_c.ops.autocast import bias_by_autocast, cast_by_autocast, join_by_autocast, without_autocast
from deepspeed_c.ops.first_derivative import first_derivative_only
from deepspeed_c.ops.placement import has_kernels

__all__ = [
    "attention",
    "bias_act",
    "bias_dropout_residual",
    "bias_gelu",
    "geglu",
    "layer_norm",
    "linear",
    "masked_softmax",
    "rms_norm",
    "rotary",
    "swiglu",
]

Act = Literal["gelu", "gelu_tanh", "silu", "relu", "sigmoid"]

_ops = torch.ops.deepspeed_c
_MAX_SEED = 2**63 - 1


def _call(operator: Any, *args: Any) -> Any:
    """Calls an operator. Without gradients the call skips autograd's layer, which is Python for an operator that is
    registered from Python, and takes longer than a small tensor does."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return operator(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args)


def _has_kernels(x: Tensor) -> bool:
    """Whether a kernel computes rows like ``x``'s: kernels need rows with at least one element."""
    return has_kernels(x) and not (x.dim() and x.shape[-1] == 0)


def _columns(values: Tensor | None, name: str, x: Tensor) -> Tensor | None:
    """A weight or bias in dense form, as kernels need it."""
    if values is not None and x.dim() and x.shape[-1] == 0 and values.numel():
        raise ValueError(f"argument {name} has {values.numel()} elements; 0 belong to x")
    return values if values is None else values.contiguous()


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
) -> Any:
    """(s - mean) / sqrt(var + eps) * weight + bias over the last dimension, s = x + residual (arXiv 1607.06450).

    x, residual: [..., n]. weight, bias: [n], of one dtype, which may be another than x's. Returns y [..., n], or with a
    residual (y, s). s is the input of the next residual connection. ValueError for shapes that do not fit.
    """
    return _norm(x, weight, bias, eps, residual, is_rms=False)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, residual: Tensor | None = None) -> Any:
    """s / sqrt(mean(s^2) + eps) * weight over the last dimension, s = x + residual (arXiv 1910.07467).

    Shapes, dtypes and results as in ``layer_norm``.
    """
    return _norm(x, weight, None, eps, residual, is_rms=True)


def _norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None, *, is_rms: bool
) -> Any:
    weight, bias = _columns(weight, "weight", x), _columns(bias, "bias", x)
    if not _has_kernels(x):
        y, total = reference.nn_norm(x, residual, weight, bias, eps, is_rms)
    else:
        y, total = _call(_ops.nn_norm, x, residual, weight, bias, eps, is_rms)[:2]
    return y if residual is None else (y, total)


def bias_act(x: Tensor, bias: Tensor | None, act: Act) -> Tensor:
    """act(x + bias). x: [..., n]; bias: [n] of x's dtype. ValueError for an activation that does not exist."""
    bias = _columns(bias_by_autocast(bias, x), "bias", x)
    if not _has_kernels(x):
        return reference.nn_bias_act(x, bias, act)
    return _call(_ops.nn_bias_act, x, bias, act)


def bias_gelu(x: Tensor, bias: Tensor | None = None, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """GELU (arXiv 1606.08415) of x + bias, as in ``torch.nn.functional.gelu``."""
    return bias_act(x, bias, "gelu_tanh" if approximate == "tanh" else "gelu")


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up (arXiv 2002.05202). gate, up: [..., n]; without ``up``, gate is [..., 2 n] and holds both, gate
    first."""
    return _gated(gate, up, "silu")


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """gelu(gate) * up; shapes as in ``swiglu``."""
    return _gated(gate, up, "gelu_tanh" if approximate == "tanh" else "gelu")


def _gated(gate: Tensor, up: Tensor | None, act: Act) -> Tensor:
    gate, up = join_by_autocast(gate, up)
    if not _has_kernels(gate):
        return reference.nn_gated(gate, up, act)
    return _call(_ops.nn_gated, gate, up, act)


def bias_dropout_residual(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    p: float = 0.5,
    *,
    training: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """residual + dropout(x + bias). x, residual: [..., n]; bias: [n]; all of one dtype.

    An element is left out with probability p, the others are divided by 1 - p. Random numbers come from Philox with a
    seed that is drawn from ``generator`` (by default torch's own). So a recomputation that restores the generator draws
    the same numbers again. ``torch.nn.functional.dropout`` draws other numbers. ValueError for p outside [0, 1].
    """
    x, residual = join_by_autocast(x, residual)
    bias = _columns(bias_by_autocast(bias, x), "bias", x)
    if training and p > 0.0:
        return _ops.nn_drawn_dropout(x, bias, residual, p, torch.randint(_MAX_SEED, (), generator=generator))
    return _dropout(x, bias, residual, p if training else 0.0, 0)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool = False) -> Tensor:
    """Rotates pairs of elements by the angles of their positions (RoPE, arXiv 2104.09864).

    x: [batch, tokens, heads, head_dim], any strides but the last (a transposed [batch, heads, tokens, head_dim] is read
    where it is). cos, sin: float32 [1 or batch, tokens, pairs], which take no gradient. The first 2 * pairs elements of
    each head are rotated: pairs (i, i + pairs), or (2 i, 2 i + 1) with ``is_interleaved``.
    """
    # Tensors without elements may have strides that no kernel can read, and contiguous() does not change them.
    if not has_kernels(x) or x.numel() == 0:
        return reference.nn_rotary(x, cos, sin, is_interleaved, False)
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    return _call(_ops.nn_rotary, x, cos.contiguous(), sin.contiguous(), is_interleaved, False)


def masked_softmax(x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, is_causal: bool = False) -> Tensor:
    """softmax(scale * x + mask) over the last dimension.

    x: [batch, heads, queries, keys]. mask: broadcasts to x; bool (True takes part) or of x's dtype (added). is_causal:
    query i sees the keys up to i + keys - queries. A row that sees nothing is 0.
    """
    if mask is not None:
        mask = mask.expand(x.shape)
        if mask.dtype not in (torch.bool, x.dtype):
            mask = mask.to(x.dtype)
        if mask.stride(-1) != 1 and x.shape[-1] > 1:
            mask = mask.contiguous()
    if not _has_kernels(x):
        return reference.nn_softmax(x, mask, scale, is_causal)
    return _call(_ops.nn_softmax, x, mask, scale, is_causal)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias, for processors whose own products of 16-bit elements are slow.

    x: [..., n_cols]. weight: [n_outputs, n_cols]. bias: [n_outputs]. All of one dtype: bfloat16, float16 or float32.
    Returns [..., n_outputs]. Operands are widened tile by tile and multiplied in float32; no whole float32 copy is
    made, and the result is rounded once. Results and the gradient of x have the same bits for any number of rows. Under
    autocast operands are cast as torch's ``linear`` does.

    The product has derivatives of any order. On devices without a kernel this is torch's ``linear``.
    """
    x, weight, bias = cast_by_autocast(x, weight, bias)
    if x.device.type not in ("cpu", "meta"):
        return torch.nn.functional.linear(x, weight, bias)
    if not x.dim():
        raise ValueError("argument x has no dimension; rows of elements are needed")
    if weight.dim() != 2:
        raise ValueError(f"argument weight must have 2 dimensions, not {weight.dim()}")
    if weight.shape[1] != x.shape[-1]:
        raise ValueError(f"argument weight has {weight.shape[1]} columns, x has {x.shape[-1]}")
    if weight.dtype != x.dtype:
        raise ValueError(f"argument weight is of {str(weight.dtype)[6:]}, unlike x, which is of {str(x.dtype)[6:]}")
    y = _call(_ops.nn_product, x.reshape(x.shape[:-1].numel(), x.shape[-1]), weight.t(), bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    documents: Tensor | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """softmax(scores) v with rules instead of a mask tensor, in memory that grows with the number of tokens only.

    q: [batch, heads, queries, dim]. k, v: [batch, kv_heads, keys, dim], kv_heads dividing heads; v may have a dim of
    its own. All of one dtype and of any strides but the last. Query i has position p = i + keys - queries and sees key
    j if all given rules allow it: ``causal``: j <= p; ``window``: abs(p - j) < window; ``documents`` (integers [batch,
    keys]): p and j have the same number, and it is not negative, so that a negative number is padding.

    Scores are scale * q k (by default dim**-0.5), then soft_cap * tanh(score / soft_cap), then less slope * abs(p - j)
    for ``alibi_slopes`` ([heads] or [batch, heads], arXiv 2108.12409). ``sinks`` [heads] are scores without a value,
    one a head. For a query that sees no key, out is 0. Returns out [batch, heads, queries, dim of v], and with
    ``return_lse`` (out, lse), lse float32 [batch, heads, queries] being the logarithm of the sum of exp(scores) (-inf
    if no key is seen), for merging outputs over parts of the keys. q, k, v and sinks have gradients, computed from the
    gradients of out and lse. On devices other than the host the formula is computed over all pairs. ValueError for
    shapes that do not fit. Without these rules torch's ``scaled_dot_product_attention`` is as good. For these rules it
    would need a mask of [queries, keys].
    """
    if scale is None:
        scale = max(q.shape[-1], 1) ** -0.5
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, must be at least 1: a query sees itself")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap is {soft_cap}, must be positive")
    sinks, alibi_slopes = (x if x is None else x.float().contiguous() for x in (sinks, alibi_slopes))
    if documents is not None:
        documents = documents.to(torch.int32).contiguous()
    q, k, v = cast_by_autocast(q, k, v)
    q, k, v = (x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous() for x in (q, k, v))
    rules = (sinks, alibi_slopes, documents, scale, causal, window or 0, soft_cap or 0.0)
    has_kernel = q.device.type in ("cpu", "meta") and q.numel() > 0 and v.shape[-1] > 0
    with without_autocast(q):
        out, lse = (_ops if has_kernel else reference).nn_attention(q, k, v, *rules)
    return (out, lse) if return_lse else out


# The gradients are separate operators, without derivatives.


def _norm_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, residual, weight, bias, _, is_rms = inputs
    _, total, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.has_residual, ctx.is_rms = residual is not None, is_rms
    ctx.save_for_backward(total if ctx.has_residual else x, weight, bias, mean, rstd)


@first_derivative_only("deepspeed_c.ops.nn.layer_norm or rms_norm")
def _norm_backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None, *_: Any) -> tuple:
    total, weight, bias, mean, rstd = ctx.saved_tensors
    if dy is None:
        dy = torch.zeros_like(total)
    _, _, needs_weight, needs_bias = ctx.needs_input_grad[:4]
    dx, dweight, dbias = _ops.nn_norm_backward(
        dy,
        dsum if ctx.has_residual else None,
        total.contiguous(),
        weight,
        mean,
        rstd,
        ctx.is_rms,
        needs_weight,
        needs_bias,
        bias,
    )
    return (
        dx,
        dx if ctx.has_residual else None,
        dweight if needs_weight else None,
        dbias if needs_bias else None,
        None,
        None,
    )


def _bias_act_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, bias, ctx.act = inputs
    ctx.save_for_backward(x, bias)


@first_derivative_only("deepspeed_c.ops.nn.bias_act")
def _bias_act_backward(ctx: Any, dy: Tensor) -> tuple:
    x, bias = ctx.saved_tensors
    needs_bias = ctx.needs_input_grad[1]
    dx, dbias = _ops.nn_bias_act_backward(dy, x, bias, ctx.act, needs_bias)
    return dx, dbias if needs_bias else None, None


def _gated_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, up, ctx.act = inputs
    ctx.save_for_backward(x, up)


@first_derivative_only("deepspeed_c.ops.nn.swiglu or geglu")
def _gated_backward(ctx: Any, dy: Tensor) -> tuple:
    x, up = ctx.saved_tensors
    dx, dup = _ops.nn_gated_backward(dy, x, up, ctx.act)
    return dx, None if up is None else dup, None


def _dropout(x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, seed: int) -> Tensor:
    return (_ops if _has_kernels(x) else reference).nn_dropout(x, bias, residual, p, seed)


def _drawn_dropout(x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, seed: Tensor) -> Tensor:
    return _dropout(x, bias, residual, p, int(seed))


def _drawn_dropout_backward(dy: Tensor, p: float, seed: Tensor, needs_bias: bool) -> tuple[Tensor, Tensor]:
    if _has_kernels(dy):
        return _ops.nn_dropout_backward(dy, p, int(seed), needs_bias)
    dx = reference.nn_dropout(dy, None, None, p, int(seed))
    return dx, dx.flatten(0, -2).sum(0) if needs_bias else dx.new_empty(0)


# Dropout with the seed in a tensor: a compiler cannot draw a number while tracing, and a number would break its graph.
_LIBRARY = torch.library.Library("deepspeed_c", "FRAGMENT")
_LIBRARY.define("nn_drawn_dropout(Tensor x, Tensor? bias, Tensor? residual, float p, Tensor seed) -> Tensor")
_LIBRARY.define(
    "nn_drawn_dropout_backward(Tensor dy, float p, Tensor seed, bool needs_bias) -> (Tensor dx, Tensor dbias)"
)
for _name, _implementation, _fake in (
    ("nn_drawn_dropout", _drawn_dropout, fake.drawn_dropout),
    ("nn_drawn_dropout_backward", _drawn_dropout_backward, fake.drawn_dropout_backward),
):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _fake, "Meta")


def _dropout_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, _, _, ctx.p, ctx.seed = inputs


def _drawn_dropout_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, _, _, ctx.p, seed = inputs
    ctx.save_for_backward(seed)


def _dropout_backward(ctx: Any, dy: Tensor) -> tuple:
    return _dropout_gradients(ctx, dy, _ops.nn_dropout, _ops.nn_dropout_backward, ctx.seed)


def _drawn_dropout_gradients(ctx: Any, dy: Tensor) -> tuple:
    return _dropout_gradients(ctx, dy, _ops.nn_drawn_dropout, _ops.nn_drawn_dropout_backward, *ctx.saved_tensors)


def _dropout_gradients(ctx: Any, dy: Tensor, forward: Any, backward: Any, seed: Tensor | int) -> tuple:
    needs_x, needs_bias, needs_residual = ctx.needs_input_grad[:3]
    dx = dbias = None
    if torch.is_grad_enabled() and (needs_x or needs_bias):
        # The gradient drops the same elements. It is computed by the operator of forward, which has a derivative.
        dx = forward(dy, None, None, ctx.p, seed)
        dbias = dx.flatten(0, -2).sum(0)
    elif needs_x or needs_bias:
        dx, dbias = backward(dy, ctx.p, seed, needs_bias)
    return dx, dbias if needs_bias else None, dy if needs_residual else None, None, None


def _rotary_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, cos, sin, ctx.is_interleaved, ctx.is_inverse = inputs
    ctx.save_for_backward(cos, sin)


def _rotary_backward(ctx: Any, dy: Tensor) -> tuple:
    cos, sin = ctx.saved_tensors
    if dy.stride(-1) != 1 and dy.shape[-1] > 1:
        dy = dy.contiguous()
    return _ops.nn_rotary(dy, cos, sin, ctx.is_interleaved, not ctx.is_inverse), None, None, None, None


def _softmax_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, _, ctx.scale, _ = inputs
    ctx.save_for_backward(output)


@first_derivative_only("deepspeed_c.ops.nn.masked_softmax")
def _softmax_backward(ctx: Any, dy: Tensor) -> tuple:
    (y,) = ctx.saved_tensors
    dx = _ops.nn_softmax_backward(dy, y, ctx.scale)
    # A trainable mask, for example a bias of positions, is added after the scale.
    dmask = dx / ctx.scale if ctx.needs_input_grad[1] else None
    return dx, dmask, None, None


def _product_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    a, b, _ = inputs
    ctx.save_for_backward(a, b)


def _product_backward(ctx: Any, dy: Tensor) -> tuple:
    a, b = ctx.saved_tensors
    needs_a, needs_b, needs_bias = ctx.needs_input_grad
    return (
        _call(_ops.nn_product, dy, b.mT, None) if needs_a else None,
        _call(_ops.nn_product, a.mT, dy, None) if needs_b else None,
        dy.flatten(0, -2).sum(0) if needs_bias else None,
    )


def _attention_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, sinks, slopes, documents, *ctx.rules = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, sinks, slopes, documents)


@first_derivative_only("deepspeed_c.ops.nn.attention")
def _attention_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    q, k, v, out, lse, sinks, slopes, documents = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    if dout.stride(-1) != 1 and dout.shape[-1] > 1:
        dout = dout.contiguous()
    if dlse is not None:
        dlse = dlse.contiguous()
    dq, dk, dv, dsinks = _ops.nn_attention_backward(dout, dlse, q, k, v, out, lse, sinks, slopes, documents, *ctx.rules)
    return dq, dk, dv, None if sinks is None else dsinks, None, None, None, None, None, None


for _name, _backward, _context in (
    ("nn_norm", _norm_backward, _norm_context),
    ("nn_bias_act", _bias_act_backward, _bias_act_context),
    ("nn_gated", _gated_backward, _gated_context),
    ("nn_dropout", _dropout_backward, _dropout_context),
    ("nn_drawn_dropout", _drawn_dropout_gradients, _drawn_dropout_context),
    ("nn_rotary", _rotary_backward, _rotary_context),
    ("nn_softmax", _softmax_backward, _softmax_context),
    ("nn_attention", _attention_backward, _attention_context),
    ("nn_product", _product_backward, _product_context),
):
    torch.library.register_autograd(f"deepspeed_c::{_name}", _backward, setup_context=_context)
