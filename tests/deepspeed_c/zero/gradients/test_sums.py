"""The memory of sums and the numbers read from it, against fp64 and a search through all elements."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.deepspeed_c.zero.gradients.test_shown import batch, make_engine
from tests.ranks import on_ranks

WIDTH = 7


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(2)
def test_sums_and_what_is_in_them(rank: int, world: int, stage: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 11), nn.Linear(11, 5), nn.Linear(5, 3))
    engine = make_engine(net, 1, stage)
    engine.backward(engine(batch(rank, 0)).square().sum())
    engine.allreduce_gradients()
    sums = engine._optimizer.reducer.sums
    results = [r for unit in sums.units for r in sums.results[unit]]
    got, want = sums.squares(sums.units), sum(r.double().square().sum().item() for r in results)
    assert got[0] == pytest.approx(want, rel=1e-6) and got[1] == 0.0, (got, want)
    held = sum({r.untyped_storage().data_ptr(): r.untyped_storage().nbytes() for r in results}.values())
    counted = sum(sums.n_bytes.values())
    assert held <= counted <= held * (1 if stage in (0, 2) else world) + 4096, (held, counted)
    for p in net.parameters():
        views = [view for slot, view in sums.views.items() if slot.param is p]
        assert len(views) == (stage == 0)
        assert stage or views[0].data_ptr() == p.grad.data_ptr()
    assert sums.first_nonfinite() is None
    # First the last parameter of this rank is wrong, then also the first.
    fragments = sorted((f for unit in sums.units for f in unit.fragments), key=lambda f: f.slot.order)
    for fragment, (n_inf, n_nan) in ((fragments[-1], (1, 1)), (fragments[0], (0, 1))):
        piece = fragment.slot.unit.piece(sums.results[fragment.slot.unit], fragment)
        piece[-1] = float("nan")
        if n_inf:
            piece[0] = -float("inf")
        found = sums.first_nonfinite()
        assert found == (fragment.slot.name, n_inf, n_nan), (found, fragment.slot.name)
        assert sums.squares(sums.units)[1] >= n_inf + n_nan
    engine.close()
    assert not sums.results and not sums.views
