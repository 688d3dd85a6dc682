"""Checkpoints that we write in DeepSpeed's layout: values are read back bit for bit, files have DeepSpeed's names, and
pickles name only globals that DeepSpeed or torch name."""

from __future__ import annotations

import pickletools
import re
import zipfile
from pathlib import Path

import pytest
import torch

from deepspeed_c.checkpoint.formats.deepspeed import DeepSpeedSource, UniversalSource, write_deepspeed, write_universal
from deepspeed_c.checkpoint.formats.deepspeed.stand_ins import UPSTREAM
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, LogicalTensor, ParamInfo
from deepspeed_c.checkpoint.tools.convert import convert
from deepspeed_c.errors import CheckpointError
from tests.deepspeed_c.checkpoint.formats.deepspeed.memory_source import MemorySource, whole

WORLDS = (1, 2, 3)
LOW = (torch.float32, torch.bfloat16, torch.float16)
# The globals that torch.save itself names, and Python's containers.
HARMLESS = {
    "collections.OrderedDict", "torch._utils._rebuild_tensor_v2", "torch.Size", "torch.float16", "torch.FloatStorage",
    "torch.HalfStorage", "torch.BFloat16Storage", "torch.LongStorage", "__builtin__.set", "builtins.set",
}  # fmt: skip


def named_in(path: Path) -> set[str]:
    """The globals that the pickle of a file names."""
    with zipfile.ZipFile(path) as archive:
        content = next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    found, texts = set(), []
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name == "GLOBAL":
            found.add(argument.replace(" ", "."))
        elif opcode.name == "STACK_GLOBAL":
            found.add(".".join(texts[-2:]))
        elif isinstance(argument, str):
            texts.append(argument)
    return found


def files_of(stage: int, world: int, dtype: torch.dtype) -> set[str]:
    """The names that DeepSpeed gives the files of a checkpoint."""
    prefix = "bf16_" if dtype == torch.bfloat16 else ""
    optimizers = (
        {f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(world)} if stage else set()
    )
    if stage < 3:
        return {"mp_rank_00_model_states.pt"} | optimizers
    return {f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(world)} | optimizers


def compare(source: MemorySource, written) -> None:
    """Asserts that ``written`` has everything of ``source``, bit for bit."""
    for (kind, name), want in source.data.items():
        if kind == PARAM and (PARAM, name) not in written.tensors:
            # Stage 3 stores masters and no weights; a weight is its rounded master.
            got = whole(written, MASTER, name).to(want.dtype)
        else:
            got = whole(written, kind, name)
        assert got.dtype == want.dtype and torch.equal(got, want), (kind, name, got, want)
    extra = written.tensors.keys() - source.tensors.keys()
    assert not extra, extra
    assert {n: i.group for n, i in written.params.items()} == {n: i.group for n, i in source.params.items()}
    for name, info in source.params.items():
        if info.group is not None:
            assert float(written.params[name].counts["step"]) == 4.0, name
    assert [g["lr"] for g in written.groups] == [0.1, 0.2] and written.groups[0]["weight_decay"] == 0.1
    assert written.aliases == source.aliases
    for key in ("global_steps", "global_samples", "skipped_steps"):
        assert written.state["counters"][key] == source.state["counters"][key]
    client = written.state["client_state"]
    assert client["epoch"] == 2 and torch.equal(client["rng"], torch.arange(3))


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_written_is_read_back(tmp_path, stage, low):
    scaler = {"scale": 64.0, "step": 7, "last_overflow_step": 3, "hysteresis_left": 1}
    for world in WORLDS:
        source = MemorySource(low, **({"loss_scaler": scaler} if low == torch.float16 else {}))
        path = Path(write_deepspeed(source, tmp_path / str(world), tag="t", world_size=world, stage=stage, dtype=low))
        assert path == tmp_path / str(world) / "t" and (path.parent / "latest").read_text() == "t"
        assert {file.name for file in path.iterdir()} == files_of(stage, world, low)
        for file in path.iterdir():
            odd = named_in(file) - HARMLESS - UPSTREAM.keys()
            assert not odd, f"{file.name} names {odd}"
            # torch itself loads a file that names no class of DeepSpeed.
            if not named_in(file) & UPSTREAM.keys():
                torch.load(file, weights_only=True)
        with DeepSpeedSource(str(path)) as written:
            if stage == 0:
                written.name_groups(
                    [[n for n, i in source.params.items() if i.group == g] for g in range(len(source.groups))]
                )
            assert written.problem == ""
            assert (written.topology.world_size, written.topology.stage) == (world, stage)
            compare(source, written)
            if low == torch.float16:
                # Without ZeRO DeepSpeed does not save the hysteresis.
                assert written.state["loss_scaler"] == scaler


