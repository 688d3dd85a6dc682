"""A folder of weights is complete or does not exist, replaces an older folder without mixing files, and refuses foreign
files."""

from __future__ import annotations

import json
import os

import pytest
import safetensors.torch
import torch

from deepspeed_c.checkpoint.formats import model_folder
from deepspeed_c.checkpoint.formats.model_folder import ModelFolderWriter, parse_size
from deepspeed_c.errors import CheckpointError, StateError

F32 = torch.float32


def save(folder, tensors, **options):
    with ModelFolderWriter(folder, [(n, t.shape, t.dtype) for n, t in tensors.items()], **options) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return writer


def names(folder):
    return sorted(os.listdir(folder))


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("5GB", 5 * 10**9), ("5 gib", 5 << 30), ("1.5MB", 1500000), ("10", 10), (7, 7), ("3kb", 3000),
        ("2TiB", 2 << 40), (".5KiB", 512),
    ],
)  # fmt: skip
def test_sizes(text, n_bytes):
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "5XB", "0", 0, -1, "0.1B", None, True, 2.5, "5GB5", "1e9", "5G"])
def test_what_is_no_size(text):
    with pytest.raises(CheckpointError, match="is no size"):
        parse_size(text)


def test_an_older_model_is_replaced_and_other_files_stay(tmp_path):
    old = {f"w{i}": torch.full((8,), float(i)) for i in range(4)}
    save(tmp_path, old, max_shard_size=32)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert len(names(tmp_path)) == 6
    new = {f"w{i}": torch.full((8,), 10.0 + i) for i in range(2)}
    save(tmp_path, new, max_shard_size=32)
    assert names(tmp_path) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json",
    ]  # fmt: skip
    save(tmp_path, new)
    assert names(tmp_path) == ["model.safetensors", "tokenizer.json"]
    save(tmp_path, old)
    assert torch.equal(safetensors.torch.load_file(tmp_path / "model.safetensors")["w3"], old["w3"])
    save(tmp_path, new, form="fp32-pt")
    assert names(tmp_path) == ["model.safetensors", "pytorch_model.bin", "tokenizer.json"]


class Killed(BaseException):
    pass


def readable(folder) -> dict[str, torch.Tensor] | None:
    """The weights that a loader finds if it looks in the order of transformers: the single file first, then the
    index."""
    if (folder / "model.safetensors").exists():
        return safetensors.torch.load_file(folder / "model.safetensors")
    if not (folder / "model.safetensors.index.json").exists():
        return None
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return {name: safetensors.torch.load_file(folder / file)[name] for name, file in weight_map.items()}


@pytest.mark.parametrize("sizes", [("5GB", "5GB"), ("5GB", 32), (32, "5GB"), (32, 32), (None, 32), (None, "5GB")])
def test_killed_at_any_change_of_the_folder(tmp_path, monkeypatch, sizes):
    """After a kill a loader finds one whole model or none. After a complete save it finds the new model."""
    old = {f"w{i}": torch.full((8,), float(i)) for i in range(3)}
    new = {f"w{i}": torch.full((8,), 10.0 + i) for i in range(3)}
    # A killed process cleans nothing up.
    monkeypatch.setattr(model_folder.shutil, "rmtree", lambda *_, **__: None)
    n_steps = 0
    for at in range(40):
        folder = tmp_path / str(at)
        if sizes[0] is not None:
            save(folder, old, max_shard_size=sizes[0])
            (folder / "other").write_text("")
        left = at
        with monkeypatch.context() as patch:

            def counted(real):
                def call(path, *rest):
                    nonlocal left
                    # Changes of the temporary folder of the save itself do not count.
                    if rest or ".tmp" not in str(path):
                        if left == 0:
                            raise Killed
                        left -= 1
                    return real(path, *rest)

                return call

            for name in ("rename", "replace", "unlink"):
                patch.setattr(model_folder.os, name, counted(getattr(os, name)))
            try:
                save(folder, new, max_shard_size=sizes[1])
                is_killed = False
            except Killed:
                is_killed = True
        found = readable(folder) if folder.exists() else None
        values = None if found is None else {t[0].item() for t in found.values()}
        allowed = [None, {0.0, 1.0, 2.0}, {10.0, 11.0, 12.0}] if is_killed else [{10.0, 11.0, 12.0}]
        assert values in allowed, f"after {at} changes: {values}"
        if not is_killed:
            n_steps = at
            break
    assert n_steps >= 1


