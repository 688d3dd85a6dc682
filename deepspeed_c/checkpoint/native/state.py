"""The small state beside the tensors (schedule, random numbers, the caller's own): written and read so that no code of
a stranger ever runs.

Files have the format of ``torch.save``, and are read by ``torch_file.py`` alone: numbers, text, bytes, containers,
tensors, and a few harmless classes. A value that could not be loaded is refused by name when it is saved.
"""

from __future__ import annotations

import argparse
import io
import pickle
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from deepspeed_c.checkpoint.formats.torch_file import load_plain
from deepspeed_c.errors import CheckpointError

__all__ = ["check_random_state", "pack", "random_state", "restore_random_state", "unpack"]

# Errors of pickling values that cannot be written (some come from the values' own classes).
_UNWRITABLE = (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError)


def pack(value: Mapping[str, Any], where: str) -> bytes:
    """``value`` as bytes that ``unpack`` reads.

    Raises CheckpointError, naming entry and class, for a value that ``unpack`` would refuse.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        content = buffer.getvalue()
        unpack(content, where)
    except RecursionError as error:
        raise CheckpointError(
            "is nested too deeply to be saved",
            where=where,
            fix="save flat lists and dicts instead of links from one to the next",
        ) from error
    except (*_UNWRITABLE, CheckpointError) as error:
        path, culprit = _find_culprit(value, "", frozenset())
        why = f": {error.what}" if isinstance(error, CheckpointError) else ""
        raise CheckpointError(
            f"{path or 'the value'} is a {type(culprit).__module__}.{type(culprit).__qualname__}, which cannot be saved safely{why}",
            where=where,
            fix="save numbers, text, bytes, tensors, numpy arrays, and dicts, lists, tuples or sets of them; for an object save its state_dict() or vars()",
        ) from error
    return content


def unpack(content: bytes, where: str) -> Any:
    """The value that ``pack`` was given; tensors are in host memory.

    Raises CheckpointError for anything that is not plain data.
    """
    try:
        return load_plain(io.BytesIO(content), len(content), where)
    except CheckpointError as error:
        raise CheckpointError(
            f"cannot be read as plain data: {error.what}",
            where=where,
            fix="load another tag; the file is damaged, or holds objects that would run code when loaded",
        ) from error


def _find_culprit(value: Any, path: str, around: frozenset[int]) -> tuple[str, Any]:
    """The innermost entry that does not survive, for the message.

    ``around``: ids of the containers around it, which may also occur inside it.
    """
    if isinstance(value, Mapping):
        parts = [(f"{path}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = [(f"{path}[{i}]", part) for i, part in enumerate(value)]
    elif isinstance(value, (argparse.Namespace, SimpleNamespace)):
        parts = [(f"{path}.{key}", part) for key, part in vars(value).items()]
    else:
        return path, value
    around |= {id(value)}
    for part_path, part in parts:
        if id(part) in around:
            continue
        buffer = io.BytesIO()
        try:
            torch.save(part, buffer)
            unpack(buffer.getvalue(), part_path)
        except (*_UNWRITABLE, CheckpointError):
            return _find_culprit(part, part_path, around)
    return path, value


def random_state(device: torch.device) -> dict[str, Any]:
    """The generators of Python, numpy (where it is loaded), torch, and ``device``."""
    import random

    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached)
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def check_random_state(state: Any, device: torch.device, where: str) -> None:
    """Raises CheckpointError unless ``restore_random_state`` takes ``state``.

    No generator in use is changed.
    """
    import random

    numpy = sys.modules.get("numpy")
    try:
        if not isinstance(state, Mapping):
            raise TypeError(f"it is a {type(state).__name__} and no dict")
        _put_back(
            state,
            device,
            of_python=random.Random().setstate,
            of_torch=torch.Generator().set_state,
            of_numpy=None if numpy is None else numpy.random.RandomState().set_state,
            of_device=lambda saved: torch.Generator(device).set_state(saved),
        )
    except (TypeError, AttributeError, LookupError, ArithmeticError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"its random state cannot be put back: {str(error).strip() or type(error).__name__}",
            where=where,
            fix="load another tag, or pass load_optimizer_states=False to go on with other random numbers",
        ) from error


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restores a state from ``random_state``; entries that are unknown here are left out.

    The type of the error is undefined for a state that ``check_random_state`` would refuse.
    """
    import random

    numpy = sys.modules.get("numpy")
    _put_back(
        state,
        device,
        of_python=random.setstate,
        of_torch=torch.set_rng_state,
        of_numpy=None if numpy is None else numpy.random.set_state,
        of_device=lambda saved: torch.get_device_module(device).set_rng_state(saved, device),
    )


def _put_back(
    state: Mapping[str, Any],
    device: torch.device,
    *,
    of_python: Callable[[Any], Any],
    of_torch: Callable[[Any], Any],
    of_numpy: Callable[[Any], Any] | None,
    of_device: Callable[[Any], Any],
) -> None:
    if "python" in state:
        version, words, gauss = state["python"]
        if not (gauss is None or type(gauss) is float):  # taken as it is, and drawn next
            raise TypeError(f"Python's generator has {gauss!r} kept for its next draw")
        of_python((version, tuple(words), gauss))
    if "torch" in state:
        of_torch(state["torch"])
    if of_numpy is not None and "numpy" in state:
        kind, keys, position, has_gauss, cached = state["numpy"]
        # numpy does not check the position, and would read memory beyond its words.
        if not (type(position) is int and 0 <= position <= len(keys)):
            raise ValueError(f"numpy's generator stands at word {position!r} of {len(keys)}")
        of_numpy((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
    if device.type != "cpu" and device.type in state:
        of_device(state[device.type])
