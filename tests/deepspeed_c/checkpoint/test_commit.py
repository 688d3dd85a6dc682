"""Crash safety: whatever is killed at whatever instant, a name stands for a whole checkpoint, old or new."""

from __future__ import annotations

import os
import random
import shutil
import tempfile

import pytest

from deepspeed_c.checkpoint.commit import read_latest
from tests.deepspeed_c.checkpoint.crashing import DONE, FAILED, Savers, read_back, values_of

KILLED = -9


@pytest.fixture(scope="module")
def savers():
    savers = Savers()
    yield savers
    savers.close()


@pytest.fixture
def folder(tmp_path):
    """A folder where fsync costs nothing, if there is one: what is tested is the order of calls, not the disk."""
    if os.access("/dev/shm", os.W_OK):
        path = tempfile.mkdtemp(prefix="dsc_test_commit_", dir="/dev/shm")
        yield os.path.join(path, "ckpt")
        shutil.rmtree(path, ignore_errors=True)
    else:
        yield str(tmp_path / "ckpt")


def instants(calls: list[dict], stride: int, seed: int, n_random: int) -> list[dict]:
    """Before each call (or each ``stride``-th) of each rank, and after its last; then moments of the clock, spread over the save and a little more."""
    found = []
    for victim, counted in enumerate(calls):
        n_calls = len(counted["names"])
        for kill in {*range(n_calls % stride, n_calls, stride), n_calls}:
            is_before = kill < n_calls
            found.append(
                {"victim": victim, "kill": min(kill, n_calls - 1), "is_before": is_before, "all": kill % 3 == 0}
            )
    rng = random.Random(seed)
    seconds = max(counted["seconds"] for counted in calls)
    for i in range(n_random):
        victim = rng.choice([None, *range(len(calls))])
        found.append({"victim": victim, "after": 1.2 * seconds * (i + rng.random()) / n_random})
    return found


def crash_at(savers, folder, world, version, tag, instant, **order) -> tuple[int, int]:
    """One killed save over the checkpoint ``version - 1``; looks at what is there then. Returns (version found, ranks killed)."""
    made = savers.run(folder=folder, world=world, version=version, tag=tag, **order, **instant)
    codes = made["codes"]
    about = f"{order} {instant} ended with {codes}"
    assert all(code in (KILLED, DONE, FAILED) for code in codes), about
    latest = read_latest(folder)
    assert latest is not None, about
    found = read_back(folder, None)
    assert found in (version - 1, version), f"{found} after {version}, killed: {about}"
    if tag != latest:
        assert found == version - 1, about
    # Every name stands for a whole checkpoint: also the one that `latest` does not name yet.
    for name in os.listdir(folder):
        if not name.startswith(".") and os.path.isdir(os.path.join(folder, name)):
            assert read_back(folder, name) in (version - 1, version), f"{name}, {about}"
    if codes == [DONE] * world:
        assert found == version, about
    return found, codes.count(KILLED)


# The instants of these together are more than 200.
@pytest.mark.parametrize(
    ("world", "is_same_tag", "has_exchange", "stride", "n_random"),
    [
        (1, False, True, 1, 12),
        (1, True, True, 1, 12),
        (1, True, False, 2, 0),
        (2, False, True, 2, 12),
        (2, True, True, 2, 12),
    ],
)
def test_a_rank_is_killed(savers, folder, world, is_same_tag, has_exchange, stride, n_random):
    order = {"has_exchange": has_exchange}
    counted = []
    for tag in ("first", "first" if is_same_tag else "second"):
        made = savers.run(folder=folder, world=world, version=0, tag=tag, **order)
        assert made["codes"] == [DONE] * world, made
        counted = made["calls"]
    if not is_same_tag:
        shutil.rmtree(os.path.join(folder, "first"))
    seen = {"old": 0, "new": 0}
    n_killed, version, tag = 0, 0, "first" if is_same_tag else "second"
    for i, instant in enumerate(instants(counted, stride, world, n_random)):
        # As if each began in a folder with the whole checkpoint `version`.
        new_tag = tag if is_same_tag else f"crash{i}"
        found, killed = crash_at(savers, folder, world, version + 1, new_tag, instant, **order)
        seen["new" if found == version + 1 else "old"] += 1
        n_killed += killed > 0
        # The next save succeeds, and removes what the dead have left.
        version += 2
        tag = tag if is_same_tag else f"after{i}"
        save_here(folder, tag, version)
        assert read_back(folder, None) == version
        names = set(os.listdir(folder)) - {"zero_to_fp32.py"}
        assert names <= {"latest", tag, new_tag} | ({f"after{i - 1}"} if i else {"second"}), f"{names} after {instant}"
        if not is_same_tag:
            for name in names - {"latest", tag}:
                shutil.rmtree(os.path.join(folder, name))
    print(f"{sum(seen.values())} instants, {n_killed} with a killed rank, {seen}")
    assert n_killed > 0.8 * (sum(seen.values()) - n_random)
    assert seen["old"] > 0 and seen["new"] > 0, seen


def save_here(folder: str, tag: str, version: int, **extra) -> None:
    """A save by this process alone."""
    import torch

    from deepspeed_c.checkpoint import state
    from deepspeed_c.checkpoint.ranks import Ranks
    from deepspeed_c.checkpoint.save import Contents, Destination, OwnedPiece, save

    pieces = [
        OwnedPiece(kind, name, (len(values),), 0, torch.tensor(values))
        for (kind, name), values in values_of(version).items()
    ]
    contents = Contents(
        pieces=pieces,
        stage=0,
        names=["a", "b.c", "empty"],
        counters={"global_steps": version},
        common=state.pack({"client_state": {"version": version}}, "test"),
        mine=state.pack({"version": version, "rank": 0}, "test"),
    )
    save(contents, Destination(save_dir=folder, tag=tag, **extra), Ranks(0, [0]))
