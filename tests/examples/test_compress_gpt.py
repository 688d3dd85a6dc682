"""examples/compress_gpt.py as a user starts it, with a tiny model: its table, and bytes as counted by hand. Its GPT is that
of gpt.py."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from compress_gpt import CompressibleGPT
from gpt import GPT

from tests import fresh

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "compress_gpt.py"
TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--steps", "20", "--tune-steps", "5"]


def test_it_compresses_and_prints_a_table(tmp_path):
    done = fresh.run([SCRIPT, *TINY, "--out", tmp_path])
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["contender"]: row for row in json.loads((tmp_path / "compress.json").read_text())}
    assert list(rows) == ["fp32", "int8", "int4", "half"]
    assert all(f"| {name} | " in done.stdout for name in rows), done.stdout
    # Untrained, the loss is the logarithm of 256: 5.55.
    assert all(3 < row["loss"] < 5.2 and abs(row["loss_to_fp32"] - 1) < 0.05 for row in rows.values()), rows
    n_square, rest = (
        4 * 32 * 32,
        4 * (256 * 32 + 3 * 32),
    )  # weights of attention; bytes of the embedding and three norms
    n_linear = n_square + 8 * 32 * 32
    n_packed, n_rows = 6, 5 * 32 + 128  # of the MLP, 128 rows
    wanted = {
        "fp32": rest + 4 * n_linear,
        # Each of the 128 rows of mlp.up has a scale; mlp.down has 32 groups, its rows.
        "int8": rest + n_linear + 4 * n_rows + 16 * n_packed,
        # 128 groups of each weight: a quarter of a row of 32, a row of mlp.up, a quarter of a row of mlp.down.
        "int4": rest + n_linear // 2 + 4 * 128 * n_packed + 16 * n_packed,
        "half": rest + 2 * n_linear,
    }
    assert {name: row["bytes"] for name, row in rows.items()} == wanted


def test_its_model_is_the_gpt_of_the_other_example():
    torch.manual_seed(0)
    theirs, ours = GPT(2, 32, 4, 16), CompressibleGPT(2, 32, 4, 16)
    weights = theirs.state_dict()
    for i in range(2):
        parts = weights.pop(f"blocks.{i}.qkv.weight").chunk(3)
        weights |= {f"blocks.{i}.{name}.weight": part for name, part in zip("qkv", parts)}
    ours.load_state_dict(weights)
    tokens = torch.randint(256, (3, 16))
    torch.testing.assert_close(ours(tokens), theirs.logits(tokens))
