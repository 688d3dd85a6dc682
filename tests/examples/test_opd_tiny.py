"""examples/opd_tiny.py on two ranks: a student learns from its teacher on answers of different lengths."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests import fresh

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "opd_tiny.py"


@pytest.mark.parametrize("more", [(), ("--top_k", "32", "--beta", "0")], ids=["mixture", "top k"])
def test_the_loss_falls(tmp_path, more):
    output = tmp_path / "losses.json"
    command = [SCRIPT, "--rounds", "20", "--teacher_steps", "60", "--output", output, *more]
    done = fresh.run_ranks_of(2, command, cwd=tmp_path, preload="tests.deepspeed_c.inject.preload", is_told=True)
    said = "".join(rank.stdout + rank.stderr for rank in done)
    assert all(rank.returncode == 0 for rank in done), said
    losses = json.loads(output.read_text())
    print(losses)
    assert len(losses) == 20 and all(math.isfinite(loss) and loss > 0 for loss in losses), losses
    assert losses[-1] < 0.75 * losses[0], losses
    assert "answers of" in said and "loss from" in said
