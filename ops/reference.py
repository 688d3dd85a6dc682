"""The plain PyTorch formula of every operator: the tests compare the C cores with it.

The formulas work in the dtype of their arguments: in float64 they are the oracle, in float32 they show the effect of
one rounding per operation. Nothing here is in place, and nothing is fused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "STEPS",
    "Hyper",
    "Updated",
    "lamb_norms",
    "muon_apply",
    "muon_momentum",
    "newton_schulz",
    "nn_attention",
    "nn_bias_act",
    "nn_divergence",
    "nn_dropout",
    "nn_gated",
    "nn_norm",
    "nn_rotary",
    "nn_softmax",
    "philox",
    "q8_dequantize",
    "q8_quantize",
    "reduce",
    "step",
    "sumsq",
    "trust_ratio",
]


@dataclass(frozen=True)
class Hyper:
    """The hyper-parameters of the operators, by the names in dsc/optim.h."""

    step: int = 1
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    lr_decay: float = 0.0
    min_coeff: float = 0.01
    max_coeff: float = 10.0
    grad_scale: float = 1.0
    bias_correction: bool = True
    nesterov: bool = False
    maximize: bool = False

    def gradient(self, grad: Tensor) -> Tensor:
        return grad * (-self.grad_scale if self.maximize else self.grad_scale)

    @property
    def corrections(self) -> tuple[float, float]:
        return (1 - self.beta1**self.step, 1 - self.beta2**self.step) if self.bias_correction else (1.0, 1.0)


class Updated(NamedTuple):
    param: Tensor
    states: tuple[Tensor, ...]


def _moments(grad: Tensor, m: Tensor, v: Tensor, h: Hyper) -> tuple[Tensor, Tensor]:
    return h.beta1 * m + (1 - h.beta1) * grad, h.beta2 * v + (1 - h.beta2) * grad * grad


def adam(param: Tensor, grad: Tensor, states: Sequence[Tensor], h: Hyper) -> Updated:
    """arXiv 1412.6980, algorithm 1, with L2 regularisation."""
    m, v = _moments(h.gradient(grad) + h.weight_decay * param, *states, h)
    c1, c2 = h.corrections
    return Updated(param - h.lr * (m / c1) / ((v / c2).sqrt() + h.eps), (m, v))


def adamw(param: Tensor, grad: Tensor, states: Sequence[Tensor], h: Hyper) -> Updated:
    """arXiv 1711.05101, algorithm 2."""
    m, v = _moments(h.gradient(grad), *states, h)
    c1, c2 = h.corrections
    return Updated(param * (1 - h.lr * h.weight_decay) - h.lr * (m / c1) / ((v / c2).sqrt() + h.eps), (m, v))


def _lamb_update(param: Tensor, m: Tensor, v: Tensor, h: Hyper) -> Tensor:
    c1, c2 = h.corrections
    return (m / c1) / ((v / c2).sqrt() + h.eps) + h.weight_decay * param


def trust_ratio(param_sumsq: Tensor, update_sumsq: Tensor, h: Hyper) -> Tensor:
    """|param| / |update| within [min_coeff, max_coeff]; 1 where either is 0."""
    if param_sumsq == 0 or update_sumsq == 0:
        return torch.ones_like(param_sumsq)
    return (param_sumsq.sqrt() / update_sumsq.sqrt()).clamp(h.min_coeff, h.max_coeff)


def lamb_norms(param: Tensor, grad: Tensor, states: Sequence[Tensor], h: Hyper) -> tuple[Tensor, tuple[Tensor, ...]]:
    """[sum of param^2, sum of update^2] and the new moments."""
    m, v = _moments(h.gradient(grad), *states, h)
    update = _lamb_update(param, m, v, h)
    return torch.stack([(param * param).sum(), (update * update).sum()]), (m, v)


def lamb(param: Tensor, grad: Tensor, states: Sequence[Tensor], h: Hyper) -> Updated:
    """arXiv 1904.00962, algorithm 2, with phi bounded by the coefficients."""
    norms, (m, v) = lamb_norms(param, grad, states, h)
    return Updated(param - h.lr * trust_ratio(norms[0], norms[1], h) * _lamb_update(param, m, v, h), (m, v))


def lion(param: Tensor, grad: Tensor, states: Sequence[Tensor], h: Hyper) -> Updated:
    """arXiv 2302.06675, algorithm 2."""
    (m,), g = states, h.gradient(grad)
    update = torch.sign(h.beta1 * m + (1 - h.beta1) * g)
    return Updated(param * (1 - h.lr * h.weight_decay) - h.lr * update, (h.beta2 * m + (1 - h.beta2) * g,))


def adagrad(param: Tensor, grad: Tensor, states: Sequence[Tensor], h: Hyper) -> Updated:
    """Duchi, Hazan and Singer 2011, with the learning-rate decay of torch.optim.Adagrad."""
    g = h.gradient(grad) + h.weight_decay * param
    total = states[0] + g * g
    lr = h.lr / (1 + (h.step - 1) * h.lr_decay)
    return Updated(param - lr * g / (total.sqrt() + h.eps), (total,))


def sgd(param: Tensor, grad: Tensor, states: Sequence[Tensor], h: Hyper) -> Updated:
    """torch.optim.SGD: the first step starts the momentum at the gradient, undampened."""
    g = h.gradient(grad) + h.weight_decay * param
    if h.momentum == 0:
        return Updated(param - h.lr * g, tuple(states))
    velocity = g if h.step == 1 else h.momentum * states[0] + (1 - h.dampening) * g
    return Updated(param - h.lr * (g + h.momentum * velocity if h.nesterov else velocity), (velocity,))


# For each kind: the formula and its number of state slots.
STEPS: dict[str, tuple[Callable[[Tensor, Tensor, Sequence[Tensor], Hyper], Updated], int]] = {
    "adam": (adam, 2),
    "adamw": (adamw, 2),
    "lamb": (lamb, 2),
    "lion": (lion, 1),
    "adagrad": (adagrad, 1),
    "sgd": (sgd, 1),
}


def step(kind: str, param: Tensor, grad: Tensor, states: Sequence[Tensor], hyper: Hyper) -> Updated:
    return STEPS[kind][0](param, grad, states, hyper)


def muon_momentum(grad: Tensor, momentum_buffer: Tensor, hyper: Hyper) -> tuple[Tensor, Tensor]:
    """(the new momentum, the tensor to be orthogonalised). Jordan 2024."""
    g = hyper.gradient(grad)
    velocity = hyper.momentum * momentum_buffer + g
    return velocity, g + hyper.momentum * velocity if hyper.nesterov else velocity


def muon_apply(param: Tensor, update: Tensor, hyper: Hyper) -> Tensor:
    return param * (1 - hyper.lr * hyper.weight_decay) - hyper.lr * update


def newton_schulz(matrix: Tensor, steps: int = 5) -> Tensor:
    """Jordan 2024, on singular values: U f(f(...f(S))) V' with f(x) = 3.4445 x - 4.775 x^3 + 2.0315 x^5, by a singular
    value decomposition.
    """
    u, s, vh = torch.linalg.svd(matrix / (matrix.norm() + 1e-7), full_matrices=False)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


def sumsq(tensors: Sequence[Tensor]) -> tuple[float, int]:
    """Sum of squares of the finite elements, in float64, and the number of other elements."""
    finite = [t.double()[torch.isfinite(t)] for t in tensors]
    return sum(float((t * t).sum()) for t in finite), sum(int((~torch.isfinite(t)).sum()) for t in tensors)


def reduce(sources: Sequence[Tensor], scale: float, accumulate: bool, into: Tensor) -> Tensor:
    """In float64, rounded once to ``into``'s dtype."""
    total = torch.zeros_like(into, dtype=torch.float64)
    for source in sources:
        total = total + source.double()
    total = total * scale
    return (total + into.double() if accumulate else total).to(into.dtype)


