"""Configurations of users run, cause a note or are refused, as configurations.py says.

A configuration that DeepSpeed accepts and this package refuses has a reason there.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from deepspeed_c.config import load_config, problems_of
from tests.corpus.configurations import CONFIGURATIONS, Configuration

# By path: the value that the Trainer and accelerate derive from their arguments and the model, and put in place of
# "auto".
FILLED = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "fp16.enabled": False,
    "bf16.enabled": True,
    "optimizer.params.lr": 5e-5,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 5e-5,
    "scheduler.params.warmup_num_steps": 10,
    "scheduler.params.total_num_steps": 100,
    "zero_optimization.reduce_bucket_size": 4096,
    "zero_optimization.stage3_prefetch_bucket_size": 3686,
    "zero_optimization.stage3_param_persistence_threshold": 640,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
}


def filled(content: Any, path: str = "") -> Any:
    """A copy in which each "auto" that the Trainer knows is replaced by its value."""
    if isinstance(content, dict):
        return {name: filled(value, f"{path}.{name}".lstrip(".")) for name, value in content.items()}
    return FILLED.get(path, content) if content == "auto" else content


def content_of(row: Configuration) -> dict[str, Any]:
    return filled(row.content) if row.by == "trainer" else row.content


def outcome_of(row: Configuration) -> tuple[str, list[str]]:
    problems = problems_of(content_of(row), world_size=row.world)
    if problems:
        return "error", [f"{problem.where}: {problem.what}" for problem in problems]
    notes = list(load_config(content_of(row), world_size=row.world).notes)
    return "note" if notes else "runs", notes


def test_there_are_enough_and_each_has_a_name():
    names = [row.name for row in CONFIGURATIONS]
    assert len(names) >= 80 and len(set(names)) == len(names)
    outcomes = [row.outcome for row in CONFIGURATIONS]
    assert set(outcomes) == {"runs", "note", "error"} and min(map(outcomes.count, outcomes)) >= 10
    for row in CONFIGURATIONS:
        assert bool(row.words) == (row.outcome != "runs") and (not row.why or row.outcome == "error"), row.name


@pytest.mark.parametrize("row", CONFIGURATIONS, ids=lambda row: row.name)
def test_what_becomes_of_it(row):
    outcome, texts = outcome_of(row)
    assert outcome == row.outcome, (outcome, texts)
    for word in row.words:
        assert any(word in text for text in texts), (word, texts)
    for text in texts:
        assert any(word in text for word in row.words), f"nobody expects {text!r}"


PEER = """
import json, logging, sys
import deepspeed
from deepspeed.runtime import config
logging.disable(logging.CRITICAL)
config.dist.get_rank = lambda: 0

class Ranks:
    def __init__(self, n):
        self.get_data_parallel_world_size = lambda: n

outcomes = []
for content, n in json.load(sys.stdin):
    try:
        config.DeepSpeedConfig(content, mpu=Ranks(n))
        outcomes.append("")
    except Exception as error:
        outcomes.append(f"{type(error).__name__}: {error}"[:300])
print("OUTCOMES " + json.dumps(outcomes))
"""


def test_what_deepspeed_parses_is_no_error_here_without_a_reason():
    python = os.environ.get("DSC_PEER_PYTHON")
    if not python:
        pytest.skip("DSC_PEER_PYTHON does not name a Python that has DeepSpeed")
    given = json.dumps([(content_of(row), row.world) for row in CONFIGURATIONS])
    done = subprocess.run([python, "-c", PEER], input=given, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.rpartition("OUTCOMES ")[2])
    for row, refused in zip(CONFIGURATIONS, outcomes, strict=True):
        if row.outcome == "error":
            assert bool(row.why) == (not refused), f"{row.name}: {row.why!r}, and DeepSpeed says {refused!r}"
    n_parsed = outcomes.count("")
    assert n_parsed >= 80, f"DeepSpeed parses {n_parsed} of {len(outcomes)}"
