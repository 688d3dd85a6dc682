"""A training script of an elastic launch in the tests. It has no line about restarts: ``checkpoint.auto_resume`` does all.

elastic_steps.py FOLDER STEPS STAGE. Each rank appends its part of a step to FOLDER/roundN-rankR. Steps are slow until
FOLDER/hurry exists.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

import deepspeed_c
from deepspeed_c.utils import RepeatingLoader
from tests.deepspeed_c.engine.test_other_worlds import BATCH, Net, Numbered

N_SAMPLES, SLOW_SECONDS = 60, 0.2


def main(folder: Path, n_steps: int, stage: int) -> None:
    """Train to step ``n_steps``."""
    torch.set_num_threads(1)
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "seed": 5,
        "checkpoint": {"auto_resume": str(folder / "saved"), "every": "0.5s", "keep_last": 3},
    }
    engine = deepspeed_c.initialize(model=Net(), config=config, training_data=Numbered(N_SAMPLES))[0]
    batches = iter(RepeatingLoader(engine.training_dataloader))
    number = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    record = (folder / f"round{number}-rank{os.environ.get('RANK', '0')}").open("a")
    while engine.global_steps < n_steps:
        samples, lr = [], engine.get_lr()
        for _ in range(engine.gradient_accumulation_steps()):
            batch = next(batches)
            samples += batch[:, -1].int().tolist()
            engine.backward(engine(batch))
            engine.step()
        loss = engine._optimizer.last_facts.loss
        record.write(json.dumps([engine.global_steps, samples, loss, lr]) + "\n")
        record.flush()
        if not (folder / "hurry").exists():
            time.sleep(SLOW_SECONDS)
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[-3]), int(sys.argv[-2]), int(sys.argv[-1]))
