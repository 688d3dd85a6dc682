"""Writes a checkpoint: every rank writes its pieces into its own file, and one rename commits all files (see
commit.py).
"""

from __future__ import annotations

import base64
import contextlib
import math
import os
import platform
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch

from deepspeed_c import _C
from deepspeed_c._version import __version__
from deepspeed_c.checkpoint.formats.weight_file import FileEntry, SafetensorsPlan
from deepspeed_c.checkpoint.native import state as state_files
from deepspeed_c.checkpoint.native.commit import (
    LATEST,
    apply_retention,
    check_tag,
    commit_folder,
    keep_from_retention,
    make_temporary,
    remove_stale,
    remove_tree,
    write_durably,
    write_latest,
)
from deepspeed_c.checkpoint.native.manifest import (
    BLOCK_BYTES,
    FORMAT,
    VERSION,
    Manifest,
    Number,
    ParamEntry,
    PayloadFile,
    Piece,
    StateFile,
    TensorEntry,
    TopologyEntry,
    dtype_name,
    encode_number,
    write_manifest,
)
from deepspeed_c.checkpoint.native.ranks import Ranks
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, Box, LogicalTensor, ParamInfo, Read, Source
from deepspeed_c.checkpoint.tools.zero_to_fp32_script import write_script
from deepspeed_c.errors import CheckpointError, DeepSpeedCError, OffloadError
from deepspeed_c.logging import logger

__all__ = ["Contents", "Deferred", "Destination", "OwnedPiece", "save", "write_native"]

_T = TypeVar("_T")

# Size of the pieces that are copied from an accelerator to be written.
STAGING_BYTES = 32 << 20


class Deferred(NamedTuple):
    """A flat tensor that is not in memory until it is written."""

    dtype: torch.dtype
    n_elems: int
    read: Callable[[], torch.Tensor]
    """The whole tensor, on any device; valid until the next tensor is read."""

    def numel(self) -> int:
        return self.n_elems


class OwnedPiece(NamedTuple):
    """The part of a logical tensor that this rank writes: elements [begin, begin + data.numel()) of it, or of ``box``,
    in row-major order.

    ``data`` is flat and contiguous, on any device.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    begin: int
    data: torch.Tensor | Deferred
    box: Box | None = None


@dataclass(kw_only=True)
class Contents:
    """A rank's contribution to a checkpoint.

    Only rank 0's ``common``, ``names``, ``aliases``, ``counters`` and ``config`` count.

    Nothing of it may change until it is written; state comes packed for that reason.
    """

    pieces: list[OwnedPiece]
    stage: int
    axes: dict[str, int] = field(default_factory=dict)
    """Axes of the mesh that have more than one rank."""
    expert_parallel: int = 1
    """The largest number of ranks that experts of a layer are spread over."""
    params: dict[str, ParamInfo] = field(default_factory=dict)
    """Parameters that this rank owns a piece of, or all parameters."""
    names: list[str] = field(default_factory=list)
    """All names, in the module's order."""
    aliases: dict[str, str] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    common: bytes = b""
    mine: bytes | None = None
    excludes_frozen: bool = False


@dataclass(frozen=True, kw_only=True)
class Destination:
    """The folder of a new checkpoint, and the rules for keeping older ones."""

    save_dir: str
    tag: str
    save_latest: bool = True
    keep_last: int | None = None
    keep_every: int | None = None
    is_node_local: bool = False
    convert: Callable[[str, str, int], None] | None = None
    """Writes this rank's files of another format: (folder of a complete checkpoint of ours, folder to write into,
    rank).
    """
    leads: bool = True
    """Whether this rank makes and commits the folder: rank 0, or the first of each node where folders are node-local.
    """

    @property
    def path(self) -> str:
        return os.path.join(self.save_dir, self.tag)


class _RankIndex(msgspec.Struct):
    """Index of the files that one rank has written."""

    files: list[PayloadFile]
    states: list[StateFile]
    tensors: list[TensorEntry]
    params: dict[str, ParamEntry]


