"""The planner is compared with engines that run: predicted and measured peaks of a rank agree within 5 % in each
phase."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.distributed.distributed_c10d import _world

import deepspeed_c
from deepspeed_c import buffers
from deepspeed_c.config import load_config
from deepspeed_c.engine.build import build_optimizer
from deepspeed_c.engine.consistency import broadcast_model
from deepspeed_c.errors import ModelError
from deepspeed_c.moe.layer import MoE
from deepspeed_c.plan.activations import ForwardShape
from deepspeed_c.plan.live_bytes import LiveBytes
from deepspeed_c.plan.memory import COPIES, GATHERED, MASTERS, SCRATCH, STAGING, STATE, SWAP, MemoryPlan, plan_memory
from deepspeed_c.plan.sizes import ModelSizes, OptimizerSizes, ParamSize, StateSize, group_sizes, sizes_of
from deepspeed_c.plan.table import plan_table
from deepspeed_c.zero.weights import fetch
from tests.cells import every
from tests.toys import Chain
from tests.training import engine_of, update

TOLERANCE = 0.05
N_STEPS = 3


class Case(NamedTuple):
    """A configuration and a model to measure."""

    world: int
    config: dict[str, Any]
    widths: tuple[int, ...]  # widths of a stack of linear layers
    frozen: int = 0  # the first layers are frozen
    micro_batches: int = 1


def config(
    stage: int, optimizer: str | dict = "AdamW", precision: str = "bf16", micro_batches: int = 1, **more: Any
) -> dict:
    params = {"lr": 1e-3, **({"momentum": 0.9} if optimizer == "SGD" else {})}
    zero = {"stage": stage, **more.pop("zero", {})}
    settings = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches,
        "optimizer": optimizer if isinstance(optimizer, dict) else {"type": optimizer, "params": params},
        "zero_optimization": zero, "steps_per_print": None,
        # Plans assume that ranks do not share a host.
        "comm": {"local": "off"}, **more,
    }  # fmt: skip
    if precision != "fp32":
        settings[precision] = {"enabled": True, **({"loss_scale": 1.0} if precision == "fp16" else {})}
    return settings


EVEN = (1024,) * 9  # 8.4M parameters
NARROW = (512,) * 9  # for Muon, whose products of bf16 matrices would take half a minute at EVEN
WIDE = (768, 768, 768, 768, 3072, 768, 768, 768, 768, 768)  # one pair of layers is four times as large
CASES: dict[str, Case] = {
    "stage 0, bf16, AdamW, 2 ranks": Case(2, config(0), EVEN),
    "stage 0, fp32, SGD, 2 ranks": Case(2, config(0, "SGD", "fp32"), EVEN),
    "stage 1, fp16, AdamW, 3 ranks": Case(3, config(1, precision="fp16"), EVEN),
    "stage 1, bf16 summed in fp32, Lion, 2 ranks": Case(
        2, config(1, "Lion", data_types={"grad_accum_dtype": "fp32"}), EVEN
    ),
    "stage 2, bf16, AdamW, small buckets, 2 ranks": Case(2, config(2, zero={"reduce_bucket_size": 1 << 19}), WIDE),
    "stage 2, fp32, AdamW, one bucket, 3 ranks, half frozen": Case(
        3, config(2, precision="fp32", zero={"reduce_bucket_size": 1 << 30, "overlap_comm": True}), EVEN, frozen=4
    ),
    "stage 3, bf16, AdamW, 2 ranks": Case(2, config(3), EVEN),
    "stage 3, bf16, Lion, small buckets, wide prefetch, 4 ranks": Case(
        4, config(3, "Lion", zero={"reduce_bucket_size": 1 << 20, "stage3_prefetch_bucket_size": 4 << 20}), EVEN
    ),
    "stage 3, fp32, SGD, no prefetch, 3 ranks, half frozen": Case(
        3,
        config(3, "SGD", "fp32", zero={"stage3_prefetch_bucket_size": 0, "reduce_bucket_size": 1 << 20}),
        WIDE,
        frozen=4,
    ),
    "stage 3, fp16 summed in fp32, AdamW, large buckets, 2 ranks, 2 micro-batches": Case(
        2,
        config(
            3,
            precision="fp16",
            micro_batches=2,
            data_types={"grad_accum_dtype": "fp32"},
            zero={"reduce_bucket_size": 3 << 20},
        ),
        WIDE,
        micro_batches=2,
    ),
}

SHARED: dict[str, Case] = {
    f"shared memory, {name}": case._replace(config={**case.config, "comm": {"local": "shm"}})
    for name, case in CASES.items()
    if "2 ranks" in name or "3 ranks" in name
}

# States and temporaries of other optimizers. torch's optimizers get gradients in the dtype of the masters.
OPTIMIZERS: dict[str, Case] = {
    "stage 2, bf16, torch's AdamW": Case(
        2, config(2, {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}), EVEN
    ),
    "stage 3, fp32, torch's RMSprop": Case(2, config(3, {"type": "RMSprop", "params": {"lr": 1e-3}}, "fp32"), EVEN),
    "stage 1, bf16, LAMB": Case(2, config(1, {"type": "Lamb", "params": {"lr": 1e-3}}), WIDE),
    "stage 2, fp16, Adagrad": Case(2, config(2, {"type": "Adagrad", "params": {"lr": 1e-3}}, "fp16"), WIDE),
    "stage 2, bf16, Muon": Case(2, config(2, {"type": "Muon", "params": {"lr": 1e-3, "momentum": 0.9}}), NARROW),
}


def make_model(case: Case) -> torch.nn.Module:
    layers = [torch.nn.Linear(a, b, bias=True) for a, b in zip(case.widths, case.widths[1:])]
    for layer in layers[: case.frozen]:
        layer.requires_grad_(False)
    return torch.nn.Sequential(*layers)


class PatientPool(buffers.BufferPool):
    """The engine's pool of gather buffers, but ``give`` waits until gloo's threads have released the buffer.

    gloo's threads release a buffer some microseconds after the caller's wait. A request in between allocates a new
    buffer, so without this class the number of buffers would depend on chance.
    """

    def give(self, buffer: torch.Tensor) -> None:
        super().give(buffer)
        deadline = time.monotonic() + 60.0
        _, _, n_kept = vars(vars(buffer)[buffers._WHOLE]).get(buffers._VIEWS, (None, [], 0))
        # The caller's view and its base also hold the buffer. They go when this method returns. The pool's views stay.
        while buffers._use_count(buffer) > self._alone + 2 + n_kept and time.monotonic() < deadline:
            time.sleep(1e-4)


def patient_broadcast(model: torch.nn.Module, *args: Any) -> None:
    """``broadcast_model``, but it waits until gloo's threads have released the weights.

    Weights in fp32 move to another storage next, and both would be counted.
    """
    tensors = [*model.parameters(), *model.buffers()]
    before = [buffers._use_count(tensor) for tensor in tensors]
    broadcast_model(model, *args)
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline and any(
        buffers._use_count(tensor) > count for tensor, count in zip(tensors, before, strict=True)
    ):
        time.sleep(1e-4)


@contextmanager
def live_bytes() -> Iterator[LiveBytes]:
    """The live bytes of an engine, without those that chance keeps alive in gloo's threads."""
    with (
        mock.patch.object(fetch, "BufferPool", PatientPool),
        mock.patch.object(sys.modules["deepspeed_c.initialize"], "broadcast_model", patient_broadcast),
        LiveBytes() as live,
    ):
        yield live


