"""Placements for each stage under three budgets: the place of each part, the error if nothing fits, and the
configuration for each placement."""

from __future__ import annotations

import pytest
import torch

from deepspeed_c.config import load_config
from deepspeed_c.plan.memory import Offload
from deepspeed_c.plan.sizes import stack_of
from deepspeed_c.plan.table import Table, as_json, as_text, plan_table
from deepspeed_c.plan.tiers import Budgets, Rates, offload_section
from tests import training

P = 1_000_000_000
N = 8
PLENTY = 1 << 60
BF16 = training.config(3, "AdamW", zero={"reduce_bucket_size": 100_000_000}, bf16={"enabled": True}, lr=1e-3)


def table_for(device: int, host: int = 0, nvme: int = 0, settings: dict = BF16, **more) -> Table:
    sizes = stack_of(P, 16)._replace(is_sharded=True)
    arguments = {"device_type": "cuda", **more}
    return plan_table(settings, N, sizes=sizes, budgets=Budgets(device, host, nvme), **arguments)


def peak(table: Table, stage: int, offload: Offload = Offload()) -> int:  # noqa: B008  (immutable)
    plan = next(row.plan for row in table.rows if (row.stage, row.offload) == (stage, offload))
    return max(phase.nbytes for name, phase in plan.phases.items() if name != "initialize")


@pytest.fixture(scope="module")
def roomy() -> Table:
    return table_for(PLENTY, PLENTY, PLENTY)


def test_what_fits_stays_on_the_device(roomy):
    assert [placed.offload for placed in roomy.placed] == [Offload()] * 4
    assert all(set(placed.tiers.values()) == {"device"} and not placed.refusal for placed in roomy.placed)


def test_memory_after_memory_is_filled(roomy):
    shard = P / N
    wanted = [
        # budgets of a rank at stage 3 (device, host, NVMe) -> places of (masters, optimizer state, gradients, weights)
        ((peak(roomy, 3) + 1000, 0, 0), "device device device device"),
        ((peak(roomy, 3) - 1_000_000_000, PLENTY, PLENTY), "host host host device"),
        ((peak(roomy, 3) - 1_000_000_000, 17 * shard, 0), "host host host device"),
        ((peak(roomy, 3) - 1_000_000_000, 15 * shard, PLENTY), "NVMe NVMe host device"),
        ((peak(roomy, 3) - 1_900_000_000, PLENTY, 0), "host host host host"),
        ((peak(roomy, 3) - 1_900_000_000, 15 * shard, PLENTY), "NVMe NVMe host host"),
    ]
    for budgets, tiers in wanted:
        placed = table_for(*map(int, budgets)).placed[3]
        assert " ".join(placed.tiers.values()) == tiers, (budgets, placed)
        for phase in placed.plan.phases.values():
            if not placed.refusal:
                assert (phase.nbytes, phase.host_nbytes, phase.nvme_nbytes) <= budgets


def test_what_fits_nowhere_says_what_is_missing(roomy):
    table = table_for(peak(roomy, 3) - 1_000_000_000, 1000, 0)
    assert all(placed.plan is None for placed in table.placed)
    assert "device lacks" in table.placed[3].refusal
    text = as_text(table)
    assert text.count("does not fit") == 4 and "NVMe" in text
    assert [entry["fits"] for entry in as_json(table)["placements"]] == [False] * 4
    # the device does not even have room for temporaries
    assert "what is no state takes" in table_for(1000, PLENTY, PLENTY).placed[3].refusal


def test_stage_0_keeps_its_states(roomy):
    placed = table_for(peak(roomy, 0) - 1, PLENTY, PLENTY).placed
    assert placed[0].plan is None and "lacks 1 bytes" in placed[0].refusal
    assert placed[2].plan is not None


def test_an_optimizer_that_cannot_be_swapped_is_not(roomy):
    torchs = {**BF16, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    placed = table_for(peak(roomy, 3) - 1_000_000_000, 15 * P // N, PLENTY, torchs).placed[3]
    assert placed.plan is None and "host lacks" in placed.refusal


def test_ranks_on_the_cpu_swap_or_do_not(roomy):
    table = table_for(PLENTY, device_type="cpu")
    little = peak(table, 3) - 1_000_000_000
    placed = table_for(little, 0, PLENTY, device_type="cpu").placed[3]
    assert list(placed.tiers.values()) == ["NVMe", "NVMe", "device", "device"]
    assert table_for(little, 0, 0, device_type="cpu").placed[3].plan is None


def test_the_section_asks_for_what_was_planned(roomy):
    table = table_for(peak(roomy, 3) - 1_900_000_000, 15 * P // N, PLENTY)
    entry = as_json(table)["placements"][3]
    config = load_config({**BF16, **entry["config"]}, world_size=N)
    assert (config.zero.offload_optimizer.device, config.zero.offload_param.device) == ("nvme", "cpu")
    assert config.zero.offload_optimizer.nvme_path == "/local_nvme" and config.zero.stage == 3
    assert offload_section(1, Offload(), None) == {"zero_optimization": {"stage": 1}}
    assert offload_section(2, Offload("nvme"), "/disk")["zero_optimization"]["offload_optimizer"] == {
        "device": "nvme",
        "nvme_path": "/disk",
    }


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("rates", [Rates(), Rates(4e11, 2e11, 1e12), Rates(1e12, 1e11, 1e9)])
def test_the_ratio_is_the_fastest_that_fits(roomy, stage, rates):
    """The ratio is compared with all ratios in steps of a hundredth, by the bytes of bf16 training with AdamW: 12 bytes
    of states, which are read and written, and sums of gradients in fp32."""
    n, per_elem = P // N, 2 * 12 + 4
    base = peak(roomy, stage, Offload("cpu"))
    seen = set()
    for room in (0, n * 16 // 3, n * 16):
        table = table_for(base + room, PLENTY, 0, rates=rates)
        placed = table.placed[stage]
        if room == n * 16 and placed.ratio is None:
            continue  # everything fits on the device

        def seconds(hundredths: int) -> float:
            host = hundredths / 100 * n * (per_elem / rates.host + (4 + 2) / rates.link)
            return max(host, (1 - hundredths / 100) * n * per_elem / rates.device)

        fitting = [r for r in range(101) if (100 - r) * n * 16 <= 100 * room]
        best = min(map(seconds, fitting))
        chosen = round(placed.ratio * 100)
        assert chosen in fitting, f"{placed.ratio} with room for {room} bytes, of {n * 16}"
        # A ratio that is a hundredth lower is also right: ratios are rounded up until they fit, and layouts have
        # padding.
        assert min(seconds(max(chosen - 1, 0)), seconds(chosen)) <= best * (1 + 1e-3), (placed.ratio, best)
        seen.add(placed.ratio)
        assert as_json(table)["placements"][stage]["ratio"] == placed.ratio
        assert f'"ratio": {placed.ratio:g} in offload_optimizer' in as_text(table)
    assert 1.0 in seen and len(seen) > 1, seen


def test_no_ratio_where_no_host_helps_a_device(roomy):
    for table in (roomy, table_for(peak(roomy, 3) - 1_000_000_000, 15 * P // N, PLENTY)):
        assert table.placed[3].ratio is None and '"ratio"' not in as_text(table)


def test_evaluation_has_no_states_to_place():
    with torch.device("meta"):
        model = torch.nn.Linear(64, 64)
    settings = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    assert plan_table(settings, N, model=model, budgets=Budgets(PLENTY)).placed == []
