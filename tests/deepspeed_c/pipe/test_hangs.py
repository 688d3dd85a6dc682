"""A pipeline that cannot go on ends with an error that names the rank and the message."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import deepspeed_c
from deepspeed_c.comm.verdict import EXIT_CODE
from deepspeed_c.errors import CommError, RankMismatchError
from tests.deepspeed_c.pipe.models import Block, micro_batches, module_of
from tests.deepspeed_c.pipe.test_engine import config_of
from tests.ranks import RanksFailed, run_ranks

TIMEOUT_S = 2.0
# A test fails if a text has not come after so many seconds.
LIMIT_S = 200.0
N = 4
CAME = "came from rank 0 instead of"


def engine_of(world: int, folder: str, rank: int, *, timeout_s: float = TIMEOUT_S, n: int = N) -> Any:
    """Makes an engine. From here on stderr of this rank goes to a file of its own."""
    sys.stderr = open(os.path.join(folder, str(rank)), "w", buffering=1)  # noqa: SIM115  the rank ends with it
    net = module_of(world)
    config = config_of(n, collective_timeout_s=timeout_s)
    return deepspeed_c.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]


def at_forward(engine: Any, number: int, act: Any) -> None:
    """Calls ``act`` in the first block of this rank, before the forward with this number."""
    left = iter(range(number))

    def hook(*_: Any) -> None:
        if next(left, None) is None:
            act()

    next(m for m in engine.module.modules() if isinstance(m, Block)).register_forward_pre_hook(hook)


def ended_body(rank: int, world: int, folder: str, signum: int) -> None:
    engine = engine_of(world, folder, rank, timeout_s=20.0 if signum == signal.SIGKILL else TIMEOUT_S)
    engine.train_batch(iter(micro_batches(0, 0, N)))
    if rank == world - 1:
        at_forward(engine, 2, lambda: os.kill(os.getpid(), signum))
    try:
        engine.train_batch(iter(micro_batches(1, 0, N)))
    except CommError as error:
        # Ends like a script that does not catch the error.
        print(f"CommError: {error}", file=sys.stderr, flush=True)
        os._exit(1)


@pytest.mark.parametrize("world", [2, 3])
def test_a_stage_that_dies(tmp_path, world):
    """The error of each rank names the message that the rank was in, and the ranks that are gone."""
    with pytest.raises(RanksFailed) as failed:
        run_ranks(world, ended_body, str(tmp_path), signal.SIGKILL, fresh=True, timeout=LIMIT_S, grace=LIMIT_S)
    for outcome in failed.value.outcomes[:-1]:
        assert outcome.kind == "died", str(failed.value)
        text = (tmp_path / str(outcome.rank)).read_text()
        assert re.search(r"message #\d+ of (output|gradient of the input) of stage \d+, micro-batch \d+", text), text
        assert re.search(rf"rank {outcome.rank + 1} has ended", text) or f"rank {world - 1} has ended" in text, text


@pytest.mark.parametrize("world", [2, 3])
def test_a_stage_that_is_stopped(tmp_path, world):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(world, ended_body, str(tmp_path), signal.SIGSTOP, fresh=True, timeout=LIMIT_S, grace=LIMIT_S)
    for outcome in failed.value.outcomes[:-1]:
        assert outcome.kind == "died" and f"exit code {EXIT_CODE}" in outcome.text, str(failed.value)
        text = (tmp_path / str(outcome.rank)).read_text()
        assert f"rank {world - 1} will not come" in text, text
        assert f"rank {world - 1} is stopped by a signal" in text, text
        assert re.search(r"in message #\d+ of (output|gradient of the input) of stage \d+, micro-batch \d+", text), text


LATE = (
    r"rank 0 waits in message #\d+ of gradient of the input of stage 1, micro-batch \d+ \(shm\) for \d+ s\s+"
    r"rank 1 is at \S*test_hangs.py:\d+ in wait_for_the_warning"
)


def late_body(rank: int, world: int, folder: str) -> float:
    engine = engine_of(world, folder, rank)
    said_by_rank_0 = Path(folder) / "0"

    def wait_for_the_warning() -> None:
        # On a busy machine a warning of another place can come earlier. Wait for the first warning of this place.
        end = time.monotonic() + LIMIT_S
        while not re.search(LATE, said_by_rank_0.read_text()):
            assert time.monotonic() < end, "rank 0 has not warned of this place"
            time.sleep(0.1)

    if rank == world - 1:
        at_forward(engine, 2, wait_for_the_warning)
    with engine:
        return float(engine.train_batch(iter(micro_batches(0, 0, N))))


def test_a_stage_that_is_late_is_named_and_the_run_goes_on(tmp_path):
    """This holds also in the first batch, when ranks exchange tensor shapes: a slow rank does not count as diverged."""
    losses = run_ranks(2, late_body, str(tmp_path), fresh=True, timeout=LIMIT_S)
    assert losses[0] == losses[1]
    said = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "diverged" not in said, said


def counts_body(rank: int, world: int, folder: str) -> list[str]:
    engine = engine_of(world, folder, rank)
    said = []
    with engine:
        with pytest.raises(RankMismatchError) as caught:
            engine.eval_batch(iter(micro_batches(0, 0, 4)), num_micro_batches=2 if rank == 1 else 4)
        said.append(str(caught.value))
        if rank == 1:
            engine.set_train_batch_size(4)
        with pytest.raises(RankMismatchError) as caught:
            engine.train_batch(iter(micro_batches(0, 0, 4)))
        said.append(str(caught.value))
    return said


def test_stages_with_different_micro_batch_counts(tmp_path):
    """All ranks raise an error that names the counts, before anything is sent. ``initialize`` refuses configurations
    that differ."""
    for said in run_ranks(3, counts_body, str(tmp_path), fresh=True):
        for text in said:
            assert "rank 1 runs 2; ranks 0, 2 run 4" in text and "gradient_accumulation_steps" in text, text


def planted_body(rank: int, world: int, folder: str, what: str) -> str:
    engine = engine_of(world, folder, rank, timeout_s=20.0)
    engine.train_batch(iter(micro_batches(0, 0, N)))
    (stage,) = engine._runner._stages.values()
    if rank == 0 and what == "shape":
        # Makes the receiver expect a smaller value.
        form = stage.outputs._form
        stage.outputs._form = form._replace(leaves=(), n_bytes=64)
    if rank == 0 and what == "number":
        stage.outputs._n_begun += 1
    try:
        engine.train_batch(iter(micro_batches(1, 0, N)))
    except (RankMismatchError, CommError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    return "nothing was noticed"


def planted(tmp_path, what: str) -> tuple[str, str]:
    """The words of receiver and sender about a message that is not the expected one."""
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, planted_body, str(tmp_path), what, fresh=True, timeout=LIMIT_S, grace=LIMIT_S)
    assert [outcome.kind for outcome in failed.value.outcomes] == ["died", "died"], str(failed.value)
    return (tmp_path / "1").read_text(), (tmp_path / "0").read_text()


def test_a_message_that_is_not_the_expected_one(tmp_path):
    receiver, sender = planted(tmp_path, "number")
    assert "RankMismatchError" in receiver and f"value 5 {CAME} 4" in receiver, receiver
    assert "rank 1, output of stage 0, micro-batch 0" in receiver, receiver
    assert "message #" in sender and "rank 1 has ended" in sender, sender


def test_a_message_of_another_length(tmp_path):
    for text in planted(tmp_path, "shape"):
        assert "CommError" in text and "message #" in text and "output of stage 0, micro-batch 0" in text, text
        assert "sends shape [8]" in text and "rank 1 expects [88]" in text, text
