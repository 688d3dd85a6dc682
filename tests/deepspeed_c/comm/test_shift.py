"""Messages around a group: every distance, lengths that differ between ranks, entries in the ledger, and refusals."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import CommError
from tests.ranks import on_ranks, run_ranks

LENGTHS = [5, 0, 3, 7]


def around(rank: int, world: int, shared: bool) -> list[tuple[list[float], int]]:
    """(the message received, the bytes entered in the ledger), for each distance. Two messages are under way at
    once."""
    comm = Collectives()
    if shared:
        comm.use_shared_memory("auto")
    comm.ledger.reset_totals()
    found, pending = [], []
    for distance in (*range(1, world), *range(-world + 1, 0), world + 1):
        if distance % world == 0:
            continue
        source = (rank - distance) % world
        sent = torch.full((LENGTHS[rank],), float(rank), dtype=torch.bfloat16)
        received = torch.empty(LENGTHS[source], dtype=torch.bfloat16)
        pending.append((comm.shift(sent, received, distance, label="a test"), received, source))
    for work, received, source in pending:
        work.wait()
        found.append((received.tolist(), source))
    total = comm.ledger.totals["shift"]
    assert total.wire_bytes == total.n_bytes == len(pending) * LENGTHS[rank] * 2
    assert comm.ledger.recent(1)[0].path == ("shm" if shared else "gloo")
    with pytest.raises(ValueError, match="goes nowhere"):
        comm.shift(sent, received, 2 * world)
    with pytest.raises(ValueError, match="one-dimensional"):
        comm.shift(torch.zeros(2, 2), received, 1)
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("shared", [False, True])
def test_each_rank_gets_what_was_sent_to_it(world: int, shared: bool) -> None:
    for found in run_ranks(world, around, shared):
        assert len(found) >= world - 1
        for values, source in found:
            assert values == [float(source)] * LENGTHS[source]


@on_ranks(3)
def test_messages_of_a_part_through_shared_memory(rank: int, world: int) -> None:
    """Messages of a part of the ranks, through shared memory: both directions, two tags, waited for in reverse."""
    group = dist.new_group([2, 1])  # rank 0 of the group is rank 1 of the world
    if rank == 0:
        return
    comm = Collectives(group)
    comm.use_shared_memory("shm")
    pending = []
    for i, shape in enumerate([(), (3, 0), (5,), (2, 3, 4), (100_003,), (7,), (1021, 31)]):
        for src in (0, 1):
            want = torch.arange(torch.Size(shape).numel()).add(100 * i + src).view(shape).to(torch.int16)
            tensor = want.clone() if src == comm.rank else torch.empty_like(want)
            pending.append((comm.message(tensor, src, 1 - src, tag=i % 2, label=f"message {i}"), tensor, want))
    for work, tensor, want in reversed(pending):
        work.wait()
        assert torch.equal(tensor, want)


def differ(rank: int, world: int, shifts: bool, lengths: list[int], labels: list[str]) -> list[str]:
    """The errors of a message of which both ends say something else, and of the next message of each rank."""
    comm = Collectives(dist.new_group())  # a failure ends its connections
    comm.use_shared_memory("shm")
    texts = []
    for _ in range(2):
        tensor = torch.full((lengths[rank],), -1.0)
        received = torch.full((lengths[rank],), -1.0)
        try:
            if shifts:
                comm.shift(tensor, received, 1, label=labels[rank]).wait()
            else:
                comm.message(tensor, 0, 1, label=labels[rank]).wait()
                comm.barrier()
        except CommError as error:
            texts.append(str(error))
        assert received.eq(-1.0).all() and tensor.eq(-1.0).all()
    return texts


@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize(
    ("lengths", "labels", "word"),
    [
        ([5, 4], ["a", "a"], "[5]"),
        ([0, 4], ["a", "a"], "[4]"),
        ([50_000, 3], ["a", "a"], "[3]"),
        ([2, 2], ["x", "yy"], "yy"),
    ],
    ids=["longer", "empty", "long", "label"],
)
def test_ends_that_differ_end_both_ranks(shifts: bool, lengths: list[int], labels: list[str], word: str) -> None:
    for texts in run_ranks(2, differ, shifts, lengths, labels):
        assert len(texts) == 2 and all(word in text for text in texts), texts
