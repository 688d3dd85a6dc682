"""The reference, in runs without 16-bit numbers, equals torch.optim.AdamW to a few ulp."""

from __future__ import annotations

import pytest
import torch

from tests.deepspeed_c.zero.reference import Event, Flow, Reference
from tests.deepspeed_c.zero.traits import (
    CLIP,
    OPTIMIZER,
    TRAITS,
    batch,
    make_groups,
    make_model,
    plain_run,
    rounded_run,
)

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("world, gas", [(1, 1), (2, 3), (3, 1)])
@pytest.mark.parametrize("trait", ["groups", "unused", "two_backwards", "checkpoint_reentrant", "frozen"])
def test_in_fp32_it_is_plain_torch(trait: str, world: int, gas: int) -> None:
    want = plain_run(TRAITS[trait], world, gas)
    got = rounded_run(TRAITS[trait], world, Flow(gas=gas, clip=CLIP))
    for a, b in ((got.losses, want.losses), (got.norms, want.norms)):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), **CLOSE)
    for name, b in want.params.items():
        torch.testing.assert_close(got.params[name], b, **CLOSE)


def reference_of(orders: list[list[Event]]) -> Reference:
    model = make_model(TRAITS["plain"])
    reference = Reference(model, make_groups(model, 1), Flow(), 1, OPTIMIZER, orders)
    reference.backward(lambda rank: model(*batch(0, 0, rank, 0)))
    return reference


def test_an_engine_that_takes_too_few_or_too_many_gradients_is_told() -> None:
    names = [name for name, _ in make_model(TRAITS["plain"]).named_parameters()]
    adds = [Event("add", (name,), torch.float32) for name in names]
    end = [Event("reduce", tuple(names)), Event("reset")]
    reference_of([adds + end]).step()
    with pytest.raises(AssertionError, match=f"not taken, or not sent, gradients of .*{names[0]}"):
        reference_of([adds[1:] + end]).step()
    with pytest.raises(AssertionError, match="more gradients of"):
        reference_of([adds + adds[:1] + end]).step()
    with pytest.raises(AssertionError, match="fewer windows"):
        reference_of([adds]).step()
