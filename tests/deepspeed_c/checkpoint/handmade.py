"""Checkpoints that are written by hand from docs/concepts/checkpoint.md alone. They may have cuts that our engines do
not make, and false numbers."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["BLOCK_BYTES", "crc32c", "manifest_of", "payload_entry", "put_manifest", "state_entry", "write_pieces"]

# The writer uses another size: a reader must take the size from the manifest.
BLOCK_BYTES = 4096
_NAMES = {"float32": "F32", "float64": "F64", "int16": "I16", "uint8": "U8", "float16": "F16", "int64": "I64"}


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _table()


def crc32c(content: bytes) -> int:
    """The CRC32C of RFC 3720, computed byte by byte."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def payload_entry(name: str, content: bytes) -> dict[str, Any]:
    blocks = [content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES)]
    crcs = b"".join(struct.pack("<I", crc32c(block)) for block in blocks)
    return {"name": name, "n_bytes": len(content), "crc32c": base64.b64encode(crcs).decode()}


def state_entry(name: str, content: bytes) -> dict[str, Any]:
    return {"name": name, "n_bytes": len(content), "crc32c": crc32c(content)}


def write_pieces(
    folder: Path, pieces: Sequence[tuple[int, str, np.ndarray, Sequence[slice] | None, int, int]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Write pieces (file, name, whole array, box or None, begin, elements) into files, with noise between the pieces.
    Return the entries for files and for tensors of a manifest."""
    contents: dict[int, bytearray] = {}
    tensors: dict[str, dict[str, Any]] = {}
    for at, (file, name, array, box, begin, n_elems) in enumerate(pieces):
        content = contents.setdefault(file, bytearray(b"\xab" * (8 + file)))
        content += b"\xcd" * (-len(content) % array.itemsize + array.itemsize * (at % 3))
        part = array if box is None else array[tuple(box)]
        entry = tensors.setdefault(
            name,
            {
                "name": name,
                "kind": "param",
                "shape": list(array.shape),
                "dtype": _NAMES[str(array.dtype)],
                "pieces": [],
            },
        )
        cut = [None, None] if box is None else [[s.start for s in box], [s.stop - s.start for s in box]]
        entry["pieces"].append([file, len(content), begin, n_elems, *cut])
        content += part.reshape(-1)[begin : begin + n_elems].tobytes()
    files = []
    for file in range(max(contents, default=-1) + 1):
        name, content = f"rank_{file:05d}.safetensors", bytes(contents.get(file, b""))
        (folder / name).write_bytes(content)
        files.append(payload_entry(name, content))
    return files, list(tensors.values())


def manifest_of(files: list[dict[str, Any]], tensors: list[dict[str, Any]], **changed: Any) -> dict[str, Any]:
    return {
        "format": "deepspeed_c", "version": 1, "tag": "handmade", "block_bytes": BLOCK_BYTES,
        "topology": {"world_size": max(len(files), 1), "stage": 0}, "counters": {"global_steps": 3},
        "versions": {"author": "hand"}, "excludes_frozen": False, "files": files, "states": [], "tensors": tensors,
        "aliases": {}, "params": {}, "config": {}, **changed,
    }  # fmt: skip


def put_manifest(folder: Path, manifest: Any, checksum: Callable[[bytes], int] = crc32c) -> None:
    """Writes a manifest with its true checksum. ``manifest``: a document to write as JSON, or the bytes of the file."""
    content = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(content)
    (folder / "manifest.crc32c").write_text(f"{checksum(content):08x}\n")
