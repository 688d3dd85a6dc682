"""``stream_of_grain``: random numbers by seed, step and position, whatever was drawn before and wherever it runs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from deepspeed_c import checkpointing
from deepspeed_c.config.checkpoint import ActivationCheckpointing
from deepspeed_c.errors import StateError
from deepspeed_c.moe.gate import TopKGate
from deepspeed_c.ops.nn import bias_dropout_residual
from deepspeed_c.recompute.recomputer import Recomputer
from deepspeed_c.recompute.rng import stream_of_grain


@pytest.fixture(autouse=True)
def tracker() -> Iterator[checkpointing.CudaRNGStatesTracker]:
    checkpointing.get_cuda_rng_tracker().reset()
    yield checkpointing.get_cuda_rng_tracker()
    checkpointing.get_cuda_rng_tracker().reset()


def by_tracker() -> torch.Tensor:
    with checkpointing.get_cuda_rng_tracker().fork():
        return torch.rand(8)


def routes() -> torch.Tensor:
    torch_state = torch.get_rng_state()
    torch.manual_seed(1)
    gate = TopKGate(8, 4, k=1, noisy_gate_policy="RSample")
    x = torch.randn(32, 8)
    torch.set_rng_state(torch_state)
    gate(x)
    return gate.last_indices.double()


SOURCES: dict[str, Callable[[], torch.Tensor]] = {
    "dropout": lambda: nn.functional.dropout(torch.ones(64), 0.5),
    "fused dropout": lambda: bias_dropout_residual(torch.ones(2, 32), p=0.5),
    "attention": lambda: nn.functional.scaled_dot_product_attention(*[torch.ones(1, 2, 8, 4)] * 3, dropout_p=0.5),
    "gate": routes,
    "tracker": by_tracker,
    "python": lambda: torch.tensor([random.random() for _ in range(4)], dtype=torch.float64),
    "numpy": lambda: torch.from_numpy(np.random.rand(4)),
}


def states() -> list[bytes]:
    """All generators of the process."""
    found = [torch.get_rng_state().numpy().tobytes(), repr(random.getstate()).encode()]
    kind, keys, *rest = np.random.get_state()
    found.append(keys.tobytes() + repr((kind, rest)).encode())
    tracked = checkpointing.get_cuda_rng_tracker().get_states()
    return found + [name.encode() + state.numpy().tobytes() for name, state in sorted(tracked.items())]


def drawn(source: str, *key: int, begin: int) -> torch.Tensor:
    """The numbers of a grain in a program whose generators are anywhere."""
    checkpointing.model_parallel_cuda_manual_seed(begin)
    random.seed(begin)
    np.random.seed(begin)
    torch.rand(begin)
    with stream_of_grain(*key):
        return SOURCES[source]()


@pytest.mark.parametrize("source", SOURCES)
def test_numbers_are_a_function_of_the_grain(source: str) -> None:
    keys = [(1234, 0, 0), (1234, 0, 1), (1234, 1, 0), (1235, 0, 0), (1234, 0, 0, 1), (-1, 2**40, 7), (2**70, 1, 2)]
    first = [drawn(source, *key, begin=3) for key in keys]
    again = [drawn(source, *key, begin=8) for key in reversed(keys)][::-1]
    for key, a, b in zip(keys, first, again, strict=True):
        assert torch.equal(a, b), (source, key, a, b)
    for (k, a), (j, b) in itertools.combinations(zip(keys, first, strict=True), 2):
        assert not torch.equal(a, b), (source, k, j, a)


def test_dropout_masks_are_even() -> None:
    """Means of 5,000 masks at each of 16 places: 6 standard deviations of 0.5 / sqrt(5000)."""
    total = torch.zeros(16, dtype=torch.float64)
    for position in range(5_000):
        with stream_of_grain(1234, 5, position):
            total += torch.bernoulli(torch.full((16,), 0.5))
    assert (total / 5_000 - 0.5).abs().max() < 6 * 0.5 / 5_000**0.5, total / 5_000


@pytest.mark.parametrize("fails", [False, True])
def test_the_program_goes_on_with_its_own_numbers(tracker, fails: bool) -> None:
    checkpointing.model_parallel_cuda_manual_seed(5)
    tracker.add("other", 9)
    before = states()
    try:
        with stream_of_grain(1, 2, 3):
            inside = states()
            for draw in SOURCES.values():
                draw()
            with stream_of_grain(1, 2, 4):
                torch.rand(3)
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert states() == before
    assert all(a != b for a, b in zip(inside, before, strict=True)), "every generator follows the grain"


def test_a_name_that_is_added_within_stays(tracker) -> None:
    with stream_of_grain(1, 2, 3):
        tracker.add("late", 7)
    with tracker.fork("late"):
        got = torch.rand(4)
    assert torch.equal(got, torch.rand(4, generator=torch.Generator().manual_seed(7)))
    with pytest.raises(StateError, match="'late'"):
        tracker.add("late", 8)


class Drops(nn.Module):
    """Drops by torch, by the tracker, by the fused operator, and chooses experts with noise."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.gate = nn.Linear(8, 8), TopKGate(8, 4, k=1, noisy_gate_policy="RSample")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.lin(x).tanh(), 0.3)
        with checkpointing.get_cuda_rng_tracker().fork():
            x = nn.functional.dropout(x, 0.3)
        x = bias_dropout_residual(x, p=0.3).tanh()
        auxiliary = self.gate(x)[0]
        weights = self.gate.last_indices.float() + 1
        return x * weights + auxiliary


def gradients(how: str, begin: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.ModuleList(Drops() for _ in range(3))
    x = torch.randn(32, 8, requires_grad=True)
    mine = Recomputer(ActivationCheckpointing(use_reentrant=how == "reentrant", check=how == "checked"))
    checkpointing.model_parallel_cuda_manual_seed(begin)
    outputs = []
    for position in (0, 3):
        y = x
        with stream_of_grain(1234, 7, position):
            for layer in layers:
                if how == "plain":
                    y = layer(y)
                elif how == "torch":
                    y = torch.utils.checkpoint.checkpoint(layer, y, use_reentrant=False)
                else:
                    y = mine.run(layer, (y,), {})
        outputs.append(y)
    with stream_of_grain(99, 0, 0):  # another grain between forwards and backwards
        torch.rand(5)
    before = states()
    for y in reversed(outputs):
        y.square().sum().backward()
        assert states() == before, "a recomputation moved the program's generators"
    return [*outputs, x.grad, *(p.grad for p in layers.parameters())]


@pytest.mark.parametrize("how", ["hooks", "reentrant", "checked"])
def test_recomputed_layers_draw_the_grains_numbers_after_its_context(how: str) -> None:
    for i, (a, b) in enumerate(zip(gradients(how, 5), gradients("plain", 11), strict=True)):
        assert torch.equal(a, b), (how, i, a, b)


def test_torchs_own_checkpoint_draws_them_too() -> None:
    """Without the tracker, which torch does not know."""
    x = torch.randn(16, 8, requires_grad=True)
    found = []
    for begin, is_again in ((5, True), (6, False)):
        torch.manual_seed(begin)
        x.grad = None
        with stream_of_grain(1, 2, 3):
            drop = lambda x: nn.functional.dropout(x.tanh(), 0.5)
            y = torch.utils.checkpoint.checkpoint(drop, x, use_reentrant=False) if is_again else drop(x)
        y.square().sum().backward()
        found.append((y, x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), found
