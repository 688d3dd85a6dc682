"""Messages of random dtypes, shapes, pairs and tags, mixed with collectives, over every transport. Other tests: a peer
that is killed, is stopped, or says something else.

All ranks draw the same plan from one seed, so each knows the bytes of every message.
"""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import CommError
from tests.hosts import why_no_hosts
from tests.ranks import RanksFailed
from tests.waits import joined

CPU = torch.device("cpu")
F32 = torch.float32
DTYPES = [
    torch.bool,
    *(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)),
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]
TRANSPORTS = {"shm": ("shm", None), "gloo": ("off", None), "hosts": ("auto", (0, 0, 1))}
MAILBOX_BYTES = 7680  # longer messages lie in the arena
MAX_BYTES = 3 << 20
UNTOUCHED = 0xA5


def run_over(run_ranks, transport: str, world: int, body, *args, **options):
    """``body(rank, world, local, ...)`` on ranks of that transport, on several hosts where there are some."""
    local, hosts = TRANSPORTS[transport]
    if hosts is not None:
        if why_no_hosts():
            pytest.skip(why_no_hosts())
        options["hosts"] = (*hosts, 1, 0)[:world] if world > 2 else (0, 1)
    return run_ranks(world, body, local, *args, **options)


def collectives(local: str, seconds: float = 200.0) -> Collectives:
    """The collectives of a new group: a failure ends the connections of a group."""
    comm = Collectives(dist.new_group(timeout=timedelta(seconds=seconds)))
    comm.use_shared_memory(local)
    return comm


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def drawn_bytes(n_bytes: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Every pattern of bits (NaN, inf and -0.0 among them), and of bool the two that it has."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 256, (n_bytes,), generator=generator, dtype=torch.uint8)


class Message(NamedTuple):
    src: int
    dst: int
    tag: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    seed: int
    sent_from_arena: bool
    received_in_arena: bool


def draw_shape(draw: random.Random, itemsize: int) -> tuple[int, ...]:
    kind = draw.randrange(7)
    if kind == 0:
        return ()
    if kind == 1:
        return tuple(draw.sample([0, 3, 5], draw.randint(1, 3)))
    if kind == 2:
        return tuple(draw.choice([1, 1, 2, 3]) for _ in range(draw.randint(9, 12)))
    if kind == 3:
        return (MAILBOX_BYTES // itemsize + draw.randint(-1, 1),)
    if kind == 4:
        return (draw.choice([2, 31, 257]), draw.choice([1, 7, 127]))
    return (draw.randrange(1, (MAX_BYTES if kind == 5 else 40_000) // itemsize),)


def draw_message(draw: random.Random, world: int) -> Message:
    src, dst = draw.sample(range(world), 2)
    dtype = draw.choice(DTYPES)
    arenas = [draw.random() < 0.5 for _ in range(2)]
    tag = draw.choice([0, 1, 2, 4095])
    return Message(src, dst, tag, dtype, draw_shape(draw, dtype.itemsize), draw.getrandbits(32), *arenas)


def made(comm: Collectives, message: Message) -> torch.Tensor:
    """This rank's end of a message: the sender's has the bytes, and lies at an odd address of ordinary memory."""
    numel = math.prod(message.shape)
    n_bytes = numel * message.dtype.itemsize
    sends = message.src == comm.rank
    if message.sent_from_arena if sends else message.received_in_arena:
        data = comm.allocate(n_bytes, CPU)
    else:
        data = torch.empty(n_bytes + message.dtype.itemsize, dtype=torch.uint8)[message.dtype.itemsize :]
    data.copy_(drawn_bytes(n_bytes, message.seed, message.dtype)) if sends else data.fill_(UNTOUCHED)
    return data.view(message.dtype).view(message.shape)


def check_arrived(message: Message, tensor: torch.Tensor, what: str) -> None:
    got = memory_of(tensor)
    want = drawn_bytes(got.numel(), message.seed, message.dtype)
    assert torch.equal(got, want), f"{what}: {message} has {int((got != want).sum())} wrong bytes"


def collective(comm: Collectives, draw: random.Random, what: str) -> None:
    """A random collective, the same on all ranks, and its result."""
    n, rank, length = comm.world_size, comm.rank, draw.choice([1, 3, 1021, 60_013])
    kind, src = draw.randrange(5), draw.randrange(n)
    if kind == 0:
        flat = torch.full((length,), rank + 1.0)
        comm.all_reduce(flat, label=what).wait()
        assert flat.eq(n * (n + 1) / 2).all(), what
    elif kind == 1:
        flat = torch.full((n * length,), -1, dtype=torch.int16)
        comm.own_slice(flat).fill_(rank)
        comm.all_gather(flat, label=what).wait()
        assert torch.equal(flat, torch.arange(n, dtype=torch.int16).repeat_interleave(length)), what
    elif kind == 2:
        tensor = torch.full((length,), rank + 100)
        comm.broadcast(tensor, src, label=what)
        assert tensor.eq(src + 100).all(), what
    elif kind == 3:
        sent, received = torch.full((length,), rank), torch.full((length,), -1)
        comm.shift(sent, received, 1, label=what).wait()
        assert received.eq((rank - 1) % n).all(), what
    else:
        comm.barrier()


def traffic_body(rank: int, world: int, local: str, seed: int, n_rounds: int) -> int:
    """Messages in flight between random pairs, waited for in random order, some of them after the next collectives. A
    rank waits for others only when the messages of its round are started."""
    comm = collectives(local)
    shared, own = random.Random(seed), random.Random(1000 * seed + rank)
    pending: list[tuple] = []
    n_received = 0
    for i in range(n_rounds):
        for k in range(shared.randrange(1, 9)):
            message = draw_message(shared, world)
            if rank in (message.src, message.dst):
                tensor = made(comm, message)
                work = comm.message(tensor, message.src, message.dst, tag=message.tag, label=f"{i}.{k}")
                pending.append((message, tensor, work, f"seed {seed}, message {i}.{k}"))
        own.shuffle(pending)
        ends_all = i == n_rounds - 1
        keeps = 0 if ends_all else own.randrange(len(pending) + 1)
        before, pending = pending[keeps:], pending[:keeps]
        for _ in range(shared.randrange(3)):
            collective(comm, shared, f"seed {seed}, round {i}")
        for message, tensor, work, what in before:
            work.wait()
            if message.dst == rank:
                check_arrived(message, tensor, what)
                n_received += 1
    comm.barrier()
    return n_received


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("transport", list(TRANSPORTS))
def test_random_messages_arrive_byte_for_byte(run_ranks, transport: str, world: int) -> None:
    for seed in range(3):
        assert sum(run_over(run_ranks, transport, world, traffic_body, seed, 25)) > 25


def every_dtype_body(rank: int, world: int, local: str) -> None:
    """Each dtype at each length around that of a mailbox, in both directions at once."""
    comm = collectives(local)
    for dtype in DTYPES:
        pending = []
        for i, n_bytes in enumerate((0, 16, MAILBOX_BYTES - 16, MAILBOX_BYTES, MAILBOX_BYTES + 16)):
            for src in (0, 1):
                message = Message(src, 1 - src, i, dtype, (n_bytes // dtype.itemsize,), 7 * i + src, i % 2 == 0, False)
                if rank < 2:
                    tensor = made(comm, message)
                    pending.append((message, tensor, comm.message(tensor, src, 1 - src, tag=i)))
        for message, tensor, work in reversed(pending):
            work.wait()
            check_arrived(message, tensor, str(dtype))


@pytest.mark.parametrize("transport", list(TRANSPORTS))
def test_every_dtype_arrives(run_ranks, transport: str) -> None:
    run_over(run_ranks, transport, 3 if transport == "hosts" else 2, every_dtype_body)


def before_collective_body(rank: int, world: int, local: str, n_bytes: int) -> None:
    """The sender waits for its message before it comes to a collective, in which the receiver waits already."""
    comm = collectives(local)
    for i, dtype in enumerate((torch.uint8, torch.bool, torch.float8_e5m2)):
        src, dst = i % world, (i + 1) % world
        message = Message(src, dst, 0, dtype, (n_bytes,), i, True, i == 1)
        if rank == dst:
            tensor = made(comm, message)
            work = comm.message(tensor, src, dst)
        elif rank == src:
            comm.message(made(comm, message), src, dst).wait()
        collective(comm, random.Random(i), "a sum")
        if rank == dst:
            work.wait()
            check_arrived(message, tensor, str(dtype))


@pytest.mark.parametrize("transport", list(TRANSPORTS))
@pytest.mark.parametrize("n_bytes", [MAILBOX_BYTES + 1, MAX_BYTES])
def test_a_receiver_in_a_collective_takes_its_messages(run_ranks, transport: str, n_bytes: int) -> None:
    run_over(run_ranks, transport, 3, before_collective_body, n_bytes)


# ---- two ends that differ ------------------------------------------------------------------------------------------

# (shape, dtype, label) at the sender and at the receiver, and the words that name them.
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DIFFERENT = {
    "float8": (((64,), E4M3, ""), ((64,), E5M2, ""), "float8_e4m3fn", "float8_e5m2"),
    "bool": (((64,), torch.bool, ""), ((64,), torch.uint8, ""), "bool", "uint8"),
    "unsigned": (((64,), torch.uint16, ""), ((64,), torch.int16, ""), "uint16", "int16"),
    "complex": (((9_001,), torch.complex32, ""), ((9_001,), torch.uint32, ""), "complex32", "uint32"),
    "half": (((5_003,), torch.bfloat16, ""), ((5_003,), torch.float16, ""), "bfloat16", "float16"),
    "longer": (((9,), F32, ""), ((4,), F32, ""), "[9]", "[4]"),
    "much longer": (((MAX_BYTES // 4,), F32, ""), ((3,), F32, ""), f"[{MAX_BYTES // 4}]", "[3]"),
    "shorter": (((1,), F32, ""), ((90_001,), F32, ""), "[1]", "[90001]"),
    "shape": (((2, 3), F32, ""), ((3, 2), F32, ""), "[2, 3]", "[3, 2]"),
    "dimensions": (((1, 5), F32, ""), ((5,), F32, ""), "[1, 5]", "[5]"),
    "label": (((5,), F32, "keys"), ((5,), F32, "values"), "keys", "values"),
}


def failure(call) -> str:
    """The text of the error of ``call``; "" if it raises none."""
    try:
        call()
    except CommError as error:
        return str(error)
    return ""


def differ_body(rank: int, world: int, local: str, case, arena: bool) -> tuple[str, float]:
    """(the error that this rank sees, the seconds until then)"""
    sent, expected, *_ = case
    comm = collectives(local)
    src, dst = world - 1, 0
    begin = time.monotonic()
    text = ""
    if rank in (src, dst):
        shape, dtype, label = sent if rank == src else expected
        tensor = made(comm, Message(src, dst, 3, dtype, shape, 1, arena, arena))
        text = failure(lambda: comm.message(tensor, src, dst, tag=3, label=label).wait())
        if rank == dst:
            assert memory_of(tensor).eq(UNTOUCHED).all()
        text = text or failure(lambda: comm.message(torch.zeros(2), dst, src, tag=4).wait())
    return text, time.monotonic() - begin


@pytest.mark.parametrize("name", list(DIFFERENT))
@pytest.mark.parametrize("transport", list(TRANSPORTS))
@pytest.mark.parametrize("arena", [False, True])
def test_two_ends_that_differ_both_say_how(run_ranks, transport: str, name: str, arena: bool) -> None:
    case = DIFFERENT[name]
    found = run_over(run_ranks, transport, 3, differ_body, case, arena)
    for rank in (0, 2):
        text, seconds = found[rank]
        assert "rank 2 " in text and "rank 0 expects" in text and seconds < 30, f"rank {rank} says {text!r}"
        assert case[2] in text.split("rank 0 expects")[0] and case[3] in text.split("rank 0 expects")[1], text


def out_of_order_body(rank: int, world: int, local: str) -> list[str]:
    """Two messages of one tag, sent in one order and received in the other."""
    comm = collectives(local)
    if rank > 1:
        return []
    labels = ["first", "second"] if rank == 0 else ["second", "first"]
    tensors = [torch.full((5_003,), float(len(label)) if rank == 0 else -1.0) for label in labels]
    works = [comm.message(tensor, 0, 1, label=label) for tensor, label in zip(tensors, labels)]
    texts = [failure(work.wait) for work in works]
    for tensor, label in zip(tensors, labels):  # gloo tells the data apart, too
        assert tensor.eq(-1.0).all() or tensor.eq(len(label)).all()
    return [*texts, failure(lambda: comm.message(torch.zeros(2), 1, 0).wait())]


@pytest.mark.parametrize("transport", list(TRANSPORTS))
def test_messages_in_another_order_are_an_error_at_both_ends(run_ranks, transport: str) -> None:
    for texts in run_over(run_ranks, transport, 3, out_of_order_body)[:2]:
        assert "first" in texts[-1] and "second" in texts[-1], texts


def tags_body(rank: int, world: int, local: str) -> None:
    comm = collectives(local)
    for tag in (-1, 4096, 1 << 40):
        with pytest.raises(ValueError, match=f"tag is {tag}, must be 0 to 4095"):
            comm.message(torch.zeros(1), 0, 1, tag=tag)
    comm.barrier()


@pytest.mark.parametrize("transport", list(TRANSPORTS))
def test_tags_that_a_transport_would_confuse_are_refused(run_ranks, transport: str) -> None:
    run_over(run_ranks, transport, 2 if transport != "hosts" else 3, tags_body)


# ---- a peer that is killed or stopped ------------------------------------------------------------------------------


def faulty_body(rank: int, world: int, local: str, signum: int, resumes: bool, arena: bool) -> tuple[str, float]:
    """The last rank is killed or stopped in the middle of messages between all ranks. Returns the error that this rank
    gets, "" where all of them arrive, and the seconds until then."""
    comm = collectives(local, 4.0 if signum == signal.SIGSTOP and not resumes else 200.0)
    last = world - 1
    pid = comm.gather_objects(os.getpid())[last]
    pairs = [(src, dst) for src in range(world) for dst in range(world) if src != dst]
    messages = [
        Message(src, dst, tag, torch.uint8, (n_bytes,), 10 * src + dst, arena, arena)
        for tag, n_bytes in enumerate((5, MAILBOX_BYTES + 3, MAX_BYTES))
        for src, dst in pairs
        if rank in (src, dst)
    ]
    pending = []

    def run() -> None:
        for i, message in enumerate(messages):
            if rank == last and i == len(messages) // 2:
                os.kill(pid, signum)
            tensor = made(comm, message)
            pending.append((message, tensor, comm.message(tensor, message.src, message.dst, tag=message.tag)))
        for message, tensor, work in pending:
            work.wait()
            if message.dst == rank:
                check_arrived(message, tensor, "a message of a rank that lives")
        comm.barrier()

    if rank == 0 and signum == signal.SIGSTOP:
        resume = threading.Timer(1.5 if resumes else 8.0, lambda: os.kill(pid, signal.SIGCONT))
        resume.start()
    begin = time.monotonic()
    text = failure(run)
    for message, tensor, _ in pending:
        if message.dst == rank:
            got, want = memory_of(tensor), drawn_bytes(tensor.numel(), message.seed, torch.uint8)
            assert (got.eq(want) | got.eq(UNTOUCHED)).all(), f"{message} was written by something else"
    seconds = time.monotonic() - begin
    if rank == 0 and signum == signal.SIGSTOP:
        joined(resume)
    return text, seconds


@pytest.mark.parametrize("transport", list(TRANSPORTS))
@pytest.mark.parametrize("arena", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_is_killed_is_named(run_ranks, transport: str, world: int, arena: bool) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_over(run_ranks, transport, world, faulty_body, signal.SIGKILL, False, arena, fresh=True, grace=100.0)
    *others, last = caught.value.outcomes
    assert "killed by SIGKILL" in last.text
    for outcome in others:
        assert outcome.kind == "returned", outcome
        text, seconds = outcome.value
        assert f"rank {world - 1}" in text and seconds < 60, f"rank {outcome.rank} says {text!r} after {seconds} s"


@pytest.mark.parametrize("transport", list(TRANSPORTS))
@pytest.mark.parametrize("resumes", [False, True])
def test_a_rank_that_is_stopped_is_named_after_the_timeout(run_ranks, transport: str, resumes: bool) -> None:
    found = run_over(run_ranks, transport, 3, faulty_body, signal.SIGSTOP, resumes, True, fresh=True, grace=100.0)
    for rank, (text, seconds) in enumerate(found):
        if resumes:
            assert text == "", f"rank {rank} says {text!r}"
        else:
            assert text and (rank == 2 or "rank 2" in text), f"rank {rank} says {text!r} after {seconds} s"
