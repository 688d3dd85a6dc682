"""lr_schedules.py: each schedule is compared with its closed formula, and step by step with DeepSpeed 0.19.6 if that is
installed.

The environment variable DSC_PEER_PYTHON names a Python that has DeepSpeed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepspeed_c import lr_schedules
from deepspeed_c.config.load import load_config
from deepspeed_c.errors import ConfigError
from deepspeed_c.lr_schedules import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    add_tuning_arguments,
    build_scheduler,
    get_config_from_args,
    get_lr_from_config,
    get_torch_optimizer,
    update_lr,
)

LRS = [0.1, 0.02]


def make(lrs=LRS, kind=torch.optim.Adam, **kwargs):
    return kind([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs], **kwargs)


def rates(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def run(schedule, steps):
    """The learning rates before the first step and after each step."""
    rows = [rates(schedule.optimizer)]
    for _ in range(steps):
        schedule.step()
        now = rates(schedule.optimizer)
        assert schedule.get_last_lr() == now and schedule.get_lr() == now
        rows.append(now)
    return rows


def check(rows, formula, rel=1e-12):
    """Compares rows with a formula. Row i has the rates at iteration i - 1."""
    for i, row in enumerate(rows):
        want = formula(i - 1)
        assert row == pytest.approx(want, rel=rel, abs=1e-15), f"iteration {i - 1}: {row}, the formula gives {want}"


# -- closed formulas


@pytest.mark.parametrize("staircase", [False, True])
def test_range_test(staircase):
    rows = run(LRRangeTest(make(), [1e-3, 2e-3], 7, 0.5, staircase), 400)

    def formula(t):
        interval = (t + 1) // 7 if staircase else (t + 1) / 7
        return [base * (1 + 0.5 * interval) for base in (1e-3, 2e-3)]

    check(rows, formula)


def rise(t, n, kind):
    if t < 0:
        return 0.0
    return math.log(t + 1, n) if kind == "log" else t / n


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 100])
def test_warmup(n, kind):
    rows = run(WarmupLR(make(), [1e-4, 0.0], [0.3, 0.2], n, kind), 300)
    length = 0 if n == 0 else max(2, n)

    def formula(t):
        gamma = rise(t, length, kind) if t < length and length else 1.0
        return [1e-4 + (0.3 - 1e-4) * gamma, 0.2 * gamma]

    check(rows, formula)


def test_warmup_without_a_maximum_goes_to_the_optimizers_own_rates():
    rows = run(WarmupLR(make(), warmup_num_steps=10), 30)
    assert rows[0] == [0.0, 0.0] and rows[-1] == pytest.approx(LRS) and rows[5][0] / rows[5][1] == pytest.approx(5.0)


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize(("n", "total"), [(0, 100), (10, 100), (99, 100), (100, 100), (50, 20), (0, 0), (1, 3)])
def test_warmup_then_line(n, total, kind):
    rows = run(WarmupDecayLR(make(), total, 1e-4, 0.3, n, kind), 250)
    length = 0 if n == 0 else max(2, n)

    def formula(t):
        if length and t < length:
            gamma = rise(t, length, kind)
        elif total > length:
            gamma = max(0.0, (total - max(0, t)) / (total - length))
        else:
            gamma = 0.0
        return [1e-4 + (0.3 - 1e-4) * gamma] * 2

    check(rows, formula)


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize(("n", "total"), [(0, 100), (10, 100), (99, 100), (100, 100), (50, 20), (1, 3)])
def test_warmup_then_cosine(n, total, kind):
    rows = run(WarmupCosineLR(make(), total, 0.2, n, 0.05, kind), 250)
    length = 0 if n == 0 else max(2, n)

    def formula(t):
        if length and t < length:
            ratio = 0.2 + 0.8 * rise(t, length, kind)
        else:
            way = min(1.0, (t - length + 1) / max(1, total - length))
            ratio = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * way))
        return [lr * ratio for lr in LRS]

    check(rows, formula)
    if n < total:
        assert rows[-1] == pytest.approx([lr * 0.05 for lr in LRS]), "the cosine came up again"


@pytest.mark.parametrize(("first", "second"), [(10, None), (10, 4), (3, 11), (5, 0)])
@pytest.mark.parametrize("stairs", [(0, None), (5, None), (2, 3), (0, 4)])
def test_one_cycle(first, second, stairs):
    optimizer = make()
    schedule = OneCycle(
        optimizer,
        [0.01, 0.02],
        [0.11, 0.22],
        0.3,
        first,
        second,
        *stairs,
        decay_step_size=4,
        cycle_min_mom=0.5,
        cycle_max_mom=0.75,
        decay_mom_rate=0.02,
    )
    second = first if second is None else second
    up, down = stairs[0], stairs[0] if stairs[1] is None else stairs[1]
    total = first + second
    for t in range(-1, 300):
        if t >= 0:
            schedule.step()
        n = t + 1
        if t >= total:
            lrs = [0.01, 0.02]
            factor = (t - total + 1) / 4
            lrs = [lr / (1 + 0.3 * factor) for lr in lrs]
            mom = min(0.75 * (1 + 0.02 * factor), 0.999)
        else:
            n %= total
            from fractions import Fraction as F

            height = F(n, first) if n <= first else F(total - n, second)
            count = up if n <= first else down
            if count:
                height = F(math.floor(height * count), count)
            lrs = [0.01 + 0.1 * float(height), 0.02 + 0.2 * float(height)]
            mom = 0.75 - 0.25 * float(height)
        assert rates(optimizer) == pytest.approx(lrs, rel=1e-12), f"iteration {t}"
        for group in optimizer.param_groups:
            assert group["betas"] == (pytest.approx(mom, rel=1e-12), 0.999), f"iteration {t}"


def test_one_cycle_turns_the_momentum_of_sgd_too():
    optimizer = make(kind=torch.optim.SGD, momentum=0.7)
    schedule = OneCycle(optimizer, 0.1, 0.2, cycle_first_step_size=4)
    moms = []
    for _ in range(8):
        moms.append(optimizer.param_groups[0]["momentum"])
        assert schedule.get_mom() == [(moms[-1],)] * 2
        schedule.step()
    assert moms == pytest.approx([0.9, 0.875, 0.85, 0.825, 0.8, 0.825, 0.85, 0.875])


@pytest.mark.parametrize(("low", "high"), [(0.5, 0.7), ([0.5, 0.6], [0.7, 0.9])], ids=["number", "list"])
def test_one_cycle_answers_with_the_betas_of_each_group(low, high):
    """As in DeepSpeed, get_mom returns a pair for each group. Here the second value of a pair is the group's own."""
    optimizer = make(betas=(0.8, 0.95))
    schedule = OneCycle(optimizer, 0.1, 0.2, cycle_first_step_size=4, cycle_min_mom=low, cycle_max_mom=high)
    lows, highs = (value if isinstance(value, list) else [value] * 2 for value in (low, high))
    for t in range(12):
        height = 1 - abs(t - 4) / 4 if t < 8 else 0
        want = [(b - (b - a) * height, 0.95) for a, b in zip(lows, highs)]
        got = schedule.get_mom()
        assert [pytest.approx(pair) for pair in want] == got == [g["betas"] for g in optimizer.param_groups], (t, got)
        schedule.step()


