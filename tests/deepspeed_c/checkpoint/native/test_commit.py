"""Crash safety: a save may be killed at any instant, and other processes may save and read meanwhile. Each name still
leads to a whole checkpoint, old or new."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepspeed_c import _C
from deepspeed_c.checkpoint.native import commit
from deepspeed_c.checkpoint.native.commit import apply_retention, read_latest, read_tags
from deepspeed_c.checkpoint.open import open_checkpoint
from deepspeed_c.errors import CheckpointError
from tests.deepspeed_c.checkpoint.native.crashing import DONE, FAILED, Savers, read_back, values_of
from tests.ranks import run_ranks
from tests.waits import ended

KILLED = -9


@pytest.fixture(scope="module")
def savers():
    savers = Savers()
    yield savers
    savers.close()


@pytest.fixture
def folder(tmp_path):
    """A folder where fsync costs nothing, if the system has one. The order of calls is under test, not the disk."""
    if os.access("/dev/shm", os.W_OK):
        path = tempfile.mkdtemp(prefix="dsc_test_commit_", dir="/dev/shm")
        yield os.path.join(path, "ckpt")
        shutil.rmtree(path, ignore_errors=True)
    else:
        yield str(tmp_path / "ckpt")


def instants(calls: list[dict], stride: int, seed: int, n_random: int) -> list[dict]:
    """The instants of kills: before each ``stride``-th call of each rank and after its last call, and ``n_random``
    times spread over the duration of the save and a little more."""
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
    """Kill a save in a folder that has the checkpoint ``version - 1``, and check the folder. Return (version found,
    ranks killed)."""
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
    # Every name leads to a whole checkpoint, also the new name before `latest` points to it.
    for name in os.listdir(folder):
        if not name.startswith(".") and os.path.isdir(os.path.join(folder, name)):
            assert read_back(folder, name) in (version - 1, version), f"{name}, {about}"
    if codes == [DONE] * world:
        assert found == version, about
    return found, codes.count(KILLED)


# These cases together have more than 200 instants.
@pytest.mark.parametrize(
    ("world", "is_same_tag", "has_exchange", "stride", "n_random"),
    [
        (1, False, True, 1, 12), (1, True, True, 1, 12), (1, True, False, 2, 0), (2, False, True, 2, 12),
        (2, True, True, 2, 12),
    ],
)  # fmt: skip
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
        # Each crash finds a folder with the whole checkpoint `version`.
        new_tag = tag if is_same_tag else f"crash{i}"
        found, killed = crash_at(savers, folder, world, version + 1, new_tag, instant, **order)
        seen["new" if found == version + 1 else "old"] += 1
        n_killed += killed > 0
        # The next save succeeds, and removes the files of killed saves.
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
    """Saves in this process alone."""
    from deepspeed_c.checkpoint.native import state
    from deepspeed_c.checkpoint.native.ranks import Ranks
    from deepspeed_c.checkpoint.native.save import Contents, Destination, OwnedPiece, save

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


# -- several processes at a time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_exchange", [True, False])
def test_readers_see_whole_versions_while_a_tag_is_overwritten(folder, monkeypatch, has_exchange):
    """Three readers, by tag and by `latest`, and a writer. The values and the state that a reader gets come from one
    save. Each read finds a version, never an older one than the read before."""
    if not has_exchange:
        monkeypatch.setattr(_C, "exchange_paths", lambda one, other: False)
    save_here(folder, "tag", 1)
    stop, problems, counts = threading.Event(), [], [0, 0, 0]

    def read(i: int, tag: str | None) -> None:
        last = 1
        while not stop.is_set() and not problems:
            try:
                found = read_back(folder, tag)
            except (AssertionError, CheckpointError) as error:
                problems.append(f"reader {i} after version {last}: {error}")
                return
            if found < last:
                problems.append(f"reader {i} saw {found} after {last}")
            last = found
            counts[i] += 1

    readers = [threading.Thread(target=read, args=(i, tag)) for i, tag in enumerate(("tag", None, "tag"))]
    for reader in readers:
        reader.start()
    version = 1
    deadline = time.monotonic() + 300
    while not problems and (version < 40 or min(counts) < 10) and time.monotonic() < deadline:
        version += 1
        save_here(folder, "tag", version)
    stop.set()
    for reader in readers:
        reader.join(200)
    assert problems == [] and min(counts) >= 10, (problems, counts)
    assert read_back(folder, "tag") == version
    assert sorted(set(os.listdir(folder)) - {"zero_to_fp32.py"}) == ["latest", "tag"]


def open_while(folder: str, tag: str | None, steps: dict[int, Callable[[], None]]) -> tuple[int, int]:
    """Opens a checkpoint, and runs each of ``steps`` just before the system call with its number. Returns (the version,
    the number of system calls)."""
    n_calls = 0

    def count(frame, event, function) -> None:
        nonlocal n_calls
        if event == "c_call" and (function.__module__ in ("posix", "io", "_io") or "read_blocks" in function.__name__):
            sys.setprofile(None)
            steps.get(n_calls, lambda: None)()
            n_calls += 1
            sys.setprofile(count)

    sys.setprofile(count)
    try:
        found = read_back(folder, tag)
    finally:
        sys.setprofile(None)
    return found, n_calls


@pytest.mark.parametrize("tag", ["tag", None])
@pytest.mark.parametrize("gap", [0, 1, 2, 5])
def test_a_tag_is_overwritten_between_any_two_system_calls_of_a_reader(folder, tag, gap):
    """A save happens before each system call of the reader. If ``gap`` is 0, the save exchanges names at once.
    Otherwise the name does not exist while the reader makes ``gap`` calls."""
    version, seen = 1, {"old": 0, "new": 0}
    save_here(folder, "tag", version)
    _, n_calls = open_while(folder, tag, {})
    assert n_calls > 20
    for at in range(n_calls):
        old = os.path.join(folder, commit._hidden_name("tag", "old"))
        steps = (
            save_in_two_steps(folder, version + 1, old) if gap else [lambda v=version + 1: save_here(folder, "tag", v)]
        )
        found, _ = open_while(folder, tag, {at + i * gap: step for i, step in enumerate(steps)})
        assert found in (version, version + 1), (found, version, at)
        seen["old" if found == version else "new"] += 1
        if os.path.exists(old):  # the reader ended before the second step
            steps[1]()
        version += 1
        assert read_back(folder, tag) == version
    assert seen["old"] > 0 and seen["new"] > 0, seen


def save_in_two_steps(folder: str, version: int, old: str) -> list[Callable[[], None]]:
    """A save in two calls, as on a file system that cannot exchange names. Between them the name ``tag`` does not
    exist."""

    def begin() -> None:
        save_here(folder, "aside", version)
        os.rename(f"{folder}/tag", old)
        commit.write_latest(folder, "tag")

    def end() -> None:
        os.rename(f"{folder}/aside", f"{folder}/tag")
        shutil.rmtree(old)

    return [begin, end]


def save_often(rank: int, world: int, folder: str, n: int, is_same_tag: bool, keep_last: int | None) -> list[str]:
    """Each rank acts as a run of its own. The run of rank 0 has trained further, and all versions differ."""
    problems = []
    for i in range(n):
        version = (1000 if rank == 0 else 1) + i
        tag = "tag" if is_same_tag else f"run{rank}_{i}"
        save_here(folder, tag, version, keep_last=keep_last)
        # `latest` leads to a whole checkpoint at each moment, whatever the other run does.
        latest = None
        while latest != read_latest(folder):
            latest = read_latest(folder)
            try:
                read_back(folder, latest)
            except (AssertionError, CheckpointError) as error:
                if latest == read_latest(folder):  # otherwise it was whole, and was deleted since
                    problems.append(f"run {rank}, save {i}, latest {latest}: {error}")
                latest = None
        # The newest checkpoint of rank 0's run is whole too. The newest one of the other run may be deleted once
        # rank 0's run has two newer checkpoints.
        if not is_same_tag and (rank == 0 or keep_last is None) and read_back(folder, tag) != version:
            problems.append(f"{tag} holds {read_back(folder, tag)}, not {version}")
    return problems


@pytest.mark.parametrize(("is_same_tag", "keep_last"), [(False, None), (True, None), (False, 2), (True, 1)])
def test_two_runs_save_into_one_folder(folder, is_same_tag, keep_last):
    n = 25
    assert run_ranks(2, save_often, folder, n, is_same_tag, keep_last) == [[], []]
    tags = {name for name in os.listdir(folder) if name not in ("latest", "zero_to_fp32.py")}
    assert read_latest(folder) in tags
    versions = {name: read_back(folder, name) for name in tags}
    if is_same_tag:
        assert versions in ({"tag": 1000 + n - 1}, {"tag": n})
    elif keep_last is None:
        assert versions == {f"run{rank}_{i}": first + i for rank, first in ((0, 1000), (1, 1)) for i in range(n)}
    else:
        assert {f"run0_{n - 1}", f"run0_{n - 2}"} <= tags, "the two last ones of the run that is trained further"


# -- retention ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "expected"),
    [
        (None, None, [1, 2, 3, 4, 5, 6, 7]), (None, 3, [1, 2, 3, 4, 5, 6, 7]), (1, None, [7]), (2, None, [6, 7]),
        (7, None, [1, 2, 3, 4, 5, 6, 7]), (100, None, [1, 2, 3, 4, 5, 6, 7]), (1, 3, [3, 6, 7]), (2, 3, [3, 6, 7]),
        (1, 7, [7]), (3, 1, [1, 2, 3, 4, 5, 6, 7]),
    ],
)  # fmt: skip
def test_retention(folder, keep_last, keep_every, expected):
    for step in range(1, 8):
        save_here(folder, f"s{step}", step, keep_last=keep_last, keep_every=keep_every)
    assert steps_in(folder) == expected


def steps_in(folder: str) -> list[int]:
    assert not any(name.startswith(".") for name in os.listdir(folder)), os.listdir(folder)
    return sorted(manifest.counters["global_steps"] for _, manifest in read_tags(folder)[0])


def written(folder: str, tag: str, seconds_ago: float) -> None:
    at = time.time() - seconds_ago
    os.utime(os.path.join(folder, tag, "manifest.json"), (at, at))


def test_what_retention_leaves_alone(folder):
    for step in (10, 20, 30):
        save_here(folder, f"s{step}", step)
        written(folder, f"s{step}", 1000 - step)
    # The checkpoint that `latest` names stays, however old it is.
    save_here(folder, "s40", 40, keep_last=1, save_latest=False)
    assert steps_in(folder) == [30, 40] and read_latest(folder) == "s30"
    # A run that went back to step 30 neither deletes nor counts its earlier checkpoints of later steps.
    save_here(folder, "s35", 35, keep_last=2)
    assert steps_in(folder) == [30, 35, 40]
    # Another run, which has trained less, has newer checkpoints.
    written(folder, "s30", 500)
    written(folder, "s35", 400)
    written(folder, "s40", 300)
    save_here(folder, "slow7", 7, save_latest=False)
    save_here(folder, "s50", 50, keep_last=2)
    assert steps_in(folder) == [7, 40, 50]
    # It stays until it is older than all checkpoints that are kept.
    written(folder, "slow7", 350)
    save_here(folder, "s60", 60, keep_last=3)
    assert steps_in(folder) == [40, 50, 60]
    # Incomplete checkpoints and foreign folders stay.
    for name in ("mine", "empty"):
        os.mkdir(os.path.join(folder, name))
    Path(folder, "mine", "notes.txt").write_text("precious")
    Path(folder, "s40", "manifest.crc32c").write_text("00000000")
    save_here(folder, "s70", 70, keep_last=1)
    assert sorted(set(os.listdir(folder)) - {"latest", "zero_to_fp32.py"}) == ["empty", "mine", "s40", "s70"]


def test_retention_waits_for_nobody(folder):
    """Another save has given the tag its name and not yet written `latest`. Nothing is deleted then; the next save
    deletes instead."""
    for step in (1, 2):
        save_here(folder, f"s{step}", step)
    holder = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_SH)
        save_here(folder, "s3", 3, keep_last=1)
        assert steps_in(folder) == [1, 2, 3]
    finally:
        os.close(holder)
    save_here(folder, "s4", 4, keep_last=1)
    assert steps_in(folder) == [4]


def test_a_commit_waits_for_retention_but_not_for_ever(folder, monkeypatch, caplog):
    save_here(folder, "s1", 1)
    holder = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        begin = time.monotonic()
        threading.Timer(0.3, fcntl.flock, (holder, fcntl.LOCK_UN)).start()
        save_here(folder, "s2", 2)
        assert time.monotonic() - begin >= 0.3
        fcntl.flock(holder, fcntl.LOCK_EX)
        monkeypatch.setattr(commit, "LOCK_SECONDS", 0.05)
        save_here(folder, "s3", 3, keep_last=1)
    finally:
        os.close(holder)
    assert read_back(folder, None) == 3 and steps_in(folder) == [1, 2, 3]

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    save_here(folder, "s4", 4, keep_last=1)
    assert steps_in(folder) == [4]


def test_retention_in_deepspeeds_layout(folder):
    """The checkpoints are converted from ours by the writer of `"format": "deepspeed"`."""
    from deepspeed_c.checkpoint.formats.deepspeed.write import write_deepspeed

    ours = folder + "_ours"
    save_here(ours, "s1", 1)
    for step in (10, 20, 30, 40):
        save_here(ours, "s1", step)
        with open_checkpoint(ours) as source:
            write_deepspeed(source, folder, tag=f"d{step}", world_size=2, stage=0, dtype=torch.float32)
    save_here(folder, "s5", 5)
    now = time.time()
    for age, tag in ((50, "s5"), (40, "d10"), (30, "d20"), (20, "d30"), (10, "d40")):
        for file in Path(folder, tag).iterdir():
            os.utime(file, (now - age, now - age))
    # This file makes the checkpoint look as if one of two ranks were missing.
    Path(folder, "d20", "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    os.utime(Path(folder, "d20", "zero_pp_rank_0_mp_rank_00_optim_states.pt"), (now - 30, now - 30))
    assert apply_retention(folder, "s5", 1, None) == []
    assert apply_retention(folder, "d40", 1, None) == [], "only with counts_deepspeed, in a run that writes that layout"
    assert sorted(apply_retention(folder, "d40", 2, None, counts_deepspeed=True)) == ["d10"], "s5 is named by latest"
    assert apply_retention(folder, "d40", 1, 15, counts_deepspeed=True) == []
    assert apply_retention(folder, "d40", 1, None, counts_deepspeed=True) == ["d30"], "d20 is not complete"
    shutil.rmtree(ours)


# -- files of dead saves -----------------------------------------------------------------------------------------------


def test_folders_of_the_dead_of_the_living_and_of_strangers(folder):
    save_here(folder, "tag", 1)
    dead = subprocess.Popen(["true"])
    ended(dead)
    sleeper = subprocess.Popen(["sleep", "1000"])
    try:
        host, me, start = commit._host(), os.getpid(), commit._start_of(os.getpid())
        alive = commit._start_of(sleeper.pid)
        nonce = "0123456789abcdef"
        gone = [
            f".tag.{nonce}.{host}.{dead.pid}-1.tmp", f".tag.{nonce}.{host}.{dead.pid}-1.old",
            f".other.{nonce}.{host}.{dead.pid}-1.gone", f".latest.{nonce}.{host}.{dead.pid}-1.tmp",
            f".tag.{nonce}.{host}.{sleeper.pid}-{alive + 1}.tmp",  # another process has its id now
        ]  # fmt: skip
        stays = [
            f".a.b c.{nonce}.{host}.{me}-{start}.tmp",
            f".tag.{nonce}.{host}.{sleeper.pid}-{alive}.tmp",
            f".tag.{nonce}.{host}.{sleeper.pid}-{alive}.gone",
            f".tag.{nonce}.{host}2.{dead.pid}-1.tmp",
            f".tag.{nonce}.{host}2.{dead.pid}-1.old",
            f".tag.{nonce[1:]}.{host}.{dead.pid}-1.tmp",  # not a name of ours
            ".hidden",
        ]
        for name in (*gone, *stays):
            path = Path(folder, name)
            if ".latest." in name:
                path.write_text("tag")
            else:
                path.mkdir()
                (path / "file").touch()
        # This is the only checkpoint with its tag, so it gets its name back.
        shutil.copytree(os.path.join(folder, "tag"), os.path.join(folder, f".lost.{nonce}.{host}.{dead.pid}-1.old"))
        save_here(folder, "next", 2)
        left = set(os.listdir(folder)) - {"latest", "zero_to_fp32.py"}
        assert left == {"tag", "next", "lost", *stays}, left
        assert [read_back(folder, tag) for tag in ("tag", "next", "lost")] == [1, 2, 1]
    finally:
        sleeper.kill()
        ended(sleeper)


def save_for_deepspeed(rank: int, world: int, folder: str, stage: int) -> None:
    from tests.deepspeed_c.engine.test_engine import make, train_step

    with make(stage, checkpoint={"format": "deepspeed", "keep_last": 2, "keep_every": 3}) as engine:
        for step in range(6):
            train_step(engine, step, rank)
            engine.save_checkpoint(folder)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_that_writes_deepspeeds_layout_keeps_the_last_ones(folder, stage):
    run_ranks(2, save_for_deepspeed, folder, stage)
    assert sorted(set(os.listdir(folder)) - {"latest", "zero_to_fp32.py"}) == [f"global_step{n}" for n in (3, 5, 6)]
