"""checkpointing/compare.py: a layer that computes other values when it is run again is an error that names the module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed_c.checkpointing.compare import digest
from deepspeed_c.checkpointing.recomputer import Recomputer
from deepspeed_c.config.checkpoint import ActivationCheckpointing
from deepspeed_c.errors import RecomputeError


class Unsteady(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return x * self.n


@pytest.mark.parametrize("how", ["hooks", "reentrant"])
def test_check_names_the_first_module_that_differs(how: str) -> None:
    layer = nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Tanh(), Unsteady()), nn.Linear(5, 5), nn.Tanh())
    mine = Recomputer(ActivationCheckpointing(use_reentrant=how == "reentrant", check=True))
    out = mine.run(layer, (torch.randn(2, 5, requires_grad=True),), {}, label="blocks.7")
    with pytest.raises(
        RecomputeError, match=r"recomputation of blocks\.7: module '1\.1' \(Unsteady\) computes other values"
    ):
        out.sum().backward()
    mine = Recomputer(ActivationCheckpointing(use_reentrant=how == "reentrant"))
    mine.run(layer, (torch.randn(2, 5, requires_grad=True),), {}).sum().backward()  # nobody looked


def test_check_sees_what_no_module_gives() -> None:
    calls = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return (x * len(calls)).exp()

    mine = Recomputer(ActivationCheckpointing(check=True))
    out = mine.run(layer, (torch.randn(2, 5, requires_grad=True),), {})
    with pytest.raises(RecomputeError, match="layer: the layer itself computes other values"):
        out.sum().backward()


def test_digests_are_of_values_and_not_of_where_they_lie() -> None:
    x = torch.randn(6, 5)
    seen = {digest(t) for t in (x, x + 0, x.t().contiguous().t(), x.double().float(), x.requires_grad_())}
    assert len(seen) == 1
    nan = x.detach().clone()
    nan[0, 0] = float("nan")
    assert digest(nan) == digest(nan.clone()) and digest(nan) not in seen
    assert digest(x[:0]) == digest(torch.empty(0)) and isinstance(digest(x.sum()), int)
    assert digest(x.detach() > 0) != digest(x.detach() < 0) and isinstance(digest(x.bfloat16()), int)


def test_a_layer_that_fails_leaves_no_hooks() -> None:
    from torch.nn.modules import module

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("by the test")

    before = [dict(hooks) for hooks in (module._global_forward_hooks, module._global_forward_pre_hooks)]
    mine = Recomputer(ActivationCheckpointing(check=True))
    with pytest.raises(KeyError):
        mine.run(nn.Sequential(nn.Tanh(), Fails()), (torch.randn(2, requires_grad=True),), {})
    mine.run(nn.Sequential(nn.Tanh(), nn.Tanh()), (torch.randn(2, requires_grad=True),), {}).sum().backward()
    assert before == [dict(hooks) for hooks in (module._global_forward_hooks, module._global_forward_pre_hooks)]
