"""The small state: plain data is restored unchanged, all other data is refused by name, and no code of a file runs."""

from __future__ import annotations

import argparse
import collections
import datetime
import functools
import io
import math
import os
import pathlib
import pickle
import random
import threading
import types
import warnings
import zipfile
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_c.checkpoint.native import state
from deepspeed_c.checkpoint.native.reader import NativeSource
from deepspeed_c.errors import CheckpointError
from tests.deepspeed_c.checkpoint.handmade import manifest_of, put_manifest, state_entry

UTC = datetime.timezone.utc
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
)

PLAIN: list[Any] = [
    *(None, True, False, 0, -1, (1 << 63) - 1, -(1 << 63), 1 << 200, 0.0, -0.0, 5e-324, 1.7e308, math.inf, -math.inf),
    *("", "text", "ü\0\n\U0001f600", b"", b"\0\xff" * 500, bytearray(b"abc"), 1j),
    *((), (1,), (1, (2, (3,))), [], [[], [[]]], {}, {1: "a", (2, 3): {"b": None}, None: 0, 1.5: 1, b"k": 2}),
    *(set(), {1, "a"}, frozenset({1, (2,)}), slice(1, None, 2), range(0, 10, 3)),
    collections.OrderedDict([("b", 1), ("a", 2)]), collections.Counter("aab"),
    collections.defaultdict(list, {"a": [1]}), collections.defaultdict(int, {"a": 1}),
    collections.deque([1, 2], maxlen=5), datetime.datetime(2026, 1, 2, 3, 4, 5, 6),
    datetime.datetime(2026, 1, 2, tzinfo=UTC), datetime.date(2026, 1, 2), datetime.time(1, 2, 3, 4),
    datetime.timedelta(days=1, microseconds=7), pathlib.Path("a/b"),
    argparse.Namespace(lr=0.1, nested=argparse.Namespace(x=[1])), types.SimpleNamespace(a={"b": 1}),
    *(torch.Size([2, 3]), torch.bfloat16, torch.device("cpu")),
    *(np.float32(1.5), np.int64(-3), np.bool_(True), np.datetime64("2026-01-02"), np.dtype("float16"), np.str_("s")),
    random.Random(5).getstate(), np.random.default_rng(5).bit_generator.state,
]  # fmt: skip
ARRAYS = [
    *(np.arange(6, dtype=kind).reshape(2, 3) for kind in ("f8", "f4", "f2", "i8", "u1", "c16", ">i4")),
    *(np.zeros((0, 3)), np.array(3.5), np.arange(12).reshape(3, 4).T[::2], np.asfortranarray(np.eye(3))),
    *(np.array([True, False]), np.array(["a", "bc"]), np.array([b"x"]), np.array(["2026-01-02"], dtype="M8[D]")),
]
TENSORS = [
    *(torch.tensor([0, 1, 1]).to(dtype) for dtype in DTYPES),
    *(torch.tensor(7), torch.zeros(0, 3), torch.arange(12.0).view(3, 4).t(), torch.arange(10)[3:8:2]),
    torch.tensor([math.nan, math.inf, -0.0]), torch.ones(3, requires_grad=True), torch.ones(2, 2).to_sparse(),
]  # fmt: skip


def there_and_back(value: Any) -> Any:
    content = state.pack({"entry": value}, "test")
    assert isinstance(content, bytes)
    return state.unpack(content, "test")["entry"]


def test_plain_data_comes_back_as_it_was():
    for value in PLAIN:
        found = there_and_back(value)
        assert type(found) is type(value) and found == value, (value, found)
        if isinstance(value, float):
            assert math.copysign(1, found) == math.copysign(1, value)
        if isinstance(value, collections.OrderedDict):
            assert list(found) == list(value)
    assert math.isnan(there_and_back(math.nan))
    # All plain data at once, deeply nested.
    everything = {"a": [tuple(PLAIN), {"b": PLAIN}]}
    assert there_and_back(everything) == everything


def test_arrays_and_tensors_come_back_as_they_were():
    for value in ARRAYS:
        found = there_and_back(value)
        assert type(found) is np.ndarray and found.shape == value.shape, (value, found)
        assert found.dtype == value.dtype.newbyteorder("=")  # pickles of numpy are restored in the machine's byte order
        assert np.array_equal(found, value)
        found.flat = found.copy()  # the array is writable
    for value in TENSORS:
        found = there_and_back(value)
        assert type(found) is torch.Tensor and found.dtype == value.dtype and found.shape == value.shape, (value, found)
        assert found.requires_grad == value.requires_grad and found.layout == value.layout
        same, other = (t.detach().to_dense().to(torch.complex128) for t in (value, found))
        assert torch.equal(torch.view_as_real(same).nan_to_num(9e9), torch.view_as_real(other).nan_to_num(9e9))
    assert isinstance(there_and_back(torch.nn.Parameter(torch.ones(2))), torch.nn.Parameter)


