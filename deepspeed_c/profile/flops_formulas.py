"""Multiply-accumulates and floating-point operations of one call of an operator, from the shapes of its operands.

Multiply-accumulates (MACs) come from matrix products, convolutions, recurrent layers and attention. Formulas come from
torch's table (``torch.utils.flop_counter``) if it is correct for an operator, or if a caller has registered the
operator there. The formulas here are for operators that the table lacks, or for which it is wrong. One MAC is two
FLOPs.

Elementwise operators cost FLOPs but no MACs. They are counted as in DeepSpeed's profiler: one FLOP for each element of
an activation, a softmax, a sum or a product of tensors, and for each input of a pooling; five FLOPs for each input of a
norm with weights, four without weights; one FLOP for each output of a resized image, and for the bias of a convolution
at each output. Other elementwise operators, and the gates of fused recurrent layers, are not counted. As in DeepSpeed,
elementwise FLOPs are counted in forward only. In the backward pass only MACs count.

Attention counts all pairs of queries and keys, as in DeepSpeed and torch, even if a kernel skips the pairs behind a
causal mask. The backward of fused attention recomputes the scores, so it has five matrix products where the forward has
two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch.utils import flop_counter

from deepspeed_c import _C  # noqa: F401  (registers the operators)
from deepspeed_c.ops import nn as _nn  # noqa: F401  (registers those that are written in Python)

__all__ = ["Formula", "elementwise_formulas", "mac_formulas"]

Formula = Callable[..., int]
"""A function from the operator's arguments, with its result as ``out``, to a number."""

_aten, _ours = torch.ops.aten, torch.ops.deepspeed_c


def _matrix_vector(matrix: Any, *_: Any, out: Any = None, **__: Any) -> int:
    return matrix.numel()


def _add_matrix_vector(_: Any, matrix: Any, *__: Any, out: Any = None, **___: Any) -> int:
    return matrix.numel()


def _sum_of_products(_: Any, a: Any, b: Any, *__: Any, out: Any = None, **___: Any) -> int:
    return a.numel() * b.shape[-1]


def _product(a: Any, b: Any, *_: Any, out: Any = None, **__: Any) -> int:
    return a.numel() * b.shape[-1]


def _linear(x: Any, weight: Any, *_: Any, out: Any = None, **__: Any) -> int:
    return x.numel() * weight.shape[0]


def _grouped(a: Any, b: Any, *_: Any, out: Any = None, **__: Any) -> int:
    """Each row is multiplied by the matrix of its group. If both operands are matrices, the groups divide the summed
    dimension."""
    if a.dim() == 3 and b.dim() == 2:  # the groups divide the columns of b
        return a[0].numel() * b.shape[-1]
    return a.numel() * b.shape[-1]


def _trilinear(
    a: Any,
    b: Any,
    c: Any,
    expand1: Any,
    expand2: Any,
    expand3: Any,
    sum_dims: Any,
    *_: Any,
    out: Any = None,
    **__: Any,
) -> int:
    """Two products for each element of the broadcast shape of the three operands."""
    shapes = []
    for operand, expanded in ((a, expand1), (b, expand2), (c, expand3)):
        shape = list(operand.shape)
        for dim in sorted(expanded):
            shape.insert(dim, 1)
        shapes.append(shape)
    return 2 * prod(torch.broadcast_shapes(*shapes))


def _convolution(
    x: Any, weight: Any, _bias: Any, _stride: Any, _padding: Any, _dilation: Any, transposed: bool = False, *_: Any,
    out: Any = None, **__: Any,
) -> int:  # fmt: skip
    """Each weight is used once at each position of the output, or of the input for a transposed convolution. The
    weight's second dimension is the channels of one group."""
    places = (x if transposed else out).shape[2:]
    return x.shape[0] * prod(places) * weight.numel()


def _convolution_backward(
    dy: Any, x: Any, weight: Any, _bias: Any, _stride: Any, _padding: Any, _dilation: Any, transposed: bool,
    _output_padding: Any, _groups: Any, output_mask: Any, *_: Any, out: Any = None, **__: Any,
) -> int:  # fmt: skip
    """The gradient of the input and the gradient of the weight each need as many products as forward. torch's own
    formula ignores the groups in the gradient of the weight."""
    places = (x if transposed else dy).shape[2:]
    return x.shape[0] * prod(places) * weight.numel() * (output_mask[0] + output_mask[1])