def _q8_formula(is_signed: bool) -> tuple[int, int]:
    """(the largest code n, the exponent p): code c stands for (c / n) ** p."""
    return (127, 4) if is_signed else (255, 8)


def q8_quantize(values: Tensor, is_signed: bool, block: int = 256) -> tuple[Tensor, Tensor]:
    """(codes as numbers, scales) of a row of finite values: dsc/optim.h, without its smallest scales."""
    largest, power = _q8_formula(is_signed)
    rows = torch.nn.functional.pad(values, (0, -values.numel() % block)).view(-1, block)
    scales = rows.abs().amax(1)
    share = rows.abs() / scales.clamp_min(torch.finfo(values.dtype).tiny).unsqueeze(1)
    codes = (share ** (1 / power) * largest + 0.5).floor()
    if not is_signed:
        codes = torch.where(share > 0, codes.clamp_min(1), codes)
    return (codes * rows.sign()).view(-1)[: values.numel()], scales


def q8_dequantize(codes: Tensor, scales: Tensor, is_signed: bool, block: int = 256) -> Tensor:
    """The values of ``codes``, which are given as floating-point numbers."""
    largest, power = _q8_formula(is_signed)
    return codes.sign() * (codes / largest) ** power * scales.repeat_interleave(block)[: codes.numel()]