def test_what_is_shared_stays_shared():
    shared, tensor = [1], torch.zeros(4)
    value: dict[str, Any] = {"shared": shared, "again": shared, "tensor": tensor, "view": tensor[1:3]}
    found = there_and_back(value)
    assert found["shared"] is found["again"]
    found["tensor"][1] = 5
    assert found["view"][0] == 5


def test_the_schedules_and_generators_of_torch_come_back():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for schedule in (
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=5),
    ):
        expected = schedule.state_dict()
        found = there_and_back(expected)
        assert found.keys() == expected.keys()
        assert {k: v for k, v in found.items() if isinstance(v, (int, float, list))} == {
            k: v for k, v in expected.items() if isinstance(v, (int, float, list))
        }
    assert torch.equal(
        there_and_back(torch.Generator().manual_seed(3).get_state()), torch.Generator().manual_seed(3).get_state()
    )


# -- refusals ----------------------------------------------------------------------------------------------------------


class Plain:
    def __init__(self) -> None:
        self.x = 1


class Hinders:
    def __reduce__(self) -> Any:
        raise RuntimeError("not today")


class Touches:
    """Its pickle makes a file if Python's own pickle loads it."""

    def __init__(self, path: str, how: str) -> None:
        self.path, self.how = path, how

    def __reduce__(self) -> Any:
        calls = {
            "os.system": (os.system, (f"touch {self.path}",)), "os.mkdir": (os.mkdir, (self.path,)),
            "open": (open, (self.path, "w")), "eval": (eval, (f"open({self.path!r}, 'w')",)),
            "exec": (exec, (f"open({self.path!r}, 'w')",)), "partial": (functools.partial(open, self.path, "w"), ()),
            "numpy": (np.save, (self.path, np.ones(1))), "Path.touch": (pathlib.Path.touch, (pathlib.Path(self.path),)),
        }  # fmt: skip
        return calls[self.how]


HOWS = ("os.system", "os.mkdir", "open", "eval", "exec", "partial", "numpy", "Path.touch")


def function() -> None: ...


def test_what_would_not_come_back_is_refused_by_the_name_of_its_entry():
    cases = [
        (Plain(), "test_state.Plain"), (Plain, "builtins.type"), (Hinders(), "test_state.Hinders"),
        (lambda: 0, "builtins.function"), (function, "builtins.function"), (threading.Lock(), "_thread.lock"),
        ((i for i in ()), "builtins.generator"), (torch.Generator(), "torch._C.Generator"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"), (torch, "builtins.module"),
        (np.array([Plain()], dtype=object), "numpy.ndarray"),
        (np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]), "numpy.ndarray"), (np.void(b"1234"), "numpy.void"),
        (collections.UserDict(a=1), "collections.UserDict"), (1 << 20_000, "builtins.int"),
        (ValueError("x"), "builtins.ValueError"),
    ]  # fmt: skip
    for value, name in cases:
        for client_state, path in (
            ({"bad": value}, "['bad'] is a"),
            ({"good": 1, "deep": [0, {"x": (1, value)}]}, "['deep'][1]['x'][1] is a"),
            ({"args": argparse.Namespace(fine=1, bad=[value])}, "['args'].bad[0] is a"),
        ):
            with pytest.raises(CheckpointError, match="cannot be saved safely") as raised:
                state.pack(client_state, "save_checkpoint")
            assert path in raised.value.what and name in raised.value.what, raised.value
            assert raised.value.where == "save_checkpoint" and raised.value.fix


def test_containers_that_hold_themselves_are_refused():
    ring: dict[str, Any] = {"list": []}
    ring["list"].append(ring)
    with pytest.raises(CheckpointError, match="holds itself"):
        state.pack({"ring": ring}, "save_checkpoint")


