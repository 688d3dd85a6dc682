"""Changes pickles instruction by instruction and reads them: every file gives a value of plain data or a
CheckpointError.

    python -m tests.fuzz.fuzz_unpickle --seconds 3600 --seed 1

Seeds are pickles of values that checkpoints hold, and the folder corpus/fuzz_unpickle. Each input is read by all of
this package's readers of pickles. The script checks every part of the value (only listed types, only listed numpy
dtypes, tensors within their storage), and prints, compares and copies the value. Peak memory is compared with the size
of the input, and the address space and the time of each input are limited. If an input breaks a rule, it is written to
--found, and the script ends with code 1. If the process dies, --found holds the last input.
"""

from __future__ import annotations

import argparse
import collections
import copy
import datetime
import faulthandler
import io
import os
import pathlib
import pickle
import pickletools
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import tracemalloc
import types
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from deepspeed_c.checkpoint.formats.dcp import read_metadata
from deepspeed_c.checkpoint.formats.deepspeed.stand_ins import UPSTREAM, read_file
from deepspeed_c.checkpoint.formats.torch_file import StoredTensor, materialize
from deepspeed_c.checkpoint.native import state
from deepspeed_c.errors import CheckpointError

CORPUS = pathlib.Path(__file__).parent / "corpus" / "fuzz_unpickle"
# Limit on Python's memory for one input: some hundred bytes per instruction of one byte, plus a constant for zipfile
# and tracemalloc.
BYTES_PER_BYTE, BYTES_AT_LEAST = 512, 8 << 20
ADDRESS_SPACE_BYTES = 4 << 30
SECONDS_PER_INPUT = 20
# Storages in every zip, by key: tensors described by the instructions may refer to present or missing ones.
STORAGES = {str(i): bytes(range(256)) for i in range(12)}

Op = tuple[str, Any]
_CODES = {op.name: op.code.encode("latin-1") for op in pickletools.opcodes}


class Broken(Exception):
    """An input breaks a rule."""


class TookTooLong(BaseException):
    """Not an Exception, so that the tested code does not catch it."""


# --- pickles as lists of instructions ---


def parse(data: bytes) -> list[Op]:
    ops = []
    for op, argument, _ in pickletools.genops(data):
        if op.name != "STOP":
            ops.append((op.name, argument))
    return ops


def assemble(ops: list[Op]) -> bytes:
    out = [part for name, argument in ops for part in (_CODES[name], _argument(name, argument))]
    return b"".join(out) + pickle.STOP


def _argument(name: str, argument: Any) -> bytes:
    fixed = {
        "PROTO": "<B", "BININT": "<i", "BININT1": "<B", "BININT2": "<H", "BINFLOAT": ">d", "BINPUT": "<B", "BINGET": "<B",
        "LONG_BINPUT": "<I", "LONG_BINGET": "<I", "FRAME": "<Q", "EXT1": "<B", "EXT2": "<H", "EXT4": "<i",
    }  # fmt: skip
    sized = {
        "BINUNICODE": "<I", "SHORT_BINUNICODE": "<B", "BINUNICODE8": "<Q", "SHORT_BINBYTES": "<B", "BINBYTES": "<I",
        "BINBYTES8": "<Q", "BYTEARRAY8": "<Q", "LONG1": "<B", "LONG4": "<i", "BINSTRING": "<i", "SHORT_BINSTRING": "<B",
    }  # fmt: skip
    if name in fixed:
        kind = fixed[name]
        if kind == ">d":
            return struct.pack(kind, float(argument))
        bits = 8 * struct.calcsize(kind)
        number = int(argument) % (1 << bits)
        return struct.pack(kind, number - (1 << bits) if kind[1].islower() and number >> (bits - 1) else number)
    if name in sized:
        if name.startswith("LONG"):
            number = int(argument)
            content = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
        else:
            content = argument.encode("utf-8", "surrogatepass") if isinstance(argument, str) else bytes(argument)
        bits = 8 * struct.calcsize(sized[name])
        if len(content) >= 1 << (bits - 1):
            content = content[: (1 << (bits - 1)) - 1]
        return struct.pack(sized[name], len(content)) + content
    if name in ("GLOBAL", "INST"):
        return (str(argument).replace(" ", "\n", 1) + "\n").encode()
    if argument is None:
        return b""
    return (str(argument).replace("\n", "") + "\n").encode("utf-8", "replace")


