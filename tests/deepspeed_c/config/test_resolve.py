"""A configuration is read once, and resolved for any number of ranks from what was read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import deepspeed_c
from deepspeed_c.compat.ds_config import DeepSpeedConfig
from deepspeed_c.config import load_config, read_config
from deepspeed_c.config.source import read_source
from deepspeed_c.errors import BatchSizeError, ConfigError
from scripts.house import counted_reads
from tests.ranks import on_ranks, run_ranks

SMALL = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}


@on_ranks(2)
def test_initialize_reads_each_source_once(rank: int, world: int, folder: str) -> None:
    """Engines of every way to read weights: whole, sharded, and from the meta device."""
    file = Path(folder) / f"ds{rank}.json"
    for stage in (0, 1, 3):
        for device in ("cpu", "meta"):
            file.write_text(json.dumps({**SMALL, "zero_optimization": {"stage": stage}}))
            with counted_reads() as counts:
                engine, *_ = deepspeed_c.initialize(model=torch.nn.Linear(7, 5, device=device), config=str(file))
            print(stage, device, counts)
            assert counts == {"read": 1, "checked": 1}
            engine.close()
    file.write_text(json.dumps(SMALL))
    with counted_reads() as counts:  # two sources are compared
        engine, *_ = deepspeed_c.initialize(
            model=torch.nn.Linear(7, 5), config=str(file), args=SimpleNamespace(deepspeed_config=dict(SMALL))
        )
    print("two sources", counts)
    assert counts == {"read": 2, "checked": 1}
    engine.close()


AUTO = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}, "overlap_comm": None},
}  # fmt: skip


def test_the_hooks_of_hugging_face_read_once():
    """``from_pretrained`` gives the Trainer's configuration to ``zero.Init``; accelerate asks ``DeepSpeedConfig``."""
    keys = {**SMALL, "zero_optimization": {"stage": 3}}
    with counted_reads() as counts:
        DeepSpeedConfig(keys)
    assert counts == {"read": 1, "checked": 1}
    assert run_ranks(1, init_body, keys) == [{"read": 1, "checked": 0}]


def init_body(rank: int, world: int, keys: dict) -> dict[str, int]:
    with counted_reads() as counts, deepspeed_c.zero.Init(config_dict_or_path=keys):
        torch.nn.Linear(3, 5)
    return counts


def test_one_reading_serves_any_number_of_ranks():
    """Each resolution is that of a configuration that is read for it alone, in any order."""
    source = {"train_batch_size": 48, "zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}}
    read = read_config(read_source(source))
    for n_ranks in (4, 1, 48, 4):
        found, alone = read.resolve(world_size=n_ranks), load_config(source, world_size=n_ranks)
        print(n_ranks, found.batch, alone.batch)
        assert found == alone
        assert found.batch.micro_batch_size == 48 // n_ranks
    with pytest.raises(BatchSizeError):
        read.resolve(world_size=5)
    assert read.resolve(world_size=4) == load_config(source, world_size=4)


def test_what_is_left_open_is_no_problem_of_the_next_resolution():
    read = read_config(read_source(AUTO))
    for _ in range(2):
        with pytest.raises(ConfigError, match='"auto" stands in 3 keys'):
            read.resolve(world_size=2)
        open_keys = read.resolve(world_size=2, batch="skip")
        print(open_keys.unfilled, open_keys.notes)
        assert sorted(open_keys.unfilled) == ["bf16.enabled", "train_batch_size", "train_micro_batch_size_per_gpu"]
        assert open_keys == load_config(AUTO, world_size=2, batch="skip")


def test_sizes_are_known_before_the_ranks():
    keys = {"tensor_parallel": {"autotp_size": 4}, "sequence_parallel_size": 2, "train_batch_size": "nonsense"}
    read = read_config(read_source(keys))
    assert read.tensor_parallel_size == (4, "tensor_parallel.autotp_size")
    assert read.sequence_parallel_size == 2
    read = read_config(read_source({"tensor_parallel": {"tp": {"tp_size": 2}}}))
    assert read.tensor_parallel_size == (2, "tensor_parallel.tp.tp_size")
    assert read_config(read_source({})).tensor_parallel_size == (1, "tensor_parallel.autotp_size")
