"""Turns the arguments of a call into lines of text, so that the ranks of one model can compare them. Lets all ranks
raise the error of one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import DeepSpeedCError

__all__ = ["Line", "describe_call", "digest_of", "first_difference", "raised_on_all"]

Line = tuple[str, str]
"""(path of the argument, description: the type, shape and hash of a tensor, or the plain value)."""


def describe_call(inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Line]:
    """A line for every tensor and every plain value among the arguments."""
    lines = [line for i, value in enumerate(inputs) for line in _describe(f"argument {i}", value)]
    return lines + [line for name in sorted(kwargs) for line in _describe(f"argument {name!r}", kwargs[name])]


@contextmanager
def raised_on_all(comm: Collectives, label: str) -> Iterator[None]:
    """Context for work that may fail on some ranks of ``comm`` only. At its end all ranks raise, if any rank did.
    Collective; there may be no other collectives of ``comm`` within it."""
    mine = None
    try:
        yield
    except DeepSpeedCError as error:
        mine = error
    errors = [mine, *comm.gather_objects(mine, label=label)]
    first = next((error for error in errors if error is not None), None)
    if first is not None:
        raise first


def digest_of(lines: Sequence[Line]) -> str:
    return hashlib.sha256("\n".join(map(str, lines)).encode()).hexdigest()


def first_difference(comm: Collectives, lines: Sequence[Line], a: int, b: int) -> tuple[str, str]:
    """The first lines that differ between ranks ``a`` and ``b`` of ``comm``. Collective: each rank passes its own
    lines.
    """
    everyone = comm.gather_objects(lines, label="inputs that differ")
    sides = everyone[a], everyone[b]
    shorter = min(map(len, sides))
    at = next((i for i, (x, y) in enumerate(zip(*sides)) if x != y), shorter)
    ours, theirs = (" ".join(side[at]) if at < len(side) else "nothing" for side in sides)
    return ours, theirs


def _describe(path: str, value: Any) -> Iterator[Line]:
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        digest = hashlib.sha256(data.numpy().tobytes()).hexdigest()[:12]
        yield path, f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} #{digest}"
    elif isinstance(value, Mapping):
        for key in value:
            yield from _describe(f"{path}[{key!r}]", value[key])
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield from _describe(f"{path}[{i}]", part)
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield path, repr(value)
