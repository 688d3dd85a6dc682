"""comm/transports/described.py: messages over gloo that differ at their ends are an error with both values at both ends. No process
ends, no value is written by a message of another length, and nobody waits for a timeout.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.transports.two_levels import TwoLevels
from tests.deepspeed_c.comm.test_messages import failure
from tests.hosts import why_no_hosts
from tests.ranks import on_ranks

UNTOUCHED = 7
I16, F32, F8 = torch.int16, torch.float32, torch.float8_e4m3fn

# (shape, dtype, label) at the sender and at the receiver, and the texts that name them.
DIFFERENT = {
    "longer": (((9,), F32, "x"), ((4,), F32, "x"), "float32 [9] of 'x' (36 bytes)", "float32 [4] of 'x' (16 bytes)"),
    "much longer": (
        ((300_001,), F32, ""),
        ((1,), F32, ""),
        "float32 [300001] (1200004 bytes)",
        "float32 [1] (4 bytes)",
    ),
    "shorter": (((4,), F32, "x"), ((9,), F32, "x"), "float32 [4] of 'x' (16 bytes)", "float32 [9] of 'x' (36 bytes)"),
    "nothing": (((0,), F32, ""), ((5,), F32, ""), "float32 [0] (0 bytes)", "float32 [5] (20 bytes)"),
    "something": (((5,), F32, ""), ((0,), F32, ""), "float32 [5] (20 bytes)", "float32 [0] (0 bytes)"),
    "dtype": (((8,), I16, ""), ((4,), F32, ""), "int16 [8] (16 bytes)", "float32 [4] (16 bytes)"),
    "dtype of no length": (((0,), I16, ""), ((0,), F8, ""), "int16 [0] (0 bytes)", "float8_e4m3fn [0] (0 bytes)"),
    "label": (((3,), F8, "keys"), ((3,), F8, "values"), "of 'keys' (3 bytes)", "of 'values' (3 bytes)"),
    "end of a long label": (((3,), F8, 200 * "é" + "0"), ((3,), F8, 200 * "é" + "1"), "éé", "ééé1' (3 bytes)"),
}
SHAPES = (((2, 3), F32, ""), ((3, 2), F32, ""), "float32 [2, 3] (24 bytes)", "float32 [3, 2] (24 bytes)")


def made(shape, dtype, value: float) -> torch.Tensor:
    return torch.full(shape, value).to(dtype)


def is_untouched(tensor: torch.Tensor) -> bool:
    return bool((tensor.to(torch.float64) == UNTOUCHED).all())


def collectives(local: str) -> Collectives:
    """The collectives of a new group: a failure ends the connections of a group."""
    comm = Collectives(dist.new_group())
    comm.use_shared_memory(local)
    assert isinstance(comm.transport_of(torch.empty(1)), TwoLevels) or local != "auto" or dist.get_world_size() == 2
    return comm


def message_body(rank: int, world: int, case, local: str, late: int) -> list[str]:
    sent, expected, *_ = case
    comm = collectives(local)
    src, dst = world - 1, 0
    if rank == late:
        time.sleep(0.5)
    if rank == src:
        tensor = made(sent[0], sent[1], 1.0)
        texts = [failure(lambda: comm.message(tensor, src, dst, tag=5, label=sent[2]).wait())]
    elif rank == dst:
        tensor = made(expected[0], expected[1], UNTOUCHED)
        texts = [failure(lambda: comm.message(tensor, src, dst, tag=5, label=expected[2]).wait())]
        assert is_untouched(tensor)
    else:
        return []
    # Later messages fail at once, with the same reason.
    texts.append(failure(lambda: comm.message(made((2,), F32, 0.0), dst, src, tag=6).wait()))
    return texts


@pytest.mark.parametrize("name", [*DIFFERENT, "shape"])
@pytest.mark.parametrize(("world", "local", "late"), [(2, "off", 0), (2, "off", 1), (3, "off", 2)])
def test_both_ends_of_a_message_that_differs_name_both_values(run_ranks, name, world, local, late) -> None:
    case = {**DIFFERENT, "shape": SHAPES}[name]
    found = run_ranks(world, message_body, case, local, late)
    for rank in (0, world - 1):
        for text in found[rank]:
            for part in (f"rank {world - 1} sends ", case[2], "rank 0 expects ", case[3]):
                # A sender whose message has no elements is done before the receiver has compared.
                assert part in text or (text == "" and rank and case[0][0] == (0,)), (
                    f"{name}: rank {rank} says {text!r}, without {part!r}"
                )


def shift_body(rank: int, world: int, case, distance: int, local: str) -> list[str]:
    sent, expected, *_ = case
    comm = collectives(local)
    shape, dtype, label = sent if rank == 0 else expected
    given = made(shape, dtype, 1.0)
    received = made(expected[0], expected[1], UNTOUCHED)
    text = failure(lambda: comm.shift(given, received, distance, label=label).wait())
    if rank == distance % world:
        assert is_untouched(received)
    later = failure(lambda: comm.shift(given, received, distance, label=label).wait())
    return [text, later]


@pytest.mark.parametrize("name", [name for name in DIFFERENT if "label" not in name])
@pytest.mark.parametrize(("world", "distance", "local"), [(2, 1, "off"), (3, 1, "off"), (3, -1, "off")])
def test_ranks_of_a_shift_that_differs_name_both_values(run_ranks, name, world, distance, local) -> None:
    case = DIFFERENT[name]
    found = run_ranks(world, shift_body, case, distance, local)
    to = distance % world
    want = (f"rank 0 sends {case[2]}", f"rank {to} expects {case[3]}")
    for rank, texts in enumerate(found):
        # The ranks between which nothing differs may end this shift well, and so may the sender of no elements. Nobody
        # ends the next one well.
        told = texts if rank == to else ["".join(texts)]
        for text in told:
            assert all(part in text for part in want), f"{name}: rank {rank} says {texts}, and not {want}"


def under_way_body(rank: int, world: int, distance: int, local: str) -> str:
    """Only rank 0 sends something else, and its message is short; the others' are long, and still under way then."""
    comm = collectives(local)
    received = made((1 << 24,), F32, UNTOUCHED)
    given = made((3,) if rank == 0 else (1 << 24,), F32, 1.0)
    return failure(lambda: comm.shift(given, received, distance).wait())


