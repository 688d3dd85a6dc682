"""Toy models for tests of several parts. Names say what is hard about a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["ODD_WIDTH", "Chain", "Mlp", "Stack", "llama", "mean_square", "odd_net", "square_error", "twin_of"]

ODD_WIDTH = 7  # the number of inputs


def odd_net() -> nn.Sequential:
    """Two layers of odd sizes, with equal weights in every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(ODD_WIDTH, ODD_WIDTH), nn.Tanh(), nn.Linear(ODD_WIDTH, 3))


def mean_square(x: torch.Tensor) -> torch.Tensor:
    """A loss without labels."""
    return x.square().mean()


def square_error(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss of labels, in float32."""
    return mean_square(x.float() - y)


class Chain(nn.Module):
    """Layers with names, one after the other.

    ``between``: a function of the input of each layer but the first. ``end``: a function of the last output and of
    forward's other arguments. Its result is that of forward.
    """

    def __init__(self, between: Callable | None = None, end: Callable | None = None, **layers: nn.Module) -> None:
        super().__init__()
        self.between, self.end = between, end
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        for i, layer in enumerate(self.children()):
            x = layer(x if self.between is None or i == 0 else self.between(x))
        return x if self.end is None else self.end(x, *others)


class Stack(nn.Module):
    """Equal layers in a list, one after the other. ``end``: a function of the last output."""

    def __init__(self, n_layers: int, make: Callable[[], nn.Module], end: Callable | None = None) -> None:
        super().__init__()
        self.layers, self.end = nn.ModuleList(make() for _ in range(n_layers)), end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if self.end is None else self.end(x)


class Mlp(nn.Module):
    """``down`` of ``act`` of ``up``. ``has_norm``: a norm comes first. ``adds``: the input is added to the output."""

    def __init__(
        self,
        width: int,
        inner: int,
        act: Callable[[torch.Tensor], torch.Tensor] = torch.tanh,
        *,
        has_norm: bool = False,
        adds: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.act, self.adds = act, adds
        self.norm = nn.LayerNorm(width) if has_norm else None
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.act(self.up(x if self.norm is None else self.norm(x))))
        return x + y if self.adds else y


def llama(seed: int | None = None, **settings: Any) -> Any:
    """A Llama of transformers, drawn from ``seed``. ``settings``: entries of its configuration."""
    import transformers

    if seed is not None:
        torch.manual_seed(seed)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**{**sizes, "num_key_value_heads": 2, **settings})
    return transformers.LlamaForCausalLM(config)


def twin_of(engine: Any, twin: nn.Module) -> Any:
    """``twin`` with the engine's weights, for evaluation. Collective at stage 3."""
    twin.load_state_dict({name: value.clone() for name, value in engine.module_state_dict().items()})
    return twin.eval()
