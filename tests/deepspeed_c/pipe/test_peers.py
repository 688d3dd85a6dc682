"""An exception on one of the ranks of a stage ends the batch on all ranks, although the rank's peers wait for it in
collectives of tensor or sequence parallelism."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

from deepspeed_c.errors import StageError, StateError
from tests.deepspeed_c.pipe.test_axes import (
    N_MICRO,
    Block,
    HandCut,
    batches_of,
    config_of,
    cut_sequences,
    engine_by_hand,
    engine_of,
    module_of,
    part,
    train,
)
from tests.deepspeed_c.pipe.test_bad_input import Fault, _Raises
from tests.ranks import run_ranks


class Plan:
    """Raises at the micro-batch with a number, until ``is_over`` is set."""

    def __init__(self, kind: str, n_before: int) -> None:
        self.kind, self.n_before, self.n_seen, self.is_over = kind, n_before, 0, False

    def __call__(self, module: Any, inputs: Any, output: Any) -> Any:
        self.n_seen += 1
        if self.is_over or self.n_seen != self.n_before + 1:
            return output
        if self.kind == "forward":
            raise Fault("in a forward")
        return (output, threading.Lock()) if self.kind == "pickle" else _Raises.apply(output)


def arm(engine: Any, kind: str, n_before: int) -> Plan:
    """Has the last block of this rank's stage fail between its two collectives, or the stage with its output."""
    plan = Plan(kind, n_before)
    block = [module for module in engine.module.modules() if isinstance(module, (Block, HandCut))][-1]
    last = [module for name, module in engine.module.named_children() if name.isdigit()][-1]
    (last if kind == "pickle" else block.norm2).register_forward_hook(plan)
    return plan


def make_engine(axis: str, local: str, stages: int) -> Any:
    config = config_of(N_MICRO, comm={"local": local})
    if axis == "sp":
        config["tensor_parallel"]["autotp_size"] = 1
        config["sequence_parallel_size"] = 2
    engine = engine_of(module_of(stages), config)
    if axis == "sp":
        cut_sequences(engine)
    return engine


def raised(call: Callable[[], Any], kind: type[Exception]) -> tuple[str, str]:
    """(text of the error of ``call``, name of its cause)."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value), type(caught.value.__cause__).__name__


def alone_body(rank: int, world: int, axis: str, local: str, stages: int, bad: int, kind: str, n_before: int) -> Any:
    """(the error of the batch, its cause, the error of the next batch)."""
    with make_engine(axis, local, stages) as engine:
        batches = [(part(engine, x), part(engine, y)) for x, y in batches_of(0)]
        engine.eval_batch(iter(batches))
        if rank == bad:
            arm(engine, kind, n_before)
        first = raised(lambda: engine.train_batch(iter(batches)), StageError)
        return first, [raised(call, StateError)[0] for call in (
            lambda: engine.train_batch(iter(batches)),
            lambda: engine.eval_batch(iter(batches)),
            lambda: engine.save_checkpoint("nowhere"),
        )]  # fmt: skip


WORDS = {
    "forward": r"rank {rank}: the forward of stage {stage}, micro-batch {k}, raised Fault: in a forward",
    "backward": r"rank {rank}: the backward of stage {stage}, micro-batch {k}, raised Fault: in a backward",
    "pickle": r"rank {rank}: output of stage {stage}, micro-batch {k} raised ModelError: a lock cannot be sent",
}
CAUSE = {"forward": "Fault", "backward": "Fault", "pickle": "ModelError"}


def check(outcome: list[Any], bad: int, kind: str, stage: int, k: int) -> None:
    words = WORDS[kind].format(rank=bad, stage=stage, k=k)
    for rank, ((text, cause), later) in enumerate(outcome):
        assert re.search(words, text) and "start the program again from a checkpoint" in text, (rank, text)
        assert (cause == CAUSE[kind]) == (rank == bad), (rank, cause)
        for each in later:
            assert re.search(words, each) and "connections were closed" in each, (rank, each)


FAULTS = [(1, "forward", 0), (1, "backward", 1), (2, "forward", 2), (3, "backward", N_MICRO - 1)]


@pytest.mark.parametrize(
    "axis, local, bad, kind, n_before",
    [
        *(("tp", "shm", *fault) for fault in FAULTS),
        *(("sp", "shm", *fault) for fault in FAULTS),
        ("tp", "off", *FAULTS[1]),
        ("sp", "off", *FAULTS[2]),
    ],
)
def test_one_rank_of_a_stage_raises(axis: str, local: str, bad: int, kind: str, n_before: int) -> None:
    outcome = run_ranks(4, alone_body, axis, local, 2, bad, kind, n_before, fresh=True)
    check(outcome, bad, kind, bad // 2, n_before)


def test_one_rank_has_an_output_that_does_not_pickle() -> None:
    check(run_ranks(4, alone_body, "tp", "shm", 2, 1, "pickle", 1, fresh=True), 1, "pickle", 0, 1)


@pytest.mark.parametrize("axis", ["tp", "sp"])
def test_a_single_stage(axis: str) -> None:
    """The ranks of the stage are all ranks, so that they exchange nothing after their connections are closed."""
    check(run_ranks(2, alone_body, axis, "shm", 1, 1, "forward", 1, fresh=True), 1, "forward", 0, 1)


def two_pipelines_body(rank: int, world: int) -> Any:
    with engine_of(module_of(schedule="zb_h1"), config_of(N_MICRO // 2, 1)) as engine:
        mine = engine.grid.get_data_parallel_rank()
        batches = batches_of(0)[mine * N_MICRO // 2 :][: N_MICRO // 2]
        if rank == 5:
            arm(engine, "backward", 1)
        first = raised(lambda: engine.train_batch(iter(batches)), StageError)
        return first, [raised(lambda: engine.train_batch(iter(batches)), StateError)[0]]


def test_other_pipelines_raise_too() -> None:
    check(run_ranks(8, two_pipelines_body, fresh=True), 5, "backward", 1, 1)


def by_hand_body(rank: int, world: int) -> Any:
    with engine_by_hand(N_MICRO) as engine:
        if rank == 3:
            arm(engine, "forward", 1)
        first = raised(lambda: engine.train_batch(iter(batches_of(0))), StageError)
        return first, [raised(lambda: engine.train_batch(iter(batches_of(0))), StateError)[0]]


def test_layers_that_were_cut_by_hand() -> None:
    """They use a process group of their own."""
    check(run_ranks(4, by_hand_body, fresh=True), 3, "forward", 1, 1)


def alike_body(rank: int, world: int, axis: str, kind: str) -> Any:
    """Two batches fail on both ranks of the last stage, and the next ones are as good as without."""
    with make_engine(axis, "shm", 2) as engine:
        batches = [(part(engine, x), part(engine, y)) for x, y in batches_of(0)]
        texts = []
        for _ in range(2):
            plan = arm(engine, kind, 1) if rank // 2 == 1 else None
            texts.append(raised(lambda: engine.train_batch(iter(batches)), StageError))
            if plan is not None:
                plan.is_over = True
        return texts, train(engine, last=1)


@pytest.mark.parametrize("axis", ["tp", "sp"])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_all_ranks_of_a_stage_raise(axis: str, kind: str) -> None:
    for rank, (texts, found) in enumerate(run_ranks(4, alike_body, axis, kind)):
        for text, cause in texts:
            assert re.search(WORDS[kind].format(rank="[23]", stage=1, k=1), text), (rank, text)
            assert "the engine can run the next batch" in text, (rank, text)
            assert (cause == "Fault") == (rank // 2 == 1), (rank, cause)
        assert not found, (rank, found)
