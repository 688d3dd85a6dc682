"""A run that loses ranks again and again equals one that keeps them all: losses, learning rates, samples of each step."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import deepspeed_c
from deepspeed_c.data.sampler import DeepSpeedDataSampler
from deepspeed_c.utils import RepeatingLoader
from tests.ranks import run_ranks

BATCH = 12
N_STEPS = 11
# Ranks of each round, the last step that it saves, and the micro-batches that it does after this step and that are lost.
# The second round saves once more within its last window.
ROUNDS = ((4, 3, 5), (3, 5, 2), (2, 7, 0), (1, N_STEPS, 0))


class Numbered(torch.utils.data.Dataset):
    """``n`` samples with random features; the last one is the sample's number."""

    def __init__(self, n: int) -> None:
        self.features = torch.randn(n, 5, generator=torch.Generator().manual_seed(1))
        self.features[:, -1] = torch.arange(n)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.features[i]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 13), torch.nn.Tanh(), torch.nn.Linear(13, 3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(batch[:, :4]).square().sum(1).mean()


def config_of(folder: str, stage: int, efficiency: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 20},
        "seed": 5,
        "checkpoint": {"auto_resume": folder},
        **({} if efficiency is None else {"data_efficiency": efficiency}),
    }


def efficiency_of(n_epochs: int = 30) -> dict[str, Any]:
    return {"enabled": True, "seed": 3, "data_sampling": {"enabled": True, "num_epochs": n_epochs}}


def run(
    rank: int, world: int, folder: str, kind: str, stage: int, n: int, last: int, n_lost: int, saves_within: bool
) -> Any:
    """A round. Returns this rank's part of each step up to ``last``, and all samples that the history knows."""
    efficiency = efficiency_of() if kind == "in turn" else None
    data = Numbered(n)
    engine = deepspeed_c.initialize(
        model=Net(),
        config=config_of(folder, stage, efficiency),
        training_data=None if kind == "torch" else data,
    )[0]
    sampler = None
    if kind == "torch":
        steps = engine.gradient_accumulation_steps()
        sampler = DeepSpeedDataSampler(efficiency_of(), n, 1, rank, world, None, steps, rank)
        if engine.resumed_from is not None:
            sampler.load_state_dict(engine.client_state["sampler"])
        batches = iter(DataLoader(data, batch_sampler=sampler))
    else:
        batches = iter(RepeatingLoader(engine.training_dataloader))

    told: dict[int, Any] = {}

    def window(n_micro: int) -> list[int]:
        samples = []
        for _ in range(n_micro):
            batch = next(batches)
            samples += batch[:, -1].int().tolist()
            engine.backward(engine(batch))
            engine.step()
        return samples

    def state() -> dict[str, Any]:
        return {} if sampler is None else {"sampler": sampler.state_dict()}

    while engine.global_steps < last:
        lr, samples = engine.get_lr(), window(engine.gradient_accumulation_steps())
        told[engine.global_steps] = samples, engine._optimizer.last_facts.loss, lr
    saved = state()
    if not saves_within:
        engine.save_checkpoint(folder, client_state=saved)
    window(n_lost)
    if saves_within:
        engine.save_checkpoint(folder, client_state=saved)
    history = engine._state._history
    known = {}
    if engine.training_dataloader is not None:
        first, end = history.steps()
        known = {step: history.samples(step).samples for step in range(first, min(end, last) + 1)}
    weights = [p.detach().clone() for p in engine.module.parameters()] if stage < 3 else []
    engine.close()
    return told, known, weights


def together(results: list[Any]) -> dict[int, tuple[list[int], float, list[float]]]:
    """Samples, loss and learning rates of each step, over all ranks."""
    tables = [told for told, _, _ in results]
    return {
        step: (sorted(itertools.chain.from_iterable(table[step][0] for table in tables)), *tables[0][step][1:])
        for step in tables[0]
    }


@pytest.mark.parametrize(
    "kind, stage, n",
    [
        *(("engine", stage, 60) for stage in range(4)),
        *(("torch", stage, n) for stage, n in ((1, 60), (3, 41))),
        *(("engine", stage, n) for stage, n in ((1, 41), (2, 7), (3, 3))),
        *(("in turn", stage, n) for stage, n in ((0, 60), (2, 41), (3, 7))),
    ],
)
def test_rounds_on_fewer_ranks_equal_a_run_that_keeps_them(tmp_path: Path, kind: str, stage: int, n: int) -> None:
    straight = run_ranks(4, run, f"{tmp_path}/straight", kind, stage, n, N_STEPS, 0, False)
    expected, folder, found, known = together(straight), f"{tmp_path}/rounds", {}, {}
    for i, (world, last, n_lost) in enumerate(ROUNDS):
        results = run_ranks(world, run, folder, kind, stage, n, last, n_lost, i == 1)
        again = found.keys() & together(results).keys()
        assert not again, f"steps {sorted(again)} were done by two rounds, though the first has saved them"
        found.update(together(results))
        known.update(results[0][1])
    assert found.keys() == expected.keys() == set(range(1, N_STEPS + 1))
    for step, (samples, loss, lr) in expected.items():
        got = found[step]
        assert got[0] == samples, f"step {step}: samples {got[0]}, without a loss of ranks {samples}"
        assert got[1] == pytest.approx(loss, rel=1e-5), f"step {step}: loss {got[1]}, expected {loss}"
        assert got[2] == lr, f"step {step}: learning rate {got[2]}, expected {lr}"
        assert kind == "torch" or sorted(itertools.chain(*itertools.chain(*known[step]))) == samples, step
    read = [sample for step in sorted(found) for sample in found[step][0]]
    counts = torch.bincount(torch.tensor(read), minlength=n)
    n_epochs = N_STEPS * BATCH // n
    assert counts.min() >= n_epochs and counts.max() <= n_epochs + 1, f"samples were read {counts.tolist()} times"
    for a, b in zip(straight[0][2], results[0][2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
