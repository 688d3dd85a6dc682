"""The parity oracle with masters and moments in a file, and with states in separate memory. Runs are compared with one
process of plain torch, which in 16 bits rounds where the engine does. The place of states must not change a bit.

On a machine without an accelerator everything lies in host memory. The tests patch ``is_apart``, so that states are
nevertheless moved between two memories.
"""

from __future__ import annotations

import tempfile
from unittest import mock

import pytest

from deepspeed_c.offload import place
from tests.cells import cells
from tests.deepspeed_c.zero.test_oracle import check_runs, engine_run
from tests.deepspeed_c.zero.traits import TRAITS, Run
from tests.ranks import run_ranks

# Buckets are small, so several of them are on their way at any time.
WHERE = {
    "nvme": {"offload_optimizer": {"device": "nvme", "pipeline_read": True, "pipeline_write": True}},
    "nvme_in_turn": {"offload_optimizer": {"device": "nvme", "buffer_count": 1}},
    "host": {"offload_optimizer": {"device": "cpu"}},
    "host_all": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "nvme_apart": {"offload_optimizer": {"device": "nvme", "pipeline_read": True, "pipeline_write": True}},
    "ahead": {"offload_optimizer": {"device": "cpu", "super_offload": True}},
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
# The runs that pretend that device memory and host memory differ.
APART = {"host", "host_all", "ahead", "nvme_apart", "ratio", "ratio_nvme", "params_host", "params_apart"}


# Number of ranks -> runs (where, dtype). ALWAYS: these run with every trait. IN_TURN: these run with every third trait.
ALWAYS = {1: [("host", "fp32"), ("params", "fp32")], 2: [("nvme", "bf16"), ("all_nvme", "bf16")]}
IN_TURN = {
    1: [("nvme_in_turn", "fp32"), ("params_host", "bf16")],
    2: [
        ("host_all", "bf16"), ("nvme_apart", "fp32"), ("ratio", "bf16"), ("ratio_nvme", "fp32"),
        ("params_apart", "bf16"), ("ahead", "bf16"),
    ],
}  # fmt: skip
MICRO_BATCHES = 3


def cells_of(trait: str, world: int) -> list[tuple[str, str]]:
    turn = list(TRAITS).index(trait)
    return ALWAYS[world] + [cell for i, cell in enumerate(IN_TURN[world]) if (i + turn) % 3 == 0]


def stages_of(where: str) -> tuple[int, ...]:
    return (3,) if "offload_param" in WHERE[where] else (2,) if where == "nvme_in_turn" else (1, 3)


def offloaded_runs(rank: int, world: int, trait: str, folder: str) -> list[list[Run]]:
    found = []
    for where, dtype in cells_of(trait, world):
        # Ranks outlive a test, so its patches must be undone.
        with mock.patch.object(place, "is_apart", lambda device: where in APART):  # noqa: B023
            found.append([run(rank, world, trait, dtype, stage, where, folder) for stage in stages_of(where)])
    return found


def settings_of(trait: str, where: str, folder: str = "") -> dict:
    zero = {"reduce_bucket_size": 60, **WHERE[where]}
    for section in ("offload_optimizer", "offload_param"):
        if section in zero:
            zero[section] = {**zero[section], "nvme_path": folder}
    if trait == "unused":
        zero["leaf_module"] = {"classes": ["tests.deepspeed_c.zero.traits.Unused"]}
    return {"zero_optimization": zero, "aio": {"checksum": True, "block_size": 4096}}


def run(rank: int, world: int, trait: str, dtype: str, stage: int, where: str, folder: str) -> Run:
    return engine_run(rank, world, trait, stage, dtype, MICRO_BATCHES, settings_of(trait, where, folder))


@pytest.mark.parametrize(("trait", "world"), cells(TRAITS, ALWAYS, at_once=1))
def test_parity(trait: str, world: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(world, offloaded_runs, trait, folder)
    for i, (where, dtype) in enumerate(cells_of(trait, world)):
        cells = [(stage, MICRO_BATCHES) for stage in stages_of(where)]
        check_runs(trait, dtype, cells, settings_of(trait, where), [runs[i] for runs in results])
