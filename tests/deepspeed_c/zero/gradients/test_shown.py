"""Gradients in ``param.grad`` at stage 0, read and edited, against plain torch in one process with the batches of all
ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed_c
from deepspeed_c.utils import safe_get_full_grad, safe_set_full_grad
from tests.ranks import on_ranks, run_ranks

WIDTH, RATE = 7, 0.1


class Net(nn.Module):
    """Only the last rank uses ``spare``, no rank uses ``never``, and ``middle`` is used twice, each time by a pass of
    its own."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.middle, self.spare, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.none = nn.Parameter(torch.zeros(0))
        self.to(dtype)

    def forward(self, x: torch.Tensor, uses_spare: bool) -> torch.Tensor:
        x = torch.tanh(self.inp(x))
        x = checkpoint(self.middle, checkpoint(self.middle, x, use_reentrant=True), use_reentrant=True)
        x = x + self.none.sum()
        return self.spare(x) if uses_spare else x


def batch(rank: int, micro: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * rank + micro)).to(dtype)


def make_engine(net: nn.Module, gas: int, stage: int = 0, **more) -> deepspeed_c.DeepSpeedEngine:
    return deepspeed_c.initialize(
        model=net,
        model_parameters=net.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": gas,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": RATE, "weight_decay": 0.01}},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 60},
            **more,
        },
    )[0]


def zero_in_place(net: nn.Module) -> None:
    for p in net.parameters():
        if p.grad is not None:
            p.grad.zero_()


def clip(net: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-2)


def assign(net: nn.Module) -> None:
    for k, p in enumerate(net.parameters()):
        p.grad = torch.full_like(p, 0.25 + k)


def drop_some(net: nn.Module) -> None:
    net.middle.zero_grad()
    net.inp.bias.grad = None


def zero_grad(net: nn.Module) -> None:
    net.zero_grad()


def zero_grad_in_place(net: nn.Module) -> None:
    net.zero_grad(set_to_none=False)


EDITS: dict[str, Callable[[nn.Module], None]] = {
    edit.__name__: edit for edit in (zero_in_place, clip, assign, drop_some, zero_grad, zero_grad_in_place)
}


