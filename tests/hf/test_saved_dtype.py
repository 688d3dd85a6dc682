"""The folder that an engine writes says in which dtype its weights are, and transformers loads them in that dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import training
from tests.ranks import run_ranks
from tests.toys import llama
from tests.training import engine_of


def save(rank: int, world: int, stage: int, section: dict[str, Any], dtype: torch.dtype | None, folder: str) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 31}
    engine = engine_of(llama(3, **sizes, dtype=torch.float32), training.config(stage, "AdamW", lr=1e-3, **section))
    with engine:
        engine.save_model(folder, dtype=dtype)
        assert engine.module.config.dtype == torch.float32  # the caller's configuration stays as it is


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("section", "dtype", "expected"),
    [
        ({}, None, torch.float32),
        ({"bf16": {"enabled": True}}, None, torch.bfloat16),
        ({"fp16": {"enabled": True}}, None, torch.float16),
        ({"bf16": {"enabled": True}}, torch.float32, torch.float32),
        ({}, torch.bfloat16, torch.bfloat16),
    ],
    ids=["fp32", "bf16", "fp16", "masters of bf16", "fp32 as bf16"],
)
def test_the_configuration_names_the_dtype_of_the_weights(
    stage: int, section: dict[str, Any], dtype: torch.dtype | None, expected: torch.dtype, tmp_path: Path
) -> None:
    folder = str(tmp_path / "saved")
    run_ranks(2, save, stage, section, dtype, folder)
    said = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert said["dtype"] == str(expected).removeprefix("torch.")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {expected}