# --- seeds ---


def _pickle_in(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return archive.read("archive/data.pkl")


def _metadata() -> bytes:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    size = torch.Size([2, 3])
    entries = {
        "w": TensorStorageMetadata(
            TensorProperties(torch.float32), size, [ChunkStorageMetadata(torch.Size([0, 0]), size)]
        ),
        "x": BytesStorageMetadata(),
    }
    places = {
        MetadataIndex("w", torch.Size([0, 0]), 0): _StorageInfo("__0_0.distcp", 0, 1000),
        MetadataIndex("x"): _StorageInfo("__0_0.distcp", 1000, 300),
    }
    return pickle.dumps(Metadata(entries, {"w": ("model", "w"), "x": ("x",)}, places), 4)


def seeds() -> list[list[Op]]:
    """The instructions of values that checkpoints hold, and of the corpus."""
    shared = [1, (2, "x")]
    base = torch.arange(16.0)
    tensors = {
        "whole": base, "view": base[3:7], "transposed": base.view(4, 4).t(), "expanded": base[:1].expand(4, 4),
        "half": base.half(), "mask": base > 3, "fp8": base.to(torch.float8_e4m3fn), "unsigned": base.to(torch.uint16),
        "none": torch.empty(0, 3), "one": torch.tensor(3), "parameter": torch.nn.Parameter(torch.ones(2)),
    }  # fmt: skip
    scaler = UPSTREAM["deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"]()
    vars(scaler).update(cur_scale=1.0, dynamic=True, dtype=torch.float16)
    upstream = pickle.dumps({"scaler": _Reduced(scaler)}, 2)
    values: list[Any] = [
        [None, True, 0, -1, 70_000, 1 << 200, 1.5, "text", b"bytes", bytearray(b"more"), 1j, slice(1, 2), range(3)],
        {"a": shared, "b": shared, (1, 2): {3: {4}}, "frozen": frozenset({1, (2,)}), "set": {1, "a"}},
        collections.OrderedDict(a=collections.Counter("aab"), b=collections.defaultdict(list, {1: [2]})),
        collections.deque([1, 2], 5),
        {"args": argparse.Namespace(lr=0.1, n=types.SimpleNamespace(a=[1])), "path": pathlib.Path("a/b")},
        [datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.timezone.utc), datetime.date(2026, 1, 2), datetime.time(5)],
        [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu")],
        [np.float32(1.5), np.int64(-3), np.bool_(True), np.str_("s"), np.dtype("f2"), np.datetime64("2026-01-02")],
        [np.arange(6.0).reshape(2, 3), np.array(["a", "bc"]), np.array([True, False]), np.array([1], ">i4")],
        {"torch": torch.arange(64, dtype=torch.uint8), "python": (3, tuple(range(20)), None)},
        tensors,
        torch.eye(2).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
    ]  # fmt: skip
    found = [parse(_pickle_in(value)) for value in values]
    found += [parse(pickle.dumps(value, protocol)) for value in values[:6] for protocol in (4, 5)]
    found += [parse(upstream), parse(_metadata())]
    return found + [parse(path.read_bytes()) for path in sorted(CORPUS.glob("*.pkl"))]


class _Reduced:
    """Pickles like an object of DeepSpeed: by name, and without state of this class."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return argparse.Namespace, (), vars(self.value)


# --- changes ---

NAMES = [
    *("numpy dtype", "numpy ndarray", "numpy._core.multiarray _reconstruct", "numpy._core.multiarray scalar"),
    *("numpy.core.multiarray _reconstruct", "numpy.dtypes Float64DType", "numpy void", "numpy matrix", "numpy load"),
    *("builtins list", "builtins range", "builtins bytearray", "builtins bytes", "builtins set", "builtins frozenset"),
    *("builtins getattr", "builtins eval", "builtins object", "builtins type", "builtins slice", "builtins complex"),
    *("__builtin__ long", "__builtin__ xrange", "__builtin__ unicode", "builtins int", "builtins dict", "builtins str"),
    *("collections OrderedDict", "collections defaultdict", "collections deque", "collections Counter"),
    *("argparse Namespace", "types SimpleNamespace", "pathlib PosixPath", "datetime datetime", "datetime timezone"),
    *("datetime timedelta", "datetime date", "datetime time", "_codecs encode", "copyreg _reconstructor"),
    *("torch Size", "torch device", "torch float32", "torch quint8", "torch bits8", "torch bool", "torch Tensor"),
    *("torch FloatStorage", "torch BoolStorage", "torch.storage UntypedStorage", "torch._utils _rebuild_tensor_v2"),
    *("torch._utils _rebuild_tensor", "torch._utils _rebuild_tensor_v3", "torch._utils _rebuild_parameter"),
    *("torch._utils _rebuild_sparse_tensor", "torch.serialization _get_layout", "torch._tensor _rebuild_from_type_v2"),
    *("torch._utils _rebuild_parameter_with_state", "torch._utils _rebuild_qtensor", "torch.nn.parameter Parameter"),
    *(f"{path.rpartition('.')[0]} {path.rpartition('.')[2]}" for path in sorted(UPSTREAM)),
    *("torch.distributed.checkpoint.metadata Metadata", "torch.distributed.checkpoint.metadata MetadataIndex"),
    *("torch.distributed.checkpoint.metadata ChunkStorageMetadata", "os system", "posix system", "operator call"),
]  # fmt: skip
NUMBERS = [
    *(0, 1, -1, 2, 3, 7, 8, 63, 64, 65, 127, 128, 255, 256, 1000, 65535, 1 << 20, (1 << 31) - 1, 1 << 31, -(1 << 31)),
    *((1 << 32) - 1, 6 * 10**10, 10**12, 1 << 40, (1 << 60) - 1, (1 << 61) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, -(1 << 63)),
    *(1 << 64, 1 << 70, 1 << 2000, 1 << 20_000),
]  # fmt: skip
TEXTS = [
    *("", "a", "storage", "cpu", "cuda", "0", "1", "latin1", "utf-8", "O8", "f8", "f4", "U2", "S4", "V8", "M8", "b1",
     "i4"),
    *("O", "|", "<", ">", "U99999999", "f8,O8", "(2,)f8", "__class__", "__dict__", "__array_interface__",
     "__setstate__"),
    *("__deepcopy__", "conj", "neg", "torch.sparse_coo", "torch.sparse_csr", "torch.strided", "\ud800", "\0",
     "x" * 300),
]  # fmt: skip
BARE = [
    *("NONE", "NEWTRUE", "NEWFALSE", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "MARK", "POP", "POP_MARK"),
    *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "FROZENSET"),
    *("MEMOIZE", "STACK_GLOBAL", "REDUCE", "BUILD", "NEWOBJ", "NEWOBJ_EX", "BINPERSID", "DUP", "LIST", "DICT", "OBJ"),
]  # fmt: skip


def any_op(rng: random.Random) -> Op:
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(BARE), None
    if kind == 1:
        return "GLOBAL", rng.choice(NAMES)
    if kind == 2:
        number = rng.choice(NUMBERS)
        return rng.choice(("BININT", "BININT1", "BININT2", "LONG1", "LONG4")), number
    if kind == 3:
        return rng.choice(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "BYTEARRAY8")), rng.choice(
            TEXTS
        )
    if kind == 4:
        return rng.choice(("BINPUT", "BINGET", "BINGET", "LONG_BINGET")), rng.randrange(30)
    return rng.choice(
        (
            ("BINFLOAT", rng.choice((0.0, 1.5, float("nan"), float("inf")))),
            ("LONG_BINPUT", rng.choice((5, (1 << 32) - 1))),
        )
    )


def change(rng: random.Random, ops: list[Op], others: list[list[Op]]) -> list[Op]:
    """One change at one place."""
    ops = list(ops)
    at = rng.randrange(len(ops) + 1)
    kind = rng.randrange(12)
    to = min(len(ops), at + rng.randrange(1, 9))
    if kind == 0:
        del ops[at:to]
    elif kind == 1:
        ops[at:at] = [any_op(rng) for _ in range(rng.randrange(1, 4))]
    elif kind == 2:
        ops[at:at] = ops[at:to]
    elif kind == 3 and ops:
        i, j = rng.randrange(len(ops)), rng.randrange(len(ops))
        ops[i], ops[j] = ops[j], ops[i]
    elif kind == 4:
        other = rng.choice(others)
        begin = rng.randrange(len(other))
        ops[at : rng.choice((at, to))] = other[begin : begin + rng.randrange(1, 40)]
    elif kind == 5:
        calls = [("REDUCE", None), ("BUILD", None), ("NEWOBJ", None), ("TUPLE1", None), ("BINPERSID", None)]
        ops[at:at] = rng.choices(calls, k=rng.randrange(1, 3))
    elif kind == 6:
        ops[at:at] = [("GLOBAL", rng.choice(NAMES)), rng.choice((("EMPTY_TUPLE", None), any_op(rng))), ("REDUCE", None)]
    elif kind == 7:
        # A nest of values, each of which holds the value before it twice.
        join = rng.choice(([("TUPLE2", None)], [("TUPLE2", None), ("BINPUT", 200), ("POP", None), ("EMPTY_LIST", None), ("BINGET", 200), ("APPEND", None)]))  # fmt: skip
        ops[at:at] = [("BINPUT", 201), ("BINGET", 201), *join] * rng.choice((2, 10, 60))
    elif kind == 8:
        # A deeply nested value.
        ops[at:at] = [rng.choice((("TUPLE1", None), ("EMPTY_LIST", None)))] * rng.choice((3, 190, 210, 3000))
    elif kind == 9:
        ops[at:at] = ops[at:to] * rng.choice((2, 20, 200))
    else:
        picked = [i for i, (_, argument) in enumerate(ops) if argument is not None]
        if picked:
            i = rng.choice(picked)
            ops[i] = ops[i][0], changed_argument(rng, ops[i][1])
    return ops[:20_000]


def changed_argument(rng: random.Random, argument: Any) -> Any:
    if isinstance(argument, bool) or argument is None:
        return argument
    if isinstance(argument, int):
        return rng.choice((argument + 1, argument - 1, argument * 2, rng.choice(NUMBERS), rng.randrange(300)))
    if isinstance(argument, float):
        return rng.choice((0.0, -1.0, float("nan"), float("inf")))
    if isinstance(argument, (bytes, bytearray)):
        return bytes(argument) * 2 if rng.random() < 0.5 else bytes(argument)[:-1]
    if " " in argument and rng.random() < 0.7:
        return rng.choice(NAMES)
    return rng.choice((rng.choice(TEXTS), argument[:-1], argument * 2))


# --- the rules ---

LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, slice, range, torch.dtype, torch.device),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(pathlib.PurePosixPath, pathlib.PosixPath, pathlib.PureWindowsPath),
)
SEQUENCES = (list, tuple, set, frozenset, collections.deque, torch.Size)
MAPPINGS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
OBJECTS = (argparse.Namespace, types.SimpleNamespace, *UPSTREAM.values())
# Allowed dtype kinds, written out here independently of the tested code: no pointers to objects, no fields.
KINDS = frozenset("biufcSUmM")


def check(value: Any, allows_stored: bool) -> None:
    """Checks that every part of a value has a listed type and can be visited."""
    if type(value) in LEAVES:
        return
    if type(value) in SEQUENCES:
        for part in value:
            check(part, allows_stored)
    elif type(value) in MAPPINGS:
        for key, part in value.items():
            hash(key)
            check(key, allows_stored)
            check(part, allows_stored)
    elif type(value) in OBJECTS:
        check(vars(value), allows_stored)
        if any(name.startswith("__") for name in vars(value)):
            raise Broken(f"attributes {list(vars(value))}")
    elif isinstance(value, (np.ndarray, np.generic, np.dtype)):
        dtype = value if isinstance(value, np.dtype) else value.dtype
        fresh = np.dtype(dtype.str)
        if dtype.kind not in KINDS or dtype.flags != fresh.flags or dtype.itemsize != fresh.itemsize or dtype.names:
            raise Broken(f"a numpy object of dtype {dtype!r}")
        if type(value) is np.ndarray:
            np.ascontiguousarray(value).tobytes()
    elif type(value) in (torch.Tensor, torch.nn.Parameter):
        if value.layout == torch.strided:
            end = value.storage_offset() + sum((n - 1) * s for n, s in zip(value.shape, value.stride())) + 1
            if value.numel() and end * value.element_size() > value.untyped_storage().nbytes():
                raise Broken("a tensor outside of its storage")
            # The copy reads every element, so a tensor outside of its storage fails.
            value.detach().resolve_conj().resolve_neg().reshape(-1).clone()
        check(vars(value), allows_stored)
    elif type(value) is StoredTensor and allows_stored:
        first, n_bytes = value.file.storage_range(value.key)
        last = value.offset + sum((n - 1) * s for n, s in zip(value.shape, value.stride, strict=True))
        if value.n_elems and (first < 0 or (last + 1) * value.dtype.itemsize > n_bytes):
            raise Broken("a stored tensor outside of its storage")
    else:
        raise Broken(f"a value of type {type(value)}")


def equal(a: Any, b: Any) -> bool:
    """Whether two readings of one input are equal, where a NaN equals a NaN."""
    if type(a) is not type(b):
        return False
    if type(a) in (list, tuple, collections.deque, torch.Size):
        return len(a) == len(b) and all(map(equal, a, b))
    if type(a) in MAPPINGS:
        return len(a) == len(b) and all(map(equal, a.values(), b.values()))
    if type(a) in OBJECTS:
        return equal(vars(a), vars(b))
    if type(a) in (set, frozenset):
        return len(a) == len(b)
    return repr(a) == repr(b) if not isinstance(a, StoredTensor) else a.identity == b.identity


class Harness:
    """Reads an input by each reader, in a temporary folder."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.n_read = self.n_refused = 0
        head = io.BytesIO()
        torch.save(0, head, _use_new_zipfile_serialization=False)
        # Magic number, version and system; the object and the list of storages follow.
        self._legacy = head.getvalue()[: head.getvalue().index(pickle.dumps(0, 2))]

    def run(self, data: bytes, *, measures: bool) -> None:
        """Reads the input by every reader. Raises Broken, or any error other than CheckpointError."""
        packed = self._zip(data)
        path = self.folder / "input.pt"
        ways: dict[str, Callable[[], Any]] = {"plain": lambda: state.unpack(packed, "input")}
        path.write_bytes(packed)
        ways["stored"] = lambda: read_file(path).content
        ways["materialized"] = lambda: materialize(read_file(path).content)
        old = self.folder / "old.pt"
        old.write_bytes(self._legacy + data + pickle.dumps([], 2))
        ways["old format"] = lambda: read_file(old).content
        (self.folder / ".metadata").write_bytes(data)
        ways["dcp"] = lambda: read_metadata(str(self.folder))
        for way, read in ways.items():
            n_bytes = len(packed if way != "dcp" else data)
            try:
                value = self._measured(read, n_bytes, way) if measures else read()
            except CheckpointError as error:
                self.n_refused += 1
                if "\n" in error.what or len(error.what) > 2000:
                    raise Broken(f"{way}: a message of {len(error.what)} characters") from error
                continue
            self.n_read += 1
            if way == "dcp":
                repr(value)
                continue
            try:
                check(value, way != "plain" and way != "materialized")
                text = repr(value)
                copy.deepcopy(value) if way == "plain" else None
            except RecursionError as error:
                raise Broken(f"{way}: too deep to be printed or copied") from error
            if len(text) > 2048 * (n_bytes + 4096):
                raise Broken(f"{way}: {len(text)} characters to print")
            if not equal(value, read()):
                raise Broken(f"{way}: read twice, and not the same")

    def _measured(self, read: Callable[[], Any], n_bytes: int, way: str) -> Any:
        tracemalloc.start()
        try:
            return read()
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            if peak > BYTES_AT_LEAST + BYTES_PER_BYTE * n_bytes:
                raise Broken(f"{way}: {peak} bytes for a file of {n_bytes}")

    def _zip(self, data: bytes) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
            for name, content in {
                "archive/data.pkl": data,
                "archive/version": b"3\n",
                "archive/byteorder": sys.byteorder.encode(),
                **{f"archive/data/{key}": content for key, content in STORAGES.items()},
            }.items():
                archive.writestr(zipfile.ZipInfo(name), content)
        return buffer.getvalue()


def inputs(seed: int, pool: list[list[Op]]) -> Iterator[bytes]:
    rng = random.Random(seed)
    while True:
        ops = rng.choice(pool)
        for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3, 5))):
            ops = change(rng, ops, pool)
        try:
            yield assemble(ops)
        except (ValueError, OverflowError, struct.error, TypeError):
            continue  # the instruction cannot encode this argument


