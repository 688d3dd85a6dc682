"""comm/agreed.py: public collectives of ranks that give other lengths, dtypes or ranks end with one error that names both
values, on all ranks, and the group goes on; every dtype of torch travels bit by bit. Results are compared with what each
rank's seed says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from deepspeed_c import comm
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import CommError
from tests.deepspeed_c.comm.test_dtypes import DTYPES, bits, drawn
from tests.ranks import on_ranks

N = 1021


def zeros(like: torch.Tensor, n: int) -> list[torch.Tensor]:
    return [torch.zeros_like(like) for _ in range(n)]


def called(name: str, tensor: torch.Tensor, rank: int, world: int, end: int = 0, is_async: bool = False) -> None:
    """Calls the collective ``name`` with this rank's ``tensor``. ``end``: the rank that it starts or ends at."""
    others = zeros(tensor, world)
    whole = torch.cat(others) if tensor.dim() else torch.stack(others)
    calls = {
        "broadcast": lambda: comm.broadcast(tensor, end, async_op=is_async),
        "reduce": lambda: comm.reduce(tensor, end, async_op=is_async),
        "all_reduce": lambda: comm.all_reduce(tensor, async_op=is_async),
        "inference_all_reduce": lambda: comm.inference_all_reduce(tensor, async_op=is_async),
        "all_reduce_coalesced": lambda: comm.all_reduce_coalesced([torch.ones(3), tensor], async_op=is_async),
        "gather": lambda: comm.gather(tensor, others if rank == end else None, end, async_op=is_async),
        "scatter": lambda: comm.scatter(tensor, others if rank == end else None, end, async_op=is_async),
        "all_gather": lambda: comm.all_gather(others, tensor, async_op=is_async),
        "all_gather_into_tensor": lambda: comm.all_gather_into_tensor(whole, tensor, async_op=is_async),
        "all_gather_coalesced": lambda: comm.all_gather_coalesced([whole], [tensor], async_op=is_async),
        "reduce_scatter": lambda: comm.reduce_scatter(tensor, others, async_op=is_async),
        "reduce_scatter_tensor": lambda: comm.reduce_scatter_tensor(tensor, whole, async_op=is_async),
    }
    handle = calls[name]()
    if is_async:
        handle.wait()


COLLECTIVES = [
    *("broadcast", "reduce", "all_reduce", "inference_all_reduce", "all_reduce_coalesced", "gather", "scatter"),
    *("all_gather", "all_gather_into_tensor", "all_gather_coalesced", "reduce_scatter", "reduce_scatter_tensor"),
]


