"""Tables of plans have every stage and choice of offload, mark the chosen row, and refuse where the engine would
refuse. JSON has the same numbers."""

from __future__ import annotations

import json

import pytest
import torch

from deepspeed_c.errors import ConfigError, ModelError
from deepspeed_c.plan.memory import KINDS, Activations, Offload
from deepspeed_c.plan.sizes import stack_of
from deepspeed_c.plan.table import as_json, as_text, plan_table

P = 1_000_000_000
N = 64
ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
BF16 = {"bf16": {"enabled": True}, "optimizer": ADAM, "train_micro_batch_size_per_gpu": 1}


def config(stage: int, **more) -> dict:
    return {**BF16, "zero_optimization": {"stage": stage, **more.pop("zero", {})}, **more}


def plans(table) -> dict:
    return {(row.stage, str(row.offload)): row.plan for row in table.rows}


def states(plan) -> int:
    kinds = plan.phases["step"].kinds
    return sum(kinds.get(kind, 0) for kind in ("weights", "master weights", "optimizer state", "gradients"))


def test_states_are_the_papers_formulas():
    # The formulas are in arXiv 1910.02054, section 5. Padding of slices adds less than a thousandth.
    table = plan_table(config(2), N, sizes=stack_of(P, 16))
    for stage, formula in ((0, 16), (1, 4 + 12 / N), (2, 2 + 14 / N), (3, 16 / N)):
        found = states(plans(table)[stage, "none"]) / P
        assert found == pytest.approx(formula, rel=1e-3), (stage, found, formula)


def test_rows_and_the_chosen_one():
    table = plan_table(config(2), N, sizes=stack_of(P, 16), device_type="cuda")
    offloads = ["none", "optimizer on cpu", "optimizer on nvme"]
    everything = [
        "optimizer and parameters on cpu", "optimizer on nvme, parameters on cpu", "optimizer and parameters on nvme",
    ]  # fmt: skip
    assert list(plans(table)) == [
        (0, "none"),
        *((stage, offload) for stage in (1, 2) for offload in offloads),
        *((3, offload) for offload in offloads + everything),
    ]
    assert all(row.plan is not None for row in table.rows)
    assert (table.rows[table.chosen].stage, table.rows[table.chosen].offload) == (2, Offload())
    marked = [line for line in as_text(table).splitlines() if line.startswith("  * ")]
    assert len(marked) == 1 and marked[0].split()[:3] == ["*", "2", "none"]


def test_ranks_on_the_cpu_have_no_other_memory_than_the_hosts():
    table = plan_table(config(2), N, sizes=stack_of(P, 16))
    assert {str(row.offload) for row in table.rows} == {"none", "optimizer on nvme", "optimizer and parameters on nvme"}
    assert all(phase.host_nbytes == 0 for row in table.rows for phase in row.plan.phases.values())


def test_offload_that_is_asked_for_is_the_chosen_row():
    zero = {"offload_optimizer": {"device": "cpu"}}
    table = plan_table(config(3, zero=zero), N, sizes=stack_of(P, 16), device_type="cuda")
    assert table.rows[table.chosen].offload == Offload("cpu")
    found = plans(table)
    whole, part = found[3, "none"].phases["step"], found[3, "optimizer on cpu"].phases["step"]
    # A parameter has 12 bytes of masters and moments, and a gradient: 2 bytes on the device, or 4 on the host, where
    # sums are fp32.
    assert part.host_nbytes == pytest.approx(16 * P / N, rel=1e-3)
    assert whole.nbytes - part.nbytes == pytest.approx(14 * P / N, rel=1e-3)
    both = found[3, "optimizer and parameters on cpu"].phases["step"]
    assert both.host_nbytes == pytest.approx(18 * P / N, rel=1e-3)
    assert part.nvme_nbytes == both.nvme_nbytes == 0


