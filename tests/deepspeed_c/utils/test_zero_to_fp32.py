"""DeepSpeed's functions for fp32 weights return the masters of our checkpoints. The program takes DeepSpeed's
arguments."""

from __future__ import annotations

import gc
import json
import os

import pytest
import safetensors.torch
import torch

from deepspeed_c.checkpoint.native.save import write_native
from deepspeed_c.checkpoint.source import BUFFER, MASTER
from deepspeed_c.errors import CheckpointError
from deepspeed_c.utils.zero_to_fp32 import (
    LazyTensor,
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    get_model_state_file,
    get_model_state_files,
    get_optim_files,
    load_state_dict_from_zero_checkpoint,
    main,
    to_torch_tensor,
)
from tests.deepspeed_c.checkpoint.memory_source import adam_checkpoint
from tests.open_files import open_files


@pytest.fixture
def saved(tmp_path):
    source = adam_checkpoint()
    folder = tmp_path / "ckpt"
    write_native(source, str(folder), "step10")
    (folder / "latest").write_text("step10")
    want = {n: t for (k, n), t in source.values.items() if k == MASTER}
    want["frozen.weight"] = source.values["param", "frozen.weight"].float()
    want["mean"] = source.values[BUFFER, "mean"].float()
    want["count"] = source.values[BUFFER, "count"]
    want["head.weight"] = want["embed.weight"]
    return str(folder), want


def check(got, want):
    assert set(got) == set(want), f"{sorted(got)} is not {sorted(want)}"
    for name, value in want.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name


def n_open() -> int:
    return len(open_files())


def test_state_dict(saved):
    folder, want = saved
    before = n_open()
    for path, tag in ((folder, None), (folder, "step10"), (os.path.join(folder, "step10"), None)):
        got = get_fp32_state_dict_from_zero_checkpoint(path, tag)
        check(got, want)
        assert got["head.weight"] is got["embed.weight"]
    check(
        get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True),
        {n: t for n, t in want.items() if n != "frozen.weight"},
    )
    gc.collect()
    assert n_open() == before


def test_lazily(saved):
    folder, want = saved
    before = n_open()
    lazy = get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
    assert all(isinstance(value, LazyTensor) for value in lazy.values())
    assert {n: (v.shape, v.dtype, v.numel()) for n, v in lazy.items()} == {
        n: (t.shape, t.dtype, t.numel()) for n, t in want.items()
    }
    assert repr(lazy["layer.bias"]) == "LazyTensor('layer.bias', shape=(5,), dtype=torch.float32)"
    check(to_torch_tensor(lazy), want)
    empty = to_torch_tensor(lazy, return_empty_tensor=True)
    assert all(t.is_meta for t in empty.values()) and empty["layer.weight"].shape == (5, 7)
    one = lazy.pop("layer.weight")
    del lazy
    gc.collect()
    assert torch.equal(one.contiguous(), want["layer.weight"]) and n_open() > before
    del one
    gc.collect()
    assert n_open() == before


def test_into_a_model(saved, caplog):
    folder, want = saved

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(7, 5)
            self.embed = torch.nn.Embedding(13, 7)
            self.other = torch.nn.Parameter(torch.ones(2))

    model = Model()
    assert load_state_dict_from_zero_checkpoint(model, folder) is model
    for name in ("layer.weight", "layer.bias", "embed.weight"):
        assert torch.equal(model.state_dict()[name], want[name])
    assert torch.equal(model.other.detach(), torch.ones(2))


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("size", [None, "5GB", "200B"])
def test_into_files(saved, tmp_path, safe, size):
    folder, want = saved
    out = tmp_path / "out"
    convert_zero_checkpoint_to_fp32_state_dict(folder, str(out), size, safe)
    stem = "model.safetensors" if safe else "pytorch_model.bin"
    read = safetensors.torch.load_file if safe else (lambda path: torch.load(path, weights_only=True))
    if size == "200B":
        index = json.loads((out / f"{stem}.index.json").read_text())
        got = {name: read(out / file)[name] for name, file in index["weight_map"].items()}
    else:
        assert os.listdir(out) == [stem]
        got = read(out / stem)
    check(got, {n: t for n, t in want.items() if not (safe and n == "head.weight")})


def test_the_program(saved, tmp_path, capsys):
    folder, want = saved
    out = tmp_path / "out"
    assert (
        main(
            [
                *(folder, str(out), "--safe_serialization", "--exclude_frozen_parameters", "-t", "step10"),
                *("--max_shard_size", "1GB"),
            ]
        )
        == 0
    )
    got = safetensors.torch.load_file(out / "model.safetensors")
    check(got, {n: t for n, t in want.items() if n not in ("frozen.weight", "head.weight")})
    assert main([folder, str(out), "--tag", "step11"]) == 1
    assert "step11: does not exist" in capsys.readouterr().err
    assert main([folder, str(out), "--max_shard_size", "five"]) == 1
    assert "'five' is no size" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="step11"):
        main([folder, str(out), "--tag", "step11", "-d"])


def test_files_of_deepspeeds_layout(tmp_path, saved):
    names = [f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (0, 1, 2, 10)]
    for name in [*reversed(names), "mp_rank_00_model_states.pt"]:
        (tmp_path / name).write_text("")
    assert [os.path.basename(p) for p in get_optim_files(str(tmp_path))] == names
    assert get_model_state_file(str(tmp_path), 2) == str(tmp_path / "mp_rank_00_model_states.pt")
    assert get_model_state_files(str(tmp_path)) == [str(tmp_path / "mp_rank_00_model_states.pt")]
    with pytest.raises(FileNotFoundError, match="zero_pp_rank_0_mp_rank_00_model_states"):
        get_model_state_file(str(tmp_path), 3)
    with pytest.raises(FileNotFoundError, match="is no folder"):
        get_optim_files(str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match="layout of deepspeed_c has no such files"):
        get_optim_files(os.path.join(saved[0], "step10"))
