"""Exported weights: readers of other libraries find the checkpoint's values, files are complete or do not exist, and
the export takes bounded memory."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path

import pytest
import safetensors.torch
import torch

from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM
from deepspeed_c.checkpoint.tools.export import BATCH_BYTES, export, weights_of
from deepspeed_c.errors import CheckpointError
from tests.deepspeed_c.checkpoint.memory_source import MemorySource, adam_checkpoint
from tests.waits import ran


def load(folder: Path, form: str) -> dict[str, torch.Tensor]:
    """Reads a folder by its index, as Hugging Face does, with the libraries of the formats."""
    single = folder / ("model.safetensors" if form == "safetensors" else "pytorch_model.bin")
    index = Path(f"{single}.index.json")
    assert single.exists() != index.exists(), os.listdir(folder)
    read = safetensors.torch.load_file if form == "safetensors" else lambda path: torch.load(path, weights_only=True)
    if single.exists():
        return read(single)
    content = json.loads(index.read_text())
    found = {}
    for file in sorted(set(content["weight_map"].values())):
        part = read(folder / file)
        assert {n for n, f in content["weight_map"].items() if f == file} == set(part), file
        assert not found.keys() & part.keys()
        found.update(part)
    own = found if form == "safetensors" else {n: t for n, t in found.items() if n != "head.weight"}
    assert content["metadata"]["total_size"] == sum(t.nbytes for t in own.values())
    return found


def want_of(source: MemorySource, dtype: torch.dtype | None, exclude_frozen: bool = False) -> dict[str, torch.Tensor]:
    """The required weights: each is the master, rounded once, or the weight itself where there is no master."""
    want = {}
    for kind, name in source.values:
        value = source.values[kind, name]
        if kind == BUFFER:
            want[name] = value.float() if dtype == torch.float32 and value.is_floating_point() else value
        elif kind == PARAM and not (exclude_frozen and source.params[name].group is None):
            master = source.values.get((MASTER, name), value)
            want[name] = value if dtype is None else master.to(dtype)
    return want


def check(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(want), f"{sorted(got)} is not {sorted(want)}"
    for name, value in want.items():
        assert got[name].dtype == value.dtype and got[name].shape == value.shape, name
        assert torch.equal(got[name], value), f"{name}: {got[name]} is not {value}"


@pytest.mark.parametrize("form", ["safetensors", "fp32-pt"])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", ["5GB", "100B", 1])
def test_weights_in_every_form(tmp_path, form, dtype, size):
    source = adam_checkpoint()
    done = export(source, tmp_path / "out", form=form, dtype=dtype, max_shard_size=size)
    want = want_of(source, torch.float32 if dtype is None and form == "fp32-pt" else dtype)
    n_bytes = sum(t.nbytes for t in want.values())
    if form == "fp32-pt":
        want["head.weight"] = want["embed.weight"]
    got = load(tmp_path / "out", form)
    check(got, want)
    if form == "fp32-pt":
        assert got["head.weight"].data_ptr() == got["embed.weight"].data_ptr()
    index = (
        []
        if size == "5GB"
        else [
            f"{'model' if form == 'safetensors' else 'pytorch_model'}{done.files[0][-4:] if form == 'fp32-pt' else '.safetensors'}.index.json"
        ]
    )
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*done.files, *index])
    assert os.listdir(tmp_path) == ["out"]
    assert (done.n_tensors, done.total_bytes, done.not_finite) == (8, n_bytes, [])
    assert (len(done.files) == 1) == (size == "5GB")


def test_shards_are_cut_as_hugging_face_does(tmp_path):
    values = {(PARAM, f"w{i}"): torch.full((n,), float(i)) for i, n in enumerate([25, 24, 1, 1, 30, 25])}
    done = export(MemorySource(values), tmp_path / "out", max_shard_size="100B")
    parts = [sorted(safetensors.torch.load_file(tmp_path / "out" / file)) for file in done.files]
    assert parts == [["w0"], ["w1", "w2"], ["w3"], ["w4"], ["w5"]]
    assert done.files[1] == "model-00002-of-00005.safetensors"


def test_frozen_may_be_left_out(tmp_path):
    source = adam_checkpoint()
    export(source, tmp_path / "out", exclude_frozen=True)
    check(load(tmp_path / "out", "safetensors"), want_of(source, None, True))
    source.params = {}
    with pytest.raises(CheckpointError, match="does not say which parameters are frozen"):
        export(source, tmp_path / "other", exclude_frozen=True)


def test_masters_alone_are_enough():
    source = adam_checkpoint()
    for key in [key for key in source.tensors if key[0] == PARAM and key[1] != "frozen.weight"]:
        del source.tensors[key]
    assert {w.dtype for w in weights_of(source) if w.tensor.kind == MASTER} == {torch.float32}
    assert {w.dtype for w in weights_of(source, torch.float16) if w.tensor.kind != BUFFER} == {torch.float16}
    assert len(weights_of(source)) == 8


def test_nothing_to_export(tmp_path):
    with pytest.raises(CheckpointError, match="no weights"):
        export(MemorySource({("exp_avg", "a"): torch.ones(1)}), tmp_path / "out")
    with pytest.raises(CheckpointError, match="'gguf' is no format"):
        export(adam_checkpoint(), tmp_path / "out", form="gguf")
    assert os.listdir(tmp_path) == []


def test_large_tensors_come_in_pieces(tmp_path):
    n = BATCH_BYTES // 4 * 2 + 3
    values = {(PARAM, "a"): torch.arange(n, dtype=torch.int32), (PARAM, "b"): torch.ones(5)}
    source = MemorySource(values)
    export(source, tmp_path / "out")
    check(load(tmp_path / "out", "safetensors"), {name: t for (_, name), t in values.items()})
    assert source.largest_read_bytes <= BATCH_BYTES and source.n_reads == 3


def test_a_source_that_fails_leaves_nothing(tmp_path):
    class Broken(MemorySource):
        def read(self, reads):
            if any(read.tensor.name == "layer.bias" for read in reads):
                raise CheckpointError("is corrupt", where="rank_00001.safetensors")
            super().read(reads)

    source = adam_checkpoint()
    source.__class__ = Broken
    with pytest.raises(CheckpointError, match="is corrupt"):
        export(source, tmp_path / "out", max_shard_size=1)
    assert os.listdir(tmp_path) == []


MEASURE = """
    import sys, torch
    from deepspeed_c.checkpoint.tools.export import export
    from deepspeed_c.checkpoint.source import PARAM, LogicalTensor, Source, Topology

    class Made(Source):
        where = format = "made"
        aliases, params, groups, topology, state = {}, {}, [], Topology(), {}
        def __init__(self, n, elems):
            self.tensors = {
                (PARAM, f"t{i}"): LogicalTensor(name=f"t{i}", kind=PARAM, shape=(elems,), dtype=torch.float32) for i in range(n)
            }
        def read(self, reads):
            for read in reads:
                read.into.fill_(1.0)

    def peak():
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

    export(Made(1, 1 << 20), sys.argv[1] + "/warm", form=sys.argv[2])
    before = peak()
    export(Made(2, 40 << 20), sys.argv[1] + "/out", form=sys.argv[2], max_shard_size="200MB")
    print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize("form", ["safetensors", "fp32-pt"])
def test_peak_does_not_grow_with_the_largest_tensor(tmp_path, form):
    """Two tensors of 160 MiB are written in batches of 32 MiB. The check for finite numbers reads 8 MiB at a time."""
    done = ran(
        [sys.executable, "-c", textwrap.dedent(MEASURE), str(tmp_path), form],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    assert done.returncode == 0, done.stderr
    assert 20 < float(done.stdout) < 100, f"the peak grew by {done.stdout.strip()} MiB"