def _convolution_bias(*args: Any, out: Any = None, **kwargs: Any) -> int:
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    return 0 if bias is None else out.numel()


def _one_rnn_layer(x: Any, weight_ih: Any, weight_hh: Any, *_: Any, out: Any = None, **__: Any) -> int:
    """oneDNN's operator: one layer in one direction, x [tokens, batch, inputs]."""
    return x.shape[0] * x.shape[1] * (weight_ih.numel() + weight_hh.numel())


def _one_rnn_layer_backward(*args: Any, out: Any = None, **kwargs: Any) -> int:
    return 2 * _one_rnn_layer(*args)


def _cudnn_rnn(x: Any, weights: Any, *_: Any, out: Any = None, **__: Any) -> int:
    """cuDNN's operator: all layers and directions. In ``weights``, matrices have two dimensions and biases one."""
    tokens = prod(x.shape[:-1])
    return tokens * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _cudnn_rnn_backward(*args: Any, out: Any = None, **kwargs: Any) -> int:
    """The last argument is ``output_mask``. Its last entry requests the gradients of the weights."""
    return _cudnn_rnn(args[0], args[1]) * (1 + args[-1][3])


def _attention(q: Any, k: Any, v: Any, *_: Any, out: Any = None, **__: Any) -> int:
    return prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _attention_backward(_dy: Any, q: Any, k: Any, v: Any, *_: Any, out: Any = None, **__: Any) -> int:
    """Five products: the recomputed scores, and the gradients of the probabilities, v, q and k."""
    return prod(q.shape[:-1]) * k.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])


def _our_attention_backward(_dy: Any, _dlse: Any, q: Any, k: Any, v: Any, *_: Any, out: Any = None, **__: Any) -> int:
    return _attention_backward(_dy, q, k, v)


def _whole_attention(
    q: Any, k: Any, v: Any, embed_dim: int, num_head: int, qkv_weight: Any, qkv_bias: Any, proj_weight: Any,
    *_: Any, out: Any = None, **__: Any,
) -> int:  # fmt: skip
    """torch's fast path for ``nn.MultiheadAttention`` in evaluation."""
    width = embed_dim * embed_dim
    pairs = q.shape[0] * q.shape[1] * k.shape[1]
    projections = prod(q.shape[:-1]) * 2 * width + (prod(k.shape[:-1]) + prod(v.shape[:-1])) * width
    return projections + 2 * pairs * embed_dim


def _encoder_layer(
    src: Any, embed_dim: int, num_heads: int, qkv_weight: Any, qkv_bias: Any, proj_weight: Any, proj_bias: Any,
    use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Any, norm_bias_1: Any, norm_weight_2: Any,
    norm_bias_2: Any, ffn_weight_1: Any, ffn_bias_1: Any, ffn_weight_2: Any, *_: Any, out: Any = None, **__: Any,
) -> int:  # fmt: skip
    """torch's fast path for ``nn.TransformerEncoderLayer`` in evaluation."""
    matrices = sum(weight.numel() for weight in (qkv_weight, proj_weight, ffn_weight_1, ffn_weight_2))
    return prod(src.shape[:-1]) * (matrices + 2 * src.shape[1] * embed_dim)


_MACS: dict[Any, Formula] = {
    # torch's formulas for these four are correct, but torch inspects all arguments of a call, which takes longer than a
    # small product.
    _aten.mm: _product,
    _aten.bmm: _product,
    _aten.addmm: _sum_of_products,
    _aten.baddbmm: _sum_of_products,
    _aten.mv: _matrix_vector,
    _aten.addmv: _add_matrix_vector,
    _aten.addmv_: _add_matrix_vector,
    _aten.dot: _matrix_vector,
    _aten.vdot: _matrix_vector,
    _aten.addmm_: _sum_of_products,
    _aten.addbmm: _sum_of_products,
    _aten.baddbmm_: _sum_of_products,
    _aten._addmm_activation: _sum_of_products,
    _aten._int_mm: _product,
    _aten.linear: _linear,
    _aten._grouped_mm: _grouped,
    _aten._scaled_grouped_mm: _grouped,
    _aten._trilinear: _trilinear,
    _aten.convolution: _convolution,
    _aten.convolution_backward: _convolution_backward,
    _aten.mkldnn_rnn_layer: _one_rnn_layer,
    _aten.mkldnn_rnn_layer_backward: _one_rnn_layer_backward,
    _aten._cudnn_rnn: _cudnn_rnn,
    _aten._cudnn_rnn_backward: _cudnn_rnn_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._scaled_dot_product_fused_attention_overrideable: _attention,
    _aten._scaled_dot_product_fused_attention_overrideable_backward: _attention_backward,
    _aten._native_multi_head_attention: _whole_attention,
    _aten._transformer_encoder_layer_fwd: _encoder_layer,
    _ours.nn_attention: _attention,
    _ours.nn_attention_backward: _our_attention_backward,
}


