"""The table of axes: the tuples that are computed from it, what each row claims against engines on real meshes, axes
that need another module, and the number of lines elsewhere that write names of axes."""

from __future__ import annotations

import ast
import itertools
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import deepspeed_c
from deepspeed_c.comm import axes
from deepspeed_c.comm.axes import AXES, AXIS_ROWS, Axis, Holds, Sees, refuse_axes_needing_module
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import mesh_of_device_mesh, mesh_of_pair
from deepspeed_c.engine.checkpoint.contents import Reading, names_of, owned_pieces
from deepspeed_c.errors import CommError, FeatureError
from deepspeed_c.moe.experts import SpreadLayer
from deepspeed_c.pipe import PipelineModule
from deepspeed_c.zero.layout.cuts import cut_of
from deepspeed_c.zero.layout.experts import ExpertNames
from tests.deepspeed_c.moe.dense import Experts
from tests.ranks import run_ranks
from tests.training import step

ROOT = Path(__file__).resolve().parents[3]
MICRO, GAS, N_SAMPLES, WIDTH = 2, 3, 64, 6
ROWS = {row.name: row for row in AXIS_ROWS}


def test_tuples_of_axes() -> None:
    want = {
        "AXES": ("pp", "dp_replicate", "dp_shard", "ep", "sp", "tp"),
        "WITHIN_STAGE": ("dp_replicate", "dp_shard", "ep", "sp", "tp"),
        "DATA": ("dp_replicate", "dp_shard", "ep"),
        "TOKENS": ("dp_replicate", "dp_shard", "ep", "sp"),
        "SHARDS": ("dp_shard", "ep", "sp"),
        "COPIES": ("dp_replicate",),
        "SAME_SAMPLES": ("pp", "sp", "tp"),
        "NEEDING_MODULE": ("pp",),
    }
    got = {name: getattr(axes, name) for name in want}
    assert got == want, (got, want)


def test_names_of_axes_are_told_apart() -> None:
    for names in (
        [name for row in AXIS_ROWS for name in (row.name, *row.dim_names)],
        [name for row in AXIS_ROWS for name in row.mpu_names],
    ):
        assert len(names) == len(set(names)), names


class Found(NamedTuple):
    """The behaviour of a rank of an engine, in the points that a row of the table describes."""

    samples: tuple[int, ...] | None
    """The samples of the rank's first micro-batch. None for a pipeline, whose loader belongs to the caller."""
    layers: tuple[str, ...]
    box: Any
    """The rank's part of the cut parameter, None if the parameter is whole, and the number of its first expert."""
    shard: list[int]
    """The ranks with the shards of the whole parameter."""
    replicas: list[int]
    """The ranks with the same shard of the whole parameter."""
    twins: list[int]
    """The ranks that have the gradient of the whole parameter without a sum."""
    batch: tuple[int, int]
    """train_batch_size, and the number of ranks that it counts."""
    pieces: list[tuple[str, str, Any, int]]
    """(kind, name, place, elements) of the tensors that the rank writes into a checkpoint."""
    n_elems: dict[str, int]
    """The number of elements of each logical parameter of which the rank has a part."""


class Model(SpreadLayer):
    """Has a weight that is cut over tensor-parallel ranks and marked as in Megatron, a whole weight, and experts. It
    exchanges no tokens, because the test is about groups."""

    def __init__(self, n_tp: int, n_ep: int) -> None:
        super().__init__(n_ep)
        self.experts = Experts(torch.nn.Linear(WIDTH, WIDTH), 2, f"ep_size_{n_ep}")
        self.cut = torch.nn.Linear(WIDTH, WIDTH // n_tp, bias=False)
        self.norm = torch.nn.LayerNorm(WIDTH)
        weight = self.cut.weight
        weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = n_tp > 1, 0, 1

    def connect(self, ep: Collectives) -> None:
        self.experts.first_expert = 2 * ep.rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        experts = sum(expert(x).sum() for expert in self.experts.deepspeed_experts)
        return self.cut(x).sum() + self.norm(x).square().sum() + experts


def engine_of(sizes: dict[str, int], stage: int):
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": GAS,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "sequence_parallel": {"loss": "part"},  # the test is about groups, so the loss does not matter
    }
    if "pp" in sizes:
        module = PipelineModule([torch.nn.LayerNorm(WIDTH) for _ in range(4)], num_stages=sizes["pp"])
        return deepspeed_c.initialize(model=module, config=config)[0]
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    data = [torch.tensor(i) for i in range(N_SAMPLES)]
    model = Model(sizes.get("tp", 1), sizes.get("ep", 1))
    return deepspeed_c.initialize(model=model, config=config, mesh_device=mesh, training_data=data)[0]


