"""A run gets a signal to stop. All ranks save the same step and exit with 0, and a run that resumes from this
checkpoint equals an uninterrupted run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_c import errors
from deepspeed_c.utils import RepeatingLoader
from tests.deepspeed_c.engine.checkpoint.test_checkpoints import Numbers, make
from tests.deepspeed_c.launcher.test_main import end, start, wait_for
from tests.ranks import RanksFailed, on_ranks, run_ranks
from tests.waits import exit_status, fork_with_alarm, joined

GAS = 2


def engine_of(folder: str | None, stage: int = 2, **settings: Any):
    preemption = {"enabled": True, "save_dir": folder, **settings}
    return make(
        stage, data=Numbers(), gradient_accumulation_steps=GAS, checkpoint={"preemption": preemption, "async": False}
    )


def go_on(engine, rank: int, tell: Any, n_windows: int = 10, meddle: Any = None) -> None:
    """Trains until ``n_windows`` are done. Calls ``tell`` for each micro-batch with its samples, its loss and two
    random numbers."""
    if engine.global_steps == 0:
        random.seed(rank)
        torch.manual_seed(rank)
    loader = RepeatingLoader(engine.training_dataloader)
    while engine.global_steps < n_windows:
        batch = next(loader)
        loss = engine(batch)
        engine.backward(loss)
        tell([batch[:, 0].tolist(), loss.item(), random.random(), torch.rand(1).item()])
        if meddle is not None:
            meddle(engine)
        engine.step()


def uninterrupted(rank: int, world: int, n_windows: int) -> list:
    told: list = []
    with engine_of(None, enabled=False) as engine:
        go_on(engine, rank, told.append, n_windows)
    return told


def resumed(rank: int, world: int, folder: str, n_windows: int) -> tuple[int, list]:
    told: list = []
    with engine_of(folder) as engine:
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
        begin = engine.global_steps
        go_on(engine, rank, told.append, n_windows)
    return begin, told


# -- under the launcher -------------------------------------------------------------------------------------------------

# Two runs, one after the other, in the same processes: starting processes takes longer than anything else here. Only
# the second run ends the processes.
SCRIPT = """
import json, os, sys, time
import deepspeed_c
from tests.deepspeed_c.engine.test_preemption import GAS, engine_of, go_on

rank = int(os.environ["RANK"])
deepspeed_c.init_distributed(dist_backend="gloo")
for name in ("rank 1", "launcher"):
    folder = os.path.join(sys.argv[1], name)
    os.makedirs(folder, exist_ok=True)
    try:
        with open(os.path.join(folder, f"told{rank}"), "w") as file, engine_of(os.path.join(folder, "ckpt")) as engine:
            def tell(line):
                file.write(json.dumps(line) + chr(10))
                file.flush()
            def meddle(engine):
                if engine.micro_steps == 2 * GAS + 1:
                    with open(os.path.join(folder, f"pid{rank}.tmp"), "w") as mine:
                        mine.write(str(os.getpid()))
                    os.rename(mine.name, os.path.join(folder, f"pid{rank}"))
                time.sleep(0.1)
            go_on(engine, rank, tell, n_windows=1000, meddle=meddle)
    except SystemExit as stop:
        if stop.code != 0 or name == "launcher":
            raise
"""


def test_sigterm_saves_and_all_end_with_0(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    process = start("--num_procs", 2, "--no_local_rank", script, tmp_path, env={"OMP_NUM_THREADS": "1"})
    one, all_ranks = tmp_path / "rank 1", tmp_path / "launcher"
    try:
        wait_for(lambda: all((one / f"pid{rank}").exists() for rank in (0, 1)), "training")
        os.kill(int((one / "pid1").read_text()), signal.SIGTERM)
        wait_for(lambda: all((all_ranks / f"pid{rank}").exists() for rank in (0, 1)), "the second run")
        process.send_signal(signal.SIGTERM)
    finally:
        code, _, err = end(process)
    assert code == 0, err
    told = re.findall(r"deepspeed_c: (.+): saved step (\d+) to (.+); ending, to be resumed from there", err)
    assert [(reason, folder) for reason, _, folder in told] == [
        ("a signal to another rank", str(one / "ckpt")),
        ("SIGTERM", str(all_ranks / "ckpt")),
    ], err
    assert "Traceback" not in err and err.count("all ranks ended by themselves") == 1, err
    for _, n_done, folder in told:
        assert 3 <= int(n_done) < 1000 and Path(folder, "latest").read_text() == f"global_step{n_done}"

    n_done, n_windows = int(told[1][1]), int(told[1][1]) + 3
    stopped = [[json.loads(line) for line in (all_ranks / f"told{rank}").read_text().splitlines()] for rank in (0, 1)]
    for rank, (begin, more) in enumerate(run_ranks(2, resumed, told[1][2], n_windows)):
        assert begin == n_done and len(stopped[rank]) == n_done * GAS
        stopped[rank] += more
    for rank, expected in enumerate(run_ranks(2, uninterrupted, n_windows)):
        assert stopped[rank] == expected, f"rank {rank}, stopped after {n_done} windows"


# -- in forked ranks, which start at once -------------------------------------------------------------------


def caught(run: Any) -> tuple[int | str | None, str]:
    """(exit code, stderr) of a body that ends its process."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        try:
            run()
        except SystemExit as stop:
            return stop.code, err.getvalue()
    return "went on", err.getvalue()


