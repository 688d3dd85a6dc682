"""A recorded step is compared with the ledgers of engines that run: the same collectives over the same ranks with the
same bytes, in the same order."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch

import deepspeed_c
from deepspeed_c.comm.ledger import all_ledgers
from deepspeed_c.config import load_config
from deepspeed_c.engine.build import build_optimizer
from deepspeed_c.plan.computing import ModuleWork
from deepspeed_c.plan.memory import RankWalk
from deepspeed_c.plan.recorded import READ, RUN, START, WAIT, WRITE, Recorder
from deepspeed_c.plan.sizes import group_sizes, sizes_of
from tests.cells import every

# The engine exchanges its order of use after passes 1, 2, 4, 8 and so on. The planner records the third window, and its
# windows have at most two micro-batches until then.
N_BEFORE = 8
ORDER_OF_USE = "order of use"


class Case(NamedTuple):
    """A configuration and the ranks that run it."""

    world: int
    stage: int
    n_micro: int = 1
    zero: dict[str, Any] | None = None
    more: dict[str, Any] | None = None

    def config(self) -> dict[str, Any]:
        batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": self.n_micro}
        if self.more and "same_bits" in self.more:
            batch = {"train_batch_size": 2 * self.n_micro * self.world}
        return {
            **batch,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": self.stage, "reduce_bucket_size": 3001, **(self.zero or {})},
            "steps_per_print": None,
            **(self.more or {}),
        }


BF16 = {"bf16": {"enabled": True}}
EACH = {"stage3_param_persistence_threshold": 0}
NO_AHEAD = {"stage3_prefetch_bucket_size": 0}
NORM = {"gradient_clipping": 1.0}
CASES = {
    **{f"stage {s}, {w} ranks": Case(w, s) for s in range(4) for w in (2, 3)},
    **{f"stage {s}, bf16, 3 micro-batches": Case(2, s, 3, more=BF16) for s in range(4)},
    "stage 3, all gathered": Case(2, 3, 2, EACH),
    "stage 3, nothing ahead": Case(3, 3, 1, {**EACH, **NO_AHEAD}, {**BF16, **NORM}),
    "stage 1, broadcasts": Case(2, 1, 1, {"allgather_partitions": False}),
    "stage 2, one bucket, fp32 sums": Case(
        2, 2, 2, {"reduce_bucket_size": 10**9}, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
    ),
    "stage 3, MiCS": Case(4, 3, 2, {**EACH, "mics_shard_size": 2}),
    "stage 1, same_bits": Case(2, 1, 2, more={"same_bits": {"enabled": True, "grain": 2}}),
    "stage 3, one rank": Case(1, 3),
}

WIDTHS = (13, 61, 47, 29, 3)


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS)))


Exchanged = dict[tuple[int, ...], list[tuple[str, int]]]


def sorted_by_ranks(found: Iterable[tuple[tuple[int, ...], str, int]]) -> Exchanged:
    by_ranks: Exchanged = defaultdict(list)
    for ranks, op, n_bytes in found:
        by_ranks[ranks].append((op, n_bytes))
    return dict(by_ranks)


def of_engine(rank: int, world: int, case: Case) -> Exchanged:
    """The collectives of a later step, by the ranks that take part."""
    engine, *_ = deepspeed_c.initialize(model=make_model(), config=case.config())
    dtype = next(engine.module.parameters()).dtype

    def step() -> None:
        for _ in range(case.n_micro):
            engine.backward(engine(torch.ones(2, WIDTHS[0], dtype=dtype)).float().square().mean())
            engine.step()

    for _ in range(N_BEFORE):
        step()
    last = {ledger: ledger.last for ledger in all_ledgers()}
    step()
    found = [
        (ledger.ranks, entry.op, entry.n_bytes)
        for ledger in all_ledgers()
        for entry in ledger.recent(ledger.last - last.get(ledger, 0))
        if entry.label != ORDER_OF_USE
    ]
    engine.close()
    return sorted_by_ranks(found)


def recorded(case: Case, work: ModuleWork = ModuleWork({}, {})) -> Recorder:  # noqa: B008  (immutable)
    settings = load_config(case.config(), world_size=case.world)
    with torch.device("meta"):
        model = make_model()
    base = build_optimizer(settings.optimizer, settings.bf16, model, None, None)
    sizes = sizes_of(model, [group["params"] for group in base.param_groups])
    optimizer = group_sizes(base, is_sharded=case.stage > 0 and case.world > 1)
    with ExitStack() as at_end:
        return RankWalk(sizes, settings, case.world, optimizer, "cpu", at_end, work).record_step()


@pytest.mark.parametrize("name", every(3, CASES))
def test_a_recorded_step_has_the_collectives_of_an_engine(run_ranks, name):
    case = CASES[name]
    expected = run_ranks(case.world, of_engine, case)[0]
    found = sorted_by_ranks(
        (each.ranks, each.op, each.n_bytes) for each in recorded(case).transfers if each.label != ORDER_OF_USE
    )
    assert found == expected, f"{name}\nrecorded {found}\nengine   {expected}"


@pytest.mark.parametrize("stage", range(4))
def test_every_transfer_starts_once_and_is_waited_for_later(stage):
    found = recorded(Case(3, stage, 2, EACH))
    started, waited = ([a.value for a in found.actions if a.kind == kind] for kind in (START, WAIT))
    assert started == list(range(len(found.transfers)))
    for number in waited:
        at = [i for i, action in enumerate(found.actions) if action[:2] in {(START, number), (WAIT, number)}]
        assert found.actions[at[0]].kind == START, (number, at)
    # The last gathers of a window may still run when it ends.
    assert len(set(waited)) == len(waited) >= len(started) - 2, (started, waited)


def test_all_modules_compute_once_in_each_half_of_each_micro_batch():
    """Times are powers of two, so that a sum shows which of them it has."""
    paths = ["", *(str(i) for i in range(len(WIDTHS) - 1))]
    forward = {path: 1 << i for i, path in enumerate(paths)}
    backward = {path: 1 << (i + len(paths)) for i, path in enumerate(paths)}
    for stage, n_micro in ((0, 1), (2, 3), (3, 2)):
        found = recorded(Case(2, stage, n_micro), ModuleWork(forward, backward))
        total = sum(action.value for action in found.actions if action.kind == RUN)
        expected = n_micro * (sum(forward.values()) + sum(backward.values()))
        assert total == expected, (stage, bin(total), bin(expected))


def test_recomputed_layers_run_their_forward_again():
    forward, backward = {"0": 1, "1": 10, "2": 100, "3": 1000}, {"0": 0}
    for again, expected in (((), 1111), (("2",), 1211), (("0", "3"), 2112)):
        found = recorded(Case(2, 1, 1), ModuleWork(forward, backward, again=again))
        total = sum(action.value for action in found.actions if action.kind == RUN)
        assert total == expected, (again, total, expected)


def test_work_of_modules_without_parameters_is_their_ancestors():
    settings = load_config(Case(1, 0).config(), world_size=1)
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(3, 5))
        model[0].activation = torch.nn.GELU()
    base = build_optimizer(settings.optimizer, settings.bf16, model, None, None)
    sizes = sizes_of(model, [group["params"] for group in base.param_groups])
    work = ModuleWork({"0.activation": 7, "nowhere.at.all": 11}, {})
    states = group_sizes(base, is_sharded=False)
    with ExitStack() as at_end:
        found = RankWalk(sizes, settings, 1, states, "cpu", at_end, work).record_step()
    assert {action.label: action.value for action in found.actions if action.kind == RUN} == {"0": 7, "": 11}


def test_states_in_a_file_are_read_and_written(tmp_path):
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    case = Case(2, 2, 1, {**offload, "sub_group_size": 1000})
    found = recorded(case)
    read, written = (sum(t.n_bytes for t in found.transfers if t.op == op) for op in (READ, WRITE))
    n_elems = sum(a * b + b for a, b in itertools.pairwise(WIDTHS))
    # Two moments in fp32 of a rank's half; each extent is padded to whole pages.
    least = 2 * 4 * (n_elems // 2)
    assert least <= read <= 2 * least + (1 << 17), (read, least)
    assert read == written, (read, written)