def look_body(rank: int, world: int, grids: list[tuple[dict[str, int], int]]) -> list[Found]:
    found = []
    for sizes, stage in grids:
        with engine_of(sizes, stage) as engine:
            model, mesh, layout = engine.module, engine._mesh, engine._layout
            for _ in range(0 if "pp" in sizes else GAS):  # the first step makes states
                step(engine, torch.arange(float(WIDTH)))
            named = dict(model.named_parameters())
            numbered = ExpertNames(model)
            whole = next(p for p in named.values() if cut_of(p) is None and getattr(p, "allreduce", True))
            (unit,) = (unit for unit in layout.trained if any(slot.param is whole for slot in unit.slots))
            cut = next((cut_of(param) for param in named.values() if cut_of(param) is not None), None)
            args = (names_of(model), layout, engine._optimizer, {}, mesh)
            pieces = owned_pieces(*args, reading=Reading(), exclude_frozen=False)
            logical = {
                numbered.logical(name): (
                    getattr(param, "ds_shape", param.shape) if cut_of(param) is None else cut_of(param).logical_shape
                ).numel()
                for name, param in named.items()
            }
            loader = engine.training_dataloader
            found.append(
                Found(
                    samples=None if loader is None else tuple(next(iter(loader)).tolist()),
                    layers=tuple(named),
                    box=(
                        None if cut is None else cut.boxes,
                        getattr(model, "ep_size", 1) > 1 and model.experts.first_expert,
                    ),
                    shard=unit.comm.global_ranks,
                    replicas=unit.replicas.global_ranks,
                    twins=unit.twins.global_ranks,
                    batch=(engine.train_batch_size(), engine.dp_world_size),
                    pieces=[(p.kind, p.name, (p.begin, p.box), p.data.numel()) for p in pieces],
                    n_elems=logical,
                )
            )
    return found


def others_along(names: set[str], place: dict[str, int], places: list[dict[str, int]]) -> list[int]:
    """The ranks that differ from ``place`` only along ``names``."""
    return [i for i, other in enumerate(places) if all(other[n] == place[n] for n in place if n not in names)]


def of_rows(sizes: dict[str, int], is_meant) -> set[str]:
    return {name for name in sizes if is_meant(ROWS[name])}


def check_rows(sizes: dict[str, int], stage: int, ranks: list[Found]) -> None:
    """Check that ranks behave as the rows of the table claim. The derived tuples are not used."""
    places = [dict(zip(sizes, at)) for at in itertools.product(*(range(n) for n in sizes.values()))]
    summed = of_rows(sizes, lambda row: row.sums_gradients)
    sharded = of_rows(sizes, lambda row: row.shards_states) if stage else set()
    twins = of_rows(sizes, lambda row: row.holds is Holds.PARTS and row.sees is Sees.SAME)
    assert summed == of_rows(sizes, lambda row: row.sees is not Sees.SAME)
    assert sharded <= summed
    for rank, (me, place) in enumerate(zip(ranks, places)):
        label = f"{sizes} stage {stage} rank {rank}"
        for what, got, along in (("shard", me.shard, sharded), ("twins", me.twins, twins)):
            want = others_along(along, place, places)
            assert got == want, (label, what, got, want)
        got = sorted({other for shard in me.shard for other in ranks[shard].replicas})
        want = others_along(summed, place, places)
        assert got == want, (label, "ranks that a gradient is summed over", got, want)
        n_data = math.prod(sizes[name] for name in of_rows(sizes, lambda row: row.sees is Sees.OTHER_SAMPLES))
        assert me.batch == (MICRO * GAS * n_data, n_data), (label, me.batch, n_data)
        for other, (theirs, there) in enumerate(zip(ranks, places)):
            differ = [ROWS[name] for name in sizes if place[name] != there[name]]
            for what, mine, its, is_other in (
                ("layers", me.layers, theirs.layers, any(row.holds is Holds.OTHER_LAYERS for row in differ)),
                ("parts", me.box, theirs.box, any(row.holds is Holds.PARTS for row in differ)),
                ("samples", me.samples, theirs.samples, any(row.sees is Sees.OTHER_SAMPLES for row in differ)),
            ):
                if what != "samples" or "pp" not in sizes:
                    assert (mine != its) == is_other, (label, other, what, mine, its, is_other)
    kinds = check_ownership(f"{sizes} stage {stage}", ranks)
    assert len(kinds) >= (1 if "pp" in sizes else 3), (sizes, stage, kinds)


def check_ownership(label: str, ranks: list[Found]) -> set[str]:
    """Check that exactly one rank writes each element of each parameter and of its states. Return the kinds of tensors
    that are written."""
    written: dict[tuple[str, str], int] = {}
    seen: set[tuple[str, str, Any]] = set()
    for me in ranks:
        for kind, name, place, n in me.pieces:
            assert (kind, name, place) not in seen or n == 0, (label, kind, name, place)
            seen.add((kind, name, place))
            written[kind, name] = written.get((kind, name), 0) + n
    want = {name: n for me in ranks for name, n in me.n_elems.items()}
    kinds = {kind for kind, _ in written}
    for kind, name in itertools.product(kinds, want):
        assert written.get((kind, name)) == want[name], (label, kind, name, written.get((kind, name)), want[name])
    return kinds


