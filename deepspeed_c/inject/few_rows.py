"""Products of a few rows for generation: each weight is read once, at the speed of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch.nn import functional as F

from deepspeed_c.inject.swap import swap_forward
from deepspeed_c.ops import nn

__all__ = ["few_row_products"]

MOST_ROWS = 16
_product = torch.ops.deepspeed_c.nn_product.default
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def few_row_products(model: torch.nn.Module) -> Iterator[None]:
    """Context in which layers of ``model`` multiply up to 16 rows by ``ops.nn.linear``.

    An element has the same bits for any number of rows up to 16, any thread count and any instruction set then. More
    rows run torch's product. Layers of a class of their own, and layers with another forward, stay as they are.
    """
    with ExitStack() as undo:
        for layer in model.modules():
            if type(layer) is torch.nn.Linear and "forward" not in vars(layer):
                undo.callback(swap_forward(layer, partial(_forward, layer)))
        yield


def _forward(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    weight = layer.weight
    is_small = x.numel() <= MOST_ROWS * x.shape[-1]
    if is_small and x.dtype is weight.dtype and x.dtype in _DTYPES and x.device.type == "cpu" and not x.requires_grad:
        if torch.is_autocast_enabled("cpu"):
            return nn.linear(x, weight, layer.bias)
        # The operator itself, because the checks of nn.linear take a third of the time of a small product.
        return _product(x.reshape(-1, x.shape[-1]), weight.t(), layer.bias).view(*x.shape[:-1], weight.shape[0])
    return F.linear(x, weight, layer.bias)
