"""Messages around a group: every distance, lengths that differ between ranks, entries in the ledger, and refusals."""

from __future__ import annotations

import pytest
import torch

from deepspeed_c.comm.collectives import Collectives
from tests.ranks import run_ranks

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
    assert comm.ledger.recent(1)[0].path == "gloo"
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
