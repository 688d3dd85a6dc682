"""DeepSpeed's files of a pipeline's layers: written from any checkpoint that knows its ties, and read back bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_c.checkpoint.formats.deepspeed import DeepSpeedSource, open_deepspeed, write_deepspeed, write_universal
from deepspeed_c.checkpoint.open import open_checkpoint
from deepspeed_c.checkpoint.source import BUFFER, PARAM, LogicalTensor, Source
from deepspeed_c.checkpoint.tools.convert import convert
from deepspeed_c.errors import CheckpointError
from tests.deepspeed_c.checkpoint.formats.deepspeed.memory_source import MemorySource, whole

# Names of a pipeline of twelve layers. Layers 0, 10 and 11 are tied; 11 has a forward_fn. Layer 3 is a function.
NAMES = {
    "embed": "tied_modules.e.weight", "frozen": "1.weight", "scale": "2.scale", "wide": "2.deep.w", "mean": "2.mean",
    "bias": "4.bias", "empty": "4.none", "last": "9.weight",
}  # fmt: skip
TIED = {"tied": {"e": [0, 10]}}
FILES = {
    0: {"weight": "tied_modules.e.weight"}, 1: {"weight": "1.weight"},
    2: {"scale": "2.scale", "deep.w": "2.deep.w", "mean": "2.mean"},
    4: {"bias": "4.bias", "none": "4.none", "again": "4.bias"}, 9: {"weight": "9.weight"},
    10: {"weight": "tied_modules.e.weight"},
}  # fmt: skip
FIRST = "mp_rank_00_model_states.pt"


def pipeline_source(low: torch.dtype, names: dict[str, str] = NAMES, pipeline: Any = TIED) -> MemorySource:
    source = MemorySource(low, pipeline=pipeline)
    source.data = {(kind, names[name]): data for (kind, name), data in source.data.items()}
    source.params = {names[name]: info for name, info in source.params.items()}
    source.aliases = {"4.again": names["bias"]}
    source.tensors = {
        (kind, name): LogicalTensor(name=name, kind=kind, shape=tuple(data.shape), dtype=data.dtype)
        for (kind, name), data in source.data.items()
    }
    return source


def write(source: Source, folder: Path, stage: int, low: torch.dtype, **more: Any) -> Path:
    return Path(write_deepspeed(source, folder, tag="t", world_size=3, stage=stage, dtype=low, **more))


def names_of_layers(path: Path) -> set[str]:
    return {file.name for file in path.iterdir() if file.name.startswith("layer_")}


def check_read(written: Source, source: MemorySource) -> None:
    assert written.tensors.keys() == source.tensors.keys(), written.tensors.keys() ^ source.tensors.keys()
    for kind, name in source.data:
        got, want = whole(written, kind, name), source.data[kind, name]
        assert got.dtype == want.dtype and torch.equal(got, want), f"{kind} of {name}: {got} and {want}"
    assert {n: i.group for n, i in written.params.items()} == {n: i.group for n, i in source.params.items()}
    assert written.aliases == source.aliases and written.state["pipeline"] == TIED


@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stage", [0, 1])
def test_layers_are_written_and_read_back(tmp_path, stage, low):
    source = pipeline_source(low)
    path = write(source, tmp_path, stage, low)
    assert names_of_layers(path) == {f"layer_{layer:02d}-model_states.pt" for layer in FILES}
    for layer, names in FILES.items():
        content = torch.load(path / f"layer_{layer:02d}-model_states.pt", weights_only=True)
        assert content.keys() == names.keys(), layer
        for key, name in names.items():
            want = source.data[BUFFER if key == "mean" else PARAM, name]
            assert content[key].dtype == want.dtype and torch.equal(content[key], want), f"{layer}: {key}"
        assert layer != 4 or content["again"].data_ptr() == content["bias"].data_ptr()
    assert torch.load(path / FIRST, weights_only=False)["module"] is None
    with open_checkpoint(str(path)) as written:
        if stage == 0:
            written.name_groups(
                [[n for n, i in source.params.items() if i.group == g] for g in range(len(source.groups))]
            )
        check_read(written, source)
        # On to our own format, and back.
        convert(written, tmp_path / "ours", "deepspeed_c")
    with open_checkpoint(str(tmp_path / "ours")) as ours:
        check_read(ours, source)
        assert names_of_layers(Path(convert(ours, tmp_path / "back", "deepspeed"))) == names_of_layers(path)


@pytest.mark.parametrize("stage", [2, 3])
def test_stages_without_pipelines_in_deepspeed_have_a_plain_models_files(tmp_path, stage):
    source = pipeline_source(torch.bfloat16)
    path = write(source, tmp_path, stage, torch.bfloat16)
    assert not names_of_layers(path)
    with DeepSpeedSource(str(path)) as written:
        masters = {key for key, tensor in source.tensors.items() if key[0] != PARAM}
        assert masters <= written.tensors.keys()
        assert written.state["pipeline"] == TIED


@pytest.mark.parametrize("stage", [2, 3])
def test_a_conversion_takes_the_stage_that_deepspeeds_pipelines_have(tmp_path, stage):
    source = pipeline_source(torch.float32)
    object.__setattr__(source.topology, "stage", stage)
    path = Path(convert(source, tmp_path, "deepspeed"))
    assert len(names_of_layers(path)) == len(FILES)
    with open_checkpoint(str(path)) as written:
        assert written.topology.stage == 1


def test_the_universal_format_holds_the_model_whole(tmp_path):
    source = pipeline_source(torch.bfloat16)
    path = Path(write_universal(source, tmp_path, "u"))
    module = torch.load(path / FIRST, weights_only=False)["module"]
    assert module.keys() == {*NAMES.values(), "4.again"}


def test_tensor_parallel_ranks_have_files_of_their_own(tmp_path):
    names = dict(zip(NAMES, ["tied_modules.e.weight", "1.w", "2.s", "2.w", "2.m", "4.b", "4.n", "9.w"]))
    source = pipeline_source(torch.float32, names)
    source.aliases = {}
    info = {"tp_replicated_parameter_patterns": [rf"^(?!{names['wide']}$).*"]}
    path = write(source, tmp_path, 1, torch.float32, n_tensor_ranks=2, tensor_info=info)
    assert names_of_layers(path) == {
        f"layer_{layer:02d}-model_{rank:02d}-model_states.pt" for layer in FILES for rank in range(2)
    }
    parts = [torch.load(path / f"layer_02-model_{rank:02d}-model_states.pt", weights_only=True)["w"] for rank in (0, 1)]
    assert torch.equal(torch.cat(parts), source.data[PARAM, "2.w"])
    with open_deepspeed(str(path)) as written:
        for kind, name in source.data:
            assert torch.equal(whole(written, kind, name), source.data[kind, name]), (kind, name)


def strip_account(path: Path) -> None:
    """Makes the model file one of DeepSpeed's own, which has no account of ties."""
    content = torch.load(path / FIRST, weights_only=False)
    del content["universal_checkpoint_info"]["pipeline_layers"]
    torch.save(content, path / FIRST)