def test_a_cycle_that_falls_at_once():
    """The second half has 0 steps, which the configuration also allows. The rate rises, and the next step begins again
    at the bottom."""
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 4, "cycle_second_step_size": 0}
    written = {"train_batch_size": 1, "scheduler": {"type": "OneCycle", "params": params}}
    assert load_config(written, world_size=1).scheduler.params["cycle_second_step_size"] == 0
    optimizer = make()
    schedule = build_scheduler("OneCycle", params, optimizer)
    lrs = []
    for _ in range(6):
        lrs.append(rates(optimizer)[0])
        schedule.step()
    assert lrs == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.1, 0.1]), lrs


@pytest.mark.parametrize("kind", [WarmupLR, WarmupDecayLR, WarmupCosineLR])
def test_an_unknown_kind_of_warm_up_is_log_with_a_warning(caplog, monkeypatch, kind):
    monkeypatch.setattr(lr_schedules.logger, "propagate", True)
    total = {} if kind is WarmupLR else {"total_num_steps": 50}
    misspelt, log = make(), make()
    schedules = [
        kind(misspelt, warmup_num_steps=9, warmup_type="cubic", **total),
        kind(log, warmup_num_steps=9, **total),
    ]
    assert f"{kind.__name__}.warmup_type: 'cubic' is not" in caplog.text
    for _ in range(12):
        assert rates(misspelt) == rates(log)
        for schedule in schedules:
            schedule.step()


