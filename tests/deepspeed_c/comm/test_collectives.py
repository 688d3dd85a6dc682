"""comm/collectives.py against sums in fp64: every dtype, 1 to 3 ranks, lengths that nothing divides, and both ways to
use a backend.
"""

from __future__ import annotations

import os
import pickle

import pytest
import torch
import torch.distributed as dist

from deepspeed_c.buffers import BufferPool
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.transports import torch_backend
from deepspeed_c.comm.transports.gloo import Gloo
from deepspeed_c.comm.transports.torch_backend import TorchBackend
from deepspeed_c.comm.work import Work
from deepspeed_c.errors import CommError
from tests.ranks import RanksFailed, on_ranks

WORLDS = [1, 2, 3]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SLICES = [0, 1, 7, 16, 257, 4099]
# Without messages, which gloo does not have for tensors of accelerators
WAYS = {"gloo": Gloo(), "no messages": Gloo("cuda"), "generic": TorchBackend("gloo")}


def plain_reduce(srcs, scale, accumulate, out):
    """The formula of the kernel: it sums in rank order in f32 and rounds once."""
    total = torch.zeros(out.shape, dtype=torch.float32)
    for src in srcs:
        total = total + src.to(torch.float32)
    total = total * scale
    if accumulate:
        total = total + out.to(torch.float32)
    out.copy_(total)


def kernel_of(name):
    if name == "plain":
        return plain_reduce
    return None


@pytest.fixture(params=["plain", "ours"])
def kernel(request):
    kernel_of(request.param)
    return request.param


