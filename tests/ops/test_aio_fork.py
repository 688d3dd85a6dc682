"""ops/aio.py in forked processes: children of every kind do not affect the parent's handle, and their errors name the
process that owns it.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from deepspeed_c import _C
from deepspeed_c.errors import StateError
from deepspeed_c.offload.swap import SwapFile, Swapper, SwapSettings, reserve
from deepspeed_c.ops.aio import aio_handle, backends
from deepspeed_c.zero.states.home import Tagged
from tests.aio_faults import faults
from tests.waits import LIMIT_SECONDS, exit_status, fork_with_alarm, joined

USABLE = [backend.name for backend in backends() if backend.is_usable]
N, BYTES = 6, 3_000_001

# Module-level state of a program, inherited by its workers.
state: dict[str, aio_handle] = {}


def random_bytes(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[*USABLE, "fault"])
def in_flight(request, tmp_path):
    """A handle with reads in flight, the tensors that they fill, and the expected contents."""
    wanted = [random_bytes(i) for i in range(N)]
    for i, tensor in enumerate(wanted):
        (tmp_path / str(i)).write_bytes(tensor.numpy().tobytes())
    with faults(is_auto=False, late_chance=100, reorders=True):
        state["handle"] = aio_handle(1 << 16, 8, False, True, backend=request.param)
        tensors = [torch.zeros(BYTES, dtype=torch.uint8) for _ in wanted]
        for i, tensor in enumerate(tensors):
            state["handle"].async_pread(tensor, tmp_path / str(i))
        yield state["handle"], tensors, wanted
        handle = state.pop("handle")
        assert handle.wait() == N
        for tensor, expected in zip(tensors, wanted):
            assert torch.equal(tensor, expected)
        handle.sync_pread(tensors[0].zero_(), tmp_path / "0")  # the parent's handle still works
        assert torch.equal(tensors[0], wanted[0])
        handle.close()


def try_everything(folder: Path) -> None:
    """In a child: errors of transfers and waits name the process that owns the handle.

    A handle that the child creates works.
    """
    handle, mine = state["handle"], aio_handle()
    tensor, found = torch.arange(1000), torch.zeros(1000, dtype=torch.int64)
    path = folder / "child"
    for call in (
        lambda: handle.wait(),
        lambda: handle.sync_pread(found, folder / "0"),
        lambda: handle.async_pwrite(tensor, path),
        lambda: handle.pwrite(tensor, path, True),
    ):
        with pytest.raises(StateError, match=rf"belongs to process {os.getppid()}, .* make another one here"):
            call()
    mine.sync_pwrite(tensor, path)
    mine.sync_pread(found, path)
    assert torch.equal(found, tensor)


@pytest.mark.parametrize("how", ["close", "del", "collect", "use", "exit"])
def test_a_child_leaves_the_handle_alone(in_flight, tmp_path, how):
    pid = fork_with_alarm()
    if pid == 0:
        code = 1
        try:
            if how == "use":
                try_everything(tmp_path)
            elif how == "close":
                state["handle"].close()
                with pytest.raises(StateError, match="belongs to process"):
                    state["handle"].wait()
            elif how == "collect":  # as part of a cycle, so that the collector destroys it
                cycle = {"handle": state.pop("handle")}
                cycle["it"] = cycle
            del in_flight
            state.clear()
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert exit_status(pid) == 0


def test_while_another_thread_waits(tmp_path):
    """The thread holds the handle's lock at the moment of the fork, and does not exist in the child."""
    (tmp_path / "data").write_bytes(bytes(range(256)) * 4000)
    with faults(is_auto=False, delay_us=200_000, late_chance=256):
        handle = aio_handle(1 << 14, 8, backend="fault")
        found = torch.zeros(1_024_000, dtype=torch.uint8)
        assert handle.async_pread(found, tmp_path / "data") == 0
        thread = threading.Thread(target=handle.wait)
        thread.start()
        while handle._pending:  # wait() takes the list before it waits
            pass
        pid = fork_with_alarm()
        if pid == 0:
            code = 1
            try:
                with pytest.raises(StateError, match="belongs to process"):
                    handle.sync_pread(found, tmp_path / "data")
                handle.close()
                del handle
                gc.collect()
                code = 0
            finally:
                os._exit(code)
        assert exit_status(pid) == 0
        with faults(is_auto=False):  # requests finish at once from here on
            joined(thread)
    assert found.numpy().tobytes() == bytes(range(256)) * 4000


