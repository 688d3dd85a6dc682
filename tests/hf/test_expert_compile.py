"""Compiled graphs around experts that ``expert_parallel`` has spread over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.hf.expert_families import make, rows_of
from tests.hf.stack import on_ranks
from tests.training import config, engine_of, update

STEPS, LEARNING_RATE = 2, 0.05


def compiled_body(rank: int, world: int, cases: list[tuple[int, bool]]) -> list[dict[str, Any]]:
    from torch._dynamo.utils import counters

    found = []
    for stage, deep in cases:
        torch._dynamo.reset()
        counters.clear()
        settings = config(
            stage,
            lr=LEARNING_RATE,
            gradient_clipping=0,
            rows=2,
            zero={"stage3_param_persistence_threshold": 0},
            compile={"deepcompile": deep, "autoep_non_moe": True},
            expert_parallel={"enabled": True, "autoep_size": 2},
        )
        with engine_of(make("mixtral", num_hidden_layers=1), settings) as engine:
            forward = engine.module.model.layers[0].mlp.experts.forward
            engine.compile(backend="eager" if not deep else "aot_eager")
            losses = [update(engine, engine(**rows_of(step, 0, rank)).loss) for step in range(STEPS)]
            breaks, n_graphs = dict(counters["graph_break"]), counters["stats"]["unique_graphs"]
            module = engine.module
        is_undone = module.model.layers[0].mlp.experts.forward == forward
        found.append({"losses": losses, "breaks": breaks, "graphs": n_graphs, "undone": is_undone})
    return found


def plain_body(rank: int, world: int, n_ranks: int) -> list[list[float]]:
    model, losses = make("mixtral", num_hidden_layers=1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        of_ranks = [model(**rows_of(step, 0, each)).loss for each in range(n_ranks)]
        (sum(of_ranks) / n_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in of_ranks])
    return losses


def test_experts_stay_out_of_graphs() -> None:
    expected = on_ranks(1, plain_body, 2)[0]
    for rank, of_rank in enumerate(on_ranks(2, compiled_body, [(2, False), (3, True)])):
        for found in of_rank:
            assert found["losses"] == pytest.approx([of_step[rank] for of_step in expected], abs=1e-5)
            assert found["graphs"] > 0 and found["undone"]
            assert not [text for text in found["breaks"] if "moe_sort" in text or "Tensor.item" in text], found[
                "breaks"
            ]
            assert any("autoep_non_moe" in text for text in found["breaks"]), found["breaks"]
