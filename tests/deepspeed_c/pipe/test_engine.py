"""A pipeline trains as one plain process does, by every schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.errors import ConfigError
from deepspeed_c.pipe import LayerSpec, PipelineModule
from deepspeed_c.recompute.budget import Budget
from tests.deepspeed_c.pipe.models import N_BLOCKS, Block, Plain, loss_fn, micro_batches, module_of
from tests.ranks import run_ranks
from tests.training import config, descend_together, engine_of

STEPS = 3
SCHEDULES = {"1f1b": {}, "gpipe": {}, "interleaved": {"virtual_stages": 2}, "zb_h1": {}, "zb_v": {}, "dualpipe_v": {}}


def config_of(n_micro_batches: int, **more: Any) -> dict[str, Any]:
    return config(rows=2, params={"momentum": 0.9}, accumulate=n_micro_batches, **{"gradient_clipping": 0.0, **more})


def plain_run(n_pipelines: int, n: int, *, clip: float = 0.0, tied: bool = True) -> tuple[list[float], dict[str, Any]]:
    """The losses, and the weights by the names of their layers."""
    model = Plain(tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        batches = [batch for r in range(n_pipelines) for batch in micro_batches(step, r, n)]
        total = sum(loss_fn(model(x), y) for x, y in batches) / len(batches)
        descend_together(optimizer, [total], clip)
        losses.append(float(total))
    return losses, {name.removeprefix("built."): p.detach() for name, p in model.named_parameters()}


def train(rank: int, world: int, stages: int, n: int, config: dict[str, Any], options: dict[str, Any]) -> Any:
    net = module_of(stages, **options)
    engine = engine_of(net, config, model_parameters=[p for p in net.parameters() if p.requires_grad])
    data_rank = net.mpu().get_data_parallel_rank()
    with engine:
        losses = [float(engine.train_batch(iter(micro_batches(step, data_rank, n)))) for step in range(STEPS)]
        norm = engine.get_global_grad_norm()
        weights = {name.replace("tied_modules.embed", "0"): p.detach().float() for name, p in net.named_parameters()}
    return losses, norm, weights


def check(outcome: list[Any], expected: tuple[list[float], dict[str, Any]], tolerance: float) -> None:
    losses, weights = expected
    seen = set()
    for rank, (got, norm, mine) in enumerate(outcome):
        assert got == pytest.approx(losses, rel=tolerance), f"rank {rank}"
        assert norm == pytest.approx(outcome[0][1], rel=1e-6)
        for name, value in mine.items():
            error = float((value - weights[name]).abs().max())
            assert error <= tolerance, f"rank {rank}, {name}: {error}"
            seen.add(name)
    assert seen == set(weights)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_ranks(schedule, stage):
    config = config_of(4, zero_optimization={"stage": stage})
    options = {"schedule": schedule, **SCHEDULES[schedule]}
    check(run_ranks(2, train, 2, 4, config, options), plain_run(1, 4), 2e-6)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_pipelines_of_two(stage):
    config = config_of(3, zero_optimization={"stage": stage}, gradient_clipping=0.5)
    check(run_ranks(4, train, 2, 3, config, {}), plain_run(2, 3, clip=0.5), 2e-6)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved", "zb_v"])
def test_four_stages(schedule):
    options = {"schedule": schedule, **SCHEDULES[schedule]}
    check(run_ranks(4, train, 4, 5, config_of(5), options), plain_run(1, 5), 2e-6)


def test_one_rank():
    check(run_ranks(1, train, 1, 3, config_of(3), {}), plain_run(1, 3), 2e-6)


def count_forwards_body(rank: int, world: int, schedule: str) -> Any:
    """Returns (the result of ``train``, layer -> how often the forward of its block ran in a step)."""
    net = module_of(2, schedule=schedule, **SCHEDULES[schedule])
    calls: dict[str, int] = {}
    for name, module in net.named_modules():
        if isinstance(module, Block):
            module.norm.register_forward_hook(lambda *_, name=name: calls.update({name: calls.get(name, 0) + 1}))
    config = config_of(3, activation_checkpointing={"layers": "auto"})
    engine = engine_of(net, config)
    with engine:
        engine.train_batch(iter(micro_batches(0, 0, 3)))
    alone = PipelineModule([nn.Linear(2, 2), nn.Tanh(), LayerSpec(nn.Linear, 2, 3)], num_stages=2)
    twice = sorted(alone.repeated_layers())
    with pytest.raises(ConfigError, match="no class is there twice among the 2 layers"):
        PipelineModule([nn.Linear(2, 2), nn.LayerNorm(2)], num_stages=2).repeated_layers()
    return calls, twice


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_auto_recomputes_the_repeated_layers_of_all_stages(schedule: str) -> None:
    outcome = run_ranks(2, count_forwards_body, schedule)
    calls = {name: n for found, _ in outcome for name, n in found.items()}
    assert calls == {str(i): 6 for i in range(1, 1 + N_BLOCKS)}, calls
    assert sorted(name for _, twice in outcome for name in twice) == ["0", "2"], outcome
    config = config_of(4, activation_checkpointing={"layers": "auto"})
    options = {"schedule": schedule, **SCHEDULES[schedule]}
    check(run_ranks(2, train, 2, 4, config, options), plain_run(1, 4), 2e-6)


def budget_body(rank: int, world: int, schedule: str, n: int, budget: int, folder: str) -> Any:
    """Returns (the result of ``train``, the plans that it made, the result of a second ``train`` from the same plan
    file)."""
    plans = []
    section = {"layers": "auto", "budget": budget, "budget_plan": f"{folder}/plan.json"}
    options = {"schedule": schedule, **SCHEDULES[schedule]}
    config = config_of(n, activation_checkpointing=section)
    with mock.patch.object(Budget, "_make", autospec=True, side_effect=Budget._make) as made:
        found = train(rank, world, 2, n, config, options)
    for call in made.call_args_list:
        plans.append((call.args[1].name, call.args[1].plan, call.args[0]._n_in_flight))
    return found, plans, train(rank, world, 2, n, config, options)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_v"])
def test_stages_have_budgets_of_their_own(schedule: str, tmp_path: Path) -> None:
    n, budget = 4, 60_000
    outcome = run_ranks(2, budget_body, schedule, n, budget, str(tmp_path))
    check([found for found, _, _ in outcome], plain_run(1, n), 2e-6)
    check([found for _, _, found in outcome], plain_run(1, n), 2e-6)
    in_flight = {"1f1b": [2, 1], "gpipe": [4, 4]}.get(schedule)
    for rank, (_, plans, _) in enumerate(outcome):
        assert sorted(name for name, _, _ in plans) == [
            str(s) for s in ([rank, 3 - rank] if schedule == "zb_v" else [rank])
        ]
        for _, plan, n_in_flight in plans:
            assert in_flight is None or n_in_flight == in_flight[rank], (rank, n_in_flight)
            assert plan.peak_bytes * n_in_flight <= budget, plan
    assert (tmp_path / "plan.json.stage0").exists() and (tmp_path / "plan.json.stage1").exists()


def told_ranks_twice(rank, world):
    net = module_of(1)
    said = {}
    for name, value in {"mpu": net.mpu(), "mesh_param": (1, 1), "mesh_device": object()}.items():
        with pytest.raises(ConfigError) as caught:
            deepspeed_c.initialize(model=net, config=config_of(1), **{name: value})
        said[name] = str(caught.value)
    return said


def test_its_ranks_come_from_its_topology_alone():
    (said,) = run_ranks(1, told_ranks_twice)
    for name, text in said.items():
        assert f"initialize({name}=...)" in text and "topology" in text and f"leave {name} out" in text, text
