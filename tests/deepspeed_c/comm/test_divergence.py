"""A stage-3 run whose ranks take different branches ends with an error that names ranks, operations and parameters; so
do collectives of equal length in another order.
"""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.verdict import EXIT_CODE
from deepspeed_c.errors import CommError
from tests.hosts import why_no_hosts
from tests.ranks import RanksFailed
from tests.training import engine_of, step

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
    engine = engine_of(Branching(), config)
    x = torch.ones(2, 8)
    for _ in range(2):
        step(engine, x, True)
    if how == "branch":
        step(engine, x, rank == 0)
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
        assert "(forward, shm)" in text and "calls all_gather of" in text, said
        assert '"tail.weight"' in text and '"left.weight"' in text, said


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


def crossed_body(rank: int, world: int, n: int, op: str, hosts: int) -> list[str]:
    """Rank 1 starts two collectives of equal length in another order."""
    comm = Collectives(dist.new_group())
    comm.use_shared_memory("auto")
    said = []
    labels = ["layers.0.w", "layers.1.w"]
    flats = {label: torch.full((n * world,), float(rank)) for label in labels}
    try:
        for label in labels if rank != 1 else reversed(labels):
            flat = flats[label]
            if op == "all_reduce":
                comm.all_reduce(flat, label=label).wait()
            elif op == "all_gather":
                comm.all_gather(flat, label=label).wait()
            elif op == "broadcast":
                comm.broadcast(flat, 0, label=label)
            elif op == "sum_numbers":
                comm.sum_numbers([1.0] * n, label=label)
            elif op == "all_to_all":
                comm.all_to_all(flat, flat.clone(), [n] * world, [n] * world, label=label).wait()
            else:
                comm.reduce_scatter(flat, torch.empty(n), label=label).wait()
    except CommError as error:
        said.append(str(error))
    if hosts == 1:  # between hosts data and descriptions are under way at the same time
        assert all((flat == rank).all() for flat in flats.values()), flats
    return said


OPS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "sum_numbers"]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", [1, 40_009])
@pytest.mark.parametrize("world", [2, 3])
def test_collectives_of_one_length_in_another_order_are_told_apart(run_ranks, world, n, op) -> None:
    for rank, said in enumerate(run_ranks(world, crossed_body, n, op, 1)):
        assert len(said) == 1 and "layers.0.w" in said[0] and "layers.1.w" in said[0], f"rank {rank} says {said}"


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_they_are_told_apart_between_hosts(run_ranks, op) -> None:
    if why_no_hosts():
        pytest.skip(why_no_hosts())
    said = run_ranks(3, crossed_body, 7, op, 2, hosts=(0, 0, 1))
    assert any("layers.0.w" in text and "layers.1.w" in text for each in said for text in each), said
    assert all(said), said
