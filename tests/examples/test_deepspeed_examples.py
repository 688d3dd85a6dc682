"""Programs that make the calls of DeepSpeed's own examples, unchanged under the name deepspeed on 2 ranks: they start, learn and save."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"


def launch(folder: Path, script: str, *arguments: str) -> None:
    command = [
        sys.executable,
        "-m",
        "deepspeed_c",
        "run",
        "deepspeed",
        "--num_gpus",
        "2",
        str(SCRIPTS / script),
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("stage", "dtype", "more"), [(0, "bf16", ["--moe-param-group"]), (3, "fp16", [])])
def test_cifar(tmp_path, stage, dtype, more):
    output = tmp_path / "result.json"
    launch(tmp_path, "cifar.py", "--deepspeed", "--stage", str(stage), "--dtype", dtype, *more, "--output", str(output))
    result = json.loads(output.read_text())
    assert result["dtype"] == {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[dtype]
    # 192 pictures in batches of 16, three times; fp16 may have skipped some.
    assert result["steps"] == len(result["losses"]) == 36
    assert result["before"] <= 0.3 and result["after"] >= 0.8, result


@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="the extra [hf] is not installed: its tests' ranks need all of it"
)
@pytest.mark.parametrize(
    "arguments",
    [["--zero_stage", "2", "--offload"], ["--zero_stage", "3", "--lora_dim", "4", "--gradient_checkpointing"]],
    ids=["stage 2 with offload", "stage 3 with LoRA"],
)
def test_the_first_step_of_deepspeed_chat(tmp_path, arguments):
    launch(tmp_path, "chat_sft.py", *arguments, "--output_dir", str(tmp_path))
    result = json.loads((tmp_path / "result.json").read_text())
    losses = result["losses"]
    assert (
        result["stage"] == int(arguments[1])
        and result["steps"] == 12
        and result["rate"] == pytest.approx(0.0, abs=1e-6)
    )
    assert losses[0] > 4.5 and losses[3] < losses[2] < losses[1] < losses[0] - 0.3, losses
    assert (tmp_path / "latest").read_text() == "last" and (tmp_path / "last").is_dir()

    # The saved model is the one measured last, adapters included.
    saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    loss = plain_loss(saved, torch.tensor(result["rows"]))
    assert loss == pytest.approx(losses[-1], rel=0.01), (loss, losses)
    n_params = sum(value.numel() for value in saved.values())
    assert (n_params < result["n_params"]) == ("--lora_dim" in arguments) and n_params <= result["n_params"]


def plain_loss(weights: dict[str, torch.Tensor], rows: torch.Tensor) -> float:
    """The loss of a Llama of these weights, in fp32, without any engine."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab_size, width = weights["model.embed_tokens.weight"].shape
    sizes = {
        "hidden_size": width,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64, vocab_size=vocab_size))
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    with torch.no_grad():
        return model.eval()(input_ids=rows, labels=rows).loss.item()
