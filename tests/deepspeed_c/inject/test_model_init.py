"""``tp_model_init`` reads its section as ``initialize`` does: once, with the same values and the same messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed_c
from deepspeed_c.config import load_config
from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.errors import ConfigError
from deepspeed_c.inject import model_init
from deepspeed_c.inject.autotp_config import AutoTPConfig, PartitionType, TPLayerSpec
from scripts.house import counted_reads
from tests.ranks import run_ranks

RULES = {"layer_specs": [{"patterns": [".*0.weight$"], "partition_type": "column"}], "strict_mode": False}
GOOD: list[dict[str, Any]] = [
    {},
    {"autotp_size": "1"},
    {"autotp_size": 1, "tp_overlap_comm": "True"},
    {"kernel_inject": False, "x-parked": 3},
    {"partition_config": RULES},
]
BAD: list[Any] = [
    {"autotp_sise": 1},
    {"autotp_size": 1.5},
    {"autotp_size": 2**70},
    {"tp_overlap_comm": "maybe"},
    {"keep_module_on_host": True},
    {"partition_config": {"layer_specs": [{"patterns": ".*", "partition_type": "diagonal"}]}},
    {"partition_config": 3},
]


def reads_body(rank: int, world: int, folder: str) -> None:
    found = []
    whole_section, model_init.cut_model = model_init.cut_model, lambda model, section, *rest: found.append(section)
    file = Path(folder) / "ds.json"
    try:
        for section in GOOD:
            wanted = load_config({"tensor_parallel": section}, world_size=1, batch="skip").tensor_parallel
            file.write_text(json.dumps({"tensor_parallel": section, "optimizer": "nonsense"}))
            for config in (section, {"tensor_parallel": section}, str(file)):
                with counted_reads() as counts:
                    deepspeed_c.tp_model_init(torch.nn.Linear(4, 4), 1, None, config)
                n = counts["read"]
                print(section, n, found[-1], wanted)
                assert n == 1 and found[-1] == wanted
        deepspeed_c.tp_model_init(torch.nn.Linear(4, 4), 1, None, {"train_batch_size": 4})  # without a section
        assert found[-1] == TensorParallel()
        rules = AutoTPConfig(layer_specs=[TPLayerSpec([".*0.weight$"], PartitionType.COLUMN)])
        deepspeed_c.tp_model_init(torch.nn.Linear(4, 4), 1, None, {"partition_config": rules})
        assert (
            found[-1].partition_config
            == load_config(
                {"tensor_parallel": {"partition_config": RULES}}, world_size=1, batch="skip"
            ).tensor_parallel.partition_config
        )
        n_before = len(found)
        for section in BAD:
            with pytest.raises(ConfigError) as theirs:
                load_config({"tensor_parallel": section}, world_size=1, batch="skip")
            with pytest.raises(ConfigError) as ours:
                deepspeed_c.tp_model_init(torch.nn.Linear(4, 4), 1, None, section)
            print(section, ours.value, theirs.value)
            assert (type(ours.value), str(ours.value)) == (type(theirs.value), str(theirs.value))
        assert len(found) == n_before
    finally:
        model_init.cut_model = whole_section


def test_the_section_is_read_as_by_initialize(tmp_path: Path) -> None:
    run_ranks(1, reads_body, str(tmp_path))
