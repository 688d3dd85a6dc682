"""Asynchronous saves: a checkpoint has the values at the call, although training goes on before they are written.
Failures and the end of the process are tested too."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepspeed_c.checkpoint.native.background import BackgroundSave, Snapshot
from deepspeed_c.checkpoint.native.commit import read_latest
from deepspeed_c.checkpoint.native.save import OwnedPiece
from deepspeed_c.checkpoint.open import open_checkpoint
from deepspeed_c.checkpoint.source import Read
from deepspeed_c.errors import CheckpointError
from tests.deepspeed_c.engine.test_engine import make, train_step
from tests.ranks import run_ranks
from tests.waits import exit_status, fork_with_alarm, ran


def piece(name: str, data: torch.Tensor) -> OwnedPiece:
    return OwnedPiece("param", name, (data.numel(),), 0, data)


def test_snapshot_of_neighbours_strangers_and_nothing():
    flat, other = torch.arange(100.0), torch.arange(7, dtype=torch.bfloat16)
    pieces = [
        piece("end", flat[40:]), piece("none", flat.narrow(0, 10, 0)), piece("begin", flat[:11]), piece("other", other),
        piece("middle", flat[13:40]), piece("byte", torch.arange(5, dtype=torch.uint8)),
    ]  # fmt: skip
    expected = [p.data.clone() for p in pieces]
    snapshot = Snapshot()
    taken = snapshot.take(pieces)
    flat.zero_()
    other.zero_()
    for was, now in zip(expected, taken, strict=True):
        assert now.data.dtype == was.dtype and torch.equal(now.data, was), f"{now.name}: {now.data}, not {was}"
    n_bytes = snapshot.nbytes
    for _ in range(5):
        snapshot.take(pieces)
    assert snapshot.nbytes == n_bytes, f"{snapshot.nbytes} bytes after five more, {n_bytes} after the first"


def save_and_go_on(rank: int, world: int, stage: int, folder: str) -> None:
    import deepspeed_c.checkpoint.native.save as module

    may_write, save = threading.Event(), module.save

    def late(*args) -> None:
        assert may_write.wait(200)
        save(*args)

    with make(stage) as engine:
        for step in range(3):
            train_step(engine, step, rank)
        client_state = {"epoch": 3, "seen": [1, 2]}
        engine.save_checkpoint(folder, tag="now", client_state=client_state, is_async=False)
        module.save = late
        try:
            handle = engine.save_checkpoint(folder, tag="late", client_state=client_state, is_async=True)
            client_state["seen"].append(3)
            for step in range(3, 7):
                train_step(engine, step, rank)
            assert not handle.is_done()
        finally:
            may_write.set()
            module.save = save
        handle.wait()


def everything_in(folder: str, tag: str) -> tuple[dict, dict, dict, dict]:
    with open_checkpoint(folder, tag) as source:
        tensors = {key: torch.empty(t.shape, dtype=t.dtype) for key, t in source.tensors.items()}
        source.read([Read(source.tensors[key], 0, into.view(-1)) for key, into in tensors.items()])
        counts = {name: {k: float(v) for k, v in info.counts.items()} for name, info in source.params.items()}
        return tensors, counts, source.state["counters"], source.state["client_state"]


def test_an_asynchronous_save_is_the_synchronous_one_though_training_goes_on(tmp_path):
    for world, stage in ((1, 0), (2, 2), (2, 3)):
        folder = os.path.join(tmp_path, f"{world}_{stage}")
        run_ranks(world, save_and_go_on, stage, folder)
        now, late = everything_in(folder, "now"), everything_in(folder, "late")
        assert now[0].keys() == late[0].keys()
        for key, was in now[0].items():
            assert torch.equal(late[0][key], was), f"{key} is {late[0][key]}, not {was} (world {world}, stage {stage})"
        assert late[1:] == now[1:]
        assert any(counts.get("step") == 3.0 for counts in late[1].values()), late[1]


# -- failures, and the end of the process ----------------------------------------------------------------------------


class Writers:
    """Replaces ``save`` in the engine's module. Each save waits for ``may_write``, then does what ``plan`` has for its
    tag."""

    def __init__(self) -> None:
        import deepspeed_c.checkpoint.native.save as module

        self._module, self._save = module, module.save
        self.may_write = threading.Event()
        self.plan: dict[str, BaseException] = {}
        self.begun: list[str] = []
        self.is_busy = threading.Lock()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        self._module.save = self._write
        try:
            yield
        finally:
            self.may_write.set()
            self._module.save = self._save

    def _write(self, contents, destination, ranks) -> None:
        assert self.is_busy.acquire(blocking=False), "two writers at the same time"
        try:
            self.begun.append(destination.tag)
            assert self.may_write.wait(200)
            if destination.tag in self.plan:
                raise self.plan[destination.tag]
            self._save(contents, destination, ranks)
        finally:
            self.is_busy.release()


def failures(rank: int, world: int, folder: str) -> list[str]:
    told = []
    causes = {
        "typed": CheckpointError("the disk is full", where="there", fix="free space"),
        "any": ValueError("a bug"),
        "exit": SystemExit(3),
    }
    calls = {
        "save": lambda engine: engine.save_checkpoint(folder, tag="next"),
        "save again": lambda engine: engine.save_checkpoint(folder, tag="next", is_async=True),
        "wait": lambda engine: engine.wait_checkpoint(),
        "load": lambda engine: engine.load_checkpoint(folder, tag="first"),
    }
    writers = Writers()
    with make(2) as engine, writers.at_work():
        writers.may_write.set()
        engine.save_checkpoint(folder, tag="first")
        step = 0
        for (name, call), cause in itertools.product(calls.items(), causes.values()):
            writers.plan["bad"] = cause
            handle = engine.save_checkpoint(folder, tag="bad", is_async=True)
            train_step(engine, step, rank)
            with pytest.raises(CheckpointError) as caught:
                call(engine)
            told.append(f"{name}: {caught.value}")
            # This call raises the error once. The save's object raises it every time.
            engine.wait_checkpoint()
            for _ in range(2):
                with pytest.raises(CheckpointError, match=re.escape(caught.value.what)):
                    handle.wait()
            assert handle.is_done() and read_latest(folder) in ("first", "good")
            train_step(engine, step + 1, rank)
            engine.save_checkpoint(folder, tag="good", is_async=True).wait()
            assert read_latest(folder) == "good"
            step += 2
        engine.save_checkpoint(folder, tag="bad", is_async=True)
        with pytest.raises(CheckpointError):
            engine.close()
        engine.close()
    assert not os.path.exists(os.path.join(folder, "next")) and not os.path.exists(os.path.join(folder, "bad"))
    return told


def test_a_failure_is_raised_by_the_next_call_once(tmp_path):
    for told in run_ranks(2, failures, str(tmp_path)):
        assert len(told) == 12
        for text in told[::3]:
            assert "there: the disk is full\nFix: free space" in text, text
        for text in told[1::3]:
            assert "ended without completing: a bug" in text and "save again" in text, text
        for text in told[2::3]:
            assert "ended without completing: 3" in text, text


def waits(rank: int, world: int, folder: str) -> None:
    """A save in the background returns an object that may be waited for any number of times; any other save returns
    True. The states are float or 8-bit."""
    int8 = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "state_dtype": "int8"}}}
    for name, settings in {"float": {}, "8 bits": int8}.items():
        for key in (False, True):
            with make(2, checkpoint={"async": key}, **settings) as engine:
                train_step(engine, 0, rank)
                for is_async in (None, False, True):
                    saved = engine.save_checkpoint(folder, tag=f"{name} {key} {is_async}", is_async=is_async)
                    if key if is_async is None else is_async:
                        assert saved and saved is not True, (name, key, is_async, saved)
                        for _ in range(2):
                            assert saved.wait() is None and saved.is_done()
                        saved.wait(timeout=0)
                        assert os.path.samefile(saved.where, os.path.join(folder, f"{name} {key} {is_async}"))
                    else:
                        assert saved is True, (name, key, is_async, saved)


def test_a_save_in_the_background_can_be_waited_for_also_where_it_was_none(tmp_path):
    run_ranks(2, waits, str(tmp_path))


def in_a_row(rank: int, world: int, folder: str) -> None:
    writers = Writers()
    with make(1) as engine, writers.at_work():
        train_step(engine, 0, rank)
        first = engine.save_checkpoint(folder, tag="first", is_async=True)
        with torch.no_grad():  # changes from here on are not saved
            for param in engine.module.parameters():
                param.fill_(float("nan"))
        with pytest.raises(TimeoutError, match=r"first: the checkpoint is not complete after 0\.05 s"):
            first.wait(0.05)
        with pytest.raises(TimeoutError):
            first.wait(timeout=0)
        assert not first.is_done() and not os.path.exists(os.path.join(folder, "first"))
        threading.Timer(0.2, writers.may_write.set).start()
        second = engine.save_checkpoint(folder, tag="second", is_async=True)  # waits for the first: both use one buffer
        assert first.is_done() and os.path.exists(os.path.join(folder, "first"))
        second.wait(200)
        second.wait(0)
        assert writers.begun == ["first", "second"]


def test_two_saves_in_a_row_and_what_is_changed_meanwhile(tmp_path):
    run_ranks(2, in_a_row, str(tmp_path))
    for tag, is_lost in (("first", False), ("second", True)):
        weights = [value for (kind, _), value in everything_in(str(tmp_path), tag)[0].items() if kind == "param"]
        assert weights and all(bool(value.isnan().all()) == is_lost for value in weights), (tag, weights)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_writer_that_is_dead():
    """A child that is forked during a save has the save's object, but not its thread."""
    may_end = threading.Event()
    save = BackgroundSave(may_end.wait, "there")
    reading, writing = os.pipe()
    pid = fork_with_alarm()
    if pid == 0:
        try:
            save.wait(200)
        except CheckpointError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        told = answer.read()
    exit_status(pid)
    assert told.startswith("there: the writer in the background ended without completing: its thread is dead"), told
    assert not save.is_done()
    may_end.set()
    save.wait(200)


