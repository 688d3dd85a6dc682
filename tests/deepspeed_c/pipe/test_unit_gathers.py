"""The gathers that ``deepspeed_c pipe show`` says of an engine, and those that an engine's ledger has."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from deepspeed_c import _C
from deepspeed_c.errors import ConfigError
from deepspeed_c.launcher.main import main
from deepspeed_c.pipe.gathers import unit_gathers
from deepspeed_c.pipe.schedule import StageUnit, make_table, with_gathers
from tests.deepspeed_c.pipe.models import micro_batches, module_of
from tests.deepspeed_c.pipe.test_engine import SCHEDULES
from tests.deepspeed_c.pipe.test_stage3 import stage3
from tests.ranks import run_ranks
from tests.training import engine_of

N = 4
LARGEST = 768
TWO_STAGES = ("interleaved", "zb_v", "dualpipe_v")
"""Schedules whose ranks have two stages each."""
LIMITS = {"all": None, "between": 3400, "one": LARGEST}


def gathers_of_a_batch(
    rank: int, world: int, config: dict[str, Any], options: dict[str, Any]
) -> tuple[dict[int, list[tuple[str, int]]], dict[str, int], int]:
    """Of the batch after the order of units has been learnt: (label and elements of the units of each stage, entries in
    the ledger by label, bytes that the gathers brought)."""
    net = module_of(2, **options)
    with engine_of(net, config) as engine:
        fetcher, data_rank = engine._fetcher, net.mpu().get_data_parallel_rank()
        units = {
            stage: [(fetcher.groups[i].label, fetcher.groups[i].numel) for i in engine._units_of(stage)]
            for stage in net.stages
        }
        ledger = fetcher.groups[0].unit.comm.ledger
        for step in range(3):
            last, received = ledger.last, fetcher.stats.n_received_bytes
            engine.train_batch(iter(micro_batches(step, data_rank, N)))
        labels = {group.label for group in fetcher.groups}
        n_new = ledger.last - last
        entered = ledger.recent(n_new)
        assert len(entered) == n_new, "the ledger has forgotten some"
        found = Counter(entry.label for entry in entered if entry.label in labels)
        return units, dict(found), fetcher.stats.n_received_bytes - received


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_ledger_has_at_most_the_gathers_that_are_shown(schedule, limit, capsys):
    most = LIMITS[limit]
    zero = {"stage3_prefetch_bucket_size": 0} | ({} if most is None else {"stage3_max_live_parameters": most})
    outcome = run_ranks(4, gathers_of_a_batch, stage3(N, zero), {"schedule": schedule, **SCHEDULES[schedule]})
    # Rank 0 and 2 are one pipeline, 1 and 3 the other.
    assert outcome[0][1] == outcome[1][1] and outcome[2][1] == outcome[3][1]
    by_stage = {stage: units for r in (0, 2) for stage, units in outcome[r][0].items()}
    lists = "/".join(",".join(str(numel) for _, numel in by_stage[stage]) for stage in sorted(by_stage))
    words = ["--schedule", schedule, "--stages", "2", "--virtual", str(len(by_stage) // 2), "--micro-batches", str(N)]
    shown = ["--unit-elements", lists, "--json", *([] if most is None else ["--max-live", str(most)])]
    assert main(["pipe", "show", *words, *shown]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    for pipe_rank, (units, found, received) in enumerate((outcome[0], outcome[2])):
        numels = {label: numel for of_stage in units.values() for label, numel in of_stage}
        said = ranks[pipe_rank]["engine"]
        elements = sum(n * numels[label] for label, n in found.items())
        assert received == elements * 4 // 2, "each rank lacks half of the bytes of a unit"
        if most is None:
            assert found == dict.fromkeys(numels, 1), "each unit once a batch"
            # The unit of a tied layer is in two stages of a rank, and shown for each.
            assert said["n_gathers"] == [1] * sum(map(len, units.values()))
            assert ranks[pipe_rank]["gathered_elements"] == said["gathered_elements"] >= elements
        else:
            assert sum(numels.values()) > most, "the limit does not hold all units"
            both = (sum(found.values()), elements), (sum(said["n_gathers"]), said["gathered_elements"])
            assert both[0][0] <= both[1][0] and both[0][1] <= both[1][1], both
            assert both[0][0] > len(numels), both
            assert said["peak_elements"] <= most, (said["peak_elements"], most)


def gathers_one_by_one(orders: list[list[int]]) -> list[int]:
    """The gathers of each unit if the limit holds one of them: at each use of another unit than before."""
    steps = [unit for order in orders for unit in order]
    return [
        sum(unit == step and (i == 0 or steps[i - 1] != unit) for i, step in enumerate(steps))
        for unit in range(max(steps) + 1)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_units_that_fit_one_at_a_time(schedule):
    table = make_table(schedule, 2, 2 if schedule in TWO_STAGES else 1, 5, "test")
    units = [StageUnit(stage, 7) for stage in range(len(table.rank_of)) for _ in range(3)]
    for rank in range(2):
        mine = [stage for stage, of in enumerate(table.rank_of) if of == rank]
        orders = []
        for kind, stage, _ in table.actions(rank):
            first = 3 * mine.index(stage) if stage in mine else 0
            order = [first, first + 1, first + 2]
            if kind in (_C.PIPE_FORWARD, _C.PIPE_WEIGHT):
                orders.append(order)
            elif kind in (_C.PIPE_BACKWARD, _C.PIPE_INPUT):
                orders.append(order[::-1])
        found = unit_gathers(table, rank, units, 7)
        assert found.n_gathers == gathers_one_by_one(orders)
        assert found.peak_elements == 7 and found.live_elements == [7] * len(orders)
        all_live = unit_gathers(table, rank, units, None)
        assert all_live.n_gathers == [1] * 3 * len(mine) and all_live.peak_elements == 21 * len(mine)


def gathers_in_the_table(table: _C.PipeTable, rank: int) -> int:
    return sum(kind == _C.PIPE_GATHER for kind, _, _ in table.actions(rank))


@pytest.mark.parametrize("schedule", TWO_STAGES)
@pytest.mark.parametrize("prefetch", [0, 7, 21])
def test_units_of_equal_size_are_gathered_no_more_often_than_in_the_table(schedule, prefetch):
    """A table of gathers keeps whole stages during their computations, so an engine could do as the table does."""
    rng, n_fewer = random.Random(schedule), 0
    for _ in range(40):
        n_ranks = rng.randint(1, 4)
        n = 2 * n_ranks + rng.randint(0, 4)
        table = make_table(schedule, n_ranks, 2, n, "test")
        sizes = [rng.randint(0, 5) for _ in table.rank_of]
        units = [StageUnit(stage, 7) for stage, n_units in enumerate(sizes) for _ in range(n_units)]
        of_ranks = [
            sum(size for size, of in zip(sizes, table.rank_of, strict=True) if of == rank) for rank in range(n_ranks)
        ]
        limit = 7 * rng.randint(max(sizes), max(of_ranks)) + rng.randint(0, 6)
        whole = with_gathers(table, units, limit, where="test")
        for rank in range(n_ranks):
            found, most = unit_gathers(table, rank, units, limit, prefetch), gathers_in_the_table(whole, rank)
            shown = (n_ranks, n, sizes, limit, rank, found, most)
            assert of_ranks[rank] <= sum(found.n_gathers) <= most, shown
            assert found.peak_elements <= limit, shown
            n_fewer += sum(found.n_gathers) < most
    assert n_fewer, "single units use room that whole stages cannot"


def test_ranks_without_units_and_a_limit_below_a_unit():
    table = make_table("1f1b", 2, 1, 3, "test")
    none = unit_gathers(table, 0, [StageUnit(1, 5)], 5)
    assert none.n_gathers == [] and none.gathered_elements == none.peak_elements == 0
    with pytest.raises(ConfigError, match="is 4, and a unit of stage 1 has 5 elements"):
        unit_gathers(table, 1, [StageUnit(1, 5)], 4)


@pytest.mark.parametrize(
    ("units", "limit", "said"),
    [
        ("5,3/2/1", "9", "has the units of 3 stages, and there are 2"),
        ("/", "9", "no list of sizes"),
        ("5,0/3", "9", "no list of sizes"),
        ("5,3/2", "4", "is 4, and a unit of stage 0 has 5 elements"),
    ],
)
def test_sizes_by_stage_that_are_refused(units, limit, said, capsys):
    words = ["--schedule", "1f1b", "--stages", "2", "--micro-batches", "4", "--unit-elements", units]
    assert main(["pipe", "show", *words, "--max-live", limit]) == 2
    assert said in capsys.readouterr().err


def test_a_limit_below_a_stage_is_shown_by_single_units(capsys):
    words = ["--schedule", "1f1b", "--stages", "2", "--micro-batches", "4", "--unit-elements", "5,3/4,4,2"]
    assert main(["pipe", "show", *words, "--max-live", "9"]) == 0
    out = capsys.readouterr().out
    assert "gathers of whole stages do not fit: one needs 10 live elements" in out
    assert "rank   0  2 gathers of 8 elements, for each unit 1 1; at most 8 live" in out
    assert "summed whole over the micro-batches of a batch, and reduced once" in out
