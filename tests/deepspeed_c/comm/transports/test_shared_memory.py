"""comm/transports/shared_memory.py: the collectives of ranks that share memory, compared with gloo's and with sums in rank order; the
release of the memory; and the errors if ranks cannot share memory.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import os
import pickle
import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepspeed_c import _C
from deepspeed_c.buffers import BufferPool
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.ledger import ENTERED
from deepspeed_c.comm.transports import shared_memory
from deepspeed_c.errors import CommError
from tests.ranks import RanksFailed, on_ranks
from tests.waits import exit_status, fork_with_alarm

CPU = torch.device("cpu")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ANY = [*FLOATS, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool]
WORLDS = [1, 2, 3, 4]
N_TRIALS = 60
CLONE_NEWNET = 0x40000000


def both():
    """(collectives over shared memory, collectives over gloo)"""
    local, plain = Collectives(), Collectives()
    local.use_shared_memory("shm")
    return local, plain


def transport(comm):
    return comm.transport_of(torch.empty(1))


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def same(a, b):
    return torch.equal(bits(a), bits(b))


class Trial:
    """Makes random calls that are the same on all ranks, on tensors at random places."""

    def __init__(self, rank, world, seed, local):
        self.rank, self.world, self.local = rank, world, local
        self.random = random.Random(seed)

    def numel(self):
        return self.random.choice([0, 1, 2, 3, 7, 16, 31, 257, 4099, self.random.randrange(70_000)])

    def values(self, numel, dtype, rank):
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 30) * 16 + rank)
        if dtype.is_floating_point:
            drawn = torch.randn(numel, generator=generator, dtype=torch.float64) * 10.0 ** self.random.randrange(-3, 4)
            drawn = drawn.to(dtype)
            for i, special in enumerate((float("inf"), float("nan"), -0.0, torch.finfo(dtype).smallest_normal / 4)):
                if numel > 4 * i + 3 and self.random.random() < 0.2:
                    drawn[4 * i + 3] = special
            return drawn
        return torch.randint(0, 2 if dtype == torch.bool else 120, (numel,), generator=generator).to(dtype)

    def everyones(self, numel, dtype):
        """The values of all ranks, in rank order."""
        state = self.random.getstate()
        rows = []
        for rank in range(self.world):
            self.random.setstate(state)
            rows.append(self.values(numel, dtype, rank))
        return rows

    def placed(self, values):
        """A copy of ``values``, in ordinary or in shared memory, at the begin of a buffer or within it."""
        here = random.random()  # differs between ranks: each may place its data anywhere
        before = random.choice([0, 1, 5, 64]) if here < 0.5 else 0
        n_bytes = (before + values.numel()) * values.element_size()
        allocate = self.local.allocate if here < 0.7 else (lambda n, device: torch.empty(n, dtype=torch.uint8))
        place = allocate(n_bytes + 1, CPU)[:n_bytes].view(values.dtype)[before:]
        return place.copy_(values)


def rank_order(rows, scale, begin, dtype):
    """The sum in f32 in rank order, scaled, added to ``begin``, and rounded once."""
    total = torch.zeros(rows[0].shape, dtype=torch.float32)
    for i, row in enumerate(rows):
        total = row.to(torch.float32) if i == 0 else total + row.to(torch.float32)
    if scale != 1.0:
        total = total * scale
    if begin is not None:
        total = total + begin.to(torch.float32)
    return total.to(dtype)


def check(got, want, what):
    """Asserts the same bits; all NaNs count as equal."""
    if got.is_floating_point():
        assert torch.equal(got.isnan(), want.isnan()), f"{what}: {got} instead of {want}"
        got, want = got.nan_to_num(7.0, 8.0, 9.0), want.nan_to_num(7.0, 8.0, 9.0)
    differs = bits(got) != bits(want)
    assert not differs.any(), f"{what}: {int(differs.sum())} bytes differ; {got} instead of {want}"


def one_call(trial, local, plain):
    choose = trial.random.choice
    op = choose(["reduce_scatter", "all_gather", "all_reduce", "broadcast", "bits", "numbers", "list"])
    world, rank = trial.world, trial.rank
    if op == "reduce_scatter":
        dtype, out_dtype, s = choose(FLOATS), choose(FLOATS), trial.numel()
        scale, accumulate, in_place = choose([1.0, 0.5, 1 / 3]), choose([False, True]), choose([False, False, True])
        rows, begins = trial.everyones(world * s, dtype), trial.everyones(s, out_dtype)
        flat = trial.placed(rows[rank])
        if in_place:
            out_dtype, accumulate = dtype, False
            out = local.own_slice(flat)
        else:
            out = trial.placed(begins[rank])
        mine = [row[rank * s : (rank + 1) * s] for row in rows]
        want = rank_order(mine, scale, begins[rank] if accumulate else None, out_dtype)
        what = f"reduce_scatter {dtype}->{out_dtype} world {world} slice {s} scale {scale} accumulate {accumulate}"
        other = rows[rank].clone()
        theirs = local.own_slice(other) if in_place else begins[rank].clone()
        work = local.reduce_scatter(flat, out, scale=scale, accumulate=accumulate)
        plain.reduce_scatter(other, theirs, scale=scale, accumulate=accumulate).wait()
        work.wait()
        check(out, want, what)
        check(out, theirs, f"{what}, against gloo")
        if in_place:
            check(flat, other, f"{what}: what is not this rank's")
        else:
            assert same(flat, rows[rank]), f"{what}: the input was written"
    elif op == "all_gather":
        dtype, s = choose(ANY), trial.numel()
        rows = trial.everyones(s, dtype)
        whole = torch.cat(rows)
        flat = trial.placed(torch.zeros_like(whole))
        local.own_slice(flat).copy_(rows[rank])
        local.all_gather(flat, use_broadcast=choose([False, True])).wait()
        assert same(flat, whole), f"all_gather {dtype} slice {s}"
    elif op == "all_reduce":
        dtype, n, scale = choose(FLOATS), trial.numel(), choose([1.0, 1 / 3])
        rows = trial.everyones(n, dtype)
        flat = trial.placed(rows[rank])
        local.all_reduce(flat, scale=scale).wait()
        what = f"all_reduce {dtype} world {world} numel {n} scale {scale}"
        check(flat, rank_order(rows, scale, None, dtype), what)
        if world == 2 or dtype != torch.float32:
            other = rows[rank].clone()
            plain.all_reduce(other, scale=scale).wait()
            check(flat, other, f"{what}, against gloo")
    elif op == "broadcast":
        dtype, n, src = choose(ANY), trial.numel(), trial.random.randrange(world)
        rows = trial.everyones(n, dtype)
        tensor = trial.placed(rows[rank])
        tensor = tensor.view(n // 2, 2) if n % 2 == 0 and choose([False, True]) else tensor
        local.broadcast(tensor, src)
        assert same(tensor, rows[src]), f"broadcast {dtype} {n} from {src}"
    elif op == "bits":
        dtype = choose([torch.float32, torch.bfloat16, torch.float64])
        whole = trial.values(trial.numel(), dtype, 0)
        mine = torch.zeros_like(whole)
        mine[rank::world] = whole[rank::world]
        local.sum_disjoint_bits(mine)
        assert same(mine, whole), f"sum_disjoint_bits {dtype} {whole.numel()}"
    elif op == "numbers":
        assert local.gather_numbers(rank * 10**15) == [r * 10**15 for r in range(world)]
        table = [[trial.random.uniform(-1e3, 1e3) for _ in range(9)] for _ in range(world)]
        sums = [table[0][i] for i in range(9)]
        for row in table[1:]:
            sums = [a + b for a, b in zip(sums, row)]
        assert local.sum_numbers(table[rank]) == sums, "f64, in rank order"
    else:
        tensor = torch.full((2, 3), float(rank), dtype=torch.bfloat16)
        assert [t.tolist() for t in local.all_gather_list(tensor)] == [[[float(r)] * 3] * 2 for r in range(world)]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_random_calls_give_the_bits_of_gloo_and_of_sums_in_rank_order(rank, world, seed):
    local, plain = both()
    local.ledger.reset_totals()  # earlier bodies on these ranks have left totals
    random.seed(1000 * seed + rank)
    for trial in range(N_TRIALS):
        one_call(Trial(rank, world, f"{seed} {trial}", local), local, plain)
    local.barrier()
    if world > 1:
        assert set(local.ledger.carried) == {"shm", "gloo"}


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_many_in_flight_beside_those_of_gloo(rank, world):
    """Many collectives are under way at once, beside gloo's. The caller waits for them in another order than it started
    them."""
    local, plain = both()
    n, numel = 12, 5003
    values = [
        [torch.randn(world * numel, generator=torch.Generator().manual_seed(100 * i + r)) for r in range(world)]
        for i in range(n)
    ]
    flats = [local.allocate(world * numel * 4, CPU).view(torch.float32).copy_(v[rank]) for v in values]
    outs = [torch.empty(numel) for _ in range(n)]
    works, others = [], []
    for i, (flat, out) in enumerate(zip(flats, outs)):
        works.append(local.reduce_scatter(flat, out, label=f"bucket {i}"))
        others.append(plain.all_reduce(torch.ones(1000)))
    entry = local.ledger.recent(2)[0]
    assert (entry.path, entry.state, local.ledger.recent(1)[0].path) == ("shm", ENTERED, "gloo")
    assert str(entry).endswith(f"of bucket {n - 1} (shm)"), str(entry)
    for work in reversed(works):
        work.wait()
        work.wait()
    for other in others:
        other.wait()
    for i, out in enumerate(outs):
        mine = [v[rank * numel : (rank + 1) * numel] for v in values[i]]
        check(out, rank_order(mine, 1.0, None, torch.float32), f"bucket {i}")


@on_ranks(2)
def test_the_pools_memory_is_read_where_it_lies(rank, world):
    """Tensors in shared memory are not copied into a staging buffer."""
    local, _ = both()
    assert transport(local).owns(local.allocate(100, CPU)) and not transport(local).owns(torch.empty(100))
    pool = BufferPool(allocate=local.allocate)
    buffer = pool.take(1 << 18, torch.float32, CPU)
    assert transport(local).owns(buffer) and buffer.numel() == 1 << 18
    buffer.fill_(rank)
    local.all_reduce(buffer).wait()
    assert buffer.unique().tolist() == [world * (world - 1) / 2]
    address = buffer.data_ptr()
    pool.give(buffer)
    assert pool.take(1 << 18, torch.float32, CPU).data_ptr() == address
    assert local.allocate(0, CPU).numel() == 0
    # A tensor keeps its memory after everything else is released.
    kept = local.allocate(1 << 20, CPU).fill_(rank + 1)
    alone = local.alone()
    assert alone.allocate(8, CPU).numel() == 8 and not transport(local).owns(alone.allocate(8, CPU))
    gc.collect()
    assert kept.unique().tolist() == [rank + 1]


def held():
    """(open files, threads, mappings of shared memory) of this process."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line or "/dev/shm" in line]
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(maps)


