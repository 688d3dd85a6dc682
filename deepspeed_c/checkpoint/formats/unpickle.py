"""Reads untrusted pickles as plain data. This unpickler runs no code from a pickle, and limits memory by the pickle's
size.

A pickle is a program: it names functions and classes, calls them, and sets the state of the objects that they return.
Python's own machine looks names up and hands arguments on, so any class with a careless ``__setstate__`` is a way out.
(An example is numpy's dtype: a pickle can set its flags such that numpy uses bytes of the file as pointers.) It also
allocates as much as a length in the file asks for. Here a name stands for a function of this package that checks its
arguments, or for nothing. Only objects that consist of attributes get a state. Three amounts have a limit that grows
with the bytes that were read: the bytes that calls copy, the items that are hashed, and the size of the result when
shared values are written out as often as they are held.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import pathlib
import pickle
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple

import torch

from deepspeed_c.checkpoint.formats.numpy_values import NUMPY, is_numpy_value
from deepspeed_c.checkpoint.formats.pending import Pending

__all__ = ["PLAIN", "UNREADABLE", "Global", "Unpickler", "check_attributes", "in_full"]

# Levels of containers in each other. Printing and copying take up to four levels of Python's recursion limit (1000) for
# each.
DEPTH_LIMIT = 200
# An integer that Python prints: its limit is 4300 digits.
INT_LIMIT_BYTES = 1784
# Limit on bytes copied and items hashed (bytes of text, entries of containers): this many per byte of pickle, plus a
# constant.
WORK_PER_BYTE, WORK_AT_LEAST = 8, 1 << 16
# Limit on entries and characters of the result when it is written out, per byte of pickle, plus a constant: a shared
# value counts at every place.
SIZE_PER_BYTE, SIZE_AT_LEAST = 256, 1 << 20
# Integers below this have distinct hashes. Larger integers, and tuples of integers, can be chosen so that all have the
# same hash.
DISTINCT_HASH_LIMIT = 1 << 60
# Characters that a message shows of a name in the file.
NAME_SHOWN = 120

# Errors from reading a damaged or hostile file besides CheckpointError; readers turn these into it.
UNREADABLE = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Global(NamedTuple):
    """The meaning of a name in a pickle. A result holds none of these."""

    call: Callable[..., Any] | None = None
    """Makes the value of a call; its arguments come from the file unchecked."""
    new: Callable[[], Any] | None = None
    """Makes an object whose state follows."""
    factory: type | None = None
    """The type that a defaultdict makes its entries of."""


def in_full(name: str) -> str:
    """A name of the file as a message may show it."""
    return ascii(name[:NAME_SHOWN])[1:-1] + ("..." if len(name) > NAME_SHOWN else "")


def _refuse(what: str) -> Any:
    raise pickle.UnpicklingError(what)


def _encode(text: str, encoding: str) -> bytes:
    # How protocol 2 writes bytes.
    if type(text) is not str or encoding != "latin1":
        _refuse("bytes that are not made of text in latin1")
    return text.encode("latin-1")


def _bytes() -> bytes:
    return b""


def _bytearray(content: bytes | str = b"", encoding: str = "latin-1") -> bytearray:
    if type(content) is str and encoding == "latin-1":
        return bytearray(content, "latin-1")
    return bytearray(content) if type(content) is bytes else _refuse("a bytearray that is made of no bytes")


def _complex(real: float, imag: float) -> complex:
    return complex(real, imag) if type(real) is type(imag) is float else _refuse("a complex number of no numbers")


def _are_indices(values: Iterable[Any]) -> bool:
    return all(value is None or type(value) is int for value in values)


def _slice(*bounds: int | None) -> slice:
    return slice(*bounds) if _are_indices(bounds) else _refuse("a slice of no numbers")


def _range(*bounds: int) -> range:
    return range(*bounds) if _are_indices(bounds) else _refuse("a range of no numbers")


def _size(sizes: Collection[int] = ()) -> torch.Size:
    if type(sizes) not in (tuple, list) or not all(type(n) is int and abs(n) < 1 << 63 for n in sizes):
        _refuse("a size that is made of no numbers")
    return torch.Size(sizes)


def _device(kind: str, index: int | None = None) -> torch.device:
    if type(kind) is not str or not (index is None or type(index) is int):
        _refuse("a device that is no name and number")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _ordered_dict(pairs: Collection[Any] = ()) -> collections.OrderedDict:
    if type(pairs) not in (list, tuple) or pairs:
        _refuse("an OrderedDict that is made of something")
    return collections.OrderedDict()


def _counter(items: dict | None = None) -> collections.Counter:
    return collections.Counter(items) if items is None or type(items) is dict else _refuse("a Counter of no dict")


def _defaultdict(factory: Global | None = None) -> collections.defaultdict:
    if not (factory is None or (type(factory) is Global and factory.factory is not None)):
        _refuse("a defaultdict whose entries are made in an unknown way")
    return collections.defaultdict(factory and factory.factory)


def _deque(items: Collection[Any] = (), at_most: int | None = None) -> collections.deque:
    if type(items) not in (list, tuple) or items or not (at_most is None or type(at_most) is int):
        _refuse("a deque that is made of something")
    return collections.deque((), at_most)


def _path(kind: type[pathlib.PurePath]) -> Callable[..., pathlib.PurePath]:
    def path(*parts: str) -> pathlib.PurePath:
        return kind(*parts) if all(type(part) is str for part in parts) else _refuse("a path of no texts")

    return path


def _fields(content: Any, n_bytes: int) -> bytes:
    """The bytes that hold the numbers of a date or a time, checked: the classes themselves would take any."""
    return content if type(content) is bytes and len(content) == n_bytes else _refuse("a date or time of other bytes")


def _tzinfo(zone: Any) -> datetime.timezone | None:
    return zone if zone is None or type(zone) is datetime.timezone else _refuse("a time zone of another class")


def _datetime(content: bytes, zone: datetime.timezone | None = None) -> datetime.datetime:
    high, low, month, day, hour, minute, second, *us = _fields(content, 10)
    fold, month = divmod(month, 128)
    microsecond = int.from_bytes(bytes(us), "big")
    return datetime.datetime(high << 8 | low, month, day, hour, minute, second, microsecond, _tzinfo(zone), fold=fold)


def _date(content: bytes) -> datetime.date:
    high, low, month, day = _fields(content, 4)
    return datetime.date(high << 8 | low, month, day)


def _time(content: bytes, zone: datetime.timezone | None = None) -> datetime.time:
    hour, minute, second, *us = _fields(content, 6)
    fold, hour = divmod(hour, 128)
    return datetime.time(hour, minute, second, int.from_bytes(bytes(us), "big"), _tzinfo(zone), fold=fold)


def _timedelta(*numbers: int) -> datetime.timedelta:
    if not all(type(n) is int for n in numbers) or len(numbers) > 3:
        _refuse("a timedelta that is not made of numbers")
    return datetime.timedelta(*numbers)


def _timezone(offset: datetime.timedelta, *name: str) -> datetime.timezone:
    if type(offset) is not datetime.timedelta or not all(type(part) is str for part in name):
        _refuse("a time zone of no offset and name")
    return datetime.timezone(offset, *name)


# Calls that fill a set are the machine's own, because hashing counts.
_SET, _FROZENSET = Global(factory=set), Global()

PLAIN: dict[str, Global] = {
    "collections.OrderedDict": Global(call=_ordered_dict),
    "collections.Counter": Global(call=_counter),
    "collections.defaultdict": Global(call=_defaultdict),
    "collections.deque": Global(call=_deque),
    "argparse.Namespace": Global(call=argparse.Namespace, new=argparse.Namespace),
    "types.SimpleNamespace": Global(call=SimpleNamespace, new=SimpleNamespace),
    "datetime.datetime": Global(call=_datetime),
    "datetime.date": Global(call=_date),
    "datetime.time": Global(call=_time),
    "datetime.timedelta": Global(call=_timedelta),
    "datetime.timezone": Global(call=_timezone),
    "_codecs.encode": Global(call=_encode),
    "torch.Size": Global(call=_size),
    "torch.device": Global(call=_device),
    **{
        f"pathlib.{inner}{name}": Global(call=_path(kind))
        for inner in ("", "_local.")
        for name, kind in (
            ("PurePosixPath", pathlib.PurePosixPath),
            ("PosixPath", pathlib.PosixPath if sys.platform != "win32" else pathlib.PurePosixPath),
            ("PureWindowsPath", pathlib.PureWindowsPath),
            ("WindowsPath", pathlib.PureWindowsPath),
        )
    },
    **{name: Global(call=call) for name, call in NUMPY.items()},
}
for _module, _other_names in (("builtins", {}), ("__builtin__", {"range": "xrange", "int": "long", "str": "unicode"})):
    # Protocol 2 has the names of Python 2.
    for _name, _global in {
        "bytes": Global(call=_bytes),
        "bytearray": Global(call=_bytearray),
        "complex": Global(call=_complex),
        "slice": Global(call=_slice),
        "range": Global(call=_range),
        "set": _SET,
        "frozenset": _FROZENSET,
        **{kind.__name__: Global(factory=kind) for kind in (bool, dict, float, int, list, str, tuple)},
    }.items():
        PLAIN[f"{_module}.{_other_names.get(_name, _name)}"] = _global

_TEXTS = (str, bytes, bytearray)
# Types without parts that print shortly, and may be a key as well.
_LEAVES = frozenset(
    (
        *(type(None), bool, int, float, complex, slice, range, torch.dtype, torch.device),
        *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
        *(pathlib.PurePosixPath, pathlib.PosixPath, pathlib.PureWindowsPath),
    )
)
_SEQUENCES = frozenset((list, tuple, set, frozenset, collections.deque, torch.Size))
_MAPPINGS = frozenset((dict, collections.OrderedDict, collections.Counter, collections.defaultdict))
_NAMESPACES = frozenset((argparse.Namespace, SimpleNamespace))
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))


def check_attributes(state: Any) -> dict[str, Any]:
    """The attributes that a pickle sets.

    Raises UnpicklingError for names that a protocol of Python or numpy looks up in an object (``__array_interface__``
    is a pointer).
    """
    if type(state) is not dict or not all(type(name) is str for name in state):
        _refuse("a state that consists of no attributes")
    if any(name.startswith("__") for name in state):
        _refuse("an attribute with a name of Python's own")
    return state


class Unpickler:
    """Reads one pickle of the protocols 2 to 5 from ``file``, of at most ``n_bytes``.

    ``table`` has the names that it may use, by path. ``objects`` are classes whose instances consist of attributes, and
    compare by identity; ``leaves`` further types that a result may hold. ``load`` returns the value, made of these
    types and plain data alone. It is a tree with shared values: nothing holds itself. Raises ``UNREADABLE``, or the
    error of ``refuse_name``.
    """

    def __init__(
        self,
        file: BinaryIO,
        n_bytes: int,
        table: Mapping[str, Any],
        *,
        objects: Collection[type] = (),
        leaves: Collection[type] = (),
    ) -> None:
        self._file = file
        self._n_bytes = n_bytes
        self._n_read = 0
        self._work = 0
        self._table = table
        self._objects = _NAMESPACES | frozenset(objects)
        self._leaves = _LEAVES | frozenset(leaves)
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        # For each hash, the number of keys of a container with that hash, not counting texts and small numbers.
        self._hashes: dict[tuple[int, int], int] = {}

    def load(self) -> Any:
        while (instruction := self._read(1)) != pickle.STOP:
            step = _STEPS.get(instruction)
            if step is None:
                raise pickle.UnpicklingError(f"the instruction {instruction!r}, which torch.save does not write")
            step(self)
        value = self._stack.pop()
        if self._stack or self._marks:
            raise pickle.UnpicklingError("more than one value")
        self._check_result(value)
        return value

    @property
    def n_read(self) -> int:
        """Bytes of the pickle that were read."""
        return self._n_read

    # For subclasses.

    def refuse_name(self, path: str) -> Any:
        """Raises the error for a name that is not in the table."""
        raise pickle.UnpicklingError(f"it names {in_full(path)}")

    def persistent_load(self, pid: Any) -> Any:
        """The value for a reference to something outside of the pickle."""
        raise pickle.UnpicklingError("it refers to something outside")

    def set_state(self, value: Any, state: Any) -> None:
        """Sets the attributes of an object of ``objects``."""
        if type(state) is tuple and len(state) == 2 and state[1] in (None, {}):
            state = state[0] or {}
        vars(value).update(check_attributes(state))

    # Bytes and costs.

    def _read(self, n: int) -> bytes:
        if n > self._n_bytes - self._n_read:
            raise EOFError("it ends within the pickle")
        content = self._file.read(n)
        if len(content) != n:
            raise EOFError("it ends within the pickle")
        self._n_read += n
        return content

    def _number(self, n_bytes: int) -> int:
        return int.from_bytes(self._read(n_bytes), "little")

    def _line(self) -> str:
        line = self._file.readline(self._n_bytes - self._n_read)
        if not line.endswith(b"\n"):
            raise EOFError("it ends within the pickle")
        self._n_read += len(line)
        return line[:-1].decode()

    def _charge(self, n: int) -> None:
        self._work += n
        if self._work > WORK_AT_LEAST + WORK_PER_BYTE * self._n_read:
            raise pickle.UnpicklingError("it asks for more work than its size warrants")

    # The stack.

    def _pop_from_mark(self) -> list[Any]:
        begin = self._marks.pop()
        values = self._stack[begin:]
        if begin > len(self._stack):
            raise pickle.UnpicklingError("a mark above the stack")
        del self._stack[begin:]
        return values

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _put(self, index: int) -> None:
        value = self._stack[-1]
        self._memo[index] = value
        if isinstance(value, Pending):
            value.places.append(index)

    # Containers.

    def _add_to_dict(self, pairs: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in _MAPPINGS or len(pairs) % 2:
            raise pickle.UnpicklingError("entries of what is no dict")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            self._check_key(target, key)
            target[key] = value

    def _add_to_set(self, target: Any, values: Iterable[Any]) -> None:
        for value in values:
            self._check_key(target, value)
            target.add(value)

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is collections.deque:
            # Freeing deques in deques takes a level of the C stack for each.
            if any(type(value) is collections.deque for value in values):
                raise pickle.UnpicklingError("a deque in a deque")
        elif type(target) is not list:
            raise pickle.UnpicklingError("entries of what is no list")
        target.extend(values)

    def _add_items(self) -> None:
        values = self._pop_from_mark()
        if type(self._stack[-1]) is not set:
            raise pickle.UnpicklingError("entries of what is no set")
        self._add_to_set(self._stack[-1], values)

    def _frozen_set(self) -> None:
        made: set[Any] = set()
        self._add_to_set(made, self._pop_from_mark())
        self._push(frozenset(made))

    def _check_key(self, container: Any, key: Any) -> None:
        """Checks a key before it is hashed: that hashing ends, that it takes no more time than the bytes read warrant,
        and that not too many keys share one hash.
        """
        kind = type(key)
        if kind is str or kind is bytes or (kind is int and -DISTINCT_HASH_LIMIT < key < DISTINCT_HASH_LIMIT):
            return
        level, depth = [key], 0
        while level:
            self._charge(len(level))
            depth += 1
            if depth > DEPTH_LIMIT:
                raise pickle.UnpicklingError("a key that is nested too deeply")
            inner: list[Any] = []
            for part in level:
                kind = type(part)
                if kind is tuple or kind is frozenset or kind is torch.Size:
                    self._charge(len(part))
                    inner.extend(part)
                elif kind is not str and kind is not bytes and not self._is_leaf(part) and kind not in self._objects:
                    raise pickle.UnpicklingError(f"a key of type {kind.__name__}")
            level = inner
        place = id(container), hash(key)
        self._hashes[place] = n = self._hashes.get(place, 0) + 1
        self._charge(n)

    def _is_leaf(self, value: Any) -> bool:
        return type(value) in self._leaves or is_numpy_value(value)

    # Names, calls, states.

    def _find(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if (found := self._table.get(path)) is not None:
            return found
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        return self.refuse_name(path)

    def _call(self, function: Any, arguments: Any) -> Any:
        if type(function) is not Global or type(arguments) is not tuple:
            raise pickle.UnpicklingError(f"a call of a {type(function).__name__}")
        self._charge(len(arguments) + sum(_length(argument) for argument in arguments))
        if function is _SET or function is _FROZENSET:
            values = arguments[0] if arguments else []
            if len(arguments) > 1 or type(values) not in (list, tuple):
                raise pickle.UnpicklingError("a set that is not made of a list")
            made: set[Any] = set()
            self._add_to_set(made, values)
            return made if function is _SET else frozenset(made)
        if function.call is None:
            raise pickle.UnpicklingError("a call of what is not called in a checkpoint")
        return function.call(*arguments)

    def _reduce(self) -> None:
        arguments = self._stack.pop()
        self._stack[-1] = self._call(self._stack[-1], arguments)

    def _new_object(self) -> None:
        arguments = self._stack.pop()
        kind = self._stack[-1]
        if type(kind) is not Global or kind.new is None or arguments != ():
            raise pickle.UnpicklingError("an object of a class that is not made so in a checkpoint")
        self._stack[-1] = kind.new()

    def _new_object_ex(self) -> None:
        if self._stack.pop() != {}:
            raise pickle.UnpicklingError("an object of a class that is not made so in a checkpoint")
        self._new_object()

    def _build(self) -> None:
        state = self._stack.pop()
        value = self._stack[-1]
        self._charge(_length(state))
        if isinstance(value, Pending):
            self._stack[-1] = finished = value.finish(state)
            for index in value.places:
                self._memo[index] = finished
        elif type(value) in self._objects:
            self.set_state(value, state)
        elif type(value) is not collections.OrderedDict:
            # Attributes of an OrderedDict are dropped: torch hangs some on the result of state_dict().
            raise pickle.UnpicklingError(f"a state for a {type(value).__name__}")

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise pickle.UnpicklingError("a name that is no text")
        self._charge(len(name) + len(module))
        self._push(self._find(module, name))

    def _integer(self, n_bytes: int) -> None:
        if n_bytes > INT_LIMIT_BYTES:
            raise pickle.UnpicklingError(f"an integer of {n_bytes} bytes")
        self._push(int.from_bytes(self._read(n_bytes), "little", signed=True))

    def _text(self, n_bytes: int) -> None:
        self._push(str(self._read(n_bytes), "utf-8", "surrogatepass"))

    # The result.

    def _check_result(self, root: Any) -> None:
        """Checks that the result holds allowed types only, that nothing in it holds itself, and that it can be printed,
        compared and walked in a time that the file warrants.
        """
        limit = SIZE_AT_LEAST + SIZE_PER_BYTE * self._n_read
        # For each container that was seen to its end: (size when written out, levels).
        seen: dict[int, tuple[int, int]] = {}
        open_ids: set[int] = set()
        # For each container that is being seen: [itself, its remaining parts, size so far, levels below so far].
        path: list[list[Any]] = [[None, iter((root,)), 0, 0]]
        while True:
            frame = path[-1]
            for part in frame[1]:
                parts = self._parts(part)
                if parts is None:
                    size, levels = 1 + (len(part) if type(part) in _TEXTS else 0), 0
                elif id(part) in open_ids:
                    raise pickle.UnpicklingError(f"a {type(part).__name__} that holds itself")
                elif id(part) not in seen:
                    if len(path) > DEPTH_LIMIT:
                        raise pickle.UnpicklingError("containers that are nested too deeply")
                    open_ids.add(id(part))
                    path.append([part, parts, 1, 0])
                    break
                else:
                    size, levels = seen[id(part)]
                frame[2] += size
                frame[3] = max(frame[3], levels)
                if frame[2] > limit:
                    raise pickle.UnpicklingError("values that it holds so often that they cannot be written out")
            else:
                path.pop()
                value, _, size, levels = frame
                if levels + len(path) > DEPTH_LIMIT:
                    raise pickle.UnpicklingError("containers that are nested too deeply")
                if not path:
                    return
                open_ids.remove(id(value))
                seen[id(value)] = size, levels + 1
                above = path[-1]
                above[2] += size
                above[3] = max(above[3], levels + 1)
                if above[2] > limit:
                    raise pickle.UnpicklingError("values that it holds so often that they cannot be written out")

    def _parts(self, value: Any) -> Any:
        """An iterator over the parts of a container; None for a value without parts.

        Raises UnpicklingError for a type that a result may not hold.
        """
        kind = type(value)
        if kind in _TEXTS or kind in self._leaves:
            return None
        if kind in _SEQUENCES:
            return iter(value)
        if kind in _MAPPINGS:
            return _keys_and_values(value)
        if kind in self._objects:
            return _keys_and_values(vars(value))
        if kind in _TENSORS or is_numpy_value(value):
            return None
        raise pickle.UnpicklingError(f"a {kind.__name__} in the place of a value")


def _keys_and_values(mapping: Mapping[Any, Any]) -> Iterable[Any]:
    for key, value in mapping.items():
        yield key
        yield value


def _length(value: Any) -> int:
    return len(value) if type(value) in _SIZED else 0


_SIZED = frozenset((str, bytes, bytearray, list, tuple, dict, torch.Size))


def _tuple_of(n: int) -> Callable[[Unpickler], None]:
    def step(self: Unpickler) -> None:
        stack = self._stack
        if len(stack) < n:
            raise pickle.UnpicklingError("too few values")
        stack[-n:] = [tuple(stack[-n:])]

    return step


def _constant(value: Any) -> Callable[[Unpickler], None]:
    return lambda self: self._stack.append(value)


def _pop(self: Unpickler) -> None:
    # As in Python's own unpickler, a mark may be on top.
    if self._marks and self._marks[-1] == len(self._stack):
        self._marks.pop()
    else:
        self._stack.pop()


def _protocol(self: Unpickler) -> None:
    if (version := self._number(1)) > pickle.HIGHEST_PROTOCOL:
        raise pickle.UnpicklingError(f"protocol {version}")


# Every opcode that Python writes in the protocols 2 to 5. Earlier protocols are text, and torch.save does not use them.
_STEPS: dict[bytes, Callable[[Unpickler], Any]] = {
    pickle.PROTO: _protocol,
    pickle.FRAME: lambda self: self._read(8),
    pickle.NONE: _constant(None),
    pickle.NEWTRUE: _constant(True),
    pickle.NEWFALSE: _constant(False),
    pickle.EMPTY_TUPLE: _constant(()),
    pickle.EMPTY_LIST: lambda self: self._push([]),
    pickle.EMPTY_DICT: lambda self: self._push({}),
    pickle.EMPTY_SET: lambda self: self._push(set()),
    pickle.BININT: lambda self: self._push(int.from_bytes(self._read(4), "little", signed=True)),
    pickle.BININT1: lambda self: self._push(self._number(1)),
    pickle.BININT2: lambda self: self._push(self._number(2)),
    pickle.LONG1: lambda self: self._integer(self._number(1)),
    pickle.LONG4: lambda self: self._integer(self._number(4)),
    pickle.BINFLOAT: lambda self: self._push(struct.unpack(">d", self._read(8))[0]),
    pickle.SHORT_BINUNICODE: lambda self: self._text(self._number(1)),
    pickle.BINUNICODE: lambda self: self._text(self._number(4)),
    pickle.BINUNICODE8: lambda self: self._text(self._number(8)),
    pickle.SHORT_BINBYTES: lambda self: self._push(self._read(self._number(1))),
    pickle.BINBYTES: lambda self: self._push(self._read(self._number(4))),
    pickle.BINBYTES8: lambda self: self._push(self._read(self._number(8))),
    pickle.BYTEARRAY8: lambda self: self._push(bytearray(self._read(self._number(8)))),
    pickle.MARK: lambda self: self._marks.append(len(self._stack)),
    pickle.POP: _pop,
    pickle.POP_MARK: lambda self: self._pop_from_mark(),
    pickle.TUPLE: lambda self: self._push(tuple(self._pop_from_mark())),
    pickle.TUPLE1: _tuple_of(1),
    pickle.TUPLE2: _tuple_of(2),
    pickle.TUPLE3: _tuple_of(3),
    pickle.APPEND: lambda self: self._extend([self._stack.pop()]),
    pickle.APPENDS: lambda self: self._extend(self._pop_from_mark()),
    pickle.SETITEM: lambda self: self._add_to_dict([self._stack.pop(), self._stack.pop()][::-1]),
    pickle.SETITEMS: lambda self: self._add_to_dict(self._pop_from_mark()),
    pickle.ADDITEMS: Unpickler._add_items,
    pickle.FROZENSET: Unpickler._frozen_set,
    pickle.BINPUT: lambda self: self._put(self._number(1)),
    pickle.LONG_BINPUT: lambda self: self._put(self._number(4)),
    pickle.MEMOIZE: lambda self: self._put(len(self._memo)),
    pickle.BINGET: lambda self: self._push(self._memo[self._number(1)]),
    pickle.LONG_BINGET: lambda self: self._push(self._memo[self._number(4)]),
    pickle.GLOBAL: lambda self: self._push(self._find(self._line(), self._line())),
    pickle.STACK_GLOBAL: Unpickler._stack_global,
    pickle.REDUCE: Unpickler._reduce,
    pickle.NEWOBJ: Unpickler._new_object,
    pickle.NEWOBJ_EX: Unpickler._new_object_ex,
    pickle.BUILD: Unpickler._build,
    pickle.BINPERSID: lambda self: self._push(self.persistent_load(self._stack.pop())),
}
