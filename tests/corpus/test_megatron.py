"""A training script in the style of Megatron-DeepSpeed trains on two ranks to the same weights as plain torch in one
process. A call of a feature that is not implemented raises an error that says so.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ranks import free_port

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "corpus" / "scripts" / "pretrain_gpt.py"
# The script without its DeepSpeed imports, for the plain process
PLAIN = re.sub(r"^(import|from) deepspeed.*\n", "", SCRIPT.read_text(), flags=re.MULTILINE)


def train(tmp_path, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "deepspeed_c", "run", "deepspeed", "--num_gpus", "2", "--master_port", str(free_port())]
        + [str(SCRIPT), "--save", str(tmp_path / "weights.pt"), *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def plain_weights():
    space = {"__name__": "plain", "MoE": type(None)}
    exec(compile(PLAIN, str(SCRIPT), "exec"), space)  # noqa: S102
    model = space["make_model"]()
    optimizer = space["adam"](model.parameters())
    for tokens in space["batches"](0, 1):
        model(tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), space["CLIP"])
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("stage", [1, 3])
def test_it_trains_without_the_features(tmp_path, stage):
    done = train(tmp_path, "--stage", str(stage))
    assert done.returncode == 0, done.stderr[-3000:]
    found, expected = torch.load(tmp_path / "weights.pt"), plain_weights()
    assert found["steps"] == 2 and found["weights"].keys() == expected.keys()
    for name, weight in expected.items():
        print(name, found["weights"][name].flatten()[:3], weight.flatten()[:3])
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-5, atol=2e-6, msg=name)


QUANTIZED = {
    "weight_quantization": {
        "shared_parameters": {"enabled": True, "quantize_weight_in_forward": True, "schedule_offset": 1},
        "different_groups": {"all": {"params": {"target_bits": 8}, "modules": ["*"]}},
    }
}


def test_it_trains_with_quantized_weights(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"compression_training": QUANTIZED}))
    done = train(tmp_path, "--stage", "3", "--compression", "--deepspeed_config", str(config))
    assert done.returncode == 0, done.stderr[-3000:]
    found, plain = torch.load(tmp_path / "weights.pt")["weights"], plain_weights()
    matrices = [name for name, weight in plain.items() if weight.dim() == 2]
    for name in matrices:
        print(name, found[name].unique().numel(), found[name].flatten()[:3], plain[name].flatten()[:3])
        # Two steps with other roundings move the weights a little; a step of the grid is 1/127.5 of the largest weight.
        torch.testing.assert_close(found[name], plain[name], rtol=0, atol=float(plain[name].abs().max()) / 20, msg=name)
    assert any(found[name].unique().numel() <= 256 < plain[name].unique().numel() for name in matrices)


@pytest.mark.parametrize(
    ("switch", "name"), [("--random-ltd", "deepspeed.runtime.data_pipeline.data_routing.helper.convert_to_random_ltd")]
)
def test_it_stops_where_a_feature_is_used(tmp_path, switch, name):
    done = train(tmp_path, "--stage", "1", switch)
    assert done.returncode == 1 and not (tmp_path / "weights.pt").exists()
    assert f"{name}: was called, and is not part of this version" in done.stderr, done.stderr[-3000:]