@on_ranks(3, fresh=True)
def test_nothing_is_left_when_the_group_is_destroyed(rank, world):
    dist.barrier()
    group = dist.new_group()
    one, two = Collectives(group), Collectives(group)
    one.barrier()
    before = held()
    one.use_shared_memory("auto")
    two.use_shared_memory("auto")
    assert transport(one) is transport(two) and transport(one).name == "shm", "engines share a connection"
    part = one.part(group, "dp_shard")
    assert transport(part) is transport(one)
    block = one.allocate(1 << 20, CPU)
    works = [one.all_reduce(block.view(torch.float32)) for _ in range(3)]
    for work in works:
        work.wait()
    one.barrier()
    assert held()[2] > before[2]
    kept, connection = one.allocate(1 << 12, CPU).fill_(3), transport(one)
    one.close()
    two.close()
    dist.barrier()
    del one, two, part, block, works, work
    dist.destroy_process_group(group)
    del group
    gc.collect()
    # Memory that is still held stays. No new shared memory is made.
    assert kept.unique().tolist() == [3]
    late = connection.allocate(1 << 12, CPU).fill_(4)
    assert late.unique().tolist() == [4]
    del kept, late, connection
    deadline = time.monotonic() + 200
    while (after := held())[0] > before[0] or after[2] > before[2]:
        assert time.monotonic() < deadline, (before, after)
        time.sleep(0.05)
    dist.barrier()