def test_on_nvme_are_masters_and_moments_and_on_the_host_gradients_and_buffers():
    small, buckets = P // 10, {"reduce_bucket_size": P}
    zero = {
        "offload_optimizer": {"device": "nvme", "nvme_path": "/disk", "pipeline_read": True, "pipeline_write": True}
    }
    table = plan_table(config(3, zero={**buckets, **zero}), 2, sizes=stack_of(small, 10), device_type="cuda")
    plan = table.rows[table.chosen].plan
    assert plan.offload == Offload("nvme")
    step = plan.phases["step"]
    assert step.nvme_nbytes == pytest.approx(12 * small / 2, rel=1e-3)
    # There are 4 groups of buffers, of at most 4 Mi elements of 12 bytes, and some buffers for smaller buckets.
    # Gradients take 4 bytes an element.
    assert step.host_nbytes - 4 * small / 2 == pytest.approx(step.kinds["swap buffers"], rel=1e-2)
    assert 4 * 12 * (3 << 20) < step.kinds["swap buffers"] <= 5 * 12 * (4 << 20)
    one = {"offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}
    plain = plan_table(config(3, zero={**buckets, **one}), 2, sizes=stack_of(small, 10), device_type="cuda")
    buffers = plain.rows[plain.chosen].plan.phases["step"].kinds["swap buffers"]
    assert 3 * buffers < step.kinds["swap buffers"] <= 4 * buffers


def test_masters_are_apart_from_fp32_weights_in_another_memory_only():
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": ADAM, "zero_optimization": {"stage": 3}}
    found = plans(plan_table(settings, N, sizes=stack_of(P, 16), device_type="cuda"))
    nbytes = {
        name: plan.phases["step"].kinds.get("master weights", 0) for (stage, name), plan in found.items() if stage == 3
    }
    assert nbytes.pop("none") == nbytes.pop("optimizer and parameters on cpu") == 0
    assert nbytes.pop("optimizer on nvme, parameters on cpu") == 0
    assert set(nbytes) == {"optimizer on cpu", "optimizer on nvme", "optimizer and parameters on nvme"}
    assert all(n == pytest.approx(4 * P / N, rel=1e-3) for n in nbytes.values())


def test_gradients_go_to_the_host_as_they_come_at_stage_1_too():
    zero = {"offload_optimizer": {"device": "cpu"}}
    table = plan_table(config(1, zero=zero), N, sizes=stack_of(P, 16), device_type="cuda")
    plan = table.rows[table.chosen].plan
    assert plan.offload == Offload("cpu")
    assert plan.phases["step"].host_nbytes == pytest.approx(16 * P / N, rel=1e-3)
    assert plan.phases["step"].kinds["gradients"] == pytest.approx(4 * P / N, rel=1e-3)
    of_stage_2 = plans(table)[2, "optimizer on cpu"].phases
    assert {name: phase.nbytes for name, phase in plan.phases.items()} == {n: p.nbytes for n, p in of_stage_2.items()}


def test_a_part_of_the_states_stays_on_the_device():
    zero = {"offload_optimizer": {"device": "cpu", "ratio": 0.25}}
    plan = plan_table(config(3, zero=zero), N, sizes=stack_of(P, 16), device_type="cuda")
    part, whole = plan.rows[plan.chosen].plan.phases["step"], plans(plan)[3, "none"].phases["step"]
    assert part.host_nbytes == pytest.approx(0.25 * 16 * P / N, rel=1e-2)
    buffers = ("gradient staging", "collective scratch")
    on_device = [phase.nbytes - sum(phase.kinds.get(kind, 0) for kind in buffers) for phase in (part, whole)]
    # The device keeps masters, moments and gradients of the rest; sums are fp32 instead of bf16.
    assert on_device[0] - on_device[1] == pytest.approx((0.75 * 16 - 14) * P / N, rel=1e-2)


def test_weights_on_nvme_but_for_those_that_are_kept_in_host_memory():
    for kept in (0, P // N // 4, 10 * P):
        zero = {"offload_param": {"device": "nvme", "nvme_path": "/disk", "max_in_cpu": kept}}
        table = plan_table(config(3, zero=zero), N, sizes=stack_of(P, 16), device_type="cuda")
        step = table.rows[table.chosen].plan.phases["forward"]
        on_host = step.host_nbytes - step.kinds.get("swap buffers", 0)
        assert step.nvme_nbytes + on_host == pytest.approx(2 * P / N, rel=1e-3)
        assert on_host == pytest.approx(2 * min(kept, P / N), rel=0.3, abs=1), kept


def test_offload_that_the_engine_refuses_says_why():
    torchs = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    table = plan_table(config(2, **torchs), N, sizes=stack_of(P, 16), device_type="cuda")
    refused = {(row.stage, str(row.offload)): row.refusal for row in table.rows if row.plan is None}
    assert set(refused) == {(s, "optimizer on nvme") for s in (1, 2, 3)} | {
        (3, "optimizer on nvme, parameters on cpu"),
        (3, "optimizer and parameters on nvme"),
    }
    assert all("cannot lie on NVMe" in why for why in refused.values())


def test_stages_that_the_configuration_excludes_say_why():
    # Stage 3 does not allow sums of gradients instead of averages, and stage 0 does not allow bf16 masters.
    table = plan_table(config(1, gradient_allreduce_op="sum"), N, sizes=stack_of(P, 16))
    refused = {row.stage: row.refusal for row in table.rows if row.plan is None}
    assert set(refused) == {3} and "gradient_allreduce_op" in refused[3]
    assert "refused: gradient_allreduce_op" in as_text(table)
    assert [row["stage"] for row in as_json(table)["rows"] if "refused" in row] == [3, 3, 3]


def test_an_optimizer_that_cannot_be_cut_is_refused_where_it_would_be():
    with torch.device("meta"):
        model = torch.nn.Linear(512, 512)
    table = plan_table(
        {"train_micro_batch_size_per_gpu": 1}, 4, model=model, optimizer=torch.optim.Adafactor(model.parameters())
    )
    assert [row.stage for row in table.rows if row.plan is not None] == [0]
    assert "not known to be elementwise" in table.rows[1].refusal


def test_evaluation_has_weights_alone():
    with torch.device("meta"):
        model = torch.nn.Linear(1024, 1024)
    table = plan_table({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}, 4, model=model)
    plan = plans(table)[0, "none"]
    assert set(plan.phases) == {"initialize", "forward"}
    assert plan.phases["forward"].kinds == {"weights": 2 * (1024 * 1024 + 1024)}
    assert "evaluation only" in as_text(table)


def test_no_optimizer_for_sizes_is_said():
    table = plan_table({"train_micro_batch_size_per_gpu": 1}, 2, sizes=stack_of(10_000, 2))
    assert any("AdamW is assumed" in note for note in table.notes)


def test_zero_init_takes_the_whole_model_out_of_the_start():
    whole = plan_table(config(3), N, sizes=stack_of(P, 16))
    shards = plan_table(config(3), N, sizes=stack_of(P, 16, torch.bfloat16)._replace(is_sharded=True))
    begin = [plans(table)[3, "none"].phases["initialize"].nbytes for table in (whole, shards)]
    largest = 2 * P // 16 // 3
    assert begin[0] > 4 * P
    assert begin[1] < (2 + 2 + 4) * P / N + 1.1 * largest
    # A stage with whole weights has to gather them at the start.
    assert plans(shards)[2, "none"].phases["initialize"].nbytes > 4 * P


def test_activations_are_added_where_they_live():
    plain, more = (plan_table(config(3), N, sizes=stack_of(P, 16), activations=Activations(n, n)) for n in (0, 1 << 30))
    a, b = plans(plain)[3, "none"].phases, plans(more)[3, "none"].phases
    grown = {name: b[name].nbytes - a[name].nbytes for name in a}
    assert grown == {"initialize": 0, "forward": 1 << 30, "backward": 1 << 30, "step": 0}
    assert "activations are not known" in as_text(plain) and "1.00 of activations" in as_text(more)


def test_limits_of_the_configuration_make_the_window():
    def window(**zero) -> int:
        table = plan_table(config(3, zero={"reduce_bucket_size": 5_000_000, **zero}), N, sizes=stack_of(P, 16))
        return plans(table)[3, "none"].window_elems

    one = window(stage3_prefetch_bucket_size=0)
    assert window(stage3_prefetch_bucket_size=100_000_000) > 4 * one
    assert window(stage3_prefetch_bucket_size=100_000_000, stage3_max_live_parameters=40_000_000) <= 40_000_000


def test_saves_by_time_cost_a_copy_of_weights_masters_and_moments():
    checkpoint = {"auto_resume": "ckpt", "every": "2m"}
    for stage in range(4):
        table = plan_table(config(stage, checkpoint=checkpoint), N, sizes=stack_of(P, 16), every_stage=False)
        # 2 bytes of weight, 4 of master, 8 of moments; the ranks divide them, cut or not.
        assert table.saves.nbytes == pytest.approx(14 * P / N, rel=1e-3), (stage, table.saves)
        assert table.saves.copy_seconds == pytest.approx(2 * 14 * P / N / 25e9, rel=1e-3), table.saves
        assert table.saves.share == table.saves.copy_seconds / 120
        assert as_json(table)["saves"]["nbytes"] == table.saves.nbytes
        assert "checkpoint.every, 120 s: a rank copies 0.20 GiB" in as_text(table), as_text(table)
    table = plan_table(
        config(2, checkpoint=checkpoint), N, sizes=stack_of(P, 16), device_type="cuda", every_stage=False
    )
    assert table.saves.copy_seconds == pytest.approx(14 * P / N / 25e9, rel=1e-3), table.saves
    assert plan_table(config(2), N, sizes=stack_of(P, 16), every_stage=False).saves is None
    swapped = config(2, checkpoint=checkpoint, zero={"offload_optimizer": {"device": "nvme", "nvme_path": "/"}})
    table = plan_table(swapped, N, sizes=stack_of(P, 16), every_stage=False)
    assert table.saves is None and any("until all is written" in note for note in table.notes), table.notes


def test_json_says_what_the_text_says():
    table = plan_table(config(3), N, sizes=stack_of(P, 16))
    assert as_json(table)["placements"] == [] and as_json(table)["budgets"] is None
    found = json.loads(json.dumps(as_json(table)))
    assert found["params"] == P and found["ranks"] == N
    chosen = next(row for row in found["rows"] if row["is_chosen"])
    assert chosen["stage"] == 3
    for name, phase in chosen["phases"].items():
        assert sum(phase["kinds"].values()) == phase["bytes"] + phase["host_bytes"] + phase["nvme_bytes"], name
        assert set(phase["kinds"]) <= set(KINDS)
    assert chosen["peak_bytes"] == max(phase["bytes"] for phase in chosen["phases"].values())
    assert f"{chosen['phases']['backward']['bytes'] / 2**30:12.2f}" in as_text(table)


def test_what_is_wrong_is_an_error_of_its_own():
    with pytest.raises(ConfigError, match="reduce_bukket_size"):
        plan_table(config(3, zero={"reduce_bukket_size": 5}), N, sizes=stack_of(P, 16))
    with torch.device("meta"):
        model = torch.nn.Linear(3, 3).requires_grad_(False)
    with pytest.raises(ModelError, match="no parameter to train"):
        plan_table(config(3), N, model=model)
