"""The text to train on: the Python standard library's own source, which every machine that runs this has."""

from __future__ import annotations

import math
import sysconfig
import zlib
from pathlib import Path

import torch
from torch.utils.data import Dataset

HELD_OUT_PER = 16  # one file in this many is held out from training


class Windows(Dataset):
    """``text`` cut into windows of ``context`` bytes, each with the byte after it: uint8 tensors of context + 1."""

    def __init__(self, text: bytes, context: int) -> None:
        self.bytes = as_tensor(text)
        self.context = context

    def __len__(self) -> int:
        return max(0, (len(self.bytes) - 1) // self.context)

    def __getitem__(self, i: int) -> torch.Tensor:
        if not 0 <= i < len(self):
            raise IndexError(f"window {i} of {len(self)}")
        return self.bytes[i * self.context : (i + 1) * self.context + 1]


def spread(windows: Windows, n: int) -> list[int]:
    """Return the numbers of ``n`` windows, or of all if there are fewer, at equal distances over the text."""
    n = min(n, len(windows))
    return [i * len(windows) // n for i in range(n)]


def standard_library(max_bytes: int = 8 << 20) -> tuple[bytes, bytes]:
    """Return the sources under the standard library's folder as (train, held out), ``max_bytes`` of them together.

    Files are sorted by a checksum of their path. This order is the same on every machine with the same Python. It mixes
    the folders, so that a cut at ``max_bytes`` keeps files of all folders. Whole files are held out, so that no
    held-out window occurs in training.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    ordered = sorted((zlib.crc32(name.encode()), name) for name in sources(root))
    train, held_out, n_bytes = [], [], 0
    for i, (_, name) in enumerate(ordered):
        text = (root / name).read_bytes()
        if n_bytes + len(text) > max_bytes:
            break
        n_bytes += len(text)
        (held_out if i % HELD_OUT_PER == 0 else train).append(text)
    if not train:
        raise FileNotFoundError(f"{root}: no .py files; is this a Python without its standard library's sources?")
    return b"\n".join(train), b"\n".join(held_out)


def sources(root: Path) -> list[str]:
    """Return the ``.py`` files below ``root`` as relative paths, without installed packages, test suites and generated
    tables.
    """
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3"}
    names = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    return [name for name in names if skipped.isdisjoint(name.split("/"))]


def as_tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def unigram_entropy(text: bytes) -> float:
    """Return the loss in nats per byte of the best model that ignores context.

    A model with a lower loss has learned something.
    """
    counts = torch.bincount(as_tensor(text), minlength=256).double()
    p = counts[counts > 0] / counts.sum()
    return float(-(p * p.log()).sum())


def bits(nats: float) -> float:
    return nats / math.log(2)