@pytest.mark.parametrize("is_connected", [False, True])
@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_collectives_that_differ_are_one_error_on_all_ranks(rank: int, world: int, is_connected: bool) -> None:
    """The last rank gives another length, then another dtype, then another rank."""
    if is_connected:
        Collectives().use_shared_memory("shm")
    last = rank == world - 1
    for name in COLLECTIVES:
        is_of_all = name.startswith("reduce_scatter")
        cases = [
            (torch.full((N + 1 if last else N,), 7.0), 0, N, N + 1),
            (torch.full((1 if last else 90_001,), 7.0), 0, 90_001, 1),
            (torch.full((N,), 7, dtype=torch.int32 if last else torch.float32), 0, "float32", "int32"),
        ]
        if name in ("broadcast", "reduce", "gather", "scatter"):
            cases.append((torch.full((N,), 7.0), world - 1 if last else 0, "to rank 0", f"to rank {world - 1}"))
        for tensor, end, first, second in cases:
            if isinstance(first, int):
                n = world if name == "reduce_scatter_tensor" else 1
                first, second = f"[{n * first}]", f"[{n * second}]"
            with pytest.raises(CommError) as caught:
                called(name, tensor, rank, world, end)
            text = str(caught.value)
            wanted = f"rank 0 calls {'all_reduce' if 'all_reduce' in name else name}"
            text = text.replace(" from rank ", " to rank ")
            head, _, tail = text.partition(f", rank {world - 1} calls ")
            assert wanted in head and first in head and second in tail, f"rank {rank}, {name}: {text}"
            assert is_of_all or tensor.eq(7).all(), f"{name} wrote {tensor}"
        tensor = torch.full((4,), 1.0)  # the group goes on
        comm.all_reduce(tensor)
        assert tensor.tolist() == [world] * 4, tensor


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_barriers_and_objects_are_compared_by_name(rank: int, world: int) -> None:
    """The last rank is somewhere else: gloo's own calls would wait for one another until the group's limit."""
    last, objects, two = rank == world - 1, [None] * world, [rank, "x"]
    pairs = [
        (lambda: comm.barrier(), lambda: comm.all_reduce(torch.ones(3)), "barrier", "all_reduce (SUM) of float32 [3]"),
        (lambda: comm.barrier(), lambda: comm.all_gather_object(objects, 1), "barrier", "all_gather_object"),
        (
            lambda: comm.broadcast_object_list(two, 0),
            lambda: comm.broadcast_object_list([1], 0),
            "broadcast_object_list from rank 0 of 2 objects",
            "broadcast_object_list from rank 0 of 1 objects",
        ),
    ]
    for most, other, first, second in pairs:
        with pytest.raises(CommError) as caught:
            (other if last else most)()
        assert f"rank 0 calls {first}, rank {world - 1} calls {second}" in str(caught.value), str(caught.value)
    comm.barrier()
    comm.all_gather_object(objects, {"rank": rank})
    comm.broadcast_object_list(two, world - 1)
    assert objects == [{"rank": r} for r in range(world)] and two == [world - 1, "x"], (objects, two)
    handle = comm.barrier(async_op=True)
    handle.wait()


def asynchronous_body(rank: int, world: int) -> str:
    tensor = torch.full((N + rank % 2,), float(rank))
    handle = comm.broadcast(tensor, 0, async_op=True)
    with pytest.raises(CommError) as caught:
        handle.wait()
    return str(caught.value)


def test_a_started_collective_is_compared_when_it_is_waited_for(run_ranks) -> None:
    for text in run_ranks(2, asynchronous_body, fresh=True):
        assert f"rank 0 calls broadcast from rank 0 of float32 [{N}], rank 1 calls" in text, text


@on_ranks(2)
def test_the_start_of_a_collective_waits_for_nobody(rank: int, world: int) -> None:
    """Rank 1 starts the collective only after it has rank 0's message, which rank 0 sends after its own start."""
    tensor, message = torch.full((N,), rank + 1.0), torch.full((3,), float(rank))
    if rank == 1:
        comm.recv(message, 0)
    handle = comm.all_reduce(tensor, async_op=True)
    if rank == 0:
        comm.send(message, 1)
    handle.wait()
    assert handle.is_completed() and tensor.eq(3).all() and message.eq(0).all(), (tensor, message)


