"""examples/hf_trainer.py with the examples' configurations: it learns, continues from a checkpoint at another stage,
and trains adapters for its saved model; examples/hf_generate.py continues a text as transformers does."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from tests.hf.stack import on_ranks

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "--layers",
    "1",
    "--width",
    "64",
    "--context",
    "32",
    "--lib_bytes",
    "300000",
    "--logging_steps",
    "1",
    "--per_device_eval_batch_size",
    "64",
]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="the extra [hf] is not installed: its tests' ranks need all of it"
)


def run(rank, world, arguments):
    import hf_trainer

    from tests.hf.stack import forget

    forget()
    sys.argv = ["hf_trainer.py", *TINY, *arguments]
    hf_trainer.main()


def start(stage: int, folder: Path, *arguments: str) -> list[dict[str, float]]:
    """Run the example on 2 ranks; return its log up to the last checkpoint."""
    config = str(ROOT / "examples" / f"ds_hf_stage{stage}.json")
    on_ranks(2, run, ["--deepspeed", config, "--output_dir", str(folder), *arguments])
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    return json.loads((last / "trainer_state.json").read_text())["log_history"]


def evaluations(history):
    return [entry["eval_loss"] for entry in history if "eval_loss" in entry]


def test_train_resume_and_adapt(tmp_path):
    whole, adapters = tmp_path / "whole", tmp_path / "adapters"
    first = evaluations(start(2, whole, "--max_steps", "12", "--save_steps", "6", "--eval_steps", "6"))
    assert len(first) == 2 and first[1] < first[0] < math.log(256) + 0.5
    second = start(3, whole, "--max_steps", "18", "--save_steps", "6", "--eval_steps", "6", "--resume")
    assert evaluations(second)[:2] == first and evaluations(second)[2] < first[1]
    assert [entry["step"] for entry in second if "loss" in entry] == list(range(1, 19))
    assert (whole / "model" / "model.safetensors").exists()

    arguments = ["--model_path", str(whole / "model"), "--lora", "4", "--max_steps", "6", "--save_steps", "6"]
    third = start(3, adapters, *arguments, "--eval_steps", "6", "--learning_rate", "0.01")
    assert evaluations(third)[0] < evaluations(second)[2]
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {p.name for p in (adapters / "model").iterdir()}


def test_resuming_without_a_checkpoint_says_so(tmp_path):
    with pytest.raises(AssertionError, match="there is no checkpoint in"):
        start(2, tmp_path / "none", "--resume", "--max_steps", "1")


def generate(rank, world, folder):
    import hf_generate

    sys.argv = ["hf_generate.py", folder, "--prompt", "import ", "--bytes", "5"]
    return hf_generate.main()


def test_generates_on_two_ranks_as_in_one_process(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, bos_token_id=None, eos_token_id=None, **sizes)).eval()
    model.save_pretrained(tmp_path)
    ids = torch.tensor([list(b"import ")])
    wanted = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)[0].tolist()
    assert on_ranks(2, generate, str(tmp_path)) == [bytes(wanted).decode(errors="replace")] * 2