@on_ranks(2)
def test_tensors_are_copied_saved_and_pickled_as_others(rank, world):
    local, _ = both()
    flat = local.allocate(4096, CPU).view(torch.float32).copy_(torch.arange(1024.0))
    param = torch.nn.Parameter(flat[8:24].view(4, 4))
    loaded = [pickle.loads(pickle.dumps(param)), copy.deepcopy(param), copy.deepcopy({"w": param})["w"], param.clone()]
    file = io.BytesIO()
    torch.save({"w": param}, file)
    file.seek(0)
    loaded.append(torch.load(file)["w"])
    loaded.append(torch.from_numpy(param.detach().numpy().copy()))
    for other in loaded:
        assert torch.equal(other, param) and not transport(local).owns(other)
    shared = torch.nn.Parameter(local.allocate(64, CPU).view(torch.float32).fill_(3.0))
    shared.share_memory_()  # torch moves the tensor to torch's own shared memory
    assert shared.is_shared() and shared.unique().tolist() == [3.0]
    local.all_reduce(shared.data).wait()
    assert shared.unique().tolist() == [3.0 * world]
    local.barrier()


@on_ranks(2, fresh=True)
def test_a_forked_child_reads_and_ends(rank, world):
    """A forked child reads, releases everything and ends. The parent goes on."""
    local, _ = both()
    flat = local.allocate(1 << 16, CPU).view(torch.float32).fill_(rank)
    local.barrier()
    read, write = os.pipe()
    child = fork_with_alarm()
    if child == 0:
        seen = flat.sum().item()
        fresh = local.allocate(100, CPU).fill_(7)
        assert not transport(local).owns(fresh) and fresh.unique().tolist() == [7]
        del flat
        gc.collect()
        transport(local)._group.close()
        fails = False
        try:
            local.barrier()
        except CommError:
            fails = True
        os.write(write, f"{seen} {fails}".encode())
        os._exit(0)
    os.close(write)
    said = os.read(read, 100).decode()
    assert exit_status(child) == 0
    assert said == f"{float(rank * (1 << 14))} True", said
    local.all_reduce(flat).wait()
    assert flat.unique().tolist() == [world * (world - 1) / 2]


