"""observe/record.py, compared with numbers by hand; and numbers of engines, compared with plain torch."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_c.engine.inputs import count_tokens
from deepspeed_c.observe.record import Event, SampleRate, StepRecord
from deepspeed_c.pipe.module import LayerSpec, PipelineModule
from tests.log_lines import LogLines
from tests.ranks import on_ranks, run_ranks
from tests.toys import Chain, mean_square
from tests.training import config, engine_of, update

KNOWN = StepRecord(step=3, samples=24, skipped_steps=1, lr=[0.1, 0.2], momentum=[(0.9, 0.999), 0.5])


def test_events_of_what_is_known() -> None:
    assert KNOWN.events() == [Event("Train/Samples/lr", 0.1, 24), Event("Train/Samples/skipped_steps", 1, 24)]
    phases = {"forward": 1.0, "backward": 5.0, "backward.inner": 2.0, "backward.reduce": 3.0, "fwd_microstep": 9.0}
    record = KNOWN._replace(loss=math.nan, grad_norm=math.inf, loss_scale=8.0, n_tokens=77, phases_ms=phases)
    named = {event.name.removeprefix("Train/Samples/"): event.value for event in record.events()}
    assert math.isnan(named.pop("train_loss"))
    assert named == {
        "lr": 0.1,
        "grad_norm": math.inf,
        "loss_scale": 8.0,
        "skipped_steps": 1,
        "tokens": 77,
        "elapsed_time_ms_forward": 1.0,
        "elapsed_time_ms_backward": 5.0,
        "elapsed_time_ms_backward_inner": 2.0,
        "elapsed_time_ms_backward_allreduce": 3.0,
    }
    assert StepRecord(step=1, samples=1, skipped_steps=0, lr=[], momentum=[]).events()[0].name.endswith("skipped_steps")


def test_the_line() -> None:
    assert KNOWN.line({}) == "step=3, skipped=1, lr=[0.1, 0.2], mom=[(0.9, 0.999), 0.5]"
    means = {"other": 1.0, "backward.reduce": 2.0, "backward.gather": 1.5, "backward.inner": 1.0, "backward": 4.5}
    line = KNOWN._replace(samples_per_sec=1234.5).line(means)
    assert line.endswith("backward=4.50 ms (gather 1.50, reduce 2.00), other=1.00 ms, samples/s=1234"), line


def test_rate_without_the_first_steps() -> None:
    times = iter([10.0, 12.0, 16.0])
    rate = SampleRate(is_counted=True, clock=lambda: next(times))
    found = []
    for _ in range(4):
        rate.end_step(6)
        found.append(rate.samples_per_sec())
    assert found == [None, None, 3.0, 2.0]
    silent = SampleRate(is_counted=False, clock=lambda: pytest.fail("the clock was read"))
    silent.end_step(6)
    assert silent.samples_per_sec() is None


@pytest.mark.parametrize(
    ("inputs", "kwargs", "n"),
    [
        ((), {}, 0),
        ((), {"input_ids": torch.zeros(2, 5, dtype=torch.int64)}, 10),
        ((), {"input_ids": torch.zeros(0, 5, dtype=torch.int64)}, 0),
        ((), {"inputs_embeds": torch.zeros(2, 5, 7)}, 10),
        (({"input_ids": torch.zeros(3, 3, dtype=torch.int32)},), {}, 9),
        ((torch.zeros(2, 11, dtype=torch.int64), torch.zeros(2, 11)), {}, 22),
        ((torch.zeros(2, 11),), {}, 0),
        ((torch.zeros(4, dtype=torch.int64),), {}, 0),
        (("text",), {"input_ids": None}, 0),
    ],
)
def test_tokens_in_arguments(inputs: Any, kwargs: Any, n: int) -> None:
    assert count_tokens(inputs, kwargs) == n


def make_model() -> torch.nn.Module:
    return Chain(end=mean_square, embedding=torch.nn.Embedding(13, 8), head=torch.nn.Linear(8, 1))


def ids(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(13, (3, 7 + rank), generator=generator)


STEPS, MICRO = 3, 2


def plain(world: int) -> list[tuple[float, float]]:
    """(mean loss, norm of the mean gradient) of each step."""
    torch.manual_seed(0)
    model = make_model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [model(ids(step, micro, rank)) for micro in range(MICRO) for rank in range(world)]
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.cat([p.grad.view(-1) for p in model.parameters()]).norm()
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def numbers_body(rank: int, world: int, stage: int, by_caller: bool, extra: dict) -> None:
    torch.manual_seed(0)
    settings = config(
        stage,
        "AdamW",
        rows=3,
        lr=0.05,
        params={"weight_decay": 0.01},
        accumulate=MICRO,
        **{"gradient_clipping": 0.0, **extra},
    )
    with engine_of(make_model(), settings) as engine:
        for step, (loss, norm) in enumerate(plain(world)):
            for micro in range(MICRO):
                value = engine(ids(step, micro, rank))
                if by_caller:
                    engine.scale(value).backward()
                else:
                    engine.backward(value)
                engine.step()
            record = engine._record()
            print(f"stage {stage}, step {step}: {record.loss} ({loss}), {record.grad_norm} ({norm}), {record.n_tokens}")
            tolerance = 2e-2 if extra else 1e-5
            assert record.loss == pytest.approx(loss, rel=tolerance)
            assert record.grad_norm == pytest.approx(norm, rel=tolerance)
            assert record.n_tokens == sum(3 * (7 + r) for r in range(world)) * MICRO
            assert record.samples == (step + 1) * 3 * MICRO * world and record.step == step + 1


@pytest.mark.parametrize("by_caller", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_numbers_of_a_step_equal_plain_torchs(stage: int, by_caller: bool) -> None:
    run_ranks(2, numbers_body, stage, by_caller, {})


def test_numbers_under_a_loss_scale() -> None:
    run_ranks(2, numbers_body, 2, False, {"fp16": {"enabled": True, "loss_scale": 128.0}})


@on_ranks(1)
def test_a_loss_that_the_engine_never_saw_is_unknown(rank: int, world: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with engine_of(make_model(), config) as engine:
        engine(ids(0, 0, rank)).backward()
        engine.step()
        assert engine._record().loss is None, "nobody has shown the loss to the engine"
        update(engine, engine(ids(1, 0, rank)))
        assert engine._record().loss is not None


def pipeline_body(rank: int, world: int) -> list[str]:
    torch.manual_seed(0)
    layers = [LayerSpec(torch.nn.Embedding, 13, 8), LayerSpec(torch.nn.Linear, 8, 1)]
    module = PipelineModule(layers, num_stages=2, loss_fn=lambda outputs, labels: outputs.square().mean())
    settings = config(None, "AdamW", rows=3, lr=0.05, accumulate=MICRO, wall_clock_breakdown=True)
    with LogLines() as log, engine_of(module, settings) as engine:
        batches = [(ids(0, micro, 0), torch.zeros(1)) for micro in range(MICRO)]
        loss = engine.train_batch(iter(batches))
        record, found = engine._record(), engine.get_wall_clock_timers()
        assert record.loss == pytest.approx(float(loss)), (record.loss, loss)
        assert record.n_tokens == 3 * 7 * MICRO
        for phase in ("data", "forward", "backward", "messages", "step"):
            assert found[phase] > 0, (phase, found)
    return [line for line in log.lines if line.startswith("stage ")]


def test_a_pipelines_numbers_are_known_on_all_ranks() -> None:
    first, second = run_ranks(2, pipeline_body)
    assert [line.split(":")[0] for line in first] == ["stage 0", "stage 1"] and not second, first
    assert all("forward=" in line and "messages=" in line for line in first), first


def monitored_body(rank: int, world: int, folder: str) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.01}},
        "gradient_clipping": 0.0,
        "wall_clock_breakdown": True,
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"},
    }
    torch.manual_seed(0)
    with engine_of(make_model(), config) as engine:
        assert engine.monitor.enabled
        for step in range(STEPS):
            for micro in range(MICRO):
                update(engine, engine(ids(step, micro, rank)))


def test_monitors_get_each_steps_numbers_once(tmp_path: Path) -> None:
    run_ranks(2, monitored_body, str(tmp_path))
    names = {path.stem for path in (tmp_path / "job").glob("*.csv")}
    assert {f"Train_Samples_{name}" for name in ("train_loss", "lr", "grad_norm", "elapsed_time_ms_forward")} <= names
    with open(tmp_path / "job" / "Train_Samples_train_loss.csv") as file:
        rows = list(csv.reader(file))[1:]
    assert [int(step) for step, _ in rows] == [3 * MICRO * 2 * (step + 1) for step in range(STEPS)]
    found, expected = [float(value) for _, value in rows], [loss for loss, _ in plain(2)]
    print(found, expected)
    assert found == pytest.approx(expected, rel=1e-5)
