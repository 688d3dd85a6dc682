"""Products of a few rows for generation: each weight is read once, at the speed of memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch.nn import Linear
from torch.nn import functional as F

from deepspeed_c.inject.swap import swap_forward
from deepspeed_c.ops import nn

__all__ = ["few_row_products"]

MOST_ROWS = 16
_MOST_LAYERS = 8  # DSC_NN_MAX_PRODUCTS
_layers = torch.ops.deepspeed_c.nn_layers.default
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def few_row_products(model: torch.nn.Module) -> Iterator[None]:
    """Context in which layers of ``model`` multiply up to 16 rows by the product of ``ops.nn.linear``.

    An element has the same bits for any number of rows up to 16, any thread count and any instruction set then. More
    rows run torch's product. Layers of a class of their own, and layers with another forward, stay as they are.

    Layers that get the same tensor one after the other (query, key and value; gate and up) run in one call from their
    second time on: the first of them computes them all.
    """
    products = _Products()
    with ExitStack() as undo:
        for layer in model.modules():
            if type(layer) is Linear and "forward" not in vars(layer):
                undo.callback(swap_forward(layer, partial(products.forward, layer)))
        yield


class _Products(threading.local):
    """The products of a model, and the layers that follow one another with one input: those of each thread."""

    def __init__(self) -> None:
        self._followers: dict[Linear, list[Linear]] = {}  # by the layer that gets their input first
        self._alone: set[Linear] = set()  # first layers whose followers did not follow once
        self._x: torch.Tensor | None = None
        self._version = 0
        self._first: Linear | None = None  # the layer that got x first
        self._ahead: dict[Linear, torch.Tensor] = {}  # results for x that nobody has asked for yet

    def forward(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        weight = layer.weight
        is_few = x.numel() <= MOST_ROWS * x.shape[-1] and x.dtype is weight.dtype and x.dtype in _DTYPES and x.is_cpu
        if not is_few or torch.is_grad_enabled():
            return F.linear(x, weight, layer.bias)
        if torch.is_autocast_enabled("cpu"):
            return nn.linear(x, weight, layer.bias)
        # Tensors of inference mode count no versions, so a change of x between two layers would not be seen.
        if x.is_inference():
            return _compute(x, [weight], [layer.bias])[0]
        if x is not self._x or x._version != self._version:
            return self._begin(layer, x, weight)
        found = self._ahead.pop(layer, None)
        if found is None:
            self._note_follower(layer, weight)
            (found,) = _compute(x, [weight], [layer.bias])
        return found

    def _begin(self, layer: Linear, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The product of the first layer of x. Its followers are computed with it."""
        if self._ahead and self._first is not None:
            self._alone.add(self._first)
            del self._followers[self._first]
        self._x, self._version, self._first, self._ahead = x, x._version, layer, {}
        weights, biases = [weight], [layer.bias]
        followers = self._followers.get(layer, [])
        for follower in followers:
            weights.append(follower.weight)
            biases.append(follower.bias)
            if not _is_ready(follower, weights[-1]):
                return _compute(x, weights[:1], biases[:1])[0]
        found = _compute(x, weights, biases)
        self._ahead = dict(zip(followers, found[1:], strict=True))
        return found[0]

    def _note_follower(self, layer: Linear, weight: torch.Tensor) -> None:
        if self._first in (None, layer) or self._first in self._alone or not _is_ready(layer, weight):
            return
        followers = self._followers.setdefault(self._first, [])
        if layer not in followers and len(followers) + 1 < _MOST_LAYERS:
            followers.append(layer)


def _is_ready(layer: Linear, weight: torch.Tensor) -> bool:
    """Whether ``weight`` stays as it is until its layer runs: a hook may gather the weight, or make it."""
    return not layer._forward_pre_hooks and weight.shape == (layer.out_features, layer.in_features)


def _compute(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None]) -> list[torch.Tensor]:
    with torch._C._AutoDispatchBelowAutograd():  # autograd's layer takes longer than a small product
        return _layers(x, weights, biases)
