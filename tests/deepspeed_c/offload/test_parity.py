"""The parity oracle with masters and moments in a file, and with states in memory of their own: against one plain-torch fp32 process.

On a machine without an accelerator "in host memory" is where everything lies; the path that moves states between two memories is taken all the same by
saying that the device's is another one (``is_apart``).
"""

from __future__ import annotations

import shutil
import tempfile
from unittest import mock

import pytest

from deepspeed_c.offload import place
from tests.deepspeed_c.zero.test_oracle import by_rank, check, engine_run
from tests.deepspeed_c.zero.traits import TRAITS, Run, plain_run
from tests.ranks import run_ranks

# Small buckets: several of them are on their way at any time.
WHERE = {
    "nvme": {"offload_optimizer": {"device": "nvme", "pipeline_read": True, "pipeline_write": True}},
    "nvme_in_turn": {"offload_optimizer": {"device": "nvme", "buffer_count": 1}},
    "host": {"offload_optimizer": {"device": "cpu"}},
    "host_all": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "nvme_apart": {"offload_optimizer": {"device": "nvme", "pipeline_read": True, "pipeline_write": True}},
    "ratio": {"offload_optimizer": {"device": "cpu", "ratio": 0.4}},
    "ratio_nvme": {"offload_optimizer": {"device": "nvme", "ratio": 0.6}},
    "params": {"offload_param": {"device": "nvme", "max_in_cpu": 0}},
    "params_host": {"offload_param": {"device": "cpu"}},
    "params_apart": {"offload_param": {"device": "nvme", "max_in_cpu": 100, "buffer_count": 3}},
    "all_nvme": {
        "offload_optimizer": {"device": "nvme", "pipeline_read": True, "pipeline_write": True},
        "offload_param": {"device": "nvme", "max_in_cpu": 0, "buffer_size": 20},
    },
}
# Where the device's memory is taken for another one than the host's.
APART = {"host", "host_all", "nvme_apart", "ratio", "ratio_nvme", "params_host", "params_apart"}


def offloaded_runs(
    rank: int, world: int, trait: str, dtype: str, cells: list[tuple[int, int]], where: str, folder: str
) -> list[Run]:
    # Ranks outlive a test: what is changed in one has to be put back.
    with mock.patch.object(place, "is_apart", lambda device: where in APART):
        return runs_of(rank, world, trait, dtype, cells, where, folder)


def runs_of(
    rank: int, world: int, trait: str, dtype: str, cells: list[tuple[int, int]], where: str, folder: str
) -> list[Run]:
    zero = {"reduce_bucket_size": 60, **WHERE[where]}
    for section in ("offload_optimizer", "offload_param"):
        if section in zero:
            zero[section] = {**zero[section], "nvme_path": folder}
    runs = []
    for stage, gas in cells:
        extra = dict(zero) if stage == 3 else {k: v for k, v in zero.items() if k != "offload_param"}
        if trait == "unused":
            extra["leaf_module"] = {"classes": ["tests.deepspeed_c.zero.traits.Unused"]}
        settings = {"zero_optimization": extra, "aio": {"checksum": True, "block_size": 4096}}
        runs.append(engine_run(rank, world, trait, stage, dtype, gas, settings))
    return runs


@pytest.mark.parametrize(
    "where, dtype, world",
    [
        ("nvme", "bf16", 2),
        ("nvme_in_turn", "fp32", 1),
        ("host", "fp32", 1),
        ("host_all", "bf16", 2),
        ("nvme_apart", "fp32", 2),
        ("ratio", "bf16", 2),
        ("ratio_nvme", "fp32", 2),
        ("params", "fp32", 1),
        ("params_host", "bf16", 1),
        ("params_apart", "bf16", 2),
        ("all_nvme", "bf16", 2),
    ],
)
@pytest.mark.parametrize("trait", list(TRAITS))
def test_parity(trait: str, dtype: str, where: str, world: int) -> None:
    stages = (3,) if "offload_param" in WHERE[where] else (2,) if where == "nvme_in_turn" else (1, 3)
    cells = [(stage, 3) for stage in stages]
    want = plain_run(TRAITS[trait], world, 3, None)
    folder = tempfile.mkdtemp(prefix="dsc_offload_")
    try:
        results = run_ranks(world, offloaded_runs, trait, dtype, cells, where, folder, timeout=120)
    finally:
        shutil.rmtree(folder)
    for rank, runs in enumerate(results):
        for (stage, gas), got in zip(cells, runs):
            label = f"{trait} stage {stage} {dtype} {where} world {world} rank {rank}"
            check(label, got, want, by_rank(want.losses, world, gas, TRAITS[trait].n_backwards, rank), dtype)
