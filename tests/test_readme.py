"""Every command in the README runs unchanged, with a script and a configuration under the names that the command uses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import deepspeed_c
from tests.ranks import free_port

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 300
# Commands that install or train for minutes -> the test that runs them or a variant of them.
COVERED = {
    "pip install torch setuptools pybind11": "tests/test_package.py",
    "pip install --no-build-isolation .": "tests/test_package.py",
    "make train": "tests/examples/test_train_gpt.py",
    "make test": "tests/test_readme.py",
}
TRAIN = """
import argparse
import torch
import deepspeed_c
MODEL
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser = deepspeed_c.add_config_arguments(parser)
args = parser.parse_args()
torch.manual_seed(0)
model = Model()
config = args.deepspeed_config or "ds_config.json"
engine, *_ = deepspeed_c.initialize(model=model, model_parameters=model.parameters(), config=config)
ids = torch.randint(64, (2, 16), device=engine.device)
for _ in range(2):
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
print(f"trained to {loss.item():.3f} with {engine.world_size} ranks by {type(engine).__module__}", flush=True)
"""
# Its imports cost a third of what those of transformers do, and its compilation a fraction.
PLAIN = """
from types import SimpleNamespace
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = (torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
        self.layers = torch.nn.Sequential(*layers)
    def forward(self, input_ids, labels):
        logits = self.layers(input_ids)
        return SimpleNamespace(loss=torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
"""
# A model that can be cut over tensor-parallel ranks.
LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM
def Model():
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096))
"""
# Scripts of the Hugging Face stack take their configuration by --deepspeed.
TRAIN_HF = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
arguments = TrainingArguments(output_dir="out", max_steps=2, per_device_train_batch_size=2, learning_rate=1e-3, report_to=[], use_cpu=True,
                              weight_decay=0.0, save_strategy="no", deepspeed=sys.argv[sys.argv.index("--deepspeed") + 1])
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                     num_attention_heads=4, num_key_value_heads=2))
rows = [dict(input_ids=torch.arange(8) + i, labels=torch.arange(8) + i) for i in range(8)]
trainer = Trainer(model=model, args=arguments, train_dataset=rows)
trainer.train()
print(f"trained by {type(trainer.model_wrapped).__module__}", flush=True)
"""
CONFIG = """{
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 1,
  "gradient_clipping": 1.0,
  "zero_optimization": {"stage": 2},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}
}"""
# Part of a command -> what it prints.
SAYS = {
    "train_hf.py": "trained by deepspeed_c.engine.engine", "--num_procs 2": "with 2 ranks by deepspeed_c.engine.engine",
    "--num_processes 2": "with 2 ranks by deepspeed_c.engine.engine",
    "--num_gpus 2": "with 2 ranks by deepspeed_c.engine.engine",
    "python train.py": "with 1 ranks by deepspeed_c.engine.engine", "config show": "zero_optimization.stage",
    "config check": "zero_optimization.stage 2", "--params 7e9": "GiB per rank", "--seq 4096": "sent along tp",
    "compile show": "zero2_compile", "deepspeed_c report": "torch",
}  # fmt: skip


def commands() -> list[str]:
    blocks = re.findall(
        r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return list(
        dict.fromkeys(line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip())
    )


OF_LAUNCHERS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@pytest.mark.limit(300, reason="trains and compiles: 32 s on a fast machine")
@pytest.mark.always(5)
@pytest.mark.parametrize("command", [command for command in commands() if command not in COVERED])
def test_command_runs(command: str, tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(CONFIG)
    (tmp_path / "train.py").write_text(TRAIN.replace("MODEL", LLAMA if "--tp" in command else PLAIN))
    (tmp_path / "train_hf.py").write_text(TRAIN_HF)
    said = next(text for part, text in SAYS.items() if part in command)
    programs = os.path.dirname(sys.executable)
    port = str(free_port())  # other tests run at the same time
    # A test that made an engine in this process has set the variables of a launcher.
    inherited = {name: value for name, value in os.environ.items() if name not in OF_LAUNCHERS}
    done = subprocess.run(
        command.replace("accelerate launch", f"accelerate launch --main_process_port {port}"),
        shell=True,
        cwd=tmp_path,
        env={
            **inherited,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "CUDA_VISIBLE_DEVICES": "",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert said in done.stdout + done.stderr, f"{command}\n{done.stdout[-2000:]}"


def test_the_other_commands_are_known_and_tested_elsewhere() -> None:
    assert COVERED.keys() <= set(commands()), "a command is no longer in README"
    assert all((ROOT / place).is_file() for place in COVERED.values())
    for target in (command.split()[1] for command in COVERED if command.startswith("make ")):
        assert re.search(rf"^{target}:.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), target


def test_its_configuration_is_accepted() -> None:
    (text,) = re.findall(
        r"^```json\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    config = json.loads(text)
    assert (
        deepspeed_c.DeepSpeedConfig({**config, "strict": True}).zero_config.stage
        == config["zero_optimization"]["stage"]
    )