# Number of ranks -> (sizes of axes, stages).
GRIDS = {
    4: [
        ({"dp_replicate": 2, "dp_shard": 2}, (0, 3)),
        ({"dp_shard": 2, "sp": 2}, (1, 3)),
        ({"dp_shard": 2, "tp": 2}, (0, 3)),
        ({"sp": 2, "tp": 2}, (1,)),
        ({"dp_shard": 2, "ep": 2}, (0, 2, 3)),
        ({"ep": 2, "tp": 2}, (1,)),
        ({"dp_replicate": 2, "sp": 2}, (1,)),
        ({"pp": 2, "dp_shard": 2}, (0, 1)),
    ],
    8: [({"dp_shard": 2, "sp": 2, "tp": 2}, (3,))],
}


@pytest.mark.parametrize("world", sorted(GRIDS))
def test_claims_of_the_rows(world: int) -> None:
    cells = [(sizes, stage) for sizes, stages in GRIDS[world] for stage in stages]
    results = run_ranks(world, look_body, cells)
    for i, (sizes, stage) in enumerate(cells):
        check_rows(sizes, stage, [found[i] for found in results])
    tried = {name for grids in GRIDS.values() for sizes, _ in grids for name in sizes}
    assert tried == set(AXES), f"axes without a grid: {set(AXES) - tried}"


class StageMpu:
    """An mpu of data-parallel ranks, of which some hold other layers."""

    def __init__(self, name: str) -> None:
        setattr(self, f"get_{name}_world_size", lambda: 2)

    def get_data_parallel_group(self) -> None:
        raise AssertionError("asked for before axes that cannot be used are refused")


def refused_body(rank: int, world: int) -> list[str]:
    said = []
    config, model = {"train_micro_batch_size_per_gpu": 1}, torch.nn.Linear(2, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for name in ("pp", "pipe"):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", name))
        with pytest.raises(FeatureError, match=r"(?s)axis 'pp' has 2 ranks: pipeline parallelism.*Fix") as caught:
            deepspeed_c.initialize(model=model, config=config, mesh_device=mesh)
        said.append(str(caught.value))
        with pytest.raises(FeatureError, match="axis 'pp' has 2 ranks"):
            mesh_of_device_mesh(mesh)
    for name in ("pipe_parallel", "pipeline_model_parallel"):
        with pytest.raises(FeatureError, match="axis 'pp' has 2 ranks") as caught:
            deepspeed_c.initialize(model=model, config=config, mpu=StageMpu(name))
        said.append(str(caught.value))
    for sizes in ((1, 2, 1), (2,), {"dp_shard": 1, "sp": 2}, "12", (1.0, 2), 2):
        with pytest.raises(CommError, match=r"(?s)mesh_param.*two numbers.*mesh_device") as caught:
            deepspeed_c.initialize(model=model, config=config, mesh_param=sizes)
        said.append(str(caught.value))
    assert mesh_of_pair([1, 2]).wide_axes == {"sp": 2}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return said


def test_an_axis_that_needs_another_module_is_refused_at_every_entrance() -> None:
    first, second = run_ranks(2, refused_body)
    assert first == second and len(first) == 10, (first, second)


@pytest.mark.parametrize("row", AXIS_ROWS, ids=lambda row: row.name)
def test_refusal_follows_from_the_row(row: Axis) -> None:
    refuse_axes_needing_module({row.name: 1}, "here")
    if not row.needs:
        refuse_axes_needing_module({row.name: 2}, "here")
        return
    with pytest.raises(FeatureError, match=f"here: axis '{row.name}' has 2 ranks: {row.what} is for a {row.needs}"):
        refuse_axes_needing_module({row.name: 2}, "here")


def test_the_table_in_the_documentation_is_that_of_the_code() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text().partition("| axis | what |")[2]
    got = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2 : 2 + len(AXIS_ROWS)]]
    yes = {True: "yes", False: "no"}
    want = [
        [
            *(row.name, row.what, row.sees.value, row.holds.value, yes[row.sums_gradients], yes[row.shards_states]),
            f"a `{row.needs}`" if row.needs else "any",
        ]
        for row in AXIS_ROWS
    ]
    assert got == want, (got, want)


AT_HOME = {"deepspeed_c/comm/axes.py", "deepspeed_c/comm/mesh.py"}
MOST_LITERALS = 14


def literals(source: str) -> list[int]:
    """The numbers of the lines that have an axis name as a string."""
    nodes = ast.walk(ast.parse(source))
    return sorted({node.lineno for node in nodes if isinstance(node, ast.Constant) and node.value in AXES})


def test_names_of_axes_are_written_in_one_place() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "deepspeed_c").rglob("*.py"))
        if str(path.relative_to(ROOT)) not in AT_HOME
        for line in literals(path.read_text())
    }
    print(f"{len(found)} lines name an axis outside comm/axes.py and comm/mesh.py: {sorted(found)}")
    assert len(found) <= MOST_LITERALS, sorted(found)


def test_literals_are_found() -> None:
    source = 'size = mesh.size("sp")\nsaid = f"{mesh.size(\'tp\')} ranks of tp"\n"""tp"""\nother = "sp ranks"\n'
    assert literals(source) == [1, 2, 3], literals(source)
