"""A checkpoint is recognised by its files and found by its tag or by `latest`. The error for a missing one lists the
expected files."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp

from deepspeed_c.checkpoint.native.save import write_native
from deepspeed_c.checkpoint.open import FORMATS, find_checkpoint, format_of, open_checkpoint
from deepspeed_c.checkpoint.tools.export import export
from deepspeed_c.errors import CheckpointError
from tests.deepspeed_c.checkpoint.memory_source import adam_checkpoint


def make(path, *names):
    path.mkdir(parents=True)
    for name in names:
        if name.endswith("/"):
            (path / name).mkdir()
        else:
            (path / name).write_text("")
    return path


@pytest.mark.parametrize(
    ("names", "form"),
    [
        (["manifest.json"], "deepspeed_c"), (["rank_00003.safetensors"], "deepspeed_c"),
        (["mp_rank_00_model_states.pt"], "deepspeed"), (["zero_pp_rank_0_mp_rank_00_optim_states.pt"], "deepspeed"),
        (["zero/", "mp_rank_00_model_states.pt"], "deepspeed-universal"), ([".metadata", "__0_0.distcp"], "torch-dcp"),
        (["model.safetensors"], "huggingface"), (["model.safetensors.index.json"], "huggingface"),
        (["latest", "zero_to_fp32.py"], None), ([], None),
    ],
)  # fmt: skip
def test_formats_by_their_files(tmp_path, names, form):
    folder = make(tmp_path / "c", *names)
    assert format_of(str(folder)) == form
    assert form is None or form in FORMATS
    if form is not None:
        assert find_checkpoint(folder) == (str(folder), form)
        assert find_checkpoint(tmp_path, "c") == (str(folder), form)
        (tmp_path / "latest").write_text("c\n")
        assert find_checkpoint(tmp_path) == (str(folder), form)
        os.rename(tmp_path / "latest", tmp_path / "latest_universal")
        assert find_checkpoint(tmp_path) == (str(folder), form)


def test_our_own(tmp_path):
    write_native(adam_checkpoint(), str(tmp_path), "step10")
    write_native(adam_checkpoint(), str(tmp_path), "step11")
    for path, tag in ((tmp_path, "step10"), (tmp_path / "step10", None)):
        with open_checkpoint(path, tag) as source:
            assert source.format == "deepspeed_c" and source.where == str(tmp_path / "step10")
    (tmp_path / "latest").write_text("step10")
    with open_checkpoint(tmp_path, form="deepspeed_c") as source:
        assert source.where == str(tmp_path / "step10")
    with pytest.raises(CheckpointError, match="format deepspeed_c, not deepspeed"):
        open_checkpoint(tmp_path, form="deepspeed")
    os.unlink(tmp_path / "step10" / "manifest.json")
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_those_of_others(tmp_path):
    export(adam_checkpoint(), tmp_path / "hf", max_shard_size=1)
    for path in (
        tmp_path / "hf",
        tmp_path / "hf" / "model.safetensors.index.json",
        tmp_path / "hf" / "model-00001-of-00008.safetensors",
    ):
        with open_checkpoint(path) as source:
            assert source.format == "huggingface"
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with open_checkpoint(tmp_path / "dcp") as source:
        assert source.format == "torch-dcp"


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist(.|\n)*model.safetensors"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="holds no checkpoint(.|\n)*manifest.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "file.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"file\.txt: is no checkpoint"):
        open_checkpoint(tmp_path / "file.txt")
    make(tmp_path / "tag1", "manifest.json")
    make(tmp_path / "other")
    with pytest.raises(CheckpointError, match="no file `latest`(.|\n)*there are tag1$"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="tag2: does not exist(.|\n)*there are tag1$"):
        open_checkpoint(tmp_path, "tag2")
    with pytest.raises(CheckpointError, match="other: is no checkpoint"):
        open_checkpoint(tmp_path, "other")
    (tmp_path / "latest").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="no file `latest`"):
        open_checkpoint(tmp_path)