def take_steps(engine: Any, live: LiveBytes, inputs: Callable[[], torch.Tensor], n_passes: int = N_STEPS) -> None:
    for _ in range(n_passes):
        with live.phase("forward"):
            loss = engine(inputs()).float().square().mean()
        with live.phase("backward"):
            engine.backward(loss)
        del loss
        with live.phase("step"):
            engine.step()


def run_engine(rank: int, world: int, case: Case) -> dict[str, int]:
    """The peak of each phase of a real run. The batch is one row, so activations are only some kilobytes."""
    with live_bytes() as live:
        with live.phase("initialize"):
            engine, *_ = deepspeed_c.initialize(model=make_model(case), config=case.config)
        dtype = next(engine.module.parameters()).dtype
        take_steps(engine, live, lambda: torch.ones(1, case.widths[0], dtype=dtype), N_STEPS * case.micro_batches)
    engine.close()
    return live.peaks


def plan_of(case: Case) -> MemoryPlan:
    settings = load_config(case.config, world_size=case.world)
    with torch.device("meta"):
        model = make_model(case)
    base = build_optimizer(settings.optimizer, settings.bf16, model, None, None)
    sizes = sizes_of(model, [group["params"] for group in base.param_groups])
    optimizer = group_sizes(base, is_sharded=settings.zero.stage > 0 and case.world > 1)
    return plan_memory(sizes, settings, case.world, optimizer)


