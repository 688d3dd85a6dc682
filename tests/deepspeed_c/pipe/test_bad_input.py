"""Mistakes in layers, losses and data are errors on all ranks, and the engine trains the next batch as if nothing had
happened."""

from __future__ import annotations

import re
import threading
import warnings
from typing import Any

import pytest
import torch

from deepspeed_c.errors import BackwardError, BatchSizeError, StageError, StateError
from deepspeed_c.pipe import PipelineModule
from tests.deepspeed_c.pipe.models import layers, loss_fn, micro_batches, module_of
from tests.deepspeed_c.pipe.test_engine import SCHEDULES, STEPS, check, config_of, plain_run
from tests.ranks import run_ranks
from tests.training import engine_of

N = 5


class Fault(Exception):
    """An exception of a user's code."""


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise Fault("in a backward")


class Plan:
    """A layer without weights between two layers of the model. It raises in a forward, if it is told to."""

    def __init__(self) -> None:
        self.kind, self.n_left = "", 0

    def __call__(self, x: Any) -> Any:
        x = x[0] if isinstance(x, tuple) else x
        if not self.kind:
            return x
        self.n_left -= 1
        if self.n_left >= 0:
            return x
        if self.kind == "forward":
            raise Fault("in a forward")
        if self.kind == "pickle":
            return x, threading.Lock()
        return _Raises.apply(x) if torch.is_grad_enabled() else x


def body(rank: int, world: int, stages: int, options: dict[str, Any], faults: list[tuple[int, str, int]]) -> Any:
    """Runs a batch with each of the faults (layer, kind, micro-batches before it), then STEPS good ones. The ranks of
    the last pipeline have the faults. Returns (texts of the errors, types of their causes, results of ``check``)."""
    with warnings.catch_warnings():  # ranks run other tests afterwards
        warnings.simplefilter("error", FutureWarning)
        return run_batches(world, stages, options, faults)


