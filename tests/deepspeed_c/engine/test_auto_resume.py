"""checkpoint.auto_resume and checkpoint.every: initialize loads the newest complete checkpoint, the engine saves by
itself, and the step file tells the launcher how far a rank has come."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_c import errors
from deepspeed_c.engine.checkpoint.kept_section import check_kept_section
from deepspeed_c.plan.table import plan_table
from deepspeed_c.step_file import StepFile
from tests.deepspeed_c.engine.checkpoint.test_checkpoints import Net, Numbers, differences, make, train, whole_state
from tests.deepspeed_c.engine.test_preemption import caught
from tests.log_lines import LogLines
from tests.ranks import on_ranks


def engine_of(folder: Any, stage: int = 2, model: Any = None, data: Any = None, seed: int = 0, **keys: Any) -> Any:
    return make(stage, model=model, data=data, seed=seed, checkpoint={"auto_resume": str(folder), **keys})


def tags_of(folder: Any) -> set[str]:
    return {path.parent.name for path in Path(folder).glob("*/manifest.json")}


def damage(tag: Path) -> None:
    """Cuts the largest file of tensors in half."""
    file = max((path for path in tag.iterdir() if path.suffix != ".json"), key=lambda path: path.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)


# -- resuming -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_initialize_goes_on_where_the_folder_ends(rank: int, world: int, folder: str, stage: int) -> None:
    with LogLines() as log, engine_of(folder, stage) as engine:
        begun = [line for line in log.lines if "no checkpoint yet, training begins" in line]
        assert len(begun) == (rank == 0), log.lines
        assert not any("holds no checkpoint" in line for line in log.lines), log.lines
        assert engine.resumed_from is None and engine.client_state == {} and engine.global_steps == 0
        train(engine, range(2))
        engine.save_checkpoint(folder, client_state={"words": "saved by the program"})
        train(engine, range(2, 3))
        engine.save_checkpoint(folder, tag="other", save_latest=False)
        expected = whole_state(engine)
    with engine_of(folder, stage, seed=7) as engine:
        assert engine.resumed_from == os.path.join(folder, "global_step2"), engine.resumed_from
        assert engine.client_state == {"words": "saved by the program"} and engine.global_steps == 2
        train(engine, range(2, 3))
        got = whole_state(engine)
        assert differences(expected, got) == []
        # A program may load another checkpoint by itself.
        assert engine.load_checkpoint(folder, tag="other")[0] == os.path.join(folder, "other")
        assert engine.global_steps == 3
    model = torch.nn.Linear(2, 2)
    with make(0, model=model, optimizer=None, scheduler=None, checkpoint={"auto_resume": folder}) as engine:
        assert engine.resumed_from is None, "an engine that only evaluates resumes no training"


@on_ranks(2)
def test_a_damaged_checkpoint_is_skipped_and_named(rank: int, world: int, folder: str) -> None:
    with engine_of(folder) as engine:
        for step in range(4):
            train(engine, range(step, step + 1))
            engine.save_checkpoint(folder)
    torch.distributed.barrier()
    if rank == 0:
        damage(Path(folder, "global_step4"))
        Path(folder, "global_step3", "manifest.json").write_text("{")
    torch.distributed.barrier()
    with LogLines(logging.ERROR) as log, engine_of(folder) as engine:
        assert engine.global_steps == 2 and engine.resumed_from.endswith("global_step2"), engine.resumed_from
    if rank == 0:
        assert "global_step4" in "\n".join(log.lines) and "global_step3" in "\n".join(log.lines), log.lines
        damage(Path(folder, "global_step2"))
        damage(Path(folder, "global_step1"))
    torch.distributed.barrier()
    model = Net()
    with pytest.raises(errors.CheckpointError, match="global_step4"):
        engine_of(folder, model=model)
    torch.distributed.barrier()
    if rank == 0:
        for tag in tags_of(folder):
            Path(folder, tag, "manifest.json").write_text("{")
        Path(folder, "latest").unlink()
    torch.distributed.barrier()
    with pytest.raises(errors.CheckpointError, match="(?s)no checkpoint is complete: .*global_step1.*move the damaged"):
        engine_of(folder, model=model)
    with make(2, model=model) as engine:  # the refused engine has let go of its model
        train(engine, range(1))


@on_ranks(1)
def test_a_checkpoint_of_another_model_is_refused(rank: int, world: int, folder: str) -> None:
    with engine_of(folder) as engine:
        train(engine, range(1))
        engine.save_checkpoint(folder)
    with pytest.raises(errors.StateError, match="shape"):
        engine_of(folder, model=Net(width=7))


SECTION = {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [2, 3], "version": 0.1}


def elastic(folder: Any, section: dict[str, Any], model: Any = None, **keys: Any) -> Any:
    keys["elasticity"] = {"ignore_non_elastic_batch_info": True, **section}  # ``make`` gives a micro-batch
    return make(2, model=model, checkpoint={"auto_resume": str(folder)} if folder else {}, **keys)


@on_ranks(2)
def test_a_section_elasticity_that_changed_is_refused(rank: int, world: int, folder: str) -> None:
    with elastic(folder, SECTION) as engine:
        assert engine.train_batch_size() == 12
        engine.save_checkpoint(folder)
    same = {**SECTION, "max_train_batch_size": "12", "min_time": 3, "prefer_large_batch": True}  # other spellings
    with elastic(folder, same) as engine:
        assert engine.resumed_from == os.path.join(folder, "global_step0")
    model, changes = Net(), {"max_train_batch_size": 6, "micro_batch_sizes": [3, 2], "prefer_larger_batch": False}
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    for key, value in changes.items():
        with pytest.raises(errors.ElasticityConfigError) as raised:
            elastic(folder, {**SECTION, key: value}, model=model)
        error, before = raised.value, {**SECTION, "prefer_larger_batch": True}[key]
        assert error.where == f"elasticity.{key}", error
        assert f"is {value}, and {before} in the run that saved" in error.what, error
    got = model.state_dict()
    assert all(torch.equal(weights[name], got[name]) for name in weights), "something was loaded"
    # A program that loads by itself decides, and a section that is not enabled decides no batch.
    with elastic(None, {**SECTION, "max_train_batch_size": 6}) as engine:
        assert engine.load_checkpoint(folder)[0] is not None and engine.train_batch_size() == 6
    with elastic(folder, {**SECTION, "enabled": False}) as engine:
        assert engine.resumed_from is not None
        engine.save_checkpoint(folder, tag="off")
    with elastic(folder, {**SECTION, "max_train_batch_size": 6}) as engine:
        assert engine.resumed_from == os.path.join(folder, "off")


def test_a_kept_section_that_cannot_be_read_is_named() -> None:
    kept = {"elasticity": {**SECTION, "micro_batch_sizes": "many"}}
    check_kept_section({}, kept, "ckpt/7")  # not compared
    with pytest.raises(errors.ElasticityConfigError, match="cannot be compared") as raised:
        check_kept_section({"elasticity": SECTION}, kept, "ckpt/7")
    assert raised.value.where == "ckpt/7" and "load_checkpoint" in raised.value.fix


@on_ranks(2)
def test_a_loader_that_comes_later_goes_on_at_the_saved_place(rank: int, world: int, folder: str) -> None:
    with engine_of(folder, data=Numbers()) as engine:
        batches = iter(engine.training_dataloader)
        for _ in range(3):
            engine.backward(engine(next(batches)))
            engine.step()
        engine.save_checkpoint(folder)
        expected = next(batches)
    with engine_of(folder) as engine:
        engine.training_dataloader = engine.deepspeed_io(Numbers())
        assert torch.equal(next(iter(engine.training_dataloader)), expected)
        engine.load_checkpoint(folder, load_module_only=True)
        engine.training_dataloader = engine.deepspeed_io(Numbers())
        assert engine.training_dataloader.state_dict()["position"] == 0


# -- saving by time -----------------------------------------------------------------------------------------------------


def pass_time(engine: Any) -> None:
    """Lets a minute go by on this rank's clock."""
    engine._checkpoints._begun -= 60


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_every_saves_by_the_clock_of_rank_0(rank: int, world: int, folder: str, stage: int) -> None:
    with engine_of(folder, stage, every="60s", keep_last=2) as engine:
        train(engine, range(2))
        if rank == 1:
            pass_time(engine)
        train(engine, range(2, 3))
        engine.wait_checkpoint()
        torch.distributed.barrier()
        assert tags_of(folder) == set(), "only rank 0's clock counts, and no minute has passed on it"
        for step in range(3, 6):
            pass_time(engine)
            engine.client_state["step"] = step + 1
            train(engine, range(step, step + 1))
            engine.wait_checkpoint()
            train(engine, range(1))  # the time begins again at each save
        expected = tags_of(folder)
        assert expected == {"global_step6", "global_step8"}, expected
    with engine_of(folder, stage, every=60) as engine:
        assert engine.client_state == {"step": 6} and engine.global_steps == 8
        train(engine, range(8, 9))
        engine.wait_checkpoint()
        torch.distributed.barrier()
        assert tags_of(folder) == expected, "a run that has just resumed does not save at once"


