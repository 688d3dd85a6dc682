"""Collectives through shared memory: the same results as ``torch.distributed`` over gloo for random operations, types, lengths, splits and places; what a work
keeps; how failures read. The core has C tests of its own (tests/csrc/comm)."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist

from deepspeed_c import _C
from tests.ranks import run_ranks

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
MOVED = (*FLOATS, *INTEGERS, torch.float64, torch.bool, torch.complex64, torch.complex128)
LENGTHS = (0, 1, 2, 3, 17, 1021, 16384, 16385, 65537, 200003)


def group_of(rank: int, world: int, timeout_s: float = 120.0) -> _C.ShmGroup:
    """An attached group; addresses travel over gloo."""
    group = _C.ShmGroup(rank, world, timeout_s)
    addresses: list[str] = [""] * world
    dist.all_gather_object(addresses, group.address)
    group.attach(addresses)
    dist.barrier()
    return group


def place(group: _C.ShmGroup, like: torch.Tensor, in_arena: bool) -> torch.Tensor:
    """A copy of a flat tensor, in the arena or not."""
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
    """In rank order, the small floats in f32, rounded once."""
    total = inputs[0].float() if inputs[0].dtype in FLOATS else inputs[0].clone()
    for one in inputs[1:]:
        one = one.to(total.dtype)
        total = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "prod": torch.mul}[op](total, one)
    return (total * scale if scale != 1.0 else total).to(inputs[0].dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """gloo does not have all types."""
    return flat.view(torch.uint8)


def draw(rank: int, world: int, common: random.Random, own: random.Random, group: _C.ShmGroup):
    """One operation: (work, a function that checks it)."""
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
            if how == "sum" and dtype in (torch.int8, torch.int32, torch.int64, torch.uint8):  # those that gloo has
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
