"""The modules that a rank has imported after training. Torch's compiler and sharding packages are not among them,
because their import takes nearly as long as torch's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fresh

TIMEOUT_SECONDS = 300
# Each is the top of a tree of modules. torch imports the others together with the first.
HEAVY = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
    "sympy",
)
FOUND = f"[name for name in {HEAVY} if name in sys.modules]"

# Runs as "python -c PROGRAM rank world folder" in a process of its own, because other tests and the ranks of run_ranks
# have imported these modules.
PROGRAM = f"""
import sys
import torch
import torch.distributed as dist
import deepspeed_c

rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{{folder}}/store", rank=rank, world_size=world)
TYPES = ["Adam", "AdamW", "Lamb", "Lion", "Muon", "Adagrad", "SGD"]
CASES = [(0, name, None) for name in TYPES]
CASES += [(stage, "AdamW", None) for stage in (1, 2, 3)]
CASES += [(stage, "AdamW", device) for stage in (2, 3) for device in ("cpu", "nvme")]
for stage, name, device in CASES:
    torch.manual_seed(0)
    zero = {{"stage": stage}}
    if device is not None:
        zero["offload_optimizer"] = {{"device": device, "nvme_path": folder}}
        if stage == 3:
            zero["offload_param"] = {{"device": device, "nvme_path": folder}}
    config = {{
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {{"type": name, "params": {{"lr": 1e-3}}}},
        "scheduler": {{"type": "WarmupLR", "params": {{}}}},
        "bf16": {{"enabled": stage > 0}},
        "zero_optimization": zero,
    }}
    model = torch.nn.Sequential(torch.nn.Linear(37, 64), torch.nn.GELU(), torch.nn.Linear(64, 5))
    engine, optimizer, _, _ = deepspeed_c.initialize(model=model, config=config)
    dtype = torch.bfloat16 if stage else torch.float32
    for _ in range(4):
        engine.backward(engine(torch.randn(2, 37, dtype=dtype)).float().square().mean())
        engine.step()
    assert engine.global_steps == 2, engine.global_steps
    optimizer.zero_grad()
    tag = f"{{stage}}-{{name}}-{{device}}"
    engine.save_checkpoint(folder, tag=tag)
    engine.load_checkpoint(folder, tag=tag)
    found = {FOUND}
    assert not found, f"stage {{stage}}, {{name}}, offloaded to {{device}}: {{found}}"
    engine.destroy()

# Of a fused optimizer that is used without an engine.
weight = torch.nn.Parameter(torch.ones(7))
optimizer = deepspeed_c.ops.adam.FusedAdam([weight], lr=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
weight.square().sum().backward()
optimizer.step()
schedule.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
optimizer.add_param_group({{"params": [torch.nn.Parameter(torch.ones(3))]}})
assert weight.grad is None and weight.max() < 1 and len(optimizer.param_groups) == 2
dist.destroy_process_group()
import os
os.write(1, f"trained {{len(CASES)}} {{{FOUND}}}\\n".encode())
"""


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, f"{out}\n{err}"
    return out.splitlines()[-1]


@pytest.mark.parametrize("world", [1, 2])
def test_training_imports_no_compiler(tmp_path: Path, world: int) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(world), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(world)
    ]
    try:
        assert [finish(process) for process in ranks] == ["trained 14 []"] * world
    finally:
        for process in ranks:
            process.kill()


def test_the_check_finds_the_compiler() -> None:
    """The check finds the compiler after its import. torch then has all of the modules, so none of the names is
    outdated."""
    code = f"import sys, torch; before = {FOUND}; import torch._dynamo; print(before, {FOUND})"
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    ).stdout
    assert out == f"[] {list(HEAVY)}\n"


COMPILED = """
import torch
from deepspeed_c.ops.adam import FusedAdam
weight = torch.nn.Parameter(torch.ones(7))
optimizer = FusedAdam([weight], lr=0.1)
@torch.compile(backend="eager")
def forget(x):
    optimizer.zero_grad()
    return x + 1
for _ in range(3):
    weight.square().sum().backward()
    assert weight.grad is not None
    assert forget(torch.ones(2)).tolist() == [2.0, 2.0]
    assert weight.grad is None
print(type(optimizer.zero_grad).__name__, optimizer.zero_grad.__name__)
"""


def test_a_method_inside_a_compiled_function_is_left_out_of_the_graph() -> None:
    done = fresh.run(["-c", COMPILED])
    assert (done.stdout, done.returncode) == ("method zero_grad\n", 0), done.stderr
