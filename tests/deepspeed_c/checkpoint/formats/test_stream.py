"""Files that are written tensor by tensor: torch, zipfile and safetensors read them, the writer keeps no tensor in
memory, and a file is complete or does not exist."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import pickle
import stat
import subprocess
import sys
import textwrap
import weakref
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
import safetensors
import safetensors.torch
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from deepspeed_c.checkpoint.formats import stream
from deepspeed_c.checkpoint.formats.stream import TensorFileWriter
from deepspeed_c.checkpoint.formats.weight_file import SAFETENSORS_DTYPES, TORCH_STORAGES
from deepspeed_c.errors import CheckpointError, StateError
from tests import fresh
from tests.open_files import open_files
from tests.waits import LIMIT_SECONDS, ran

FORMATS = ["model.bin", "model.safetensors"]
SHAPES = [(), (0,), (1,), (2, 0, 3), (7,), (13, 17), (3, 1, 5)]
DTYPES = sorted({*SAFETENSORS_DTYPES, *TORCH_STORAGES, torch.float8_e4m3fnuz}, key=str)


def random_bits(shape, dtype, seed=0) -> torch.Tensor:
    """Random bit patterns, with NaNs and subnormals among them. A bool has its two valid patterns."""
    generator = torch.Generator().manual_seed(seed)
    n_elems = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    raw = torch.randint(256, (n_elems * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def announced(tensors):
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def save(path, tensors, aliases=None):
    with TensorFileWriter(path, announced(tensors), aliases) as file:
        # Write in another order than the file's.
        for name in reversed(tensors):
            file.write(name, tensors[name])
    assert os.path.getsize(path) == file.total_bytes


def readings(path):
    """The contents of a file, by each reader that can read it."""
    path = os.fspath(path)
    if path.endswith(".safetensors"):
        yield safetensors.torch.load_file(path)
        yield safetensors.torch.load(Path(path).read_bytes())
    else:
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        yield torch.load(path, weights_only=True)
        yield torch.load(path, weights_only=True, mmap=True)
        yield torch.load(path, weights_only=False)


def check_same(path, tensors):
    n = 0
    for loaded in readings(path):
        n += 1
        assert set(loaded) == set(tensors)
        for name, tensor in tensors.items():
            assert loaded[name].shape == tensor.shape and loaded[name].dtype == tensor.dtype, name
            assert loaded[name].is_contiguous() and not loaded[name].requires_grad
            assert bits(loaded[name]) == bits(tensor), name
    assert n >= 2


@pytest.mark.parametrize("file_name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_in_every_shape(tmp_path, file_name, dtype):
    tensors = {f"t{i}": random_bits(shape, dtype, i) for i, shape in enumerate(SHAPES)}
    if file_name.endswith("safetensors") and dtype not in SAFETENSORS_DTYPES:
        with pytest.raises(CheckpointError, match="safetensors has no dtype"):
            TensorFileWriter(tmp_path / file_name, announced(tensors))
        return
    save(tmp_path / file_name, tensors)
    check_same(tmp_path / file_name, tensors)


@pytest.mark.parametrize("file_name", FORMATS)
def test_dtypes_mixed_in_one_file(tmp_path, file_name):
    # Odd numbers of narrow elements come before wide elements: the format has to align them.
    dtypes = [torch.uint8, torch.float64, torch.bfloat16, torch.float32, torch.bool, torch.int64, torch.float8_e5m2]
    tensors = {f"t{i}": random_bits((2 * i + 1,), dtype, i) for i, dtype in enumerate(dtypes)}
    save(tmp_path / file_name, tensors)
    check_same(tmp_path / file_name, tensors)


@pytest.mark.parametrize("file_name", FORMATS)
def test_no_tensors_at_all(tmp_path, file_name):
    save(tmp_path / file_name, {})
    check_same(tmp_path / file_name, {})


def test_torch_save_gives_the_same_pickle(tmp_path):
    tensors = {f"t{i}": random_bits((3, i), dtype, i) for i, dtype in enumerate(DTYPES)}
    save(tmp_path / "ours.bin", tensors, {"tied": "t3"})
    torch.save({**tensors, "tied": tensors["t3"]}, tmp_path / "archive.pt")
    with zipfile.ZipFile(tmp_path / "ours.bin") as ours, zipfile.ZipFile(tmp_path / "archive.pt") as theirs:
        records = [info.filename for info in ours.infolist()]
        assert set(records) <= set(theirs.namelist())
        assert [ours.getinfo(name).CRC for name in records if name != "archive/data.pkl"] == [
            theirs.getinfo(name).CRC for name in records if name != "archive/data.pkl"
        ]
        # Compare the objects of the pickles. Their use of the memo may differ.
        meant = Meaning(io.BytesIO(ours.read("archive/data.pkl"))).load()
        assert meant == Meaning(io.BytesIO(theirs.read("archive/data.pkl"))).load()
        assert len(meant) == len(tensors) + 1 and meant["t0"][0] == Name("torch._utils", "_rebuild_tensor_v2")


class Name(NamedTuple):
    """Stands for a global that a pickle imports. A call returns the name and the arguments."""

    module: str
    name: str

    def __call__(self, *args):
        return (self, *args)


class Meaning(pickle.Unpickler):
    def find_class(self, module, name):
        return Name(module, name)

    def persistent_load(self, pid):
        return ("persistent", pid)


def test_loaded_tensors_share_nothing_but_what_is_tied(tmp_path):
    save(tmp_path / "model.bin", {"a": torch.ones(2), "b": torch.ones(2)}, {"tied": "a"})
    loaded = torch.load(tmp_path / "model.bin", weights_only=True)
    seen = []
    for tensor in loaded.values():
        tensor.requires_grad_()
    loaded["a"].register_hook(seen.append)
    loaded["b"].sum().backward()
    assert seen == []
    loaded["tied"].sum().backward()
    assert len(seen) == 1


@pytest.mark.parametrize("mode", ["meta", "fake"])
def test_loading_without_data_finds_the_payloads(tmp_path, mode):
    # In these modes torch tells the place of each payload, from the offsets in the zip.
    tensors = {"a": random_bits((5,), torch.float32), "b": random_bits((3, 7), torch.bfloat16)}
    path = tmp_path / "model.bin"
    save(path, tensors)
    content = path.read_bytes()
    with FakeTensorMode() if mode == "fake" else contextlib.nullcontext():
        loaded = torch.load(path, weights_only=True, map_location=None if mode == "fake" else "meta")
    assert set(loaded) == set(tensors)
    for name, meta in loaded.items():
        assert not isinstance(meta, FakeTensor) if mode == "meta" else meta.device.type == "cpu"
        assert meta.shape == tensors[name].shape and meta.dtype == tensors[name].dtype
        assert content[(offset := meta.untyped_storage()._checkpoint_offset) :][: meta.nbytes] == bits(tensors[name])
        assert offset % 64 == 0


def test_offsets_that_torch_may_compute(tmp_path):
    from torch.utils.serialization import config

    tensors = {f"t{i}": random_bits((i + 1,), torch.int16, i) for i in range(5)}
    save(tmp_path / "model.bin", tensors)
    with config.patch({"load.calculate_storage_offsets": True}):
        check_same(tmp_path / "model.bin", tensors)


@pytest.mark.parametrize("file_name", FORMATS)
def test_strides_that_are_not_rows(tmp_path, file_name, monkeypatch):
    monkeypatch.setattr(stream, "STAGING_BYTES", 40)
    base = torch.arange(6 * 7 * 8, dtype=torch.int16).view(6, 7, 8)
    tensors = {
        "transposed": base.permute(2, 0, 1), "steps": base[::2, 1:6:3, ::3],
        "expanded": torch.arange(5).unsqueeze(1).expand(5, 9), "expanded rows": torch.arange(9).expand(5, 9),
        "offset": base.view(-1)[3:], "wide row": base.permute(2, 0, 1).reshape(1, 8, 42)[:, ::2],
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugate": torch.view_as_real(torch.randn(4, dtype=torch.complex64)).t(),
        "negative": torch.randn(4, dtype=torch.complex64).conj().imag, "parameter": torch.nn.Parameter(torch.randn(11)),
        "gradient": torch.randn(3, requires_grad=True) * 2,
    }  # fmt: skip
    assert not any(tensors[n].is_contiguous() for n in ("transposed", "steps", "expanded", "wide row", "channels last"))
    save(tmp_path / file_name, tensors)
    check_same(tmp_path / file_name, {name: tensor.detach().resolve_neg() for name, tensor in tensors.items()})


@pytest.mark.parametrize("n_bytes", [39, 40, 41, 79, 80, 81, 120])
def test_tensor_against_the_staging_buffer(tmp_path, monkeypatch, n_bytes):
    monkeypatch.setattr(stream, "STAGING_BYTES", 40)
    tensors = {"x": random_bits((n_bytes,), torch.uint8), "y": random_bits((n_bytes // 8,), torch.float64)}
    save(tmp_path / "model.bin", tensors)
    check_same(tmp_path / "model.bin", tensors)


ODD_NAMES = ["", " ", "a.b.c", 'quote"and\\', "naïve.权重", "new\nline\t\0", "../../up", "data.pkl", "😀", "x" * 5000]


@pytest.mark.parametrize("file_name", FORMATS)
def test_names_with_odd_characters(tmp_path, file_name):
    tensors = {name: random_bits((3,), torch.float32, i) for i, name in enumerate(ODD_NAMES)}
    save(tmp_path / file_name, tensors)
    check_same(tmp_path / file_name, tensors)
    assert os.listdir(tmp_path) == [file_name]


@pytest.mark.parametrize("name", ["ascii", "naïve 权重", "y" * 240, "权" * 80])
@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
def test_file_names(tmp_path, name, suffix):
    name = name[: 255 - len(suffix)]
    save(tmp_path / (name + suffix), {"x": torch.ones(3)})
    check_same(tmp_path / (name + suffix), {"x": torch.ones(3)})


def test_aliases_share_storage_in_a_torch_file(tmp_path):
    save(tmp_path / "model.bin", {"a": torch.ones(1000), "b": torch.zeros(2)}, {"tied": "a", "again": "a"})
    for loaded in readings(tmp_path / "model.bin"):
        assert list(loaded) == ["a", "b", "tied", "again"]
        assert loaded["a"].data_ptr() == loaded["tied"].data_ptr() == loaded["again"].data_ptr()
        assert loaded["tied"].shape == (1000,)
    assert os.path.getsize(tmp_path / "model.bin") < 6000


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 3)
        self.head = torch.nn.Linear(3, 11, bias=False)
        self.head.weight = self.embed.weight
        # The name of this parameter is also the metadata key that tells who wrote the file.
        self.format = torch.nn.Parameter(torch.randn(2))


@pytest.mark.parametrize("file_name", FORMATS)
def test_tied_model_is_loaded_whole(tmp_path, file_name):
    model, other = Tied(), Tied()
    tensors = {"embed.weight": model.embed.weight, "format": model.format}
    save(tmp_path / file_name, tensors, {"head.weight": "embed.weight"})
    if file_name.endswith(".bin"):
        other.load_state_dict(torch.load(tmp_path / file_name, weights_only=True), strict=True)
    else:
        assert set(safetensors.torch.load_file(tmp_path / file_name)) == set(tensors)
        missing, unexpected = safetensors.torch.load_model(other, tmp_path / file_name, strict=True)
        assert not missing and not unexpected
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.head.weight, model.head.weight) and torch.equal(other.format, model.format)


def test_safetensors_metadata_names_framework_and_aliases(tmp_path):
    save(tmp_path / "m.safetensors", {"a": torch.ones(1)}, {"tied": "a", "format": "a"})
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata() == {"tied": "a", "format": "pt"}
        assert list(file.keys()) == ["a"]


@pytest.mark.parametrize("file_name", FORMATS)
def test_equal_tensors_give_equal_files_in_any_order(tmp_path, file_name):
    tensors = {f"t{i}": random_bits((i,), torch.float16, i) for i in range(5)}
    contents = set()
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 1, 3]):
        with TensorFileWriter(tmp_path / file_name, announced(tensors)) as file:
            for i in order:
                file.write(f"t{i}", tensors[f"t{i}"])
        contents.add((tmp_path / file_name).read_bytes())
    assert len(contents) == 1


@pytest.mark.parametrize("file_name", FORMATS)
def test_no_more_than_one_tensor_is_alive(tmp_path, file_name):
    shape, n_tensors, alive = (1 << 20,), 20, weakref.WeakSet()
    highest = 0

    def one_after_the_other():
        nonlocal highest
        for i in range(n_tensors):
            storage_owner = torch.full(shape, float(i))
            alive.add(storage_owner)
            highest = max(highest, len(alive))
            yield f"t{i}", storage_owner
            del storage_owner

    with TensorFileWriter(tmp_path / file_name, {f"t{i}": (shape, torch.float32) for i in range(n_tensors)}) as file:
        for name, tensor in one_after_the_other():
            file.write(name, tensor)
            del tensor
    assert highest == 1, f"{highest} tensors were alive at once"
    for loaded in readings(tmp_path / file_name):
        assert [loaded[f"t{i}"][-1].item() for i in range(n_tensors)] == list(range(n_tensors))


MEASURE = """
    import sys, torch
    from deepspeed_c.checkpoint.formats.stream import TensorFileWriter

    def status(key):
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) / 1024

    n_tensors, columns = 7, 1 << 11
    shape = (columns, columns)
    entries = {f"t{i}": (shape, torch.float32) for i in range(n_tensors)}
    with TensorFileWriter(sys.argv[1], {"small": ((256, 256), torch.float32), **entries}) as file:
        # Brings in the code that all of them run.
        file.write("small", torch.full((256, 256), 1.0).t())
        before = status("VmHWM")
        for i in range(n_tensors):
            # Not in rows: a writer that makes it so takes the tensor twice.
            tensor = torch.full(shape, float(i)).t()
            file.write(f"t{i}", tensor)
            del tensor
    print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize("file_name", FORMATS)