def save(contents: Contents, destination: Destination, ranks: Ranks) -> None:
    """Writes and commits a checkpoint.

    Collective. Returns when it is durable; raises CheckpointError on all ranks alike, with nothing changed then.
    """
    check_tag(destination.tag)
    made: list[str] = []
    where, leads = destination.path, destination.leads
    try:
        folder = _agree_on_folder(destination, ranks)
        made.append(folder)
        index = _together(ranks, where, lambda: msgspec.msgpack.encode(_write_rank(folder, contents, ranks)))
        gathered = ranks.gather(index)
        merged = _together(
            ranks, where, lambda: _merge(gathered, contents, destination.tag, ranks.world_size) if gathered else None
        )
        manifest = ranks.broadcast(merged) if destination.is_node_local else merged
        _together(ranks, where, lambda: write_manifest(folder, manifest, write_durably) if leads else None)
        if destination.convert is not None:
            native, folder = folder, _agree_on_folder(destination, ranks)
            made.append(folder)
            _together(ranks, where, lambda: destination.convert(native, folder, ranks.rank))
        _commit(folder, destination, ranks)
    finally:
        if leads:
            for path in made:  # a committed folder has another name by now
                remove_tree(path)


_NOT_WRITTEN = "the checkpoint was not written"
_NOT_WRITTEN_FIX = (
    "free space or repair the file system there, or save elsewhere; the checkpoints before this one are untouched"
)


def _together(
    ranks: Ranks, where: str, action: Callable[[], _T], what: str = _NOT_WRITTEN, fix: str = _NOT_WRITTEN_FIX
) -> _T:
    """Does something on every rank.

    Raises CheckpointError (``what`` and the reason) on all of them when it has failed on one.
    """
    # The other ranks must be told in every case, because they would wait for this rank.
    problem = f"rank {ranks.rank} ended unexpectedly"
    try:
        result = action()
        problem = ""
    except (OSError, CheckpointError, OffloadError) as error:
        problem = _explain(error, ranks.rank)
    finally:
        problems = ranks.all_gather(problem)
    problem = next((p for p in problems if p), "")
    if problem:
        raise CheckpointError(f"{what}: {problem}", where=where, fix=fix)
    return result


def _agree_on_folder(destination: Destination, ranks: Ranks) -> str:
    """The temporary folder that this rank writes into, made by its leader."""
    folder, problem = "", ""
    if destination.leads:
        try:
            remove_stale(destination.save_dir)
            folder = make_temporary(destination.save_dir, destination.tag)
        except OSError as error:
            problem = _explain(error, ranks.rank)
    host = socket.gethostname() if destination.is_node_local else ""
    offers = ranks.all_gather((host, folder, problem))
    problem = next((p for _, _, p in offers if p), "")
    mine = next((path for its_host, path, _ in offers if path and its_host == host), "")
    if not problem and not all(any(path and h == its for h, path, _ in offers) for its, _, _ in offers):
        problem = "a node has no rank with local rank 0 to make the folder"
    elif not problem:
        # All ranks must see the same folder: with a path that is local to each machine, the files of other machines
        # would be lost.
        is_visible = os.path.isdir(mine)
        seen = ranks.all_gather(is_visible)
        if not all(seen):
            problem = (
                f"rank {seen.index(False)} does not see the folder that rank 0 has made: it is not on a file system that all nodes"
                ' share (set "checkpoint": {"use_node_local_storage": true} if that is meant)'
            )
    if problem:
        if folder:
            remove_tree(folder)
        raise CheckpointError(
            f"the checkpoint's folder cannot be made: {problem}",
            where=destination.path,
            fix="save to a folder that all ranks may write to",
        )
    return mine


def _explain(error: Exception, rank: int) -> str:
    if isinstance(error, DeepSpeedCError):
        return f"rank {rank}: {error.where}: {error.what}" if error.where else error.what
    return f"rank {rank}: {error.filename or ''}: {error.strerror or error}"


