"""Lower bounds of a candidate's time: against all schedules of its work, counted products, and whole grids."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from deepspeed_c.autotuning import rates as measured
from deepspeed_c.autotuning import tune as module
from deepspeed_c.autotuning.bound import MachineRates, StepWork, best_possible, least_seconds, why_beaten
from deepspeed_c.autotuning.feasible import Memory, MemoryNeed, Plans
from deepspeed_c.autotuning.rates import best_seconds, current_device, measure_rates
from deepspeed_c.autotuning.work import trace_products
from deepspeed_c.config import load_config
from deepspeed_c.engine.precision import Precision
from deepspeed_c.plan.activations import ForwardShape
from tests.deepspeed_c.autotuning.test_search import EVERY_KIND
from tests.deepspeed_c.autotuning.test_tune import Pretended, records_in, search
from tests.toys import Chain, mean_square


def shortest(work, n, rates):
    """Seconds of the best schedule: each kind of work on a resource of its own, in any overlap but for the update after
    the products."""

    def seconds(amount, rate):
        return amount / rate if rate else 0.0

    products = [seconds(work.flops, rates.flops)] * n
    update = seconds(max(0.0, work.state_bytes - 2 * rates.cached), rates.memory)
    ends = []
    for begins_late, late_link, late_peer in itertools.product([True, False], repeat=3):
        if work.is_serial and not begins_late:
            continue
        done = sum(products)
        begin = done if begins_late else 0.0
        wait = [begin + update, done]
        wait.append((done if late_link else 0.0) + seconds(work.link_bytes, rates.link))
        wait.append((done if late_peer else 0.0) + seconds(work.peer_bytes, rates.peer))
        ends.append(max(wait))
    return min(ends)


def test_bound_is_the_shortest_schedule():
    numbers = random.Random(0)
    amounts = [0.0, 1.0, 7.0, 1e9, 1.3e15]
    for _ in range(2000):
        work = StepWork(*(numbers.choice(amounts) for _ in range(4)), is_serial=numbers.random() < 0.5)
        rates = MachineRates(
            *(numbers.choice([0.0, 1.0, 3e9, 1e12]) for _ in range(4)), cached=numbers.choice([0.0, 3.0, 1e8])
        )
        n = numbers.choice([1, 2, 13])
        assert least_seconds(work, n, rates) == pytest.approx(shortest(work, n, rates), rel=1e-12)


@pytest.mark.parametrize(
    ("metric", "seconds", "n_samples", "best", "expected"),
    [
        ("latency", 2.1, 4, 1.0, "cannot beat: at least 2.1 s a step, the best takes 1 s"),
        ("latency", 1.0, 4, 1.0, "cannot beat: at least 1 s a step, the best takes 1 s"),
        ("latency", 0.9, 4, 1.0, ""),
        ("throughput", 2.0, 4, 2.5,
         "cannot beat: at most 2 samples/s (at least 2 s a step), the best has 2.5 samples/s"),
        ("throughput", 2.0, 4, 1.9, ""),
        ("throughput", 0.0, 4, 1e9, ""),
        ("latency", 0.0, 4, 0.0, ""),
        ("flops", 2.0, 4, 1e9, ""),
        ("forward", 2.0, 4, 1e-9, ""),
        ("step", 2.0, 4, 1e-9, ""),
    ],
)  # fmt: skip
def test_why_a_candidate_is_beaten(metric, seconds, n_samples, best, expected):
    assert why_beaten(metric, seconds, n_samples, best) == expected


def precision(**keys):
    return Precision(
        load_config({"train_micro_batch_size_per_gpu": 1, **keys}, world_size=1, batch="skip"), torch.nn.Linear(1, 1)
    )


def two_layers(is_frozen=False, end=lambda y: {"loss": mean_square(y), "other": None}):
    first, second = torch.nn.Linear(5, 7).requires_grad_(not is_frozen), torch.nn.Linear(7, 3)
    return Chain(torch.relu, end, first=first, second=second)


@pytest.mark.parametrize(
    "keys", [{}, {"bf16": {"enabled": True}}, {"torch_autocast": {"enabled": True, "dtype": "bf16"}}]
)
@pytest.mark.parametrize(("is_frozen", "n_second"), [(False, 3), (True, 2)])
def test_products_of_forward_and_backward(keys, is_frozen, n_second):
    """Forward, and the gradients that are needed: none of the input; and of frozen layers none of the weights."""
    with torch.device("meta"):
        model = two_layers(is_frozen)
    first = 2 * 11 * 5 * 7 * (1 if is_frozen else 2)
    found = trace_products(model, ForwardShape(11, None, (5,)), precision(**keys), "cpu")
    assert found == first + 2 * 11 * 7 * 3 * n_second


@pytest.mark.parametrize("sample", [(5,), (6,)])
def test_a_model_that_does_not_run_has_no_bound(sample):
    with torch.device("meta"):
        model = two_layers() if sample == (6,) else two_layers(end=lambda y: mean_square(y) * y.sum().item())
    assert trace_products(model, ForwardShape(2, None, sample), precision(), "cpu") == 0


def test_rates_are_not_below_what_a_product_and_a_pass_reach(tmp_path):
    """The bound of work that is done here is no more than the time that it takes."""
    rates = measure_rates(1, tmp_path)
    assert rates.flops > 0 and rates.memory > 0 and rates.cached > 0
    device = current_device()
    a = torch.ones(1000, 1000, device=device)
    seconds = best_seconds(lambda: a @ a, device)
    assert least_seconds(StepWork(flops=2e9), 1, rates) <= seconds


def test_rates_that_cannot_be_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(measured.sys, "executable", "/bin/false")
    assert measure_rates(1, tmp_path) == MachineRates()


class Machine(Pretended):
    """Experiments whose times are those of their work and an overhead of their own. No candidate is below its bound."""

    def __init__(self, monkeypatch, seed):
        numbers = random.Random(seed)
        self.overheads, self.numbers = {}, numbers
        self.rates = MachineRates(flops=1e3 * numbers.uniform(0.5, 2), memory=1e4)
        super().__init__(monkeypatch, self.rate_of)
        monkeypatch.setattr(module, "measure_rates", lambda n_local, folder: self.rates)

    def work_of(self, candidate):
        stage = candidate.config["zero_optimization"]["stage"]
        return StepWork(100.0 * candidate.micro_batch, 8e3 / (1 + stage), is_serial=True)

    def rate_of(self, candidate):
        bound = least_seconds(self.work_of(candidate), candidate.config["gradient_accumulation_steps"], self.rates)
        overhead = self.overheads.setdefault(candidate.name, self.numbers.choice([0.0, 0.01, 0.3, 2.0]))
        return candidate.micro_batch / (bound * (1 + overhead))

    def plan(self, candidates, arguments, launch, folder, shape=None):
        needs = {each.name: MemoryNeed(work=self.work_of(each)._asdict()) for each in candidates}
        return Plans(needs, Memory(None, None))


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("metric", ["throughput", "latency"])
def test_pruned_searches_find_the_best_of_the_whole_grid(tmp_path, monkeypatch, kind, metric):
    n_pruned = 0
    for seed in range(1 if kind == "model_based" else 8):
        folder = tmp_path / str(seed)
        folder.mkdir()
        Machine(monkeypatch, seed)
        common = {"sizes": [1, 2, 3, 8, 31], "zero": {"stage": [0, 1, 2]}, "metric": metric, "tuner_early_stopping": 0}
        search(folder, monkeypatch, tuner_type=kind, **common)
        rows = records_in(folder)["experiments"]
        whole = folder / "whole"
        whole.mkdir()
        monkeypatch.setattr(module, "measure_rates", lambda n_local, folder: MachineRates())  # bounds nothing
        search(whole, monkeypatch, tuner_type=kind, **common)
        every = {row["name"]: row["value"] for row in records_in(whole)["experiments"]}
        assert len(every) == 15 and all(row["status"] == "ran" for row in records_in(whole)["experiments"])
        assert every[records_in(folder)["best"]] == every[records_in(whole)["best"]]
        for row in rows:
            if row["status"] == "pruned":
                n_pruned += 1
                assert row["problem"].startswith("cannot beat: at ")
    assert n_pruned > 0


def test_samples_of_many_shapes_have_no_bound(tmp_path, monkeypatch):
    made = Machine(monkeypatch, 3)
    made.metrics = {"inputs_vary": True}
    search(tmp_path, monkeypatch, sizes=[1, 400], zero={"stage": [0]}, metric="latency")
    assert len(made.ran) == 2
    assert best_possible("latency", 1.5, 3) == 1.5 and best_possible("throughput", 1.5, 3) == 2.0