def test_peak_of_the_process_does_not_grow_with_the_file(tmp_path, file_name):
    """The file has 7 tensors of 16 MiB. The peak grows by one tensor and the staging buffer of 8 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), str(tmp_path / file_name)],
        # Makes glibc return memory to the system at every free. By default its threshold grows.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 12 < float(done.stdout) < 28, f"the peak grew by {done.stdout.strip()} MiB while 112 MiB were written"


# --- refusals ---


@pytest.fixture(params=FORMATS)
def path(request, tmp_path):
    """The path of a file whose contents must survive every failure."""
    path = tmp_path / request.param
    path.write_bytes(b"old contents")
    yield path
    assert path.read_bytes() == b"old contents"
    assert os.listdir(tmp_path) == [path.name], "something was left behind"


ONE = {"a": ((2, 3), torch.float32)}


@pytest.mark.parametrize(
    "name, tensor, message",
    [
        ("b", torch.ones(2, 3), "b: is not among the tensors that were announced"),
        ("tied", torch.ones(2, 3), "tied: is an alias of a"),
        ("a", torch.ones(3, 2), r"a: is \(3, 2\), torch.float32, and \(2, 3\), torch.float32 was announced"),
        ("a", torch.ones(6), r"a: is \(6,\)"),
        ("a", torch.ones(0), r"a: is \(0,\)"),
        ("a", torch.ones(2, 3, dtype=torch.bfloat16), "torch.bfloat16, and .* torch.float32 was announced"),
        ("a", torch.ones(2, 3, device="meta"), "a: has no plain memory to be written .device meta"),
        ("a", torch.ones(2, 3).to_sparse(), "a: has no plain memory.*sparse"),
    ],
)
def test_wrong_tensor(path, name, tensor, message):
    with pytest.raises(CheckpointError, match=message), TensorFileWriter(path, ONE, {"tied": "a"}) as file:
        file.write(name, tensor)


def test_tensor_written_twice(path):
    with pytest.raises(CheckpointError, match="a: was written already"), TensorFileWriter(path, ONE) as file:
        file.write("a", torch.ones(2, 3))
        file.write("a", torch.ones(2, 3))


def test_missing_tensors_are_named_and_counted(path):
    entries = {f"t{i}": ((1,), torch.float32) for i in range(9)}
    with (
        pytest.raises(CheckpointError, match="7 of 9 tensors were not written: t1, t2, t4, t5, t6, ..."),
        TensorFileWriter(path, entries) as file,
    ):
        file.write("t0", torch.ones(1))
        file.write("t3", torch.ones(1))


def test_a_tensor_of_no_elements_has_to_be_written_too(path):
    with (
        pytest.raises(CheckpointError, match="1 of 1 tensors were not written: a\n"),
        TensorFileWriter(path, {"a": ((0,), torch.float32)}),
    ):
        pass


@pytest.mark.parametrize(
    "entries, aliases, message",
    [
        ([("a", ((1,), torch.int8)), ("a", ((1,), torch.int8))], {}, "a: this name is given twice"),
        (ONE, {"a": "a"}, "a: this name is given twice"),
        (ONE, {"tied": "b"}, "tied: is an alias of 'b', which is not"),
        (ONE, {"tied": "other", "other": "a"}, "tied: is an alias of 'other', which is not"),
        ({"a": ((2, -1), torch.int8)}, {}, r"a: \(2, -1\), torch.int8 is no shape"),
        ({"a": ((2,), "float32")}, {}, "'float32' is no shape and dtype"),
        ({"a\ud800": ((2,), torch.int8)}, {}, "lone surrogate"),
        (ONE, {"a\ud800": "a"}, "lone surrogate"),
    ],
)
def test_wrong_announcement(path, entries, aliases, message):
    with pytest.raises(CheckpointError, match=message):
        TensorFileWriter(path, entries, aliases)


def test_write_outside_the_block(path):
    file = TensorFileWriter(path, ONE)
    with pytest.raises(StateError, match="is not open"):
        file.write("a", torch.ones(2, 3))
    with pytest.raises(CheckpointError, match="not written"), file:
        pass
    with pytest.raises(StateError, match="is not open"):
        file.write("a", torch.ones(2, 3))
    with pytest.raises(StateError, match="was entered before"), file:
        pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError, GeneratorExit])
def test_exception_in_the_block_passes_and_leaves_nothing(path, error):
    with pytest.raises(error), TensorFileWriter(path, ONE) as file:
        file.write("a", torch.ones(2, 3))
        raise error


def test_nothing_is_there_after_an_exception_where_nothing_was(tmp_path):
    with pytest.raises(ZeroDivisionError), TensorFileWriter(tmp_path / "new.bin", ONE) as file:
        file.write("a", torch.ones(2, 3))
        assert len(os.listdir(tmp_path)) == 1 and not (tmp_path / "new.bin").exists()
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []


# --- failures of the file system ---


@pytest.mark.parametrize("call", ["pwrite", "fsync", "close", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_failing_system_call(path, monkeypatch, call, number):
    real = getattr(os, call)
    is_first = True

    def fail(*args):
        nonlocal is_first
        if call == "close":
            real(*args)
        if is_first:
            is_first = False
            raise OSError(number, os.strerror(number))
        return None if call == "close" else real(*args)

    before = open_files()
    with pytest.raises(CheckpointError, match=os.strerror(number)) as caught:
        with TensorFileWriter(path, ONE) as file:
            monkeypatch.setattr(os, call, fail)
            file.write("a", torch.ones(2, 3))
        pytest.fail("the error was swallowed")
    monkeypatch.undo()
    assert not is_first
    assert caught.value.__cause__.errno == number
    assert str(file.total_bytes) in str(caught.value) and str(path) in str(caught.value) and caught.value.fix
    assert open_files() == before


def test_folder_that_cannot_be_synced(tmp_path, monkeypatch):
    real = os.fsync

    def no_folders(number):
        def fsync(fd):
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                raise OSError(number, os.strerror(number))
            real(fd)

        return fsync

    monkeypatch.setattr(os, "fsync", no_folders(errno.EINVAL))
    save(tmp_path / "a.bin", {"a": torch.ones(3)})
    check_same(tmp_path / "a.bin", {"a": torch.ones(3)})
    monkeypatch.setattr(os, "fsync", no_folders(errno.EIO))
    with pytest.raises(CheckpointError, match=os.strerror(errno.EIO)):
        save(tmp_path / "b.bin", {"a": torch.ones(3)})


@pytest.mark.parametrize("file_name", FORMATS)
def test_writes_that_are_cut_short(tmp_path, monkeypatch, file_name):
    real, sizes = os.pwrite, []

    def short(fd, content, offset):
        sizes.append(n := max(1, len(content) // 3))
        return real(fd, content[:n], offset)

    monkeypatch.setattr(os, "pwrite", short)
    tensors = {"a": random_bits((101,), torch.bfloat16), "b": random_bits((3, 5), torch.int64)}
    save(tmp_path / file_name, tensors)
    assert len(sizes) > 10
    check_same(tmp_path / file_name, tensors)


@pytest.mark.parametrize("file_name", FORMATS)
def test_a_failed_write_may_be_repeated(tmp_path, monkeypatch, file_name):
    tensor = random_bits((100,), torch.float32)
    monkeypatch.setattr(stream, "STAGING_BYTES", 80)
    real, n_calls = os.pwrite, 0

    def fail_third(*args):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 3:
            raise OSError(errno.ENOSPC, "full")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", fail_third)
    with TensorFileWriter(tmp_path / file_name, announced({"a": tensor})) as file:
        with pytest.raises(CheckpointError, match="free some space"):
            file.write("a", tensor)
        file.write("a", tensor)
    check_same(tmp_path / file_name, {"a": tensor})


LIMITED = """
    import resource, sys, torch
    from deepspeed_c.checkpoint.formats.stream import TensorFileWriter
    from deepspeed_c.errors import CheckpointError

    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        with TensorFileWriter(sys.argv[1], {"a": ((20_000,), torch.float32), "b": ((20_000,), torch.float32)}) as file:
            file.write("a", torch.ones(20_000))
            print("a was written")
            file.write("b", torch.ones(20_000))
    except CheckpointError as error:
        print(type(error.__cause__).__name__, error)
