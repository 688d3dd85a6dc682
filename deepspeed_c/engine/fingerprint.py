"""The fingerprint of an engine's weights and optimizer states, and the comparison of copies that ranks hold of them."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from deepspeed_c import _C
from deepspeed_c.checkpoint.fingerprint import Fingerprint, TensorPrint
from deepspeed_c.checkpoint.native.save import STAGING_BYTES, OwnedPiece
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import DeepSpeedCError, RankMismatchError, StateError

__all__ = ["RankPrints"]

# Bytes of copies that wait for a pass of the threads, at most by one piece more: so many that the start and end of the
# threads do not count.
COPIED_BYTES = 256 << 20

# The state of a rank's pieces, beside their checksums.
_AS_BEFORE, _OTHERS, _FAILED = range(3)


class _PieceKey(NamedTuple):
    """The elements of a piece within its logical tensor; ``part`` as for ``_C.crc32c_parts``."""

    kind: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stage: int
    """The stage of the pipeline that holds the piece. Each stage that shares a tensor has all of it, in cuts of its
    own."""
    part: tuple[int, ...]


class _HeldPlace(NamedTuple):
    piece: _PieceKey
    whole: int
    """Index of its tensor in the tensors of ``RankPrints``."""
    holders: list[tuple[int, int]]
    """(rank, index in what the rank holds)"""


class RankPrints:
    """Fingerprints of the tensors that the ranks of ``comm`` hold in pieces.

    Ranks send a name of each piece at the first call, and again when the pieces of a rank have changed. All other
    exchanges are one table of checksums.
    """

    def __init__(self, comm: Collectives, stage: int = 0) -> None:
        """stage: this rank's stage of a pipeline."""
        self._comm, self._stage = comm, stage
        self._held: list[list[_PieceKey]] = []  # by rank; empty before the first exchange
        self._places: list[_HeldPlace] = []
        self._wholes: list[_PieceKey] = []  # the tensors of the places, with no part

    def of(self, pieces: Iterable[OwnedPiece], order: Iterable[str]) -> Fingerprint:
        """The fingerprint, the same on every rank. Collective.

        order: names, in the module's order. Raises, on all ranks alike, RankMismatchError if ranks hold the same
        elements with different bytes (it names the first such tensor, and the ranks), and StateError if a rank cannot
        read a piece or if the pieces do not make up whole tensors.
        """
        held: list[_PieceKey] = []
        mine: list[int] = []
        error: DeepSpeedCError | None = None
        try:
            held, mine = self._crcs_of(pieces)
        except DeepSpeedCError as raised:
            error = raised
        of_ranks = self._exchange(held, mine, error, order)
        sums = [0] * len(self._wholes)
        for place, whole, holders in self._places:
            rank, i = holders[0]
            crc = of_ranks[rank][i]
            if len(holders) > 1 and any(of_ranks[rank][i] != crc for rank, i in holders):
                raise _copies_differ(place, {rank: of_ranks[rank][i] for rank, i in holders}, self._comm)
            sums[whole] ^= crc
        return Fingerprint(
            TensorPrint(kind, name, dtype, shape, _C.crc32c_of_parts(crc, math.prod(shape) * dtype.itemsize))
            for (kind, name, dtype, shape, _, _), crc in self._of_all_stages(sums)
        )

    def _exchange(
        self, held: list[_PieceKey], mine: list[int], error: DeepSpeedCError | None, order: Iterable[str]
    ) -> list[list[int]]:
        """The CRCs of each rank, in the order of its ``_held``. Raises an error of a rank on all of them."""
        comm = self._comm
        while True:
            if self._held:
                said = _FAILED if error else _AS_BEFORE if held == self._held[comm.rank] else _OTHERS
                width = 1 + max(map(len, self._held))
                row = [said, *mine] if said == _AS_BEFORE else [said]
                table = [0.0] * (width * comm.world_size)  # a CRC is exact in f64, and so is its sum with zeros
                table[comm.rank * width : comm.rank * width + len(row)] = map(float, row)
                table = comm.sum_numbers(table, label="fingerprint")
                rows = [table[rank * width : (rank + 1) * width] for rank in range(comm.world_size)]
                if all(each[0] == _AS_BEFORE for each in rows):
                    return [list(map(int, each[1:])) for each in rows]
            gathered = comm.gather_objects((held, error), label="fingerprint: pieces")
            for rank, (_, hindrance) in enumerate(gathered):
                if hindrance is not None:
                    where = f"rank {comm.global_ranks[rank]}: {hindrance.where}"
                    raise StateError(hindrance.what, where=where, fix=hindrance.fix)
            self._keep([of_rank for of_rank, _ in gathered], order)

    def _keep(self, held: list[list[_PieceKey]], order: Iterable[str]) -> None:
        """Keeps what each rank holds. Raises StateError if the pieces do not make up whole tensors."""
        place_of_name = {name: i for i, name in enumerate(order)}
        holders: dict[_PieceKey, list[tuple[int, int]]] = {}
        n_held: Counter[_PieceKey] = Counter()
        for rank, of_rank in enumerate(held):
            for i, piece in enumerate(of_rank):
                holders.setdefault(piece, []).append((rank, i))
        for piece in holders:
            n_held[piece._replace(part=())] += piece.part[-1]
        for whole, n_elems in n_held.items():
            if n_elems != math.prod(whole.shape):
                raise StateError(
                    f"the ranks' pieces have {n_elems} elements, and the tensor has {math.prod(whole.shape)}",
                    where=f"fingerprint: {whole.kind} of {whole.name}",
                    fix="call it on all ranks of the engine, after the same steps",
                )

        def by_order(piece: _PieceKey) -> tuple[int, str, str, int, tuple[int, ...]]:
            return place_of_name.get(piece.name, len(place_of_name)), piece.name, piece.kind, piece.stage, piece.part

        wholes: dict[_PieceKey, int] = {}
        self._places = [
            _HeldPlace(piece, wholes.setdefault(piece._replace(part=()), len(wholes)), holders[piece])
            for piece in sorted(holders, key=by_order)
        ]
        self._held, self._wholes = held, list(wholes)

    def _of_all_stages(self, sums: Sequence[int]) -> Iterable[tuple[_PieceKey, int]]:
        """The tensors, each once, and their sums. Raises RankMismatchError if stages that share a tensor differ in
        it."""
        if len({whole.stage for whole in self._wholes}) <= 1:
            return zip(self._wholes, sums, strict=True)
        found: dict[_PieceKey, int] = {}
        for whole, crc in zip(self._wholes, sums, strict=True):
            tensor = whole._replace(stage=0)
            if found.setdefault(tensor, crc) != crc:
                of_each = ", ".join(
                    f"stage {each.stage} (rank {', '.join(map(str, self._ranks_of(i)))}) {sums[i]:08x}"
                    for i, each in enumerate(self._wholes)
                    if each._replace(stage=0) == tensor
                )
                raise _mismatch(f"{whole.kind} of {whole.name}: pipeline stages that share it differ: {of_each}")
        return found.items()

    def _ranks_of(self, whole: int) -> list[int]:
        """The ranks that hold a piece of the tensor, as ranks of the whole run."""
        ranks = {rank for place in self._places if place.whole == whole for rank, _ in place.holders}
        return [self._comm.global_ranks[rank] for rank in sorted(ranks)]

    def _crcs_of(self, pieces: Iterable[OwnedPiece]) -> tuple[list[_PieceKey], list[int]]:
        """The places of the pieces, and each piece's contribution to the CRC of its tensor."""
        held: list[_PieceKey] = []
        crcs: list[int] = []
        batch: list[_HostPart] = []
        n_copied = 0
        for piece in pieces:
            place = _place_of(piece, self._stage)
            held.append(place)
            crcs.append(0)
            data = piece.data
            is_deferred = not isinstance(data, torch.Tensor)
            for part, host in _host_parts(piece, place):
                batch.append(_HostPart(len(crcs) - 1, place, part, host))
                # Elements of a box may have been copied before. Views of states and weights cost no memory.
                if is_deferred or piece.box is not None or host.data_ptr() != data.data_ptr():
                    n_copied += host.nbytes
                # A deferred piece is in memory only until the next one is read.
                if n_copied >= COPIED_BYTES or is_deferred:
                    _add_crcs(batch, crcs)
                    n_copied = 0
        _add_crcs(batch, crcs)
        return held, crcs