@on_ranks(2, fresh=True)
def test_sizes_that_differ_are_an_error_and_no_sum(rank, world):
    local, _ = both()
    with pytest.raises(CommError, match=r"all_reduce of \d+ torch.float32 failed: .*rank") as caught:
        local.all_reduce(torch.ones(5 + rank)).wait()
    assert "all-reduce #" in str(caught.value) and "(shm)" in str(caught.value), str(caught.value)
    with pytest.raises(CommError):
        local.barrier()
    assert local.ledger.blocking() == []


def dying_body(rank, world):
    local, _ = both()
    local.barrier()
    if rank == 1:
        os._exit(7)
    begin = time.monotonic()
    with pytest.raises(CommError, match="reduce_scatter of 3145728 torch.float32 failed: .*rank 1") as caught:
        local.reduce_scatter(torch.ones(3 << 20), torch.ones(1 << 20)).wait()
    assert time.monotonic() - begin < 200, "nobody waits for the timeout of the group, which is 900 s"
    assert "look at the output of the other ranks" in str(caught.value)
    with pytest.raises(CommError):
        local.barrier()


def test_a_dead_rank_is_named_within_seconds(run_ranks):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(3, dying_body, fresh=True, grace=200)
    kinds = [outcome.kind for outcome in failed.value.outcomes]
    assert kinds == ["returned", "died", "returned"], str(failed.value)


