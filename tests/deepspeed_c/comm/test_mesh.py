"""The mesh: places of ranks against a count by hand, groups that all ranks make in the same order, and conversion from
and to meshes of torch."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import deepspeed_c
from deepspeed_c.comm.axes import AXES
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import Mesh, mesh_of_device_mesh
from deepspeed_c.errors import CommError, ConfigError, FeatureError
from tests.ranks import on_ranks
from tests.training import engine_of, update


class Ranks:
    """The attributes of ``Collectives`` that a mesh reads."""

    def __init__(self, world_size: int, rank: int) -> None:
        self.world_size, self.rank = world_size, rank
        self.global_ranks = list(range(world_size))


def _note(made: list[tuple[int, ...]], ranks: tuple[int, ...], axes: tuple[str, ...]) -> object:
    made.append(ranks)
    return ranks


SIZES = [
    {"dp_shard": 1},
    {"dp_shard": 7},
    {"dp_replicate": 2, "dp_shard": 3},
    {"pp": 2, "dp_shard": 3, "tp": 2},
    dict(zip(AXES, (2, 1, 3, 2, 1, 2))),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_places_are_those_of_counting_the_last_axis_first(sizes: dict[str, int]) -> None:
    world = math.prod(sizes.values())
    places = list(itertools.product(*(range(sizes.get(axis, 1)) for axis in AXES)))
    assert len(places) == world
    for rank in range(world):
        made: list[tuple[int, ...]] = []
        mesh = Mesh(Ranks(world, rank), sizes, connect=partial(_note, made))
        for n in range(len(AXES) + 1):
            for axes in itertools.combinations(AXES, n):
                at = [AXES.index(axis) for axis in axes]
                want = [
                    other
                    for other, place in enumerate(places)
                    if all(i in at or place[i] == places[rank][i] for i in range(len(AXES)))
                ]
                assert mesh.ranks(*axes) == want, (rank, axes, mesh.ranks(*axes), want)
                assert mesh.ranks(*reversed(axes)) == want
                assert (mesh.size(*axes), mesh.index(*axes)) == (len(want), want.index(rank))
                mesh.along(*axes)
        assert len(made) == len(set(made)), "a group was made twice"
        assert tuple(range(world)) not in made


@pytest.mark.parametrize(
    ("sizes", "said"),
    [({"dp_shard": 3}, "do not fit 4"), ({"dp": 4}, "no axis 'dp'"), ({"dp_shard": 4, "tp": 0}, "fit 4")],
)
def test_what_does_not_fit_is_refused(sizes: dict[str, int], said: str) -> None:
    with pytest.raises(CommError, match=said):
        Mesh(Ranks(4, 0), sizes)


def test_data_parallelism_cannot_be_cut_unevenly() -> None:
    with pytest.raises(CommError, match="groups of 4"):
        Mesh(Ranks(6, 0)).split_data(4)
    with pytest.raises(CommError, match="the mesh says it"):
        Mesh(Ranks(6, 0), {"dp_replicate": 2, "dp_shard": 3}).split_data(3)
    split = Mesh(Ranks(6, 4)).split_data(3)
    assert str(split) == "dp_replicate 2 x dp_shard 3"
    assert (split.ranks("dp_shard"), split.ranks("dp_replicate")) == ([3, 4, 5], [1, 4])


def names_body(mesh: Mesh, rank: int) -> None:
    """A collective over a group of the mesh has a label with the axis. The ledger of all ranks explains its
    failures."""
    shard, replicate = mesh.along("dp_shard"), mesh.along("dp_replicate")
    said = str(shard.ledger.recent(1)[0])
    assert said.endswith(f" over dp_shard (ranks {2 * (rank // 2)}-{2 * (rank // 2) + 1})"), said
    said = str(replicate.ledger.recent(1)[0])
    assert said.endswith(f" over dp_replicate (ranks {rank % 2}, {rank % 2 + 2})"), said
    said = str(mesh.comm.ledger.recent(1)[0])
    assert "ranks" not in said and mesh.comm.ledger.axes == "", said
    # Another mesh has the same ranks along another axis. The meshes share the group, and its ledger keeps both names of
    # the axis, each once.
    for sizes in ({"pp": 2, "dp_shard": 2}, {"dp_replicate": 2, "tp": 2}):
        other = Mesh(mesh.comm, sizes)
        assert other.along("dp_shard", "tp").ledger is shard.ledger
    assert shard.ledger.axes == "dp_shard or tp", shard.ledger.axes
    assert shard.ledger.explain() == ""
    mesh.comm.ledger.explain_by(lambda: "rank 9 has ended")
    assert shard.ledger.explain() == replicate.ledger.explain() == "rank 9 has ended"
    mesh.comm.ledger.explain_by(None)
    assert shard.ledger.explain() == ""


@on_ranks(4)
def test_groups_along_axes(rank: int, world: int) -> None:
    mesh = Mesh(Collectives(), {"dp_replicate": 2, "dp_shard": 2})
    for axes in (("dp_shard",), ("dp_replicate",), (), ("dp_replicate", "dp_shard")):
        part = mesh.along(*axes)
        assert mesh.along(*axes) is part
        assert [int(n) for n in part.gather_numbers(rank)] == mesh.ranks(*axes) == part.global_ranks
        if part.world_size > 1:
            assert part.ledger.last > 0
    assert mesh.along("dp_replicate", "dp_shard") is mesh.comm
    mesh.enter_phase("backward")
    groups = [mesh.along(*axes) for axes in (("dp_shard",), ("dp_replicate",), ("dp_replicate", "dp_shard"))]
    assert [group.ledger.phase for group in groups] == ["backward"] * 3
    mesh.enter_phase("")
    names_body(mesh, rank)
    mesh.close()


@on_ranks(4)
def test_device_meshes_both_ways_and_what_initialize_takes(rank: int, world: int) -> None:
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "fsdp"))
    mine = mesh_of_device_mesh(theirs)
    assert mine.axes["dp_replicate"] == mine.axes["dp_shard"] == 2
    assert mine.ranks("dp_shard") == torch.distributed.get_process_group_ranks(theirs.get_group("fsdp"))
    assert mine.ranks("dp_replicate") == torch.distributed.get_process_group_ranks(theirs.get_group("replicate"))
    back = mine.to_device_mesh()
    assert back.mesh_dim_names == ("dp_replicate", "dp_shard") and torch.equal(back.mesh, theirs.mesh)
    # The dimensions come in another order, and ranks do not count up along them.
    odd = DeviceMesh("cpu", torch.tensor([[3, 0], [1, 2]]), mesh_dim_names=("dp_shard", "dp_replicate"))
    mine = mesh_of_device_mesh(odd)
    for axis in ("dp_shard", "dp_replicate"):
        assert sorted(mine.ranks(axis)) == sorted(torch.distributed.get_process_group_ranks(odd.get_group(axis)))
        assert mine.index(axis) == odd.get_local_rank(axis)
    mine = mesh_of_device_mesh(theirs["fsdp"])
    assert mine.comm.global_ranks == ([0, 1] if rank < 2 else [2, 3])
    for names in (None, ("x", "dp_shard"), ("dp", "fsdp")):
        with pytest.raises(CommError, match="name each dimension"):
            mesh_of_device_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
    config = {"train_micro_batch_size_per_gpu": 1}
    model = torch.nn.Linear(2, 2)
    pipeline = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    with pytest.raises(FeatureError, match="axis 'pp' has 2 ranks"):
        deepspeed_c.initialize(model=model, config=config, mesh_device=pipeline)
    with engine_of(model, config, mesh_param=(2, 2)) as engine:
        assert engine.dp_world_size == engine.sequence_parallel_size == 2
        assert "mesh: dp_shard 2 x sp 2" in engine.describe()
    with pytest.raises(ConfigError, match="mesh_param and mesh_device"):
        deepspeed_c.initialize(model=model, config=config, mesh_param=(4, 1), mesh_device=theirs)
    with engine_of(model, config, mesh_param=(4, 1)) as engine:
        assert engine.dp_world_size == 4 and "mesh: dp_shard 4" in engine.describe()
    # Two engines with different meshes.
    config = {**config, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 1}}
    one = engine_of(torch.nn.Linear(2, 2), config, mesh_device=theirs)
    two = engine_of(torch.nn.Linear(2, 2), config)
    for _ in range(2):
        for engine in (one, two):
            update(engine, engine(torch.ones(1, 2)).sum())
    assert "dp_replicate 2 x dp_shard 2" in one.describe() and "copy" in one.describe()
    two.close()
    one.close()