class Rows(Dataset):
    """Rows of a file. A worker tries the module's handle first, which is refused, and reads through its own handle."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.own: aio_handle | None = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> torch.Tensor:
        row = torch.empty(1000, dtype=torch.uint8)
        if self.own is None:
            with pytest.raises(StateError, match="belongs to process"):
                state["handle"].sync_pread(row, self.path)
            state.clear()
            gc.collect()
            self.own = aio_handle()
        self.own.sync_pread(row, self.path, 1000 * i)
        return row


def test_workers_of_a_data_loader(in_flight, tmp_path):
    rows = torch.randint(0, 256, (8, 1000), dtype=torch.uint8)
    (tmp_path / "rows").write_bytes(rows.numpy().tobytes())
    loader = DataLoader(
        Rows(tmp_path / "rows"), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=LIMIT_SECONDS
    )
    for _ in range(2):  # the first pass's workers have ended when the second pass forks its workers
        assert torch.equal(torch.cat(list(loader)), rows)


def leave() -> None:
    state.clear()
    sys.exit(3)


def test_processes_of_multiprocessing(in_flight):
    process = multiprocessing.get_context("fork").Process(target=leave)
    process.start()
    joined(process)
    assert process.exitcode == 3


def test_a_fork_in_a_thread(in_flight):
    codes = []

    def fork() -> None:
        pid = fork_with_alarm()
        if pid == 0:
            state.clear()
            gc.collect()
            os._exit(0)
        codes.append(exit_status(pid))

    thread = threading.Thread(target=fork)
    thread.start()
    joined(thread)
    assert codes == [0]


def test_a_child_that_ends_like_a_program(tmp_path):
    """The interpreter destroys module-level objects at its end, in the child as in the parent."""
    code = """
import os, sys, signal, torch
from deepspeed_c.ops.aio import aio_handle
handles = [aio_handle(1 << 16, 8, False, True, backend=name) for name in sys.argv[2:]]
tensors = [torch.zeros(os.path.getsize(sys.argv[1]), dtype=torch.uint8) for _ in handles]
for handle, into in zip(handles, tensors):
    handle.async_pread(into, sys.argv[1])
pid = os.fork()
signal.alarm(300)
if pid == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert [handle.wait() for handle in handles] == [1] * len(handles)
assert all(into.numpy().tobytes() == open(sys.argv[1], "rb").read() for into in tensors)
print("good")
"""
    (tmp_path / "data").write_bytes(random_bytes(3).numpy().tobytes())
    command = [sys.executable, "-c", code, str(tmp_path / "data"), *USABLE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT_SECONDS, check=False)
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr


def test_a_swapper_is_left_alone(tmp_path):
    """A child does not affect the parent's swap file and buffers while tensors are being written and read."""
    swapper = Swapper(SwapFile(reserve(str(tmp_path), 1 << 20, "test"), SwapSettings(), str(tmp_path)))
    tensors = [Tagged(torch.full((10_000,), float(i)), str(i)) for i in range(4)]
    swapper.send(tensors)
    swapper.prefetch(tensors[:2])
    pid = fork_with_alarm()
    if pid == 0:
        code = 1
        try:
            with pytest.raises(StateError, match="belongs to process"):
                swapper.bring(tensors)
            swapper.close()
            del swapper
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert exit_status(pid) == 0
    swapper.bring(tensors)
    assert [tagged.tensor.unique().tolist() for tagged in tensors] == [[0.0], [1.0], [2.0], [3.0]]
    swapper.close()


def test_a_file_is_left_alone(tmp_path):
    file = _C.AioFile(str(tmp_path / "data"), _C.AIO_READ | _C.AIO_WRITE | _C.AIO_CREATE)
    pid = fork_with_alarm()
    if pid == 0:
        code = 1
        try:
            for use in (lambda: file.n_bytes, lambda: file.is_direct, lambda: file.note):
                with pytest.raises(RuntimeError, match="this open file belongs to process"):
                    use()
            file.close()
            del file
            code = 0
        finally:
            os._exit(code)
    assert exit_status(pid) == 0
    assert file.n_bytes == 0
    file.close()
