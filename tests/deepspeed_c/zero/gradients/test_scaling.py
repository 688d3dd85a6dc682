"""The factors of passes: a gradient, times all factors up to the step, is the factor of its pass times torch's own
gradient. Hooks of users see that gradient where they run."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from deepspeed_c.zero.gradients.scaling import PassScaling
from tests.deepspeed_c.zero.gradients.slots import make_slots

FACTORS = (1.0, 0.5, 1 / 3)


@pytest.mark.parametrize("hooked", ["none", "some", "all"])
@pytest.mark.parametrize("shows", ["none", "some", "all"])
@pytest.mark.parametrize("factors", list(itertools.product(FACTORS, repeat=2)))
def test_every_gradient_is_multiplied_once(factors: tuple[float, float], shows: str, hooked: str) -> None:
    params = [nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64)) for _ in range(3)]
    n = {"none": 0, "some": 1, "all": 3}
    slots = make_slots(params, [[[0, 1, 2]]])
    seen: list[torch.Tensor] = []
    for p in params[: n[hooked]]:
        p.register_hook(lambda grad: seen.append(grad.clone()))
    shown = [slot for slot in slots.registered[: n[shows]]]
    began: list[torch.Tensor] = []
    scaling = PassScaling(slots, shown, began.append)
    for _window in range(2):
        assert scaling.window_factor is None
        for factor in factors:
            scaling.begin_pass(factor)
            seen.clear()
            sum((p * p).sum() for p in params).backward()
            for k, p in enumerate(params):
                slot = slots.find(p)
                got = p.grad * scaling.ratio_of(slot) * scaling.window_factor
                want = factor * torch.full((3,), 4.0, dtype=torch.float64)
                assert torch.allclose(got, want, rtol=1e-15), (k, got, want)
                assert not scaling.is_plain or scaling.ratio_of(slot) == 1.0
                p.grad = None
            for grad in seen:
                assert torch.allclose(grad, torch.full((3,), 4.0 * factor, dtype=torch.float64)), (grad, factor)
            assert len(seen) == n[hooked]
            scaling.end_pass()
        scaling.end_window()
    assert began == []
    sum((p * p).sum() for p in params).backward()  # no pass is running
    n_early = sum(scaling.is_early(slot) for slot in slots)
    assert len(began) == n_early >= n[shows], (len(began), n_early)
    scaling.close()
    params[0].grad = None
    (params[0] * params[0]).sum().backward()
    assert len(began) == n_early and params[0].grad.tolist() == [4.0] * 3