def orphaned(rank: int, world: int, folder: str) -> bool:
    """Rank 0 destroys all groups while both ranks write, and rank 1 destroys them a moment later."""
    engine = make(2)
    train_step(engine, 0, rank)
    writers = Writers()
    with writers.at_work():
        if rank == 0:
            writers.may_write.set()
        handle = engine.save_checkpoint(folder, tag="late", is_async=True)
        was_done = handle.is_done()
        dist.destroy_process_group()
        writers.may_write.set()
        handle.wait(200)
    engine.close()
    return was_done


def test_all_groups_are_destroyed_while_it_writes(tmp_path):
    assert run_ranks(2, orphaned, str(tmp_path), fresh=True, grace=200) == [False, False]
    assert everything_in(str(tmp_path), "late")[2]["global_steps"] == 1


EXITING = """
import sys, threading, time
import torch
import torch.distributed as dist
import deepspeed_c
import deepspeed_c.checkpoint.native.save as module

save, may_write = module.save, threading.Event()
def late(*args):
    may_write.wait()
    time.sleep(0.5)  # meanwhile the process begins to exit
    save(*args)
    print("written", flush=True)
module.save = late
engine = deepspeed_c.initialize(model=torch.nn.Linear(64, 64), config={"train_micro_batch_size_per_gpu": 1})[0]
engine.save_checkpoint(sys.argv[1], tag="last", is_async=True)
dist.destroy_process_group()
print("exits", flush=True)
may_write.set()
sys.exit(5)
"""


def test_the_process_exits_while_it_writes(tmp_path):
    root = Path(__file__).resolve().parents[4]
    ended = ran([sys.executable, "-c", EXITING, tmp_path], env={**os.environ, "PYTHONPATH": str(root)})
    assert (ended.returncode, ended.stdout) == (5, "exits\nwritten\n"), ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
    with open_checkpoint(str(tmp_path)) as source:
        assert source.verify() == [] and source.where.endswith("last")
