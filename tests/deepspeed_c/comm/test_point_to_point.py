"""comm/point_to_point.py: messages of users, through shared memory where the group has connected it and over gloo
elsewhere. Received bytes are compared with what the seed says."""

import logging
import os
import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from deepspeed_c import comm
from deepspeed_c.comm import point_to_point
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import CommError
from tests.ranks import RanksFailed, on_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
N_MESSAGES = 40


def drawn(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def connect(local: str, group=None) -> None:
    Collectives(group).use_shared_memory(local)


@pytest.mark.parametrize("local", ["off", "shm"])
@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_random_messages(rank: int, world: int, local: str) -> None:
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
@on_ranks(3)
def test_a_message_from_anyone(rank: int, world: int, local: str) -> None:
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


@on_ranks(2)
def test_users_and_the_engine_do_not_take_each_others_messages(rank: int, world: int) -> None:
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


@on_ranks(2)
def test_a_rank_outside_the_group(rank: int, world: int) -> None:
    """A rank that is not in the group sends nothing, as in torch."""
    group = comm.new_group([1])
    if rank == 0:
        with pytest.raises((CommError, ValueError)):
            comm.send(torch.zeros(1), 1, group)
    dist.barrier()


def test_without_a_group() -> None:
    with pytest.raises(CommError, match="not initialised"):
        comm.send(torch.zeros(1), 1)


# (tensor at the sender, tensor at the receiver, and the words that name them)
UNEQUAL = {
    "shorter": (torch.ones(4), torch.full((8,), 7.0), "float32 [4]", "float32 [8]"),
    "longer": (torch.ones(90_001), torch.full((8,), 7.0), "float32 [90001]", "float32 [8]"),
    "dtype": (torch.ones(4), torch.full((4,), 7, dtype=torch.int32), "float32 [4]", "int32 [4]"),
    "empty": (torch.ones(0), torch.full((1,), 7.0), "float32 [0]", "float32 [1]"),
}


def unequal_body(rank: int, world: int, name: str, is_async: bool, from_anyone: bool) -> str:
    sent, received, *_ = UNEQUAL[name]
    group = comm.new_group([0, 1])
    with pytest.raises(CommError) as caught:
        if rank == 0:
            comm.isend(sent, 1, group, 5).wait() if is_async else comm.send(sent, 1, group, 5)
            comm.recv(torch.zeros(1), 1, group)  # a message without elements leaves before anyone has seen it
        else:
            src = None if from_anyone else 0
            comm.irecv(received, src, group, 5).wait() if is_async else comm.recv(received, src, group, 5)
    assert received.eq(7).all(), received
    return str(caught.value)


@pytest.mark.parametrize("name", list(UNEQUAL))
@pytest.mark.parametrize(("is_async", "from_anyone"), [(False, False), (True, False), (False, True)])
def test_unequal_ends_over_gloo_both_say_how(run_ranks, name: str, is_async: bool, from_anyone: bool) -> None:
    *_, first, second = UNEQUAL[name]
    for rank, text in enumerate(run_ranks(2, unequal_body, name, is_async, from_anyone)):
        head, _, tail = text.partition(", rank 1 expects ")
        assert f"rank 0 sends {first}" in head and tail.startswith(second), f"rank {rank} says {text}"


@on_ranks(2)
def test_large_tags_are_apart(rank: int, world: int) -> None:
    """Tags that agree in their lowest bits are apart, and the receiver takes them in another order."""
    tags = [0, 1, 4096, 4097, (1 << 26) - 1]
    if rank == 0:
        handles = [comm.isend(torch.full((3,), tag), 1, tag=tag) for tag in tags]
    else:
        got = {tag: torch.zeros(3, dtype=torch.int64) for tag in tags}
        handles = [comm.irecv(got[tag], 0, tag=tag) for tag in reversed(tags)]
    for handle in handles:
        handle.wait()
    if rank == 1:
        assert all(value.tolist() == [tag] * 3 for tag, value in got.items()), got
        with pytest.raises(ValueError, match=f"tag is {1 << 26}, must be below"):
            comm.recv(torch.zeros(1), 0, tag=1 << 26)


def gone_body(rank: int, world: int, name: str) -> str:
    """Rank 1 ends; rank 0 starts only after it has seen that."""
    tensor = torch.zeros(1021)
    comm.all_reduce(tensor)
    group = dist.new_group()
    comm.all_reduce(tensor, group=group)
    if rank == 1:
        os._exit(3)
    with pytest.raises(CommError):
        comm.recv(tensor, 1, group)
    calls = {
        "send": lambda: comm.send(tensor, 1, group),
        "recv": lambda: comm.recv(tensor, 1, group),
        "isend": lambda: comm.isend(tensor, 1, group).wait(),
        "irecv": lambda: comm.irecv(tensor, 1, group).wait(),
        "all_to_all": lambda: comm.all_to_all([tensor, tensor], [tensor, tensor], group),
        "all_to_all, started": lambda: comm.all_to_all([tensor, tensor], [tensor, tensor], group, True).wait(),
        "all_to_all_single": lambda: comm.all_to_all_single(tensor[:8], tensor[:8], group=group),
        "all_reduce, started": lambda: comm.all_reduce(tensor, group=group, async_op=True).wait(),
        "broadcast": lambda: comm.broadcast(tensor, 1, group),
    }
    with pytest.raises(CommError) as caught:
        calls[name]()
    return str(caught.value)


GONE = ["send", "recv", "isend", "irecv", "all_to_all", "all_to_all, started", "all_to_all_single"]


@pytest.mark.parametrize("name", [*GONE, "all_reduce, started", "broadcast"])
def test_a_rank_that_is_gone_before_the_start_is_a_typed_error(run_ranks, name: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, gone_body, name, fresh=True)
    first, second = failed.value.outcomes
    assert first.kind == "returned" and f"{name.split(' ')[0].strip(',')} failed" in first.value, failed.value
    assert second.kind == "died", failed.value


def other_end_body(rank: int, world: int, name: str) -> list[str]:
    """The other end is a call of torch.distributed, until the time limit of the group."""
    from deepspeed_c.logging import logger

    point_to_point._LONG_S = 0.4
    group = dist.new_group(timeout=timedelta(seconds=4))
    dist.barrier(group)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger.addHandler(handler)
    tensor = torch.zeros(5)
    mine, other = (comm.send, dist.recv) if name == "send" else (comm.recv, dist.send)
    try:
        (mine if rank == 0 else other)(tensor, 1 - rank, group)
    except RuntimeError as error:
        assert rank == 1 or isinstance(error, CommError), error
    logger.removeHandler(handler)
    return told


@pytest.mark.parametrize("name", ["send", "recv"])
def test_an_end_of_torch_is_told_of(run_ranks, name: str) -> None:
    told = run_ranks(2, other_end_body, name, fresh=True)[0]
    wanted = f"the message of tag 0 {'to' if name == 'send' else 'from'} rank 1 has not come in"
    assert len(told) == 1 and told[0].startswith(wanted) and "or both of torch.distributed" in told[0], told
