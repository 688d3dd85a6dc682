"""comm/transports/two_levels.py: collectives of ranks on several hosts (network namespaces). They are compared with sums in the
documented order, with fp64, with gloo and with plain training. The bytes that leave a host, and the errors when a rank
dies, are tested too.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist

import deepspeed_c
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.transports.two_levels import TwoLevels, _overlaps, _piece_numel
from deepspeed_c.errors import CommError
from tests.deepspeed_c.comm.transports.test_shared_memory import bits
from tests.hosts import why_no_hosts
from tests.ranks import RanksFailed
from tests.training import config, descend, engine_of, update
from tests.waits import exit_status, fork_with_alarm

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ANY = [*FLOATS, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex128]
CPU = torch.device("cpu")
# The host of each rank: two and two ranks; in turn; three and one; three hosts in mixed order, one with a single rank.
LAYOUTS = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 1, 2, 0)]
N_TRIALS = 50


@pytest.fixture(autouse=True)
def _hosts():
    if why_no_hosts():
        pytest.skip(why_no_hosts())


def both():
    """(collectives by host, collectives over gloo)"""
    tall, plain = Collectives(), Collectives()
    tall.use_shared_memory("auto")
    assert isinstance(tall.transport_of(torch.empty(1)), TwoLevels)
    return tall, plain


def values(seed, rank, numel, dtype):
    generator = torch.Generator().manual_seed(seed * 16 + rank)
    drawn = torch.randn(numel, generator=generator, dtype=torch.float64) * 8
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(0, 2 if dtype == torch.bool else 120, (numel,), generator=generator).to(dtype)
    drawn = drawn.to(dtype)
    for i, special in enumerate((float("inf"), float("nan"), -0.0)):
        if numel > 5 * i + 9:
            drawn[5 * i + 9] = special
    return drawn


def by_host(rows, hosts, scale, begin, dtype):
    """The documented order: sums in f32, inside each host by rank, then over the hosts. The sum is scaled, added to
    ``begin``, and rounded once."""
    total = None
    for host in dict.fromkeys(hosts):
        inside = None
        for row, where in zip(rows, hosts):
            if where == host:
                inside = row.to(torch.float32) if inside is None else inside + row.to(torch.float32)
        total = inside if total is None else total + inside
    total = total * scale if scale != 1.0 else total
    return (total if begin is None else total + begin.to(torch.float32)).to(dtype)


def check(got, want, what):
    if got.is_floating_point():
        assert torch.equal(got.isnan(), want.isnan()), f"{what}: {got} instead of {want}"
        got, want = got.nan_to_num(7.0, 8.0, 9.0), want.nan_to_num(7.0, 8.0, 9.0)
    assert torch.equal(bits(got), bits(want)), f"{what}: {got} instead of {want}"


def check_close(got, rows, scale, what):
    """Compares with fp64. Allows one rounding to the dtype of the result, and one in f32 for each rank."""
    want, size = scale * sum(row.double() for row in rows), abs(scale) * sum(row.double().abs() for row in rows)
    finite = want.isfinite()
    bound = torch.finfo(got.dtype).eps * want.abs() + len(rows) * torch.finfo(torch.float32).eps * size + 1e-7
    error = (got.double() - want).abs()
    assert bool((error <= bound)[finite].all()), f"{what}: {got} instead of {want}"


def random_body(rank, world, hosts):
    tall, plain = both()
    tall.ledger.reset_totals()
    for seed in range(N_TRIALS):
        draw = random.Random(seed)
        dtype, out_dtype = draw.choice(FLOATS), draw.choice(FLOATS)
        s = draw.choice([1, 2, 3, 7, 16, 31, 257, 4099, draw.randrange(1, 40_000)])
        n = draw.choice([1, 2, 3, world - 1, world, world + 1, 17, draw.randrange(1, 90_000)])
        scale, accumulate = draw.choice([1.0, 1 / 3]), draw.choice([False, True])
        rows = [values(seed, r, world * s, dtype) for r in range(world)]
        mine = [row[rank * s : (rank + 1) * s] for row in rows]
        what = f"{hosts} seed {seed} {dtype}->{out_dtype} slice {s} scale {scale} accumulate {accumulate}"
        lies = (
            tall.allocate(world * s * dtype.itemsize, CPU).view(dtype)
            if seed % 2
            else torch.empty(world * s, dtype=dtype)
        )
        flat, begin = lies.copy_(rows[rank]), values(seed + 99, rank, s, out_dtype)
        out = begin.clone()
        tall.reduce_scatter(flat, out, scale=scale, accumulate=accumulate).wait()
        check(out, by_host(mine, hosts, scale, begin if accumulate else None, out_dtype), what)
        check(flat, rows[rank], f"{what}: the input was written")
        if not accumulate:
            check_close(out, mine, scale, what)
            tall.reduce_scatter(flat, tall.own_slice(flat), scale=scale).wait()
            check(tall.own_slice(flat), by_host(mine, hosts, scale, None, dtype), f"{what}, in place")
        rows = [values(seed, r, n, dtype) for r in range(world)]
        flat = rows[rank].clone()
        tall.all_reduce(flat, scale=scale).wait()
        check(flat, by_host(rows, hosts, scale, None, dtype), f"all_reduce of {n}, {what}")
        dtype = draw.choice(ANY)
        rows = [values(seed, r, s, dtype) for r in range(world)]
        flat, other = torch.zeros(world * s, dtype=dtype), torch.zeros(world * s, dtype=dtype)
        for comm, buffer in ((tall, flat), (plain, other)):
            comm.own_slice(buffer).copy_(rows[rank])
            comm.all_gather(buffer, use_broadcast=seed % 3 == 0).wait()
        assert torch.equal(bits(flat), bits(torch.cat(rows))) and torch.equal(bits(flat), bits(other)), what
        src = draw.randrange(world)
        tensor = rows[rank].clone()
        tall.broadcast(tensor, src)
        assert torch.equal(bits(tensor), bits(rows[src])), f"broadcast from {src}, {what}"
        whole = values(seed, 0, s, draw.choice([torch.float32, torch.bfloat16, torch.float64]))
        mine = torch.zeros_like(whole)
        mine[rank::world] = whole[rank::world]
        tall.sum_disjoint_bits(mine)
        assert torch.equal(bits(mine), bits(whole)), f"sum_disjoint_bits, {what}"
        assert tall.gather_numbers(rank * 10**15 + seed) == [r * 10**15 + seed for r in range(world)]
        assert tall.sum_numbers([rank + 0.5, 1e300]) == [world * (world - 1) / 2 + world / 2, world * 1e300]
    assert set(tall.ledger.carried) == {"shm+gloo", "gloo"}
    assert {entry.path for entry in tall.ledger.recent(3)} == {"shm+gloo"}
    tall.barrier()


@pytest.mark.parametrize("hosts", LAYOUTS, ids=str)
def test_random_calls_give_sums_in_the_order_of_ranks_and_hosts_and_gloos_gathers(run_ranks, hosts):
    run_ranks(len(hosts), random_body, hosts, hosts=hosts)


def in_flight_body(rank, world, hosts):
    """Many collectives are under way at once, beside gloo's. Ranks wait for them in different orders. Two rounds give
    the same bits."""
    tall, plain = both()
    n, numel = 12, 5003
    data = [[values(i, r, world * numel, torch.float32) for r in range(world)] for i in range(n)]
    first = None
    for _ in range(2):
        works, outs, flats, others = [], [], [], []
        for i in range(n):
            out, flat = torch.empty(numel), data[i][rank].clone()
            gathered = torch.zeros(world * 50, dtype=torch.float16)
            tall.own_slice(gathered).fill_(rank + i)
            works += [tall.reduce_scatter(data[i][rank], out), tall.all_gather(gathered), tall.all_reduce(flat)]
            others.append(plain.all_reduce(torch.ones(1000)))
            outs.append(out)
            flats += [flat, gathered]
        random.Random(rank).shuffle(works)
        for work in works:
            work.wait()
            work.wait()
        for other in others:
            other.wait()
        for i in range(n):
            mine = [row[rank * numel : (rank + 1) * numel] for row in data[i]]
            check(outs[i], by_host(mine, hosts, 1.0, None, torch.float32), f"bucket {i}")
            check(flats[2 * i], by_host(data[i], hosts, 1.0, None, torch.float32), f"flat {i}")
            assert flats[2 * i + 1].view(world, -1)[:, 7].tolist() == [r + i for r in range(world)]
        found = torch.cat([bits(t) for t in (*outs, *flats)])
        assert first is None or torch.equal(first, found)
        first = found
    tall.barrier()


@pytest.mark.parametrize("hosts", [LAYOUTS[0], LAYOUTS[3]], ids=str)
def test_many_in_flight_waited_for_in_any_order(run_ranks, hosts):
    run_ranks(len(hosts), in_flight_body, hosts, hosts=hosts)


def sent():
    """The bytes that this host has sent over its network."""
    with open("/proc/self/net/dev") as f:
        return next(int(line.split(":")[1].split()[8]) for line in f if line.strip().startswith("eth0:"))


def volume_body(rank, world, hosts):
    """(bytes that this host sent, bytes that it needed to send), for each operation."""
    tall, _ = both()
    numel, n_hosts = 1 << 20, len(set(hosts))
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        flat, out = torch.zeros(numel, dtype=dtype), torch.zeros(numel // world, dtype=dtype)
        least = numel * dtype.itemsize * (n_hosts - 1) // n_hosts
        sums = numel * 4 * (n_hosts - 1) // n_hosts  # sums travel in f32
        calls = {
            "reduce_scatter": (lambda flat=flat, out=out: tall.reduce_scatter(flat, out).wait(), sums),
            "all_gather": (lambda flat=flat: tall.all_gather(flat).wait(), least),
            "all_reduce": (lambda flat=flat: tall.all_reduce(flat).wait(), sums + least),
        }
        for name, (call, wanted) in calls.items():
            call()
            counts = []
            # TCP resends segments that a busy machine acknowledges late, so the least of three counts is taken.
            for _ in range(3):
                tall.barrier()
                before = sent()
                tall.barrier()  # no rank begins before all have read the count
                call()
                tall.barrier()
                counts.append(sent() - before)
            found[f"{name} {dtype}"] = (min(counts), wanted)
    return found


def test_no_more_than_the_least_leaves_a_host(run_ranks):
    hosts = LAYOUTS[0]
    for name, (n_bytes, least) in run_ranks(4, volume_body, hosts, hosts=hosts)[0].items():
        # Rings over all ranks would send twice as much. Segments that TCP resends on a busy machine are far less.
        assert least <= n_bytes <= 1.4 * least, f"{name}: {n_bytes} bytes left the host, {least} had to"


def groups_body(rank, world):
    """Some of the ranks have groups of their own. A closed group leaves nothing behind."""
    comm = Collectives()
    with pytest.raises(
        CommError, match="cannot share memory: ranks run in several network namespaces of host-0"
    ) as told:
        comm.use_shared_memory("shm")
    assert '"auto"' in str(told.value)
    one, two = both()[0], both()[0]
    assert one.transport_of(torch.empty(1)) is two.transport_of(torch.empty(1))
    cross, inside = (
        [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])],
        [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])],
    )
    part = one.part(cross[rank % 2], "dp_replicate")
    assert part.transport_of(torch.empty(1)).name == "gloo"
    assert one.part(inside[rank // 2], "dp_shard").transport_of(torch.empty(1)).name == "shm"
    three = dist.new_group([3, 0, 1])
    if rank != 2:
        part = one.part(three, "ep")
        assert part.transport_of(torch.empty(1)).name == "shm+gloo"
        assert part.gather_numbers(rank) == dist.get_process_group_ranks(three)
    dist.barrier()
    n_threads, n_files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    group = dist.new_group()
    tall = Collectives(group)
    tall.use_shared_memory("auto")
    kept = tall.allocate(64, CPU).fill_(3)
    tall.barrier()
    assert threading.active_count() == n_threads + 1
    tall.close()
    dist.barrier()
    del tall
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert kept.unique().tolist() == [3]
    del kept
    deadline = time.monotonic() + 200
    while threading.active_count() > n_threads or len(os.listdir("/proc/self/fd")) > n_files:
        assert time.monotonic() < deadline, (threading.active_count(), len(os.listdir("/proc/self/fd")), n_files)
        gc.collect()
        time.sleep(0.05)
    pid = fork_with_alarm()
    if pid == 0:
        try:
            one.barrier()
        except (RuntimeError, CommError) as error:
            os._exit(0 if "fork" in str(error) else 1)
        os._exit(2)
    assert exit_status(pid) == 0
    one.barrier()


def test_groups_of_a_world_have_their_own_and_leave_nothing(run_ranks):
    run_ranks(4, groups_body, hosts=LAYOUTS[0], fresh=True)


def of_sizes(tall, numel, dtype):
    return {
        "reduce_scatter": lambda: tall.reduce_scatter(
            torch.zeros(tall.world_size * numel, dtype=dtype), torch.zeros(numel, dtype=dtype)
        ),
        "all_gather": lambda: tall.all_gather(torch.zeros(tall.world_size * numel, dtype=dtype)),
        "all_reduce": lambda: tall.all_reduce(torch.zeros(numel, dtype=dtype)),
        "broadcast": lambda: tall.broadcast(torch.zeros(numel, dtype=dtype), 1),
    }


def differing_body(rank, world, hosts, calls, numels, dtypes):
    """Returns the error of a rank if its host starts another operation than the other hosts."""
    tall, _ = both()
    tall.barrier()
    host = hosts[rank]
    with pytest.raises(CommError) as caught:
        work = of_sizes(tall, numels[host], dtypes[host])[calls[host]]()
        if work is not None:
            work.wait()
    return str(caught.value)


SAME = ("all_gather", "all_gather")
MISMATCHES = {
    "longer": (SAME, (1000, 2000), (torch.float32,) * 2, "all_gather of {n0} torch.float32",
     "all_gather of {n1} torch.float32"),
    "shorter by one": (("reduce_scatter",) * 2, (7, 6), (torch.float32,) * 2, "of {n0} torch.float32",
     "of {n1} torch.float32"),
    "a number more": (("all_reduce",) * 2, (1, 2), (torch.int64,) * 2, "of 1 torch.int64", "of 2 torch.int64"),
    "dtype": (("all_reduce",) * 2, (64, 64), (torch.float32, torch.int32), "torch.float32", "torch.int32"),
    "broadcast": (("broadcast",) * 2, (5, 9), (torch.float32,) * 2, "broadcast of 5", "broadcast of 9"),
    "operation": (("all_gather", "broadcast"), (256, 1024), (torch.float32,) * 2, "all_gather", "broadcast"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISMATCHES)
@pytest.mark.parametrize("hosts", [LAYOUTS[0], LAYOUTS[2]])
def test_hosts_that_start_different_things_are_told_both(run_ranks, kind, hosts):
    calls, numels, dtypes, one, other = MISMATCHES[kind]
    world = len(hosts)
    said = run_ranks(world, differing_body, hosts, calls, numels, dtypes, hosts=hosts, fresh=True)
    one, other = (text.format(n0=world * numels[0], n1=world * numels[1]) for text in (one, other))
    told = [text for text in said if "has started" in text]
    assert told, said
    for text in told:
        assert one in text and other in text and "of another host" in text, text


def dying_body(rank, world):
    tall, _ = both()
    tall.barrier()
    if rank == 3:
        os._exit(7)
    begin = time.monotonic()
    # The error names the first rank that is missing: the dead rank, or a rank that noticed earlier and closed.
    with pytest.raises(CommError, match=r"reduce_scatter of \d+ torch.float32 failed: .*rank [0-3]") as caught:
        tall.reduce_scatter(torch.ones(4 << 18), torch.ones(1 << 18)).wait()
    assert "(shm+gloo)" in str(caught.value)
    said = str(caught.value)
    with pytest.raises(CommError, match="rank [0-3]"):
        tall.barrier()
    assert time.monotonic() - begin < 200, "nobody waits for the timeout of the group, which is 900 s"
    return said


def test_a_dead_rank_ends_the_calls_of_all_and_is_named_by_whom_it_left_waiting(run_ranks):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(4, dying_body, hosts=LAYOUTS[0], fresh=True, grace=200)
    outcomes = failed.value.outcomes
    assert [outcome.kind for outcome in outcomes] == ["returned"] * 3 + ["died"], str(failed.value)
    # Rank 2 is on the host of the dead rank 3, and rank 1 exchanges slices with rank 3. Whichever of the two notices
    # first can only name rank 3.
    said = [outcome.value for outcome in outcomes[:3]]
    for rank, text in enumerate(said):
        assert f"rank {rank} (process" not in text.partition("failed: ")[2], said
    assert any("rank 3" in text for text in said[1:]), said


def test_pieces_and_slices_cover_a_block():
    for n_pieces in range(1, 6):
        for n_slices in range(1, 6):
            for s in (1, 2, 3, 7, 10):
                covered = [0] * (n_slices * s)
                length = _piece_numel(n_pieces, n_slices * s)
                for piece, i, begin, end in _overlaps(n_pieces, n_slices, s):
                    for at in range(begin, end):
                        covered[at] += 1
                        assert at // length == piece and at // s == i
                assert covered == [1] * (n_slices * s), (n_pieces, n_slices, s)


def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(13, 37), torch.nn.Tanh(), torch.nn.Linear(37, 11), torch.nn.Tanh(), torch.nn.Linear(11, 1)
    )


def batches():
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(8, 13, generator=generator) for _ in range(4)]


def train_body(rank, world, stage, dtype):
    net = model()
    zero = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 200}
    settings = config(
        stage, "Adam", rows=8 // world, lr=1e-2, zero=zero, **{"bf16": {"enabled": True}} if dtype == "bf16" else {}
    )
    engine = engine_of(net, settings)
    losses = []
    for batch in batches():
        mine = batch.chunk(world)[rank]
        losses.append(update(engine, engine(mine.to(torch.bfloat16) if dtype == "bf16" else mine).square().mean()))
    carried = engine.optimizer.comm.ledger.carried
    assert carried.keys() == {"shm+gloo", "gloo"} and carried["shm+gloo"] > 0, carried
    with deepspeed_c.zero.GatheredParameters(list(net.parameters())):
        weights = [p.detach().float().clone() for p in net.parameters()]
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize(("stage", "dtype"), [(1, "fp32"), (3, "fp32"), (3, "bf16"), (0, "bf16")])
def test_training_over_two_hosts_is_that_of_one_process_and_the_same_twice(run_ranks, stage, dtype):
    first, second = (run_ranks(4, train_body, stage, dtype, hosts=LAYOUTS[0]) for _ in range(2))
    for (losses, weights), (again, weights_again) in zip(first, second):
        assert losses == again and all(torch.equal(a, b) for a, b in zip(weights, weights_again))
        assert all(torch.equal(a, b) for a, b in zip(weights, first[0][1])), "all ranks have the same weights"
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for i, batch in enumerate(batches()):
        loss = net(batch).square().mean()
        descend(optimizer, loss)
        mean = sum(losses[i] for losses, _ in first) / 4
        assert mean == pytest.approx(loss.item(), rel=1e-5 if dtype == "fp32" else 3e-2), f"step {i}"
    if dtype == "fp32":
        for mine, plain in zip(first[0][1], net.parameters()):
            torch.testing.assert_close(mine, plain.detach(), rtol=1e-5, atol=1e-6)
