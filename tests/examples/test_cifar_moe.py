"""examples/cifar_moe.py on two ranks: experts over ranks learn the classes, and wrong options are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cifar_moe import N_CLASSES, Images

from tests import fresh

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "examples" / "cifar_moe.py")
RESIDUAL = ["--mlp-type", "residual", "--top-k", "1", "--min-capacity", "0", "--noisy-gate-policy", "RSample"]


@pytest.mark.parametrize("stage", [0, 2])
def test_experts_on_two_ranks_learn_the_classes(tmp_path, stage):
    output = tmp_path / "result.json"
    given = ["--moe", "--ep-world-size", "2", "--num-experts", "2", "2", *RESIDUAL, "--stage", str(stage)]
    done = fresh.run_ranks_of(2, [SCRIPT, *given, "--output", str(output)], cwd=tmp_path, is_told=True)
    said = "".join(rank.stdout + rank.stderr for rank in done)
    assert all(rank.returncode == 0 for rank in done), said
    result = json.loads(output.read_text())
    assert len(result["losses"]) == 160  # 640 images in batches of 32, eight times
    assert result["before"] <= 0.25 and result["after"] >= 0.75, (result["before"], result["after"])
    assert f"{result['after']:.1%} after; chance is 10%" in said


def test_more_ranks_for_experts_than_there_are_is_an_error_that_says_so(tmp_path):
    given = ["--moe", "--ep-world-size", "3", "--num-experts", "3", "--images", "32"]
    for done in fresh.run_ranks_of(2, [SCRIPT, *given], cwd=tmp_path):
        assert done.returncode != 0 and "ep_size" in done.stderr and "over 3 of the 2 ranks" in done.stderr, done.stderr


def test_pixels_alone_do_not_show_the_class():
    """A linear classifier is far below the network, because the places of waves are random."""
    seen, unseen = Images(640, seed=0), Images(200, seed=1)
    assert torch.bincount(unseen.labels).tolist() == [200 // N_CLASSES] * N_CLASSES
    targets = torch.nn.functional.one_hot(seen.labels, N_CLASSES).float()
    gram = seen.images.flatten(1)
    weights = gram.T @ torch.linalg.solve(gram @ gram.T + 100.0 * torch.eye(len(gram)), targets)
    right = (unseen.images.flatten(1) @ weights).argmax(1) == unseen.labels
    assert right.float().mean().item() < 0.45, right.float().mean()
