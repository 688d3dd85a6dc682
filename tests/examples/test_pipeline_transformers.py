"""examples/pipeline_transformers.py on two ranks: it learns, and transformers computes the loss of its folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import fresh

pytest.importorskip("transformers")

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pipeline_transformers.py"
TINY = ["--layers", "2", "--width", "32", "--context", "32", "--lib-bytes", "200000"]


def losses_of(folder: Path, *more: str) -> tuple[float, float, float]:
    """(held-out loss of the pipeline, entropy of bytes, held-out loss of the saved model)."""
    command = [SCRIPT, *TINY, "--out", folder, *more]
    done = fresh.run_ranks_of(2, command, cwd=folder.parent, preload="tests.deepspeed_c.inject.preload", is_told=True)
    text = "".join(rank.stdout + rank.stderr for rank in done)
    assert all(rank.returncode == 0 for rank in done), text
    (first,) = re.findall(r"held-out loss ([\d.]+) nats/byte; entropy of bytes ([\d.]+)", text)
    (second,) = re.findall(r"the same loss by transformers ([\d.]+)", text)
    return float(first[0]), float(first[1]), float(second)


def test_it_learns_and_goes_on_from_its_folder(tmp_path):
    loss, entropy, by_transformers = losses_of(tmp_path / "first", "--steps", "60")
    assert by_transformers == pytest.approx(loss, abs=2e-4) and loss < entropy + 0.3 and loss < 4.5
    more = ("--model", str(tmp_path / "first"), "--steps", "40", "--schedule", "zb_h1")
    later, _, by_transformers = losses_of(tmp_path / "second", *more)
    assert by_transformers == pytest.approx(later, abs=2e-4) and later < loss