"""


def test_limit_on_the_size_of_a_file(path):
    done = fresh.run(["-c", textwrap.dedent(LIMITED), path])
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first == "a was written"
    assert "OSError" in rest[0] and os.strerror(errno.EFBIG) in rest[0] and "ulimit -f" in rest[1]


def test_disk_that_is_full(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = ran(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)])
    if mounted.returncode:
        pytest.skip(f"no file system of our own: {mounted.stderr.strip()}")
    try:
        (disk / "model.bin").write_bytes(b"old contents")
        with pytest.raises(CheckpointError, match="No space left.*\nFix: free some space"):
            save(disk / "model.bin", {"a": torch.ones(20_000), "b": torch.ones(40_000)})
        assert os.listdir(disk) == ["model.bin"] and (disk / "model.bin").read_bytes() == b"old contents"
        save(disk / "model.bin", {"a": torch.ones(20_000)})
    finally:
        subprocess.run(["umount", str(disk)], check=True, capture_output=True, timeout=LIMIT_SECONDS)


KILLED = """
    import os, signal, sys, torch
    from deepspeed_c.checkpoint.formats.stream import TensorFileWriter

    with TensorFileWriter(sys.argv[1], {"a": ((3,), torch.float32)}) as file:
        file.write("a", torch.ones(3))
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_process_leaves_the_old_file(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"old contents")
    done = fresh.run(["-c", textwrap.dedent(KILLED), path])
    assert done.returncode == -9
    assert path.read_bytes() == b"old contents"
    (left,) = set(os.listdir(tmp_path)) - {"model.bin"}
    assert left.startswith(".model.bin.") and left.endswith(".tmp")
    # A failed save does not stand in the way of the next one.
    save(path, {"a": torch.ones(3)})
    check_same(path, {"a": torch.ones(3)})