def _too_long(*_: Any) -> None:
    raise TookTooLong(f"more than {SECONDS_PER_INPUT} s of the processor")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--found", default="fuzz_unpickle.found", help="folder for inputs that break a rule")
    parser.add_argument(
        "--no-address-limit", action="store_true", help="for runs under a sanitizer, which maps terabytes"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    faulthandler.enable()
    if not arguments.no_address_limit:
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    signal.signal(signal.SIGPROF, _too_long)
    found = pathlib.Path(arguments.found)
    found.mkdir(parents=True, exist_ok=True)
    pool = seeds()
    begin = shown = time.monotonic()
    n = n_broken = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        harness = Harness(pathlib.Path(folder))
        for data in inputs(arguments.seed, pool):
            if time.monotonic() - begin > arguments.seconds:
                break
            n += 1
            (found / "last.pkl").write_bytes(data)
            signal.setitimer(signal.ITIMER_PROF, SECONDS_PER_INPUT)
            try:
                harness.run(data, measures=n % 8 == 0)
            except (Exception, TookTooLong) as error:  # noqa: BLE001 (what comes out is what is looked for)
                n_broken += 1
                name = f"{type(error).__name__}_{zlib.crc32(data):08x}.pkl"
                (found / name).write_bytes(data)
                print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            if time.monotonic() - shown > 60:
                shown = time.monotonic()
                print(
                    f"{n} inputs, {harness.n_read} values, {harness.n_refused} refused, {n_broken} broken", flush=True
                )
    (found / "last.pkl").unlink(missing_ok=True)
    print(f"{n} inputs, {harness.n_read} values, {harness.n_refused} refused, {n_broken} broken rules", flush=True)
    return 1 if n_broken else 0


if __name__ == "__main__":
    sys.exit(main())