@on_ranks(2)
def test_every_does_not_wait_for_the_save_before(rank: int, world: int, folder: str) -> None:
    import deepspeed_c.checkpoint.native.save as module

    may_write, save = threading.Event(), module.save

    def late(contents: Any, destination: Any, ranks: Any) -> None:
        # Only the last rank is late: the others see that its save has not ended.
        assert rank != world - 1 or may_write.wait(100)
        save(contents, destination, ranks)

    def fail(contents: Any, destination: Any, ranks: Any) -> None:
        raise errors.CheckpointError("the disk is full", where=destination.path)

    with engine_of(folder, every="1m") as engine:
        try:
            module.save = late
            for step in range(4):
                pass_time(engine)
                train(engine, range(step, step + 1))
            assert tags_of(folder) == set() and engine._checkpoints.is_saving()
            may_write.set()
            engine._checkpoints._pending.wait(100)
            torch.distributed.barrier()
            assert tags_of(folder) == {"global_step1"}
            train(engine, range(4, 5))
            module.save = fail
            engine.wait_checkpoint()
            assert tags_of(folder) == {"global_step1", "global_step5"}
            pass_time(engine)
            train(engine, range(5, 6))
            pass_time(engine)
            while engine._checkpoints.is_saving():
                pass
            torch.distributed.barrier()
            with pytest.raises(errors.CheckpointError, match="the disk is full"):
                train(engine, range(6, 7))
            module.save = save
            train(engine, range(7, 8))
            engine.wait_checkpoint()
            assert tags_of(folder) == {"global_step1", "global_step5", "global_step8"}
        finally:
            module.save = save
            may_write.set()


