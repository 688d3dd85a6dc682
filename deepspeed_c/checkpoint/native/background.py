"""Saving while training goes on: a copy of this rank's pieces in host memory, and a thread that writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from deepspeed_c.errors import CheckpointError
from deepspeed_c.logging import logger

if TYPE_CHECKING:
    from deepspeed_c.checkpoint.native.save import OwnedPiece

__all__ = ["BackgroundSave", "Save", "Snapshot"]

# Pieces that lie closer than this in memory are copied together, with the bytes between them.
GAP_BYTES = 4096


class Snapshot:
    """Host buffers for copies of pieces. The next save uses them again, so they are only as large as the largest save."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers)

    def take(self, pieces: Sequence[OwnedPiece]) -> list[OwnedPiece]:
        """Copies of ``pieces``, valid until the next ``take``.

        Neighbours in memory are copied at once, so the time depends on bytes and not on the number of pieces.
        """
        # Empty pieces have no address, even if cut from a tensor with one.
        copies = [None if piece.data.numel() else torch.empty(0, dtype=piece.data.dtype) for piece in pieces]
        order = sorted(
            (i for i, piece in enumerate(pieces) if piece.data.numel()),
            key=lambda i: (str(pieces[i].data.device), pieces[i].data.data_ptr()),
        )
        runs: list[list[int]] = []
        end, device = 0, None
        for i in order:
            data = pieces[i].data
            if (
                runs
                and data.device == device
                and 0 <= data.data_ptr() - end <= GAP_BYTES
                and _same_storage(data, pieces[runs[-1][0]].data)
            ):
                runs[-1].append(i)
            else:
                runs.append([i])
            end, device = data.data_ptr() + data.nbytes, data.device
        sizes = [self._span(pieces, run) for run in runs]
        buffer = self._room(
            sum(-(-size // 64) * 64 for size in sizes), any(p.data.device.type == "cuda" for p in pieces)
        )
        at = 0
        for run, size in zip(runs, sizes):
            first = pieces[run[0]].data
            storage = first.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8, device=first.device).set_(
                storage, first.data_ptr() - storage.data_ptr(), (size,)
            )
            held = buffer.narrow(0, at, size)
            held.copy_(whole, non_blocking=True)
            for i in run:
                data = pieces[i].data
                begin = data.data_ptr() - first.data_ptr()
                copies[i] = held.narrow(0, begin, data.nbytes).view(data.dtype)
            at += -(-size // 64) * 64
        if any(piece.data.device.type != "cpu" for piece in pieces):
            torch.accelerator.synchronize()
        return [piece._replace(data=copy) for piece, copy in zip(pieces, copies)]

    @staticmethod
    def _span(pieces: Sequence[OwnedPiece], run: Sequence[int]) -> int:
        last = pieces[run[-1]].data
        return last.data_ptr() + last.nbytes - pieces[run[0]].data.data_ptr()

    def _room(self, n_bytes: int, is_pinned: bool) -> torch.Tensor:
        if not self._buffers or self._buffers[0].numel() < n_bytes:
            self._buffers.clear()  # freed before its successor is allocated
            self._buffers.append(torch.empty(max(n_bytes, 1), dtype=torch.uint8, pin_memory=is_pinned))
        return self._buffers[0]

    def clear(self) -> None:
        self._buffers.clear()


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


class Save:
    """A checkpoint that was requested in the background, but is durable already."""

    def __init__(self, where: str) -> None:
        self.where = where

    def is_done(self) -> bool:
        """Whether the writer has ended; ``wait`` then returns, or raises, at once."""
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Returns when the checkpoint is durable; may be called any number of times.

        Raises CheckpointError, each time, if the save failed (with the reason) or the writer died; TimeoutError after
        ``timeout`` seconds.
        """


class BackgroundSave(Save):
    """A running save. ``wait`` waits for its end; the interpreter does not exit before that."""

    def __init__(self, write: Callable[[], None], where: str) -> None:
        super().__init__(where)
        self._error: BaseException | None = None
        self._is_complete = False
        self._write = write
        self._thread = threading.Thread(target=self._run, name="deepspeed_c checkpoint", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
            self._is_complete = True
        # wait() raises it again, in the thread that requested the save.
        except BaseException as error:  # noqa: BLE001
            self._error = error
            logger.error("the checkpoint in the background failed: %s", error)

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.where}: the checkpoint is not complete after {timeout:g} s")
        if self._is_complete:
            return
        if isinstance(self._error, CheckpointError):
            raise self._error
        raise CheckpointError(
            f"the writer in the background ended without completing: {self._error or 'its thread is dead'}",
            where=self.where,
            fix="save again; the checkpoints before this one are untouched",
        ) from self._error
