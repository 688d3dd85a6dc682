"""recompute/statistics.py: the running statistics of a recomputed layer equal those of a layer that runs once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from deepspeed_c.config.checkpoint import ActivationCheckpointing
from deepspeed_c.errors import RecomputeError
from deepspeed_c.recompute.recomputer import Recomputer

MAKERS = {
    "batch": lambda: nn.BatchNorm1d(8),
    "cumulative": lambda: nn.BatchNorm1d(8, momentum=None),
    "without statistics": lambda: nn.BatchNorm1d(8, track_running_stats=False),
    "instance": lambda: nn.InstanceNorm1d(8, track_running_stats=True),
    "evaluated": lambda: nn.BatchNorm1d(8).eval(),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("is_closure", [False, True])
def test_statistics_move_once(name: str, is_reentrant: bool, is_closure: bool) -> None:
    torch.manual_seed(1)
    once = nn.Sequential(nn.Conv1d(3, 8, 3), MAKERS[name](), nn.ReLU(), MAKERS[name](), nn.Conv1d(8, 2, 1))
    again = copy.deepcopy(once)
    recomputer = Recomputer(ActivationCheckpointing())
    for step in range(3):
        x = 3 + torch.randn(5, 3, 9, generator=torch.Generator().manual_seed(step))
        once(x.clone().requires_grad_()).square().sum().backward()
        function = (lambda x: again(x)) if is_closure else again
        tensors = [id(buffer) for buffer in again.buffers()]
        recomputer.run(function, (x.clone().requires_grad_(),), {}, is_reentrant=is_reentrant).square().sum().backward()
        assert tensors == [id(buffer) for buffer in again.buffers()]
    for (key, want), got in zip(once.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(got, want), (key, got, want)
    for want, got in zip(once.parameters(), again.parameters(), strict=True):
        assert torch.equal(got.grad, want.grad), (got.grad, want.grad)


class Fails(nn.Module):
    """Runs in forward, and raises when it is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.n = nn.BatchNorm1d(4), 0
        self.norm.register_forward_hook(self.count)

    def count(self, *_: object) -> None:
        self.n += 1
        if self.n > 1:
            raise RecomputeError("mine")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).square()


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_an_error_leaves_the_statistics(is_reentrant: bool) -> None:
    module = Fails()
    y = Recomputer(ActivationCheckpointing()).run(
        module, (torch.randn(6, 4, requires_grad=True),), {}, is_reentrant=is_reentrant
    )
    before = {key: (id(buffer), buffer.clone()) for key, buffer in module.norm.named_buffers()}
    with pytest.raises(RecomputeError, match="mine"):
        y.sum().backward()
    for key, buffer in module.norm.named_buffers():
        assert before[key][0] == id(buffer) and torch.equal(before[key][1], buffer), key
