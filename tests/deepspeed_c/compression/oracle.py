"""Formulas of quantized layers in plain torch, for one process, and a small language model to train."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_c.compression.compress import init_compression
from tests.training import engine_of, update

WORDS, WIDTH = 12, 8


def rounded(
    x: Tensor,
    bits: int,
    is_symmetric: bool = True,
    low: Tensor | None = None,
    high: Tensor | None = None,
    levels: str = "deepspeed",
) -> Tensor:
    """Each row of x [rows, n] rounded to one of 2^bits numbers of its range. The gradient passes unchanged."""
    half = 2 ** (bits - 1)
    with torch.no_grad():
        values = x.float()
        low = values.min(1, keepdim=True).values if low is None else low
        high = values.max(1, keepdim=True).values if high is None else high
        if levels != "deepspeed":
            low, high = low.clamp(max=0), high.clamp(min=0)
        n_steps = 2 * half - (levels != "deepspeed")
        if is_symmetric:
            step, zero = 2 * torch.maximum(low.abs(), high.abs()) / n_steps, 0.0
        else:
            step = (high - low) / n_steps
            zero = (-half - low / step).nan_to_num(0).round()
        codes = torch.clamp((values / step).nan_to_num(0).round() + zero, -half, half - 1)
        error = ((codes - zero) * step).to(x.dtype) - x
    return x + error


class Model(nn.Module):
    """An embedding, a layer, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table, self.mid = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, False)
        self.head.weight = self.table.weight
        with torch.no_grad():
            self.table.weight[3] = 0  # a row of zeros
            self.mid.weight[:2] = 0  # a group of zeros

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mid(self.table(words))))


class Oracle(Model):
    """The same model with the formulas: ``options`` say what is quantized from which step on."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options, self.step, self.ranges = options, 0, {}

    def weight(self, weight: Tensor, n_groups: int) -> Tensor:
        bits = self.options.get("bits")
        if bits is None or self.step < self.options["offset"]:
            return weight
        return self.rounded(weight.view(n_groups, -1), bits).view(weight.shape)

    def rounded(self, x: Tensor, bits: int, low: Any = None, high: Any = None) -> Tensor:
        return rounded(x, bits, self.options["symmetric"], low, high, self.options.get("levels", "deepspeed"))

    def act(self, x: Tensor, name: str) -> Tensor:
        kind = self.options.get("acts")
        if kind is None or self.step < self.options["offset"]:
            return x
        flat = x.reshape(-1, x.shape[-1])
        if kind == "dynamic":
            return self.rounded(flat, 8).view(x.shape)
        new = torch.stack([x.detach().min(), x.detach().max()]).float()
        self.ranges[name] = self.ranges[name] * 0.95 + new * 0.05 if name in self.ranges else new
        low, high = self.ranges[name]
        return self.rounded(flat, 8, low, high).view(x.shape)

    def forward(self, words: Tensor) -> Tensor:
        table = self.weight(self.table.weight, WORDS)
        hidden = self.act(nn.functional.embedding(words, table), "mid")
        hidden = nn.functional.linear(hidden, self.weight(self.mid.weight, 4), self.mid.bias)
        return nn.functional.linear(self.act(torch.tanh(hidden), "head"), table)


def section(**options: Any) -> dict[str, Any]:
    """The section compression_training for the options of ``Oracle``."""
    kind = "symmetric" if options["symmetric"] else "asymmetric"
    shared = {"enabled": True, "schedule_offset": options["offset"], "quantization_type": kind}
    if "levels" in options:
        shared["levels"] = options["levels"]
    made: dict[str, Any] = {}
    if options.get("bits"):
        made["weight_quantization"] = {
            "shared_parameters": {
                **shared,
                "quantize_weight_in_forward": True,
                "quantize_groups": 4,
                "rounding": options.get("rounding", "nearest"),
            },
            "different_groups": {"all": {"params": {"target_bits": options["bits"]}, "modules": ["*"]}},
        }
    if options.get("acts"):
        made["activation_quantization"] = {
            "shared_parameters": {**shared, "range_calibration": options["acts"]},
            "different_groups": {"all": {"params": {"bits": 8}, "modules": ["mid", "head"]}},
        }
    return made


def batch(step: int) -> Tensor:
    """Words [4, 6] of a step, for all ranks together."""
    return torch.randint(0, WORDS, (4, 6), generator=torch.Generator().manual_seed(step))


def loss_of(logits: Tensor, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), words.flatten())


def compressed_engine(model: nn.Module, config: dict[str, Any]) -> Any:
    return engine_of(init_compression(model, config), config)


def train(engine: Any, rank: int, world: int, steps: range) -> list[float]:
    parts = (batch(step).chunk(world)[rank] for step in steps)
    return [update(engine, loss_of(engine(words), words)) for words in parts]


def weights_of(engine: Any) -> dict[str, Tensor]:
    return {name: value.float().clone() for name, value in engine.module_state_dict().items()}
