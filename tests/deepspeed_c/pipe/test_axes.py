"""Pipelines whose layers are cut over tensor-parallel ranks train as one plain process does."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.errors import ConfigError, DeepSpeedCError, ModelError, RankMismatchError, StageError
from deepspeed_c.inject.layers import LinearAllreduce, LinearLayer
from deepspeed_c.pipe import LayerSpec, PipelineModule, PipelineParallelGrid, TiedLayerSpec
from deepspeed_c.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
from deepspeed_c.sequence.layer import DistributedAttention
from deepspeed_c.utils import groups
from deepspeed_c.zero import GatheredParameters
from deepspeed_c.zero.layout.cuts import cut_of
from tests.cells import cells
from tests.deepspeed_c.pipe.models import VOCABULARY, Embed, as_logits, loss_fn
from tests.ranks import run_ranks
from tests.training import config, descend_together

HEAD, N_HEADS, N_HIDDEN, STEPS = 4, 5, 7, 3
WIDTH = HEAD * N_HEADS
N_MICRO = 4  # of all pipelines together
TOLERANCE = 1e-5
PP, TP, DP = 2, 2, 2
# Each matrix is gathered by itself, and only as long as it is used: two of the largest would be above the limit.
SMALL_UNITS = {
    "stage3_param_persistence_threshold": 0,
    "reduce_bucket_size": 640,
    "stage3_max_live_parameters": 1300,
    "stage3_prefetch_bucket_size": 0,
}


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention over [batch, tokens, heads, width]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    """Five heads and seven hidden columns, so that two ranks have parts of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, N_HIDDEN), nn.Linear(N_HIDDEN, WIDTH)
        self.attention = attend

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, HEAD)).unbind(2)
        x = x + self.out(self.attention(q, k, v).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def layers() -> list[Any]:
    """The fourth layer is a linear layer by itself, whose inputs and outputs are whole on all ranks."""
    embed = TiedLayerSpec("embed", Embed, WIDTH, 0.3)
    wide = [LayerSpec(Block), LayerSpec(Block), LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(Block), LayerSpec(Block)]
    return [
        embed,
        *wide,
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("embed", Embed, WIDTH, 0.3, forward_fn=as_logits),
    ]


SPECS = [
    {"patterns": [r".*\.qkv\.weight"], "partition_type": "column", "shape": [[WIDTH] * 3, -1]},
    {"patterns": [r".*\.up\.weight"], "partition_type": "column"},
    {"patterns": [r".*\.(out|down)\.weight"], "partition_type": "row"},
    # This pattern matches a layer of one stage only.
    {"patterns": [r"3\.weight"], "partition_type": "column", "gather_output": True},
]


def config_of(n: int, stage: int = 0, **more: Any) -> dict[str, Any]:
    specs = {"use_default_specs": False, "layer_specs": SPECS}
    cut = {"autotp_size": TP, "tp": {"tp_grain_size": HEAD}, "partition_config": specs}
    params = {"weight_decay": 0.1, "eps": 1e-4}
    given = {"gradient_clipping": 0.5, "tensor_parallel": cut, **more}
    zero = SMALL_UNITS if stage == 3 else None
    return config(stage, "AdamW", rows=2, lr=1e-2, params=params, accumulate=n, zero=zero, **given)


def batches_of(step: int, n: int = N_MICRO) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (n, 2, 7), generator=generator)
    labels = ids[..., 1:].clone()
    labels[..., :2] = -100  # so that ranks of a sequence have other numbers of labels that count
    return [(ids[i, :, :-1], labels[i]) for i in range(n)]


