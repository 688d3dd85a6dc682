"""``same_bits`` under ``transformers.Trainer`` and accelerate: weights and states have the same bits on any number of
ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hf.stack import VOCAB, Text, ds_config, forget, llama, make_trainer, numbers, on_ranks
from tests.hf.test_accelerate import accelerator, loop, plugin

GRAIN, N_GRAINS, N_STEPS = 2, 6, 4

Cell = tuple[int, dict[str, Any]]
"""The ZeRO stage, and the changes of a cell."""


def noisy_llama() -> Any:
    return llama(attention_dropout=0.2)


def gpt2() -> Any:
    """Its head is tied to its embedding, and it has dropout at four places."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.2)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=24, n_layer=2, n_head=2, **drops))


MODELS = {"llama": noisy_llama, "gpt2": gpt2}


def trainer_of(folder: Path, world: int, stage: int, changes: dict[str, Any]) -> Any:
    changes = dict(changes)
    section = {"enabled": True, "grain": GRAIN, "threads": 1}
    config = ds_config(stage, scheduler=False, same_bits=section, **changes.pop("ds", {}))
    given = {"max_steps": N_STEPS, "per_device_train_batch_size": GRAIN, "warmup_steps": 0}
    given |= {"gradient_accumulation_steps": N_GRAINS // world, "rows": 8 * N_GRAINS * GRAIN}
    model = MODELS[changes.pop("model", "gpt2")]()
    return make_trainer(folder, config, model=model, **{**given, **changes})


def train(rank: int, world: int, folder: Path, cells: list[Cell]) -> list[Any]:
    found = []
    for stage, changes in cells:
        trainer = trainer_of(folder, world, stage, changes)
        trainer.train()
        engine = trainer.model_wrapped
        found.append((engine.fingerprint(), numbers(trainer)["grad_norm"]))
        engine.close()
    return found


def in_cells(changes: dict[str, Any]) -> list[Cell]:
    return [(stage, changes) for stage in range(4)]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="gpt2"),
        pytest.param({"model": "llama", "gradient_checkpointing": True, "bf16": True}, id="llama-bf16-recomputed"),
        pytest.param({"label_smoothing_factor": 0.1}, id="label_smoothing"),
    ],
)
def test_trainer_has_the_same_bits_on_any_number_of_ranks(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The Trainer divides losses itself, by numbers that depend on the ranks. Three ranks round such divisions."""
    cells = in_cells(changes)
    expected = on_ranks(1, train, tmp_path, cells[:1])[0][0]
    for world in (1, 3, 6):
        for (stage, _), found in zip(cells, on_ranks(world, train, tmp_path, cells)[0], strict=True):
            assert found == expected, (world, stage, found, expected)


def train_in_a_loop(rank: int, world: int, stages: list[int]) -> list[Any]:
    """The loop of accelerate's documentation, in which accelerate decides about boundaries."""
    found = []
    for stage in stages:
        forget()
        section = {"enabled": True, "grain": GRAIN, "threads": 1}
        acc = accelerator(
            plugin(stage, gradient_clipping=0.5, train_batch_size="auto", same_bits=section),
            gradient_accumulation_steps=N_GRAINS // world,
        )
        model = gpt2()
        data = torch.utils.data.DataLoader(Text(4 * N_GRAINS * GRAIN), batch_size=GRAIN)
        engine, optimizer, data = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=5e-3), data)
        _, norms = loop(acc, engine, optimizer, data, steps=N_STEPS)
        found.append((engine.fingerprint(), norms))
        engine.close()
    return found


def test_a_loop_of_accelerate_has_the_same_bits_on_any_number_of_ranks() -> None:
    expected = on_ranks(1, train_in_a_loop, [0])[0][0]
    for world in (2, 3):
        for stage, found in enumerate(on_ranks(world, train_in_a_loop, list(range(4)))[0]):
            assert found == expected, (world, stage, found, expected)