def test_ties_are_found_by_the_names_of_trained_weights(tmp_path):
    source = pipeline_source(torch.float32)
    path = write(source, tmp_path, 1, torch.float32)
    strip_account(path)
    with DeepSpeedSource(str(path)) as written:
        check_read(written, source)


def test_ties_that_cannot_be_found_are_refused(tmp_path):
    source = pipeline_source(torch.float32)
    path = write(source, tmp_path, 1, torch.float32)
    strip_account(path)
    for layer in (0, 10):
        (path / f"layer_{layer:02d}-model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"no file of a layer with the tied weights \['e'\]"):
        DeepSpeedSource(str(path))


def test_missing_and_damaged_files_are_named(tmp_path):
    path = write(pipeline_source(torch.float32), tmp_path, 0, torch.float32)
    kept = (path / "layer_02-model_states.pt").read_bytes()
    (path / "layer_02-model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"files of 1 layers are missing: \[2\]"):
        DeepSpeedSource(str(path))
    torch.save([1, 2], path / "layer_02-model_states.pt")
    with pytest.raises(CheckpointError, match="no state of a layer"):
        DeepSpeedSource(str(path))
    (path / "layer_02-model_states.pt").write_bytes(kept)
    # A longer model left it under the same tag.
    (path / "layer_13-model_states.pt").write_bytes(kept)
    with DeepSpeedSource(str(path)) as written:
        assert (PARAM, "13.scale") not in written.tensors and (PARAM, "2.scale") in written.tensors
    for file in path.glob("layer_*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="no files of a pipeline's layers"):
        DeepSpeedSource(str(path))


def test_files_of_several_stages_are_refused(tmp_path):
    path = write(pipeline_source(torch.float32), tmp_path, 0, torch.float32)
    (path / "mp_rank_01_model_states.pt").write_bytes((path / FIRST).read_bytes())
    with pytest.raises(CheckpointError, match="ranks, and files of 2 are there|several stages"):
        open_deepspeed(str(path))


@pytest.mark.parametrize("tied", [None, [], {"e": []}, {"e": 0}, {"e": [0, -1]}, {"e": [True]}, {0: [0]}])
def test_an_account_that_is_none_is_refused(tmp_path, tied):
    with pytest.raises(CheckpointError, match="which layers of its pipeline are tied"):
        write(pipeline_source(torch.float32, pipeline={"tied": tied}), tmp_path, 0, torch.float32)


@pytest.mark.parametrize("name", ["loss_fn.weight", "tied_modules.other.weight", "weight"])
def test_tensors_of_no_layer_are_refused_before_anything_is_written(tmp_path, name):
    source = pipeline_source(torch.float32, NAMES | {"frozen": name})
    with pytest.raises(CheckpointError, match=f"{name}.*belongs to no layer"):
        write(source, tmp_path, 1, torch.float32)
    assert not (tmp_path / "t").exists()