def test_a_new_folder_needs_one_rename(tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in ("new", "deep/er", "empty"):
        save(tmp_path / folder, {"w": torch.ones(3)})
        assert names(tmp_path / folder) == ["model.safetensors"]
    assert names(tmp_path) == ["deep", "empty", "new"]


def test_an_exception_leaves_everything_as_it_was(tmp_path):
    save(tmp_path / "out", {"w": torch.ones(3)})
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    writer = ModelFolderWriter(tmp_path / "out", [("a", (2,), F32), ("b", (2,), F32)], max_shard_size=8)
    with pytest.raises(KeyboardInterrupt), writer:
        writer.write("a", torch.ones(2))
        writer.write_part("b", torch.ones(1))
        raise KeyboardInterrupt
    assert names(tmp_path / "out") == ["model.safetensors"]
    with (
        pytest.raises(CheckpointError, match="1 of 2 tensors were not written: b"),
        ModelFolderWriter(tmp_path / "out", [("a", (2,), F32), ("b", (2,), F32)]) as writer,
    ):
        writer.write("a", torch.ones(2))
        writer.write_part("b", torch.ones(1))
    assert names(tmp_path / "out") == ["model.safetensors"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_what_does_not_belong(tmp_path):
    entries = [("a", (2,), F32), ("b", (2,), F32)]
    with pytest.raises(CheckpointError, match="a: this name is given twice"):
        ModelFolderWriter(tmp_path, [*entries, ("a", (1,), F32)], max_shard_size=8)
    with pytest.raises(CheckpointError, match="b: this name is given twice"):
        ModelFolderWriter(tmp_path, entries, {"b": "a"})
    with pytest.raises(CheckpointError, match="tied: is an alias"):
        ModelFolderWriter(tmp_path, entries, {"tied": "c"})
    writer = ModelFolderWriter(tmp_path / "out", entries)
    with pytest.raises(StateError, match="not open"):
        writer.write("a", torch.ones(2))
    with writer:
        with pytest.raises(CheckpointError, match="b: comes when a is expected"):
            writer.write("b", torch.ones(2))
        with pytest.raises(CheckpointError, match=r"shape \(1, 2\)"):
            writer.write("a", torch.ones(1, 2))
        writer.write("a", torch.ones(2))
        with pytest.raises(CheckpointError, match="a: comes when b"):
            writer.write("a", torch.ones(2))
        writer.write("b", torch.ones(2))
        with pytest.raises(CheckpointError, match="when nothing"):
            writer.write("b", torch.ones(2))
    assert names(tmp_path) == ["out"]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        save(tmp_path / "file", {"w": torch.ones(1)})
    with pytest.raises(CheckpointError, match="cannot be written|is a file"):
        save(tmp_path / "file" / "below", {"w": torch.ones(1)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float64])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_values_that_are_not_finite_are_named(tmp_path, caplog, monkeypatch, dtype, value):
    monkeypatch.setattr(model_folder, "CHECKED_BYTES", 64)
    monkeypatch.setattr(model_folder.logger, "propagate", True)
    tensors = {f"w{i}": torch.ones(101).to(dtype) for i in range(3)} | {"int": torch.ones(3, dtype=torch.int8)}
    bad = torch.ones(101)
    bad[100] = value
    tensors["w1"] = bad.to(dtype)
    writer = save(tmp_path / "out", tensors)
    assert writer.not_finite == ["w1"]
    assert "1 tensors hold NaN or inf: w1" in caplog.text


def test_a_file_that_is_not_what_was_written_is_found(tmp_path, monkeypatch):
    real = model_folder.TensorFileWriter.__exit__

    def cut_short(self, kind, error, traceback):
        real(self, kind, error, traceback)
        os.truncate(self.path, os.path.getsize(self.path) - 1)

    monkeypatch.setattr(model_folder.TensorFileWriter, "__exit__", cut_short)
    with pytest.raises(CheckpointError, match="end at byte"):
        save(tmp_path / "out", {"w": torch.ones(1)})
    assert os.listdir(tmp_path) == []


def test_no_tensors_at_all(tmp_path):
    save(tmp_path / "out", {})
    assert safetensors.torch.load_file(tmp_path / "out" / "model.safetensors") == {}