@pytest.mark.parametrize("point", ["fsync", "close", "replace"])
def test_order_of_the_last_steps(tmp_path, monkeypatch, point):
    """A kill before any of the last steps leaves the old file under the name. A kill after the replace leaves the
    complete new file."""
    path = tmp_path / "model.bin"
    path.write_bytes(b"old contents")
    steps = []

    def note(call, real, *args):
        steps.append((call, path.read_bytes() == b"old contents"))
        return real(*args)

    for call in ("pwrite", "fsync", "close", "replace"):
        monkeypatch.setattr(os, call, functools.partial(note, call, getattr(os, call)))
    save(path, {"a": torch.ones(3)})
    monkeypatch.undo()
    names = [call for call, _ in steps]
    assert names[names.index("fsync") :] == ["fsync", "close", "replace", "fsync", "close"]
    assert next(is_old for call, is_old in steps if call == point)
    assert not steps[-1][1]


def test_missing_folder(tmp_path):
    with (
        pytest.raises(CheckpointError, match="No such file or directory\nFix: make the folder first"),
        TensorFileWriter(tmp_path / "no" / "a.bin", ONE),
    ):
        pytest.fail("was entered")
    assert os.listdir(tmp_path) == []


def test_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="Not a directory"), TensorFileWriter(tmp_path / "file" / "a.bin", ONE):
        pytest.fail("was entered")


