"""``deepspeed_c run accelerate launch --use_deepspeed``: the started processes import deepspeed_c as `deepspeed`, and
the options reach the engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.ranks import free_port

SCRIPT = """
import json, os, sys
import torch
from accelerate import Accelerator, PartialState

PartialState(cpu=True)  # ranks on a CPU: accelerate would take them for one process
acc = Accelerator()
model = torch.nn.Linear(4, 1)
engine, optimizer, loader = acc.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=2)
)
for batch in loader:
    loss = engine(batch).square().mean()
    acc.backward(loss)
    optimizer.step()
if acc.is_main_process:
    found = [
        type(engine).__module__, str(acc.distributed_type), acc.num_processes, engine.zero_optimization_stage(),
        engine.gradient_accumulation_steps(), engine.gradient_clipping(), engine.global_steps, loss.item()]
    with open("found.json", "w") as file:  # and not to the output, where the other rank's lines may come between
        json.dump(found, file)
acc.end_training()
"""


@pytest.mark.parametrize("n_processes", [1, 2])
def test_accelerate_launch(tmp_path, n_processes):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "deepspeed_c", "run", sys.executable, "-m", "accelerate.commands.launch"]
    command += [
        "--use_deepspeed",
        "--zero_stage",
        "3",
        "--gradient_accumulation_steps",
        "2",
        "--gradient_clipping",
        "0.5",
    ]
    command += ["--num_processes", str(n_processes), "--num_machines", "1", "--mixed_precision", "no"]
    command += ["--dynamo_backend", "no", "--main_process_port", str(free_port()), "script.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path)}  # no configuration of the user's
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *facts, steps, loss = json.loads((tmp_path / "found.json").read_text())
    assert facts == ["deepspeed_c.engine.engine", "DistributedType.DEEPSPEED", n_processes, 3, 2, 0.5]
    assert steps > 0 and loss >= 0.0
