"""A stage-3 run whose ranks take different branches ends with an error that names ranks, operations and parameters."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.comm.verdict import EXIT_CODE
from tests.ranks import RanksFailed

TIMEOUT_S = 1.5


class Branching(nn.Module):
    """Uses its layers in another order than that of registration, so no plan covers a branch that one rank takes."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Linear(8, 8)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 8)

    def forward(self, x, goes_left):
        x = self.head(x)
        x = (self.left if goes_left else self.right)(x)
        x = (self.right if goes_left else self.left)(x)
        return self.tail(x).sum()


def body(rank: int, world: int, folder: str, how: str, local: str) -> None:
    sys.stderr = open(os.path.join(folder, str(rank)), "w")  # noqa: SIM115  the rank ends with it
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "collective_timeout_s": TIMEOUT_S,
        "comm": {"local": local},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
            "reduce_bucket_size": 64,
        },
    }
    engine = deepspeed_c.initialize(model=Branching(), config=config)[0]
    x = torch.ones(2, 8)
    for _ in range(2):
        engine.backward(engine(x, True))
        engine.step()
    if how == "branch":
        engine.backward(engine(x, rank == 0))
        engine.step()
    elif rank == 0:
        engine(x, True)
    else:
        # Imitates a backend that does not notice lost ranks, such as NCCL. gloo notices, because connections break.
        with engine._optimizer.comm.ledger.enter("all-reduce", 16, "the end of epoch 1"):
            time.sleep(2000)


def test_ranks_that_share_memory_are_told_at_once(run_ranks, tmp_path) -> None:
    """Before a sum, both ranks find that their calls differ, and both errors name the calls."""
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, body, str(tmp_path), "branch", "shm", fresh=True, grace=200)
    said = [outcome.text.strip().splitlines()[-2] for outcome in failed.value.outcomes]
    for outcome, text in zip(failed.value.outcomes, said):
        assert outcome.kind == "raised" and "CommError: rank " in text, str(failed.value)
        assert "(backward, shm)" in text and ("calls all_gather" in text or "calls reduce_scatter" in text), said
    assert any(".weight" in text or ".bias" in text for text in said), said


@pytest.mark.parametrize(("how", "local"), [("branch", "off"), ("elsewhere", "off"), ("elsewhere", "shm")])
def test_the_text_names_rank_and_parameter(run_ranks, tmp_path, how: str, local: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, body, str(tmp_path), how, local, fresh=True, grace=200)
    for outcome in failed.value.outcomes:
        assert outcome.kind == "died" and f"exit code {EXIT_CODE}" in outcome.text, str(failed.value)
        text = (tmp_path / str(outcome.rank)).read_text()
        told = text[text.index("ranks have diverged") :]
        assert "rank 0" in told and "rank 1" in told, told
        assert "all-gather" in told and "(forward" in told, told
        assert ".weight" in told or ".bias" in told, told
        if how == "elsewhere":
            assert "the end of epoch 1" in told, told
