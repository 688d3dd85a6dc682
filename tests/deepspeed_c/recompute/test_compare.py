"""recompute/compare.py: a layer that computes other values when it is recomputed raises an error that names the
module."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from deepspeed_c.config.checkpoint import ActivationCheckpointing
from deepspeed_c.errors import RecomputeError
from deepspeed_c.recompute import compare
from deepspeed_c.recompute.compare import digest
from deepspeed_c.recompute.recomputer import Recomputer


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
    with pytest.raises(RecomputeError, match="Sequential: the layer computes other values"):
        mine.run(layer, (torch.randn(2, 5, requires_grad=True),), {}).sum().backward()
    mine.run(layer, (torch.randn(2, 5, requires_grad=True),), {}).sum().backward()  # a second run is not compared


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


class Draws(torch.nn.Module):
    """Scales by random numbers of a source whose state recomputation does not restore."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.linear, self.source, self.seen = torch.nn.Linear(8, 8), source, []
        self.generator, self.numbers = torch.Generator().manual_seed(0), random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.source == "generator":
            noise = torch.rand(x.shape, generator=self.generator)
        else:
            noise = self.numbers.random() if self.source == "python" else 1.0
        self.seen.append(noise)
        return self.linear(x) * noise


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("source", ["generator", "python"])
def test_numbers_of_other_generators_are_found_at_the_first_recomputation(
    source: str, is_reentrant: bool, check: bool
) -> None:
    layer = Draws(source)
    recomputer = Recomputer(ActivationCheckpointing(check=check), names={id(layer): "blocks.3"})
    y = recomputer.run(layer, (torch.ones(2, 8, requires_grad=True),), {}, is_reentrant=is_reentrant)
    with pytest.raises(RecomputeError, match=r"blocks\.3.* computes other values than in forward"):
        y.sum().backward()
    assert len(layer.seen) == 2


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_outputs_are_compared_once_and_training_goes_on(is_reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    n_compared, compare_once = [], compare.Outputs.compare
    monkeypatch.setattr(
        compare.Outputs, "compare", lambda self, found: n_compared.append(1) or compare_once(self, found)
    )
    layers = [Draws("none"), Draws("none")]
    recomputer = Recomputer(ActivationCheckpointing())
    for _ in range(3):
        x = torch.ones(2, 8, requires_grad=True)
        y = x
        for layer in layers:
            y = recomputer.run(layer, (y,), {}, is_reentrant=is_reentrant)
        y.square().sum().backward()
        want = torch.ones(2, 8, requires_grad=True)
        layers[1](layers[0](want)).square().sum().backward()
        assert torch.equal(x.grad, want.grad), (x.grad, want.grad)
    assert len(n_compared) == len(layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64])
def test_sketches_forgive_another_order_of_sums_and_nothing_else(dtype: torch.dtype) -> None:
    numel = compare._SKETCHED + 3  # one whole piece and a part of another
    values = 4 * torch.randn(numel, generator=torch.Generator().manual_seed(1))
    was = compare._sketch(values.to(dtype))
    other = torch.where(torch.rand(numel, generator=torch.Generator().manual_seed(2)) < 0.3, 0.0, values)
    assert compare._is_alike(was, compare._sketch((values * (1 + 1e-6)).to(dtype)))
    assert not compare._is_alike(was, compare._sketch(other.to(dtype)))
    assert not compare._is_alike(was, compare._sketch(values.flip(0).to(dtype)))
    assert compare._sketch(torch.empty(3, device="meta")) is None


def test_a_layer_that_no_backward_reaches_is_looked_at_some_times_only() -> None:
    once = compare.OutputsOnce()
    found = [once.of("layer", "layer") for _ in range(10)]
    assert sum(each is not None for each in found) == compare.OutputsOnce._MOST