def test_a_dtype_of_pointers_is_refused_however_its_flags_are():
    """To print, compare or free an element of such a dtype would use bytes of the file as pointers."""

    class Dtype:
        def __init__(self, *state: Any) -> None:
            self.state = state

        def __reduce__(self) -> Any:
            return np.dtype, ("O8", False, True), self.state

    class Array:
        def __init__(self, dtype: Any) -> None:
            self.dtype = dtype

        def __reduce__(self) -> Any:
            made = np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b")
            return *made, (1, (), self.dtype, False, b"A" * 8)

    class Scalar(Array):
        def __reduce__(self) -> Any:
            return np._core.multiarray.scalar, (self.dtype, b"A" * 8)

    for dtype in (Dtype(3, "|", None, None, None, -1, -1, 0), Dtype(3, "|", None, None, None, -1, -1, 63)):
        for value in (Array(dtype), Scalar(dtype), dtype):
            for content in hostile_files({"client_state": {"a": value}})[:1]:
                with pytest.raises(CheckpointError, match="plain data"):
                    state.unpack(content, "state.pt")


def test_bytes_that_are_no_truth_values_become_some():
    with zipfile.ZipFile(io.BytesIO(state.pack({"a": torch.ones(3, dtype=torch.bool)}, "x"))) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, record in records.items():
            archive.writestr(name, b"\xab\x00\x02" if name.endswith("data/0") else record)
    assert state.unpack(buffer.getvalue(), "x")["a"].view(torch.uint8).tolist() == [1, 0, 1]


def test_containers_that_hold_themselves_and_something_bad_are_refused_by_its_name():
    ring: dict[str, Any] = {}
    ring["down"] = {"up": ring, "list": [ring, function]}
    with pytest.raises(CheckpointError, match=r"\['down'\]\['list'\]\[1\] is a builtins.function"):
        state.pack(ring, "save_checkpoint")


def test_what_is_nested_too_deeply_is_refused():
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(CheckpointError, match="nested too deeply"):
        state.pack({"nested": nested}, "save_checkpoint")


