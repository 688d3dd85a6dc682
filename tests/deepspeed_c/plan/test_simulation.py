"""Simulated steps against closed formulas of rings, and against sums of what a program holds."""

from __future__ import annotations

import math
import re

import pytest

from deepspeed_c.errors import ConfigError, FeatureError
from deepspeed_c.plan.computing import ModuleWork
from deepspeed_c.plan.machine import FLOW, PULL, File, LinkLevel, Machine
from deepspeed_c.plan.recorded import Recorder
from deepspeed_c.plan.simulation import Cluster, simulate
from tests.deepspeed_c.plan.test_recorded import EACH, Case, recorded

GB = 10**9


def machine(*links: LinkLevel, file: File | None = None) -> Machine:
    return Machine(
        name="made up",
        source="this test",
        device="cpu",
        flops={"fp32": 1e12},
        product_curve=((1.0, 1.0),),
        memory_bytes_per_s=1e11,
        memory_bytes=10**12,
        operator_ns=0,
        update_bytes_per_s=1e11,
        links=links,
        copy_bytes_per_s=0.0,
        file=file,
        operators={},
        sources={},
    )


INSIDE = LinkLevel("inside", 8, 100 * GB, 2_000, 0, FLOW)
BETWEEN = LinkLevel("between", 0, 10 * GB, 12_000, 0, FLOW)
SHARED = LinkLevel("shared memory", 0, 5 * GB, 30_000, 0, PULL)


def program(*transfers: tuple[str, tuple[int, ...], int], ns: int = 0) -> Recorder:
    """One transfer after the other, and a computation before each."""
    found = Recorder()
    found.begin()
    for op, ranks, n_bytes in transfers:
        found.run(ns, "work")
        found.wait(found.start(op, ranks, n_bytes, "tensor", "all" if ranks else ""))
    return found


def ring_seconds(op: str, n_bytes: int, n_ranks: int, bytes_per_s: float, step_s: float) -> float:
    n_times = 2 if op == "all-reduce" else 1
    return n_times * (n_bytes * (n_ranks - 1) / n_ranks / bytes_per_s + (n_ranks - 1) * step_s)


@pytest.mark.parametrize(("n_hosts", "per_host"), [(1, 8), (2, 1), (3, 7), (16, 8), (128, 8)])
@pytest.mark.parametrize("op", ["all-gather", "reduce-scatter", "all-reduce"])
@pytest.mark.parametrize("n_bytes", [8, 10**6 + 7, 10**9])
def test_a_collective_takes_the_time_of_its_ring(n_hosts, per_host, op, n_bytes):
    n_ranks = n_hosts * per_host
    step = simulate(
        program((op, tuple(range(n_ranks)), n_bytes)), Cluster(machine(INSIDE, BETWEEN), n_ranks, per_host), {}
    )
    slowest = INSIDE if n_hosts == 1 else BETWEEN
    expected = ring_seconds(op, n_bytes, n_ranks, slowest.bytes_per_s, slowest.latency_ns / 1e9)
    assert step.seconds == pytest.approx(expected, rel=0.01, abs=2e-9), (step.seconds, expected)
    [found] = step.collectives
    assert found.link == slowest.name
    assert found.exposed_seconds == pytest.approx(step.seconds, abs=1e-9)
    if n_hosts > 1:
        each = n_bytes * (n_ranks - 1) / n_ranks * (2 if op == "all-reduce" else 1)
        assert step.link_bytes["between"] == pytest.approx(n_hosts * each, rel=0.01, abs=2 * n_ranks)


@pytest.mark.parametrize("stage", range(4))
def test_a_recorded_step_without_computation_is_the_sum_of_its_rings(stage):
    """1,024 ranks: transfers of one lane run one after the other, so nothing hides them."""
    found = recorded(Case(1024, stage, 2, EACH), ModuleWork({}, {}))
    step = simulate(found, Cluster(machine(INSIDE, BETWEEN), 1024, 8), {})
    expected = sum(
        ring_seconds("all-gather" if t.op == "barrier" else t.op, t.n_bytes, 1024, BETWEEN.bytes_per_s, 12e-6)
        for t in found.transfers
    )
    assert step.seconds == pytest.approx(expected, rel=0.01), (step.seconds, expected)
    assert len(step.busy_seconds) == 1024
    counted = sum(each.n_bytes for each in step.collectives)
    assert counted == sum(t.n_bytes for t in found.transfers), counted