def wide() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(3)))


@pytest.mark.parametrize("stage, dtype", [(0, "fp32"), (0, "bf16"), (1, "bf16"), (2, "fp32"), (3, "bf16")])
@on_ranks(2)
def test_the_planner_knows_the_size_of_the_copy(rank: int, world: int, folder: str, stage: int, dtype: str) -> None:
    with make(stage, dtype, model=wide(), checkpoint={"auto_resume": folder, "every": "60s"}) as engine:
        x = torch.ones(2, 300, dtype=engine.module[0].bias.dtype)
        engine.backward(engine(x).float().square().mean())
        pass_time(engine)
        engine.step()
        engine.wait_checkpoint()
        copied, settings = engine._checkpoints._snapshot.nbytes, engine._config.as_dict()
    with torch.device("meta"):
        model = wide()
    plan = plan_table(settings, world, model=model, every_stage=False)
    # Addresses are rounded to 64 bytes, and slices are padded.
    assert abs(plan.saves.nbytes - copied) < 0.01 * copied, (plan.saves.nbytes, copied)


@on_ranks(2)
def test_a_signal_saves_to_the_folder_of_auto_resume(rank: int, world: int, folder: str) -> None:
    engine = engine_of(folder, preemption={"enabled": True})
    engine.client_state["words"] = "mine"

    def run() -> None:
        for step in range(9):
            if step == 3 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            train(engine, range(step, step + 1))

    assert caught(run)[0] == 0
    with engine_of(folder) as engine:
        assert engine.global_steps == 4 and engine.client_state == {"words": "mine"}


# -- the step file of the launcher --------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_step_file_tells_steps_and_saves(rank: int, world: int, folder: str) -> None:
    path = os.path.join(folder, f"steps{rank}")
    ckpt = os.path.join(folder, "ckpt")
    told = StepFile.create(path)
    os.environ["DSC_STEP_FILE"] = path
    try:
        with engine_of(ckpt, every="60s") as engine:
            assert (told.step, told.n_saves, told.min_seconds) == (0, 0, 0)
            train(engine, range(2))
            assert (told.step, told.n_saves) == (2, 0)
            pass_time(engine)
            train(engine, range(2, 3))
            engine.wait_checkpoint()
            assert (told.step, told.n_saves) == (3, 1)
            engine.save_checkpoint(ckpt)
            train(engine, range(3, 4))
            assert (told.step, told.n_saves) == (4, 2)
        told.step = 0
        with engine_of(ckpt) as engine:
            assert (told.step, told.n_saves) == (3, 2), "a load tells the step, and is no save"
            engine.load_checkpoint(ckpt)
            with make(0, seed=3) as other:
                train(other, range(1))
                assert told.step == 1, "the engine that steps last counts"
            train(engine, range(1))
            assert told.step == 4
        os.environ["DSC_STEP_FILE"] = os.path.join(folder, "none")
        with pytest.raises(errors.LaunchError, match="none"):
            make(0)
    finally:
        del os.environ["DSC_STEP_FILE"]
    with make(0) as engine:
        train(engine, range(1))
    assert told.step == 4
    told.close()