def planned(case: Case) -> dict[str, int]:
    return {name: phase.nbytes for name, phase in plan_of(case).phases.items()}


@pytest.mark.parametrize("name", every(2, [*CASES, *SHARED, *OPTIMIZERS]))
def test_planned_peaks_are_what_an_engine_allocates(run_ranks, name):
    case = {**CASES, **SHARED, **OPTIMIZERS}[name]
    expected = planned(case)
    worst = 0.0
    lines = [f"{name}: MB planned, measured on each rank, planned / measured"]
    measured = run_ranks(case.world, run_engine, case)
    for phase in expected:
        peaks = [peaks[phase] for peaks in measured]
        ratio = expected[phase] / max(peaks)
        worst = max(worst, abs(ratio - 1))
        shown = " ".join(f"{peak / 1e6:8.2f}" for peak in peaks)
        lines.append(f"  {phase:10s} {expected[phase] / 1e6:8.2f} {shown}  {ratio:.3f}")
    print("\n".join(lines))
    assert worst <= TOLERANCE, "\n".join(lines)


INT8 = {"lr": 1e-3, "state_dtype": "int8"}
IN_8_BITS = [
    Case(2, config(stage, {"type": kind, "params": INT8}, zero={"reduce_bucket_size": 3001}), widths=(13, 61, 47, 3))
    for stage, kind in ((0, "Adam"), (2, "AdamW"), (3, "Lion"))
]


def state_bytes(rank: int, world: int, cases: list[Case]) -> list[int]:
    found = []
    for case in cases:
        with deepspeed_c.initialize(model=make_model(case), config=case.config)[0] as engine:
            dtype = next(engine.module.parameters()).dtype
            update(engine, engine(torch.ones(1, case.widths[0], dtype=dtype)).float().square().mean())
            tensors = [t for s in engine.optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.dim()]
            found.append(sum(t.nbytes for t in tensors))
    return found


def test_states_of_8_bits_are_counted_with_their_scales(run_ranks):
    measured = run_ranks(2, state_bytes, IN_8_BITS)[0]  # the plan is for the first rank
    expected = [plan_of(case).phases["step"].kinds[STATE] for case in IN_8_BITS]
    assert measured == expected, f"{measured} held, {expected} planned"


def test_in_joint_memory_nothing_is_gathered():
    case = CASES["stage 3, bf16, AdamW, 2 ranks"]
    plans = {}
    for zero_copy in (False, True):
        comm = {"local": "shm", "zero_copy_gather": zero_copy}
        plans[zero_copy] = plan_of(case._replace(config={**case.config, "comm": comm})).phases
    gathered = plans[False]["forward"].kinds[GATHERED]
    assert gathered > 0
    assert plans[True]["forward"].kinds.get(GATHERED, 0) == 0
    assert plans[True]["forward"].nbytes == plans[False]["forward"].nbytes - gathered


def test_a_plan_leaves_nothing_behind():
    case = Case(3, config(3, precision="fp32", zero={"stage3_param_persistence_threshold": 0}), (131, 127) * 4)
    groups = dict(_world.pg_group_ranks)
    hooks = len(torch.nn.modules.module._global_module_registration_hooks)
    assert plan_of(case).window_elems > 0
    assert _world.pg_group_ranks == groups
    assert len(torch.nn.modules.module._global_module_registration_hooks) == hooks
    adam = OptimizerSizes("Adam", ((StateSize(None),) * 2,), is_fused=True, sees_slices=True)
    doubles = ModelSizes((ParamSize("a.weight", 64, torch.float64),))
    with pytest.raises(ModelError, match="float64"):
        plan_memory(doubles, load_config(case.config, world_size=3), 3, adam)
    assert _world.pg_group_ranks == groups


