"""docs/out-of-memory.md: the peaks of its table are those that ``deepspeed_c plan`` prints for its model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deepspeed_c.plan.cli import main

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
ROWS = re.findall(
    r"^\| (?:(\d)\. )?[^|]*\| `?[^|]* \| (\d+\.\d\d) \|", (ROOT / "docs/out-of-memory.md").read_text(), re.MULTILINE
)
FIRST: dict[str, Any] = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
HOST = {"device": "cpu"}


def keys_after(step: int) -> dict[str, Any]:
    """The configuration after so many steps of the table."""
    keys = {**FIRST, "train_micro_batch_size_per_gpu": 1 if step else 4, "zero_optimization": {"stage": 0}}
    if step >= 1:
        keys["gradient_accumulation_steps"] = 4
    if step >= 2:
        keys["zero_optimization"] = {"stage": 2 if step < 4 else 3}
    if step >= 3:
        keys["activation_checkpointing"] = {"layers": "auto"}
    if step >= 5:
        keys["zero_optimization"]["offload_optimizer"] = HOST
    if step >= 6:
        keys["zero_optimization"]["offload_param"] = HOST
    return keys


def test_the_table_has_all_steps() -> None:
    assert [int(step or 0) for step, _ in ROWS] == list(range(7))


@pytest.mark.parametrize("step", range(7))
def test_a_peak_is_that_of_the_plan(step: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(keys_after(step)))
    shape = ["--batch", "1" if step else "4", "--seq", "4096", "--ranks", "4", "--device", "cuda"]
    assert main(["--json", "--config", str(file), *shape, str(ROOT / "examples/plan_llama.py")]) == 0
    (chosen,) = [row for row in json.loads(capsys.readouterr().out)["rows"] if row["is_chosen"]]
    assert f"{chosen['peak_bytes'] / 2**30:.2f}" == ROWS[step][1]