def _commit(folder: str, destination: Destination, ranks: Ranks) -> None:
    """Gives a complete folder its name, then makes ``latest`` name it.

    Collective; raises CheckpointError on all ranks alike.
    """
    save_dir, tag, leads = destination.save_dir, destination.tag, destination.leads
    with contextlib.ExitStack() as held:
        if leads:
            held.enter_context(keep_from_retention(save_dir))
        _together(ranks, destination.path, lambda: commit_folder(folder, save_dir, tag) if leads else None)
        _together(
            ranks,
            destination.path,
            lambda: _announce(destination, held) if leads else None,
            what=f"the checkpoint is complete, and only {LATEST!r} does not name it",
            fix=f"load it by its tag, or free space and write {tag!r} into {os.path.join(save_dir, LATEST)}",
        )


def _announce(destination: Destination, held: contextlib.ExitStack) -> None:
    if destination.save_latest:
        write_latest(destination.save_dir, destination.tag)
    held.close()
    _tidy(destination)


def _tidy(destination: Destination) -> None:
    """Writes the script beside the tags, and deletes older checkpoints that are not kept.

    The checkpoint is complete already, so no failure here may make the save fail.
    """
    try:
        write_script(destination.save_dir)
        removed = apply_retention(
            destination.save_dir,
            destination.tag,
            destination.keep_last,
            destination.keep_every,
            counts_deepspeed=destination.convert is not None,
        )
    except OSError as error:
        logger.warning("%s: %s", destination.save_dir, error)
        return
    if removed:
        logger.info("%s: deleted %s (keep_last)", destination.save_dir, ", ".join(removed))


def _write_rank(folder: str, contents: Contents, ranks: Ranks) -> _RankIndex:
    index = _RankIndex([], [], [], {name: _param_entry(name, info) for name, info in contents.params.items()})
    if contents.pieces:
        path = os.path.join(folder, f"rank_{ranks.rank:05d}.safetensors")
        for piece in contents.pieces:
            dtype_name(piece.data.dtype, f"{piece.kind} of {piece.name}")
        file, offsets = _write_payload(
            path, [_entry(piece) for piece in contents.pieces], lambda i: _host_parts(contents.pieces[i].data)
        )
        index.files.append(file)
        index.tensors = _entries(contents.pieces, offsets)
    states = {}
    if ranks.rank == 0:
        states["state.pt"] = contents.common
    if contents.mine is not None:
        states[f"rank_{ranks.rank:05d}.pt"] = contents.mine
    for name, content in states.items():
        index.states.append(_write_state(folder, name, content))
    return index


def _write_state(folder: str, name: str, content: bytes) -> StateFile:
    write_durably(os.path.join(folder, name), content)
    return StateFile(name, len(content), _C.crc32c(content))


def _param_entry(name: str, info: ParamInfo) -> ParamEntry:
    counts: dict[str, tuple[Number, str]] = {}
    for key, value in info.counts.items():
        if torch.is_tensor(value) and value.numel() == 1:
            counts[key] = (encode_number(value.item()), dtype_name(value.dtype, f"{key} of {name}"))
        elif isinstance(value, (int, float)):
            counts[key] = (encode_number(value), "")
        elif value is not None:
            raise CheckpointError(
                f"the optimizer's {key!r} is a {type(value).__name__}"
                + (f" of shape {tuple(value.shape)}" if torch.is_tensor(value) else "")
                + ", neither in the parameter's shape nor a number",
                where=name,
                fix="at stage 0 such states can be saved; or use an optimizer whose states are elementwise",
            )
    return ParamEntry(info.group, counts)


def _write_payload(
    path: str, entries: Sequence[FileEntry], parts_of: Callable[[int], Iterable[torch.Tensor]]
) -> tuple[PayloadFile, list[int]]:
    """Writes a safetensors file. Returns its entry for the manifest, and where each tensor begins.

    ``parts_of(i)`` gives the elements of entry ``i`` in host memory, each part valid until the next is asked for.
    """
    plan = SafetensorsPlan(path, entries, {})
    offsets = [plan.payload_offset[entry.name] for entry in entries]
    writer = _C.BlockWriter(path, BLOCK_BYTES)
    try:
        for offset, content in plan.frame({}):
            if offset != writer.n_bytes:
                raise CheckpointError(f"the header belongs at byte {offset}", where=path)
            writer.write_bytes(content)
        for i in sorted(range(len(entries)), key=offsets.__getitem__):
            for part in parts_of(i):
                writer.write(part.data_ptr(), part.nbytes)
        crcs = writer.finish()
    except BaseException:
        writer.abort()
        raise
    return PayloadFile(os.path.basename(path), plan.total_bytes, base64.b64encode(crcs).decode()), offsets


