"""comm/point_to_point.py: messages of users, through shared memory where the group has connected it and by torch
elsewhere. Received bytes are compared with what the seed says."""

import random

import pytest
import torch
import torch.distributed as dist

from deepspeed_c import comm
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import CommError

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
N_MESSAGES = 40


def drawn(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def connect(local: str, group=None) -> None:
    Collectives(group).use_shared_memory(local)


def traffic_body(rank: int, world: int, local: str) -> None:
    connect(local)
    draw = random.Random(7)
    under_way = []
    for i in range(N_MESSAGES):
        src = draw.randrange(world)
        dst = draw.choice([r for r in range(world) if r != src])
        shape = draw.choice([(1,), (3, 5), (), (2, 0, 3), (1021,), (64, 64, 7)])
        dtype, tag, is_async = draw.choice(DTYPES), draw.randrange(3), draw.random() < 0.5
        want = drawn(i, shape, dtype)
        if rank == src:
            if is_async:
                under_way.append((comm.isend(want, dst, tag=tag), None, want))
            else:
                comm.send(want, dst, tag=tag)
        elif rank == dst:
            got = torch.zeros(shape, dtype=dtype)
            if is_async:
                under_way.append((comm.irecv(got, src, tag=tag), got, want))
            else:
                assert comm.recv(got, src, tag=tag) == src
                assert torch.equal(got, want), (i, got, want)
        if not is_async or draw.random() < 0.3:
            for handle, got, want in under_way:
                handle.wait()
                assert handle.is_completed()
                assert got is None or torch.equal(got, want), (i, got, want)
            under_way.clear()
    for handle, got, want in under_way:
        handle.wait()
        assert got is None or torch.equal(got, want), (got, want)
    dist.barrier()


@pytest.mark.parametrize("local", ["off", "shm"])
@pytest.mark.parametrize("world", [2, 3])
def test_random_messages(run_ranks, world, local) -> None:
    run_ranks(world, traffic_body, local)


def anyone_body(rank: int, world: int, local: str) -> None:
    """Rank 1 receives from whoever sends; ranks have other numbers in the group than in the world."""
    group = comm.new_group(list(range(world))[::-1])
    connect(local, group)
    if rank == 1:
        values, sources = [], []
        for i in range(world - 1):
            got = torch.zeros(5)
            if i % 2:
                handle = comm.irecv(got, group=group, tag=2)
                handle.wait()
            else:
                sources.append(comm.recv(got, None, group, 2))
                assert got.unique().tolist() == [float(sources[-1])], (got, sources)
            values.append(int(got[0]))
        assert sorted(values) == [r for r in range(world) if r != 1], values
    else:
        comm.send(torch.full((5,), float(rank)), 1, group, 2)
    dist.barrier()


@pytest.mark.parametrize("local", ["off", "shm"])
def test_a_message_from_anyone(run_ranks, local) -> None:
    run_ranks(3, anyone_body, local)


def mixed_body(rank: int, world: int) -> None:
    """The engine's messages of a tag are not those of a user with that tag."""
    mine = Collectives()
    mine.use_shared_memory("shm")
    if rank == 0:
        comm.isend(torch.full((2,), 1.0), 1, tag=0)
        mine.message(torch.full((2,), 2.0), 0, 1, tag=0).wait()
    else:
        of_engine, of_user = torch.zeros(2), torch.zeros(2)
        mine.message(of_engine, 0, 1, tag=0).wait()
        comm.recv(of_user, 0, tag=0)
        assert (of_engine.tolist(), of_user.tolist()) == ([2.0, 2.0], [1.0, 1.0])
    dist.barrier()


def test_users_and_the_engine_do_not_take_each_others_messages(run_ranks) -> None:
    run_ranks(2, mixed_body)


def different_body(rank: int, world: int) -> str:
    group = comm.new_group([0, 1])
    connect("shm", group)
    tensor = torch.zeros(4) if rank == 0 else torch.zeros(5)
    with pytest.raises(CommError) as caught:
        comm.send(tensor, 1, group) if rank == 0 else comm.recv(tensor, 0, group)
        comm.send(tensor, 1, group) if rank == 0 else comm.recv(tensor, 0, group)
        comm.recv(tensor, 1, group)
    assert tensor.sum() == 0
    return str(caught.value)


def test_a_message_of_another_length_is_an_error(run_ranks) -> None:
    found = run_ranks(2, different_body)
    assert "sends shape [4], rank 1 expects [5]" in found[1], found
    assert "rank 1" in found[0], found


def outside_body(rank: int, world: int) -> None:
    """A rank that is not in the group sends nothing, as in torch."""
    group = comm.new_group([1])
    if rank == 0:
        with pytest.raises((CommError, ValueError)):
            comm.send(torch.zeros(1), 1, group)
    dist.barrier()


def test_a_rank_outside_the_group(run_ranks) -> None:
    run_ranks(2, outside_body)


def test_without_a_group() -> None:
    with pytest.raises(CommError, match="not initialised"):
        comm.send(torch.zeros(1), 1)
