"""observe/phases.py under a clock that the test moves, and on ranks whose collectives the test slows down."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

import deepspeed_c
from deepspeed_c.comm.ledger import Ledger, LedgerEntry
from deepspeed_c.comm.observed import listen, stop_listening
from deepspeed_c.observe.phases import Phases
from tests.deepspeed_c.profile.test_timers import Clock
from tests.ranks import on_ranks
from tests.training import config, update
from tests.waits import joined

CPU = torch.device("cpu")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def phases(clock: Clock) -> Phases:
    return Phases(enabled=True, device=CPU, clock=clock)


def spend(clock: Clock, phases: Phases, name: str, seconds: float) -> None:
    with phases.measure(name):
        clock.now += seconds


def test_each_instant_counts_once(clock: Clock, phases: Phases) -> None:
    assert phases.last_step_ms() == {} and phases.mean_ms() == {}
    began = clock.now
    for _ in range(2):
        spend(clock, phases, "forward", 0.25)
        clock.now += 0.0625  # time of the caller
        with phases.measure("backward"):
            clock.now += 0.5
            spend(clock, phases, "reduce", 0.125)
            clock.now += 0.5
        phases.end_micro_step(is_step=False)
    spend(clock, phases, "step", 1.0)
    phases.end_micro_step(is_step=True)
    found = phases.last_step_ms()
    assert found["forward"] == 500 and found["step"] == 1000 and found["other"] == 125
    assert (found["backward"], found["backward.inner"], found["backward.reduce"]) == (2250, 2000, 250)
    assert sum(found[name] for name in ("forward", "backward", "step", "other")) == (clock.now - began) * 1e3


def test_deepspeeds_timers(clock: Clock, phases: Phases) -> None:
    for seconds in (1.0, 2.0):
        spend(clock, phases, "forward", seconds)
        with phases.measure("backward"):
            clock.now += 2 * seconds
            spend(clock, phases, "reduce", 3 * seconds)
        if seconds == 2.0:
            spend(clock, phases, "step", 4.0)
        phases.end_micro_step(is_step=seconds == 2.0)
    found = phases.last_step_ms()
    whole = {"fwd": 3000, "bwd": 15000, "bwd_inner": 6000, "bwd_allreduce": 9000, "step": 4000}
    last = {"fwd": 2000, "bwd": 10000, "bwd_inner": 4000, "bwd_allreduce": 6000, "step": 4000}
    assert {name: found[name] for name in whole} == whole
    assert {name: found[f"{name}_microstep"] for name in last} == last


def test_means_since_the_last_report(clock: Clock, phases: Phases) -> None:
    for seconds in (1.0, 3.0):
        spend(clock, phases, "forward", seconds)
        phases.end_micro_step(is_step=True)
    assert phases.mean_ms(reset=True)["forward"] == 2000
    assert phases.mean_ms() == {}
    spend(clock, phases, "forward", 5.0)
    phases.end_micro_step(is_step=True)
    assert phases.mean_ms()["forward"] == 5000 and phases.mean_ms()["forward"] == 5000


def test_many_steps_without_a_report_are_kept_in_few_numbers(clock: Clock, phases: Phases) -> None:
    for _ in range(1000):
        spend(clock, phases, "forward", 0.5)
        phases.end_micro_step(is_step=True)
    assert len(phases._unread) <= 257
    assert phases.mean_ms()["forward"] == 500


def test_an_exception_closes_what_it_leaves(clock: Clock, phases: Phases) -> None:
    with pytest.raises(KeyError), phases.measure("backward"):
        phases.enter("reduce")  # a collective that is never ended
        clock.now += 1.0
        raise KeyError
    assert Phases.open is None
    spend(clock, phases, "forward", 2.0)
    phases.end_micro_step(is_step=True)
    found = phases.last_step_ms()
    assert found["backward.reduce"] == 1000 and found["forward"] == 2000


def test_one_engine_within_anothers_forward(clock: Clock, phases: Phases) -> None:
    inner = Phases(enabled=True, device=CPU, clock=clock)
    with phases.measure("forward"):
        clock.now += 1.0
        with inner.measure("forward"):
            assert Phases.open is inner
            clock.now += 2.0
        assert Phases.open is phases
    assert Phases.open is None
    for each, ms in ((phases, 3000), (inner, 2000)):
        each.end_micro_step(is_step=True)
        assert each.last_step_ms()["forward"] == ms


def test_a_phase_within_itself_is_one(clock: Clock, phases: Phases) -> None:
    with phases.measure("data"):
        clock.now += 1.0
        spend(clock, phases, "data", 2.0)
    phases.end_micro_step(is_step=True)
    assert phases.last_step_ms()["data"] == 3000 and "data.data" not in phases.last_step_ms()


def test_disabled_phases_read_no_clock(clock: Clock) -> None:
    phases = Phases(enabled=False, device=CPU, clock=clock)
    for _ in range(3):
        spend(clock, phases, "forward", 1.0)
        phases.end_micro_step(is_step=True)
    assert clock.n_reads == 0 and phases.last_step_ms() == {} and phases.mean_ms() == {}
    assert phases.measure("a") is phases.measure("b"), "a context is made for each phase although nothing is measured"


@pytest.fixture
def ledger(phases: Phases):
    listen(phases)
    yield Ledger("test", (0, 1))
    stop_listening(phases)


@pytest.mark.parametrize(
    ("axes", "op", "part"),
    [
        ("dp_shard", "reduce-scatter", "reduce"),
        ("dp_shard", "all-gather", "gather"),
        ("", "all-reduce", "reduce"),
        ("dp_shard", "barrier", "wait"),
        ("tp", "all-reduce", "tensor_parallel"),
        ("sp", "all-to-all", "sequence_parallel"),
        ("pp", "shift", "messages"),
    ],
)
def test_collectives_are_parts_of_the_phase(clock, phases, ledger, axes, op, part) -> None:
    ledger.axes = axes
    with phases.measure("backward"):
        entry = ledger.enter(op, 8)
        clock.now += 1.0  # the start of the collective
        entry.started()
        clock.now += 2.0  # other work
        with entry:
            clock.now += 4.0
    ledger.enter(op, 8).finish()  # not in a phase
    phases.end_micro_step(is_step=True)
    found = phases.last_step_ms()
    assert (found[f"backward.{part}"], found["backward.inner"]) == (5000, 2000), found


def test_a_collective_within_another_is_a_part_of_it(clock, phases, ledger) -> None:
    with phases.measure("step"), ledger.enter("all-gather", 8):
        clock.now += 1.0
        with ledger.enter("barrier", 0):
            clock.now += 2.0
        clock.now += 4.0
    phases.end_micro_step(is_step=True)
    found = phases.last_step_ms()
    assert found["step.gather"] == 7000 and "step.wait" not in found, found


def test_a_thread_that_is_not_in_the_phase_does_not_count(clock, phases, ledger) -> None:
    def save() -> None:
        with ledger.enter("barrier", 0):
            clock.now += 1.0

    with phases.measure("forward"):
        thread = threading.Thread(target=save)
        thread.start()
        joined(thread)
    phases.end_micro_step(is_step=True)
    assert phases.last_step_ms()["forward"] == 1000 and "forward.wait" not in phases.last_step_ms()


def test_nobody_listens_unasked(phases: Phases) -> None:
    assert Ledger.entry_type is LedgerEntry
    listen(phases)
    listen(phases)
    assert Ledger.entry_type is not LedgerEntry
    stop_listening(phases)
    assert Ledger.entry_type is LedgerEntry


# Stage -> the parts of phases that every step of an engine at this stage has.
PARTS = {
    0: {"backward.reduce", "step.norm", "step.update"},
    1: {"backward.reduce", "step.norm", "step.update", "step.gather"},
    2: {"backward.reduce", "step.norm", "step.update", "step.gather"},
    3: {"forward.gather", "backward.reduce", "step.norm", "step.update"},
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_an_engines_phases_add_up(rank: int, world: int, stage: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 1))
    data = [(torch.full((16,), float(i)), 0) for i in range(64)]
    zero = {"stage3_param_persistence_threshold": 0}
    settings = config(stage, "AdamW", rows=2, lr=1e-3, accumulate=2, zero=zero, wall_clock_breakdown=True)
    engine, _, loader, _ = deepspeed_c.initialize(model=model, config=settings, training_data=data)
    with engine:
        ticks = itertools.count()  # the clock advances by a second at each reading
        engine.phases._marks._clock, engine.phases._marks._last = lambda: float(next(ticks)), None
        batches, last = iter(loader), 0
        for step in range(3):
            for _ in range(2):
                inputs, _ = next(batches)
                update(engine, engine(inputs).square().mean())
            found, now = engine.get_wall_clock_timers(), next(ticks)
            total = sum(found[phase] for phase in ("data", "forward", "backward", "step", "other"))
            print(f"stage {stage}, rank {rank}, step {step}: {now - 1 - last} s, phases {total / 1e3} s")
            assert total == (now - 1 - last) * 1e3, found
            last = now - 1
            missing = PARTS[stage] - set(found)
            assert not missing or step == 0, (missing, found)
            for phase in ("forward", "backward", "step"):
                parts = [ms for name, ms in found.items() if name.startswith(f"{phase}.")]
                assert not parts or sum(parts) == found[phase], found
    assert Ledger.entry_type is LedgerEntry, "a closed engine listens"