@pytest.mark.parametrize("is_connected", [False, True])
@on_ranks(3)
def test_every_dtype_travels_bit_by_bit(rank: int, world: int, is_connected: bool) -> None:
    if is_connected:
        Collectives().use_shared_memory("shm")
    for dtype in [*DTYPES, torch.complex32]:
        for shape in ((), (7, 3)):
            numel = torch.Size(shape).numel()
            rows = [drawn(numel, dtype, 10 + r).view(shape) for r in range(world)]
            want = [bits(row) for row in rows]
            flat = [bit for row in want for bit in row]
            what = f"{dtype} {shape}, rank {rank}"

            tensor = rows[rank].clone()
            comm.broadcast(tensor, world - 1)
            assert bits(tensor) == want[-1], f"broadcast of {what}"
            got = zeros(rows[0], world)
            comm.all_gather(got, rows[rank])
            assert list(map(bits, got)) == want, f"all_gather of {what}"
            got = zeros(rows[0], world)
            comm.gather(rows[rank], got if rank == 1 else None, 1)
            assert rank != 1 or list(map(bits, got)) == want, f"gather of {what}"
            tensor = zeros(rows[0], world)[0]
            comm.scatter(tensor, rows if rank == 0 else None, 0)
            assert bits(tensor) == want[rank], f"scatter of {what}"
            whole = torch.zeros(world * numel, dtype=torch.uint8).repeat_interleave(dtype.itemsize).view(dtype)
            comm.all_gather_into_tensor(whole, rows[rank].reshape(-1))
            assert bits(whole) == flat, f"all_gather_into_tensor of {what}"
            whole = torch.zeros_like(whole)
            comm.all_gather_coalesced([whole], [rows[rank].reshape(-1)], async_op=True).wait()
            assert bits(whole) == flat, f"all_gather_coalesced of {what}"
            got = zeros(rows[0], world)
            comm.all_to_all(got, [rows[rank]] * world)
            assert list(map(bits, got)) == want, f"all_to_all of {what}"
            whole = torch.zeros_like(whole)
            comm.all_to_all_single(whole, torch.cat([rows[rank].reshape(-1)] * world))
            assert bits(whole) == flat, f"all_to_all_single of {what}"
            tensor = rows[0].clone() if rank == 0 else zeros(rows[0], world)[0]
            if rank == 0:
                comm.send(tensor, 1)
            elif rank == 1:
                comm.recv(tensor, 0)
            assert rank > 1 or bits(tensor) == want[0], f"message of {what}"


@on_ranks(2)
def test_reductions_that_gloo_has_not_say_so(rank: int, world: int) -> None:
    for dtype in (torch.int32, torch.int64, torch.uint8, torch.bool, torch.int16):
        for name in ("all_reduce", "reduce", "reduce_scatter_tensor"):
            with pytest.raises(CommError, match=f"{name} failed: AVG of {dtype}: an average of integers"):
                tensor = torch.ones(world, dtype=dtype)
                if name == "all_reduce":
                    comm.all_reduce(tensor, comm.ReduceOp.AVG)
                elif name == "reduce":
                    comm.reduce(tensor, 0, comm.ReduceOp.AVG)
                else:
                    comm.reduce_scatter_tensor(torch.ones(1, dtype=dtype), tensor, comm.ReduceOp.AVG)
    for dtype in (torch.int16, torch.uint16, torch.float8_e5m2):
        with pytest.raises(CommError, match=f"all_reduce failed: gloo cannot reduce {dtype}: convert"):
            comm.all_reduce(torch.ones(3).to(dtype))
    tensor = torch.full((3,), float(rank))
    comm.all_reduce(tensor, comm.ReduceOp.AVG)
    assert tensor.tolist() == [(world - 1) / 2] * 3, tensor


def splits_body(rank: int, world: int, is_list: bool) -> str:
    """Rank 0 sends rank 1 two rows, and rank 1 expects three."""
    sent, received = ([1, 2], [1, 1]) if rank == 0 else ([1, 1], [3, 1])
    tensor, out = torch.zeros(sum(sent), 5), torch.full((sum(received), 5), 9.0)
    with pytest.raises(CommError) as caught:
        if is_list:
            comm.all_to_all(list(out.split(received)), list(tensor.split(sent)))
        else:
            comm.all_to_all_single(out, tensor, received, sent)
    return str(caught.value)


@pytest.mark.parametrize("is_list", [False, True])
def test_splits_that_do_not_fit_are_one_error_on_all_ranks(run_ranks, is_list: bool) -> None:
    for text in run_ranks(2, splits_body, is_list, fresh=True):
        assert "rank 0 sends 10 elements to rank 1, which expects 15" in text, text


@on_ranks(2)
def test_a_rank_outside_the_group(rank: int, world: int) -> None:
    group = dist.new_group([1])
    comm.all_reduce(torch.ones(2), group=group)  # a rank outside the group sends nothing
    comm.barrier()