def plain_steps(world: int, gas: int, edit: str, at: int) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """Two steps in one process, with gradients edited after micro-batch ``at``. Returns the model, and the gradients of
    all ranks before each step."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, weight_decay=0.01)
    seen = []
    for step in range(2):
        for micro in range(gas):
            for rank in range(world):
                loss = net(batch(rank, 5 * step + micro), rank == world - 1).square().mean()
                (loss / (gas * world)).backward()
            if micro == at:
                EDITS[edit](net)
        seen.append({n: None if p.grad is None else p.grad.clone() for n, p in net.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return net, seen


def edited_steps(rank: int, world: int, gas: int, edit: str, at: int, by_engine: bool) -> list[str]:
    """The differences from ``plain_steps``."""
    net = Net()
    engine = make_engine(net, gas)
    want, grads = plain_steps(world, gas, edit, at)
    wrong = []
    for step in range(2):
        for micro in range(gas):
            loss = engine(batch(rank, 5 * step + micro), rank == world - 1).square().mean()
            engine.backward(loss) if by_engine else loss.backward()
            if micro == at:
                EDITS[edit](net)
            if micro == gas - 1:
                for name, p in net.named_parameters():
                    expected = grads[step][name]
                    # A rank may lack a gradient that another rank has: compare zeros.
                    got = torch.zeros_like(p) if p.grad is None else p.grad
                    error = (got - (torch.zeros_like(p) if expected is None else expected)).abs().sum().item()
                    if not error < 1e-5:
                        wrong.append(f"step {step}: gradient of {name} is off by {error:g}")
            engine.step()
        wrong += [f"step {step}: {name} has a gradient" for name, p in net.named_parameters() if p.grad is not None]
    for name, p in want.named_parameters():
        error = (dict(net.named_parameters())[name] - p).detach().abs().sum().item()
        if not error < 1e-5:
            wrong.append(f"{name} is off by {error:g}")
    engine.close()
    return wrong


@pytest.mark.parametrize("by_engine", [True, False], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize("edit", list(EDITS))
@pytest.mark.parametrize(("world", "gas"), [(1, 1), (1, 3), (2, 1), (3, 3)])
def test_edits_count(world: int, gas: int, edit: str, by_engine: bool):
    if edit == "clip" and world > 1:
        gas = 1
    assert run_ranks(world, edited_steps, gas, edit, gas - 1, by_engine) == [[]] * world


@pytest.mark.parametrize("edit", ["drop_some", "zero_grad", "zero_in_place"])
def test_edits_within_the_window_count(edit: str):
    assert run_ranks(2, edited_steps, 3, edit, 0, True) == [[]] * 2


def read_after_each_pass(rank: int, world: int) -> float:
    """Two backward passes at one boundary. The loss of a third pass does not depend on the engine's outputs."""
    net, want = Net(), Net()
    inner = []
    net.inp.register_forward_hook(lambda module, args, out: inner.append(out))
    engine = make_engine(net, 1)
    worst = 0.0
    for n_passes in (1, 2, 3):
        for r in range(world):
            if n_passes == 3:
                loss = want.inp(batch(r, 2)).square().mean()
            else:
                loss = want(batch(r, n_passes), r == world - 1).square().mean()
            (loss / world).backward()
        if n_passes == 3:
            with torch.enable_grad():
                net.inp(batch(rank, 2))
            inner[-1].square().mean().backward()
        else:
            engine.backward(engine(batch(rank, n_passes), rank == world - 1).square().mean())
        for p, q in zip(net.parameters(), want.parameters()):
            expected = torch.zeros_like(q) if q.grad is None else q.grad
            got = torch.zeros_like(p) if p.grad is None else p.grad
            worst = max(worst, (got - expected).abs().sum().item())
            if (whole := safe_get_full_grad(p)) is not None:
                worst = max(worst, (whole - expected).abs().sum().item())
    engine.close()
    return worst


@pytest.mark.parametrize("world", [1, 2])
def test_sums_are_whole_after_each_pass(world: int):
    worst = run_ranks(world, read_after_each_pass)
    assert max(worst) < 1e-5, worst


@on_ranks(1)
def test_bf16_and_set_full_grad(rank: int, world: int) -> None:
    def steps(net: nn.Module, engine: deepspeed_c.DeepSpeedEngine | None) -> None:
        loss = (net if engine is None else engine)(batch(0, 0, torch.bfloat16), False).float().square().mean()
        loss.backward() if engine is None else engine.backward(loss)

    want, net = Net(torch.bfloat16), Net(torch.bfloat16)
    engine = make_engine(net, 1, bf16={"enabled": True})
    steps(want, None), steps(net, engine)
    for p, q in zip(net.parameters(), want.parameters()):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or (p.grad.dtype == torch.bfloat16 and torch.equal(p.grad, q.grad))
    safe_set_full_grad(net.inp.bias, torch.full((WIDTH,), 2.0))
    assert torch.equal(net.inp.bias.grad, torch.full((WIDTH,), 2.0, dtype=torch.bfloat16))
    net.inp.bias.grad.mul_(2)
    assert torch.equal(safe_get_full_grad(net.inp.bias), torch.full((WIDTH,), 4.0))
    engine.close()
    assert all(p.grad is None for p in net.parameters())


@on_ranks(1)
def test_copies_of_a_model_have_no_engine(rank: int, world: int) -> None:
    net = Net()
    engine = make_engine(net, 1)
    engine.backward(engine(batch(0, 0), False).square().mean())
    copied = copy.deepcopy(net)
    copied.zero_grad()
    assert net.inp.weight.grad is not None
    engine.close()
