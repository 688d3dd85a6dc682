"""What an asynchronous save takes along: everything as it was at the call, whatever training does until it is written."""

from __future__ import annotations

import os
import threading

import torch

from deepspeed_c.checkpoint.background import Snapshot
from deepspeed_c.checkpoint.native import open_native
from deepspeed_c.checkpoint.save import OwnedPiece
from deepspeed_c.checkpoint.source import Read
from tests.deepspeed_c.engine.test_engine import make, train_step
from tests.ranks import run_ranks


def piece(name: str, data: torch.Tensor) -> OwnedPiece:
    return OwnedPiece("param", name, (data.numel(),), 0, data)


def test_snapshot_of_neighbours_strangers_and_nothing():
    flat, other = torch.arange(100.0), torch.arange(7, dtype=torch.bfloat16)
    pieces = [
        piece("end", flat[40:]),
        piece("none", flat.narrow(0, 10, 0)),
        piece("begin", flat[:11]),
        piece("other", other),
        piece("middle", flat[13:40]),
        piece("byte", torch.arange(5, dtype=torch.uint8)),
    ]
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
    import deepspeed_c.engine.checkpoints as module

    may_write, save = threading.Event(), module.save

    def late(*args) -> None:
        assert may_write.wait(20)
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
    with open_native(folder, tag) as source:
        tensors = {key: torch.empty(t.shape, dtype=t.dtype) for key, t in source.tensors.items()}
        source.read([Read(source.tensors[key], 0, into.view(-1)) for key, into in tensors.items()])
        counts = {name: {k: float(v) for k, v in info.counts.items()} for name, info in source.params.items()}
        return tensors, counts, source.state["counters"], source.state["client_state"]


def test_an_asynchronous_save_is_the_synchronous_one_though_training_goes_on(tmp_path):
    for world, stage in ((1, 0), (2, 2), (2, 3)):
        folder = os.path.join(tmp_path, f"{world}_{stage}")
        run_ranks(world, save_and_go_on, stage, folder, timeout=60)
        now, late = everything_in(folder, "now"), everything_in(folder, "late")
        assert now[0].keys() == late[0].keys()
        for key, was in now[0].items():
            assert torch.equal(late[0][key], was), f"{key} is {late[0][key]}, not {was} (world {world}, stage {stage})"
        assert late[1:] == now[1:]
        assert any(counts.get("step") == 3.0 for counts in late[1].values()), late[1]
