"""transformers.Trainer with the section ``expert_parallel``: it trains, evaluates, saves and resumes as without it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hf import expert_families
from tests.hf.stack import Text, ds_config, make_trainer, numbers, on_ranks
from tests.hf.test_expert_adapters import adapted

SECTION = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}


def settings_of(stage: int, *, spreads: bool) -> dict[str, Any]:
    return ds_config(stage, scheduler=False, **({"expert_parallel": SECTION} if spreads else {}))


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=Text().batch(0, 4)["input_ids"]).logits


def train(rank: int, world: int, folder: Path, settings: dict[str, Any], resumes: bool, changes: dict[str, Any]) -> Any:
    """(numbers of the run, logits of the trained model, logits of the saved model in plain transformers)."""
    from transformers import MixtralForCausalLM
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    trainer = make_trainer(folder, settings, expert_families.make("mixtral", output_router_logits=True), **changes)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resumes else None)
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(folder / "saved"))
    trainer.model_wrapped.eval()
    experts = trainer.model.model.layers[0].mlp.experts
    assert getattr(experts, "ep_size", 1) == settings.get("expert_parallel", {"autoep_size": 1})["autoep_size"]
    found = logits_of(trainer.model_wrapped)
    torch.distributed.barrier()
    unset_hf_deepspeed_config()
    saved = MixtralForCausalLM.from_pretrained(folder / "saved").eval()
    assert type(saved.model.layers[0].mlp.experts).__name__ == "MixtralExperts"
    return {**numbers(trainer), "last": [evaluated]}, found, logits_of(saved)


@functools.cache
def without(stage: int, folder: Path) -> dict[str, list[float]]:
    return on_ranks(2, train, folder, settings_of(stage, spreads=False), False, {})[0][0]


def assert_equal(found: dict[str, list[float]], want: dict[str, list[float]], n_last: int) -> None:
    for name in want.keys() & {"loss", "grad_norm", "last"}:
        assert found[name][-n_last:] == pytest.approx(want[name][-n_last:], rel=1e-5), name


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_trains_as_without_the_section(tmp_path: Path, stage: int) -> None:
    want = without(stage, tmp_path)
    for found, logits, of_saved in on_ranks(2, train, tmp_path, settings_of(stage, spreads=True), False, {}):
        assert_equal(found, want, 5)
        torch.testing.assert_close(of_saved, logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_goes_on_from_a_checkpoint(tmp_path: Path, stage: int) -> None:
    saves = {"save_strategy": "steps", "save_steps": 3}
    settings = settings_of(stage, spreads=True)
    whole = on_ranks(2, train, tmp_path, settings, False, saves)
    rest = on_ranks(2, train, tmp_path, settings, True, saves)
    assert [len(each[0]["loss"]) for each in rest] == [5, 5]
    for (found, logits, _), (want, expected, _) in zip(rest, whole, strict=True):
        assert_equal(found, want, 5)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_loads_the_best_model_at_the_end(tmp_path: Path, stage: int) -> None:
    """Each step but the first makes a large rate worse: the first checkpoint is the best."""
    every = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best = {**every, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "learning_rate": 0.2}
    runs = []
    for spreads in (False, True):
        folder = tmp_path / str(spreads)
        runs.append(on_ranks(2, train, folder, settings_of(stage, spreads=spreads), False, best))
    for (want, *_), (found, logits, of_saved) in zip(*runs, strict=True):
        print(found)
        assert found["last"][0] == pytest.approx(min(want["eval_loss"]), rel=1e-4)
        assert found["eval_loss"] == pytest.approx(want["eval_loss"], rel=1e-4)
        torch.testing.assert_close(of_saved, logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_evaluates_last_batches_of_different_sizes(tmp_path: Path, stage: int) -> None:
    """14 rows in batches of 4: the last batch of one rank has 4, that of the other 2."""
    uneven = {"accelerator_config": {"even_batches": False}, "max_steps": 1}
    runs = [
        on_ranks(2, train, tmp_path, settings_of(stage, spreads=spreads), False, uneven) for spreads in (False, True)
    ]
    for (want, *_), (found, *_) in zip(*runs, strict=True):
        assert_equal(found, want, 1)


def train_adapters(rank: int, world: int, folder: Path, settings: dict[str, Any]) -> Any:
    """(numbers of the run, logits of the trained model, logits of the saved adapters in plain peft)."""
    from peft import PeftModel
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    first, second = adapted("mixtral"), adapted("mixtral")
    trainer = make_trainer(folder, settings, first, save_strategy="steps", save_steps=2)
    trainer.train()
    again = make_trainer(folder, settings, second, save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert numbers(again)["loss"] == pytest.approx(numbers(trainer)["loss"], rel=1e-5)
    again.save_model(str(folder / "saved"))
    again.model_wrapped.eval()
    found = logits_of(again.model_wrapped)
    torch.distributed.barrier()
    unset_hf_deepspeed_config()
    saved = PeftModel.from_pretrained(expert_families.make("mixtral"), folder / "saved").eval()
    return numbers(trainer), found, logits_of(saved)


@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_on_experts_train_and_resume(tmp_path: Path, stage: int) -> None:
    runs = []
    for spreads in (False, True):
        runs.append(on_ranks(2, train_adapters, tmp_path / str(spreads), settings_of(stage, spreads=spreads)))
    for (want, *_), (found, logits, of_saved) in zip(*runs, strict=True):
        assert_equal(found, want, 5)
        torch.testing.assert_close(of_saved, logits, rtol=0, atol=1e-5)
