"""The facts of a window on all ranks, against plain torch with the batches of all ranks in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed_c.zero.gradients.facts import StepRequests, WindowNotes
from tests.deepspeed_c.zero.gradients.test_shown import batch, make_engine
from tests.ranks import on_ranks

WIDTH = 7


def make_net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 11), nn.Linear(11, 5))
    net.register_parameter("spare", nn.Parameter(torch.ones(3)))
    return net


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(3)
def test_all_ranks_agree_on_the_facts(rank: int, world: int, stage: int) -> None:
    engine, want = make_engine(make_net(), 1, stage), make_net().double()
    reducer = engine._optimizer.reducer
    engine.backward(engine(batch(rank, 0)).square().mean())
    sum(want(batch(r, 0).double()).square().mean() / world for r in range(world)).backward()
    requests = StepRequests(stop=rank != 1, save=rank == 0, is_saving=False)
    notes = WindowNotes(rank == 1, requests, [] if rank == 1 else [(1.5 + rank, 1.0)], 1.0, n_tokens=10 + rank)
    facts = reducer.finish(notes)
    norm = torch.stack([p.grad.norm() for p in want.parameters() if p.grad is not None]).norm().item()
    got = facts.norm * reducer.sums.summing.step_factor
    assert got == pytest.approx(norm, rel=1e-5), (got, norm)
    assert (facts.n_nonfinite, facts.n_bad_losses, facts.n_tokens) == (0, 1, 33), facts
    assert facts.requests == StepRequests(stop=True, save=True, is_saving=False), facts
    assert facts.loss == pytest.approx((1.5 + 3.5) / 2), facts.loss  # rank 1 does not know its own
    assert [slot.name for slot in facts.unused] == ["spare"], facts.unused
    assert reducer.finish(notes) is facts
    # An edit makes the facts stale.
    slot = next(slot for slot in reducer.slots if slot.name == "spare")
    fragment = slot.unit.fragment_of.get(slot)
    if fragment is not None:
        slot.unit.piece(reducer.sums.results[slot.unit], fragment).fill_(float("inf"))
    reducer.note_edit(slot)
    facts = reducer.finish(notes)
    assert facts.n_nonfinite == 3 and facts.unused == [], facts
    engine.close()
