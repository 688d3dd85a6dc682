"""Calibration: calls are described and made again, a link is fitted to times of a known formula, and this machine is
measured with two ranks."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_c.bench.comm import BenchedCall
from deepspeed_c.calibration.measure import calibrate, fit_link, measure_steps
from deepspeed_c.calibration.rank import make_call
from deepspeed_c.errors import ConfigError
from deepspeed_c.plan.machine import FLOW, PULL, Operator, operator_ns, read_machine, write_machine
from deepspeed_c.plan.timed import timed_operator_of

aten = torch.ops.aten
CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tests" / "deepspeed_c" / "autotuning" / "trained.py"


class Described(TorchDispatchMode):
    """Describes each call, with the shape, stride and dtype of its result."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        timed = timed_operator_of(func, args, kwargs)
        out = func(*args, **(kwargs or {}))
        self.calls.append((timed, [(x.shape, x.stride(), x.dtype) for x in tensors(out)]))
        return out


def tensors(out):
    return [x for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, torch.Tensor)]


def test_calls_of_a_model_are_made_again_with_results_of_the_same_form():
    """Forward and backward of a small network on fake tensors; the descriptions go through a pickle."""
    with FakeTensorMode(), Described() as seen:
        table, layer = torch.nn.Embedding(13, 8), torch.nn.Linear(8, 13)
        found = layer(torch.nn.functional.layer_norm(table(torch.zeros(5, 3, dtype=torch.long)), (8,)))
        loss = torch.nn.functional.cross_entropy(found.view(15, 13), torch.zeros(15, dtype=torch.long))
        loss.backward()
    names = {timed.name for timed, _ in seen.calls}
    assert {"aten.embedding.default", "aten.addmm.default", "aten.embedding_dense_backward.default"} <= names, names
    for timed, wanted in seen.calls:
        again = pickle.loads(pickle.dumps(timed))
        assert (again, again.signature) == (timed, timed.signature)
        result = [(x.shape, x.stride(), x.dtype) for x in tensors(make_call(again, CPU)())]
        assert result == wanted, timed.signature


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "signature"),
    [
        (aten.mm.default, (torch.ones(2, 3), torch.ones(3, 5)), {}, "aten.mm.default(f32[2,3], f32[3,5])"),
        (aten.t.default, (torch.ones(2, 3, dtype=torch.bfloat16).t(),), {}, "aten.t.default(bf16[3,2]:1,3)"),
        (
            aten.sum.dim_IntList,
            (torch.ones(0, 7, dtype=torch.int64), [0, 1], True),
            {"dtype": torch.float16},
            "aten.sum.dim_IntList(i64[0,7], [0, 1], True, dtype=f16)",
        ),
        (aten.cat.default, ([torch.ones(()).bool(), None],), {}, "aten.cat.default([b8[], None])"),
    ],
)
def test_a_signature_names_all_that_matters(func, args, kwargs, signature):
    assert timed_operator_of(func, args, kwargs).signature == signature


def test_tensors_are_made_with_their_strides_and_with_whole_numbers_in_range():
    expanded = torch.ones(3, 1).expand(3, 1000)
    assert make_call(timed_operator_of(aten.alias.default, (expanded,)), CPU)().stride() == (1, 0)
    call = make_call(timed_operator_of(aten.gather.default, (torch.ones(1, 2), 0, torch.ones(1, 2).long())), CPU)
    assert call().shape == (1, 2)
    with pytest.raises(TypeError, match="a Generator cannot be made"):
        make_call(timed_operator_of(aten.bernoulli.default, (expanded,), {"generator": torch.Generator()}), CPU)


def rows_of(latency_s, per_byte_s, n, mode, sizes=(4096, 10**5, 10**7)):
    """Times by the formula, step by step: each rank passes one piece on, and waits for the next."""
    rows = []
    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        for n_bytes in sizes:
            seconds = latency_s if mode == PULL else 0.0
            for _ in range(1, n if op != "all_reduce" else 2 * n - 1):
                seconds += n_bytes / n * per_byte_s + (latency_s if mode == FLOW else 0.0)
            rows.append(BenchedCall(op, "shm", n_bytes, seconds, seconds, seconds, 1.0, 1.0))
    return rows


@pytest.mark.parametrize("mode", [FLOW, PULL])
@pytest.mark.parametrize("n", [2, 3, 17])
def test_a_link_is_fitted_to_its_own_formula(mode, n):
    latency_ns, bytes_per_s = fit_link(rows_of(2e-5, 1 / 3e9, n, mode), n, mode)
    assert abs(latency_ns - 20_000) <= 1 and abs(bytes_per_s / 3e9 - 1) < 1e-6, (latency_ns, bytes_per_s)


def test_a_link_without_latency_has_the_rate_of_its_bytes():
    rows = rows_of(0.0, 1 / 3e9, 2, PULL, sizes=(10**6,))[:2]
    assert fit_link(rows, 2, PULL) == (0, 3 * 10**9)
    # Small transfers that are faster than in proportion would need a latency below 0.
    fast = [row if row.n_bytes > 4096 else BenchedCall(row.op, "shm", row.n_bytes, row.seconds / 2, 0, 0, 0, 0)
            for row in rows_of(0.0, 1 / 3e9, 2, PULL)]  # fmt: skip
    latency_ns, bytes_per_s = fit_link(fast, 2, PULL)
    assert latency_ns == 0 and 3e9 < bytes_per_s < 6e9, (latency_ns, bytes_per_s)


def test_numbers_of_ranks_that_cannot_be_measured_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="0 ranks on"):
        calibrate(0, [], tmp_path)


@pytest.mark.limit(120, reason="starts two ranks that measure products, and two that measure collectives")
def test_this_machine_is_measured(tmp_path, caplog):
    layer = timed_operator_of(aten.addmm.default, (torch.ones(64), torch.ones(32, 16), torch.ones(16, 64)))
    wrong = timed_operator_of(aten.mm.default, (torch.ones(2, 3), torch.ones(2, 3)))
    machine = calibrate(2, [layer, wrong], tmp_path / "calibration")
    write_machine(machine, tmp_path / "machine.json")
    assert read_machine(str(tmp_path / "machine.json")) == machine
    assert list(machine.operators) == [layer.signature] and machine.operators[layer.signature] > 0
    operator = Operator(layer.signature, 2 * 32 * 16 * 64, 0, "fp32", is_product=True)
    assert operator_ns(machine, operator) == machine.operators[layer.signature]
    assert wrong.signature in caplog.text and "RuntimeError" in caplog.text
    assert machine.device == "cpu" and {"fp32", "bf16"} <= machine.flops.keys() and machine.copy_bytes_per_s == 0
    assert [(link.n_below, link.mode) for link in machine.links] == [(2, PULL)]
    assert max(share for _, share in machine.product_curve) == 1.0
    assert list((tmp_path / "calibration").iterdir()) == []


def steps_with(tmp_path, monkeypatch, *words, n_ranks=1):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the script imports helpers of the tests
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return measure_steps(str(SCRIPT), ["--deepspeed_config", str(path), *words], config, n_ranks, n_steps=4)


def test_steps_of_a_script_are_measured(tmp_path, monkeypatch):
    assert 0 < steps_with(tmp_path, monkeypatch, "--steps", "7", n_ranks=2) < 60


def test_a_script_with_too_few_steps_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="cannot be measured: the script ended") as found:
        steps_with(tmp_path, monkeypatch, "--steps", "6")
    assert "at least 7 steps" in found.value.fix
