"""examples/curriculum_gpt.py with a tiny model on 2 ranks: its table and plot, and its metric."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

from curriculum_gpt import analyze
from text import Windows

from deepspeed_c.data.indexed import MMapIndexedDataset
from tests import fresh

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "curriculum_gpt.py"
TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--tokens", "8192", "--points", "4"]


def test_it_trains_with_each_curriculum(tmp_path):
    command = [SCRIPT, *TINY, "--grow-steps", "8", "--out", tmp_path]
    done = fresh.run_ranks_of(2, command, cwd=tmp_path, is_told=True)
    said = "".join(rank.stdout + rank.stderr for rank in done)
    assert all(rank.returncode == 0 for rank in done), said
    curves = json.loads((tmp_path / "curriculum.json").read_text())
    assert list(curves) == ["none", "length", "frequency"]
    assert "| none | length | frequency |" in said and (tmp_path / "curriculum.svg").stat().st_size > 1000
    # Windows of 8, 11, ... bytes in multiples of 8, as fixed_linear has it, then whole ones.
    lengths = [max(8, min(32, (8 + 24 * step // 8) // 8 * 8)) for step in range(1, 41)]
    n_tokens = {sum(lengths[:k]) * 8 for k in range(1, 41)}
    assert all(tokens in n_tokens for tokens, _ in curves["length"]), curves
    assert [tokens for tokens, _ in curves["none"]] == [2048, 4096, 6144, 8192] == [n for n, _ in curves["frequency"]]
    # Untrained, the loss is the logarithm of 256: 5.55.
    assert all(3 < points[-1][1] < points[0][1] < 5.6 for points in curves.values()), curves


def test_its_metric_is_that_of_plain_counts(tmp_path):
    text = b"abracadabra, a hat, and the end of it" * 9
    windows = Windows(text, 16)
    analyze(windows, text, str(tmp_path))
    got = MMapIndexedDataset(str(tmp_path / "frequency/frequency_sample_to_metric"))
    counts = Counter(text)
    for i in range(len(windows)):
        window = text[16 * i : 16 * i + 17]
        wanted = 1000 * sum(-math.log(counts[byte] / len(text)) for byte in window) / 17
        assert abs(int(got[i][0]) - wanted) <= 1, (i, got[i], wanted)