def test_a_host_moves_bytes_itself_and_nothing_hides_them():
    n_bytes = 10**8
    step = simulate(program(("all-gather", (0, 1), n_bytes), ns=1_000_000), Cluster(machine(SHARED), 2, 2), {})
    expected = 1e-3 + 30e-6 + n_bytes / 2 / (5 * GB)
    assert step.seconds == pytest.approx(expected, rel=1e-4), (step.seconds, expected)
    assert step.busy_seconds == pytest.approx([1e-3, 1e-3])


def test_what_computation_hides_does_not_count():
    found = Recorder()
    found.begin()
    number = found.start("all-gather", (0, 1), 10**9, "tensor", "all")  # 5 ms and a step
    found.run(4_000_000, "work")
    found.wait(number)
    step = simulate(found, Cluster(machine(INSIDE), 2, 2), {})
    [each] = step.collectives
    assert each.seconds == pytest.approx(5.002e-3), each
    assert each.exposed_seconds == pytest.approx(1.002e-3), each
    assert {span.lane for span in step.spans} == {"compute", "wait", "inside"}


def test_a_slow_rank_makes_all_ranks_wait():
    steps = [
        simulate(program(("all-reduce", (0, 1, 2), 3000), ns=10**7), Cluster(machine(INSIDE), 3, 3, slow), {}).seconds
        for slow in ({}, {1: 1.5}, {1: 1.5, 2: 2.0})
    ]
    assert [round(each - steps[0], 9) for each in steps] == pytest.approx([0.0, 5e-3, 10e-3])


def test_files_of_a_host_are_shared_by_its_ranks():
    for n_ranks in (1, 4):
        disk = File(GB, 2 * GB, 1000)
        found = program(("read", (), 10**9), ("write", (), 10**9))
        step = simulate(found, Cluster(machine(INSIDE, file=disk), n_ranks, n_ranks), {})
        assert step.seconds == pytest.approx(n_ranks * 1.5 + 2e-6, rel=1e-4), (n_ranks, step.seconds)


def test_share_of_the_rate_of_products():
    step = simulate(program(("all-gather", (0, 1), 8), ns=10**9), Cluster(machine(INSIDE), 2, 2), {"fp32": 10**11})
    assert step.flops_seconds == pytest.approx(0.1)
    assert step.flops_share == pytest.approx(0.1 / step.seconds)


@pytest.mark.parametrize(
    ("made", "cluster", "what", "where"),
    [
        (machine(), (2, 2), "no link between ranks of a host", "machine made up: links"),
        (machine(INSIDE), (16, 8), "no link between hosts", "machine made up: links"),
        (
            machine(INSIDE, BETWEEN._replace(n_below=2)),
            (32, 8),
            "no link between groups of 16 ranks",
            "machine made up: links",
        ),
    ],
)
def test_a_machine_without_a_link_is_refused(made, cluster, what, where):
    with pytest.raises(ConfigError, match=re.escape(what)) as caught:
        simulate(program(("all-gather", tuple(range(cluster[0])), 64)), Cluster(made, *cluster), {})
    assert caught.value.where == where, caught.value


def test_a_file_that_the_machine_lacks_is_named():
    with pytest.raises(ConfigError, match="no rates of a file") as caught:
        simulate(program(("read", (), 64)), Cluster(machine(INSIDE), 2, 2), {})
    assert caught.value.where == "machine made up: file", caught.value


def test_an_operation_that_is_not_simulated_is_named():
    with pytest.raises(FeatureError, match="shift is not simulated"):
        simulate(program(("shift", (0, 1), 64)), Cluster(machine(INSIDE), 2, 2), {})


def test_racks_of_hosts():
    """8 hosts in 2 racks: the ring's two crossings of racks go through the slower link."""
    racks = LinkLevel("racks", 0, 2 * GB, 20_000, 0, FLOW)
    levels = machine(INSIDE._replace(n_below=2), BETWEEN._replace(n_below=4), racks)
    step = simulate(program(("all-gather", tuple(range(16)), 10**9)), Cluster(levels, 16, 2), {})
    expected = ring_seconds("all-gather", 10**9, 16, 2 * GB, 20e-6)
    assert math.isclose(step.seconds, expected, rel_tol=0.01), (step.seconds, expected)
    assert step.collectives[0].link == "racks"
