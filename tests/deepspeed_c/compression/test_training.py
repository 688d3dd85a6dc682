"""Training with quantized layers (deepspeed_c/compression) at each ZeRO stage on two ranks, against formulas in plain
torch in one process; a resumed schedule on another number of ranks."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import deepspeed_c
from deepspeed_c.compression.compress import init_compression, redundancy_clean
from deepspeed_c.errors import ConfigError
from tests.deepspeed_c.compression.oracle import (
    Model,
    Oracle,
    batch,
    compressed_engine,
    loss_of,
    section,
    train,
    weights_of,
)
from tests.ranks import run_ranks
from tests.training import descend_together

TECHNIQUES = {
    "weights of 8 bits": {"bits": 8, "symmetric": True, "offset": 1},
    "weights of 4 bits": {"bits": 4, "symmetric": False, "offset": 0},
    "weights and rows on compressed-tensors' levels": {
        "bits": 4,
        "acts": "dynamic",
        "symmetric": False,
        "offset": 1,
        "levels": "compressed-tensors",
    },
    "rows of activations": {"acts": "dynamic", "symmetric": False, "offset": 1},
    "both": {"bits": 8, "acts": "dynamic", "symmetric": True, "offset": 2},
}
N_STEPS = 4


def config_of(stage: int, dtype: str, options: dict) -> dict:
    return {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        dtype if dtype != "fp32" else "bf16": {"enabled": dtype != "fp32"},
        "compression_training": section(**options),
    }


def theory(options: dict, n_steps: int = N_STEPS) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = Oracle(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for model.step in range(n_steps):
        words = batch(model.step)
        loss = loss_of(model(words), words)
        descend_together(optimizer, [loss], 1.0)
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def cells_body(rank: int, world: int) -> list:
    found = []
    for stage in range(4):
        for dtype in ("fp32", "bf16"):
            for name, options in TECHNIQUES.items():
                config = config_of(stage, dtype, options)
                engine = compressed_engine(Model(), config)
                losses = train(engine, rank, world, range(N_STEPS))
                weights = weights_of(engine)
                engine.eval()
                before = engine(batch(9))
                redundancy_clean(engine, config)
                apart = (engine(batch(9)) - before).abs().max().item()
                found.append((stage, dtype, name, losses, weights, apart))
                engine.destroy()
    return found


def test_each_technique_at_each_stage_is_the_formula():
    everyone = run_ranks(2, cells_body)
    expected = {name: theory(options) for name, options in TECHNIQUES.items()}
    for one, other in zip(*everyone, strict=True):
        stage, dtype, name, losses, weights, apart = one
        mean = [(a + b) / 2 for a, b in zip(losses, other[3], strict=True)]
        wanted, wanted_weights = expected[name]
        tolerance = 1e-5 if dtype == "fp32" else 0.05
        print(stage, dtype, name, mean, wanted, apart)
        assert mean == pytest.approx(wanted, abs=tolerance), (stage, dtype, name)
        assert weights.keys() == wanted_weights.keys()
        for key, weight in weights.items():
            torch.testing.assert_close(weight, wanted_weights[key], rtol=0, atol=tolerance, msg=f"{one[:3]} {key}")
        assert apart <= 1e-6 and other[5] <= 1e-6, (one[:3], apart, other[5])


STATIC = {"bits": 8, "acts": "static", "symmetric": True, "offset": 1}


def one_rank_body(rank: int, world: int, folder: str) -> dict:
    """Static ranges; stochastic rounding; checkpoints in mid-schedule, of one rank."""
    found: dict = {}
    for stage in (0, 3):
        engine = compressed_engine(Model(), config_of(stage, "fp32", STATIC))
        found["static", stage] = train(engine, rank, world, range(N_STEPS)), weights_of(engine)
        engine.destroy()
    for stage in (0, 2):
        options = {"bits": 4, "symmetric": True, "offset": 0, "rounding": "stochastic"}
        engine = compressed_engine(Model(), config_of(stage, "fp32", options))
        found["stochastic", stage] = train(engine, rank, world, range(2)), weights_of(engine)
        engine.destroy()
    engine = compressed_engine(Model(), config_of(1, "fp32", {**TECHNIQUES["both"], "offset": 3}))
    train(engine, rank, world, range(2))
    engine.save_checkpoint(folder)
    found["whole run"] = train(engine, rank, world, range(2, 5)), weights_of(engine)
    engine.destroy()
    with pytest.raises(ConfigError, match="no layer of the model is compressed"):
        deepspeed_c.initialize(model=Model(), config=config_of(0, "fp32", STATIC))
    return found


def resumed_body(rank: int, world: int, folder: str) -> tuple:
    engine = compressed_engine(Model(), config_of(3, "fp32", {**TECHNIQUES["both"], "offset": 3}))
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    started = [engine.compression_scheduler.weight_quantization_enabled]
    losses = train(engine, rank, world, range(2, 5))
    started.append(engine.compression_scheduler.weight_quantization_enabled)
    options = {"bits": 4, "symmetric": True, "offset": 0, "rounding": "stochastic"}
    weights = weights_of(engine)
    engine.destroy()
    drawn = compressed_engine(Model(), config_of(3, "fp32", options))
    noise = train(drawn, rank, world, range(2)), weights_of(drawn)
    drawn.destroy()
    return losses, weights, started, noise


def mean_of(ranks: list[list[float]]) -> list[float]:
    return [sum(each) / len(each) for each in zip(*ranks, strict=True)]


def test_ranges_draws_and_a_schedule_that_goes_on_with_more_ranks(tmp_path: Path):
    (alone,) = run_ranks(1, one_rank_body, str(tmp_path))
    losses, weights = theory(STATIC)
    for stage in (0, 3):
        found, found_weights = alone["static", stage]
        print("static", stage, found, losses)
        assert found == pytest.approx(losses, abs=1e-5)
        for key, weight in weights.items():
            torch.testing.assert_close(found_weights[key], weight, rtol=0, atol=1e-5)
    everyone = run_ranks(2, resumed_body, str(tmp_path))
    found, weights, started, _ = everyone[0]
    wanted, wanted_weights = alone["whole run"]
    found = mean_of([each[0] for each in everyone])
    print("resumed", found, wanted, started)
    assert started == [False, True] and found == pytest.approx(wanted, abs=1e-5)
    for key, weight in wanted_weights.items():
        torch.testing.assert_close(weights[key], weight, rtol=0, atol=1e-5)
    # Random directions depend on step, weight and element only.
    drawn, drawn_weights = alone["stochastic", 0]
    nearest, _ = theory({"bits": 4, "symmetric": True, "offset": 0}, 2)
    others = alone["stochastic", 2][0], mean_of([each[3][0] for each in everyone])
    print("stochastic", drawn, others, nearest)
    assert all(other == pytest.approx(drawn, abs=1e-5) for other in others) and drawn != pytest.approx(
        nearest, abs=1e-4
    )
    for key, weight in drawn_weights.items():
        torch.testing.assert_close(everyone[0][3][1][key], weight, rtol=0, atol=1e-5)


def test_a_copy_keeps_the_step_at_which_it_was_made():
    model = init_compression(Model(), {"compression_training": section(**TECHNIQUES["weights of 8 bits"])})
    steps = model.mid.quantization.steps
    steps.advance()
    twin = copy.deepcopy(model)
    steps.advance()
    print(steps.count, twin.mid.quantization.steps.count)
    assert steps.count == 2 and twin.mid.quantization.steps.count == 1
    assert twin.mid.quantization.steps is twin.table.quantization.steps