@pytest.mark.parametrize("kind", [WarmupDecayLR, WarmupCosineLR])
def test_a_warm_up_beyond_the_end_is_warned_of(caplog, monkeypatch, kind):
    monkeypatch.setattr(lr_schedules.logger, "propagate", True)
    kind(make(), total_num_steps=9, warmup_num_steps=9)
    assert not caplog.text
    kind(make(), total_num_steps=8, warmup_num_steps=9)
    assert f"{kind.__name__}: total_num_steps (8) is less than warmup_num_steps (9)" in caplog.text


def test_one_cycle_leaves_momentum_alone_when_told():
    optimizer = make(betas=(0.6, 0.95))
    schedule = OneCycle(optimizer, 0.1, 0.2, cycle_first_step_size=4, cycle_momentum=False)
    schedule.step()
    assert optimizer.param_groups[0]["betas"] == (0.6, 0.95) and schedule.get_mom() is None


def test_one_cycle_without_any_momentum_says_so(caplog, monkeypatch):
    monkeypatch.setattr(lr_schedules.logger, "propagate", True)
    schedule = OneCycle(make(kind=torch.optim.Adagrad), 0.1, 0.2)
    assert not schedule.cycle_momentum and "Adagrad has no momentum to cycle" in caplog.text
    schedule.step()


# -- DeepSpeed