def _entry(piece: OwnedPiece) -> FileEntry:
    n_elems = piece.data.numel()
    shape = piece.shape if n_elems == math.prod(piece.shape) else (n_elems,)
    return FileEntry(_entry_name(piece), shape, piece.data.dtype)


def _entry_name(piece: OwnedPiece) -> str:
    """The key of a piece in its file: unique there, and readable."""
    name = f"{piece.kind}:{piece.name}"
    if piece.box is not None:
        name += "[" + ",".join(f"{low}:{low + size}" for low, size in zip(*piece.box)) + "]"
    n_elems = piece.data.numel()
    whole = math.prod(piece.shape if piece.box is None else piece.box.size)
    return name if n_elems == whole else f"{name}[{piece.begin}:{piece.begin + n_elems}]"


def _host_parts(data: torch.Tensor | Deferred) -> Iterator[torch.Tensor]:
    """``data`` in host memory, each part valid until the next is asked for."""
    if data.numel() == 0:
        return
    if isinstance(data, Deferred):
        data = data.read()
    if data.device.type == "cpu":
        yield data
        return
    step = STAGING_BYTES // data.itemsize
    staging = torch.empty(min(step, data.numel()), dtype=data.dtype, pin_memory=True)
    for part in data.split(step):
        host = staging.narrow(0, 0, part.numel())
        host.copy_(part)
        yield host


def _entries(pieces: Sequence[OwnedPiece], offsets: Sequence[int]) -> list[TensorEntry]:
    entries: dict[tuple[str, str], TensorEntry] = {}
    for piece, offset in zip(pieces, offsets):
        entry = entries.get((piece.kind, piece.name))
        if entry is None:
            dtype = dtype_name(piece.data.dtype, piece.name)
            entry = TensorEntry(piece.name, piece.kind, tuple(piece.shape), dtype, [])
            entries[piece.kind, piece.name] = entry
        box = piece.box or (None, None)
        entry.pieces.append(Piece(0, offset, piece.begin, piece.data.numel(), *box))
    return list(entries.values())


