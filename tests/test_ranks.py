"""Tests of the ranks fixture: results, every way in which a rank can fail, and the next call after a failure."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepspeed_c.errors import CommError
from deepspeed_c.logging import get_dist_msg, logger
from tests import ranks
from tests.ranks import RanksFailed, on_ranks, run_ranks
from tests.waits import ended, first_line

ROOT = Path(__file__).resolve().parent.parent
HANG_SECONDS = 4.0  # before a rank counts as hanging: enough for the other to return on a busy machine


class Payload:
    """A class of a test file, which must be the same class in the test and in the rank."""

    def __init__(self, number: int) -> None:
        self.number = number


def gather(rank, world, offset):
    parts = [torch.empty(1) for _ in range(world)]
    dist.all_gather(parts, torch.tensor([float(rank + offset)]))
    return torch.cat(parts).tolist(), (rank, world, dist.get_rank(), dist.get_world_size())


def pid(rank, world):
    return os.getpid()


def spoken(rank, world):
    """The prefix and the level of the package's logger."""
    return get_dist_msg("here", [-1]), logger.level


def environment(rank, world):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return [os.environ[name] for name in names], int(os.environ["MASTER_PORT"])


def has_preloaded(rank, world):
    return "tabnanny" in sys.modules


def dirty(rank, world):
    torch.manual_seed(7)
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["DSC_LEFT_BEHIND"] = "1"
    os.chdir("/")


def state(rank, world):
    return (
        torch.rand(3).tolist(), torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
        "DSC_LEFT_BEHIND" in os.environ, os.getcwd(),
    )  # fmt: skip


def echo(rank, world, payload):
    return Payload(payload.number + rank)


def raise_on(rank, world, failing):
    if rank == failing:
        raise CommError("the cable is out", where="rank 1", fix="plug it in")
    dist.barrier()  # never completes


def raise_unpicklable(rank, world):
    class Local(Exception):
        pass

    raise Local("not importable")


def exit_early(rank, world):
    sys.exit(3)


def hang_on(rank, world, hanging):
    if rank == hanging:
        time.sleep(1000)
    return rank


def die_by(rank, world, how):
    if rank == 1:
        if how == "exit":
            os._exit(17)
        if how == "segv":
            ctypes.string_at(0)
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def leave_grandchild(rank, world):
    process = subprocess.Popen(["sleep", "1000"])
    return process.pid


def survive(rank, world):
    """Rank 1 dies during the body. Rank 0 must be able to notice and report this."""
    if rank == 1:
        os._exit(1)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return type(error).__name__
    return "no error"


def leak_group(rank, world):
    dist.new_group([0])


def destroy_world(rank, world):
    dist.destroy_process_group()
    dist.init_process_group("gloo")  # with the address from the environment
    dist.barrier()
    return dist.get_world_size()


def is_alive(pid_: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid_}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_gone(pids):
    end = time.monotonic() + 200
    while (left := [p for p in pids if is_alive(p)]) and time.monotonic() < end:
        time.sleep(0.02)
    assert left == [], f"still alive: {left}"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_by_rank(world):
    expected = [([10.0 + r for r in range(world)], (rank, world, rank, world)) for rank in range(world)]
    assert run_ranks(world, gather, 10) == expected


def test_fixture_is_the_function(run_ranks):
    assert run_ranks is ranks.run_ranks


def test_processes_are_kept_between_calls():
    first = run_ranks(2, pid)
    assert run_ranks(2, pid) == first
    assert len({*first, os.getpid()}) == 3, first


def test_environment_is_that_of_a_launcher():
    (env0, port0), (env1, port1) = run_ranks(2, environment)
    assert env0 == ["0", "0", "2", "2", "127.0.0.1"]
    assert env1 == ["1", "1", "2", "2", "127.0.0.1"]
    assert port0 == port1 > 0


def test_every_body_starts_clean():
    before = run_ranks(2, state)
    run_ranks(2, dirty)
    assert run_ranks(2, state) == before
    torch.manual_seed(0)
    assert before[0] == (torch.rand(3).tolist(), 1, torch.float32, True, False, os.getcwd())


def test_classes_of_the_test_file_travel_both_ways():
    assert [p.number for p in run_ranks(2, echo, Payload(5))] == [5, 6]


def test_a_body_of_the_main_module_is_refused_before_a_rank_is_started(monkeypatch):
    def body(rank, world):
        raise AssertionError("it ran")

    monkeypatch.setattr(body, "__qualname__", "body")
    monkeypatch.setattr(body, "__module__", "__main__")
    before = ranks._groups.copy()
    with pytest.raises(TypeError, match="body is of __main__.*put it into a module"):
        run_ranks(1, body)
    assert ranks._groups == before


def test_only_top_level_functions():
    with pytest.raises(TypeError, match="top-level"):
        run_ranks(1, lambda rank, world: None)


