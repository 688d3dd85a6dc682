"""Collectives and messages through shared memory: the same results as ``torch.distributed`` over gloo for random operations, types,
lengths, splits and places; objects kept alive by a work; messages of failures. The C tests of the core are in
tests/csrc/comm.
"""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepspeed_c import _C
from tests.ranks import RanksFailed, on_ranks, run_ranks
from tests.waits import exit_status, fork_with_alarm, joined

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
MOVED = (*FLOATS, *INTEGERS, torch.float64, torch.bool, torch.complex64, torch.complex128)
LENGTHS = (0, 1, 2, 3, 17, 1021, 16384, 16385, 65537, 200003)


def group_of(rank: int, world: int, timeout_s: float = 120.0) -> _C.ShmGroup:
    """An attached group. The ranks exchange their addresses over gloo."""
    group = _C.ShmGroup(rank, world, timeout_s)
    addresses: list[str] = [""] * world
    dist.all_gather_object(addresses, group.address)
    group.attach(addresses)
    dist.barrier()
    return group


def place(group: _C.ShmGroup, like: torch.Tensor, in_arena: bool) -> torch.Tensor:
    """A copy of a flat tensor, inside or outside the arena."""
    if not in_arena or like.numel() == 0:
        return like.clone()
    tensor = torch.frombuffer(group.empty(like.nbytes), dtype=like.dtype)
    assert group.owns(tensor)
    return tensor.copy_(like)


