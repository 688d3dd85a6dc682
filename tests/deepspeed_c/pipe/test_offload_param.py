"""Pipelines whose sharded weights lie in host memory or in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.deepspeed_c.pipe.test_engine import SCHEDULES
from tests.deepspeed_c.pipe.test_stage3 import TIGHT, check, plain, stage3, train
from tests.ranks import run_ranks


@pytest.mark.parametrize("limit", [{}, TIGHT], ids=["all", "one"])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_offloaded_weights_train_as_one_process(schedule: str, device: str, limit: dict[str, Any], tmp_path: Path):
    section = {"device": device, "pin_memory": False, **({"nvme_path": str(tmp_path)} if device == "nvme" else {})}
    config = stage3(4, {"offload_param": section, "offload_optimizer": section, **limit})
    outcome = run_ranks(4, train, 2, 4, config, {"schedule": schedule, **SCHEDULES[schedule]})
    check(outcome, plain(2, 4))
