"""The fingerprint of an engine's weights and optimizer states, and the comparison of copies that ranks hold of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from deepspeed_c import _C
from deepspeed_c.checkpoint.fingerprint import Fingerprint, TensorPrint
from deepspeed_c.checkpoint.native.save import STAGING_BYTES, OwnedPiece
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import DeepSpeedCError, RankMismatchError, StateError

__all__ = ["fingerprint_of_ranks"]


class _PieceKey(NamedTuple):
    """The elements of a piece within its logical tensor; ``part`` as for ``_C.crc32c_part``."""

    kind: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    part: tuple[int, ...]


def fingerprint_of_ranks(pieces: Iterable[OwnedPiece], comm: Collectives, order: Iterable[str]) -> Fingerprint:
    """The fingerprint of the tensors that the ranks of ``comm`` hold in ``pieces``, the same on every rank. Collective.

    order: names, in the module's order. Raises, on all ranks alike, RankMismatchError if ranks hold the same elements
    with different bytes (it names the first such tensor, and the ranks), and StateError if a rank cannot read a piece
    or if the pieces do not make up whole tensors.
    """
    mine: dict[_PieceKey, int] = {}
    error: DeepSpeedCError | None = None
    try:
        for piece in pieces:
            place = _place_of(piece)
            mine[place] = _crc_of(piece, place)
    except DeepSpeedCError as raised:
        error = raised
    gathered = comm.gather_objects((mine, error), label="fingerprint")
    for rank, (_, hindrance) in enumerate(gathered):
        if hindrance is not None:
            where = f"rank {comm.global_ranks[rank]}: {hindrance.where}"
            raise StateError(hindrance.what, where=where, fix=hindrance.fix)
    of_ranks = [of_rank for of_rank, _ in gathered]
    rank_of_name = {name: i for i, name in enumerate(order)}
    places = sorted(
        {place for of_rank in of_ranks for place in of_rank},
        key=lambda place: (rank_of_name.get(place.name, len(rank_of_name)), place.name, place.kind, place.part),
    )
    sums: dict[_PieceKey, int] = {}
    n_held: Counter[_PieceKey] = Counter()
    for place in places:
        crcs = {rank: of_rank[place] for rank, of_rank in enumerate(of_ranks) if place in of_rank}
        _check_copies(place, crcs, comm)
        whole = place._replace(part=())
        sums[whole] = sums.get(whole, 0) ^ next(iter(crcs.values()))
        n_held[whole] += place.part[-1]
    for whole, n_elems in n_held.items():
        if n_elems != math.prod(whole.shape):
            raise StateError(
                f"the ranks' pieces have {n_elems} elements, and the tensor has {math.prod(whole.shape)}",
                where=f"fingerprint: {whole.kind} of {whole.name}",
                fix="call it on all ranks of the engine, after the same steps",
            )
    return Fingerprint(
        TensorPrint(
            whole.kind,
            whole.name,
            whole.dtype,
            whole.shape,
            _C.crc32c_of_parts(crc, math.prod(whole.shape) * whole.dtype.itemsize),
        )
        for whole, crc in sums.items()
    )


def _check_copies(place: _PieceKey, crcs: Mapping[int, int], comm: Collectives) -> None:
    """Raises RankMismatchError unless all ranks hold the same bytes. crcs: rank of ``comm`` -> CRC."""
    counts = Counter(crcs.values())
    if len(counts) == 1:
        return
    (usual, n_usual), (_, n_next) = counts.most_common(2)
    what = f"{place.kind} of {place.name}, {place.part[-1]} elements from {place.part[-2]} on"
    if n_usual > n_next:
        odd = [str(comm.global_ranks[rank]) for rank, crc in crcs.items() if crc != usual]
        text = f"{what}: rank {', '.join(odd)} differs from {n_usual} ranks that hold the same bytes"
    else:
        of_each = ", ".join(f"rank {comm.global_ranks[rank]} {crc:08x}" for rank, crc in crcs.items())
        text = f"{what}: ranks that hold copies differ, and no copy has a majority: {of_each}"
    raise RankMismatchError(
        text,
        where="fingerprint",
        fix="load the last good checkpoint; a rank that differs again has a defect of its machine, or of code that"
        " writes to weights on some ranks alone",
    )


def _place_of(piece: OwnedPiece) -> _PieceKey:
    start = (0,) * len(piece.shape) if piece.box is None else tuple(piece.box.start)
    size = piece.shape if piece.box is None else tuple(piece.box.size)
    part = (*start, *size, piece.begin, piece.data.numel())
    return _PieceKey(piece.kind, piece.name, piece.data.dtype, tuple(piece.shape), part)


def _crc_of(piece: OwnedPiece, place: _PieceKey) -> int:
    """The piece's contribution to the CRC of its tensor."""
    data = piece.data if isinstance(piece.data, torch.Tensor) else piece.data.read()
    data, itemsize = data.detach(), place.dtype.itemsize
    # Only a part at a time is copied from an accelerator.
    most = max(data.numel() if data.is_cpu else STAGING_BYTES // itemsize, 1)
    crc = 0
    for first in range(0, data.numel(), most):
        host = data.narrow(0, first, min(most, data.numel() - first)).cpu().contiguous()
        part = [*place.part[:-2], piece.begin + first, host.numel()]
        crc ^= _C.crc32c_part(list(place.shape), part, itemsize, host.view(torch.uint8).numpy())
    return crc