def values(length: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype in INTEGERS:
        info = torch.iinfo(dtype)
        return torch.randint(max(info.min, -(1 << 40)), min(info.max, 1 << 40), (length,), generator=generator).to(
            dtype
        )
    if dtype == torch.bool:
        return torch.randint(0, 2, (length,), generator=generator).bool()
    return torch.randn(length, generator=generator, dtype=dtype if dtype.is_complex else torch.float64).to(dtype)


def everyones(length: int, dtype: torch.dtype, seed: int, world: int) -> list[torch.Tensor]:
    return [values(length, dtype, torch.Generator().manual_seed(seed * 100 + rank)) for rank in range(world)]


def reduced(inputs: list[torch.Tensor], op: str, scale: float) -> torch.Tensor:
    """The expected reduction: in rank order, with 16-bit floats summed in f32 and rounded once."""
    total = inputs[0].float() if inputs[0].dtype in FLOATS else inputs[0].clone()
    for one in inputs[1:]:
        one = one.to(total.dtype)
        total = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "prod": torch.mul}[op](total, one)
    return (total * scale if scale != 1.0 else total).to(inputs[0].dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """A view as bytes, because gloo does not support all types."""
    return flat.view(torch.uint8)


def draw(rank: int, world: int, common: random.Random, own: random.Random, group: _C.ShmGroup):
    """Starts one random operation. Returns (work, a function that checks its result)."""
    op = common.choice(("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"))
    length, seed = common.choice((*LENGTHS, common.randrange(1 << common.randrange(1, 19)))), common.randrange(1 << 30)
    if op == "all_reduce":
        dtype = common.choice((*FLOATS, *INTEGERS, torch.float64))
        how = common.choice(("sum", "sum", "max", "min", "prod"))
        scale = common.choice((1.0, 1 / 3)) if dtype.is_floating_point else 1.0
        inputs = everyones(length, dtype, seed, world)
        flat = place(group, inputs[rank], own.random() < 0.5)

        def check() -> None:
            assert same_bits(flat, reduced(inputs, how, scale))
            if how == "sum" and dtype in (torch.int8, torch.int32, torch.int64, torch.uint8):  # gloo's types
                theirs = inputs[rank].clone()
                dist.all_reduce(theirs)
                assert torch.equal(flat, theirs)
            elif how != "sum" and dtype in (torch.float32, torch.int64):
                theirs = inputs[rank].clone()
                dist.all_reduce(
                    theirs, op={"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "prod": dist.ReduceOp.PRODUCT}[how]
                )
                torch.testing.assert_close(flat, theirs * scale if scale != 1.0 else theirs)

        return group.all_reduce(flat, how, scale), check
    if op == "reduce_scatter":
        dtype, to = common.choice(FLOATS), common.choice(FLOATS)
        length = length // world * world
        inputs = everyones(length, dtype, seed, world)
        flat = place(group, inputs[rank], own.random() < 0.5)
        scale, accumulate = common.choice((1.0, 0.25, 1 / 3)), common.random() < 0.5
        before = values(length // world, to, torch.Generator().manual_seed(seed + 7))
        mine = slice(rank * (length // world), (rank + 1) * (length // world))
        is_own_slice = own.random() < 0.3
        out = flat[mine] if is_own_slice else before.clone()
        accumulate = accumulate and not is_own_slice

        def check() -> None:
            total = inputs[0].float()
            for one in inputs[1:]:
                total = total + one.float()
            total = total[mine]
            if scale != 1.0:
                total = total * torch.tensor(scale, dtype=torch.float32)
            if accumulate:
                total = total + before.float()
            assert same_bits(out, total.to(out.dtype))

        return group.reduce_scatter(flat, out, scale, accumulate), check
    dtype = common.choice(MOVED)
    if op == "all_gather":
        length = length // world * world
        inputs = everyones(length, dtype, seed, world)
        flat = place(group, inputs[rank], own.random() < 0.5)

        def check() -> None:
            theirs = [torch.empty_like(as_bytes(flat)[: flat.nbytes // world]) for _ in range(world)]
            dist.all_gather(theirs, as_bytes(inputs[rank]).view(world, -1)[rank].clone())
            assert torch.equal(as_bytes(flat), torch.cat(theirs))

        return group.all_gather(flat), check
    if op == "broadcast":
        src = common.randrange(world)
        inputs = everyones(length, dtype, seed, world)
        flat = place(group, inputs[rank], own.random() < 0.5)

        def check() -> None:
            theirs = as_bytes(inputs[rank]).clone()
            dist.broadcast(theirs, src)
            assert torch.equal(as_bytes(flat), theirs)

        return group.broadcast(flat, src), check
    splits = [[common.choice((0, 1, common.randrange(length + 1))) for _ in range(world)] for _ in range(world)]
    sent = values(sum(splits[rank]), dtype, torch.Generator().manual_seed(seed + rank))
    flat = place(group, sent, own.random() < 0.5)
    received = [splits[source][rank] for source in range(world)]
    out = torch.empty(sum(received), dtype=dtype)

    def check() -> None:
        theirs = torch.empty_like(as_bytes(out))
        size = dtype.itemsize
        dist.all_to_all_single(theirs, as_bytes(sent), [n * size for n in received], [n * size for n in splits[rank]])
        assert torch.equal(as_bytes(out), theirs)

    return group.all_to_all(flat, out, splits[rank], received), check


def random_operations(rank: int, world: int, n_operations: int, seed: int) -> int:
    common, own = random.Random(seed), random.Random(seed * 17 + rank)
    group = group_of(rank, world)
    done = 0
    while done < n_operations:
        n = min(common.randrange(1, 5), n_operations - done)
        drawn = [draw(rank, world, common, own, group) for _ in range(n)]
        for work, _ in own.sample(drawn, n):
            if own.random() < 0.1:
                while not work.is_done():
                    time.sleep(0)
            work.wait()
        for _, check in drawn:
            check()
        done += n
    counts = group.counts
    group.close()
    return sum(count["calls"] for count in counts.values())


@pytest.mark.parametrize(("world", "seed"), [(2, 1), (2, 2), (3, 3), (4, 4)])
def test_same_as_gloo(world, seed):
    assert run_ranks(world, random_operations, 60, seed) == [60] * world


def alone() -> _C.ShmGroup:
    group = _C.ShmGroup(0, 1, 60.0)
    group.attach([group.address])
    return group


def test_one_rank_and_its_counts():
    group = alone()
    flat = torch.frombuffer(group.empty(4 * 100_000), dtype=torch.float32).fill_(3.0)
    group.all_reduce(flat, "sum", 0.5).wait()
    group.all_reduce(torch.ones(7), "max").wait()
    group.barrier()
    assert flat.eq(1.5).all()
    assert group.counts["all_reduce"] == {"calls": 2, "bytes": 400_028, "in_place": 1, "staged": 1}
    assert group.counts["barrier"]["calls"] == 1 and group.counts["broadcast"]["calls"] == 0
    group.close()
    group.close()


def test_memory_outlives_its_group_and_returns():
    gc.collect()  # objects left by earlier tests in this process
    group = alone()
    n_before = shared_bytes()
    flat = torch.frombuffer(group.empty(8 << 20), dtype=torch.float32).fill_(7.0)
    half = flat[1 << 20 :]
    assert group.owns(flat) and group.owns(half) and not group.owns(torch.ones(3))
    assert shared_bytes() - n_before >= 8 << 20
    group.close()
    with pytest.raises(RuntimeError, match="has been closed"):
        group.empty(1)
    del flat, group
    assert half.eq(7.0).all() and shared_bytes() >= 8 << 20
    del half
    gc.collect()
    assert shared_bytes() <= n_before


def shared_bytes() -> int:
    """Resident bytes of this process's mappings of segments."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = "memfd:deepspeed_c" in line
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def test_refusals():
    group = alone()
    with pytest.raises(MemoryError, match=r"\d+ bytes are asked for, the arena has \d+"):
        group.empty(1 << 60)
    with pytest.raises(ValueError, match="not contiguous"):
        group.all_reduce(torch.ones(4, 4).t())
    with pytest.raises(ValueError, match="not in host memory"):
        group.all_reduce(torch.ones(4, device="meta"))
    with pytest.raises(ValueError, match='op is "mean", must be "sum"'):
        group.all_reduce(torch.ones(4), "mean")
    with pytest.raises(ValueError, match="elements of bool can be moved, not reduced"):
        group.all_reduce(torch.ones(4).bool())
    with pytest.raises(ValueError, match=r"in_splits adds up to 3, flat has 4"):
        group.all_to_all(torch.ones(4), torch.ones(3), [3], [3])
    with pytest.raises(ValueError, match=r"flat is of float32, out of float64"):
        group.all_to_all(torch.ones(4), torch.ones(4).double(), [4], [4])
    with pytest.raises(ValueError, match="1 times as many"):
        group.reduce_scatter(torch.ones(4), torch.ones(3), 1.0, False)
    with pytest.raises(ValueError, match="2 addresses for 1 ranks"):
        _C.ShmGroup(0, 1, 1.0).attach(["a", "b"])
    with pytest.raises(ValueError, match="timeout_ns"):
        _C.ShmGroup(0, 1, 0.0)
    group.all_reduce(torch.ones(4)).wait()  # the refused calls have left the group usable
    group.close()


def test_another_namespace_is_no_place_to_share_with():
    group, other = _C.ShmGroup(0, 2, 1.0), _C.ShmGroup(1, 2, 1.0)
    parts = other.address.split(":")
    with pytest.raises(NotImplementedError, match=r"rank 1 runs in another PID namespace \(77, this rank in \d+\)"):
        group.attach([group.address, ":".join([*parts[:2], "77", *parts[3:]])])
    with pytest.raises(NotImplementedError, match="rank 1 runs on another host"):
        group.attach([group.address, ":".join([parts[0], "0" * 16, *parts[2:]])])
    with pytest.raises(RuntimeError, match="token"):
        group.attach([group.address, ":".join([*parts[:-1], "0" * 32])])
    group.attach([group.address, other.address])


def call_differently(rank: int, world: int) -> str:
    group = group_of(rank, world)
    flat = torch.full((100,), float(rank))
    with pytest.raises(RuntimeError) as caught:
        (group.all_reduce(flat) if rank else group.all_reduce(flat.double())).wait()
    with pytest.raises(RuntimeError) as again:
        group.barrier()
    assert flat.eq(float(rank)).all()
    assert str(caught.value).partition(": ")[2] == str(again.value).partition(": ")[2]
    group.close()
    return str(caught.value)


def test_a_difference_is_named_on_all_ranks():
    texts = run_ranks(3, call_differently)
    assert re.search(r"rank [12] \(process \d+\) passes float32, rank 0 float64", texts[0])
    assert re.search(r"rank 0 \(process \d+\) passes float64, rank 1 float32", texts[1])


SHAPES = ((), (0,), (1,), (7, 3), (2, 0, 5), (1, 2, 1, 3, 1, 2, 1, 2, 1, 5), (7679,), (7681,), (1021, 17), (300_007,))


def random_messages(rank: int, world: int, n_messages: int, seed: int) -> int:
    """Messages between random pairs, each with a tag. All ranks draw the same messages; the receiver of a tag keeps
    their order, and starts and waits in an order of its own.
    """
    common, own = random.Random(seed), random.Random(seed * 17 + rank)
    group = group_of(rank, world)
    started, received = [], 0
    for i in range(n_messages):
        src, dst = common.sample(range(world), 2)
        tag, dtype, shape = common.randrange(-1, 2), common.choice(MOVED), common.choice(SHAPES)
        sent = values(torch.Size(shape).numel(), dtype, torch.Generator().manual_seed(seed * 1000 + i))
        if rank == src:
            tensor = place(group, sent, own.random() < 0.5).view(shape)
            started.append((group.send(tensor, dst, tag, f"message {i}"), None, sent))
        elif rank == dst:
            tensor = place(group, torch.zeros_like(sent), own.random() < 0.5).view(shape)
            started.append((group.receive(tensor, src, tag, f"message {i}"), tensor, sent))
    own.shuffle(started)
    for work, tensor, sent in started:
        work.wait()
        assert work.is_done()
        if tensor is not None:
            assert torch.equal(as_bytes(tensor.reshape(-1)), as_bytes(sent))
            received += 1
    group.barrier()
    group.close()
    return received


@pytest.mark.parametrize(("world", "seed"), [(2, 1), (3, 2), (4, 3)])
def test_messages_arrive_with_their_bits(world, seed):
    assert sum(run_ranks(world, random_messages, 120, seed)) == 120


def send_something_else(rank: int, world: int, sent: torch.Tensor, expected: torch.Tensor, labels: list[str]) -> str:
    group = group_of(rank, world)
    if rank == 1:
        group.send(sent, 0, 5, labels[0]).wait()
        text = ""
        while not text:  # it learns of the failure as soon as the receiver has found it
            try:
                group.send(sent, 0, 5, labels[0])
            except RuntimeError as error:
                text = str(error)
    else:
        before = expected.clone()
        with pytest.raises(RuntimeError) as caught:
            group.receive(expected, 1, 5, labels[1]).wait()
        text = str(caught.value)
        assert torch.equal(expected, before)
    group.close()
    return text


@pytest.mark.parametrize(
    ("sent", "expected", "labels", "words"),
    [
        (torch.ones(5), torch.ones(4), ["a", "a"], [r"sends shape \[5\], rank 0 expects \[4\]"]),
        (torch.ones(3), torch.ones(9000), ["a", "a"], [r"sends shape \[3\], rank 0 expects \[9000\]"]),
        (torch.ones(2, 6), torch.ones(3, 4), ["a", "a"], [r"sends shape \[2, 6\], rank 0 expects \[3, 4\]"]),
        (torch.ones(4), torch.ones(4).bfloat16(), ["a", "a"], ["sends float32, rank 0 expects bfloat16"]),
        (torch.ones(4), torch.ones(4), ["keys", "values"], ['sends "keys", rank 0 expects "values"']),
    ],
    ids=["longer", "shorter", "shape", "dtype", "label"],
)
def test_a_message_that_differs_is_refused_on_both_ranks(sent, expected, labels, words):
    for text in run_ranks(2, send_something_else, sent, expected, labels):
        for word in [r"rank 1 \(process \d+\)", *words]:
            assert re.search(word, text), text


@on_ranks(2)
def test_a_work_keeps_its_tensors_until_it_is_done(rank: int, world: int) -> None:
    group = group_of(rank, world)
    flat, out = torch.ones(world * 50_000), torch.zeros(50_000)
    gone = weakref.ref(flat), weakref.ref(out)
    dist.barrier()
    if rank == 0:
        work = group.reduce_scatter(flat, out, 1.0, False)
        del flat, out
        assert not work.is_done() and gone[0]() is not None and gone[1]() is not None
        del work  # without a wait the work goes on and keeps its tensors alive
        assert gone[0]() is not None and gone[1]() is not None
        dist.barrier()
    else:
        dist.barrier()
        group.reduce_scatter(flat, out, 1.0, False).wait()
        assert out.eq(world).all()
    group.barrier()
    group.barrier()
    assert rank or (gone[0]() is None and gone[1]() is None)
    group.close()


def run_beside(rank: int, world: int) -> bool:
    group = group_of(rank, world)
    if rank == 0:
        thread = threading.Thread(target=group.barrier)
        thread.start()
        dist.barrier()  # this thread runs on while the other thread waits
        joined(thread)
    else:
        dist.barrier()
        group.barrier()
    group.close()
    return True


def test_other_threads_run_while_one_waits():
    assert run_ranks(2, run_beside) == [True, True]


@on_ranks(2)
def test_an_interrupt_ends_the_wait_and_not_the_collective(rank: int, world: int) -> None:
    group = group_of(rank, world)
    for n in (3, 200_000):
        flat = torch.full((n,), 1.0)
        if rank == 0:
            main = threading.get_native_id()

            def interrupt(main: int = main) -> None:
                # Goes on once the main thread sleeps in the kernel, which shows that it waits.
                while Path(f"/proc/self/task/{main}/stat").read_text().rpartition(")")[2].split()[0] != "S":
                    time.sleep(0.001)
                time.sleep(0.05)
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

            before = signal.signal(signal.SIGINT, signal.default_int_handler)
            helper = threading.Thread(target=interrupt)
            work = group.all_reduce(flat, "sum", 1.0, True)
            try:
                with pytest.raises(KeyboardInterrupt):
                    helper.start()
                    work.wait()
            finally:
                signal.signal(signal.SIGINT, before)
            joined(helper)
            assert not work.is_done() and flat.eq(1.0).all()
            dist.barrier()  # the other rank joins only after this
            work.wait()
        else:
            dist.barrier()
            group.all_reduce(flat).wait()
        assert flat.eq(float(world)).all()
        group.barrier()  # both ranks have arrived
    group.close()


def lose_a_rank(rank: int, world: int) -> None:
    group = group_of(rank, world, 900.0)
    flat = torch.ones(100_000)
    group.all_reduce(flat).wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(
        RuntimeError, match=r"all_reduce number \d+: rank 1 \(process \d+\) has ended|rank 1 .*has ended"
    ):
        while True:
            group.all_reduce(flat).wait()
    seconds = time.monotonic() - begin
    group.close()
    raise AssertionError(f"noticed after {'a moment' if seconds < 200 else seconds}")


def test_a_rank_that_dies_is_named():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, lose_a_rank, fresh=True)
    assert [outcome.kind for outcome in caught.value.outcomes] == ["raised", "died", "raised"]
    assert all("noticed after a moment" in caught.value.outcomes[rank].text for rank in (0, 2))


@on_ranks(2)
def test_a_child_of_fork_is_refused_and_harms_nothing(rank: int, world: int) -> None:
    group = group_of(rank, world)
    flat = torch.frombuffer(group.empty(400_000), dtype=torch.float32).fill_(1.0)
    group.all_reduce(flat).wait()
    child = fork_with_alarm()
    if child == 0:
        code = 1
        try:
            with pytest.raises(RuntimeError, match=r"belongs to process \d+, and this process"):
                group.all_reduce(flat)
            group.close()
            del group
            code = 0 if flat.eq(float(world)).all() else 2
        finally:
            os._exit(code)
    assert exit_status(child) == 0
    group.all_reduce(flat).wait()
    assert flat.eq(float(world * world)).all()
    group.close()