def _merge(gathered: Sequence[bytes], contents: Contents, tag: str, n_ranks: int) -> Manifest:
    """The manifest of the files that all ranks have written. Raises CheckpointError if tensors are incomplete."""
    manifest = Manifest(
        format=FORMAT,
        version=VERSION,
        tag=tag,
        block_bytes=BLOCK_BYTES,
        topology=TopologyEntry(
            n_ranks,
            contents.stage,
            contents.axes.get("tp", 1),
            axes=contents.axes,
            expert_parallel=contents.expert_parallel,
        ),
        counters=dict(contents.counters),
        versions={"deepspeed_c": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        excludes_frozen=contents.excludes_frozen,
        files=[],
        states=[],
        tensors=[],
        aliases=dict(contents.aliases),
        params={},
        config=contents.config,
    )
    tensors: dict[tuple[str, str], TensorEntry] = {}
    for encoded in gathered:
        index = msgspec.msgpack.decode(encoded, type=_RankIndex)
        at = len(manifest.files)
        manifest.files += index.files
        manifest.states += index.states
        for name, entry in index.params.items():
            known = manifest.params.setdefault(name, entry)
            if not known.counts and entry.counts:
                manifest.params[name] = entry
        for entry in index.tensors:
            known = tensors.setdefault((entry.kind, entry.name), entry)
            pieces = [msgspec.structs.replace(piece, file=at) for piece in entry.pieces]
            if known is entry:
                entry.pieces = pieces
            elif known.shape != entry.shape or known.dtype != entry.dtype:
                raise CheckpointError(
                    f"ranks disagree: {known.shape} {known.dtype} and {entry.shape} {entry.dtype}",
                    where=f"{entry.kind} of {entry.name}",
                )
            else:
                known.pieces += pieces
    order = {name: i for i, name in enumerate(contents.names)}
    kinds = {PARAM: 0, MASTER: 1, BUFFER: 3}
    manifest.tensors = sorted(
        tensors.values(), key=lambda t: (kinds.get(t.kind, 2), t.kind, order.get(t.name, len(order)), t.name)
    )
    manifest.params = dict(sorted(manifest.params.items(), key=lambda item: order.get(item[0], len(order))))
    for entry in manifest.tensors:
        saved = sum(piece.n_elems for piece in entry.pieces)
        if saved < math.prod(entry.shape):
            raise CheckpointError(
                f"the ranks hold {saved} of its {math.prod(entry.shape)} elements",
                where=f"{entry.kind} of {entry.name}",
            )
    return manifest


# Memory for a tensor that is carried over.
CARRY_BYTES = 16 << 20


def write_native(source: Source, save_dir: str, tag: str) -> None:
    """Writes any checkpoint in our format, in one process and file, one tensor at a time."""
    ranks = Ranks(0, [0])
    state = dict(source.state)
    counters = state.pop("counters", {})
    config, _ = state.pop("config", {}), state.pop("versions", None)
    rank_states = {r: source.rank_state(r) for r in range(source.topology.world_size)}
    contents = Contents(
        pieces=[],
        stage=source.topology.stage,
        params=dict(source.params),
        names=list(dict.fromkeys(name for _, name in source.tensors)),
        aliases=dict(source.aliases),
        counters=counters,
        config=config,
        excludes_frozen=bool(state.pop("excludes_frozen", False)),
        common=state_files.pack({**state, "groups": source.groups}, "state.pt"),
    )
    destination = Destination(save_dir=save_dir, tag=check_tag(tag))
    try:
        remove_stale(save_dir)
        folder = make_temporary(save_dir, tag)
    except OSError as error:
        raise CheckpointError(_explain(error, 0), where=destination.path, fix="write elsewhere") from error
    try:
        index = _write_rank(folder, contents, ranks)
        index.files, index.tensors = _carry_payload(folder, source)
        for rank, mine in rank_states.items():
            if mine is not None:
                name = f"rank_{rank:05d}.pt"
                index.states.append(_write_state(folder, name, state_files.pack(mine, name)))
        manifest = _merge([msgspec.msgpack.encode(index)], contents, tag, 1)
        topology = TopologyEntry(
            source.topology.world_size,
            source.topology.stage,
            source.topology.tensor_parallel,
            source.topology.pipeline_parallel,
            dict(source.topology.axes),
            source.topology.expert_parallel,
        )
        write_manifest(folder, msgspec.structs.replace(manifest, topology=topology), write_durably)
        _commit(folder, destination, ranks)
    except OSError as error:
        raise CheckpointError(_explain(error, 0), where=destination.path, fix="write elsewhere") from error
    finally:
        remove_tree(folder)  # a committed folder has another name by now


def _carry_payload(folder: str, source: Source) -> tuple[list[PayloadFile], list[TensorEntry]]:
    tensors = list(source.tensors.values())
    if not tensors:
        return [], []
    file, offsets = _write_payload(
        os.path.join(folder, "rank_00000.safetensors"),
        [FileEntry(f"{t.kind}:{t.name}", t.shape, t.dtype) for t in tensors],
        lambda i: _carried_parts(source, tensors[i]),
    )
    entries = [
        TensorEntry(t.name, t.kind, t.shape, dtype_name(t.dtype, t.name), [Piece(0, offset, 0, math.prod(t.shape))])
        for t, offset in zip(tensors, offsets)
    ]
    return [file], entries


def _carried_parts(source: Source, tensor: LogicalTensor) -> Iterator[torch.Tensor]:
    numel, step = math.prod(tensor.shape), max(CARRY_BYTES // tensor.dtype.itemsize, 1)
    for begin in range(0, numel, step):
        part = torch.empty(min(step, numel - begin), dtype=tensor.dtype)
        source.read([Read(tensor, begin, part)])
        yield part