def _halved(formula: Callable[..., int]) -> Formula:
    return lambda *args, out=None, **kwargs: formula(*args, **kwargs, out_val=out) // 2


def mac_formulas() -> dict[Any, Formula]:
    """Operators (overload packets and higher-order operators) -> the formula for the MACs of one call."""
    theirs = {operator: _halved(formula) for operator, formula in flop_counter.flop_registry.items()}
    return theirs | _MACS


def _per_input(n: int) -> Formula:
    return lambda x, *_, out=None, **__: n * x.numel()


def _per_output(n: int) -> Formula:
    def count(*_: Any, out: Any = None, **__: Any) -> int:
        first = out[0] if isinstance(out, (tuple, list)) else out
        return n * first.numel() if first.is_floating_point() or first.is_complex() else 0

    return count


def _norm(where: int) -> Formula:
    def count(x: Any, *args: Any, out: Any = None, **__: Any) -> int:
        has_weight = len(args) >= where and args[where - 1] is not None
        return x.numel() * (5 if has_weight else 4)

    return count


def _batch_norm(x: Any, weight: Any, *args: Any, out: Any = None, **__: Any) -> int:
    """In training, mean and variance are computed. In evaluation, each element is only scaled and shifted."""
    is_training = next((each for each in args if isinstance(each, bool)), False)
    return x.numel() * ((4 if is_training else 1) + (weight is not None))


def _our_norm(x: Any, residual: Any, weight: Any, *_: Any, out: Any = None, **__: Any) -> int:
    return x.numel() * ((5 if weight is not None else 4) + (residual is not None))


def _our_bias_act(x: Any, bias: Any, *_: Any, out: Any = None, **__: Any) -> int:
    return x.numel() * (1 + (bias is not None))


def _our_dropout(x: Any, bias: Any, residual: Any, *_: Any, out: Any = None, **__: Any) -> int:
    return x.numel() * ((bias is not None) + (residual is not None))


_POOLS = (
    *("avg_pool1d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d"),
    *("adaptive_max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices"),
)
_ACTIVATIONS = (
    *("relu", "relu_", "prelu", "_prelu_kernel", "elu", "elu_", "leaky_relu", "leaky_relu_", "hardtanh", "hardtanh_"),
    *("silu", "silu_", "gelu", "gelu_", "_softmax"),
)
_RESIZES = (
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("upsample_trilinear3d", "upsample_bicubic2d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d"),
    *("_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)


def elementwise_formulas() -> Mapping[Any, Formula]:
    """Operators -> the formula for the FLOPs of one call, without the two FLOPs for each MAC."""
    by_input, by_output = _per_input(1), _per_output(1)
    named = {
        **dict.fromkeys((*_POOLS, *_ACTIVATIONS), by_input),
        **dict.fromkeys((*_RESIZES, "add", "add_", "mul", "mul_"), by_output),
        **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"), _batch_norm),
        "_batch_norm_with_update": lambda x, weight, *_, out=None, **__: _batch_norm(x, weight, True),
        "_batch_norm_no_update": lambda x, weight, *_, out=None, **__: _batch_norm(x, weight, False),
        "native_layer_norm": _norm(2),
        "native_group_norm": _norm(1),
        "_fused_rms_norm": _norm(2),
        "convolution": _convolution_bias,
    }
    ours = {
        "nn_norm": _our_norm,
        "nn_bias_act": _our_bias_act,
        "nn_gated": _per_output(2),
        "nn_dropout": _our_dropout,
        "nn_drawn_dropout": _our_dropout,
        "nn_rotary": _per_input(3),
        "nn_softmax": by_input,
    }
    found = {getattr(_aten, name): formula for name, formula in named.items() if hasattr(_aten, name)}
    return found | {getattr(_ours, name): formula for name, formula in ours.items()}
