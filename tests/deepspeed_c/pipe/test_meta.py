"""Pipelines whose layers are built on the meta device: ``initialize`` gives them values, at stage 3 shard by shard."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_c.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed_c.zero.weights.param import state_of
from tests.deepspeed_c.pipe.models import VOCABULARY, WIDTH, as_logits, loss_fn, micro_batches
from tests.deepspeed_c.pipe.test_engine import SCHEDULES, config_of
from tests.deepspeed_c.pipe.test_stage3 import SMALL_UNITS, TOLERANCE
from tests.deepspeed_c.zero.test_tensor_parallel import logical
from tests.ranks import run_ranks
from tests.training import descend, engine_of

N, STEPS = 4, 3


def layers(tied: bool) -> list[Any]:
    words = (VOCABULARY, WIDTH)
    head = LayerSpec(nn.Linear, WIDTH, VOCABULARY, bias=False)
    return [
        TiedLayerSpec("embed", nn.Embedding, *words) if tied else LayerSpec(nn.Embedding, *words),
        *(LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)),
        TiedLayerSpec("embed", nn.Embedding, *words, forward_fn=as_logits) if tied else head,
    ]


CUT = {"layer_specs": [{"patterns": [r"[1-4]\.weight"], "partition_type": "column", "gather_output": True}]}


def train(rank: int, world: int, stages: int, zero: int, tied: bool, where: str, schedule: str, n_tp: int) -> Any:
    """(whole weights before the first step, losses, whole weights after the last, (elements of this rank's parts,
    elements of its weights))."""
    torch.manual_seed(rank)
    is_meta = where == "everywhere" or rank < world // stages
    with torch.device("meta") if is_meta else nullcontext():
        net = PipelineModule(layers(tied), num_stages=stages, loss_fn=loss_fn, schedule=schedule, **SCHEDULES[schedule])
    assert all(p.is_meta == is_meta for p in net.parameters())
    section = {"stage": zero, **(SMALL_UNITS if zero == 3 else {})}
    cut = {"tensor_parallel": {"autotp_size": n_tp, "partition_config": CUT}} if n_tp > 1 else {}
    with engine_of(net, config_of(N // (world // stages // n_tp), zero_optimization=section, **cut)) as engine:
        pieces = [(p, state_of(p)) for p in net.parameters()]
        sizes = [(p.numel(), p.numel()) if s is None else (s.piece.numel(), s.numel) for p, s in pieces]
        first = logical(engine)
        n = engine.gradient_accumulation_steps()
        at = net.mpu().get_data_parallel_rank() * n
        losses = [float(engine.train_batch(iter(micro_batches(step, 0, N)[at : at + n]))) for step in range(STEPS)]
        last = logical(engine)
    return first, losses, last, tuple(map(sum, zip(*sizes, strict=True)))


def plain(tied: bool, first: dict[str, torch.Tensor]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses, weights) of one process that begins with the weights ``first``."""
    specs = layers(False)
    built = nn.ModuleDict({str(i): spec.build() for i, spec in enumerate(specs[: -1 if tied else None])})
    built.load_state_dict(first)
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1, momentum=0.9)

    def forward(x: torch.Tensor) -> torch.Tensor:
        for module in built.values():
            x = module(x)
        return as_logits(built["0"], x) if tied else x

    losses = [
        descend(optimizer, sum(loss_fn(forward(x), y) for x, y in micro_batches(step, 0, N)) / N)
        for step in range(STEPS)
    ]
    return losses, {name: p.detach() for name, p in built.named_parameters()}


@pytest.mark.parametrize(
    ("world", "stages", "zero", "tied", "where", "schedule", "n_tp"),
    [
        (2, 2, 3, False, "everywhere", "1f1b", 1),
        (2, 2, 3, True, "everywhere", "zb_v", 1),
        (4, 2, 3, True, "everywhere", "zb_h1", 1),
        (2, 2, 3, False, "on the first stage", "1f1b", 1),
        (4, 2, 3, True, "on the first stage", "1f1b", 1),
        (2, 2, 0, True, "everywhere", "1f1b", 1),
        (4, 2, 2, True, "on the first stage", "1f1b", 1),
        (4, 2, 3, True, "everywhere", "1f1b", 2),
        (8, 2, 3, True, "everywhere", "zb_h1", 2),
    ],
)
def test_values_are_made_and_train_as_one_process(world, stages, zero, tied, where, schedule, n_tp):
    outcome = run_ranks(world, train, stages, zero, tied, where, schedule, n_tp)
    first: dict[str, torch.Tensor] = {}
    for rank, (mine, *_) in enumerate(outcome):
        for name, value in mine.items():
            name = name.replace("tied_modules.embed", "0")
            known = first.setdefault(name, value)
            assert torch.equal(value, known), f"rank {rank} begins with another {name}: {value} and {known}"
    assert len({float(value.flatten()[0]) for value in first.values()}) == len(first), first
    losses, weights = plain(tied, first)
    for rank, (_, got, mine, (n_own, n_all)) in enumerate(outcome):
        assert got == pytest.approx(losses, rel=TOLERANCE), f"rank {rank}: {got} and {losses}"
        for name, value in mine.items():
            error = float((value - weights[name.replace("tied_modules.embed", "0")]).abs().max())
            assert error <= TOLERANCE, f"rank {rank}, {name}: {error}"
        if zero == 3 and world > stages * n_tp:
            assert n_own < 0.7 * n_all, f"rank {rank} holds {n_own} of {n_all} elements"