def test_updates_ahead_are_planned_with_a_copy_of_all_that_they_change():
    zero = {"offload_optimizer": {"device": "cpu", "super_offload": True}}
    case = Case(2, config(2, zero=zero), EVEN)
    kinds = plan_of(case).phases["step"].kinds
    assert kinds[COPIES] == kinds[STATE] + kinds[MASTERS] > 0, kinds


@pytest.mark.parametrize("max_in_cpu", [None, 0, 1 << 20])
def test_what_is_on_nvme_leaves_its_buffers(run_ranks, tmp_path, max_in_cpu):
    # On a CPU the measured memory includes buffers and sums of gradients, which are fp32 here. It does not include the
    # contents of files.
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"offload_optimizer": {**nvme, "pipeline_read": True, "pipeline_write": True}, "reduce_bucket_size": 1 << 20}
    if max_in_cpu is not None:
        zero["offload_param"] = {**nvme, "max_in_cpu": max_in_cpu, "buffer_count": 3}
    case = Case(2, config(3, zero=zero), EVEN)
    expected = planned(case)
    measured = run_ranks(2, run_engine, case)
    for phase, nbytes in expected.items():
        peak = max(peaks[phase] for peaks in measured)
        print(f"{phase:10s} {nbytes / 1e6:8.2f} planned, {peak / 1e6:8.2f} MB measured")
    for phase, nbytes in expected.items():
        peak = max(peaks[phase] for peaks in measured)
        assert abs(nbytes / peak - 1) <= TOLERANCE, (phase, nbytes, peak)


NVME = {"device": "nvme", "nvme_path": "PATH"}
POOLS = {
    "sums in another dtype than what travels": config(1, "Lion", data_types={"grad_accum_dtype": "fp32"}),
    "16 bits whole on every rank": config(0, precision="fp16"),
    "buckets that are summed whole": config(2, zero={"reduce_scatter": False, "reduce_bucket_size": 3001}),
    "shards that have copies": config(3, zero={"mics_shard_size": 2, "stage3_param_persistence_threshold": 0}),
    "two micro-batches": config(3, micro_batches=2, zero={"reduce_bucket_size": 40_009}),
    # Layers alternate between two units, so both units are gathered all the time.
    "units that take turns": config(
        3, zero={"offload_optimizer": {**NVME, "ratio": 0.4}, "reduce_bucket_size": 90_001}
    ),
    "states in a file, whole": config(1, zero={"offload_optimizer": NVME, "reduce_bucket_size": 40_009}),
    "pieces of parameters in a file": config(
        2, {"type": "Lamb", "params": {"lr": 1e-3}}, zero={"offload_optimizer": NVME, "reduce_bucket_size": 40_009}
    ),
    "states of 8 bits in a file, nothing ahead": config(
        2,
        {"type": "AdamW", "params": {"lr": 1e-3, "state_dtype": "int8"}},
        zero={
            "offload_optimizer": {**NVME, "pipeline_read": False, "pipeline_write": False},
            "reduce_bucket_size": 20_011,
        },
    ),
    "weights in a file too": config(
        3,
        zero={
            "offload_optimizer": {**NVME, "buffer_count": 5},
            "offload_param": {**NVME, "max_in_cpu": 9_001, "buffer_count": 3},
            "reduce_bucket_size": 40_009,
        },
    ),
    "slices of many sizes in a file": config(3, zero={"offload_optimizer": NVME, "reduce_bucket_size": 11_003}),
    "weights in a file alone": config(3, "SGD", "fp32", zero={"offload_param": {**NVME, "max_in_cpu": 0}}),
}


def put_path(section: dict[str, Any], path: str) -> dict[str, Any]:
    """The section, with ``path`` in place of PATH."""
    return {
        key: put_path(value, path) if isinstance(value, dict) else path if value == "PATH" else value
        for key, value in section.items()
    }