def ask_here() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def stopped_in_a_window(rank: int, world: int, folder: str, is_async: bool, asks_again: bool) -> Any:
    """Only rank 1 gets the signal, after the first micro-batch of the fifth window. A background save of the fourth
    window may be under way then."""
    import deepspeed_c.checkpoint.native.save as module

    may_write, save = threading.Event(), module.save
    told: list = []

    def late(contents, destination, ranks) -> None:
        if destination.tag == "before":
            assert may_write.wait(200)
        save(contents, destination, ranks)

    def meddle(engine) -> None:
        if engine.micro_steps == 4 * GAS:
            if is_async:
                engine.save_checkpoint(folder, tag="before", is_async=True)
            if rank == 1:
                ask_here()
                if asks_again:  # the cluster signals all processes, and the launcher passes the same signal on
                    ask_here()
        elif engine.micro_steps == 5 * GAS - 1:
            threading.Timer(0.2, may_write.set).start()

    previous = signal.getsignal(signal.SIGTERM)
    module.save = late
    try:
        engine = engine_of(folder)
        code, err = caught(lambda: go_on(engine, rank, told.append, meddle=meddle))
    finally:
        module.save = save
        may_write.set()
    assert signal.getsignal(signal.SIGTERM) is previous
    with pytest.raises(errors.StateError, match="closed"):
        engine.wait_checkpoint()
    return code, err, told


@pytest.mark.parametrize("is_async", [False, True])
def test_one_rank_is_asked_within_a_window(tmp_path, is_async):
    folder = str(tmp_path)
    stopped = run_ranks(2, stopped_in_a_window, folder, is_async, is_async)
    assert [(code, len(told)) for code, _, told in stopped] == [(0, 5 * GAS)] * 2, stopped
    assert "a signal to another rank: saved step 5" in stopped[0][1] and "saved step" not in stopped[1][1], stopped
    for _, err, _ in stopped:  # an earlier save, between a backward and its step, logs this notice
        assert ("the gradients of its micro-batches are not saved" in err) == is_async, err
    tags = {path.parent.name for path in tmp_path.glob("*/manifest.json")}
    assert tags == {"global_step5", *(["before"] if is_async else [])}
    again, expected = run_ranks(2, resumed, folder, 8), run_ranks(2, uninterrupted, 8)
    for (_, _, told), (begin, more), everything in zip(stopped, again, expected):
        assert begin == 5 and told + more == everything


def failures(rank: int, world: int, folder: str) -> dict[str, Any]:
    import deepspeed_c.checkpoint.native.save as module

    found = {}

    def ask(engine) -> None:
        if engine.micro_steps == GAS and rank == 0:
            ask_here()

    # No folder to save in is configured.
    found["nowhere"] = caught(lambda: go_on(engine_of(None), rank, list, meddle=ask))
    # A file stands where the folder should be.
    blocked = os.path.join(folder, "blocked")
    Path(blocked).touch()
    found["blocked"] = caught(lambda: go_on(engine_of(blocked), rank, list, meddle=ask))
    # An earlier save fails in the background. The failure is reported, and this save is made nevertheless.
    save, good = module.save, os.path.join(folder, "good")

    def fail(contents, destination, ranks) -> None:
        if destination.tag == "before":
            raise errors.CheckpointError("the disk is full", where=destination.path)
        save(contents, destination, ranks)

    def fail_and_ask(engine) -> None:
        if engine.micro_steps == GAS:
            engine.save_checkpoint(good, tag="before", is_async=True)
        ask(engine)

    module.save = fail
    try:
        found["before"] = caught(lambda: go_on(engine_of(None), rank, list, meddle=fail_and_ask))
    finally:
        module.save = save
    return found


