"""The state of a run beside its tensors. Callers set it on the engine under DeepSpeed's names, and checkpoints save
it."""

from __future__ import annotations

import os

from tests.deepspeed_c.engine.checkpoint.test_checkpoints import Numbers, make, train
from tests.ranks import on_ranks, run_ranks

COUNTERS = {"global_steps": 41, "global_samples": 12345, "micro_steps": 86, "skipped_steps": 3}


def set_and_saved(rank: int, world: int, folder: str) -> dict:
    with make(2, gradient_accumulation_steps=2) as engine:
        for name, value in COUNTERS.items():
            setattr(engine, name, value)
        assert {name: getattr(engine, name) for name in COUNTERS} == COUNTERS
        assert not engine.is_gradient_accumulation_boundary()
        engine.micro_steps += 1
        assert engine.is_gradient_accumulation_boundary()
        engine.micro_steps -= 1
        engine.save_checkpoint(folder)
    with make(2, gradient_accumulation_steps=2) as engine:
        path, _ = engine.load_checkpoint(folder)
        assert os.path.basename(path) == "global_step41", path
        return {name: getattr(engine, name) for name in COUNTERS}


def test_counters_that_a_caller_sets_are_saved(tmp_path):
    assert run_ranks(2, set_and_saved, str(tmp_path)) == [COUNTERS, COUNTERS]


@on_ranks(2)
def test_a_schedule_and_a_loader_that_a_caller_sets_are_saved(rank: int, world: int, folder: str) -> None:
    with make(1) as engine:
        assert engine.training_dataloader is None
        scheduler, engine.lr_scheduler = engine.lr_scheduler, None
        before = scheduler.state_dict()
        train(engine, range(2))
        assert scheduler.state_dict() == before  # the engine does not step it
        engine.lr_scheduler = scheduler
        train(engine, range(2, 3))
        assert scheduler.state_dict() != before
        loader = engine.training_dataloader = engine.deepspeed_io(Numbers())
        next(iter(loader))
        place = loader.state_dict()
        engine.save_checkpoint(folder)
    with make(1, data=Numbers()) as engine:
        engine.load_checkpoint(folder)
        assert engine.training_dataloader.state_dict() == place, (engine.training_dataloader.state_dict(), place)
        assert engine.lr_scheduler.state_dict() == scheduler.state_dict()
    assert engine.lr_scheduler is None and engine.training_dataloader is None  # the engine is closed