# Operators of dsc/nn.h. Computed in float32 at least, rounded once; autograd differentiates them.


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def nn_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, is_rms: bool
) -> tuple[Tensor, Tensor]:
    """y and the normalised tensor, x + residual. arXiv 1607.06450 and 1910.07467."""
    total = x if residual is None else (_wide(x) + _wide(residual)).to(x.dtype)
    wide = _wide(total)
    if not is_rms:
        wide = wide - wide.mean(-1, keepdim=True)
    y = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        y = y * _wide(weight)
    if bias is not None:
        y = y + _wide(bias)
    return y.to(x.dtype), total


def _act(x: Tensor, act: str) -> Tensor:
    if act == "gelu":
        return x * 0.5 * torch.erfc(-x * 0.5**0.5)
    if act == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    if act == "silu":
        return x * torch.sigmoid(x)
    if act == "relu":
        return torch.relu(x)
    if act == "sigmoid":
        return torch.sigmoid(x)
    raise ValueError(f'act is "{act}"; there are gelu, gelu_tanh, silu, relu, sigmoid')


def nn_bias_act(x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    wide = _wide(x) if bias is None else _wide(x) + _wide(bias)
    return _act(wide, act).to(x.dtype)


def nn_gated(x: Tensor, up: Tensor | None, act: str) -> Tensor:
    """arXiv 2002.05202. Without ``up``: the halves of x's last dimension."""
    gate, up = x.chunk(2, -1) if up is None else (x, up)
    return (_act(_wide(gate), act) * _wide(up)).to(x.dtype)


def philox(seed: int, n: int, device: torch.device | None = None, *, first_counter: int = 0) -> Tensor:
    """n words of Philox4x32-7 with this seed (Salmon et al., SC 2011) from ``first_counter`` on, four a counter: int64
    [n], each below 2^32."""
    counter = torch.arange(first_counter, first_counter + (n + 3) // 4, dtype=torch.int64, device=device)
    low = 2**32 - 1
    words = [counter & low, counter >> 32, torch.zeros_like(counter), torch.zeros_like(counter)]
    keys = [seed & low, seed >> 32 & low]

    def multiply(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
        # Multiplies 32 by 32 bits in two halves, since the whole product does not fit int64.
        first, second = factor * (word & 0xFFFF), factor * (word >> 16)
        total = (first >> 16) + second
        return total >> 16, (total & 0xFFFF) << 16 | (first & 0xFFFF)

    for _ in range(7):
        high0, low0 = multiply(0xD2511F53, words[0])
        high1, low1 = multiply(0xCD9E8D57, words[2])
        words = [high1 ^ words[1] ^ keys[0], low1, high0 ^ words[3] ^ keys[1], low0]
        keys = [(keys[0] + 0x9E3779B9) & low, (keys[1] + 0xBB67AE85) & low]
    return torch.stack(words, -1).view(-1)[:n]


def nn_dropout(x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, seed: int) -> Tensor:
    if not 0 <= p <= 1:
        raise ValueError(f"p is {p}, must be in [0, 1]")
    wide = _wide(x) if bias is None else _wide(x) + _wide(bias)
    if p > 0:
        n_dropped = round(p * 2**16)  # of 2**16 numbers; the two halves of each word, the low half first
        words = philox(seed, (x.numel() + 1) // 2, x.device)
        numbers = torch.stack([words & 0xFFFF, words >> 16], -1).view(-1)[: x.numel()]
        scale = 2**16 / (2**16 - n_dropped) if n_dropped < 2**16 else 0.0
        wide = torch.where((numbers >= n_dropped).view(x.shape), wide * scale, 0.0)
    return (wide if residual is None else wide + _wide(residual)).to(x.dtype)


def nn_rotary(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool, is_inverse: bool) -> Tensor:
    """arXiv 2104.09864. x: [batch, tokens, heads, head_dim]; cos, sin: [1 or batch, tokens, pairs]."""
    n_pairs = cos.shape[-1]
    turned, rest = _wide(x[..., : 2 * n_pairs]), x[..., 2 * n_pairs :]
    first, second = (
        (turned[..., 0::2], turned[..., 1::2]) if is_interleaved else (turned[..., :n_pairs], turned[..., n_pairs:])
    )
    cos, sin = cos.unsqueeze(2), -sin.unsqueeze(2) if is_inverse else sin.unsqueeze(2)
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pair, -1).flatten(-2) if is_interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def nn_softmax(x: Tensor, mask: Tensor | None, scale: float, is_causal: bool) -> Tensor:
    """x: [batch, heads, queries, keys]. Rows that see nothing are 0."""
    scores = scale * _wide(x)
    n_queries, n_keys = x.shape[-2:]
    if is_causal:
        sees = torch.ones(n_queries, n_keys, dtype=torch.bool, device=x.device).tril(n_keys - n_queries)
        scores = scores.masked_fill(~sees, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + _wide(mask)
    is_blind = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(is_blind, 0).softmax(-1).masked_fill(is_blind, 0).to(x.dtype)


def nn_divergence(student: Tensor, teacher: Tensor, beta: float, scale: float) -> Tensor:
    """The loss of each row [...] of logits [..., vocabulary], in f32 (f64 of f64): arXiv 2306.13649, equation 1."""
    log_q = (scale * _wide(student)).log_softmax(-1)
    log_p = (scale * _wide(teacher)).to(log_q.dtype).log_softmax(-1)

    def kl(log_of: Tensor, log_from: Tensor) -> Tensor:
        """A term of probability 0 is 0, and has no slope, whatever its logarithm."""
        is_zero = log_of == -torch.inf
        # Both logarithms are replaced, so that no derivative is taken at inf - inf.
        ratio = log_of.masked_fill(is_zero, 0) - log_from.masked_fill(is_zero, 0)
        return (log_of.exp() * ratio).masked_fill(is_zero, 0).sum(-1)

    if beta == 0:
        return kl(log_p, log_q)
    if beta == 1:
        return kl(log_q, log_p)
    # torch's logaddexp has no derivative where both are -inf.
    is_zero = (log_p == -torch.inf) & (log_q == -torch.inf)
    log_m = torch.logaddexp(
        log_p.masked_fill(is_zero, 0) + math.log(beta), log_q.masked_fill(is_zero, 0) + math.log1p(-beta)
    ).masked_fill(is_zero, -torch.inf)
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def nn_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    documents: Tensor | None,
    scale: float,
    is_causal: bool,
    window: int,
    soft_cap: float,
) -> tuple[Tensor, Tensor]:
    """Out and log-sum-exp, from all scores at once. Window and soft_cap are 0 if not used."""
    n_queries, n_keys, n_sharing = q.shape[2], k.shape[2], q.shape[1] // max(k.shape[1], 1)
    wide_k, wide_v = (_wide(x).repeat_interleave(n_sharing, 1) for x in (k, v))
    scores = scale * _wide(q) @ wide_k.transpose(-1, -2)
    position = torch.arange(n_queries, device=q.device)[:, None] + n_keys - n_queries
    distance = position - torch.arange(n_keys, device=q.device)
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[..., None, None] * distance.abs()
    sees = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    if window:
        sees = sees & (distance.abs() < window)
    sees = sees[None, None]
    if documents is not None:
        own = documents[:, n_keys - n_queries :, None]
        sees = sees & ((own == documents[:, None, :]) & (own >= 0))[:, None]
    scores = scores.masked_fill(~sees, -torch.inf)
    if sinks is not None:
        sink = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    is_blind = (scores == -torch.inf).all(-1, keepdim=True)
    lse = scores.masked_fill(is_blind, 0).logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp().masked_fill(is_blind, 0)[..., :n_keys]
    lse = lse.masked_fill(is_blind, -torch.inf).squeeze(-1)
    return (weights @ wide_v).to(q.dtype), lse
