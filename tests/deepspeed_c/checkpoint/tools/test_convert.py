"""Every format is converted to every other. Values that both formats can hold stay the same, bit for bit."""

from __future__ import annotations

import os

import pytest
import torch

from deepspeed_c.checkpoint.open import open_checkpoint
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM
from deepspeed_c.checkpoint.tools.convert import TARGETS, Target, convert, tag_for, trained_dtype
from deepspeed_c.checkpoint.tools.ds_to_universal import main as ds_to_universal
from deepspeed_c.checkpoint.tools.ds_to_universal import parse_arguments
from deepspeed_c.errors import CheckpointError
from tests.deepspeed_c.checkpoint.memory_source import MemorySource, adam_checkpoint, read_all

FORMAT_OF = {"safetensors": "huggingface"}


def trained(values: dict[tuple[str, str], torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
    """The values from which training goes on, whatever the format: each weight in its highest precision, and the
    states."""
    out = {}
    for (kind, name), value in values.items():
        if kind in (PARAM, BUFFER) and (MASTER, name) in values:
            continue
        out["weight" if kind in (PARAM, MASTER, BUFFER) else kind, name] = value
    return out


def checkpoint() -> MemorySource:
    """A checkpoint that DeepSpeed's layout can hold too. It has no empty constants, because that layout cannot tell
    them from missing ones."""
    source = adam_checkpoint()
    source.state["counters"] = {"global_steps": 10, "global_samples": 40, "micro_steps": 20, "skipped_steps": 1}
    source.state["config"] = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
    return source


@pytest.mark.parametrize("last", ["deepspeed_c", "torch-dcp", "deepspeed", "deepspeed-universal"])
@pytest.mark.parametrize("first", ["deepspeed_c", "torch-dcp", "deepspeed", "deepspeed-universal"])
def test_there_and_on(tmp_path, first, last):
    want = trained(checkpoint().values)
    target = {"deepspeed": Target(world_size=2, stage=3)}
    one = convert(checkpoint(), tmp_path / "one", first, target.get(first))
    with open_checkpoint(one) as source:
        assert source.format == first
        two = convert(source, tmp_path / "two", last, target.get(last))
    with open_checkpoint(tmp_path / "two") as source:
        assert source.format == last and source.where == two
        got = trained(read_all(source))
        assert set(got) == set(want), f"{sorted(set(got) ^ set(want))}"
        for key, value in want.items():
            assert torch.equal(got[key].float(), value.float()), f"{key}: {got[key]} is not {value}"
        counters = source.state["counters"]
        assert counters["global_steps"] == 10, counters
        assert source.state["client_state"]["epoch"] == 3
        assert source.groups[0]["lr"] == 0.1 and list(source.groups[0]["betas"]) == [0.9, 0.999]
        assert float(source.params["layer.bias"].counts["step"]) == 10
    if last != "torch-dcp":
        assert os.path.basename(two) == "global_step10"
    # An engine puts the script beside both of its formats. DeepSpeed puts none beside the other formats.
    has_script = os.access(tmp_path / "two" / "zero_to_fp32.py", os.X_OK)
    assert has_script == (last in ("deepspeed", "deepspeed_c"))


@pytest.mark.parametrize("first", ["deepspeed_c", "torch-dcp", "deepspeed", "deepspeed-universal"])
def test_weights_alone(tmp_path, first):
    one = convert(checkpoint(), tmp_path / "one", first)
    with open_checkpoint(one) as source:
        convert(source, tmp_path / "hf", "safetensors", Target(dtype=torch.float32, max_shard_size="300B"))
    with open_checkpoint(tmp_path / "hf") as source:
        got = read_all(source)
    for (kind, name), value in trained(checkpoint().values).items():
        if kind == "weight":
            assert torch.equal(got[PARAM, name].float(), value.float()), name
    with open_checkpoint(tmp_path / "hf") as source:
        back = convert(source, tmp_path / "native", "deepspeed_c")
        assert os.path.basename(back) == "hf"
    with open_checkpoint(tmp_path / "native") as source:
        assert set(read_all(source)) == set(got) and source.aliases == {"head.weight": "embed.weight"}


def test_dtype_and_tag_of_a_source():
    source = checkpoint()
    assert trained_dtype(source) == torch.bfloat16 and tag_for(source) == "global_step10"
    source.tensors = {k: t for k, t in source.tensors.items() if k[0] == MASTER}
    assert trained_dtype(source) == torch.bfloat16
    source.state = {"config": {"fp16": {"enabled": True}}}
    assert trained_dtype(source) == torch.float16
    source.state = {}
    source.where = "/a/b/c/"
    assert trained_dtype(source) == torch.float32 and tag_for(source) == "c"


def test_what_a_format_does_not_take(tmp_path):
    with pytest.raises(CheckpointError, match="'gguf' is no format"):
        convert(checkpoint(), tmp_path / "x", "gguf")
    for to, target in (
        ("torch-dcp", Target(tag="a")),
        ("safetensors", Target(stage=3)),
        ("deepspeed_c", Target(world_size=2)),
        ("deepspeed-universal", Target(max_shard_size="1GB")),
    ):
        with pytest.raises(CheckpointError, match=f"the format {to} has no"):
            convert(checkpoint(), tmp_path / "x", to, target)
    assert os.listdir(tmp_path) == [] and set(TARGETS) >= {"deepspeed_c", "safetensors"}


def test_ds_to_universal(tmp_path):
    one = convert(checkpoint(), tmp_path / "ds", "deepspeed", Target(world_size=2, stage=1))
    out = tmp_path / "ds" / "global_step10_universal"
    ds_to_universal(
        parse_arguments(
            ["--input_folder", one, "--output_folder", str(out), "--num_extract_workers", "1", "--inject_missing_state"]
        )
    )
    assert (tmp_path / "ds" / "latest_universal").read_text() == out.name
    with open_checkpoint(out) as source:
        assert source.format == "deepspeed-universal"
        got = trained(read_all(source))
    assert torch.equal(got["exp_avg", "layer.weight"], checkpoint().values["exp_avg", "layer.weight"])
