"""A Trainer run that is killed and resumed on another number of ranks trains as one that was not: the samples of each
step, and the losses.
"""

from __future__ import annotations

import os
import signal
from itertools import chain

import pytest
import torch

from tests.hf.stack import Text, ds_config, forget, llama, make_trainer, numbers, on_ranks
from tests.ranks import RanksFailed

ROWS, BATCH, MICRO, STEPS = 60, 12, 2, 9
SAVED, KILLED = 7, 8  # steps; an epoch has 5


class Numbered(Text):
    """Each row's first two tokens are its number."""

    def __init__(self, rows):
        super().__init__(rows)
        self.tokens[:, 0] = 3 + torch.arange(rows) // 10
        self.tokens[:, 1] = 3 + torch.arange(rows) % 10


def run(rank, world, folder, stage, resumes, changes, kills=False):
    """(losses by step, this rank's samples of each step)."""
    from transformers import TrainerCallback

    steps = []

    class Note(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            steps.append([])

        def on_step_end(self, args, state, control, **kwargs):
            if kills and state.global_step == KILLED:
                os.kill(os.getpid(), signal.SIGKILL)

    forget()
    model = llama()
    model.register_forward_pre_hook(
        lambda module, args, kwargs: steps[-1].extend(
            ((kwargs["input_ids"][:, :2] - 3) @ torch.tensor([10, 1])).tolist()
        ),
        with_kwargs=True,
    )
    own = {"save_strategy": "steps", "save_steps": SAVED, "max_steps": STEPS, "warmup_steps": 0, "max_grad_norm": 1.0}
    batch = {"per_device_train_batch_size": MICRO, "gradient_accumulation_steps": BATCH // MICRO // world}
    trainer = make_trainer(
        folder, ds_config(stage, scheduler=False), model, callbacks=[Note()], **{**own, **batch, **changes}
    )
    trainer.train_dataset = Numbered(ROWS)
    trainer.train(resume_from_checkpoint=resumes)
    return numbers(trainer)["loss"], steps


def samples(results):
    """The samples of each step on all ranks."""
    return [sorted(chain(*step)) for step in zip(*(steps for _, steps in results), strict=True)]


@pytest.mark.parametrize(
    "stage, changes", [(2, {}), (3, {"dataloader_num_workers": 2})], ids=["stage 2", "stage 3 with workers"]
)
def test_a_killed_run_resumes_on_another_number_of_ranks(tmp_path, stage, changes):
    whole = on_ranks(2, run, tmp_path / "whole", stage, False, changes)
    expected = samples(whole)
    assert [len(step) for step in expected] == [BATCH] * STEPS
    assert sorted(chain(*expected[:5])) == list(range(ROWS)) and expected[:4] != expected[5:]
    with pytest.raises(RanksFailed):
        on_ranks(2, run, tmp_path / "killed", stage, False, changes, True)
    found = {}
    for world in (1, 3):
        results = on_ranks(
            world, run, tmp_path / "killed", stage, str(tmp_path / "killed" / f"checkpoint-{SAVED}"), changes
        )
        found[world] = results[0][0], samples(results)
    for world, (losses, steps) in found.items():
        print(world, losses, whole[0][0])
        assert steps == expected[SAVED:]
        assert losses == pytest.approx(whole[0][0], rel=1e-5)