PEER_CASES = [
    ("LRRangeTest", {}),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": [1e-3, 0.5], "lr_range_test_step_size": 9, "lr_range_test_step_rate": 0.7},
    ),
    ("LRRangeTest", {"lr_range_test_step_size": 9, "lr_range_test_staircase": True}),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 20}),
    (
        "OneCycle",
        {
            "cycle_min_lr": [0.01, 0.2],
            "cycle_max_lr": [0.1, 0.3],
            "cycle_first_step_size": 20,
            "cycle_second_step_size": 31,
        },
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.1,
            "cycle_first_step_size": 20,
            "cycle_second_step_size": 12,
            "cycle_first_stair_count": 5,
            "cycle_second_stair_count": 3,
            "decay_lr_rate": 0.4,
            "decay_step_size": 7,
            "decay_mom_rate": 0.001,
            "cycle_min_mom": [0.5, 0.6],
            "cycle_max_mom": 0.7,
        },
    ),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 20, "cycle_second_step_size": 0}),
    ("WarmupLR", {}),
    ("WarmupLR", {"warmup_num_steps": 1}),
    ("WarmupLR", {"warmup_min_lr": [1e-4, 0.0], "warmup_max_lr": 0.3, "warmup_num_steps": 50, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_min_lr": 0.5, "warmup_max_lr": 0.3, "warmup_num_steps": 50}),
    ("WarmupDecayLR", {"total_num_steps": 200, "warmup_num_steps": 30}),
    (
        "WarmupDecayLR",
        {
            "total_num_steps": 200,
            "warmup_num_steps": 30,
            "warmup_min_lr": 0.01,
            "warmup_max_lr": 0.2,
            "warmup_type": "linear",
        },
    ),
    ("WarmupDecayLR", {"total_num_steps": 20, "warmup_num_steps": 30}),
    ("WarmupCosineLR", {"total_num_steps": 200, "warmup_num_steps": 30}),
    ("WarmupCosineLR", {"total_num_steps": 200, "warmup_num_steps": 30, "cos_min_ratio": 0.3, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"total_num_steps": 200, "warmup_num_steps": 1, "warmup_min_ratio": 0.1}),
    ("WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": 30}),
]
STEPS = 400


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    python = os.environ.get("DSC_PEER_PYTHON")
    if not python:
        pytest.skip("DSC_PEER_PYTHON does not name a Python that has DeepSpeed")
    out = tmp_path_factory.mktemp("peer") / "rates.json"
    cases = [{"name": name, "params": params, "lrs": LRS, "steps": STEPS} for name, params in PEER_CASES]
    script = Path(__file__).with_name("peer_lr.py")
    done = subprocess.run(
        [python, str(script), str(out)],
        check=False,
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("index", range(len(PEER_CASES)), ids=[f"{i}-{name}" for i, (name, _) in enumerate(PEER_CASES)])
def test_equals_deepspeed_step_by_step(peer, index):
    name, params = PEER_CASES[index]
    optimizer = make()
    schedule = build_scheduler(name, params, optimizer)
    for step in range(STEPS + 1):
        if step:
            schedule.step()
        got = [[group["lr"], group["betas"][0]] for group in optimizer.param_groups]
        want = peer[index][step]
        if step == 0 and params.get("warmup_min_ratio"):
            # DeepSpeed's first optimizer step has rate 0 for any warmup_min_ratio. Ours has this ratio.
            want = [[lr * params["warmup_min_ratio"], beta] for lr, (_, beta) in zip(LRS, want)]
        if step == 0 and name == "OneCycle":
            # DeepSpeed's momentum starts at its minimum and is close to its maximum one step later. Ours starts at the
            # maximum.
            highest = schedule.max_moms
            want = [[lr, mom] for (lr, _), mom in zip(want, highest)]
        for mine, theirs in zip(got, want):
            assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-15), f"{name} step {step}: {got}, DeepSpeed {want}"


# -- state, groups, tensors

KINDS = [
    lambda o: LRRangeTest(o, 1e-3, 10),
    lambda o: OneCycle(o, 0.01, 0.1, 0.1, 10, decay_step_size=3),
    lambda o: WarmupLR(o, warmup_num_steps=20),
    lambda o: WarmupDecayLR(o, 50, warmup_num_steps=20),
    lambda o: WarmupCosineLR(o, 50, warmup_num_steps=20),
]


@pytest.mark.parametrize("kind", KINDS, ids=VALID_LR_SCHEDULES)
@pytest.mark.parametrize("at", [0, 1, 13, 40])
def test_resumed_is_as_uninterrupted(kind, at):
    straight, first = kind(make()), kind(make())
    rows = run(straight, at + 30)
    run(first, at)
    # The optimizer that resumes has rates from the middle of the schedule. They must not become the new base.
    state = json.loads(json.dumps(first.state_dict()))
    resumed = kind(first.optimizer)
    resumed.load_state_dict(state)
    assert rates(resumed.optimizer) == pytest.approx(rows[at]), "the learning rate is that of the place at once"
    assert resumed.get_last_lr() == pytest.approx(rows[at])
    assert run(resumed, 30) == [pytest.approx(row) for row in rows[at:]]


@pytest.mark.parametrize("kind", KINDS, ids=VALID_LR_SCHEDULES)
def test_deepspeeds_state_dict_is_taken(kind):
    straight, resumed = kind(make()), kind(make())
    rows = run(straight, 12)
    resumed.load_state_dict({"last_batch_iteration": 11})
    assert rates(resumed.optimizer) == pytest.approx(rows[-1])


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_a_schedule_can_start_in_the_middle(name):
    params = {
        "LRRangeTest": {},
        "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 7},
        "WarmupLR": {"warmup_num_steps": 20},
        "WarmupDecayLR": {"total_num_steps": 50, "warmup_num_steps": 20},
        "WarmupCosineLR": {"total_num_steps": 50, "warmup_num_steps": 20},
    }[name]
    first = build_scheduler(name, params, make())
    rows = run(first, 15)
    middle = build_scheduler(name, {**params, "last_batch_iteration": 14}, first.optimizer)
    assert rates(middle.optimizer) == pytest.approx(rows[-1])
    assert run(middle, 5) == [pytest.approx(row) for row in run(build_scheduler(name, params, make()), 20)[15:]]


