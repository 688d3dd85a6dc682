"""Ranks that have made different numbers of groups still make the next group together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from deepspeed_c.comm.axes import COPIES, DP_REPLICATE, DP_SHARD, PP, TOKENS, TP, WITHIN_STAGE
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.groups import new_group_of
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.inject.ranks import TensorRanks
from tests.ranks import run_ranks


def tie(rank: int, lists: list[tuple[int, ...]]) -> None:
    """Layers that some stages of a pipeline share."""
    mesh = Mesh(Collectives(), {PP: 4})
    for axes in (WITHIN_STAGE, TOKENS, COPIES, (*COPIES, TP)):
        mesh.connect_some(lists, PP, *axes)


def share_a_head(rank: int) -> None:
    """Tensor-parallel ranks 0 and 1 share a key head, and the others have their own."""
    ranks = TensorRanks(Collectives())
    for width in (2, 3):
        ranks.sum_gradient(torch.nn.Parameter(torch.zeros(width)), (0, 1) if rank < 2 else (rank,), "key")


def make_alone(rank: int) -> None:
    for _ in range(rank):
        dist.new_group([rank], use_local_synchronization=True)


MAKERS = {
    "a tied layer of two stages": lambda rank: tie(rank, [(0, 3)]),
    "tied layers": lambda rank: tie(rank, [(0, 3), (1, 2, 3), (0, 2)]),
    "a shared key head": share_a_head,
    "groups of a program": make_alone,
}


def connect(rank: int, world: int, name: str) -> list[list[float]]:
    found = []
    for _ in range(2):
        MAKERS[name](rank)
        mesh = Mesh(Collectives(), {DP_REPLICATE: 2, DP_SHARD: 2})
        for axis in (DP_REPLICATE, DP_SHARD):
            found.append(mesh.along(axis).gather_numbers(rank))
        three = None if rank == 1 else Collectives(new_group_of([0, 2, 3]))
        found.append([] if three is None else three.gather_numbers(rank))
    return found


@pytest.mark.parametrize("name", MAKERS)
def test_ranks_with_different_numbers_of_groups_connect(name: str) -> None:
    # The groups live as long as the ranks, which are therefore ended.
    for rank, found in enumerate(run_ranks(4, connect, name, fresh=True)):
        rows = [[rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1], [] if rank == 1 else [0, 2, 3]]
        assert found == rows * 2, rank