def pools_of_engines(rank: int, world: int, cases: list[Case]) -> list[tuple[dict[str, int], int, int]]:
    found = []
    for case in cases:
        with mock.patch.object(fetch, "BufferPool", PatientPool), engine_of(make_model(case), case.config) as engine:
            dtype = next(engine.module.parameters()).dtype
            for _ in range(N_STEPS * case.micro_batches):
                update(engine, engine(torch.ones(1, case.widths[0], dtype=dtype)).float().square().mean())
            optimizer = engine.optimizer
            reducer, fetcher = optimizer.reducer, optimizer.fetcher
            comms = {id(c.scratch): c.scratch for unit in reducer.sums.units for c in (unit.comm, unit.replicas)}
            held = {
                STAGING: reducer.sums.pools.staging.n_bytes,
                SCRATCH: reducer.sums.pools.copies.n_bytes + sum(scratch.n_bytes for scratch in comms.values()),
                GATHERED: 0 if fetcher is None else fetcher.means.pool.n_bytes,
            }
            homes = [
                home for unit in reducer.sums.units for home in (unit.states, unit.weights) if home.label == "file"
            ]
            held[SWAP] = sum(store.buffer_bytes for store in {id(home.store): home.store for home in homes}.values())
            live = 0 if fetcher is None else fetcher.stats.max_live_elems
            found.append(({kind: n for kind, n in held.items() if n}, live, len(reducer.buckets)))
    return found


def test_pools_hold_what_was_planned_to_the_byte(run_ranks, tmp_path):
    cases = []
    for settings in POOLS.values():
        micro_batches = settings["gradient_accumulation_steps"]
        settings = put_path(settings, str(tmp_path))
        cases.append(Case(4, settings, (131, 127, 61, 251, 17) * 3, micro_batches=micro_batches))
    planned = []
    for case in cases:
        plan = plan_of(case)
        kinds = plan.phases["step"].kinds
        held = {kind: kinds[kind] for kind in (STAGING, SCRATCH, GATHERED, SWAP) if kind in kinds}
        planned.append((held, plan.window_elems, plan.n_buckets))
    assert {kind for held, *_ in planned for kind in held} == {STAGING, SCRATCH, GATHERED, SWAP}
    for rank, found in enumerate(run_ranks(4, pools_of_engines, cases)):
        if rank:  # the plan is for the first rank; other ranks have other pieces
            for held, *_ in (*found, *planned):
                held.pop(SWAP, None)
        assert dict(zip(POOLS, found)) == dict(zip(POOLS, planned)), f"rank {rank}"