def test_what_cannot_be_saved_ends_with_another_code(tmp_path):
    first, second = run_ranks(2, failures, str(tmp_path))
    assert {name: code for name, (code, _) in first.items()} == {"nowhere": 143, "blocked": 143, "before": 0}, first
    assert {name: code for name, (code, _) in second.items()} == {"nowhere": 143, "blocked": 143, "before": 0}, second
    assert "SIGTERM: step 2 could not be saved" in first["nowhere"][1] and "save_dir" in first["nowhere"][1], first
    assert "SIGTERM: step 2 could not be saved" in first["blocked"][1] and "blocked" in first["blocked"][1], first
    assert f"saved step 2 to {tmp_path}/good" in first["before"][1], first
    assert (tmp_path / "good" / "latest").read_text() == "global_step2"


def die(rank: int, world: int, how: str) -> None:
    def ask(engine) -> None:
        if how == "twice":
            ask_here()
            engine._preemption._received_at -= 60  # the signal came a minute ago
        ask_here()

    if how == "not enabled":
        go_on(engine_of(None, enabled=False), rank, list, meddle=ask)
    elif how == "twice":
        go_on(engine_of(None), rank, list, meddle=ask)
    else:  # an engine that only evaluates has no step to stop after
        import deepspeed_c

        config = {"train_micro_batch_size_per_gpu": 1, "checkpoint": {"preemption": {"enabled": True}}}
        engine = deepspeed_c.initialize(model=torch.nn.Linear(2, 2), config=config)[0]
        assert engine.optimizer is None
        ask_here()
    time.sleep(2000)


@pytest.mark.parametrize("how", ["not enabled", "twice", "no optimizer"])
def test_sigterm_kills(how):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(1, die, how, fresh=True)
    assert "killed by SIGTERM" in caught.value.outcomes[0].text, caught.value


# -- two engines in one process -----------------------------------------------------------------------------------------


def two_engines(rank: int, world: int, folder: str, case: str) -> Any:
    previous = signal.getsignal(signal.SIGTERM)
    names = ("one", "one" if case == "same folder" else "other")
    engines = [engine_of(os.path.join(folder, name), stage) for name, stage in zip(names, (1, 3))]
    loaders = [RepeatingLoader(engine.training_dataloader) for engine in engines]

    def train(i: int) -> None:
        for _ in range(GAS):
            engines[i].backward(engines[i](next(loaders[i])))
            engines[i].step()

    def alternate() -> None:
        for _ in range(3):
            train(0)
            train(1)
        if rank == world - 1:
            ask_here()
        if case == "closed":
            engines[1].close()
            assert signal.getsignal(signal.SIGTERM) is not previous
        for _ in range(4):
            train(0)
            assert case != "closed" and engines[0].global_steps == 4, "the last engine that was left goes on"
            train(1)
        raise AssertionError("both engines were asked to stop, and go on")

    code, err = caught(alternate)
    assert signal.getsignal(signal.SIGTERM) is previous
    assert all(engine._is_closed for engine in engines)
    return code, err


@pytest.mark.parametrize("case", ["both", "closed", "same folder"])
def test_a_signal_reaches_both_engines(tmp_path, case):
    results = run_ranks(2, two_engines, str(tmp_path), case)
    assert [code for code, _ in results] == [143 if case == "same folder" else 0] * 2, results
    saved = {path.relative_to(tmp_path).parent.as_posix() for path in tmp_path.glob("*/*/manifest.json")}
    assert saved == {"one/global_step4", *(["other/global_step4"] if case == "both" else [])}
    if case == "same folder":
        assert "another engine of this process has just been saved to" in results[0][1], results


@on_ranks(1)
def test_signals_go_back_to_whom_they_belonged(rank: int, world: int, folder: str) -> None:
    heard: list[int] = []

    def mine(number: int, frame: Any) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGUSR1, mine)
    try:
        usr = engine_of(folder, signals=["SIGUSR1", "SIGUSR2"])
        term = engine_of(folder)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert usr._preemption.is_requested() and not term._preemption.is_requested() and heard == []
        # A forked child does not save.
        pid = fork_with_alarm()
        if pid == 0:
            try:
                ask_here()
                time.sleep(2000)
            finally:
                os._exit(0)
        assert exit_status(pid) == -signal.SIGTERM
        usr.close()
        assert signal.getsignal(signal.SIGUSR1) is mine and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        # A handler of the signal that was installed later stays.
        signal.signal(signal.SIGTERM, mine)
        term.close()
        assert signal.getsignal(signal.SIGTERM) is mine

        def elsewhere() -> None:
            with pytest.raises(errors.StateError, match="main thread"):
                engine_of(folder)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        joined(thread)
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
