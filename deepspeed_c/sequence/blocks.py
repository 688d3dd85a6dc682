"""Attention of some queries to some keys, with the logarithm of the sum of its exponentials.

With the logarithm, results for different keys can be merged (``deepspeed_c.ops.attention_parts``). With it the gradient
of a part can also be computed from the result for all keys: probabilities are e^(score - log_sum), for a log_sum from
any source.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed_c.ops.autocast import without_autocast

__all__ = ["block_attention", "block_attention_backward"]

_HAS_KERNEL = frozenset({"cpu"})

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns softmax(scale q k^T + mask) v, and the logarithms: (out like q, log_sum [batch, heads, queries], float32
    or float64).

    q: [batch, heads, queries, width]; k, v: [batch, key heads, keys, width]. The number of key heads divides the number
    of heads. is_causal: query i sees keys 0 to i; there must be as many queries as keys. mask: [queries, keys] in q's
    dtype, added to the scores: 0 where the query sees the key and -inf elsewhere. Every query must see a key.
    Differentiate with ``block_attention_backward``.

    The host uses torch's kernel, which stores no scores. Other devices use torch's operators, which store the scores.
    """
    if q.device.type in _HAS_KERNEL:
        out, log_sum = _flash(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
        return out, log_sum
    # Autocast would round the scores to 16 bits here, and not in the backward.
    with without_autocast(q):
        scores = _scores(q, k, scale, is_causal, mask)
        log_sum = torch.logsumexp(scores, -1)
        probabilities = torch.exp(scores - log_sum.unsqueeze(-1))
        return (probabilities @ _repeat(v, q).to(scores.dtype)).to(q.dtype), log_sum


def block_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    *,
    scale: float,
    is_causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v due to these keys. grad: the gradient of ``out``.

    out and log_sum are of the attention to all keys; k and v may be a part of the keys. Other arguments as in
    ``block_attention``.
    """
    if q.device.type in _HAS_KERNEL:
        return _flash_backward(grad, q, k, v, out, log_sum, 0.0, is_causal, attn_mask=mask, scale=scale)
    probabilities = torch.exp(_scores(q, k, scale, is_causal, mask) - log_sum.unsqueeze(-1))
    wide = grad.to(probabilities.dtype)
    grad_v = _sum_groups(probabilities.mT @ wide, v)
    shift = (wide * out.to(wide.dtype)).sum(-1, keepdim=True)
    grad_scores = probabilities * (wide @ _repeat(v, q).to(wide.dtype).mT - shift) * scale
    grad_q = grad_scores @ _repeat(k, q).to(wide.dtype)
    grad_k = _sum_groups(grad_scores.mT @ q.to(wide.dtype), k)
    return grad_q.to(q.dtype), grad_k, grad_v


def _scores(q: Tensor, k: Tensor, scale: float, is_causal: bool, mask: Tensor | None) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ _repeat(k, q).to(wide).mT * scale
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores if mask is None else scores + mask.to(wide)


def _repeat(keys: Tensor, q: Tensor) -> Tensor:
    return keys.repeat_interleave(q.shape[1] // keys.shape[1], 1)


def _sum_groups(grads: Tensor, like: Tensor) -> Tensor:
    return grads.unflatten(1, (like.shape[1], -1)).sum(2).to(like.dtype)
