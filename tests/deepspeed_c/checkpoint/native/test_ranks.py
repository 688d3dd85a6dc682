"""Messages between ranks that save together: they have any size, they work beside other users of torch.distributed, and
they do not need its registry."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from deepspeed_c.checkpoint.native.ranks import Ranks
from deepspeed_c.errors import CheckpointError
from tests.ranks import RanksFailed, on_ranks, run_ranks


def values_of(rank: int) -> list:
    """A list whose length differs on every rank."""
    return [None, {"rank": rank, "text": "é" * rank}, b"x" * (10_000 * (2 - rank) + rank), list(range(3 + rank))]


@pytest.mark.parametrize("world", [1, 2, 3])
@on_ranks()
def test_everybody_hears_the_same(rank: int, world: int) -> None:
    ranks = Ranks(rank, list(range(world)))
    ranks.connect()
    for number in range(4):
        everyone = [values_of(r)[number] for r in range(world)]
        assert ranks.all_gather(everyone[rank]) == everyone
        assert ranks.gather(everyone[rank]) == (everyone if rank == 0 else [])
        assert ranks.broadcast(everyone[rank]) == everyone[0]
    ranks.close()
    ranks.close()
    assert dist.is_initialized()


def talk_in_a_part(rank: int, world: int) -> list:
    """Ranks 0 and 2 of three exchange messages. Rank 1 takes no part, and the others do not wait for it."""
    if rank == 1:
        return []
    ranks = Ranks(rank // 2, [0, 2])
    ranks.connect()
    heard = [*ranks.all_gather(rank), ranks.broadcast(rank), *ranks.gather(rank)]
    ranks.close()
    return heard


def test_a_part_of_the_ranks():
    assert run_ranks(3, talk_in_a_part) == [[0, 2, 0, 0, 2], [], [0, 2, 0]]


def orphan(rank: int, world: int) -> list:
    ranks = Ranks(rank, [0, 1])
    ranks.connect()
    store = os.path.join(os.getcwd(), "store")
    dist.destroy_process_group()
    heard = [*ranks.all_gather(rank), ranks.broadcast(rank), *ranks.gather(rank)]
    # Replace the default process group by an unrelated one.
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    heard += ranks.all_gather(rank)
    ranks.close()
    dist.barrier()
    dist.destroy_process_group()
    return heard


def test_all_groups_are_destroyed_and_they_talk_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_ranks(2, orphan, fresh=True) == [[0, 1, 0, 0, 1, 0, 1], [0, 1, 0, 0, 1]]


def lose_the_other(rank: int, world: int) -> None:
    ranks = Ranks(rank, [0, 1])
    with pytest.raises(CheckpointError, match="not been connected"):
        ranks.all_gather(rank)
    ranks.connect()
    ranks.all_gather(rank)
    if rank == 1:
        os._exit(7)
    with pytest.raises(CheckpointError, match="another rank stopped") as caught:
        ranks.gather(rank)
    assert caught.value.where == "rank 0" and "other ranks" in caught.value.fix


def test_a_rank_that_has_died_is_told():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, lose_the_other, fresh=True)
    assert [outcome.kind for outcome in caught.value.outcomes] == ["returned", "died"], caught.value
    assert "exit code 7" in caught.value.outcomes[1].text
