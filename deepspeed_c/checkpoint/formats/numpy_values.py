"""Rebuilds numpy's numbers, texts and arrays from untrusted pickles, from a dtype on a list and bytes of the right
size.

numpy itself would set the state of the object that it unpickles: flags of a dtype that say whether elements are
pointers, and the dtype of an array apart from its bytes. Here nothing is set. The pickle's values are read as numbers
and text, and numpy's constructors are called with those.
"""

from __future__ import annotations

import math
import pickle
import re
import sys
from collections.abc import Callable
from typing import Any

from deepspeed_c.checkpoint.formats.pending import Pending

__all__ = ["NUMPY", "is_listed", "is_numpy_value"]

# Kinds of numbers with their bytes, as numpy writes them; texts (S, U) of any length. Objects, void and fields are not
# allowed.
_NUMBERS = re.compile(r"b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|[mM]8")
_TEXTS = re.compile(r"[SU](0|[1-9][0-9]{0,8})")
# Units of dates and times (datetime64, timedelta64).
_UNITS = frozenset((b"generic", *(b"Y", b"M", b"W", b"D", b"h", b"m", b"s", b"ms", b"us", b"ns", b"ps", b"fs", b"as")))
# The largest number of a Unicode character.
_LAST_CHARACTER = 0x10FFFF


def is_listed(dtype: Any) -> bool:
    """Whether a numpy dtype is on the list, in any byte order."""
    return dtype.kind in "biufcSUmM" and dtype.fields is None and dtype.subdtype is None and not dtype.hasobject


def is_numpy_value(value: Any) -> bool:
    """Whether ``value`` is an array, a scalar or a dtype of numpy that pickles may hold here."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic, numpy.dtype)):
        return False
    if isinstance(value, numpy.dtype):
        return is_listed(value)
    return (type(value) is numpy.ndarray or isinstance(value, numpy.generic)) and is_listed(value.dtype)


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise pickle.UnpicklingError("a value of numpy, which is not installed") from error
    return numpy


class _Dtype(Pending):
    """A dtype whose byte order, and unit, are still to come."""

    __slots__ = ("code",)

    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = code

    def finish(self, state: Any) -> Any:
        # (version, byte order, subarray, names, fields, bytes of an element, alignment, flags[, metadata]): see
        # arraydescr_reduce in numpy.
        if type(state) is not tuple or len(state) not in (8, 9) or state[1] not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError("a dtype of numpy in an unknown state")
        if any(part is not None for part in state[2:5]):
            raise pickle.UnpicklingError("a dtype of numpy with fields, which is not read")
        dtype = _numpy().dtype(self.code + _unit(self.code, state[8] if len(state) == 9 else None))
        return dtype.newbyteorder(state[1]) if state[1] in "<>" else dtype


def _unit(code: str, metadata: Any) -> str:
    """ "[10ms]" of the metadata ({}, (b"ms", 10, 1, 1)) of a date or time; "" for all else."""
    if code not in ("m8", "M8"):
        return ""
    if type(metadata) is not tuple or len(metadata) != 2 or type(metadata[1]) is not tuple or len(metadata[1]) != 4:
        raise pickle.UnpicklingError("a date of numpy without a unit")
    unit, count, *_ = metadata[1]
    if type(unit) is not bytes or unit not in _UNITS or type(count) is not int or not 0 < count < 1 << 31:
        raise pickle.UnpicklingError("a date of numpy in an unknown unit")
    return "" if unit == b"generic" else f"[{count}{unit.decode()}]"


def _dtype(code: Any, *_: Any) -> _Dtype:
    if type(code) is not str or len(code) > 10 or not (_NUMBERS.fullmatch(code) or _TEXTS.fullmatch(code)):
        raise pickle.UnpicklingError("a dtype of numpy that is no plain number, text or date")
    return _Dtype(code)


def _elements(dtype: Any, n_elems: int, content: Any) -> Any:
    """``n_elems`` elements, flat, in memory of their own and the machine's byte order."""
    numpy = _numpy()
    if not isinstance(dtype, numpy.dtype) or not is_listed(dtype):
        raise pickle.UnpicklingError("a value of numpy without a plain dtype")
    if type(content) is not bytes or len(content) != n_elems * dtype.itemsize:
        raise pickle.UnpicklingError("a value of numpy whose bytes do not fit its dtype and shape")
    if not content:
        # Texts without characters take no bytes, so their number must be limited separately.
        if n_elems > 1:
            raise pickle.UnpicklingError("an array of numpy whose elements have no bytes")
        return numpy.zeros(n_elems, dtype=dtype.newbyteorder("="))
    if dtype.kind == "b":
        return numpy.frombuffer(content, dtype="u1") != 0  # any byte may be in a file, and numpy relies on 0 and 1
    values = numpy.frombuffer(content, dtype=dtype)
    if dtype.kind == "U":
        characters = values.view(numpy.dtype("u4").newbyteorder(dtype.byteorder))
        if characters.size and int(characters.max()) > _LAST_CHARACTER:
            raise pickle.UnpicklingError("a text of numpy with characters that there are not")
    return values.astype(dtype.newbyteorder("="))


def _scalar(dtype: Any, content: Any = None) -> Any:
    return _elements(dtype, 1, content)[0]


class _Array(Pending):
    """An array whose shape, dtype and bytes are still to come."""

    __slots__ = ()

    def finish(self, state: Any) -> Any:
        if type(state) is not tuple or len(state) != 5:
            raise pickle.UnpicklingError("an array of numpy in an unknown state")
        _, shape, dtype, is_fortran, content = state
        if type(shape) is not tuple or not all(type(n) is int and 0 <= n < 1 << 60 for n in shape):
            raise pickle.UnpicklingError("an array of numpy without a shape")
        flat = _elements(dtype, math.prod(shape), content)
        return flat.reshape(shape, order="F" if is_fortran is True else "C")


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _not_called(*_: Any) -> Any:
    raise pickle.UnpicklingError("an array of numpy that is made in an unknown way")


NUMPY: dict[str, Callable[..., Any]] = {
    "numpy.dtype": _dtype,
    # Named as an argument of _reconstruct.
    "numpy.ndarray": _not_called,
    # Under the older and the newer name of the module that holds them.
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray._reconstruct": _reconstruct for core in ("core", "_core")},
}