READ_ONLY = """
    import os, sys, torch
    from deepspeed_c.checkpoint.formats.stream import TensorFileWriter
    from deepspeed_c.errors import CheckpointError

    os.chdir(sys.argv[1])
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        TensorFileWriter("a.bin", {}).__enter__()
    except CheckpointError as error:
        print(error)
"""


def test_read_only_folder(tmp_path):
    tmp_path.chmod(0o555)
    try:
        done = fresh.run(["-c", textwrap.dedent(READ_ONLY), tmp_path])
    finally:
        tmp_path.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert "a.bin: " in done.stdout and os.strerror(errno.EACCES) in done.stdout and "may write to" in done.stdout
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["folder", "fifo", "device"])
def test_what_is_no_file_is_not_replaced(tmp_path, kind):
    path = Path(os.devnull) if kind == "device" else tmp_path / "a.bin"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    before = os.stat(path)
    with pytest.raises(CheckpointError, match="is no regular file"), TensorFileWriter(path, ONE):
        pytest.fail("was entered")
    assert os.stat(path).st_ino == before.st_ino


def test_link_stays_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link.bin").symlink_to("there/model.bin")
    save(tmp_path / "link.bin", {"a": torch.ones(3)})
    assert (tmp_path / "link.bin").is_symlink() and os.listdir(tmp_path / "there") == ["model.bin"]
    check_same(tmp_path / "there" / "model.bin", {"a": torch.ones(3)})


