"""Checkpoints of torch.distributed.checkpoint (DCP): we read them without that package, the package reads ours, and no
code of a hostile folder runs."""

from __future__ import annotations

import os
import pickle
import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from deepspeed_c.checkpoint.formats import dcp as ours
from deepspeed_c.checkpoint.formats.dcp import DcpSource, write_dcp
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, Box, LogicalTensor, ParamInfo, Read
from deepspeed_c.errors import CheckpointError
from tests.deepspeed_c.checkpoint.memory_source import MemorySource, adam_checkpoint, read_all
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def same(got, want):
    assert set(got) == set(want), f"{sorted(got)} is not {sorted(want)}"
    for key, tensor in want.items():
        assert got[key].dtype == tensor.dtype and got[key].shape == tensor.shape, key
        assert torch.equal(got[key], tensor), f"{key}: {got[key]} is not {tensor}"


def save(value, folder):
    dcp.save(value, checkpoint_id=folder, no_dist=True)
    return folder


MODEL = {
    "embed.weight": torch.randn(11, 3), "half": torch.randn(5).bfloat16(), "scalar": torch.tensor(3.5),
    "none": torch.empty(0, 4), "count": torch.tensor(7),
}  # fmt: skip
STATE = {n: {"step": torch.tensor(4.0), "exp_avg": torch.randn(MODEL[n].shape)} for n in ("embed.weight", "half")}
GROUPS = [
    {"lr": 0.1, "betas": (0.9, 0.99), "params": ["embed.weight"]},
    {"lr": 0.2, "betas": (0.9, 0.99), "params": ["half"]},
]
WANT = {(PARAM, n): t for n, t in MODEL.items()} | {("exp_avg", n): s["exp_avg"] for n, s in STATE.items()}


def flat_optimizer() -> dict[str, object]:
    """A state dict as get_optimizer_state_dict returns it with flatten_optimizer_state_dict."""
    flat = {f"state.{n}.{k}": v for n, s in STATE.items() for k, v in s.items()}
    for group in GROUPS:
        flat |= {f"param_groups.{n}.{k}": v for n in group["params"] for k, v in group.items() if k != "params"}
    return flat


@pytest.mark.parametrize("optim", [{"state": STATE, "param_groups": GROUPS}, flat_optimizer()], ids=["nested", "flat"])
@pytest.mark.parametrize("key", ["model", "module", "anything"])
@pytest.mark.parametrize("optim_key", ["optim", "optimizer"])
def test_model_and_optimizer_as_torch_saves_them(tmp_path, optim, key, optim_key):
    save({key: MODEL, optim_key: optim, "epoch": 3, "other": {"x": torch.ones(1)}}, tmp_path)
    with DcpSource(tmp_path) as source:
        same(read_all(source), WANT | {(PARAM, "other.x"): torch.ones(1)})
        assert source.groups == [{k: v for k, v in g.items() if k != "params"} for g in GROUPS]
        assert {n: i.group for n, i in source.params.items() if i.group is not None} == {"embed.weight": 0, "half": 1}
        assert source.params["half"].counts == {"step": torch.tensor(4.0)}
        assert source.params["scalar"].counts == {}
        assert source.topology.world_size == 1


@pytest.mark.parametrize("names", [["model.a", "lm_head.weight"], ["model.a", "model.b"], ["a"]])
def test_a_state_dict_that_is_not_nested_keeps_its_names(tmp_path, names):
    value = {name: torch.randn(3) for name in names}
    save(value, tmp_path)
    with DcpSource(tmp_path) as source:
        same(read_all(source), {(PARAM, n): t for n, t in value.items()})
        assert source.params == {} and source.groups == []