def hostile_files(value: Any) -> list[bytes]:
    """Files with a pickle of ``value``: torch's zip, torch's older format, and a bare pickle of each protocol."""
    found = []
    for is_zip in (True, False):
        buffer = io.BytesIO()
        torch.save(value, buffer, _use_new_zipfile_serialization=is_zip)
        found.append(buffer.getvalue())
    return found + [pickle.dumps(value, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("how", HOWS)
def test_code_in_a_file_does_not_run(tmp_path, how):
    path = tmp_path / "made.npy"
    evil = Touches(str(path), how)
    pickle.loads(pickle.dumps(evil))
    assert path.exists()  # the pickle does harm where it is trusted
    path.rmdir() if path.is_dir() else path.unlink()
    for value in (evil, {"client_state": {"x": [evil]}}, {evil: 1} if how != "partial" else (evil,)):
        for content in hostile_files(value):
            with pytest.raises(CheckpointError, match="cannot be read as plain data") as raised:
                state.unpack(content, "ckpt/state.pt")
            assert raised.value.where == "ckpt/state.pt" and "run code" in raised.value.fix
            assert "add_safe_globals" not in str(raised.value) and "weights_only" not in str(raised.value)
            assert not path.exists()
    with pytest.raises(CheckpointError, match="Touches"):
        state.pack({"x": evil}, "save_checkpoint")
    assert not path.exists()


def test_code_in_a_signed_checkpoint_does_not_run(tmp_path):
    """The checksums are right: whoever writes a file can also write its checksums."""
    target = tmp_path / "made"
    for evil_name in ("state.pt", "rank_00000.pt"):
        folder = tmp_path / evil_name
        folder.mkdir()
        entries = []
        for name in ("state.pt", "rank_00000.pt"):
            content = state.pack({}, name)
            if name == evil_name:
                content = hostile_files({"client_state": Touches(str(target), "open")})[0]
            (folder / name).write_bytes(content)
            entries.append(state_entry(name, content))
        put_manifest(folder, manifest_of([], [], states=entries))
        with pytest.raises(CheckpointError, match="plain data") as raised, NativeSource(str(folder)) as source:
            source.rank_state(0)
        assert raised.value.where == str(folder / evil_name)
        assert not target.exists()


def test_damaged_files_are_refused_whatever_is_in_them():
    good = state.pack({"a": [1, 2.5, "x", b"y", (3, {4})], "t": torch.arange(10), "n": np.float32(2)}, "test")
    with zipfile.ZipFile(io.BytesIO(good)) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(name for name in records if name.endswith("data.pkl"))
    rng = random.Random(0)
    n_refused = 0

    def check(content: bytes) -> None:
        nonlocal n_refused
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                state.unpack(content, "state.pt")
            except CheckpointError as error:
                n_refused += 1
                assert error.where == "state.pt" and "\n" not in error.what, error

    for content in (b"", b"\0", b"PK\x03\x04", b"\x80", b"text", good[:-1], good[1:], good * 2, bytes(5000)):
        check(content)
    assert n_refused == 9 - 1  # by the format, two zips in a row are read as the last one
    for _ in range(400):
        content = bytearray(good)
        for _ in range(rng.choice((1, 3))):
            content[rng.randrange(len(content))] = rng.randrange(256)
        check(bytes(content))
    # With a right checksum in the zip the pickle itself is read.
    for _ in range(1200):
        content = bytearray(records[pickled])
        for _ in range(rng.choice((1, 1, 3))):
            content[rng.randrange(len(content))] = rng.randrange(256)
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
            for name, record in records.items():
                archive.writestr(name, bytes(content) if name == pickled else record)
        check(buffer.getvalue())
    assert n_refused > 400, n_refused


# -- random numbers ------------------------------------------------------------------------------------------------------


def draw() -> list[Any]:
    """Draws from every generator. The number of normal draws is odd, so that each generator keeps one for the next
    draw."""
    return [
        *(random.random(), random.gauss(0, 1), random.getrandbits(70)),
        *(np.random.rand(), np.random.standard_normal(), np.random.randint(1 << 30)),
        *(torch.rand(3).tolist(), torch.randn(17).tolist(), torch.randperm(10).tolist()),
    ]


def test_generators_go_on_where_they_were():
    device = torch.device("cpu")
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    for n_draws in (0, 1, 2, 300):
        for _ in range(n_draws):
            draw()
        packed = state.pack({"random": state.random_state(device)}, "test")
        expected = [draw() for _ in range(3)]
        for seed in (0, 7):
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            state.restore_random_state(state.unpack(packed, "test")["random"], device)
            assert [draw() for _ in range(3)] == expected


def test_generators_that_are_not_in_a_checkpoint_are_left_alone():
    device = torch.device("cpu")
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    before = state.random_state(device)
    expected = draw()
    state.restore_random_state(before, device)
    state.restore_random_state({}, device)
    state.restore_random_state({"cuda": torch.zeros(16, dtype=torch.uint8), "xpu": None}, device)
    assert draw() == expected


def odd_random_states() -> dict[str, Any]:
    """Hostile states with right checksums: they are plain data, but not states of generators."""
    good = state.random_state(torch.device("cpu"))
    version, words, gauss = good["python"]
    kind, keys, position, has_gauss, cached = good["numpy"]
    return {
        "no dict": 5,
        "python: no tuple": {"python": 5},
        "python: too few": {"python": (version, words)},
        "python: few words": {"python": (version, words[:10], gauss)},
        "python: text among the words": {"python": (version, (*words[:-1], "x"), gauss)},
        "python: a word below zero": {"python": (version, (-1, *words[1:]), gauss)},
        "python: a huge word": {"python": (version, (1 << 80, *words[1:]), gauss)},
        "python: a place that is none": {"python": (version, (*words[:-1], 10**6), gauss)},
        "python: another version": {"python": (77, words, gauss)},
        "python: text to be drawn next": {"python": (version, words, "x")},
        "torch: a number": {"torch": 5},
        "torch: a short tensor": {"torch": good["torch"][:-1]},
        "torch: of floats": {"torch": good["torch"].float()},
        "torch: noise": {"torch": torch.full_like(good["torch"], 0xAB)},
        "numpy: a number": {"numpy": 5},
        "numpy: another generator": {"numpy": ("PCG64", keys, position, has_gauss, cached)},
        "numpy: a list of words": {"numpy": (kind, keys.tolist(), position, has_gauss, cached)},
        "numpy: few words": {"numpy": (kind, keys[:5], 2, has_gauss, cached)},
        "numpy: behind its words": {"numpy": (kind, keys, 10**9, has_gauss, cached)},
        "numpy: before its words": {"numpy": (kind, keys, -1, has_gauss, cached)},
        "numpy: text for a place": {"numpy": (kind, keys, "x", has_gauss, cached)},
        "numpy: text to be drawn next": {"numpy": (kind, keys, position, 1, "x")},
    }


def test_plain_data_that_is_no_random_state_is_refused_and_changes_no_generator():
    device = torch.device("cpu")
    before = state.random_state(device)
    state.check_random_state(before, device, "ckpt")
    state.check_random_state({}, device, "ckpt")
    accepted = []
    for what, odd in odd_random_states().items():
        try:
            state.check_random_state(odd, device, "ckpt")
            accepted.append(what)
        except CheckpointError as error:
            assert error.where == "ckpt" and "random state cannot be put back: " in error.what, (what, str(error))
    assert not accepted
    drawn = draw()
    state.restore_random_state(before, device)
    assert draw() == drawn
