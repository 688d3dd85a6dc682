"""Data in the engine: the same samples a step on any number of ranks, after a resume too; arguments that curricula and
progressive layer drop add to the model's forward."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import deepspeed_c
from deepspeed_c.data import RepeatingLoader
from deepspeed_c.data.indexed import MMapIndexedDatasetBuilder
from deepspeed_c.errors import ConfigError, StateError
from tests import training
from tests.log_lines import LogLines
from tests.ranks import on_ranks

BATCH = 6


class Numbers(torch.utils.data.Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.tensor([float(i)])


class Model(torch.nn.Module):
    """Remembers the samples and the keyword arguments of its forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)
        self.seen, self.given = [], []

    def forward(self, x, **kwargs):
        self.seen += x.flatten().int().tolist()
        self.given.append(kwargs)
        return self.layer(x / 100).square().mean()


def make(n=40, world=1, **sections):
    config = training.config(
        optimizer="Adam", train_batch_size=BATCH, rows=3 // world if world == 3 else 1, lr=0.01, seed=7, **sections
    )
    model = Model()
    engine, _, loader, _ = deepspeed_c.initialize(model=model, training_data=Numbers(n), config=config)
    return engine, RepeatingLoader(loader), model


def train(engine, data, n_steps):
    """The samples of this rank in each step."""
    found = []
    for _ in range(n_steps):
        del engine.module.seen[:]
        for _ in range(engine.gradient_accumulation_steps()):
            training.step(engine, next(data))
        found.append(list(engine.module.seen))
    return found


def body(rank, world, folder, sections, load, save, n_steps):
    engine, data, _ = make(world=world, **sections)
    if load:
        engine.load_checkpoint(folder)
        data = RepeatingLoader(engine.training_dataloader)
    found = train(engine, data, n_steps)
    if save:
        engine.save_checkpoint(folder)
    weights = [p.detach().tolist() for p in engine.module.parameters()]
    engine.close()
    return found, weights


def together(results):
    return [sorted(s for rank in step for s in rank) for step in zip(*(found for found, _ in results), strict=True)]


def efficiency_of(folder):
    builders = {name: MMapIndexedDatasetBuilder(f"{folder}/{name}.bin", np.int64) for name in ("samples", "values")}
    for value in range(20):
        builders["samples"].add_item_numpy(np.array([2 * value, 2 * value + 1]))
        builders["values"].add_item_numpy(np.array([value]))
    for name, builder in builders.items():
        builder.finalize(f"{folder}/{name}.idx")
    metric = {
        "index_to_sample_path": f"{folder}/samples", "index_to_metric_path": f"{folder}/values",
        "difficulty_type": "value", "clustering_type": "schedule_based", "min_difficulty": 4, "max_difficulty": 19,
        "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 12, "difficulty_step": 1},
    }  # fmt: skip
    curriculum = {"enabled": True, "curriculum_metrics": {"size": metric}}
    return {
        "enabled": True,
        "seed": 3,
        "data_sampling": {"enabled": True, "num_epochs": 9, "curriculum_learning": curriculum},
    }


@pytest.mark.parametrize("kind", ["plain", "in turn", "curriculum"])
def test_a_resume_on_other_ranks_sees_the_samples_of_an_uninterrupted_run(run_ranks, tmp_path, kind):
    sections = {
        "plain": {},
        "in turn": {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "num_epochs": 9}}},
        "curriculum": {"data_efficiency": efficiency_of(tmp_path)},
    }[kind]
    n_steps = 6 if kind == "plain" else 11  # the plain loader's epoch ends after 6 whole steps
    straight = run_ranks(1, body, str(tmp_path), sections, False, False, n_steps)
    folder = str(tmp_path / "ckpt")
    first = run_ranks(2, body, folder, sections, False, True, 4)
    second = run_ranks(3, body, folder, sections, True, False, n_steps - 4)
    assert together(first) + together(second) == together(straight)
    for mine, plain in zip(second[0][1], straight[0][1], strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(plain), rtol=1e-5, atol=1e-6)
    if kind == "in turn":
        seen = [s for step in straight[0][0] for s in step]
        assert sorted(seen[:40]) == list(range(40)), "each sample once an epoch, over the end of a step"
    if kind == "curriculum":
        for step, samples in enumerate(together(straight), 1):
            assert max(samples) // 2 <= 4 + 15 * step // 12


def other_data_body(rank, world, folder):
    engine, data, _ = make()
    train(engine, data, 1)
    engine.save_checkpoint(folder)
    engine.close()
    other, _, _ = make(n=41)
    before = [p.detach().clone() for p in other.module.parameters()]
    with pytest.raises(StateError, match="with the length 40, and this loader has 41") as caught:
        other.load_checkpoint(folder)
    assert caught.value.fix and all(torch.equal(p, q) for p, q in zip(other.module.parameters(), before))
    other.close()
    return True


def test_another_data_set_is_refused_before_anything_is_loaded(run_ranks, tmp_path):
    assert run_ranks(1, other_data_body, str(tmp_path)) == [True]


LEGACY = {
    "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 64,
    "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 8},
}  # fmt: skip


def arguments_body(rank, world):
    drop = {"enabled": True, "theta": 0.5, "gamma": 0.1}
    engine, data, model = make(curriculum_learning=LEGACY, progressive_layer_drop=drop)
    train(engine, data, 6)
    engine.eval()
    engine(next(data))
    given = model.given
    scheduler = engine.curriculum_scheduler_legacy
    found = (given[:-1:6], given[-1], engine.get_pld_theta(), scheduler.get_current_difficulty())
    engine.close()
    return found


def test_the_old_section_and_layer_drop_reach_forward(run_ranks):
    given, in_eval, theta, difficulty = run_ranks(1, arguments_body)[0]
    for step, arguments in enumerate(given):
        keep = 0.5 * math.exp(-0.1 * max(step - 1, 0)) + 0.5  # DeepSpeed's step 1 has the probability of step 0, too
        length = min(64, (8 + 56 * (step + 1) // 4) // 8 * 8)
        print(step, arguments, keep, length)
        assert arguments == {
            "progressive_layer_drop": True, "pld_theta": pytest.approx(keep), "curriculum_seqlen": length,
        }  # fmt: skip
    assert in_eval == {} and theta == pytest.approx(0.5 * math.exp(-0.5) + 0.5) and difficulty == 64


def hooks_body(rank, world, folder):
    engine, data, _ = make(data_efficiency=efficiency_of(folder))
    engine.set_data_post_process_func(lambda batch, state: batch * 0 + state["current_difficulties"]["size"])
    found = train(engine, data, 3)
    engine.close()
    plain, _, _ = make()
    with LogLines() as log:
        plain.set_custom_curriculum_learning_schedule({"size": lambda step: 1})
    plain.close()
    return found, log.lines


def test_the_users_functions(run_ranks, tmp_path):
    found, lines = run_ranks(1, hooks_body, str(tmp_path))[0]
    assert [set(step) for step in found] == [{4 + 15 * step // 12} for step in (1, 2, 3)]
    assert any("no curriculum chooses the samples" in line for line in lines)


@on_ranks(1)
def test_mistakes_are_found_at_the_start(rank, world):
    with pytest.raises(ConfigError, match="total_curriculum_step is 0|total_curriculum_step"):
        make(curriculum_learning={**LEGACY, "schedule_config": {"difficulty_step": 8}})
