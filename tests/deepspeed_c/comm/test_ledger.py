"""comm/ledger.py: entries of collectives of the engine and of the user, their states, and their totals."""

from __future__ import annotations

import pickle
import threading
import time

import pytest
import torch
import torch.distributed as dist

from deepspeed_c import comm as ds_comm
from deepspeed_c.comm import ledger as ledger_module
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.ledger import DONE, ENTERED, STARTING, WAITING, Ledger, Total, all_ledgers, describe, ledger_of
from deepspeed_c.comm.transports.gloo import Gloo
from deepspeed_c.comm.transports.torch_backend import TorchBackend
from deepspeed_c.errors import CommError
from tests.ranks import on_ranks
from tests.waits import joined


def reduce(srcs, scale, accumulate, out):
    total = sum(src.float() for src in srcs) * scale
    out.copy_(total + out.float() if accumulate else total)


def test_entries_are_numbered_and_carry_the_phase():
    ledger = Ledger("g", [3, 5])
    assert ledger.last == 0 and ledger.recent(5) == [] and ledger.blocking() == [] and ledger.totals == {}
    first = ledger.enter("all-gather", 10, "layers.0.w")
    ledger.phase, ledger.module = "backward", "layers.1"
    second = ledger.enter("reduce-scatter", 20)
    assert [(e.seq, e.op, e.n_bytes, e.label, e.phase, e.module) for e in ledger.recent(9)] == [
        (1, "all-gather", 10, "layers.0.w", "", ""),
        (2, "reduce-scatter", 20, "", "backward", "layers.1"),
    ]
    assert (str(first), str(second)) == ("all-gather #1 of layers.0.w", "reduce-scatter #2 (backward, layers.1)")
    assert ledger.recent(1) == [second] and ledger.last == 2


def test_words_for_an_entry():
    assert describe("all-gather", 812, "layers.7.mlp.w1", "forward", "") == (
        "all-gather #812 of layers.7.mlp.w1 (forward)"
    )
    assert describe("all-gather", 2, "w", "forward", "", "shm") == "all-gather #2 of w (forward, shm)"
    assert describe("comm.recv", 0, "", "", "train.py:3") == "comm.recv (train.py:3)"
    assert describe("barrier", 1, "", "", "") == "barrier #1"


def test_states_and_what_blocks():
    ledger = Ledger("g", [0, 1])
    entry = ledger.enter("all-gather", 8)
    # A collective that hangs in its start counts as blocking. The first call over NCCL can hang so.
    assert entry.state == STARTING and ledger.blocking() == [entry]
    entry.started()
    assert entry.state == ENTERED and ledger.blocking() == []
    later = ledger.enter("all-gather", 8)
    later.started()
    before = time.monotonic()
    later.begin_wait()
    entry.begin_wait()
    assert (entry.state, later.state) == (WAITING, WAITING) and before <= later.since <= entry.since
    assert ledger.blocking() == [later, entry], "the longest wait comes first"
    later.end()
    entry.end()
    assert (entry.state, later.state, ledger.blocking()) == (DONE, DONE, [])
    with pytest.raises(KeyError), ledger.enter("broadcast", 8) as failed:
        assert failed.state == WAITING
        raise KeyError
    assert failed.state == DONE and ledger.blocking() == []


class Event:
    """An event on a device. It has come when the test sets ``has_come``."""

    def __init__(self):
        self.has_come = False

    def query(self):
        return self.has_come