class _HostPart(NamedTuple):
    index: int
    """Of its piece, in the pieces of the rank."""
    place: _PieceKey
    part: tuple[int, ...]
    host: torch.Tensor


def _add_crcs(batch: list[_HostPart], crcs: list[int]) -> None:
    """Adds the parts of ``batch`` to ``crcs``, and empties it."""
    sums = _C.crc32c_parts(
        [(place.shape, part, place.dtype.itemsize, _bytes_of(host)) for _, place, part, host in batch]
    )
    for each, crc in zip(batch, sums, strict=True):
        crcs[each.index] ^= crc
    batch.clear()


def _bytes_of(host: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    """The memory of a contiguous tensor, which must outlive it."""
    # ``numpy()`` would mark the storage for good as one that cannot be resized, and ``offload_states`` resizes it to 0.
    return (ctypes.c_char * host.nbytes).from_address(host.data_ptr())


def _host_parts(piece: OwnedPiece, place: _PieceKey) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """(part, elements in host memory) of a piece. Only a part at a time is copied from an accelerator."""
    data = piece.data if isinstance(piece.data, torch.Tensor) else piece.data.read()
    data = data.detach()
    if data.is_cpu:
        yield place.part, data.contiguous()
        return
    for first in range(0, data.numel(), most := max(STAGING_BYTES // data.itemsize, 1)):
        host = data.narrow(0, first, min(most, data.numel() - first)).cpu()
        yield (*place.part[:-2], piece.begin + first, host.numel()), host


def _copies_differ(piece: _PieceKey, crcs: Mapping[int, int], comm: Collectives) -> RankMismatchError:
    """The error of ranks that hold other bytes. crcs: rank of ``comm`` -> CRC."""
    (usual, n_usual), (_, n_next) = Counter(crcs.values()).most_common(2)
    what = f"{piece.kind} of {piece.name}, {piece.part[-1]} elements from {piece.part[-2]} on"
    if n_usual > n_next:
        odd = [str(comm.global_ranks[rank]) for rank, crc in crcs.items() if crc != usual]
        return _mismatch(f"{what}: rank {', '.join(odd)} differs from {n_usual} ranks that hold the same bytes")
    of_each = ", ".join(f"rank {comm.global_ranks[rank]} {crc:08x}" for rank, crc in crcs.items())
    return _mismatch(f"{what}: ranks that hold copies differ, and no copy has a majority: {of_each}")


def _mismatch(what: str) -> RankMismatchError:
    return RankMismatchError(
        what,
        where="fingerprint",
        fix="load the last good checkpoint; a rank that differs again has a defect of its machine, or of code that"
        " writes to weights on some ranks alone",
    )


def _place_of(piece: OwnedPiece, stage: int) -> _PieceKey:
    start = (0,) * len(piece.shape) if piece.box is None else tuple(piece.box.start)
    size = piece.shape if piece.box is None else tuple(piece.box.size)
    part = (*start, *size, piece.begin, piece.data.numel())
    return _PieceKey(piece.kind, piece.name, piece.data.dtype, tuple(piece.shape), stage, part)