def run_batches(world: int, stages: int, options: dict[str, Any], faults: list[tuple[int, str, int]]) -> Any:
    plans = [Plan() for _ in layers()]
    specs = [layer for pair in zip(layers(), plans, strict=True) for layer in pair]
    losses = {"loss": lambda logits, labels: loss_fn(logits, labels).repeat(3), "none": lambda *_: None}
    told = {"loss": ""}

    def loss(logits: Any, labels: Any) -> Any:
        return losses.get(told["loss"], loss_fn)(logits, labels)

    net = PipelineModule(specs, num_stages=stages, loss_fn=loss, base_seed=0, seed_layers=True,
                         seed_fn=lambda seed: torch.manual_seed(1234 + seed // 2), **options)  # fmt: skip
    engine = engine_of(net, config_of(N))
    data_rank = net.mpu().get_data_parallel_rank()
    is_bad = data_rank == world // stages - 1
    texts, causes = [], []
    with engine:
        for layer, kind, n_before in faults:
            plan = plans[layer]
            if is_bad:
                told["loss"] = kind
                plan.kind, plan.n_left = ("" if kind in losses else kind), n_before
            for call in (engine.train_batch, engine.eval_batch) if kind != "backward" else (engine.train_batch,):
                plan.n_left = n_before
                with pytest.raises(StageError) as caught:
                    call(iter(micro_batches(9, data_rank, N)))
                assert isinstance(caught.value, BackwardError)
                texts.append(str(caught.value))
                causes.append(type(caught.value.__cause__).__name__)
            plan.kind = told["loss"] = ""
        trained = [float(engine.train_batch(iter(micro_batches(s, data_rank, N)))) for s in range(STEPS)]
        norm = engine.get_global_grad_norm()
    weights = {
        "0.weight" if "embed" in name else re.sub(r"^\d+", lambda m: str(int(m[0]) // 2), name): p.detach().float()
        for name, p in net.named_parameters()
    }
    return texts, causes, (trained, norm, weights)


FAULTS = [(0, "forward", 0), (8, "forward", 2), (4, "forward", N - 1), (4, "backward", 1), (0, "backward", 0),
          (8, "loss", 0), (8, "none", 0)]  # fmt: skip


def check_texts(outcome: list[Any], faults: list[tuple[int, str, int]]) -> None:
    words = {
        "forward": r"the forward of stage \d+, micro-batch \d+, raised Fault: in a forward",
        "backward": r"the backward of stage \d+, micro-batch \d+, raised Fault: in a backward",
        "loss": r"raised BackwardError: the loss of the last stage has to be a scalar, not a tensor of shape \(3,\)",
        "none": r"raised BackwardError: the loss of the last stage has to be a scalar, not NoneType",
        "pickle": r"output of stage \d+, micro-batch \d+ raised ModelError: a lock cannot be sent to another stage",
    }
    kinds = [kind for _, kind, _ in faults for _ in range(1 if kind == "backward" else 2)]
    for number, kind in enumerate(kinds):
        (text,) = {texts[number] for texts, _, _ in outcome}
        found = re.search(r"rank (\d+): ", text)
        assert found and re.search(words[kind], text), (kind, text)
        causes = [causes[number] for _, causes, _ in outcome]
        assert [rank for rank, cause in enumerate(causes) if cause != "NoneType"] == [int(found[1])], (causes, text)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_exception_of_one_stage_is_raised_on_all_ranks(schedule):
    options = {"schedule": schedule, **SCHEDULES[schedule]}
    outcome = run_ranks(2, body, 2, options, FAULTS)
    check_texts(outcome, FAULTS)
    check([trained for _, _, trained in outcome], plain_run(1, N), 2e-6)


@pytest.mark.parametrize("world, stages", [(3, 3), (4, 2), (2, 1)])
def test_other_stages_and_pipelines_raise_too(world, stages):
    faults = [*FAULTS, *([(2, "pickle", 1)] if stages == 3 else [])]
    options = {"partition_method": [0, 6, 12, 18]} if stages == 3 else {}
    outcome = run_ranks(world, body, stages, options, faults)
    check_texts(outcome, faults)
    check([trained for _, _, trained in outcome], plain_run(world // stages, N), 2e-6)


def broken_data(n: int) -> Any:
    yield from micro_batches(0, 0, n)
    raise Fault("in a data set")


def data_body(rank: int, world: int) -> Any:
    net = module_of(world)
    engine = engine_of(net, config_of(2))
    texts = []
    with engine:
        for sizes in (1, 1), (2, 3), (2, 0):
            with pytest.raises(BatchSizeError) as caught:
                engine.train_batch(iter([micro_batches(0, 0, 1, size)[0] for size in sizes]))
            texts.append(str(caught.value))
        with pytest.raises(StateError) as failed:
            engine.train_batch(broken_data(1) if rank == world - 1 else iter(micro_batches(0, 0, 2)))
        texts.append(str(failed.value))
        assert (type(failed.value.__cause__) is Fault) == (rank == world - 1)
        assert engine.global_steps == 0
        good = float(engine.eval_batch(iter([micro_batches(0, 0, 1, size)[0] for size in (1, 3)])))
        float(engine.train_batch(iter(micro_batches(0, 0, 2))))
    return texts, good


def test_data_of_other_sizes_are_refused_on_all_ranks():
    outcome = run_ranks(3, data_body)
    expected = [
        "rank 0: micro-batch 0 has 1 samples, and train_micro_batch_size_per_gpu is 2",
        "rank 0: micro-batch 1 has 3 samples, and train_micro_batch_size_per_gpu is 2",
        "rank 0: micro-batch 1 has 0 samples, and train_micro_batch_size_per_gpu is 2",
        "rank 2: micro-batch 1 of its data raised Fault: in a data set",
    ]
    for texts, good in outcome:
        for text, words in zip(texts, expected, strict=True):
            assert words in text, text
        assert good == outcome[0][1]


def sizeless_body(rank: int, world: int) -> float:
    net = PipelineModule([lambda _: torch.ones(3), torch.nn.Linear(3, 1), torch.nn.Linear(1, 1)], num_stages=world,
                         loss_fn=lambda x, _: x.sum(), partition_method=[0, 2, 3])  # fmt: skip
    engine = engine_of(net, config_of(3))
    with engine:
        return float(engine.train_batch(iter([(None, None), ("text", None), (torch.tensor(7), None)])))


def test_data_whose_size_cannot_be_seen_are_trained():
    losses = run_ranks(2, sizeless_body)
    assert losses[0] == losses[1]
