"""Reads checkpoints in the format of deepspeed_c, by ranges of tensors, whatever ranks have written them."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import stat
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from deepspeed_c import _C
from deepspeed_c.checkpoint.native import state as state_files
from deepspeed_c.checkpoint.native.held import OPEN_ATTEMPTS, hold, was_replaced
from deepspeed_c.checkpoint.native.manifest import (
    DTYPES,
    Manifest,
    ParamEntry,
    PayloadFile,
    Piece,
    StateFile,
    TensorEntry,
    decode_number,
    read_checksum,
    read_manifest,
)
from deepspeed_c.checkpoint.source import Box, LogicalTensor, ParamInfo, Read, Source, Topology
from deepspeed_c.errors import CheckpointError

__all__ = ["NativeSource"]

# Host memory that conversions (to another dtype, or to an accelerator) take at a time.
CONVERSION_BYTES = 32 << 20
# Tensors that a message names before it only counts.
NAMES_SHOWN = 5
# Descriptors that one checkpoint takes; the usual limit of a process is 1024.
FILES_KEPT_OPEN = 64
# Types of the entries that state.pt may have.
_STATE_TYPES = {"client_state": dict, "extra_state": dict, "groups": list, "loss_scaler": dict, "pipeline": dict}


class NativeSource(Source):
    """One checkpoint of ours, as it was when it was opened: a save that replaces it meanwhile does no harm.

    (Of more than ``FILES_KEPT_OPEN`` files the rest may have been deleted when they are asked for; ``was_replaced``
    then tells that opening it again is worth while.)
    """

    format = "deepspeed_c"

    def __init__(self, folder: str) -> None:
        self.where = folder
        self._folder, self._files = -1, {}
        for attempt in range(OPEN_ATTEMPTS):
            try:
                self._open()
                return
            except BaseException as error:
                is_other = self._folder >= 0 and self.was_replaced
                self.close()
                if not (isinstance(error, CheckpointError) and is_other and attempt < OPEN_ATTEMPTS - 1):
                    raise

    def _open(self) -> None:
        # The folder is opened first. Everything else is found through its descriptor, even if another folder gets the
        # name meanwhile.
        try:
            self._folder = hold(self.where)
        except OSError as error:
            raise CheckpointError(
                f"cannot be opened: {error.strerror}", where=self.where, fix="load another tag"
            ) from error
        self.manifest: Manifest = read_manifest(self.where, self._folder)
        self.identity = read_checksum(self.where, self._folder)
        self._check_files()
        self._entries = {(entry.kind, entry.name): entry for entry in self.manifest.tensors}
        self.tensors = {
            key: LogicalTensor(name=entry.name, kind=entry.kind, shape=tuple(entry.shape), dtype=DTYPES[entry.dtype])
            for key, entry in self._entries.items()
        }
        self.aliases = dict(self.manifest.aliases)
        self.params = {
            name: ParamInfo(group=entry.group, counts=_counts_of(entry)) for name, entry in self.manifest.params.items()
        }
        topology = self.manifest.topology
        self.topology = Topology(
            world_size=topology.world_size,
            stage=topology.stage,
            tensor_parallel=topology.tensor_parallel,
            pipeline_parallel=topology.pipeline_parallel,
            axes=topology.axes,
            expert_parallel=topology.expert_parallel,
        )
        common = self._state("state.pt") or {}
        for key, kind in _STATE_TYPES.items():
            if not isinstance(common.get(key, kind()), kind):
                raise self._odd_state("state.pt", f"{key} is a {type(common[key]).__name__} and no {kind.__name__}")
        for g, group in enumerate(common.get("groups", ())):
            if not isinstance(group, dict) or not all(isinstance(key, str) for key in group):
                raise self._odd_state("state.pt", f"group {g} of the optimizer is no dict of options")
        self.groups = common.pop("groups", [])
        self.state = {
            **common,
            "counters": dict(self.manifest.counters),
            "config": self.manifest.config,
            "versions": dict(self.manifest.versions),
            "excludes_frozen": self.manifest.excludes_frozen,
        }

    @property
    def was_replaced(self) -> bool:
        """Whether the name under which the checkpoint was opened now belongs to another folder or to none."""
        return was_replaced(self.where, self._folder)

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        folder, self._folder = self._folder, -1
        if folder >= 0:
            os.close(folder)

    def _check_files(self) -> None:
        """All files are there and have their sizes: known before anything is loaded.

        As many as may be are kept open, so that nobody deletes them under a reader.
        """
        for i, file in enumerate((*self.manifest.files, *self.manifest.states)):
            try:
                if i < FILES_KEPT_OPEN:
                    self._files[file.name] = os.open(
                        file.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self._folder
                    )
                    found = os.fstat(self._files[file.name])
                else:
                    found = os.stat(file.name, dir_fd=self._folder)
            except OSError as error:
                raise CheckpointError(
                    f"cannot be read: {error.strerror}",
                    where=os.path.join(self.where, file.name),
                    fix="the checkpoint is incomplete: load another tag, or put the file back",
                ) from error
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointError(
                    "is no regular file", where=os.path.join(self.where, file.name), fix="load another tag"
                )
            if found.st_size != file.n_bytes:
                raise CheckpointError(
                    f"has {found.st_size} bytes, and {file.n_bytes} were written",
                    where=os.path.join(self.where, file.name),
                    fix="the checkpoint is damaged: load another tag, or put the file back",
                )

    def read(self, reads: Sequence[Read]) -> None:
        direct: dict[int, array] = {}
        pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        pending_bytes = 0
        for wanted in reads:
            dtype = wanted.tensor.dtype
            if wanted.into.numel() == 0:
                continue
            if wanted.into.dtype == dtype and wanted.into.device.type == "cpu":
                self._place(wanted, wanted.into, direct)
                continue
            step = max(CONVERSION_BYTES // dtype.itemsize, 1)
            for at in range(0, wanted.into.numel(), step):
                into = wanted.into.narrow(0, at, min(step, wanted.into.numel() - at))
                if pending_bytes + into.numel() * dtype.itemsize > CONVERSION_BYTES:
                    self._convert(direct, pending)
                    direct, pending, pending_bytes = {}, [], 0
                held = torch.empty(into.numel(), dtype=dtype, pin_memory=into.device.type == "cuda")
                self._place(wanted._replace(begin=wanted.begin + at), held, direct)
                pending.append((into, held))
                pending_bytes += held.nbytes
        self._convert(direct, pending)

    def _convert(self, direct: Mapping[int, array], pending: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for file in sorted(direct):
            self._read_file(self.manifest.files[file], direct[file])
        with torch.no_grad():
            for into, held in pending:
                into.copy_(held)

    def _place(self, wanted: Read, into: torch.Tensor, copies: dict[int, array]) -> None:
        """Adds to ``copies`` the ranges that fill ``into``: (byte in the file, bytes, address) for each file."""
        entry = self._entries.get(wanted.tensor.key)
        if entry is None:
            raise CheckpointError(f"holds no {wanted.tensor.kind} of {wanted.tensor.name}", where=self.where)
        itemsize, address = into.itemsize, into.data_ptr()
        for piece, first, at, n_elems in self._runs(entry, wanted.begin, into.numel(), wanted.box):
            copies.setdefault(piece.file, array("q")).extend(
                (piece.offset + first * itemsize, n_elems * itemsize, address + at * itemsize)
            )

    def _runs(
        self, entry: TensorEntry, begin: int, n_elems: int, box: Box | None
    ) -> Iterator[tuple[Piece, int, int, int]]:
        """(piece, first element within the stored piece, first element within the wanted range, elements)."""
        pieces = entry.pieces
        if box is None and all(piece.start is None for piece in pieces):
            in_order = sorted((piece for piece in pieces if piece.n_elems), key=lambda piece: piece.begin)
            # Where pieces overlap, their order in the list decides: the planner knows it.
            if all(a.begin + a.n_elems <= b.begin for a, b in itertools.pairwise(in_order)):
                yield from self._flat_runs(entry, in_order, begin, n_elems)
                return
        shape, zero = tuple(entry.shape), (0,) * len(entry.shape)
        flat = array("q")
        for piece in pieces:
            flat.extend((*(piece.start or zero), *(piece.size or shape), piece.begin, piece.n_elems))
        start, size = box or (zero, shape)
        try:
            plan = _C.reshape_plan(array("q", shape), flat, len(pieces), array("q", (*start, *size, begin, n_elems)))
        except ValueError as error:
            raise self._incomplete(entry, str(error)) from error
        plan = memoryview(plan).cast("B").cast("q")
        for i in range(0, len(plan), 4):
            yield pieces[plan[i]], plan[i + 1], plan[i + 2], plan[i + 3]

    def _flat_runs(
        self, entry: TensorEntry, pieces: Sequence[Piece], begin: int, n_elems: int
    ) -> Iterator[tuple[Piece, int, int, int]]:
        """The common case: the pieces (in order, without overlap) and the wanted part are flat ranges. It needs no call
        of the core for each tensor.
        """
        at, end = begin, begin + n_elems
        i = max(bisect_right(pieces, at, key=lambda piece: piece.begin) - 1, 0)
        while at < end:
            if i < len(pieces) and pieces[i].begin + pieces[i].n_elems <= at:
                i += 1
            if i == len(pieces) or pieces[i].begin > at:
                raise self._incomplete(entry, f"element {at} is in none of its {len(entry.pieces)} pieces")
            piece = pieces[i]
            n = min(piece.begin + piece.n_elems, end) - at
            yield piece, at - piece.begin, at - begin, n
            at += n

    def _incomplete(self, entry: TensorEntry, why: str) -> CheckpointError:
        return CheckpointError(
            f"the {entry.kind} of {entry.name} (shape {tuple(entry.shape)}) is incomplete: {why}",
            where=self.where,
            fix="load another tag",
        )

    def _read_file(self, file: PayloadFile, copies: array) -> None:
        path = os.path.join(self.where, file.name)
        try:
            _C.read_blocks(self._path_of(file.name), file.n_bytes, self.manifest.block_bytes, file.crcs, copies)
        except _C.BlockError as error:
            raise self._damaged(file, error.block) from error
        except OSError as error:
            raise CheckpointError(
                f"cannot be read: {error.strerror or error}", where=path, fix="load another tag, or put the file back"
            ) from error

    def _path_of(self, name: str) -> str:
        """A path to the file in the folder that was opened, even if that folder has another name by now, or none."""
        if name not in self._files:
            try:
                self._files[name] = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._folder)
            except OSError as error:
                raise CheckpointError(
                    f"cannot be read: {error.strerror}",
                    where=os.path.join(self.where, name),
                    fix="it was deleted or replaced while it was being read: load again",
                ) from error
        path = f"/proc/self/fd/{self._files[name]}"
        return path if os.path.exists("/proc/self/fd") else os.path.join(self.where, name)

    def _damaged(self, file: PayloadFile, block: int) -> CheckpointError:
        low = block * self.manifest.block_bytes
        names = self._names_in(file, low, low + self.manifest.block_bytes)
        return CheckpointError(
            f"bytes {low} to {min(low + self.manifest.block_bytes, file.n_bytes)} do not match their checksum: {names}",
            where=os.path.join(self.where, file.name),
            fix="the file was changed after it had been written: load another tag, or put the file back",
        )

    def _names_in(self, file: PayloadFile, low: int, high: int) -> str:
        """The tensors that have bytes in a range of a file."""
        names = [
            f"{entry.kind} of {entry.name}"
            for entry in self.manifest.tensors
            for piece in entry.pieces
            if self.manifest.files[piece.file] is file
            and piece.offset < high
            and piece.offset + piece.n_elems * DTYPES[entry.dtype].itemsize > low
        ]
        names = list(dict.fromkeys(names)) or ["the file's header"]
        return ", ".join(names[:NAMES_SHOWN]) + (
            f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        )

    def rank_state(self, rank: int) -> dict[str, Any] | None:
        return self._state(f"rank_{rank:05d}.pt")

    def _state(self, name: str) -> dict[str, Any] | None:
        file = next((file for file in self.manifest.states if file.name == name), None)
        if file is None:
            return None
        state = state_files.unpack(self._content(file), os.path.join(self.where, name))
        if not isinstance(state, dict):
            raise self._odd_state(name, f"holds a {type(state).__name__} and no dict")
        return state

    def _odd_state(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(what, where=os.path.join(self.where, name), fix="load another tag")

    def _content(self, file: StateFile) -> bytes:
        path = os.path.join(self.where, file.name)
        try:
            with open(self._path_of(file.name), "rb") as opened:
                content = opened.read()
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}", where=path, fix="load another tag") from error
        if len(content) != file.n_bytes or _C.crc32c(content) != file.crc32c:
            raise CheckpointError("does not match its checksum", where=path, fix="load another tag")
        return content

    def verify(self) -> list[str]:
        """Reads every byte.

        Returns what is wrong, a sentence each; opening has checked that files are there and have their sizes.
        """
        problems: list[str] = []
        for file in self.manifest.files:
            path = os.path.join(self.where, file.name)
            try:
                bad = _C.verify_blocks(self._path_of(file.name), file.n_bytes, self.manifest.block_bytes, file.crcs)
            except OSError as error:
                problems.append(f"{path}: cannot be read: {error.strerror or error}")
                continue
            problems += [str(self._damaged(file, block)).splitlines()[0] for block in bad]
        for state in self.manifest.states:
            try:
                self._content(state)
            except CheckpointError as error:
                problems.append(str(error).splitlines()[0])
        for entry in self.manifest.tensors:
            try:
                with contextlib.closing(self._runs(entry, 0, math.prod(entry.shape), None)) as runs:
                    for _ in runs:
                        pass
            except CheckpointError as error:
                problems.append(str(error).splitlines()[0])
        return problems


def _counts_of(entry: ParamEntry) -> dict[str, Any]:
    """The counts of a parameter as an optimizer holds them."""
    counts = {key: (decode_number(value), dtype) for key, (value, dtype) in entry.counts.items()}
    return {key: torch.tensor(v, dtype=DTYPES[dtype]) if dtype else v for key, (v, dtype) in counts.items()}
