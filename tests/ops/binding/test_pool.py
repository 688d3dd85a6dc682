"""The thread pool in a Python process: a size independent of torch's, several Python threads, fork, and a bad size.

The C tests cover everything else.
"""

from __future__ import annotations

import os
import threading

import pytest
import torch

from deepspeed_c import _C
from deepspeed_c.ops import flat
from deepspeed_c.ops.adam import FusedAdam
from tests import fresh
from tests.waits import joined

N_ELEMS = 400_003  # 13 chunks


@pytest.fixture
def automatic(monkeypatch):
    """Removes the environment's variables that set the pool's size, and sizes the pool anew before and after the test."""
    monkeypatch.delenv("DSC_NUM_THREADS", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    _C.pool_resize(0)
    yield
    monkeypatch.undo()
    _C.pool_resize(0)


# The program of a process that a launcher starts with OMP_NUM_THREADS=1. It prints a line for each check, so that a
# failure shows the last check passed.
RANK = """
import os, sys, torch
torch.set_num_threads(1)
from deepspeed_c import _C
from deepspeed_c.ops import flat

def names():
    return {open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")}

def work():
    tensor = torch.ones(400_003)
    flat.scale_([tensor], 3.0)
    assert (tensor == 3).all()

n_threads = _C.pool_n_threads()
assert torch.get_num_threads() == 1 and _C.pool_n_workers() == 0
work()
assert _C.pool_n_workers() == n_threads - 1, (_C.pool_n_workers(), n_threads)
assert {f"dsc_pool/{i}" for i in range(1, n_threads)} <= names(), names()
print("threads", n_threads)

child = os.fork()
if child == 0:
    is_empty = _C.pool_n_workers() == 0
    work()
    os._exit(0 if is_empty and _C.pool_n_workers() == n_threads - 1 else 1)
print("fork", os.waitpid(child, 0)[1])

cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, cores[:1])
_C.pool_resize(0)
work()
print("bound", _C.pool_n_threads(), _C.pool_n_workers())

os.sched_setaffinity(0, cores)
os.environ["LOCAL_WORLD_SIZE"] = str(len(cores))
_C.pool_resize(0)
print("shared", _C.pool_n_threads())
os.environ["DSC_NUM_THREADS"] = "5"
_C.pool_resize(0)
work()
print("asked", _C.pool_n_threads(), _C.pool_n_workers())
"""


def test_size_is_that_of_the_rank_and_not_torchs(automatic):
    n_threads = _C.pool_n_threads()
    assert 1 <= n_threads <= len(os.sched_getaffinity(0))
    hidden = ("DSC_NUM_THREADS", "LOCAL_WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = fresh.run(["-c", RANK], env={**environment, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [f"threads {n_threads}", "fork 0", "bound 1 0", "shared 1", "asked 5 4"]


@pytest.mark.parametrize(
    "name, text", [("DSC_NUM_THREADS", "many"), ("DSC_NUM_THREADS", "513"), ("LOCAL_WORLD_SIZE", "0")]
)
def test_bad_size_is_an_error_of_the_first_operator(automatic, monkeypatch, name, text):
    tensor = torch.ones(3)
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name}: is '?{text}"):
        _C.pool_n_threads()
    with pytest.raises(ValueError, match=f"{name}: is '?{text}"):
        flat.scale_([tensor], 2.0)
    assert (tensor == 1).all()
    monkeypatch.delenv(name)
    flat.scale_([tensor], 2.0)
    assert (tensor == 2).all()


def test_checksums_of_parts_size_the_pool(automatic, monkeypatch):
    monkeypatch.setenv("DSC_NUM_THREADS", "3")
    data = torch.arange(1_400_003, dtype=torch.int32).view(torch.uint8).numpy()  # 11 chunks
    (crc,) = _C.crc32c_parts([((data.size,), (0, data.size, 0, data.size), 1, data)])
    assert (_C.pool_n_workers(), _C.crc32c_of_parts(crc, data.size)) == (2, _C.crc32c(data))
    _C.pool_resize(0)
    monkeypatch.setenv("DSC_NUM_THREADS", "many")
    with pytest.raises(ValueError, match="DSC_NUM_THREADS: is 'many"):
        _C.crc32c_parts([((1,), (0, 1, 0, 1), 1, b"1")])


@pytest.mark.parametrize("n_threads", [-1, 513])
def test_size_out_of_range(automatic, n_threads):
    with pytest.raises(ValueError, match=f"{n_threads} threads"):
        _C.pool_resize(n_threads)


def test_python_threads_share_the_pool(automatic):
    _C.pool_resize(3)
    wrong: list[str] = []

    def work(number: int) -> None:
        tensors = [torch.ones(N_ELEMS * number // 4), torch.ones(7)]
        for step in range(1, 11):
            flat.scale_(tensors, 2.0)
            total = float(flat.norm(tensors).sumsq[0])
            if total != sum(t.numel() for t in tensors) * 4.0**step:
                wrong.append(f"thread {number}, step {step}: {total}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        joined(thread)
    assert not wrong


def test_subnormals_are_treated_alike_by_all_threads(automatic):
    """A worker whose floating-point mode differs would flush numbers that the calling thread keeps, or the reverse."""
    tiny = 1e-40
    for is_flushed in (True, False):
        if not torch.set_flush_denormal(is_flushed):
            pytest.skip("this processor cannot flush subnormal numbers")
        try:
            seen = set()
            for n_threads in (1, 4):
                _C.pool_resize(n_threads)
                for _ in range(5):
                    tensor = torch.full((N_ELEMS,), tiny)
                    flat.scale_([tensor], 0.5)
                    seen.update(tensor.view(torch.int32).unique().tolist())
        finally:
            torch.set_flush_denormal(False)
        assert len(seen) == 1, (is_flushed, seen)


@pytest.mark.parametrize("step", ["whole", "outside", "pieces"])
def test_states_are_zero_before_their_first_step(automatic, step):
    """States are zeroed explicitly, because an allocator may hand out used memory."""
    _C.pool_resize(2)
    for _ in range(3):
        dirt = [torch.full((n,), float("nan")) for n in (50_000, 50_001, 5)]
        del dirt
        params = [torch.nn.Parameter(torch.zeros(n)) for n in (50_000, 50_001, 5)]
        optimizer = FusedAdam(params, lr=0.1)
        grads = [torch.full_like(p, 2.0) for p in params]
        if step == "whole":
            for p, g in zip(params, grads):
                p.grad = g
            optimizer.step()
        elif step == "outside":
            optimizer.fused_step([grads])
        else:
            optimizer.begin_step()
            for p, g in zip(params, grads):
                optimizer.step_tensors(0, [p], [g])
        for p in params:
            state = optimizer.state[p]
            torch.testing.assert_close(state["exp_avg"], torch.full_like(p, 0.2))
            torch.testing.assert_close(state["exp_avg_sq"], torch.full_like(p, 0.004))
            torch.testing.assert_close(p.detach(), torch.full_like(p, -0.1))