def part(engine: Any, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sequence."""
    return tensor.chunk(engine.sequence_parallel_size, 1)[groups._get_sequence_parallel_rank()]


@cache
def plain_run(steps: int, n_micro: int) -> tuple[list[float], list[float], list[dict[str, torch.Tensor]]]:
    """(losses, norms, weights after each step by name) of plain torch in one process."""
    built, specs = nn.ModuleDict(), layers()
    for i, spec in enumerate(specs[:-1]):
        torch.manual_seed(1234 + i)
        built[str(i)] = spec.build()

    def forward(x):
        for module in built.values():
            x = module(x)
        return as_logits(built["0"], x)

    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)
    losses, norms, weights = [], [], []
    for step in range(steps):
        total = sum(loss_fn(forward(x), y) for x, y in batches_of(step, n_micro)) / n_micro
        norms.append(descend_together(optimizer, [total], 0.5))
        losses.append(float(total))
        weights.append({name: p.detach().clone() for name, p in built.named_parameters()})
    return losses, norms, weights


def module_of(stages: int = PP, **options: Any) -> PipelineModule:
    given = {"loss_fn": loss_fn} | ({"num_stages": stages} if "topology" not in options else {})
    return PipelineModule(layers(), seed_layers=True, **(given | options))


def engine_of(net: PipelineModule, config: dict[str, Any]) -> Any:
    return deepspeed_c.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]


def compare(engine: Any, expected: dict[str, torch.Tensor], found: list[str], step: int) -> int:
    """Adds a line to ``found`` for each weight that differs. Returns the number of cut parameters."""
    n_cut = 0
    with GatheredParameters(list(engine.module.parameters())):
        for name, param in engine.module.named_parameters():
            whole = expected[name.replace("tied_modules.embed", "0")]
            cut = cut_of(param)
            n_cut += cut is not None
            error = float((param - (whole if cut is None else cut.take(whole))).abs().amax()) if param.numel() else 0.0
            if not error <= TOLERANCE:
                found.append(f"step {step}, {name}: {error}")
    return n_cut


def train(engine: Any, first: int = 0, last: int = STEPS) -> list[str]:
    """Trains steps, and returns what differs from the plain run."""
    n_data, mine = engine.grid.get_data_parallel_world_size(), engine.grid.get_data_parallel_rank()
    n = engine.gradient_accumulation_steps()
    losses, norms, weights = plain_run(max(last, STEPS), n * n_data)
    found: list[str] = []
    for step in range(first, last):
        batches = [(part(engine, x), part(engine, y)) for x, y in batches_of(step, n * n_data)[mine * n :][:n]]
        evaluated = float(engine.eval_batch(iter(batches)))
        loss = float(engine.train_batch(iter(batches)))
        norm = float(engine.get_global_grad_norm())
        for what, got, wanted in (
            ("loss", loss, losses[step]),
            ("loss of eval_batch", evaluated, losses[step]),
            ("norm", norm, norms[step]),
        ):
            if got != pytest.approx(wanted, rel=TOLERANCE):
                found.append(f"step {step}, {what}: {got} instead of {wanted}")
        n_cut = compare(engine, weights[step], found, step)
        has_blocks = any(isinstance(module, (Block, HandCut)) for module in engine.module.modules())
        if has_blocks and n_cut == 0 < engine.grid.get_model_parallel_world_size() - 1:
            found.append("nothing is cut")
    return found


SCHEDULES = {"1f1b": {}, "gpipe": {}, "interleaved": {"virtual_stages": 2}, "zb_h1": {}, "zb_v": {}, "dualpipe_v": {}}


def cut_sequences(engine: Any) -> None:
    for module in engine.module.modules():
        if isinstance(module, Block):
            module.attention = DistributedAttention(attend, engine.get_sequence_parallel_group(), 2, 1)


def train_matrix(rank: int, world: int, stages: int, axis: str) -> dict[str, list[str]]:
    """Two steps with each schedule and ZeRO stage."""
    found = {}
    for schedule, options in SCHEDULES.items():
        # dualpipe_v needs two micro-batches for each rank of the pipeline.
        n = max(N_MICRO, 2 * stages) if schedule == "dualpipe_v" else N_MICRO
        for zero in (0, 1, 2, 3):
            config = config_of(n, zero)
            if axis == "sp":
                config["tensor_parallel"]["autotp_size"] = 1
                config["sequence_parallel_size"] = 2
            with engine_of(module_of(stages, schedule=schedule, **options), config) as engine:
                if axis == "sp":
                    cut_sequences(engine)
                found[f"{schedule}, stage {zero}"] = train(engine, last=2)
    return found


@pytest.mark.parametrize(("stages", "axis"), cells((1, 2, 4), ("tp", "sp"), at_once=1))
def test_every_schedule_and_zero_stage(stages: int, axis: str) -> None:
    for rank, found in enumerate(run_ranks(2 * stages, train_matrix, stages, axis)):
        assert not any(found.values()), f"rank {rank}: {found}"


def few_micro_batches(rank: int, world: int) -> tuple[str, str]:
    with pytest.raises(DeepSpeedCError) as caught, engine_of(module_of(schedule="dualpipe_v"), config_of(3)) as engine:
        engine.train_batch(iter(batches_of(0, 3)))
    return type(caught.value).__name__, str(caught.value)


def test_too_few_micro_batches_for_a_schedule_are_refused() -> None:
    for kind, text in run_ranks(PP * TP, few_micro_batches):
        assert kind == ConfigError.__name__ and "dualpipe_v on 2 ranks needs at least 4 micro-batches" in text, (
            kind,
            text,
        )


CELLS = {
    f"{schedule}, stage {stage}": (schedule, stage, {})
    for schedule in ("1f1b", "zb_h1", "zb_v")
    for stage in (0, 1, 2, 3)
} | {"overlap": ("zb_h1", 1, {"tp_overlap_comm": True}), "recomputed": ("1f1b", 1, {})}


def train_cells(rank: int, world: int, names: list[str]) -> dict[str, list[str]]:
    found = {}
    for name in names:
        schedule, stage, more = CELLS[name]
        config = config_of(N_MICRO * PP * TP // world, stage)
        config["tensor_parallel"] |= more
        if name == "recomputed":
            config["activation_checkpointing"] = {"layers": "auto"}
        net = module_of(schedule=schedule)
        with engine_of(net, config) as engine:
            found[name] = train(engine)
    return found


@pytest.mark.always
@pytest.mark.parametrize("world, names", [(PP * TP, ["overlap", "recomputed"]), (PP * TP * DP, list(CELLS))])
def test_tensor_parallel_stages(world: int, names: list[str]) -> None:
    for rank, found in enumerate(run_ranks(world, train_cells, names)):
        assert not any(found.values()), f"rank {rank}: {found}"


def train_sequences(rank: int, world: int, n_tp: int) -> dict[str, list[str]]:
    found = {}
    for schedule, stage in (("1f1b", 0), ("zb_h1", 1), ("zb_v", 2), ("zb_h1", 3)):
        config = config_of(N_MICRO * 2 * PP * n_tp // world, stage, sequence_parallel_size=2)
        config["tensor_parallel"]["autotp_size"] = n_tp
        with engine_of(module_of(schedule=schedule), config) as engine:
            cut_sequences(engine)
            found[f"{schedule}, stage {stage}"] = train(engine)
    return found


@pytest.mark.parametrize("n_tp", [1, 2])
def test_sequences_cut_over_ranks(n_tp: int) -> None:
    """With two copies of the model, and with layers that are cut too."""
    for rank, found in enumerate(run_ranks(8, train_sequences, n_tp)):
        assert not any(found.values()), f"rank {rank}: {found}"


def train_topology(rank: int, world: int, axes: list[str], dims: list[int]) -> Any:
    topology = ProcessTopology(axes, dims)
    net = module_of(topology=topology)
    with engine_of(net, config_of(N_MICRO // topology.get_dim("data"), 1)) as engine:
        grid, coord = engine.grid, topology.get_coord(rank)
        places = grid.get_stage_id(), grid.get_data_parallel_id(), grid.get_model_parallel_rank()
        assert places == (coord.pipe, coord.data, coord.model), places
        assert grid.stage_to_global(coord.pipe) == rank
        return train(engine)


@pytest.mark.parametrize(
    ("axes", "dims"),
    [
        (["pipe", "data", "model"], [2, 1, 2]),
        (["data", "model", "pipe"], [1, 2, 2]),
        (["model", "data", "pipe"], [2, 2, 2]),
    ],
    ids=str,
)
def test_a_topology_places_ranks(axes: list[str], dims: list[int]) -> None:
    for found in run_ranks(dims[0] * dims[1] * dims[2], train_topology, axes, dims):
        assert not found, found


def overflow(rank: int, world: int) -> tuple[list[int], list[float], bool]:
    """A loss scale that is too large."""
    config = config_of(N_MICRO, 1, fp16={"enabled": True, "initial_scale_power": 40, "hysteresis": 1})
    skipped, scales = [], []
    with engine_of(module_of(schedule="zb_h1"), config) as engine:
        before = [p.detach().clone() for p in engine.module.parameters()]
        for step in range(3):
            engine.train_batch(iter(batches_of(step)))
            skipped.append(engine.skipped_steps)
            scales.append(engine.optimizer.cur_scale)
        same = all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
    return skipped, scales, same


def test_all_ranks_skip_together() -> None:
    outcome = run_ranks(PP * TP, overflow)
    assert all(found == outcome[0] for found in outcome), outcome
    assert outcome[0][0] == [1, 2, 3] and outcome[0][2], outcome


class HandCut(nn.Module):
    """A block whose layers the program itself cuts over ``group``."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        whole = Block()
        self.norm1, self.norm2, self.qkv, self.out = whole.norm1, whole.norm2, whole.qkv, whole.out
        self.attention = attend
        self.up, self.down = LinearLayer(whole.up, group), LinearAllreduce(whole.down, group)

    forward = Block.forward


def engine_by_hand(n: int, stage: int = 0) -> Any:
    topology = PipeModelDataParallelTopology(num_pp=PP, num_mp=TP, num_dp=1)
    group = PipelineParallelGrid(topology).get_model_parallel_group()
    specs = [LayerSpec(HandCut, group) if getattr(spec, "typename", None) is Block else spec for spec in layers()]
    net = PipelineModule(specs, topology=topology, loss_fn=loss_fn, seed_layers=True)
    config = config_of(n, stage)
    del config["tensor_parallel"]
    return engine_of(net, config)


def train_by_hand(rank: int, world: int) -> list[str]:
    with engine_by_hand(N_MICRO, 2) as engine:
        return train(engine)


def test_layers_cut_by_hand() -> None:
    for found in run_ranks(PP * TP, train_by_hand):
        assert not found, found


ARRANGEMENTS = {  # (ranks, stages, tensor-parallel ranks, ZeRO stage, schedule)
    "pp 2 x tp 2": (4, 2, 2, 1, "1f1b"),
    "pp 1": (1, 1, 1, 0, "1f1b"),
    "pp 4": (4, 4, 1, 1, "zb_h1"),
    "pp 1 x tp 4": (4, 1, 4, 2, "1f1b"),
    "dp 2": (2, 1, 1, 2, "1f1b"),
}


def go_on(rank: int, world: int, name: str, loaded: str, saved: str, first: int, last: int) -> list[str]:
    _, stages, n_tp, zero, schedule = ARRANGEMENTS[name]
    config = config_of(N_MICRO * stages * n_tp // world, zero)
    config["tensor_parallel"]["autotp_size"] = n_tp
    with engine_of(module_of(stages, schedule=schedule), config) as engine:
        if loaded:
            engine.load_checkpoint(loaded)
            assert engine.global_steps == first
        found = train(engine, first, last)
        if saved:
            engine.save_checkpoint(saved)
    return found


def test_checkpoints_load_into_other_arrangements(tmp_path) -> None:
    """From stages of tensor-parallel ranks to every other arrangement, and back."""
    first = next(iter(ARRANGEMENTS))
    start = str(tmp_path / "start")
    outcome = {"start": run_ranks(4, go_on, first, "", start, 0, 2)}
    for name, (world, *_) in ARRANGEMENTS.items():
        folder = str(tmp_path / name)
        outcome[name] = run_ranks(world, go_on, name, start, folder, 2, 3)
        outcome[f"{name} and back"] = run_ranks(4, go_on, first, folder, "", 3, 4)
    assert not any(any(found) for found in outcome.values()), outcome


def refuse(rank: int, world: int) -> dict[str, tuple[str, str]]:
    """The errors of settings that do not fit, by what is wrong."""

    def said(what: str, config: dict[str, Any], run: Any = lambda engine: None, **options: Any) -> None:
        try:
            with engine_of(module_of(**options), config) as engine:
                run(engine)
        except DeepSpeedCError as error:
            found[what] = type(error).__name__, str(error)

    found: dict[str, tuple[str, str]] = {}
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    three, wrong, halves = config_of(N_MICRO), config_of(N_MICRO), config_of(N_MICRO)
    three["tensor_parallel"]["autotp_size"] = 4
    said("size", three)
    said("size of the topology", three, topology=topology)
    wrong["tensor_parallel"]["partition_config"]["layer_specs"] = [*SPECS, {"patterns": ["nowhere.*"]}]
    said("pattern", wrong)
    # Only the stage with the fourth layer finds that its sizes do not fit.
    bad = {"patterns": [r"3\.weight"], "partition_type": "column", "shape": [[5, 5], -1]}
    halves["tensor_parallel"]["partition_config"]["layer_specs"] = [*SPECS[:-1], bad]
    said("parts", halves)
    norms = config_of(N_MICRO)
    norms["tensor_parallel"]["sequence_parallel_norms"] = True
    said("norms", norms)
    said("data", config_of(N_MICRO), lambda engine: engine.train_batch(iter(batches_of(rank))))

    def drift(engine: Any) -> None:
        engine.train_batch(iter(batches_of(0)))
        for name, param in engine.module.named_parameters():
            if name == "6.weight" and engine.grid.get_model_parallel_rank() == 1:
                param.data[0] += 1.0
        engine.train_batch(iter(batches_of(1)))

    said("drift", config_of(N_MICRO), drift)
    said(
        "labels of parts of sequences",
        config_of(N_MICRO, sequence_parallel_size=2, tensor_parallel={}),
        lambda engine: engine.train_batch((x, [y]) for x, y in batches_of(0)),
        loss_fn=lambda logits, labels: loss_fn(logits, labels[0]),
    )
    return found


def test_what_does_not_fit_is_refused_on_all_ranks() -> None:
    outcome = run_ranks(4, refuse)
    assert all(found == outcome[0] for found in outcome), outcome
    said = {
        "size": (ConfigError, "cannot be cut into groups of 4"),
        "size of the topology": (ConfigError, "cannot be cut into groups of 4"),
        "pattern": (ConfigError, "'nowhere.*' matches none of the model's parameters"),
        "parts": (ModelError, "3.weight: the parts [5, 5] make 10, the dimension has 20"),
        "norms": (ModelError, "no policy says where tokens flow"),
        "data": (RankMismatchError, "hold one model together and were given different data"),
        "drift": (RankMismatchError, "6.weight differ on ranks 2 and 3"),
        "labels of parts of sequences": (StageError, "the weight of the loss depends on the rank's number of valid"),
    }
    assert outcome[0].keys() == said.keys(), outcome[0]
    for what, (kind, text) in said.items():
        assert outcome[0][what][0] == kind.__name__ and text in outcome[0][what][1], (what, outcome[0][what])