def test_rights_follow_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        save(tmp_path / "a.bin", {"a": torch.ones(3)})
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a.bin").stat().st_mode) == 0o640


def test_relative_path_belongs_to_the_folder_at_the_start(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with TensorFileWriter("a.bin", ONE) as file:
        monkeypatch.chdir(tmp_path / "elsewhere")
        file.write("a", torch.ones(2, 3))
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "elsewhere"]


@pytest.mark.parametrize("file_name", FORMATS)
@pytest.mark.parametrize(
    "mode",
    [lambda: torch.device("meta"), torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["meta", "inference", "no_grad", "autocast"],
)
def test_modes_of_torch_around_it_change_nothing(tmp_path, file_name, mode):
    tensors = {"a": torch.randn(5), "b": torch.randn(2, 3).bfloat16()}
    with mode():
        file = TensorFileWriter(tmp_path / file_name, announced(tensors))
        file.__enter__()
        file.write("a", tensors["a"])
    file.write("b", tensors["b"])
    file.__exit__(None, None, None)
    check_same(tmp_path / file_name, tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("file_name", FORMATS)
def test_tensors_on_a_device(tmp_path, file_name):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    tensors = {"a": torch.randn(1 << 22), "b": torch.randn(1500, 2000).bfloat16(), "c": torch.ones(0)}
    with TensorFileWriter(tmp_path / file_name, announced(tensors)) as file:
        file.write("a", tensors["a"].cuda())
        file.write("b", tensors["b"].t().contiguous().cuda().t())
        file.write("c", tensors["c"].cuda())
    check_same(tmp_path / file_name, tensors)


# --- tensors written in parts ---


@pytest.mark.parametrize("file_name", FORMATS)
@pytest.mark.parametrize("cuts", [[0], [7], [1, 0, 6], [3, 4], [1] * 7])
def test_parts_make_the_same_file_as_the_whole(tmp_path, monkeypatch, file_name, cuts):
    monkeypatch.setattr(stream, "STAGING_BYTES", 24)
    n_elems = sum(cuts)
    tensors = {"a": random_bits((n_elems,), torch.float64), "b": random_bits((n_elems, 1), torch.bfloat16, 1)}
    save(tmp_path / file_name, tensors)
    whole = (tmp_path / file_name).read_bytes()
    with TensorFileWriter(tmp_path / file_name, announced(tensors)) as file:
        at = 0
        for n in cuts:
            for name, tensor in tensors.items():
                file.write_part(name, tensor.view(-1)[at : at + n])
            at += n
    assert (tmp_path / file_name).read_bytes() == whole


def test_parts_that_do_not_belong_are_refused(tmp_path):
    path = tmp_path / "m.bin"
    with (
        pytest.raises(CheckpointError, match="1 of 1 tensors were not written: x"),
        TensorFileWriter(path, {"x": ((2, 2), torch.float32)}) as file,
    ):
        file.write_part("x", torch.ones(3))
        with pytest.raises(CheckpointError, match="elements 3 to 5"):
            file.write_part("x", torch.ones(2))
        with pytest.raises(CheckpointError, match="torch.int32"):
            file.write_part("x", torch.ones(1, dtype=torch.int32))
        with pytest.raises(CheckpointError, match="begun in parts"):
            file.write("x", torch.ones(2, 2))
        with pytest.raises(CheckpointError, match="no plain memory"):
            file.write_part("x", torch.ones(1, device="meta"))
        with pytest.raises(CheckpointError, match="not among"):
            file.write_part("y", torch.ones(1))
    assert os.listdir(tmp_path) == []
    with TensorFileWriter(path, {"x": ((2, 2), torch.float32)}) as file:
        file.write_part("x", torch.ones(4))
        with pytest.raises(CheckpointError, match="already"):
            file.write_part("x", torch.ones(0))
    with pytest.raises(StateError, match="not open"):
        file.write_part("x", torch.ones(1))
