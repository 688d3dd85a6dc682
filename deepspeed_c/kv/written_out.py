"""Attention that a layer writes out by itself, over blocks: a product with the keys of a block cache waits for the
product with the values.

Families of transformers before its ``AttentionInterface`` do this: GPT-J, CodeGen, Falcon and Bloom.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepspeed_c.kv.group import CallNeedsOwnCache, own_cache

__all__ = ["Keys"]

_SLOPES = "_deepspeed_c_slopes"


class _PutOff:
    """A tensor of a layer's attention that is not computed. Functions of torch find their method here by name."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function.__name__.strip("_")
        given = [*args, *(kwargs or {}).values()]
        own = next(each for each in given if isinstance(each, _PutOff))
        method = getattr(type(own), f"_{name}", None)
        if method is None:
            raise own_cache(f"its attention is part of its layers, and calls {name} where no tensor is")
        return method(own, *args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise own_cache(f"its attention is part of its layers, and reads {name} where no tensor is")

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Itself: blocks keep their type, and sums are float32."""
        return self


class Keys(_PutOff):
    """The keys of a layer.

    Args:
        states: of the new tokens, [batch, heads, tokens, dim].
        view: the blocks of the layer.
        attend: (view, query [batch, heads, tokens, dim], mask, scale, slopes) to [batch, tokens, heads, dim].
    """

    def __init__(self, states: torch.Tensor, view: Any, attend: Callable[..., torch.Tensor]) -> None:
        self.states, self.view, self.attend = states, view, attend

    @property
    def shape(self) -> torch.Size:
        return self.states.shape

    def reshape(self, *shape: int) -> Keys:
        return self

    def transpose(self, first: int, second: int) -> Keys:
        """Itself, as the right side of a product. Raises NeedsOwnCache for other dimensions."""
        if {first, second} != {-1, -2}:
            raise own_cache(f"its attention is part of its layers, and turns dimensions {first} and {second} of keys")
        return self

    def _matmul(self, query: torch.Tensor, keys: Keys) -> _Scores:
        return _Scores(self, query)

    def _baddbmm(
        self, bias: torch.Tensor, batch1: torch.Tensor, batch2: Keys, *, beta: float = 1.0, alpha: float = 1.0
    ) -> _Scores:
        scores = _Scores(self, batch1)
        scores.scale, scores.slopes = alpha, _slopes_of(bias, self.states.shape[1]) * beta
        return scores


class _Scores(_PutOff):
    """Products of queries [..., tokens, dim] and keys."""

    def __init__(self, keys: Keys, query: torch.Tensor) -> None:
        batch, _, _, dim = keys.states.shape
        self.keys = keys
        self.query = query.reshape(batch, -1, query.shape[-2], dim).to(keys.states.dtype)
        self.dtype = query.dtype
        self.scale = 1.0
        self.slopes: torch.Tensor | None = None
        self.mask: torch.Tensor | None = None

    def view(self, *shape: int) -> _Scores:
        return self

    def __mul__(self, factor: float) -> _Scores:
        self.scale *= factor
        return self

    def __truediv__(self, divisor: float) -> _Scores:
        return self * (1 / divisor)

    def __add__(self, mask: torch.Tensor | None) -> _Scores:
        """Scores with the mask of ``attention._mask``: None, or bool [batch, tokens]."""
        if mask is not None and (mask.dtype != torch.bool or mask.ndim != 2):
            raise own_cache("its attention is part of its layers, and adds a bias of positions")
        self.mask = mask
        return self

    def _softmax(self, scores: _Scores, dim: int | None = None, *args: Any, **kwargs: Any) -> _Shares:
        return _Shares(self)


class _Shares(_PutOff):
    """The softmax of scores."""

    def __init__(self, scores: _Scores) -> None:
        self.scores = scores

    def view(self, *shape: int) -> _Shares:
        return self

    def _dropout(self, shares: _Shares, p: float = 0.5, training: bool = True, inplace: bool = False) -> _Shares:
        if training and p:
            raise own_cache("its attention drops shares", CallNeedsOwnCache)
        return self

    def __matmul__(self, values: torch.Tensor) -> torch.Tensor:
        """Attention over blocks, [..., tokens, dim] as ``values``."""
        scores = self.scores
        keys = scores.keys
        out = keys.attend(keys.view, scores.query, scores.mask, scores.scale, scores.slopes).transpose(1, 2)
        return out if values.ndim == out.ndim else out.flatten(0, 1)

    def _matmul(self, shares: _Shares, values: torch.Tensor) -> torch.Tensor:
        return self @ values

    _bmm = _matmul


def _slopes_of(alibi: torch.Tensor, n_heads: int) -> torch.Tensor:
    """The slopes [heads] of a bias [batch * heads, 1, tokens] that grows from 0 by the slope of its head (ALiBi, arXiv
    2108.12409). 0 where each row has one token: a softmax of one score is 1."""
    found = getattr(alibi, _SLOPES, None)
    if found is None:
        steps = alibi.float().view(-1, n_heads, alibi.shape[-1])
        least = torch.where(steps > 0, steps, torch.inf).amin((0, 2))
        found = torch.where(least.isinf(), 0.0, least)
        setattr(alibi, _SLOPES, found)  # all layers of a forward get the same bias
    return found
