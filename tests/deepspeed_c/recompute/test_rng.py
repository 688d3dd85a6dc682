"""recompute/rng.py and conditions.py: streams of random numbers by name, and recomputed layers that draw the same
numbers again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from deepspeed_c import checkpointing
from deepspeed_c.config.checkpoint import ActivationCheckpointing
from deepspeed_c.errors import CheckpointError, RecomputeError, StateError
from deepspeed_c.recompute.configured import configured
from deepspeed_c.recompute.recomputer import Recomputer
from tests.training import engine_of


@pytest.fixture(autouse=True)
def tracker() -> Iterator[checkpointing.CudaRNGStatesTracker]:
    configured.clear()
    checkpointing.get_cuda_rng_tracker().reset()
    yield checkpointing.get_cuda_rng_tracker()
    checkpointing.get_cuda_rng_tracker().reset()


class Mpu:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def get_model_parallel_rank(self) -> int:
        return self.rank

    def get_model_parallel_group(self) -> None:
        return None


def stream(seed: int, n: int) -> torch.Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(seed))


def test_streams_go_on_by_themselves(tracker) -> None:
    torch.manual_seed(5)
    tracker.add("a", 11)
    tracker.add("b", 12)
    drawn = {"a": [], "b": [], "": []}
    for name in ("a", "", "b", "a", "", "a"):
        if name:
            with tracker.fork(name):
                drawn[name].append(torch.rand(3))
        else:
            drawn[name].append(torch.rand(3))
    for name, seed in (("a", 11), ("b", 12), ("", 5)):
        assert torch.equal(torch.cat(drawn[name]), stream(seed, 3 * len(drawn[name])).flatten()), name


def test_states_are_copies_and_come_back(tracker) -> None:
    tracker.add("a", 11)
    states = tracker.get_states()
    with tracker.fork("a"):
        first = torch.rand(3)
    tracker.set_states(states)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3), first)
    with pytest.raises(KeyError), tracker.fork("a"):
        raise KeyError
    tracker.reset()
    assert tracker.get_states() == {}
    tracker.add("a", 11)


def test_what_would_be_one_stream_is_refused(tracker) -> None:
    tracker.add("a", 11)
    with pytest.raises(StateError, match="seed 11"):
        tracker.add("b", 11)
    with pytest.raises(StateError, match="'a'"):
        tracker.add("a", 12)
    with pytest.raises(StateError, match="no state 'c'; there are: 'a'"), tracker.fork("c"):
        pass


@pytest.mark.parametrize("rank", [0, 3])
def test_tensor_parallel_seeds(tracker, rank: int) -> None:
    checkpointing.configure(Mpu(rank))
    checkpointing.model_parallel_cuda_manual_seed(100)
    assert torch.equal(torch.rand(4), stream(100, 4))  # the default stream is the same on all ranks
    with tracker.fork():
        assert torch.equal(torch.rand(4), stream(100 + 2718 + rank, 4))
    checkpointing.model_parallel_reconfigure_tp_seed(7)
    with tracker.fork():
        assert torch.equal(torch.rand(4), stream(7 + 2718 + rank, 4))
    assert torch.equal(torch.rand(4), stream(100, 8)[4:])


class Draws(nn.Module):
    """Drops values by torch's generator, by a stream of the tracker, and by Python's generator."""

    def __init__(self, *, by_python: bool = False) -> None:
        super().__init__()
        self.lin, self.drop, self.by_python = nn.Linear(9, 9), nn.Dropout(0.5), by_python

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.lin(x))
        with checkpointing.get_cuda_rng_tracker().fork():
            x = self.drop(x)
        if self.by_python:
            x = x * torch.tensor([random.choice([0.5, 2.0, 3.0, 5.0]) for _ in range(9)])
        return x.tanh() + x


def train(how: str, *, by_python: bool, **keys: bool) -> list:
    torch.manual_seed(0)
    layers = nn.ModuleList(Draws(by_python=by_python) for _ in range(3))
    mine = Recomputer(ActivationCheckpointing(use_reentrant=how == "reentrant", **keys))
    checkpointing.model_parallel_cuda_manual_seed(6)
    random.seed(9)
    x = torch.randn(7, 9, requires_grad=True)
    y = x
    for layer in layers:
        y = layer(y) if how == "plain" else mine.run(layer, (y,), {})
    y.sum().backward()
    with checkpointing.get_cuda_rng_tracker().fork():
        after = [torch.rand(2)]
    return [x.grad, *(p.grad for p in layers.parameters()), *after, torch.rand(2), torch.tensor(random.random())]


@pytest.mark.parametrize("by_python", [False, True])
@pytest.mark.parametrize("how", ["hooks", "reentrant"])
def test_what_is_drawn_again_is_what_was_drawn(how: str, by_python: bool) -> None:
    got = train(how, by_python=by_python, python_random=by_python, check=True)
    for a, b in zip(got, train("plain", by_python=by_python), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("how", ["hooks", "reentrant"])
def test_check_names_the_layer_that_draws_elsewhere(how: str) -> None:
    with pytest.raises(
        RecomputeError, match=r'(?s)recomputation of Draws: a Draws computes other.*"python_random": true'
    ):
        train(how, by_python=True, check=True)


def resume_body(rank: int, world: int, folder: str) -> list[list[float]]:
    tracker = checkpointing.get_cuda_rng_tracker()
    tracker.reset()
    checkpointing.model_parallel_cuda_manual_seed(40 + rank)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    model = nn.Linear(3, 3)
    with engine_of(model, config) as engine:
        with tracker.fork():
            torch.rand(5)
        engine.save_checkpoint(folder, tag="x")
        with tracker.fork():
            want = torch.rand(4).tolist()
        tracker.reset()
        engine.load_checkpoint(folder, tag="x")
        with tracker.fork():
            got = torch.rand(4).tolist()
    tracker.reset()
    return [want, got]


def test_streams_are_in_checkpoints(run_ranks: Callable, tmp_path: Path) -> None:
    results = run_ranks(2, resume_body, str(tmp_path))
    assert all(want == got for want, got in results)
    assert results[0][0] != results[1][0], "each rank has its own"


def test_a_damaged_stream_is_an_error_before_anything_is_loaded() -> None:
    from deepspeed_c.engine.state import _check_tracked

    _check_tracked({"a": torch.get_rng_state()}, torch.device("cpu"), "here")
    for bad in ({"a": torch.zeros(3)}, {"a": None}, [1], {"a": torch.zeros(3, dtype=torch.uint8)}):
        with pytest.raises(CheckpointError, match="here: its tracked random state"):
            _check_tracked(bad, torch.device("cpu"), "here")