def data(rank, numel, dtype, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def make(kernel, way=None):
    comm = Collectives(scratch=BufferPool(poison=True), reduce=kernel_of(kernel))
    if way is not None:
        comm._transports = {"cpu": WAYS[way]}
    return comm


def check_close(got, want, magnitude, out_dtype, travel_dtype, n, what):
    """Allows one rounding to the dtype of the output, and n roundings to the dtype of the sum. A backend sums in the
    dtype that it sends."""
    bound = torch.finfo(out_dtype).eps * want.abs() + n * torch.finfo(travel_dtype).eps * magnitude + 1e-7
    error = (got.double() - want).abs()
    worst = int((error - bound).argmax()) if error.numel() else 0
    assert bool((error <= bound).all()), (
        f"{what}: element {worst} is {got[worst].item()!r}, fp64 gives {want[worst].item()!r},"
        f" bound {bound[worst].item():.3e}"
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_reduce_scatter_equals_fp64(rank, world, kernel, way):
    comm = make(kernel, way)
    for dtype in DTYPES:
        for out_dtype in {dtype, torch.float32}:
            for numel in SLICES:
                for scale, accumulate in [(1.0, False), (0.5, True), (1 / 3, False), (1.0, True)]:
                    inputs = [data(r, world * numel, dtype) for r in range(world)]
                    flat = inputs[rank].clone()
                    out = data(rank, numel, out_dtype, seed=9)
                    begin = out.clone().double()
                    comm.reduce_scatter(flat, out, scale=scale, accumulate=accumulate).wait()
                    mine = [x[rank * numel : (rank + 1) * numel].double() for x in inputs]
                    want = scale * sum(mine) + (begin if accumulate else 0)
                    magnitude = abs(scale) * sum(x.abs() for x in mine) + begin.abs()
                    travel = torch.float32 if way != "generic" or world == 1 else dtype
                    what = (
                        f"{way} {dtype}->{out_dtype} world {world} slice {numel} scale {scale} accumulate {accumulate}"
                    )
                    check_close(out, want, magnitude, out_dtype, travel, world, what)
                    assert torch.equal(flat, inputs[rank]), f"{what}: the input was written"


@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_reduce_scatter_into_own_slice(rank, world, kernel):
    """``out`` may be this rank's slice of ``flat``, as at ZeRO stage 1."""
    comm = make(kernel)
    for dtype in DTYPES:
        for numel in SLICES:
            inputs = [data(r, world * numel, dtype) for r in range(world)]
            flat = inputs[rank].clone()
            comm.reduce_scatter(flat, comm.own_slice(flat), scale=0.25).wait()
            mine = [x[rank * numel : (rank + 1) * numel] for x in inputs]
            want = torch.empty(numel, dtype=dtype)
            plain_reduce(mine, 0.25, False, want)
            got = comm.own_slice(flat)
            assert torch.equal(got, want), f"{dtype} slice {numel}: {got} instead of {want}"
            expected = inputs[rank].clone()
            comm.own_slice(expected).copy_(want)
            assert torch.equal(flat, expected), f"{dtype} slice {numel}: other ranks' slices were written"


@pytest.mark.parametrize("use_broadcast", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_all_gather_fills_every_slice(rank, world, way, use_broadcast):
    comm = make("plain", way)
    for dtype in [*DTYPES, torch.float64, torch.int64, torch.uint8]:
        for numel in SLICES:
            whole = torch.arange(world * numel, dtype=torch.int64).remainder(251).to(dtype)
            flat = torch.full_like(whole, 3)
            comm.own_slice(flat).copy_(comm.own_slice(whole))
            comm.all_gather(flat, use_broadcast=use_broadcast).wait()
            assert torch.equal(flat, whole), f"{dtype} slice {numel}: {flat} instead of {whole}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_all_reduce_equals_fp64_and_ranks_agree(rank, world, kernel, way):
    comm = make(kernel, way)
    for dtype in DTYPES:
        for numel in [0, 1, 2, 3, 5, 17, 4099, 12289]:  # some have fewer elements than ranks
            for scale in (1.0, 1 / 3):
                inputs = [data(r, numel, dtype) for r in range(world)]
                flat = inputs[rank].clone()
                comm.all_reduce(flat, scale=scale).wait()
                want = scale * sum(x.double() for x in inputs)
                magnitude = scale * sum(x.double().abs() for x in inputs)
                ours = way != "generic" and dtype != torch.float32
                travel = torch.float32 if ours or world == 1 else dtype
                what = f"{way} {dtype} world {world} numel {numel} scale {scale}"
                check_close(flat, want, magnitude, dtype, travel, world, what)
                bits = flat.view(torch.uint8).tolist()
                assert all(other == bits for other in comm.gather_objects(bits)), f"{what}: ranks got different bits"


@on_ranks(3)
def test_sums_of_16_bit_gradients_have_the_same_bits_at_every_stage(rank, world):
    comm = make("plain")
    results = []
    for _ in range(3):
        inputs = [data(r, 3001, torch.bfloat16) for r in range(world)]
        flat, sharded = (
            inputs[rank].clone(),
            torch.cat([inputs[rank], torch.zeros(-3001 % world, dtype=torch.bfloat16)]),
        )
        comm.all_reduce(flat).wait()
        out = torch.empty(sharded.numel() // world, dtype=torch.bfloat16)
        comm.reduce_scatter(sharded, out).wait()
        whole = torch.cat(comm.all_gather_list(out))[:3001]
        assert torch.equal(flat, whole), "all_reduce and reduce_scatter of the same gradients differ in bits"
        results.append(flat)
    assert all(torch.equal(results[0], other) for other in results[1:]), "three runs gave different bits"


@on_ranks(2)
def test_infinities_nan_and_subnormals_survive(rank, world):
    comm = make("plain")
    for dtype in DTYPES:
        biggest = torch.finfo(dtype).max
        tiny = torch.finfo(dtype).smallest_normal / 2
        rows = [
            [1.0, float("inf")],
            [float("inf"), float("-inf")],
            [float("nan"), 0.0],
            [-0.0, -0.0],
            [tiny, tiny],
            [biggest, 0.0],
        ]
        flat = torch.tensor([row[rank] for row in rows], dtype=dtype)
        comm.all_reduce(flat).wait()
        got = flat.tolist()
        assert got[0] == float("inf") and got[1] != got[1] and got[2] != got[2], f"{dtype}: {got}"
        assert got[3] == 0.0 and got[4] == 2 * tiny and got[5] == biggest, f"{dtype}: {got}"


@on_ranks(3)
def test_many_works_in_flight(rank, world):
    """Many works are under way at once and share a scratch pool. The caller waits for them late, and twice."""
    comm = make("plain")
    numel, n = 501, 8
    flats = [data(rank, world * numel, torch.float32, seed=i) for i in range(n)]
    outs = [torch.empty(numel) for _ in range(n)]
    works = [comm.reduce_scatter(flat, out) for flat, out in zip(flats, outs)]
    gathered = torch.zeros(world * 5)
    comm.own_slice(gathered).fill_(rank + 1)
    works.append(comm.all_gather(gathered))
    ran = []
    works[0].then(lambda: ran.append("first")).then(lambda: ran.append("second"))
    for work in works:
        work.wait()
        work.wait()
    assert ran == ["first", "second"], ran
    works[0].then(lambda: ran.append("at once"))
    assert ran[-1] == "at once"
    for i, out in enumerate(outs):
        mine = [data(r, world * numel, torch.float32, seed=i)[rank * numel : (rank + 1) * numel] for r in range(world)]
        want = sum(x.double() for x in mine)
        check_close(out, want, sum(x.double().abs() for x in mine), torch.float32, torch.float32, world, f"work {i}")
    assert gathered.tolist() == [float(r + 1) for r in range(world) for _ in range(5)]
    bytes_after_first = comm.scratch.n_bytes
    for flat, out in zip(flats, outs):
        comm.reduce_scatter(flat, out).wait()
    assert comm.scratch.n_bytes == bytes_after_first, (comm.scratch.n_bytes, bytes_after_first)
    comm.close()
    assert comm.scratch.n_bytes == 0


@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_numbers_objects_and_broadcast(rank, world):
    comm = make("plain")
    assert comm.gather_numbers(rank * 10**15) == [r * 10**15 for r in range(world)]
    assert comm.gather_numbers(rank + 0.5) == [r + 0.5 for r in range(world)]
    assert all(isinstance(n, int) for n in comm.gather_numbers(rank))
    sums = comm.sum_numbers([1.0, rank, 1e300, float("inf") if rank == 0 else 0.0])
    assert sums == [world, world * (world - 1) / 2, world * 1e300, float("inf")], sums
    assert comm.sum_numbers([]) == []
    assert comm.gather_objects({"rank": rank}) == [{"rank": r} for r in range(world)]
    # An object at the limit crosses in one exchange; a byte more on one rank alone takes the way of large objects.
    limit = len(pickle.dumps(b"x" * 90))
    for n_bytes, n_exchanges in ((0, 1), (90, 1), (91, 2), (100_000, 2)):
        mine = b"x" * (n_bytes if rank == world - 1 else 3)
        before = comm.ledger.last
        found = comm.gather_small_objects(mine, limit)
        wanted = [b"xxx"] * (world - 1) + [b"x" * n_bytes]
        assert found == wanted, (
            f"{n_bytes} bytes: found {[len(each) for each in found]}, wanted {[len(w) for w in wanted]}"
        )
        done = comm.ledger.last - before
        assert done == (n_exchanges if world > 1 else 0), f"{n_bytes} bytes: {done} exchanges, wanted {n_exchanges}"
    tensor = torch.full((2, 3), float(rank), dtype=torch.bfloat16)
    assert [t.tolist() for t in comm.all_gather_list(tensor)] == [[[float(r)] * 3] * 2 for r in range(world)]
    sent = torch.full((2, 2), rank, dtype=torch.int32)
    comm.broadcast(sent, world - 1)
    assert sent.tolist() == [[world - 1] * 2] * 2
    comm.broadcast(torch.empty(0), 0)
    comm.barrier()


@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_sum_disjoint_bits_is_exact(rank, world):
    comm = make("plain")
    for dtype in [torch.float32, torch.bfloat16, torch.float64]:
        whole = torch.tensor([1.5, -0.0, float("nan"), float("-inf"), 3e-39, -7.0, 0.1], dtype=dtype)
        mine = torch.zeros_like(whole)
        mine[rank::world] = whole[rank::world]
        comm.sum_disjoint_bits(mine)
        assert mine.view(torch.uint8).tolist() == whole.view(torch.uint8).tolist(), (dtype, mine, whole)


@on_ranks(3)
def test_a_subgroup_talks_among_itself(rank, world):
    group = dist.new_group([2, 0])
    if rank in (0, 2):
        comm = Collectives(group, scratch=BufferPool(poison=True), reduce=plain_reduce)
        assert comm.world_size == 2 and comm.global_ranks == dist.get_process_group_ranks(group)
        flat = torch.tensor([1.0, 2.0]) * (rank + 1)
        out = torch.empty(1)
        comm.reduce_scatter(flat, out).wait()
        assert out.item() == [4.0, 8.0][comm.rank], out
        gathered = torch.full((2,), float("nan"))
        comm.own_slice(gathered).copy_(out)
        comm.all_gather(gathered).wait()
        assert gathered.tolist() == [4.0, 8.0], gathered
        sent = torch.tensor([float(rank)])
        comm.broadcast(sent, 1)
        assert sent.item() == comm.global_ranks[1]
    else:
        with pytest.raises(CommError, match="not part of the group"):
            Collectives(group, reduce=plain_reduce)
    dist.barrier()


@on_ranks(1)
def test_one_rank_sends_nothing(rank, world):
    comm = make("plain")
    names = ("broadcast", "all_reduce", "all_to_all_single", "all_gather_object")
    saved = {name: getattr(dist, name) for name in names}

    def refuse(*args, **kwargs):
        raise AssertionError("one rank talked to torch.distributed")

    for name in names:
        setattr(dist, name, refuse)
    try:
        flat = torch.ones(5)
        comm.all_reduce(flat, scale=0.5).wait()
        assert flat.tolist() == [0.5] * 5
        out = torch.ones(5)
        comm.reduce_scatter(flat, out, accumulate=True).wait()
        assert out.tolist() == [1.5] * 5
        comm.all_gather(flat).wait()
        comm.broadcast(flat, 0)
        comm.sum_disjoint_bits(flat)
        assert comm.gather_numbers(4) == [4] and comm.sum_numbers([2]) == [2.0] and comm.gather_objects("x") == ["x"]
    finally:
        for name, function in saved.items():
            setattr(dist, name, function)


@on_ranks(2)
def test_wrong_arguments_are_refused_before_anything_is_sent(rank, world):
    comm = make("plain")
    with pytest.raises(ValueError, match="flat has 5 elements; 2 ranks times 2"):
        comm.reduce_scatter(torch.ones(5), torch.ones(2))
    with pytest.raises(ValueError, match="5 elements, no multiple of 2 ranks"):
        comm.all_gather(torch.ones(5))
    with pytest.raises(ValueError, match="contiguous one-dimensional"):
        comm.all_reduce(torch.ones(4, 2))
    with pytest.raises(ValueError, match="contiguous one-dimensional"):
        comm.all_reduce(torch.ones(8)[::2])
    with pytest.raises(CommError, match="no backend for meta tensors"):
        comm.all_reduce(torch.ones(4, device="meta"))


def dying_body(rank, world):
    comm = make("plain")
    comm.barrier()
    if rank == 1:
        os._exit(7)
    work = comm.reduce_scatter(torch.ones(2 << 20), torch.ones(1 << 20))
    with pytest.raises(CommError, match="reduce_scatter of 2097152 torch.float32 failed") as caught:
        work.wait()
    assert "look at the output of the other ranks" in str(caught.value)
    with pytest.raises(CommError):
        work.wait()


def test_a_dead_rank_is_an_error_and_no_hang(run_ranks):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, dying_body, fresh=True, grace=200)
    kinds = [outcome.kind for outcome in failed.value.outcomes]
    assert kinds == ["returned", "died"], str(failed.value)


def closed_body(rank, world):
    """Rank 1 is gone for certain before rank 0 starts, so gloo refuses the start."""
    comm = make("plain")
    comm.barrier()
    if rank == 1:
        os._exit(7)
    with pytest.raises(RuntimeError):
        dist.irecv(torch.ones(1), 1).wait()
    for what, work in (
        ("reduce_scatter of 6", comm.reduce_scatter(torch.ones(6), torch.ones(3))),
        ("all_gather of 4", comm.all_gather(torch.ones(4))),
        ("all_reduce of 5", comm.all_reduce(torch.ones(5, dtype=torch.bfloat16))),
    ):
        with pytest.raises(CommError, match=f"{what} torch.* failed: ") as caught:
            work.wait()
        assert "look at the output of the other ranks" in str(caught.value)


def test_a_rank_that_died_before_the_start_is_the_same_error(run_ranks):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, closed_body, fresh=True, grace=200)
    kinds = [outcome.kind for outcome in failed.value.outcomes]
    assert kinds == ["returned", "died"], str(failed.value)


class _Handle:
    def __init__(self, error=None):
        self.error, self.n_waits = error, 0

    def wait(self):
        self.n_waits += 1
        if self.error is not None:
            raise self.error


def test_work_waits_once_and_for_every_handle():
    handles, ran = [_Handle(), _Handle()], []
    work = Work(handles, finish=lambda: ran.append(1))
    work.then(lambda: ran.append(2))
    work.wait()
    work.wait()
    assert [h.n_waits for h in handles] == [1, 1] and ran == [1, 2]
    bad = [_Handle(RuntimeError("peer gone")), _Handle()]
    work = Work(bad, finish=lambda: ran.append(3), what="all_gather")
    for _ in range(2):
        with pytest.raises(CommError, match="all_gather failed: peer gone"):
            work.wait()
    assert [h.n_waits for h in bad] == [1, 1] and ran == [1, 2]
    with pytest.raises(CommError, match="peer gone"):
        work.then(lambda: ran.append(4))
    ran.clear()
    Work.done().then(lambda: ran.append(5)).wait()
    assert ran == [5]


def test_new_names_are_used_where_torch_has_them():
    if hasattr(dist, "all_gather_single"):
        assert torch_backend.all_gather_single is dist.all_gather_single
        assert torch_backend.reduce_scatter_single is dist.reduce_scatter_single
    else:
        assert torch_backend.all_gather_single is dist.all_gather_into_tensor


def test_without_a_group_the_error_says_what_to_call():
    assert not dist.is_initialized(), "another test left a group in this process"
    with pytest.raises(CommError, match="init_distributed"):
        Collectives()