def test_the_state_dicts_of_torch_itself(tmp_path):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    for flat in (False, True):
        m, o = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
        save({"model": m, "optim": o}, tmp_path / str(flat))
        with DcpSource(tmp_path / str(flat)) as source:
            got = read_all(source)
            for name, value in model.state_dict().items():
                assert torch.equal(got[PARAM, name], value)
            for name, p in model.named_parameters():
                assert torch.equal(got["exp_avg_sq", name], optimizer.state[p]["exp_avg_sq"])
                assert source.params[name].group == 0 and source.params[name].counts["step"] == 1
            assert len(source.groups) == 1 and source.groups[0]["lr"] == 0.25
            assert source.params["1.running_mean"].group is None


def sharded_body(rank: int, world: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    square = torch.arange(35.0).view(7, 5)
    cube = torch.arange(60).view(5, 3, 4).bfloat16()
    mesh2 = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b")) if world == 4 else None
    value = {
        "rows": distribute_tensor(square, mesh, [Shard(0)]), "columns": distribute_tensor(square, mesh, [Shard(1)]),
        "middle": distribute_tensor(cube, mesh, [Shard(1)]), "same": distribute_tensor(square, mesh, [Replicate()]),
        "few": distribute_tensor(torch.ones(1, 2), mesh, [Shard(0)]),
    }  # fmt: skip
    if mesh2 is not None:
        value["both"] = distribute_tensor(square, mesh2, [Shard(1), Shard(0)])
    dcp.save({"model": value}, checkpoint_id=folder)
    # torch owns the groups of the mesh. No group outlives the body.
    dist.barrier()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_tensors_that_ranks_have_cut(tmp_path, world):
    run_ranks(world, sharded_body, str(tmp_path / "c"), fresh=world == 4)
    square, cube = torch.arange(35.0).view(7, 5), torch.arange(60).view(5, 3, 4).bfloat16()
    want = {"rows": square, "columns": square, "middle": cube, "same": square, "few": torch.ones(1, 2)}
    if world == 4:
        want["both"] = square
    with DcpSource(tmp_path / "c") as source:
        same(read_all(source), {(PARAM, n): t for n, t in want.items()})
        assert source.topology.world_size == world
        assert len(source._stored[PARAM, "columns"].chunks) == world
        chooser = random.Random(0)
        for name, whole in want.items():
            tensor = source.tensors[PARAM, name]
            for _ in range(20):
                start = [chooser.randrange(n) for n in whole.shape]
                size = [chooser.randint(1, n - a) for a, n in zip(start, whole.shape, strict=True)]
                part = whole
                for d, (a, n) in enumerate(zip(start, size, strict=True)):
                    part = part.narrow(d, a, n)
                begin = chooser.randrange(part.numel())
                into = torch.empty(chooser.randint(0, part.numel() - begin))
                source.read([Read(tensor, begin, into, Box(tuple(start), tuple(size)))])
                assert torch.equal(into, part.reshape(-1)[begin : begin + into.numel()].float())


def test_tensors_that_do_not_lie_in_rows(tmp_path):
    value = {"t": torch.randn(3, 5).t(), "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)}
    save(value, tmp_path)
    with DcpSource(tmp_path) as source:
        same(read_all(source), {(PARAM, n): t.contiguous() for n, t in value.items()})


# --- writing ---


def blank(value):
    """The same structure with other values, as the target of a load."""
    if torch.is_tensor(value):
        return torch.full_like(value, -1)
    if isinstance(value, dict):
        return {k: blank(v) for k, v in value.items()}
    if isinstance(value, list):
        return [blank(v) for v in value]
    return None


def written(source) -> dict:
    """The contents that the folder must have by the definition of the format."""
    v = source.values
    model = {n: t for (k, n), t in v.items() if k in (MASTER, BUFFER) or (k == PARAM and (MASTER, n) not in v)}
    model |= {alias: model[first] for alias, first in source.aliases.items()}
    state: dict[str, dict] = {}
    for (k, n), t in v.items():
        if k not in (PARAM, MASTER, BUFFER):
            state.setdefault(n, {})[k] = t
    for n, info in source.params.items():
        for k, value in info.counts.items():
            state.setdefault(n, {})[k] = value
    groups = [
        {**g, "params": [n for n, p in source.params.items() if p.group == i]} for i, g in enumerate(source.groups)
    ]
    return {"model": model, "optim": {"state": state, "param_groups": groups}}


@pytest.mark.parametrize("chunk_bytes", [1, 40, 64 << 20])
def test_torch_reads_what_we_write(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(ours, "CHUNK_BYTES", chunk_bytes)
    source = adam_checkpoint()
    write_dcp(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"] and sorted(os.listdir(tmp_path / "out")) == [".metadata", "__0_0.distcp"]
    want = written(source)
    got = blank(want)
    dcp.load(got, checkpoint_id=tmp_path / "out", no_dist=True)
    for name, value in want["model"].items():
        assert torch.equal(got["model"][name], value), name
    for name, states in want["optim"]["state"].items():
        for kind, value in states.items():
            assert torch.equal(got["optim"]["state"][name][kind], value), (name, kind)
    assert got["optim"]["param_groups"] == want["optim"]["param_groups"]
    # torch's converter reads the folder too, without a description of the contents.
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(tmp_path / "out", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert set(whole["model"]) == set(want["model"]) and torch.equal(
        whole["model"]["head.weight"], want["model"]["embed.weight"]
    )


def test_there_and_back(tmp_path):
    source = adam_checkpoint()
    write_dcp(source, tmp_path / "out")
    want = {}
    for (kind, name), value in source.values.items():
        if kind in (BUFFER, MASTER) or (kind == PARAM and (MASTER, name) not in source.values):
            want[PARAM, name] = value
        elif kind != PARAM:
            want[kind, name] = value
    with DcpSource(tmp_path / "out") as back:
        same(read_all(back), want)
        assert back.aliases == source.aliases and back.state == source.state and back.groups == source.groups
        assert {n: p.group for n, p in back.params.items()} == {
            **{n: p.group for n, p in source.params.items()}, "mean": None, "count": None,
        }  # fmt: skip
        write_dcp(back, tmp_path / "again")
    assert (tmp_path / "again" / "__0_0.distcp").stat().st_size > 0


def test_torch_loads_into_a_model_and_its_optimizer(tmp_path):
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def make():
        model = torch.nn.Linear(3, 4)
        return model, torch.optim.Adam(model.parameters(), lr=0.5)

    model, optimizer = make()
    values = {(PARAM, n): torch.randn(p.shape) for n, p in model.named_parameters()}
    values |= {(k, n): torch.rand(p.shape) for n, p in model.named_parameters() for k in ("exp_avg", "exp_avg_sq")}
    infos = {n: ParamInfo(group=0, counts={"step": torch.tensor(9.0)}) for n, _ in model.named_parameters()}
    write_dcp(MemorySource(values, params=infos, groups=[{"lr": 0.125}]), tmp_path / "out")
    m, o = get_state_dict(model, optimizer)
    o["param_groups"] = [{"lr": 0.0, "params": []}]
    dcp.load({"model": m, "optim": o}, checkpoint_id=tmp_path / "out", no_dist=True)
    o["param_groups"][0] = {**optimizer.state_dict()["param_groups"][0], **o["param_groups"][0]}
    set_state_dict(model, optimizer, model_state_dict=m, optim_state_dict=o)
    for name, p in model.named_parameters():
        assert torch.equal(p.detach(), values[PARAM, name])
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], values["exp_avg_sq", name])
        assert optimizer.state[p]["step"] == 9
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_what_cannot_be_written(tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "x").write_text("")
    with pytest.raises(CheckpointError, match="used: is not empty"):
        write_dcp(adam_checkpoint(), tmp_path / "used")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_dcp(adam_checkpoint(), tmp_path / "used" / "x" / "y")

    class Broken(MemorySource):
        def read(self, reads):
            raise CheckpointError("is corrupt")

    with pytest.raises(CheckpointError, match="is corrupt"):
        write_dcp(Broken({(PARAM, "a"): torch.ones(3)}), tmp_path / "out")
    assert os.listdir(tmp_path) == ["used"]


# --- damaged and hostile folders ---

RAN = []


def run_something(*args):
    RAN.append(args)
    return {}


class Evil:
    def __init__(self, how):
        self.how = how

    def __reduce__(self):
        return self.how


HOWS = [
    (run_something, ("x",)), (os.system, ("touch /tmp/never",)), (eval, ("1",)), (torch.load, ("x",)),
    (torch.ones, (3,)), (MetadataIndex.__init__, ()),
]  # fmt: skip


@pytest.mark.parametrize("how", HOWS, ids=lambda h: h[0].__name__)
@pytest.mark.parametrize("place", ["whole", "planner", "size", "info"])
def test_nothing_of_the_metadata_is_run(tmp_path, how, place):
    save({"a": torch.ones(3)}, tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    evil = Evil(how)
    if place == "whole":
        metadata = evil
    elif place == "planner":
        metadata.planner_data = {"a": evil}
    elif place == "size":
        metadata.state_dict_metadata["a"].size = evil
    else:
        metadata.storage_data = evil
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="is no metadata"):
        DcpSource(tmp_path)
    assert RAN == [] and not os.path.exists("/tmp/never")


def test_nothing_of_the_payload_is_run(tmp_path, caplog):
    save(
        {
            "model": {"a": torch.ones(3)},
            "optim": {"param_groups": [{"lr": Evil((run_something, ("x",))), "params": ["a"]}]},
        },
        tmp_path,
    )
    RAN.clear()
    with DcpSource(tmp_path) as source:
        assert torch.equal(read_all(source)[PARAM, "a"], torch.ones(3))
        assert source.groups == [{}]
    assert RAN == []


@pytest.mark.parametrize("file", ["../x", "/etc/passwd", "a/../../x", "", 3])
def test_metadata_leads_nowhere_else(tmp_path, file):
    save({"a": torch.ones(3)}, tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = file
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="is no file of the folder"):
        DcpSource(tmp_path)


def test_flipped_bytes_never_give_another_error(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2).bfloat16()}
    save(
        {"model": tensors, "optim": {"state": {"a": {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]}},
        tmp_path,
    )
    chooser = random.Random(2)
    n_refused = 0
    for file in (".metadata", "__0_0.distcp"):
        good = (tmp_path / file).read_bytes()
        for _ in range(200):
            bad = bytearray(good[: chooser.choice([len(good), chooser.randrange(len(good))])])
            for _ in range(chooser.randint(1, 3)):
                if bad:
                    bad[chooser.randrange(len(bad))] = chooser.randrange(256)
            (tmp_path / file).write_bytes(bad)
            try:
                with DcpSource(tmp_path) as source:
                    read_all(source)
            except CheckpointError:
                n_refused += 1
        (tmp_path / file).write_bytes(good)
    assert n_refused > 100


def test_files_that_are_not_there(tmp_path):
    save({"a": torch.ones(3)}, tmp_path)
    with DcpSource(tmp_path) as source:
        tensor = LogicalTensor(name="b", kind=PARAM, shape=(3,), dtype=torch.float32)
        with pytest.raises(CheckpointError, match="holds no param named 'b'"):
            source.read([Read(tensor, 0, torch.empty(3))])
    os.unlink(tmp_path / "__0_0.distcp")
    with DcpSource(tmp_path) as source, pytest.raises(CheckpointError, match=r"__0_0\.distcp: cannot be opened"):
        read_all(source)
    os.unlink(tmp_path / ".metadata")
    with pytest.raises(CheckpointError, match=r"\.metadata: cannot be read"):
        DcpSource(tmp_path)