@pytest.mark.parametrize("kind", KINDS, ids=VALID_LR_SCHEDULES)
def test_step_takes_an_iteration(kind):
    walked, jumped = kind(make()), kind(make())
    run(walked, 9)
    jumped.step(8)
    assert rates(jumped.optimizer) == pytest.approx(rates(walked.optimizer))
    assert jumped.last_batch_iteration == walked.last_batch_iteration == 8


@pytest.mark.parametrize("kind", KINDS, ids=VALID_LR_SCHEDULES)
def test_tensor_rates_are_written_in_place(kind):
    lrs = [torch.tensor(lr, dtype=torch.float64) for lr in LRS]
    optimizer = make(lrs)
    held = [group["lr"] for group in optimizer.param_groups]
    schedule, plain = kind(optimizer), kind(make())
    for _ in range(25):
        schedule.step()
        plain.step()
        for group, tensor in zip(optimizer.param_groups, held):
            assert group["lr"] is tensor
        assert rates(optimizer) == pytest.approx(rates(plain.optimizer))
        assert all(type(lr) is float for lr in schedule.get_last_lr())


def test_update_lr():
    groups = [{"lr": 1.0}, {"lr": torch.tensor(1.0)}]
    held = groups[1]["lr"]
    assert update_lr(groups, [0.5, torch.tensor([0.25])]) == [0.5, held] and held.item() == 0.25


def test_wrapped_optimizers():
    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    optimizer = make()
    assert get_torch_optimizer(Wrapper(optimizer)) is optimizer and get_torch_optimizer(optimizer) is optimizer
    for wrong in (object(), Wrapper(3), None):
        with pytest.raises(TypeError, match="is not a torch.optim.Optimizer"):
            get_torch_optimizer(wrong)


# -- mistakes


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("WarmupLr2", {}, "did you mean 'WarmupLR'"),
        ("Cosine", {}, "there is no schedule 'Cosine'"),
        ("WarmupLR", {"warmup_step": 3}, "no parameter 'warmup_step'; did you mean"),
        ("WarmupDecayLR", {}, "needs total_num_steps"),
        ("OneCycle", {"cycle_min_lr": 1}, "needs cycle_max_lr"),
        ("WarmupLR", {"warmup_num_steps": -1}, "WarmupLR.warmup_num_steps: is -1"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, "is 2.5"),
        ("WarmupLR", {"warmup_num_steps": True}, "is True"),
        ("WarmupLR", {"warmup_num_steps": "10"}, "is '10'"),
        ("WarmupLR", {"warmup_max_lr": [1, 2, 3]}, "3 values are given for 2 parameter groups"),
        ("WarmupLR", {"warmup_max_lr": "0.1"}, "is '0.1'"),
        ("WarmupLR", {"warmup_max_lr": float("nan")}, "is nan"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size: is 0"),
        ("OneCycle", {"cycle_min_lr": 1, "cycle_max_lr": 2, "cycle_first_step_size": 0}, "cycle_first_step_size: is 0"),
        (
            "OneCycle",
            {"cycle_min_lr": 1, "cycle_max_lr": 2, "cycle_second_step_size": -1},
            "cycle_second_step_size: is -1",
        ),
        ("OneCycle", {"cycle_min_lr": [1], "cycle_max_lr": 2}, "1 values are given for 2"),
        ("WarmupCosineLR", {"total_num_steps": 10, "last_batch_iteration": -2}, "is -2"),
    ],
)
def test_mistakes_are_named_and_change_nothing(name, params, message):
    optimizer = make()
    with pytest.raises(ConfigError, match=message) as caught:
        build_scheduler(name, params, optimizer)
    assert caught.value.fix and rates(optimizer) == LRS