@pytest.mark.parametrize(("world", "distance", "local"), [(3, 1, "off"), (3, -1, "off"), (4, -1, "off")])
def test_a_difference_ends_nobodys_message_in_the_middle(run_ranks, world, distance, local) -> None:
    """gloo forgets messages of which a part had come: their receivers would wait for its time limit."""
    texts = run_ranks(world, under_way_body, distance, local)
    assert "rank 0 sends float32 [3]" in texts[distance % world], texts


def splits_body(rank: int, world: int, to, of, local: str, late: int, twice: bool) -> list[str]:
    """``to[a][b]``: what a means to send to b; ``of[b][a]``: what b expects from a."""
    comm = collectives(local)
    if rank == late:
        time.sleep(0.5)
    flat = torch.full((sum(to[rank]),), rank, dtype=I16)
    out = torch.full((sum(of[rank]),), UNTOUCHED, dtype=I16)
    return [
        failure(lambda: comm.all_to_all(flat, out, to[rank], of[rank], label="rows").wait()) for _ in range(1 + twice)
    ]


@pytest.mark.parametrize(("world", "local"), [(2, "off"), (3, "off"), (4, "off")])
@pytest.mark.parametrize(("src", "dst"), [(0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize(("n_sent", "n_expected"), [(5, 3), (3, 5), (0, 1), (1, 0), (100_003, 2)])
def test_all_ranks_name_both_numbers_of_splits_that_differ(
    run_ranks, world, local, src, dst, n_sent, n_expected
) -> None:
    to, of = [[2] * world for _ in range(world)], [[2] * world for _ in range(world)]
    to[src][dst], of[dst][src] = n_sent, n_expected
    want = f"rank {src} sends {n_sent} elements to rank {dst}, which expects {n_expected}"
    for rank, texts in enumerate(run_ranks(world, splits_body, to, of, local, world - 1, True)):
        assert all(want in text for text in texts), f"rank {rank} says {texts} instead of {want!r}"


def mixed_body(rank: int, world: int) -> list[str]:
    comm = collectives("off")
    flat = torch.zeros(2 * world, dtype=I16 if rank == 1 else torch.uint16)
    label = "rows" if rank == 1 else "columns"
    return [failure(lambda: comm.all_to_all(flat, flat.clone(), [2] * world, [2] * world, label=label).wait())]


def test_all_ranks_name_dtypes_and_labels_of_blocks_that_differ(run_ranks) -> None:
    want = "rank 1 has blocks of int16 of 'rows', rank 0 of uint16 of 'columns'"
    for rank, (text,) in enumerate(run_ranks(3, mixed_body)):
        assert want in text, f"rank {rank} says {text!r} instead of {want!r}"


def numbered_body(rank: int, world: int) -> list[str]:
    """A group whose ranks have other numbers in the world."""
    group = dist.new_group([world - 1, 1])  # rank 0 of the group is rank 1 of the world
    if rank == 0:
        return []
    comm = Collectives(group)
    tensor = torch.zeros(3 if comm.rank == 0 else 4)
    return [failure(lambda: comm.message(tensor, 0, 1).wait())]


def test_ranks_have_their_numbers_in_the_world(run_ranks) -> None:
    want = "rank 1 sends float32 [3] (12 bytes), rank 2 expects float32 [4] (16 bytes)"
    _, *found = run_ranks(3, numbered_body)
    assert all(want in text for (text,) in found), f"{found} instead of {want!r}"


def near_body(rank: int, world: int) -> list[str]:
    """A shift in which rank 1 expects more from rank 0, of its host, than comes; and then a collective."""
    comm = collectives("auto")
    received = torch.zeros(9 if rank == 1 else 4)
    return [failure(lambda: comm.shift(torch.zeros(4), received, 1, label="x").wait()), failure(comm.barrier)]


def hosts_body(rank: int, world: int) -> list[list[str]]:
    to = [[2] * world for _ in range(world)]
    of = [[2] * world for _ in range(world)]
    to[0][2] = 9
    return [
        message_body(rank, world, DIFFERENT["longer"], "auto", 0),
        near_body(rank, world),
        splits_body(rank, world, to, of, "auto", -1, False),
    ]


def test_messages_between_hosts_are_compared_too(run_ranks) -> None:
    if why_no_hosts():
        pytest.skip(why_no_hosts())
    found = run_ranks(3, hosts_body, hosts=(0, 0, 1))
    assert all("rank 2 sends float32 [9]" in text for rank in (0, 2) for text in found[rank][0]), found
    assert "rank 0 (process" in found[1][1][0] and "sends shape [4], rank 1 expects [9]" in found[1][1][0], found
    assert all(each[1][-1] for each in found), f"ranks of all hosts learn of a difference inside a host: {found}"
    assert all("rank 0 sends 9 elements to rank 2, which expects 2" in each[2][0] for each in found), found


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_messages_arrive_in_order(rank: int, world: int) -> None:
    """Many messages and shifts of several lengths under way at once, in one order, waited for in another."""
    comm = collectives("off")
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 4, (40,), generator=generator).tolist()
    pending = []
    for i, length in enumerate(lengths):
        if i % 3 == 0:
            received = torch.full((length,), -1, dtype=torch.int64)
            sent = torch.full((length,), 100 * rank + i)
            pending.append((comm.shift(sent, received, 1, label=str(i)), received, 100 * ((rank - 1) % world) + i))
        elif rank < 2:
            src = i % 2
            tensor = torch.full((length,), i if rank == src else -1)
            pending.append((comm.message(tensor, src, 1 - src, tag=i % 2), tensor, i))
    for work, tensor, want in reversed(pending):
        work.wait()
        assert tensor.tolist() == [want] * tensor.numel(), f"rank {rank}: {tensor.tolist()} instead of {want}"
