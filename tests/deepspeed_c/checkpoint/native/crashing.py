"""Saves that are killed at a chosen instant. A process forks the ranks of one save after another. The order for each
save tells when it has to die.

Run as a program, this file is the process that forks. It imports torch once and runs no operator, so forking it is
safe. Tests start and command it by ``Savers``.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.waits import ended, exit_status, fork_with_alarm

__all__ = ["Savers", "read_back", "values_of"]

# Time limits: for a save, and for the answer to an order. An answer may have to wait for two saves.
SAVE_SECONDS = 200
START_SECONDS = 600
# The functions whose calls a rank counts: a save makes its file system calls by them.
CALLS = ("open", "write", "fsync", "close", "mkdir", "rename", "replace", "unlink", "rmdir")
WRITER_CALLS = ("write", "write_bytes", "finish")
# Exit codes of a rank that was not killed.
DONE, FAILED, BUG = 0, 3, 4


def values_of(version: int) -> dict[tuple[str, str], list[float]]:
    """(kind, name) -> the elements that save number ``version`` writes. Every element differs between versions."""
    return {
        ("param", "a"): [version + i / 8 for i in range(37)], ("master", "a"): [version * 3 + i / 4 for i in range(37)],
        ("exp_avg", "a"): [-version - i / 2 for i in range(37)], ("param", "b.c"): [version * 5.0],
        ("param", "empty"): [],
    }  # fmt: skip


def read_back(folder: str, tag: str | None) -> int:
    """The version of a checkpoint, after a check of every value and of all state. Raises AssertionError if versions are
    mixed, and CheckpointError if the checkpoint is broken."""
    import torch

    from deepspeed_c.checkpoint.open import open_checkpoint
    from deepspeed_c.checkpoint.source import Read

    with open_checkpoint(folder, tag) as source:
        version = source.state["client_state"]["version"]
        expected = values_of(version)
        assert source.verify() == []
        assert set(source.tensors) == set(expected)
        found = {key: torch.full((len(values),), float("nan")) for key, values in expected.items()}
        source.read([Read(source.tensors[key], 0, into) for key, into in found.items()])
        for key, values in expected.items():
            assert found[key].tolist() == values, f"{key} of version {version} is {found[key].tolist()}"
        assert source.state["counters"] == {"global_steps": version}
        for rank in range(source.topology.world_size):
            assert source.rank_state(rank) == {"version": version, "rank": rank}
        return version


class Savers:
    """Starts the process that forks, and sends it orders."""

    def __init__(self) -> None:
        root = Path(__file__).resolve().parents[4]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(root)}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )

    def run(self, **order: Any) -> dict[str, Any]:
        """Runs one save. An order has ``folder``, ``tag``, ``version``, ``world``, and the instant of the kill (see
        ``_Fuse``). Returns {"codes": by rank, "calls": by rank, "seconds"}."""
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], START_SECONDS)
        assert ready, f"no answer to {order} within {START_SECONDS} s"
        line = self._process.stdout.readline()
        assert line, f"the process that forks savers has ended at {order}"
        return json.loads(line)

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            ended(self._process)
        self._process.stdout.close()


# -- in the process that forks -------------------------------------------------------------------------------------------


def _main() -> None:
    import torch.distributed  # noqa: F401

    import deepspeed_c.checkpoint.native.reader
    import deepspeed_c.checkpoint.native.save

    with contextlib.suppress(ImportError):
        import deepspeed_c.checkpoint.tools.zero_to_fp32_script  # noqa: F401

    gc.collect()
    gc.freeze()  # keeps pages shared with the children
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of ranks must not mix with answers
    for line in sys.stdin.buffer:
        answers.write(json.dumps(_run(json.loads(line))) + "\n")
        answers.flush()


def _run(order: dict[str, Any]) -> dict[str, Any]:
    world = order["world"]
    with tempfile.TemporaryDirectory(prefix="dsc_savers_") as meeting:
        begin = time.monotonic()
        group, pids = 0, []
        for rank in range(world):
            pid = fork_with_alarm()
            if pid == 0:
                _rank_main(order, rank, meeting, group)
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.setpgid(pid, group or pid)
            group = group or pid
            pids.append(pid)
        if "after" in order:
            _kill_after(order, meeting, pids, group)
        codes: list[int | str] = []
        deadline = time.monotonic() + SAVE_SECONDS
        for pid in pids:
            codes.append(_wait(pid, deadline))
        if "hung" in codes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            for pid, code in zip(pids, codes, strict=True):
                if code == "hung":
                    exit_status(pid)
        calls = []
        for rank in range(world):
            path = Path(meeting, f"calls_{rank}")
            text = path.read_text() if path.exists() else ""
            calls.append(json.loads(text) if text and codes[rank] == DONE else None)  # no text: killed while it wrote
        return {"codes": codes, "calls": calls, "seconds": time.monotonic() - begin}


def _kill_after(order: dict[str, Any], meeting: str, pids: list[int], group: int) -> None:
    """Kills one rank, or all ranks, ``after`` seconds after the save has begun."""
    deadline = time.monotonic() + SAVE_SECONDS
    while not all(os.path.exists(os.path.join(meeting, f"begun_{rank}")) for rank in range(len(pids))):
        if time.monotonic() > deadline:
            return  # the caller then finds that ranks hang
        time.sleep(0.0005)
    time.sleep(order["after"])
    with contextlib.suppress(ProcessLookupError):
        if order["victim"] is None:
            os.killpg(group, signal.SIGKILL)
        else:
            os.kill(pids[order["victim"]], signal.SIGKILL)


def _wait(pid: int, deadline: float) -> int | str:
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return "hung"
        time.sleep(0.001)


# -- in a rank -----------------------------------------------------------------------------------------------------------


class _Fuse:
    """Counts calls, and kills this process or its process group just before (``is_before``) or just after one of them.

    ``victim``: the rank that counts. ``kill``: the number of the call. ``all``: whether all ranks are killed.
    """

    def __init__(self, order: dict[str, Any], rank: int) -> None:
        self._names: list[str] = []
        self._at = order.get("kill", -1) if order.get("victim") == rank else -1
        self._is_before, self._is_all = order.get("is_before", True), order.get("all", False)
        self.names = self._names

    def wrap(self, name: str, function: Any) -> Any:
        @functools.wraps(function, updated=())
        def counted(*args: Any, **kwargs: Any) -> Any:
            is_last = len(self._names) == self._at
            self._names.append(name)
            if is_last and self._is_before:
                self._burn()
            result = function(*args, **kwargs)
            if is_last:
                self._burn()
            return result

        return counted

    def _burn(self) -> None:
        if self._is_all:
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _rank_main(order: dict[str, Any], rank: int, meeting: str, group: int) -> None:
    code = BUG
    try:
        with contextlib.suppress(PermissionError):
            os.setpgid(0, group)
        code = _save(order, rank, meeting)
    except BaseException:  # noqa: BLE001  the process ends here: the last chance to say why
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _save(order: dict[str, Any], rank: int, meeting: str) -> int:
    import torch
    import torch.distributed as dist

    from deepspeed_c import _C
    from deepspeed_c.checkpoint.native import save as saving
    from deepspeed_c.checkpoint.native import state
    from deepspeed_c.checkpoint.native.ranks import Ranks
    from deepspeed_c.errors import CheckpointError

    world, version = order["world"], order["version"]
    ranks = Ranks(rank, list(range(world)))
    if world > 1:
        dist.init_process_group(
            "gloo", store=dist.FileStore(os.path.join(meeting, "store"), world), rank=rank, world_size=world
        )
        ranks.connect()
    pieces = []
    for (kind, name), values in values_of(version).items():
        whole = torch.tensor(values)
        low, high = len(values) * rank // world, len(values) * (rank + 1) // world
        if high > low or rank == 0:
            pieces.append(saving.OwnedPiece(kind, name, tuple(whole.shape), low, whole[low:high]))
    contents = saving.Contents(
        pieces=pieces,
        stage=0,
        names=["a", "b.c", "empty"],
        counters={"global_steps": version},
        common=state.pack({"client_state": {"version": version}}, "test"),
        mine=state.pack({"version": version, "rank": rank}, "test"),
    )
    destination = saving.Destination(
        save_dir=order["folder"], tag=order["tag"], leads=rank == 0, keep_last=order.get("keep_last")
    )
    fuse = _Fuse(order, rank)
    for name in CALLS:
        setattr(os, name, fuse.wrap(name, getattr(os, name)))
    exchange = _C.exchange_paths if order.get("has_exchange", True) else lambda a, b: False
    _C.exchange_paths = fuse.wrap("exchange", exchange)
    original = _C.BlockWriter

    class CountedWriter:
        def __init__(self, *args: Any) -> None:
            self._writer = fuse.wrap("create", original)(*args)

        def __getattr__(self, name: str) -> Any:
            found = getattr(self._writer, name)
            return fuse.wrap(name, found) if name in WRITER_CALLS else found

    _C.BlockWriter = CountedWriter
    Ranks._talk = fuse.wrap("talk", Ranks._talk)
    if world > 1:
        dist.barrier()
    Path(meeting, f"begun_{rank}").touch()
    fuse.names.clear()  # do not count calls of the lines above
    begin = time.monotonic()
    try:
        saving.save(contents, destination, ranks)
    except CheckpointError:
        return FAILED
    calls = list(fuse.names)
    Path(meeting, f"calls_{rank}").write_text(json.dumps({"names": calls, "seconds": time.monotonic() - begin}))
    return DONE


if __name__ == "__main__":
    _main()