@pytest.mark.parametrize("failing", [0, 1])
def test_exception_of_one_rank(failing):
    old = run_ranks(2, pid)
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, raise_on, failing, grace=0.5)
    assert time.monotonic() - start < ranks.BODY_TIMEOUT_SECONDS / 2
    assert "the cable is out" in str(caught.value) and "in raise_on" in str(caught.value)
    outcomes = caught.value.outcomes
    assert isinstance(outcomes[failing].exception, CommError)
    assert outcomes[failing].exception.fix == "plug it in"
    # gloo may have told the other rank that its peer is gone. Otherwise the other rank was killed while waiting.
    assert outcomes[1 - failing].kind in ("hung", "raised"), outcomes
    assert_gone(old)
    assert run_ranks(2, hang_on, -1) == [0, 1]


def test_exception_that_cannot_be_pickled():
    with pytest.raises(RanksFailed, match="not importable") as caught:
        run_ranks(2, raise_unpicklable)
    assert [o.kind for o in caught.value.outcomes] == ["raised"] * 2


def test_sys_exit_is_a_failure():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(1, exit_early)
    assert caught.value.outcomes[0].exception.code == 3


def test_hang_names_the_rank_and_its_line():
    old = run_ranks(2, pid)
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, hang_on, 1, timeout=HANG_SECONDS)
    assert time.monotonic() - start < ranks.BODY_TIMEOUT_SECONDS / 2
    first, second = caught.value.outcomes
    assert (first.kind, first.value) == ("returned", 0)
    assert second.kind == "hung" and "in hang_on" in second.text and f"timeout of {HANG_SECONDS:g} s" in second.text, (
        second.text
    )
    assert_gone(old)
    assert run_ranks(2, hang_on, -1) == [0, 1]


@pytest.mark.parametrize(
    ("how", "text"), [("exit", "exit code 17"), ("kill", "killed by SIGKILL"), ("segv", "killed by SIGSEGV")]
)
def test_death_of_a_rank(how, text):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, die_by, how)
    first, second = caught.value.outcomes
    assert (first.kind, first.value) == ("returned", 0)
    assert second.kind == "died" and text in second.text, second.text
    if how == "segv":
        assert "in die_by" in second.text, second.text
    assert run_ranks(2, hang_on, -1) == [0, 1]


@pytest.mark.parametrize("offset", [0, 5])
@on_ranks(2)
def test_a_body_that_is_a_test_runs_on_ranks(rank, world, offset, folder):
    assert (rank, world) == (dist.get_rank(), dist.get_world_size()) and world == 2
    assert gather(rank, world, offset)[0] == [offset, offset + 1.0] and os.path.isdir(folder)


@pytest.mark.parametrize("world", [1, 3])
@on_ranks()
def test_a_body_that_is_a_test_runs_on_as_many_ranks_as_it_is_given(rank, world):
    assert world == dist.get_world_size() and rank < world


@on_ranks(2, fresh=True)
def fails_on_a_rank(rank, world):
    """Fails on one rank."""
    assert rank == 0


def test_a_body_that_is_a_test_fails_with_its_ranks():
    with pytest.raises(RanksFailed, match="fails_on_a_rank: 1 of 2 ranks failed"):
        fails_on_a_rank()
    assert fails_on_a_rank.__doc__ == "Fails on one rank."


def test_fresh_group_is_apart_and_ends():
    kept = run_ranks(2, pid)
    fresh = run_ranks(2, pid, fresh=True)
    assert not set(kept) & set(fresh)
    assert_gone(fresh)
    with pytest.raises(RanksFailed):
        run_ranks(2, die_by, "kill", fresh=True)
    assert run_ranks(2, pid) == kept


def test_survivors_of_a_dead_rank_can_be_asked():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, survive, fresh=True, grace=200)
    assert caught.value.outcomes[0].value == "RuntimeError", caught.value
    assert caught.value.outcomes[1].kind == "died"


def test_grandchildren_end_with_the_group():
    assert_gone(run_ranks(2, leave_grandchild, fresh=True))


@pytest.mark.parametrize("body", [leak_group, destroy_world])
def test_group_with_changed_process_groups_is_not_reused(body):
    old = run_ranks(2, pid)
    run_ranks(2, body)
    assert not set(run_ranks(2, pid)) & set(old)


def test_the_package_that_the_zygote_imported_speaks_of_each_rank():
    said = run_ranks(3, spoken)
    assert said == [("[Rank 0] here", 20), ("[Rank 1] here", 30), ("[Rank 2] here", 30)], said


def test_a_preloaded_module_is_there_in_its_ranks_only():
    assert run_ranks(2, has_preloaded, preload="tabnanny") == [True, True]
    assert run_ranks(2, has_preloaded) == [False, False]
    assert not set(run_ranks(2, pid)) & set(run_ranks(2, pid, preload="tabnanny"))


def test_all_ends_when_the_session_is_killed(tmp_path):
    script = tmp_path / "session.py"
    script.write_text(
        "import time\n"
        "from tests.ranks import run_ranks, _zygotes\n"
        "from tests.test_ranks import pid\n"
        "pids = run_ranks(2, pid)\n"
        "print(*pids, _zygotes['', True]._process.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env=env, cwd=tmp_path
    ) as session:
        pids = [int(word) for word in first_line(session).split()]
        session.kill()
        ended(session)
    assert len(pids) == 3, pids
    assert_gone(pids)
