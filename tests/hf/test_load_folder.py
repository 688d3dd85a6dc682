"""``load_checkpoint`` of a folder that transformers wrote: its names and its experts, an entry each, fill an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepspeed_c.errors import DeepSpeedCError
from tests.hf.expert_families import assert_equal_tensors, make
from tests.hf.stack import on_ranks
from tests.training import config, engine_of


def write_body(rank: int, world: int, folder: Path, family: str) -> dict[str, torch.Tensor]:
    model = make(family)
    model.save_pretrained(folder)
    return model.state_dict()


def fill_body(rank: int, world: int, folder: Path, family: str, stage: int, n_ranks: int) -> dict[str, torch.Tensor]:
    section = {"enabled": n_ranks > 0, "autoep_size": max(n_ranks, 1)}
    with torch.device("meta"):
        model = make(family)
    with engine_of(model, config(stage, expert_parallel=section)) as engine:
        engine.load_checkpoint(folder, load_module_only=True)
        whole = engine._zero3_consolidated_16bit_state_dict() if stage == 3 else engine.module.state_dict()
        return {name: value.clone() for name, value in (whole or {}).items()}


@pytest.mark.parametrize(
    ("family", "stage", "n_ranks"),
    [("mixtral", 1, 2), ("mixtral", 3, 2), ("mixtral", 2, 0), ("deepseek_v3", 3, 1), ("gpt_oss", 0, 2)],
)
def test_a_folder_fills_a_model_without_memory(tmp_path: Path, family: str, stage: int, n_ranks: int) -> None:
    (expected,) = on_ranks(1, write_body, tmp_path, family)
    assert_equal_tensors(on_ranks(2, fill_body, tmp_path, family, stage, n_ranks)[0], expected)


def refuse_body(rank: int, world: int, folder: Path) -> tuple[str, bool]:
    section = {"enabled": True, "autoep_size": 2}
    with engine_of(make("mixtral", 7), config(1, expert_parallel=section)) as engine:
        before = {name: value.clone() for name, value in engine.module.state_dict().items()}
        with pytest.raises(DeepSpeedCError) as caught:
            engine.load_checkpoint(folder, load_module_only=True)
        after = engine.module.state_dict()
        return str(caught.value), all(torch.equal(after[name], before[name]) for name in before)


def test_a_folder_without_an_expert_changes_nothing(tmp_path: Path) -> None:
    on_ranks(1, write_body, tmp_path, "mixtral")
    tensors = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in tensors if "experts.3." in name)
    save_file({name: value for name, value in tensors.items() if name != gone}, tmp_path / "model.safetensors")
    for text, is_unchanged in on_ranks(2, refuse_body, tmp_path):
        assert is_unchanged
        assert "experts" in text and str(tmp_path) in text, text