class Block(torch.nn.Module):
    """A residual block with a norm and a parameter of its own, so that parameters lie at two levels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(width))
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))


def nested(width: int = 512, n_tokens: int = 4096) -> torch.nn.Module:
    embedding, blocks = torch.nn.Embedding(n_tokens, width), torch.nn.Sequential(*(Block(width) for _ in range(4)))
    return Chain(embedding=embedding, blocks=blocks, head=torch.nn.Linear(width, n_tokens, bias=False))


NESTED = {
    "defaults": config(3),
    "several matrices a bucket": config(
        3,
        zero={"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 3 << 20, "stage3_prefetch_bucket_size": 0},
    ),
    "norms stay whole": config(3, zero={"reduce_bucket_size": 1 << 20}),
    "two blocks are leaves": config(
        3,
        zero={
            "reduce_bucket_size": 1 << 19,
            "stage3_prefetch_bucket_size": 0,
            "leaf_module": {"name_suffixes": ["1", "3"]},
        },
    ),
}


def run_nested(rank: int, world: int, settings: dict, under_init: bool) -> dict[str, int]:
    with live_bytes() as live:
        with live.phase("build"), deepspeed_c.zero.Init(config_dict_or_path=settings, enabled=under_init):
            model = nested()
        with live.phase("initialize"):
            engine, *_ = deepspeed_c.initialize(model=model, config=settings)
        tokens = torch.arange(3).view(1, 3)
        take_steps(engine, live, lambda: tokens)
    engine.close()
    return live.peaks


@pytest.mark.parametrize("under_init", [False, True], ids=["given whole", "zero.Init"])
@pytest.mark.parametrize("name", NESTED)
def test_nested_modules_are_planned_as_they_run(run_ranks, name, under_init):
    settings = load_config(NESTED[name], world_size=2)
    with torch.device("meta"):
        model = nested()
    table = plan_table(NESTED[name], 2, model=model, is_sharded=under_init)
    assert settings.zero.stage == table.rows[table.chosen].stage
    expected = {n: phase.nbytes for n, phase in table.rows[table.chosen].plan.phases.items()}
    measured = run_ranks(2, run_nested, NESTED[name], under_init)
    lines = [f"{name}: MB planned, measured on each rank"]
    for phase, nbytes in expected.items():
        lines.append(f"  {phase:10s} {nbytes / 1e6:8.2f} {[round(p[phase] / 1e6, 2) for p in measured]}")
    print("\n".join(lines))
    worst = max(abs(nbytes / max(p[phase] for p in measured) - 1) for phase, nbytes in expected.items())
    assert worst <= TOLERANCE, "\n".join(lines)


class WithExperts(torch.nn.Module):
    """Dense layers and a mixture of experts, most of whose weights the experts have."""

    def __init__(self, n_experts: int, ep_size: int, width: int = 512) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        self.moe = MoE(width, torch.nn.Linear(width, 2 * width + 3), n_experts, ep_size, drop_tokens=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(self.first(x))[0][..., :512] + self.last(x)


def bytes_with_experts(
    rank: int, world: int, settings: dict, n_experts: int, ep_size: int
) -> tuple[dict[str, int], int]:
    """(peaks of the phases, bytes of states that the optimizer holds)."""
    with live_bytes() as live:
        with live.phase("initialize"):
            engine, *_ = deepspeed_c.initialize(model=WithExperts(n_experts, ep_size), config=settings)
        rows = torch.ones(3, 512, dtype=next(engine.module.parameters()).dtype)
        take_steps(engine, live, lambda: rows)
        tensors = [t for s in engine.optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.dim()]
        n_bytes = sum(t.nbytes for t in tensors)
    return live.peaks, n_bytes


WITH_EXPERTS = [(0, 4, 2), (1, 4, 2), (2, 6, 2), (3, 4, 2), (2, 3, 1)]


@pytest.mark.parametrize(("stage", "n_experts", "ep_size"), WITH_EXPERTS)
def test_experts_are_planned_as_a_rank_holds_them(run_ranks, stage, n_experts, ep_size):
    settings = config(stage)
    with torch.device("meta"):
        model = WithExperts(n_experts, ep_size)
    table = plan_table(settings, 2, model=model)
    plan = table.rows[table.chosen].plan
    width, wide = 512, 2 * 512 + 3
    dense, expert = 2 * (width * width + width) + n_experts * width, width * wide + wide
    held = dense + n_experts // ep_size * expert
    assert (table.sizes.numel, table.sizes.n_held) == (dense + n_experts * expert, held), table.sizes
    assert any("a rank holds" in note for note in table.notes) == (ep_size > 1), table.notes
    measured = run_ranks(2, bytes_with_experts, settings, n_experts, ep_size)
    lines = [f"stage {stage}, {n_experts} experts on {ep_size} ranks: MB planned, measured on each rank"]
    for name, phase in plan.phases.items():
        lines.append(f"  {name:10s} {phase.nbytes / 1e6:8.2f} {[round(p[name] / 1e6, 2) for p, _ in measured]}")
    print("\n".join(lines))
    # Two moments in fp32: of whole parameters, or of the part that a rank updates.
    n_updated = held if stage == 0 else dense / 2 + n_experts // ep_size * expert / (2 // ep_size)
    states = plan.phases["step"].kinds[STATE]
    assert states == measured[0][1] == pytest.approx(8 * n_updated, rel=0.01), (states, measured[0][1], 8 * n_updated)
    worst = max(abs(p.nbytes / max(peaks[n] for peaks, _ in measured) - 1) for n, p in plan.phases.items())
    assert worst <= TOLERANCE, "\n".join(lines)


def test_experts_that_fit_no_ranks_are_refused_as_initialize_does():
    with torch.device("meta"):
        model = WithExperts(6, 3)
    for row in plan_table(config(1), 4, model=model).rows:
        assert row.plan is None and "ep_size" in row.refusal and "3" in row.refusal, row
    with pytest.raises(ModelError, match="before a run"):
        plan_table(config(1), 3, model=model, batch=ForwardShape(2, sample=(512,)))
