"""Opens any checkpoint for reading, and recognises its format from the files there."""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Callable

from deepspeed_c.checkpoint.formats.huggingface import INDEX_FILE, SINGLE_FILE, HuggingFaceSource
from deepspeed_c.checkpoint.native.commit import find_tag, read_latest
from deepspeed_c.checkpoint.native.held import OPEN_ATTEMPTS, read_held
from deepspeed_c.checkpoint.native.manifest import MANIFEST
from deepspeed_c.checkpoint.native.reader import NativeSource
from deepspeed_c.checkpoint.source import Source
from deepspeed_c.errors import CheckpointError

__all__ = ["FORMATS", "find_checkpoint", "format_of", "open_checkpoint", "read_latest_universal"]

LATEST_UNIVERSAL = "latest_universal"
DCP_METADATA = ".metadata"
_OUR_PAYLOAD = re.compile(r"rank_\d{5}\.safetensors")


# Readers are imported when their format is found, since each brings in further modules.


def _open_deepspeed(folder: str) -> Source:
    from deepspeed_c.checkpoint.formats.deepspeed import open_deepspeed

    return open_deepspeed(folder)


def _open_dcp(folder: str) -> Source:
    from deepspeed_c.checkpoint.formats.dcp import DcpSource

    return DcpSource(folder)


# Name of the format -> function that opens it.
FORMATS: dict[str, Callable[[str], Source]] = {
    "deepspeed_c": NativeSource,
    "deepspeed": _open_deepspeed,
    "deepspeed-universal": _open_deepspeed,
    "torch-dcp": _open_dcp,
    "huggingface": HuggingFaceSource,
}


def format_of(path: str) -> str | None:
    """The format of the checkpoint that ``path`` itself is, by the names of its files; None if it is none, or a folder
    of several tags.
    """
    if os.path.isfile(path):
        return "huggingface" if path.endswith((".safetensors", ".safetensors.index.json")) else None
    try:
        return read_held(path, _format_in)
    except OSError:
        return None


def _format_in(folder: int) -> str | None:
    names = set(os.listdir(folder))
    # Includes a folder that has lost its manifest, so that the error can say so.
    if MANIFEST in names or any(_OUR_PAYLOAD.fullmatch(name) for name in names):
        return "deepspeed_c"
    if DCP_METADATA in names:
        return "torch-dcp"
    if "zero" in names and stat.S_ISDIR(os.stat("zero", dir_fd=folder).st_mode):
        return "deepspeed-universal"
    if any(name.endswith(("_model_states.pt", "_optim_states.pt")) for name in names):
        return "deepspeed"
    if names & {SINGLE_FILE, INDEX_FILE}:
        return "huggingface"
    return None


def find_checkpoint(path: str | os.PathLike[str], tag: str | None = None) -> tuple[str, str]:
    """(folder or file of one checkpoint, its format): ``path`` itself, ``tag`` below it, or without a tag the
    checkpoint that ``latest`` names.

    Raises CheckpointError where no format is recognised.
    """
    where = os.fspath(path)
    if tag is None:
        found = format_of(where)
        if found is not None:
            return where, found
        tag = read_latest(where) or read_latest_universal(where)
    if tag is not None:
        # On a file system that cannot exchange names, a save leaves the name without a folder for an instant.
        for _ in range(OPEN_ATTEMPTS):
            folder = find_tag(where, tag)
            found = format_of(folder)
            if found is not None:
                return folder, found
        raise CheckpointError(
            "is no checkpoint" if os.path.exists(folder) else "does not exist",
            where=folder,
            fix=f"there are {_tags(where)}" if _tags(where) else _LOOKED_FOR,
        )
    if _tags(where):
        raise CheckpointError(
            "has no file `latest` that names one of its checkpoints",
            where=where,
            fix=f"name a tag: there are {_tags(where)}",
        )
    what = (
        "holds no checkpoint"
        if os.path.isdir(where)
        else "is no checkpoint"
        if os.path.exists(where)
        else "does not exist"
    )
    raise CheckpointError(what, where=where, fix=_LOOKED_FOR)


_LOOKED_FOR = (
    f"name a folder with `latest`, {MANIFEST} (deepspeed_c), *_model_states.pt (DeepSpeed), zero/ (DeepSpeed's universal format), "
    f"{DCP_METADATA} (torch DCP), {SINGLE_FILE} or {INDEX_FILE} (Hugging Face), or a .safetensors file"
)


def open_checkpoint(path: str | os.PathLike[str], tag: str | None = None, *, form: str | None = None) -> Source:
    """The checkpoint at ``path`` (see ``find_checkpoint``), open for reading.

    ``form``, a key of ``FORMATS``, requires that format.

    Raises CheckpointError if there is no checkpoint, if it has another format, or if it is damaged.
    """
    folder, found = find_checkpoint(path, tag)
    for attempt in itertools.count(1):
        before = folder, found, _identity(folder)
        if form is not None and form != found:
            raise CheckpointError(
                f"is a checkpoint of format {found}, not {form}", where=folder, fix=f"read it as {found}"
            )
        try:
            return FORMATS[found](folder)
        except CheckpointError:
            # A save, or retention, may have moved the name to another folder (see ``find_tag``, ``latest``).
            folder, found = find_checkpoint(path, tag)
            if attempt == OPEN_ATTEMPTS or (folder, found, _identity(folder)) == before:
                raise


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def read_latest_universal(folder: str) -> str | None:
    """The tag that DeepSpeed's converter to its universal format has left in ``latest_universal``; None where there is
    no such file.
    """
    try:
        with open(os.path.join(folder, LATEST_UNIVERSAL), encoding="utf-8") as file:
            return file.read(4096).strip() or None
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return None


def _tags(folder: str) -> str:
    """The checkpoints below ``folder``, for a message."""
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError:
        return ""
    return ", ".join(
        name for name in names if os.path.isdir(os.path.join(folder, name)) and format_of(os.path.join(folder, name))
    )