def test_what_a_device_has_not_done_yet_is_waited_for(monkeypatch):
    events = []
    monkeypatch.setattr(ledger_module, "record_event", lambda device: events.append(Event()) or events[-1])
    ledger, device = Ledger("g", [0, 1]), torch.device("cuda", 0)
    entries = [ledger.enter("all-gather", 8, label, device) for label in "abc"]
    for entry in entries[:2]:
        entry.started()
        entry.begin_wait()
        entry.finish()
    with entries[2]:
        pass
    assert len(events) == 3 and ledger.blocking() == entries, "the calls have returned, and the streams wait"
    events[0].has_come = True
    assert ledger.blocking() == entries[1:] and entries[0].state == DONE
    # Calls that are later on the stream cannot complete earlier.
    events[1].has_come = events[2].has_come = True
    assert ledger.blocking() == [] and [entry.state for entry in entries] == [DONE] * 3
    failed = ledger.enter("all-gather", 8, "d", device)
    with pytest.raises(KeyError), failed:
        raise KeyError
    assert failed.state == DONE and len(events) == 3
    monkeypatch.setattr(ledger_module, "record_event", lambda device: None)  # as while a graph is captured
    with ledger.enter("all-gather", 8, "e", device):
        pass
    assert ledger.blocking() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_stream_that_waits():
    ledger, device = Ledger("g", [0, 1]), torch.device("cuda", 0)
    with ledger.enter("all-gather", 8, "w", device) as entry:
        torch.cuda._sleep(1_000_000_000)
    assert ledger.blocking() == [entry]
    torch.cuda.synchronize()
    assert ledger.blocking() == [] and entry.state == DONE


def test_the_ring_keeps_the_newest():
    ledger = Ledger("g", [0, 1])
    for i in range(3000):
        ledger.enter("all-gather", i).end()
    kept = ledger.recent(10**6)
    assert [e.seq for e in kept] == list(range(3000 - len(kept) + 1, 3001)) and len(kept) >= 1000
    assert [e.n_bytes for e in ledger.recent(2)] == [2998, 2999]
    # A call that the rank waits for stays known after the ring buffer has wrapped around.
    old = ledger.enter("all-gather", 1)
    old.begin_wait()
    for _ in range(3000):
        ledger.enter("all-gather", 1).end()
    assert ledger.blocking() == [old]


