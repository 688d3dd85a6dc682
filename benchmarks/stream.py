"""The memory bound of an optimizer step: a C pass (``benchmarks/csrc/stream.c``) that reads and writes the same bytes,
over the step's own tensors and on as many threads. A plain read is the bound of generation."""

from __future__ import annotations

import ctypes
import fcntl
import subprocess
import time
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from deepspeed_c import _C

__all__ = ["Part", "bytes_of", "stream_read", "stream_step"]

CSRC = Path(__file__).resolve().parents[1] / "csrc"


class Part(NamedTuple):
    """Contiguous CPU tensors of one length.

    All are fp32, except that the gradient may be bf16 and that the copy is bf16 or None.
    """

    param: torch.Tensor
    grad: torch.Tensor
    state0: torch.Tensor
    state1: torch.Tensor
    copy: torch.Tensor | None


class _Part(ctypes.Structure):
    _fields_ = [
        ("n_elems", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("param", "grad", "state0", "state1", "copy")),
        ("grad_is_bf16", ctypes.c_int64),
    ]


@cache
def _library() -> ctypes.CDLL:
    """Load the library, and build it before if it is missing or outdated. Ranks take turns."""
    with open(CSRC / "Makefile") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        subprocess.run(["make", "-s", "-C", str(CSRC), "stream"], check=True, stdout=subprocess.DEVNULL)
    library = ctypes.CDLL(str(CSRC / "build" / "libstream.so"))
    library.stream_resize.argtypes = [ctypes.c_int32]
    library.stream_read.argtypes = [ctypes.POINTER(_Part), ctypes.c_int64, ctypes.POINTER(ctypes.c_uint64)]
    library.stream_step.argtypes = [
        ctypes.POINTER(_Part), ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_float, ctypes.POINTER(ctypes.c_double)
    ]  # fmt: skip
    return library


@lru_cache(maxsize=1)
def _resize(n_threads: int) -> None:
    """Set the number of threads, only if it differs, because a change restarts the workers."""
    if _library().stream_resize(n_threads):
        raise RuntimeError(f"no pool of {n_threads} threads")


def _checked(part: Part) -> _Part:
    n, fp32 = part.param.numel(), (torch.float32,)
    for name, dtypes in zip(Part._fields, (fp32, (torch.float32, torch.bfloat16), fp32, fp32, (torch.bfloat16,))):
        tensor = getattr(part, name)
        if tensor is None and name == "copy":
            continue
        if (
            tensor.dtype not in dtypes
            or not tensor.is_contiguous()
            or tensor.numel() != n
            or tensor.device.type != "cpu"
        ):
            raise ValueError(
                f"{name}: {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, beside a param of {n} elements"
            )
    copy = None if part.copy is None else part.copy.data_ptr()
    others = [tensor.data_ptr() for tensor in part[:4]]
    return _Part(n, *others, copy, part.grad.dtype == torch.bfloat16)


def bytes_of(parts: Sequence[Part], *, with_norm: bool) -> int:
    """Return the least bytes that one pass moves: gradients (twice with the norm), params and states both ways, copies."""
    total = 0
    for part in parts:
        per_elem = part.grad.element_size() * (2 if with_norm else 1) + 24 + (0 if part.copy is None else 2)
        total += per_elem * part.param.numel()
    return total


def stream_step(parts: Sequence[Part], *, with_norm: bool) -> tuple[float, float]:
    """Run one pass and return (seconds, sum of squares of the gradients).

    Values do not change, except that a copy becomes its param rounded to bf16.
    """
    library = _library()
    found = (_Part * len(parts))(*map(_checked, parts))
    _resize(_C.pool_n_threads())
    sumsq = ctypes.c_double()
    begin = time.perf_counter()
    status = library.stream_step(found, len(parts), with_norm, 1.0, 0.0, ctypes.byref(sumsq))
    seconds = time.perf_counter() - begin
    if status:
        raise RuntimeError(f"the pass over memory ended with status {status}")
    return seconds, sumsq.value


def stream_read(tensors: Sequence[torch.Tensor]) -> tuple[float, int]:
    """Read contiguous CPU tensors of whole words of 8 bytes once. Return (seconds, sum of their words modulo 2^64)."""
    library = _library()
    found = (_Part * len(tensors))()
    for part, tensor in zip(found, tensors, strict=True):
        if not tensor.is_contiguous() or not tensor.is_cpu or tensor.nbytes % 8:
            raise ValueError(f"{tensor.nbytes} bytes of {tuple(tensor.shape)} on {tensor.device} cannot be read")
        part.n_elems, part.grad = tensor.nbytes // 8, tensor.data_ptr()
    _resize(_C.pool_n_threads())
    total = ctypes.c_uint64()
    begin = time.perf_counter()
    status = library.stream_read(found, len(found), ctypes.byref(total))
    seconds = time.perf_counter() - begin
    if status:
        raise RuntimeError(f"the read ended with status {status}")
    return seconds, total.value