def part_body(rank, world):
    """Errors name the ranks of a group by their numbers among all ranks."""
    group = dist.new_group([1, 2])
    if rank:
        comm = Collectives(group)
        comm.use_shared_memory("shm")
        comm.barrier()
        if rank == 2:
            os._exit(7)
        with pytest.raises(CommError, match="failed: .*rank 2 "):
            comm.barrier()
        with pytest.raises(CommError, match="failed: .*rank 2 "):
            comm.barrier()


def test_a_dead_rank_of_a_part_has_its_number_in_the_world(run_ranks):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(3, part_body, fresh=True, grace=200)
    assert [outcome.kind for outcome in failed.value.outcomes] == ["returned", "returned", "died"], str(failed.value)


def two_hosts_body(rank, world, wish):
    if rank == 1 and ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        moved = os.strerror(ctypes.get_errno())
    else:
        moved = ""
    comm = Collectives()
    if any(said := comm.gather_objects(moved)):
        return next(filter(None, said))
    if wish == "shm":
        with pytest.raises(CommError, match="several network namespaces") as caught:
            comm.use_shared_memory(wish)
        assert '"comm": {"local": "shm"}' in str(caught.value) and '"auto"' in str(caught.value)
    else:
        comm.use_shared_memory(wish)
    assert transport(comm).name == "gloo" and comm.allocate(8, CPU).numel() == 8
    flat = torch.ones(1000)
    comm.all_reduce(flat).wait()
    assert flat.unique().tolist() == [2.0] and comm.ledger.recent(1)[0].path == "gloo"
    return ""


@pytest.mark.parametrize("wish", ["auto", "shm"])
def test_ranks_of_two_hosts_talk_over_gloo(run_ranks, wish):
    refused = run_ranks(2, two_hosts_body, wish, fresh=True)
    if refused[0]:
        pytest.skip(f"no network namespace can be made here: {refused[0]}")


@pytest.mark.parametrize("where", ["made", "attached"])
@on_ranks(2, fresh=True)
def test_where_one_rank_cannot_none_does(rank, world, where):
    """If one rank cannot share memory, no rank does, and all know why."""
    real = _C.ShmGroup

    class Refusing:
        def __init__(self, *args):
            if where == "made" and rank == 1:
                raise MemoryError("1 GiB was asked for, 1 MiB is there")
            self._real = real(*args)
            self.address, self.close = self._real.address, self._real.close

        def attach(self, addresses):
            if where == "attached" and rank == 1:
                raise NotImplementedError("rank 0 belongs to another user")
            self._real.attach(addresses)

    shared_memory._C.ShmGroup = Refusing
    try:
        comm = Collectives()
        with pytest.raises(CommError, match="rank 1: (1 GiB was asked for|rank 0 belongs)"):
            comm.use_shared_memory("shm")
        comm.use_shared_memory("auto")
    finally:
        shared_memory._C.ShmGroup = real
    comm.barrier()
    assert transport(comm).name == "gloo" and comm.ledger.carried.keys() == {"gloo"}


@on_ranks(2, fresh=True)
def test_off_is_gloo(rank, world):
    comm = Collectives()
    comm.use_shared_memory("off")
    comm.barrier()
    assert transport(comm).name == "gloo" and comm.ledger.carried.keys() == {"gloo"}
    assert comm.part(dist.group.WORLD, "dp_shard").transport_of(torch.empty(1)).name == "gloo"


@on_ranks(2, fresh=True)
def test_memory_that_is_not_there_is_ordinary_memory(rank, world):
    """If there is no room for shared memory, buffers lie in ordinary memory and results are the same."""
    local, _ = both()
    real = transport(local)._group

    class Full:
        def empty(self, n_bytes):
            raise MemoryError(f"{n_bytes} bytes were asked for, 0 are there")

    transport(local)._group = Full()
    buffer = local.allocate(4096, CPU)
    transport(local)._group = real
    assert not transport(local).owns(buffer)
    flat = buffer.view(torch.float32).fill_(1.0)
    local.all_reduce(flat).wait()
    assert flat.unique().tolist() == [float(world)]
