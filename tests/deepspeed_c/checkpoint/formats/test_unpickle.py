"""The interpreter of pickles (deepspeed_c/checkpoint/formats/unpickle.py): its memory stays proportional to the size of
the pickle, and its results are safe to use."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import time
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from deepspeed_c.checkpoint.native import state
from deepspeed_c.errors import CheckpointError

PROTO = b"\x80\x02"
# The memory that a small file and Python itself may take.
MEMORY_AT_LEAST_BYTES = 8 << 20


def named(path: str) -> bytes:
    module, _, name = path.rpartition(".")
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def number(value: int) -> bytes:
    content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(content)]) + content


def zip_of(pickled: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in (("data.pkl", pickled), ("version", b"3\n"), ("byteorder", sys.byteorder.encode())):
            archive.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def unpack(pickled: bytes) -> object:
    """Read a pickle, and check that the memory it takes suits the size of the file."""
    content = zip_of(pickled)
    tracemalloc.start()
    try:
        return state.unpack(content, "bomb.pt")
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MEMORY_AT_LEAST_BYTES + 512 * len(content), (peak, len(content))


def doubled(begin: bytes, join: bytes, n: int = 100) -> bytes:
    """``begin``, followed n times by a value that holds the previous value twice: the previous value is put into the
    memo, got from it, and both are joined."""
    return PROTO + begin + (b"q\x00h\x00" + join) * n + b"."


BOMBS = {
    "list(range(10**12))": named("builtins.list") + named("builtins.range") + b"K\x00" + number(10**12) + b"\x86R\x85R",
    "set(range(10**12))": named("builtins.set") + named("builtins.range") + number(10**12) + b"\x85R\x85R",
    "bytearray(6 * 10**10)": named("builtins.bytearray") + number(6 * 10**10) + b"\x85R",
    "bytes(6 * 10**10)": named("builtins.bytes") + number(6 * 10**10) + b"\x85R",
    "bytes that the file does not have": b"\x8e" + (1 << 62).to_bytes(8, "little"),
    "a text that the file does not have": b"\x8d" + (1 << 40).to_bytes(8, "little") + b"abc",
    "a bytearray that the file does not have": b"\x96" + (1 << 40).to_bytes(8, "little") + b"abc",
    "an integer that the file does not have": b"\x8b" + (0x7FFFFFFF).to_bytes(4, "little"),
    "an integer that is too long to be printed": b"\x8b" + (5000).to_bytes(4, "little") + b"\x7f" * 5000,
    "a text in a list, again and again": text("x" * 50_000) + b"q\x000](" + b"h\x00" * 50_000 + b"e",
    "bytes of a text, again and again": (
        named("_codecs.encode") + b"q\x00" + text("x" * 50_000) + text("latin1") + b"\x86q\x0100]("
        + b"h\x00h\x01R" * 10_000 + b"e"
    ),
    "a set of a list, again and again": (
        named("builtins.set") + b"q\x00](" + b"".join(b"M" + i.to_bytes(2, "little") for i in range(20_000))
        + b"e\x85q\x0100](" + b"h\x00h\x01R" * 10_000 + b"e"
    ),
    "a path of a text, again and again": (
        named("pathlib.PosixPath") + text("x" * 50_000) + b"q\x000(" + b"h\x00" * 20_000 + b"tR"
    ),
    "keys with one hash": b"}(" + b"".join(number(i * ((1 << 61) - 1)) + b"N" for i in range(1, 20_000)) + b"u",
    "pairs with one hash": (
        b"}(" + b"".join(number(i * ((1 << 61) - 1)) + b"K\x01\x86N" for i in range(1, 20_000)) + b"u"
    ),
    "a long key in many dictionaries": b"(" + b"N" * 50_000 + b"tq\x000(" + b"}h\x00Ns" * 20_000 + b"t",
    "a list that holds itself": b"]q\x00h\x00a",
    "a dictionary that holds itself": b"}q\x00K\x01h\x00s",
    "a tuple in a list in it": b"]q\x00h\x00\x85a",
    "a deque in a deque": (named("collections.deque") + b"q\x00)R") + b"h\x00)R" + b"a",
}  # fmt: skip
DOUBLED = {
    "tuples": (b")", b"\x86"), "lists": (b"]", b"\x86q\x010]h\x01a"), "dictionaries": (b"]", b"\x86q\x010}K\x01h\x01s"),
    "keys": (b")", b"\x86"),
}  # fmt: skip
DEEP = {
    "lists": lambda n: b"]" * n + b"a" * (n - 1),
    "tuples": lambda n: b"N" + b"\x85" * n,
    "dictionaries": lambda n: b"}K\x01" * n + b"N" + b"s" * n,
    "frozensets": lambda n: b"(" * n + b"\x91" * n,
    "ordered dictionaries": lambda n: (named("collections.OrderedDict") + b")RK\x01") * n + b"N" + b"s" * n,
    "namespaces": lambda n: (named("argparse.Namespace") + b")\x81}" + text("a")) * n + b"N" + b"sb" * n,
    "deques": lambda n: (named("collections.deque") + b")R") * n + b"a" * (n - 1),
    "slices": lambda n: named("builtins.slice") * n + b"N" + b"\x85R" * n,
    "zones of times": lambda n: named("datetime.timezone") * n + b"N" + b"\x85R" * n,
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_before_they_grow(name):
    begin = time.process_time()
    with pytest.raises(CheckpointError, match=r"bomb\.pt") as raised:
        unpack(PROTO + BOMBS[name] + b".")
    assert len(str(raised.value)) < 1000
    # The limit is coarse: a quadratic algorithm would take minutes.
    assert time.process_time() - begin < 60


@pytest.mark.parametrize("name", DOUBLED)
def test_values_that_hold_the_one_before_twice_are_refused(name):
    begin, join = DOUBLED[name]
    pickled = doubled(begin, join)
    if name == "keys":
        pickled = PROTO + b"}" + pickled[2:-1] + b"Ns."
    with pytest.raises(CheckpointError, match=r"bomb\.pt"):
        unpack(pickled)


@pytest.mark.parametrize("n_levels", [250, 100_000])
@pytest.mark.parametrize("name", DEEP)
def test_what_is_nested_too_deeply_is_refused(name, n_levels):
    with pytest.raises(CheckpointError, match=r"bomb\.pt"):
        state.unpack(zip_of(PROTO + DEEP[name](n_levels) + b"."), "bomb.pt")


def test_tuples_that_are_nested_deeply_are_no_key():
    # A hash of the value would take a level of the C stack for each level of nesting.
    with pytest.raises(CheckpointError, match="nested too deeply"):
        unpack(PROTO + b"}N" + b"\x85" * 300_000 + b"Ns.")


def test_numbers_in_the_memo_cost_nothing():
    assert unpack(PROTO + b"K\x05r\xff\xff\xff\xff.") == 5


@pytest.mark.parametrize(
    "name", ["__array_interface__", "__array_struct__", "__cuda_array_interface__", "__deepcopy__", "__class__"]
)
@pytest.mark.parametrize("kind", ["argparse.Namespace", "types.SimpleNamespace"])
def test_attributes_that_protocols_look_up_are_refused(kind, name):
    # numpy.asarray(namespace) would read the memory that the attribute points to.
    with pytest.raises(CheckpointError, match="attribute"):
        unpack(PROTO + named(kind) + b")R}" + text(name) + b"K\x01sb.")


def test_the_protocol_of_text_is_refused():
    with pytest.raises(CheckpointError, match="instruction"):
        unpack(pickle.dumps({"a": [1, "x"]}, 0))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_of_torch_is_read(protocol):
    value = {"a": [1, -2, 70_000, 1 << 100, 1.5, None, True, "ü", b"\xff", (), (1,), (1, 2, 3, 4)], (1, 2): {3}}
    value["again"] = value["a"]
    value["frozen"] = frozenset({1, b"x"})
    found = unpack(pickle.dumps(value, protocol))
    assert found == value and found["again"] is found["a"]


def test_what_is_as_deep_as_may_be_can_be_printed_and_copied():
    for kind in ("lists", "ordered dictionaries", "namespaces"):
        found = unpack(PROTO + DEEP[kind](199) + b".")
        assert repr(found) and copy.deepcopy(found) == found


def test_large_honest_values_are_read():
    rows = [{"step": i, "loss": i / 7, "names": ("a", "b")} for i in range(5000)]
    shared = {"path/to/a/file/of/the/data/set": list(range(1000))}
    value = {"rows": rows, "labels": ["the same label of an item"] * 20_000, "tables": [shared] * 50}
    value["set"], value["pairs"] = set(range(20_000)), {(i, -i): None for i in range(5000)}
    assert state.unpack(zip_of(pickle.dumps(value, 2)), "a.pt") == value


def test_a_file_of_python_values_only_is_read_from_disk_and_from_memory(tmp_path: Path):
    from deepspeed_c.checkpoint.formats.torch_file import TorchFile

    content = zip_of(pickle.dumps({"a": [1]}, 2))
    (tmp_path / "a.pt").write_bytes(content)
    assert TorchFile(tmp_path / "a.pt").content == state.unpack(content, "a.pt") == {"a": [1]}
