"""A checkpoint in memory. Tests write it and compare with it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, LogicalTensor, ParamInfo, Read, Source, Topology

NAMES = {
    # name -> (shape, group; None: frozen, -1: buffer)
    "embed": ((7, 5), 0), "frozen": ((3, 2), None), "scale": ((), 1), "wide": ((2, 3, 4), 0), "mean": ((5,), -1),
    "bias": ((11,), 1), "empty": ((0, 4), 1), "last": ((13,), 0),
}  # fmt: skip


class MemorySource(Source):
    """Random tensors of all kinds. ``low``: the dtype of the weights. If it is float32, there are no masters."""

    def __init__(self, low: torch.dtype, states: Sequence[str] = ("exp_avg", "exp_avg_sq"), **state: Any) -> None:
        generator = torch.Generator().manual_seed(3)
        self.where, self.format = "memory", "deepspeed_c"
        self.data: dict[tuple[str, str], torch.Tensor] = {}
        self.params: dict[str, ParamInfo] = {}
        self.aliases = {"head": "embed"}
        self.topology = Topology()
        self.groups = [
            {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
            {"lr": 0.2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0},
        ]
        for name, (shape, group) in NAMES.items():
            exact = torch.randn(shape, generator=generator)
            if group == -1:
                self.data[BUFFER, name] = exact
                continue
            self.data[PARAM, name] = exact.to(low)
            self.params[name] = ParamInfo(group=group, counts={} if group is None else {"step": torch.tensor(4.0)})
            if group is None:
                continue
            if low != torch.float32:
                self.data[MASTER, name] = exact
            for kind in states:
                self.data[kind, name] = torch.randn(shape, generator=generator)
        self.tensors = {
            (kind, name): LogicalTensor(name=name, kind=kind, shape=tuple(data.shape), dtype=data.dtype)
            for (kind, name), data in self.data.items()
        }
        self.state = {
            "counters": {"global_steps": 4, "global_samples": 16, "skipped_steps": 1},
            "lr_scheduler": {"last_batch_iteration": 3}, "client_state": {"epoch": 2, "rng": torch.arange(3)},
            "config": {"train_batch_size": 4, "fp16": {"enabled": low == torch.float16}}, **state,
        }  # fmt: skip

    def read(self, reads: Sequence[Read]) -> None:
        for tensor, begin, into, box in reads:
            assert box is None
            flat = self.data[tensor.key].reshape(-1)
            assert 0 <= begin and begin + into.numel() <= flat.numel(), (tensor, begin, into.numel())
            into.copy_(flat[begin : begin + into.numel()])


def whole(source: Source, kind: str, name: str) -> torch.Tensor:
    """One logical tensor, read in three parts."""
    tensor = source.tensors[kind, name]
    n = math.prod(tensor.shape)
    into = torch.empty(n, dtype=tensor.dtype)
    cuts = sorted({0, n // 3, n // 2, n})
    source.read([Read(tensor, a, into[a:b]) for a, b in itertools.pairwise(cuts)])
    return into.view(tensor.shape)
