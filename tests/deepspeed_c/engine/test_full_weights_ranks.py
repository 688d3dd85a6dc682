"""``engine.iter_full_weights`` where ranks go their own ways: consumers that stop, changes, errors, tensors that have
ended. Each call of ``run_ranks`` has a limit, so a rank that is left waiting is a failure."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deepspeed_c.engine.full_weights import _stops_of
from deepspeed_c.errors import StateError
from deepspeed_c.moe.layer import MoE
from tests.ranks import run_ranks
from tests.toys import llama
from tests.training import config, engine_of, step

SMALL = {"reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 30}
LIMIT_SECONDS = 60.0
KINDS = {
    "stage3": (2, 3, {}),
    "joint": (2, 3, {"comm": {"local": "shm", "zero_copy_gather": True}}),
    "tp": (2, 0, {"tensor_parallel": {"autotp_size": 2}}),
    "tp-stage3": (4, 3, {"tensor_parallel": {"autotp_size": 2}}),
    "experts": (2, 2, {}),
}


def make_engine(kind: str) -> Any:
    _, stage, sections = KINDS[kind]
    torch.manual_seed(0)
    model: torch.nn.Module
    if kind == "experts":
        experts = MoE(8, torch.nn.Linear(8, 8), 4, ep_size=2, drop_tokens=False)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), experts, torch.nn.Linear(8, 3))
    else:
        model = llama(1, vocab_size=31, max_position_embeddings=64)
    return engine_of(model, config(stage, zero=SMALL if stage == 3 else {}, **sections))


class _NoMore(Exception):
    pass


def _until(engine: Any, n: int, how: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies of the first ``n`` tensors; then the loop ends as ``how`` says."""
    weights = engine.iter_full_weights("1kB")
    taken = 0
    try:
        if how == "close" and n == 0:
            weights.close()
        for name, tensor in weights:
            if taken == n:
                if how == "raise":
                    raise _NoMore
                break
            taken += 1
            yield name, tensor.clone()
    except _NoMore:
        del weights
    if how == "close":
        weights.close()


def stop_body(rank: int, world: int, kind: str) -> Any:
    with make_engine(kind) as engine:
        want = [(name, tensor.clone()) for name, tensor in engine.iter_full_weights()]
        hows = ("break", "raise", "close")
        for last in range(len(want) + 1):
            for who in range(world):
                n = last if rank == who else len(want)
                found = list(_until(engine, n, hows[(last + who) % len(hows)]))
                assert [name for name, _ in found] == [name for name, _ in want[:n]], (last, who)
                for (name, tensor), (_, value) in zip(found, want):
                    assert torch.equal(tensor, value), (name, last, who)
        # All ranks stop, each at another place.
        for shift in range(world):
            n = (rank + shift) % world * 2
            assert len(list(_until(engine, n, "break"))) == n
        fetcher = engine._fetcher
        return len(want), [] if fetcher is None else fetcher.live()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_may_stop_at_each_place(kind):
    for n, held in run_ranks(KINDS[kind][0], stop_body, kind, timeout=LIMIT_SECONDS):
        assert n > 6
        assert held == []


def change_body(rank: int, world: int, kind: str) -> Any:
    outcome = []
    with make_engine(kind) as engine:
        entries = engine.iter_full_weights().entries
        for place in range(len(entries)):
            for who in range(world):
                taken, said = 0, ""
                weights = engine.iter_full_weights("1kB")
                try:
                    for _ in weights:
                        taken += 1
                        # Ranks change weights together. One rank alone notices it earlier than the others.
                        engine._fetcher.n_writes += rank == who and taken == place + 1
                except StateError as error:
                    said = str(error)
                weights.close()
                outcome.append((place, who, taken, said))
        return len(entries), sorted(weights._meetings), outcome, engine._fetcher.live()


@pytest.mark.parametrize("kind", ["stage3", "joint", "tp-stage3"])
def test_a_change_at_each_place_ends_the_iteration_of_all_ranks(kind):
    found = run_ranks(KINDS[kind][0], change_body, kind, timeout=LIMIT_SECONDS)
    for rank, (n, meetings, outcome, live) in enumerate(found):
        assert live == []
        assert bool(meetings) == (kind != "joint"), meetings
        for place, who, taken, said in outcome:
            later = [at for at in meetings if at > place]
            if rank == who:
                # The last tensor was valid, and no further one was asked for in vain.
                assert taken == place + 1, (place, who, taken)
                assert bool(said) == (place + 1 < n), (place, who, said)
            else:
                assert taken == (later[0] if later else n), (place, who, taken, meetings)
                assert bool(said) == bool(later), (place, who, said)
            if said:
                assert f"changed on rank {who}" in said, said


def between_body(rank: int, world: int) -> Any:
    """Steps of all ranks at each place, so that units are held on all of them when weights are written."""
    tokens = torch.arange(3, 8)[None] + rank
    with make_engine("stage3") as engine:
        n = len(engine.iter_full_weights().entries)
        for place in range(n + 1):
            weights = engine.iter_full_weights("1kB")
            for _ in range(place):
                next(weights)
            step(engine, input_ids=tokens, labels=tokens)
            with pytest.raises(StateError if place < n else StopIteration):
                next(weights)
            with pytest.raises(StopIteration):
                next(weights)
        return engine._fetcher.live()


