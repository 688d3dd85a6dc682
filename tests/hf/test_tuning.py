"""``--autotuning`` of a script of the Trainer, which stays as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.training import config

SCRIPT = """
import deepspeed_c

deepspeed_c.install_as_deepspeed()

import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, Trainer, TrainingArguments


class Ones(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return {"input_ids": torch.ones(12, dtype=torch.long), "labels": torch.ones(12, dtype=torch.long)}


(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
trainer = Trainer(model=model, args=args, train_dataset=Ones())
trainer.train()
print(f"trained with {args.per_device_train_batch_size} x {args.gradient_accumulation_steps}")
"""
CONFIG = config(
    2,
    "AdamW",
    rows="auto",
    lr="auto",
    accumulate="auto",
    train_batch_size="auto",
    autotuning={
        "start_profile_step": 1,
        "end_profile_step": 2,
        "min_train_micro_batch_size_per_gpu": 2,
        "max_train_micro_batch_size_per_gpu": 2,
    },
)


@pytest.mark.limit(900, reason="three processes import transformers one after the other")
def test_a_trainer_script_is_planned_tuned_and_trained(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    words = ["--num_procs", "1", "--autotuning", "run", "script.py", "--deepspeed", "ds.json"]
    words += ["--output_dir", "out", "--use_cpu", "--report_to", "none", "--max_steps", "4", "--save_strategy", "no"]
    words += ["--gradient_accumulation_steps=3"]
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed_c", *words],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path)},
        check=False,
        capture_output=True,
        text=True,
        timeout=900,  # three processes that import transformers one after the other, on a machine that others use
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "autotuning_results" / "records.json").read_text())["experiments"]
    assert row["status"] == "ran" and row["plan"]["host"] > 0, row
    assert row["metrics"]["train_micro_batch_size_per_gpu"] == 2
    assert row["metrics"]["gradient_accumulation_steps"] == 3, row["metrics"]
    assert "trained with 2 x 3" in done.stdout
