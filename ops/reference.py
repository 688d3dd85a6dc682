"""The plain PyTorch formula of every operator: what the tests compare the C cores with.

The formulas work in the dtype of what they are given: in float64 they are the oracle, in float32 they say what one
rounding per operation gives. Nothing here is in place, and nothing is fused.
"""

from __future__ import annotations

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


# By kind: the formula, and how many state slots it has.
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
    """(the new momentum, what is to be orthogonalised). Jordan 2024."""
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
    """Sum of squares of what is finite, in float64, and the number of elements that are not."""
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
    """(the largest code, the power of its share that it stands for)."""
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
    """What ``codes``, given as floating-point numbers, stand for."""
    largest, power = _q8_formula(is_signed)
    return codes.sign() * (codes / largest) ** power * scales.repeat_interleave(block)[: codes.numel()]
