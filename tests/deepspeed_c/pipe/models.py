"""The model of the pipeline tests as a list of layers, and the same model for one plain process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed_c.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from tests.toys import Mlp

VOCABULARY, WIDTH, N_BLOCKS = 23, 16, 6


class Embed(nn.Module):
    def __init__(self, width: int = WIDTH, scale: float = 0.1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, width) * scale)

    def forward(self, ids):
        return nn.functional.embedding(ids, self.weight)


class Block(Mlp):
    def __init__(self, width: int) -> None:
        super().__init__(width, 3 * width, nn.functional.gelu, has_norm=True, adds=True, bias=False)


def as_logits(module: nn.Module, x):
    return x @ module.weight.to(x.dtype).T


def loss_fn(logits, labels):
    return nn.functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def layers(tied: bool = True) -> list[Any]:
    embed = TiedLayerSpec("embed", Embed) if tied else LayerSpec(Embed)
    head = TiedLayerSpec("embed", Embed, forward_fn=as_logits) if tied else LayerSpec(nn.Linear, WIDTH, VOCABULARY)
    return [embed, *(LayerSpec(Block, WIDTH) for _ in range(N_BLOCKS)), LayerSpec(nn.LayerNorm, WIDTH), head]


def module_of(num_stages: int, **options: Any) -> PipelineModule:
    specs = layers(options.pop("tied", True))
    return PipelineModule(specs, num_stages=num_stages, loss_fn=loss_fn, seed_layers=True, **options)


class Plain(nn.Module):
    """The same layers, with the same weights, one after the other."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.specs = layers(tied)
        self.built = nn.ModuleDict()
        for i, spec in enumerate(self.specs):
            if isinstance(spec, TiedLayerSpec) and i > 0:
                continue
            torch.manual_seed(1234 + i)
            self.built[str(i)] = spec.build()

    def forward(self, x):
        for i, spec in enumerate(self.specs):
            if str(i) in self.built:
                x = self.built[str(i)](x)
            else:
                x = spec.forward_fn(self.built["0"], x)
        return x


def micro_batches(step: int, data_rank: int, n: int, size: int = 2, length: int = 5) -> list[tuple[Any, Any]]:
    """The (input, target) pairs that a pipeline gets in a step."""
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    made = []
    for _ in range(n):
        ids = torch.randint(VOCABULARY, (size, length + 1), generator=generator)
        made.append((ids[:, :-1], ids[:, 1:]))
    return made