def test_whole_numbers_may_be_written_as_json_does():
    assert WarmupLR(make(), warmup_num_steps=1e3).warmup_num_steps == 1000
    assert build_scheduler("warmuplr", None, make()).warmup_num_steps == 1000


# -- names and the command line


def test_signatures_are_deepspeeds():
    expected = {
        LRRangeTest: "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase",
        OneCycle: "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size "
        "cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom "
        "decay_mom_rate",
        WarmupLR: "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type",
        WarmupDecayLR: "total_num_steps warmup_min_lr warmup_max_lr warmup_num_steps warmup_type",
        WarmupCosineLR: "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type",
    }
    for cls, names in expected.items():
        assert list(inspect.signature(cls).parameters) == ["optimizer", *names.split(), "last_batch_iteration"]
    assert VALID_LR_SCHEDULES == [cls.__name__ for cls in expected]
    assert list(inspect.signature(OneCycle.step).parameters)[1:] == ["batch_iteration"]
    assert list(inspect.signature(WarmupLR.step).parameters)[1:] == ["last_batch_iteration"]


def parse(*words):
    return add_tuning_arguments(argparse.ArgumentParser()).parse_args(words)


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_what_the_command_line_gives_can_be_built(name):
    config, error = get_config_from_args(parse("--lr_schedule", name, "--total_num_steps", "2000"))
    assert error is None and config["type"] == name
    run(build_scheduler(name, config["params"], make()), 5)


def test_command_line_values_arrive():
    config, _ = get_config_from_args(
        parse("--lr_schedule", "OneCycle", "--cycle_first_step_size", "5", "--cycle_max_lr", "0.5", "--cycle_momentum")
    )
    schedule = build_scheduler("OneCycle", config["params"], make())
    assert (schedule.first_step_size, schedule.second_step_size, schedule.max_lrs) == (5, 5, [0.5, 0.5])
    assert schedule.cycle_momentum and (schedule.first_stair_count, schedule.second_stair_count) == (0, 0)
    config, _ = get_config_from_args(parse("--lr_schedule", "OneCycle"))
    assert config["params"]["cycle_momentum"] is False
    for text, value in (("true", True), ("False", False)):
        args = parse("--lr_schedule", "LRRangeTest", "--lr_range_test_staircase", text)
        assert get_config_from_args(args)[0]["params"]["lr_range_test_staircase"] is value


def test_what_args_lack():
    assert get_config_from_args(argparse.Namespace())[0] is None
    assert get_config_from_args(parse())[1] == "--lr_schedule not specified on command line"
    assert get_config_from_args(parse("--lr_schedule", "Linear")) == (None, "Linear is not supported LR schedule")
    params = {}
    lr_schedules.override_params(
        argparse.Namespace(warmup_num_steps=3, cycle_min_lr=None, lr_range_test_min_lr=1.0), params
    )
    assert params == {"warmup_num_steps": 3, "lr_range_test_min_lr": 1.0}


def test_parse_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--warmup_num_steps", "7", "--other", "x"])
    known, other = lr_schedules.parse_arguments()
    assert known.warmup_num_steps == 7 and other == ["--other", "x"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"type": "WarmupLR", "params": {"warmup_max_lr": 0.3}}, (0.3, "")),
        ({"type": "OneCycle", "params": {"cycle_max_lr": 0.2}}, (0.2, "")),
        ({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.1}}, (0.1, "")),
        ({"params": {}}, (None, "LR schedule type not defined in config")),
        ({"type": "WarmupLR"}, (None, "LR schedule params not defined in config")),
        ({"type": "X", "params": {}}, (None, "X is not a valid LR schedule")),
    ],
)
def test_get_lr_from_config(config, expected):
    assert get_lr_from_config(config) == expected


def test_get_lr_from_config_without_one():
    lr, why = get_lr_from_config({"type": "WarmupCosineLR", "params": {"total_num_steps": 3}})
    assert lr is None and "takes its learning rate from the optimizer" in why