def test_a_step_at_each_place_is_noticed_by_all_ranks():
    assert run_ranks(2, between_body, timeout=LIMIT_SECONDS) == [[], []]


def failing_body(rank: int, world: int, kind: str) -> Any:
    with make_engine(kind) as engine:
        names = [entry.name for entry in engine.iter_full_weights().entries]
        for place in range(len(names)):
            weights = engine.iter_full_weights("1kB")
            found = []
            if rank == 0:
                weights._pieces[place] = weights._pieces[place]._replace(make=_fail)
                with pytest.raises(_NoMore):
                    found.extend(name for name, _ in weights)
                with pytest.raises(StopIteration):
                    next(weights)
            else:
                found.extend(name for name, _ in weights)
                assert found == names, (place, found)
        return None if engine._fetcher is None else engine._fetcher.live()


def _fail(whole: Any) -> Any:
    raise _NoMore


@pytest.mark.parametrize("kind", ["stage3", "tp"])
def test_a_rank_that_cannot_make_a_tensor_leaves_no_rank_waiting(kind):
    assert all(not held for held in run_ranks(2, failing_body, kind, timeout=LIMIT_SECONDS))


def ended_body(rank: int, world: int) -> Any:
    with make_engine("stage3") as engine:
        want = {name: tensor.clone() for name, tensor in engine.iter_full_weights()}
        kept = list(engine.iter_full_weights("1kB"))
        said = set()
        for name, tensor in kept:
            reads = [
                lambda t: t.shape,
                lambda t: t + 1,
                lambda t: torch.stack([t]),
                lambda t: torch.zeros(2).copy_(t),
                torch.Tensor.clone,
                torch.Tensor.numpy,
                copy.deepcopy,
                pickle.dumps,
                repr,
            ]
            for read in reads:
                with pytest.raises(StateError) as caught:
                    read(tensor)
                said.add(str(caught.value))
            assert isinstance(tensor, torch.Tensor) and name in str(caught.value)
        assert len(said) == len(kept)
        # A view that the caller has made keeps the memory, and nothing else is written there.
        views = {name: tensor[:1] for name, tensor in engine.iter_full_weights("1kB")}
        for _ in engine.iter_full_weights("1kB"):
            pass
        for name, view in views.items():
            assert torch.equal(view, want[name][:1]), name
        # The last tensor of a loop that was left stays valid.
        for name, tensor in engine.iter_full_weights("1kB"):
            if name == kept[5][0]:
                break
        for _ in engine.iter_full_weights("1kB"):
            pass
        assert torch.equal(tensor, want[name])
        with torch.inference_mode():
            for name, tensor in engine.iter_full_weights("1kB"):
                assert torch.equal(tensor, want[name])
        return min(said)


def test_a_tensor_ends_when_the_next_one_is_asked_for():
    for said in run_ranks(2, ended_body, timeout=LIMIT_SECONDS):
        assert "tensor.clone()" in said, said


def reuse_body(rank: int, world: int, folder: str) -> Any:
    with make_engine("stage3") as engine:
        pool = engine._fetcher.means.pool
        made = []
        allocate = pool._allocate
        pool._allocate = lambda n_bytes, device: made.append(n_bytes) or allocate(n_bytes, device)
        for turn in range(4):
            if turn == 2:
                made.clear()  # the pool has what it needs
            for name, tensor in engine.iter_full_weights("30kB"):
                pass
            engine.send_weights(lambda name, tensor: None, changed_only=False)
            engine.send_weights(folder, changed_only=False)
        assert name and isinstance(tensor, torch.Tensor)
        return made


def test_memory_is_used_again_while_the_loop_s_variable_lives(tmp_path):
    assert run_ranks(2, reuse_body, str(tmp_path), timeout=LIMIT_SECONDS) == [[], []]


def test_stops_hold_what_pieces_need_within_the_limit():
    dice = random.Random(7)
    for _ in range(3000):
        n_units = dice.randint(1, 7)
        memory = [dice.choice([0, 1, 2, 3, 5, 8]) for _ in range(n_units)]
        needs = [dice.sample(range(n_units), dice.randint(0, min(2, n_units))) for _ in range(dice.randint(0, 11))]
        limit = dice.randint(0, 13)
        stops = _stops_of(needs, memory.__getitem__, limit)
        held: set[int] = set()
        for number, units in enumerate(needs):
            stop = stops.pop(number, None)
            if stop is not None:
                assert number == 0 or stop.started, (needs, memory, limit)
                assert held.issuperset(stop.ended) and held.isdisjoint(stop.started)
                held = held.difference(stop.ended).union(stop.started)
                n_bytes = sum(memory[unit] for unit in held)
                assert n_bytes <= max(limit, sum(memory[unit] for unit in units)), (needs, memory, limit)
            assert held.issuperset(units), (needs, memory, limit, number)
        assert not stops