def test_groups_lie_in_the_order_of_the_optimizer(tmp_path):
    source = MemorySource(torch.bfloat16)
    source.params = dict(reversed(source.params.items()))
    want = [[n for n, i in source.params.items() if i.group == g] for g in (0, 1)]
    assert want[0] == ["last", "wide", "embed"]
    path = write_deepspeed(source, tmp_path, tag="t", world_size=2, stage=1, dtype=torch.bfloat16)
    with DeepSpeedSource(path) as written:
        assert [list(shapes) for shapes in written._model.param_shapes] == want
        compare(source, written)


@pytest.mark.parametrize("low", LOW, ids=str)
def test_the_universal_format_is_read_back(tmp_path, low):
    source = MemorySource(low)
    path = Path(write_universal(source, tmp_path, "t", dtype=low))
    assert (tmp_path / "latest_universal").read_text() == "t" and not (tmp_path / "latest").exists()
    for file in path.rglob("*.pt"):
        assert not named_in(file) - HARMLESS - UPSTREAM.keys(), file
    with UniversalSource(str(path)) as written:
        compare(source, written)


def test_states_that_cannot_be_named_are_not_dropped_in_silence(tmp_path, caplog):
    module = {name: torch.zeros(3) for name in "abc"}
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3)) for _ in range(2)])
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones(3)
    optimizer.step()
    (tmp_path / "t").mkdir()
    torch.save(
        {"module": module, "buffer_names": [], "optimizer": optimizer.state_dict(), "dp_world_size": 1},
        tmp_path / "t" / "mp_rank_00_model_states.pt",
    )
    with DeepSpeedSource(str(tmp_path / "t")) as source:
        assert source.problem
        with pytest.raises(CheckpointError, match="more than one way"):
            convert(source, tmp_path / "out", "deepspeed_c")
        convert(source, tmp_path / "weights", "safetensors")
    assert (tmp_path / "weights" / "model.safetensors").exists() and not (tmp_path / "out").exists()


def test_what_the_layout_cannot_hold_is_refused_by_name(tmp_path):
    def write(source, stage: int = 1) -> None:
        write_deepspeed(source, tmp_path, tag="t", world_size=1, stage=stage, dtype=torch.float32)

    counts = MemorySource(torch.float32)
    counts.params["wide"] = ParamInfo(group=0, counts={"step": torch.tensor(5.0)})
    with pytest.raises(CheckpointError, match="wide: has step 5.0 where others of its group have 4.0"):
        write(counts)
    with pytest.raises(CheckpointError, match=r"the keys \['module'\] are DeepSpeed's own"):
        write(MemorySource(torch.float32, client_state={"module": 1}))
    weights = MemorySource(torch.float32)
    weights.groups = []
    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        write(weights)
    with pytest.raises(CheckpointError, match="its state cannot be pickled"):
        write(MemorySource(torch.float32, client_state={"f": lambda: None}))
    assert [path.name for path in tmp_path.iterdir()] == []
    assert (BUFFER, "mean") in weights.tensors


def renamed(old: str, new: str) -> MemorySource:
    """A checkpoint in which a parameter or a state has another name, as in one of another origin."""
    source = MemorySource(torch.bfloat16)
    source.data = {tuple(new if part == old else part for part in key): data for key, data in source.data.items()}
    source.tensors = {
        key: LogicalTensor(name=key[1], kind=key[0], shape=tuple(data.shape), dtype=data.dtype)
        for key, data in source.data.items()
    }
    source.params = {new if name == old else name: info for name, info in source.params.items()}
    return source


def test_names_that_lead_elsewhere_are_refused_before_anything_is_written(tmp_path):
    inner, outside = tmp_path / "in" / "ner", str(tmp_path / "absolute")
    parameters = ["", ".", "..", "../x", "a/../../x", "../../../../x", "/x", outside, "a//b", "a/", "a\0b", "\ud800"]
    cases = [("wide", name) for name in (*parameters, "optimizer_state.pt", "optimizer_state.pt/x")]
    cases += [("exp_avg", name) for name in ("", "../x", "a/b", outside, "x\0", "\ud800", "fp32", "step")]
    for old, new in cases:
        with pytest.raises(CheckpointError) as raised:
            write_universal(renamed(old, new), inner, "t")
        assert repr(new) in raised.value.what and "universal format" in raised.value.what, (new, raised.value.what)
        assert not list(tmp_path.iterdir()), (old, new, list(tmp_path.rglob("*")))
    # Odd but valid names are written and read back.
    for old, new in (("wide", "a/b..c/ \u00e9\n"), ("exp_avg", "..x y")):
        source = renamed(old, new)
        with UniversalSource(write_universal(source, inner, "t")) as written:
            compare(source, written)


def test_a_universal_checkpoint_that_names_another_folder_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("deepspeed_c.checkpoint.formats.deepspeed.write.check_folder", lambda name, where: None)
    path = write_universal(renamed("wide", "../wide"), tmp_path, "t")
    assert (tmp_path / "t" / "wide" / "fp32.pt").exists()
    with pytest.raises(CheckpointError, match=re.escape("'../wide' cannot have a folder")) as raised:
        UniversalSource(path)
    assert raised.value.where == path
