"""Do two installations of the package train to the same bits? The script tests a change that moves code and should not
change results.

``python -m scripts.same_bits BEFORE AFTER``: BEFORE and AFTER are two Python interpreters with the package installed
from two commits. Each runs every case below on 1, 2 and 4 ranks, with an optimizer step after each window, and hashes
every loss, weight and master, and the collectives in their order. Cases that differ are printed, and the exit code is
then 1.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STAGES = (0, 1, 2, 3)
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
OPTIMIZERS = ("AdamW", "Lamb", "Lion", "Muon", "torch")
# Name of a variant -> its keys of zero_optimization, besides the stage.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small buckets": {"reduce_bucket_size": 300, "stage3_prefetch_bucket_size": 300},
    "host states": {"offload_optimizer": {"device": "cpu"}},
    "host states ahead": {"offload_optimizer": {"device": "cpu", "super_offload": True}},
    "file states": {"offload_optimizer": {"device": "nvme"}},
    "host weights": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "file weights": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
    "groups of 2": {"mics_shard_size": 2},
    "in joint memory": {},
}
WORLDS = (1, 2, 4)
STEPS, MICRO_BATCHES, WIDTH = 4, 2, 13


def cases(world: int) -> list[tuple[int, str, str, str]]:
    """Return (stage, precision, optimizer, variant) of the cases that the package accepts."""
    found = []
    for stage, precision, optimizer, variant in itertools.product(STAGES, PRECISIONS, OPTIMIZERS, VARIANTS):
        keys = VARIANTS[variant]
        if stage == 0 and variant not in ("plain", "small buckets"):
            continue
        if "offload_param" in keys and stage < 3:
            continue
        if variant == "in joint memory" and (stage < 3 or world == 1):
            continue
        if "mics_shard_size" in keys and world % 2:
            continue
        if optimizer in ("Lamb", "Muon", "torch") and variant not in ("plain", "groups of 2", "host states"):
            continue
        found.append((stage, precision, optimizer, variant))
    return found


def run_cases(path: str) -> None:
    """Run the cases as one rank. The first rank writes the results to ``path``."""
    import torch

    import deepspeed_c
    from deepspeed_c.comm.ledger import Ledger, LedgerEntry

    entered: list[tuple[str, str]] = []  # (group, collective): groups are independent of one another

    class Noted(LedgerEntry):
        def __init__(self, ledger: Ledger, seq: int, op: str, n_bytes: int, label: str, *more: Any) -> None:
            super().__init__(ledger, seq, op, n_bytes, label, *more)
            entered.append((f"{ledger.axes} {ledger.ranks}", f"{seq} {op} {n_bytes} {label}"))

    Ledger.make_entries(Noted)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp = torch.nn.Linear(WIDTH, 34)
            self.norm = torch.nn.LayerNorm(34)
            self.out = torch.nn.Linear(34, 5, bias=False)
            self.inp.weight.use_muon = self.out.weight.use_muon = True

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (self.out(torch.tanh(self.norm(self.inp(x)))).float() - y).square().mean()

    def digest(tensor: torch.Tensor | None) -> str:
        if tensor is None:
            return "none"
        content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(content).hexdigest()[:16]

    torch.set_num_threads(1)
    deepspeed_c.init_distributed("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    results = {}
    for stage, precision, optimizer, variant in cases(world):
        name = f"{world} ranks, stage {stage}, {precision}, {optimizer}, {variant}"
        torch.manual_seed(7)
        model = Model()
        zero = {"stage": stage, "stage3_param_persistence_threshold": 40, **json.loads(json.dumps(VARIANTS[variant]))}
        for place in zero.values():
            if isinstance(place, dict) and place["device"] == "nvme":
                place["nvme_path"] = os.path.dirname(path)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "gradient_clipping": 0.5,
            "zero_optimization": zero,
            **PRECISIONS[precision],
        }
        if variant == "in joint memory":
            config["comm"] = {"local": "shm", "zero_copy_gather": True}
        client = None
        if optimizer == "torch":
            client = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
            config["zero_allow_untested_optimizer"] = True
        else:
            config["optimizer"] = {"type": optimizer, "params": {"lr": 1e-2}}
        try:
            engine = deepspeed_c.initialize(model=model, optimizer=client, config=config)[0]
        except deepspeed_c.DeepSpeedCError as error:
            results[name] = [type(error).__name__]
            continue
        bits: list[str] = []
        entered.clear()
        with engine:
            for step in range(STEPS * MICRO_BATCHES):
                generator = torch.Generator().manual_seed(1000 * step + rank)
                x, y = torch.randn(3, WIDTH, generator=generator), torch.randn(3, 5, generator=generator)
                loss = engine(x.to(next(model.parameters()).dtype), y)
                bits.append(loss.item().hex())
                engine.backward(loss)
                engine.step()
            for param_name, param in model.named_parameters():
                values = [deepspeed_c.utils.safe_get_full_fp32_param(param)]
                for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                    with contextlib.suppress(deepspeed_c.StateError):  # an optimizer that keeps no such state
                        values.append(deepspeed_c.utils.safe_get_full_optimizer_state(param, key))
                bits += [f"{param_name} {digest(value)}" for value in values]
            consolidated = engine.module_state_dict() if stage < 3 else engine._consolidated_16bit_state_dict()
            for param_name, value in sorted((consolidated or {}).items()):
                bits.append(f"{param_name} {digest(value)}")
        entered.sort(key=lambda entry: entry[0])
        bits.append(f"collectives {hashlib.sha256(repr(entered).encode()).hexdigest()[:16]} of {len(entered)}")
        everyone: list[Any] = [None] * world
        torch.distributed.all_gather_object(everyone, bits)
        results[name] = everyone
    if rank == 0:
        Path(path).write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


def results_of(python: str, world: int, folder: str) -> dict[str, Any]:
    """Run the cases on ``world`` ranks with the package of one Python, and return their results."""
    path = os.path.join(folder, "results.json")
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    # The script is copied to a separate folder, so that Python imports the installed package and not the package beside
    # this script.
    script = os.path.join(folder, "same_bits.py")
    Path(script).write_text(Path(__file__).read_text())
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DSC_NUM_THREADS": "1", "TORCHELASTIC_ERROR_FILE": ""}
    subprocess.run([*command, script, "--results", path], check=True, cwd=folder, env=env)
    return json.loads(Path(path).read_text())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON")
    parser.add_argument("--results", help="run as a rank, and write the results here")
    options = parser.parse_args(argv)
    if options.results:
        run_cases(options.results)
        return 0
    if len(options.pythons) != 2:
        parser.error("two Pythons are compared")
    n_cases, n_refused, different = 0, 0, []
    for world in WORLDS:
        found = []
        for python in options.pythons:
            with tempfile.TemporaryDirectory() as folder:
                found.append(results_of(python, world, folder))
        before, after = found
        n_cases += len(before)
        n_refused += sum(len(result) == 1 and isinstance(result[0], str) for result in before.values())
        different += [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    for name in sorted(different):
        print(f"different: {name}")
    print(f"{n_cases} cases, {n_refused} of them refused by the package, {len(different)} different")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