def test_threads_get_numbers_of_their_own():
    ledger = Ledger("g", [0, 1])
    seen: list[int] = []
    threads = [
        threading.Thread(target=lambda: seen.extend([ledger.enter("all-gather", 1).seq for _ in range(500)]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        joined(thread)
    assert sorted(seen) == list(range(1, 2001))


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_totals(world):
    ledger = Ledger("g", range(world))
    n_bytes = 2 * 1000 * world
    for op in ["all-gather", "all-gather", "reduce-scatter", "all-reduce", "broadcast"]:
        ledger.enter(op, n_bytes)
    ledger.enter_message("comm.send", 100)
    ledger.enter_message("comm.recv", 70)
    piece = 2 * 1000 * (world - 1)  # a ring sends every slice except the rank's own
    assert ledger.totals == {
        "all-gather": Total(2, 2 * n_bytes, 2 * piece),
        "reduce-scatter": Total(1, n_bytes, piece),
        "all-reduce": Total(1, n_bytes, 2 * piece),
        "broadcast": Total(1, n_bytes, piece),
        "comm.send": Total(1, 100, 100),
        "comm.recv": Total(1, 70, 0),
    }
    ledger.reset_totals()
    assert ledger.totals == {} and ledger.carried == {} and ledger.last == 5, "numbers go on, and messages take none"


# ---- over gloo


@pytest.mark.parametrize("way", ["gloo", "generic"])
@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_bytes_of_a_sharded_step(rank, world, way):
    """Two all-gathers and a reduce-scatter of 16-bit data send 3 x 2 bytes x parameters x (N-1)/N (ZeRO, section 7)."""
    comm = Collectives(reduce=reduce)
    comm._transports = {"cpu": {"gloo": Gloo(), "generic": TorchBackend("torch")}[way]}
    n_params = 1000 * world
    comm.barrier()
    comm.ledger.reset_totals()
    first = comm.ledger.last
    flat = torch.ones(n_params, dtype=torch.bfloat16)
    for phase in ("forward", "backward"):
        comm.ledger.phase = phase
        work = comm.all_gather(flat, label="layers.0.w (+3 more)")
        assert comm.ledger.recent(1)[0].state == ENTERED
        work.wait()
        assert comm.ledger.recent(1)[0].state == DONE
    work = comm.reduce_scatter(flat, torch.zeros(1000), label="layers.0.w")
    work.wait()
    work.wait()
    comm.ledger.phase = ""
    told = [(e.seq - first, e.op, e.n_bytes, e.label, e.phase, e.state) for e in comm.ledger.recent(3)]
    assert told == [
        (1, "all-gather", 2 * n_params, "layers.0.w (+3 more)", "forward", DONE),
        (2, "all-gather", 2 * n_params, "layers.0.w (+3 more)", "backward", DONE),
        (3, "reduce-scatter", 2 * n_params, "layers.0.w", "backward", DONE),
    ], told
    path = {"gloo": "gloo", "generic": "torch"}[way]
    assert [e.path for e in comm.ledger.recent(3)] == [path] * 3
    assert comm.ledger.carried == {path: 3 * 2 * n_params}, comm.ledger.carried
    moved = sum(total.wire_bytes for total in comm.ledger.totals.values())
    assert moved == 3 * 2 * n_params * (world - 1) // world, (moved, comm.ledger.totals)


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_every_method_is_entered_once(rank, world):
    comm = Collectives(reduce=reduce)
    ledger = comm.ledger
    first = ledger.last
    calls = [
        (lambda **k: comm.all_reduce(torch.ones(6), **k).wait(), "all-reduce", 24, ""),
        (lambda **k: comm.all_reduce(torch.ones(6).half(), **k).wait(), "all-reduce", 12, ""),
        (
            lambda **k: comm.all_gather(torch.ones(2 * world), use_broadcast=True, **k).wait(),
            "all-gather",
            8 * world,
            "",
        ),
        (lambda **k: comm.broadcast(torch.ones(3, 5), 0, **k), "broadcast", 60, ""),
        (lambda **k: comm.all_gather_list(torch.ones(5), **k), "all-gather", 20 * world, "all_gather_list"),
        (lambda **k: comm.sum_disjoint_bits(torch.zeros(4), **k), "all-reduce", 16, "sum_disjoint_bits"),
        (lambda **k: comm.gather_numbers(3, **k), "all-gather", 8 * world, "gather_numbers"),
        (lambda **k: comm.sum_numbers([1.0, 2.0], **k), "all-reduce", 16, "sum_numbers"),
        (lambda **k: comm.barrier(**k), "barrier", 8 * world, ""),
    ]
    for call, op, n_bytes, label in calls:
        for given in ({}, {"label": "mine"}):
            call(**given)
            entry = ledger.recent(1)[0]
            want = (op, n_bytes, given.get("label", label), DONE)
            assert (entry.op, entry.n_bytes, entry.label, entry.state) == want, (entry.op, entry.n_bytes, entry.label)
    assert ledger.last == first + 2 * len(calls), "one call is one entry"
    comm.gather_objects("x")
    told = [(entry.op, entry.n_bytes, entry.label, entry.state) for entry in ledger.recent(2)]
    n_bytes = len(pickle.dumps("x"))
    assert told == [("all-gather", n * world, "gather_objects", DONE) for n in (8, n_bytes)], "lengths, then objects"
    # Calls that send nothing make no entry.
    comm.broadcast(torch.empty(0), 0)
    comm.all_reduce(torch.empty(0)).wait()
    comm.sum_numbers([])
    with pytest.raises(CommError):
        comm.all_reduce(torch.ones(4, device="meta"))
    assert ledger.last == first + 2 * len(calls) + 2 and ledger.blocking() == []


@on_ranks(2)
def test_what_fails_is_not_waited_for(rank, world):
    comm = Collectives(reduce=reduce)

    def refuse(*args):
        raise ZeroDivisionError

    gloo = Gloo()
    gloo.all_reduce = refuse
    comm._transports = {"cpu": gloo}
    with pytest.raises(ZeroDivisionError):
        comm.all_reduce(torch.ones(4))
    assert comm.ledger.recent(1)[0].state == DONE and comm.ledger.blocking() == []
    comm.reduce = refuse
    work = comm.reduce_scatter(torch.ones(2 * world), torch.ones(2), label="w")
    with pytest.raises(ZeroDivisionError):
        work.wait()
    assert comm.ledger.recent(1)[0].state == DONE and comm.ledger.blocking() == []


@on_ranks(1, fresh=True)
def test_one_rank_enters_nothing(rank, world):
    comm = Collectives(reduce=reduce)
    comm.all_gather(torch.ones(4)).wait()
    comm.barrier()
    assert comm.ledger.last == 0 and comm.ledger.totals == {}


@on_ranks(3, fresh=True)
def test_a_group_has_one_ledger(rank, world):
    one, two = Collectives(reduce=reduce), Collectives(reduce=reduce)
    assert one.ledger is two.ledger is ledger_of() is ledger_of(dist.group.WORLD), "engines take turns on one ledger"
    group = dist.new_group([2, 0])
    if rank in (0, 2):
        sub = Collectives(group, reduce=reduce)
        assert sub.ledger is ledger_of(group) is not one.ledger
        assert sub.ledger.ranks == tuple(sub.global_ranks) and sub.ledger.name != one.ledger.name
        before = one.ledger.last
        sub.barrier()
        assert (sub.ledger.last, one.ledger.last) == (1, before)
        assert set(map(id, all_ledgers())) >= {id(sub.ledger), id(one.ledger)}
    dist.barrier()


@on_ranks(3, fresh=True)
def test_the_users_calls_are_entered(rank, world):
    ledger = ledger_of()
    ledger.reset_totals()
    first = ledger.last
    other = torch.zeros(3)
    ds_comm.all_reduce(torch.ones(3))
    entry = ledger.recent(1)[0]
    assert (entry.op, entry.n_bytes, entry.state) == ("comm.all_reduce", 12, DONE)
    assert "test_ledger.py:" in entry.module, entry.module
    handle = ds_comm.all_reduce(other, async_op=True)
    assert ledger.recent(1)[0].state == ENTERED
    handle.wait()
    assert ledger.recent(1)[0].state == DONE
    parts = [torch.zeros(2) for _ in range(world)]
    ds_comm.all_gather(parts, torch.ones(2))
    ds_comm.all_gather_into_tensor(torch.zeros(2 * world), torch.ones(2), None, True).wait()
    ds_comm.reduce_scatter_tensor(torch.zeros(2), tensor=torch.ones(2 * world))
    ds_comm.broadcast(torch.ones(4), 0)
    ds_comm.barrier()
    assert ledger.last == first + 7
    told = {op: (total.count, total.n_bytes) for op, total in ledger.totals.items()}
    assert told == {
        "comm.all_reduce": (2, 24),
        "comm.all_gather": (1, 8 * world),
        "comm.all_gather_into_tensor": (1, 8 * world),
        "comm.reduce_scatter_tensor": (1, 8 * world),
        "comm.broadcast": (1, 16),
        "comm.barrier": (1, 0),
    }
    if rank == 0:
        ds_comm.send(torch.ones(5), 1)
    elif rank == 1:
        ds_comm.recv(torch.ones(5), 0)
    assert ledger.last == first + 7, "a message takes no number: the other ranks know nothing of it"
    with pytest.raises(CommError):
        ds_comm.all_to_all_single(torch.zeros(2), torch.zeros(2), [1, 2], [1, 1])
    assert ledger.recent(1)[0].state == DONE and ledger.blocking() == []
    group = dist.new_group([0, 1])
    ds_comm.all_reduce(torch.ones(1), group=group)  # ranks outside of the group send nothing
    assert ledger.last == first + 8
    if rank < 2:
        assert [e.op for e in ledger_of(group).recent(9)] == ["comm.all_reduce"]
