"""The engine's output: one line at the start by default, and the report that each key of the configuration asks for."""

from __future__ import annotations

import functools
import operator

import pytest
import torch

import deepspeed_c
from tests import training
from tests.deepspeed_c.zero.traits import Mlp, batch
from tests.log_lines import LogLines
from tests.ranks import run_ranks


def said_body(rank: int, world: int, extra: dict, steps: int) -> list[str]:
    with LogLines() as log:
        config = training.config(2, **extra)
        with deepspeed_c.initialize(model=Mlp(), config=config)[0] as engine:
            for step in range(steps):
                training.step(engine, *batch(step, 0, rank, 0))
    return log.lines


def said(extra: dict, steps: int = 4, world: int = 1) -> list[list[str]]:
    return run_ranks(world, said_body, extra, steps)


def test_by_default_one_line_on_rank_0_and_none_on_the_others() -> None:
    first, second = said({}, world=2)
    assert len(first) == 1 and "zero_optimization.stage 2" in first[0], first
    assert second == []


def test_steps_per_print() -> None:
    lines = [line for line in said({"steps_per_print": 2})[0] if line.startswith("step=")]
    assert [line.split(",")[0] for line in lines] == ["step=2", "step=4"], lines
    assert "lr=[0.1]" in lines[0] and "skipped=0" in lines[0]
    assert "samples/s=" in lines[1]
    assert not any(line.startswith("step=") for line in said({"steps_per_print": float("inf")})[0])


@pytest.mark.parametrize("every", [None, 2])
def test_wall_clock_breakdown_times_the_phases(every) -> None:
    lines = [
        line for line in said({"wall_clock_breakdown": True, "steps_per_print": every})[0] if line.startswith("step=")
    ]
    assert len(lines) == (4 if every is None else 2), lines
    for phase in ("forward=", "backward=", "step="):
        assert phase in lines[0].split("mom=")[1], lines[0]


def test_memory_breakdown_and_dump_state() -> None:
    lines = said({"memory_breakdown": True}, steps=1)[0]
    assert any(line.startswith("before step: host RSS") for line in lines), lines
    assert any(line.startswith("after step: host RSS") for line in lines), lines
    text = "\n".join(said({"dump_state": True}, steps=0)[0])
    assert "unit 0: group 0" in text and "torch.float32" in text and "zero_optimization.stage" in text


def test_throughput_can_be_switched_off() -> None:
    lines = said({"steps_per_print": 4, "timers": {"throughput": {"enabled": False}}})[0]
    assert not any("samples/s" in line for line in lines), lines


def test_an_overflow_names_the_first_bad_parameter() -> None:
    both = functools.reduce(operator.iadd, run_ranks(2, overflow_body), [])
    said_so = [line for line in both if "step skipped" in line]
    assert len(said_so) == 1 and "mid.weight" in said_so[0] and "1 inf" in said_so[0], both


def overflow_body(rank: int, world: int) -> list[str]:
    config = training.config(2, "AdamW", bf16={"enabled": True})
    torch.manual_seed(0)
    model = Mlp()
    with LogLines() as log, deepspeed_c.initialize(model=model, config=config)[0] as engine:

        def spoil(grad: torch.Tensor) -> torch.Tensor:
            grad = grad.clone()
            grad[-1, -1] = float("inf")
            return grad

        model.mid.weight.register_hook(spoil)
        x, y = batch(0, 0, rank, 0)
        training.step(engine, x.bfloat16(), y)
        assert not engine.was_step_applied()
    return log.lines
