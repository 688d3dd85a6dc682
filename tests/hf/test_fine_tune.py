"""docs/fine-tune.md: its script trains, goes on, and trains an adapter, with its configuration, on two ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.hf.stack import on_ranks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "fine-tune.md").read_text()
SIZES = ["--window", "16"]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="the extra [hf] is not installed: its tests' ranks need all of it"
)


def block(language: str) -> str:
    """The page's only block of code in this language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return found


def save_model(folder: Path, text: Path) -> None:
    """Writes a small Llama with a tokenizer of bytes, and a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="!").save_pretrained(folder)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
        )
    ).save_pretrained(folder)  # fmt: skip
    text.write_text("What holds for one rank holds for two. " * 60)


def run(rank: int, world: int, folder: str, arguments: list[str]) -> None:
    from tests.hf.stack import forget

    forget()
    before, sys.argv = os.getcwd(), ["fine_tune.py", "model", "text.txt", *SIZES, *arguments]
    os.chdir(folder)
    try:
        runpy.run_path("fine_tune.py", run_name="__main__")
    finally:
        os.chdir(before)


def steps_of(folder: Path) -> dict[int, float]:
    """Step -> loss, as the last checkpoint has them."""
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


def test_train_go_on_and_adapt(tmp_path: Path) -> None:
    save_model(tmp_path / "model", tmp_path / "text.txt")
    (tmp_path / "ds_config.json").write_text(block("json"))
    (tmp_path / "fine_tune.py").write_text(block("python"))
    on_ranks(2, run, str(tmp_path), ["--steps", "20"])
    first = steps_of(tmp_path / "out")
    on_ranks(2, run, str(tmp_path), ["--steps", "40"])
    both = steps_of(tmp_path / "out")
    print(first, both)
    assert list(first) == [5, 10, 15, 20] and list(both) == list(range(5, 45, 5))
    assert {step: both[step] for step in first} == first  # the second run went on, and did not begin again
    assert both[40] < first[5]
    assert (tmp_path / "out" / "model" / "model.safetensors").stat().st_size > 1000
    on_ranks(2, run, str(tmp_path), ["--steps", "20", "--adapter", "--out", "out_adapter"])
    saved = {path.name for path in (tmp_path / "out_adapter" / "model").iterdir()}
    assert "adapter_model.safetensors" in saved and "model.safetensors" not in saved
