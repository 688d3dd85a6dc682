"""Check that tensor-parallel ranks still have the same values of parameters that each of them holds whole. The check's
numbers travel in the exchange of facts that every step makes anyway."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

import torch

from deepspeed_c.comm.axes import TOKENS
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.errors import RankMismatchError
from deepspeed_c.zero.layout.unit import Unit

__all__ = ["DriftCheck", "DriftFound"]

# About how many elements of the weights one step checks. Successive steps check all weights in turn, so that no step
# has to read all of a large model.
WEIGHTS_A_STEP = 1 << 20
# A double represents every integer below this limit exactly.
HASH_LIMIT = 1 << 53

Results = Mapping[Unit, Sequence[torch.Tensor]]


class DriftFound(RankMismatchError):
    """Tensor-parallel ranks hold different values of a parameter that should be equal on them. The engine knows the
    batches and random states, and adds the cause to the message."""

    def __init__(self, found: str, what: str) -> None:
        """found: the parameter and its ranks. what: "gradients" or "weights", or "data" if only the batches differ."""
        super().__init__(
            f"{found or 'parameters differ'}: they hold it whole and have to agree in every bit",
            where="engine.step",
            fix="give all ranks of a tensor-parallel group the same data, random numbers and edits; sum gradients that"
            " each rank has a part of by param.tp_sum_gradients = True; load a checkpoint to go on",
        )
        self.found, self.what = found, what


class DriftCheck:
    """Compares ``units`` with their twins on other ranks.

    Gradients are compared by the sum of their squares, which the norm needs anyway. Weights are compared by the sum of
    their bits, a part of the weights in each step. Batches are compared by a hash, because ranks with different tokens
    may still agree in both sums. The caller sums ``numbers`` over the ranks that hold the same layers, and passes the
    sums to ``differs``. If the sums of any pipeline stage differ, all ranks call ``report``.
    """

    def __init__(self, units: Iterable[Unit], mesh: Mesh) -> None:
        self._mesh, self._tp = mesh, mesh.tensors
        n_data = mesh.size(*TOKENS)
        self._units = [unit for unit in units if unit.twins.world_size > 1] if self._tp.world_size > 1 else []
        self._shape = n_data, self._tp.world_size, 3
        self._at = mesh.index(*TOKENS) * self._tp.world_size + self._tp.rank
        self._turn = 0

    @property
    def n_numbers(self) -> int:
        """The length of ``numbers``; 0 if no unit has twins."""
        n_data, n_tp, n_hashes = self._shape
        return n_data * n_tp * n_hashes if self._units else 0

    def numbers(self, gradients: float, hash_of_inputs: Callable[[], int]) -> list[float]:
        """A list with three entries for each rank: this rank's hashes in its own entries, and zeros in the entries of
        other ranks.

        gradients: the sum of squares of the units' summed gradients. hash_of_inputs: returns a hash of the window's
        batches."""
        found = [0.0] * self.n_numbers
        if found:
            bits = int.from_bytes(struct.pack("<d", gradients), "little")
            mine = (bits ^ bits >> 53) % HASH_LIMIT, self._hash_of_some_weights(), hash_of_inputs() % HASH_LIMIT
            found[3 * self._at : 3 * self._at + 3] = map(float, mine)
        return found

    def _hash_of_some_weights(self) -> int:
        total, elems = 0, 0
        slices = [unit.slice_at_hand(bucket) for unit in self._units for bucket in range(unit.n_buckets)]
        at_hand = [weights for weights in slices if weights is not None]
        for _ in at_hand:
            weights = at_hand[self._turn % len(at_hand)]
            total += hash_of(weights)
            elems += weights.numel()
            self._turn += 1
            if elems >= WEIGHTS_A_STEP:
                break
        return total % HASH_LIMIT

    def differs(self, numbers: Sequence[float]) -> bool:
        """Whether hashes of twins differ. ``numbers``: the sums over the ranks that hold the same layers."""
        return bool(numbers) and not _are_alike(self._table(numbers))

    def report(self, numbers: Sequence[float], results: Results) -> NoReturn:
        """Raises DriftFound on all ranks alike. The error names the first parameter whose values differ. Collective
        over the mesh. ``numbers``: as for ``differs``."""
        table, found, kind = self._table(numbers), "", ""
        if not _are_alike(table[..., :2]):
            found, kind = self._first_apart(results)
        elif not _are_alike(table):
            kind = "data"
        everyone = self._mesh.comm.gather_objects((found, kind), label="drift")
        # Weights that differ in one stage make gradients differ in others, so weights are named first.
        raise DriftFound(*max(everyone, key=lambda pair: (bool(pair[0]), pair[1] == "weights", bool(pair[1]))))

    def _table(self, numbers: Sequence[float]) -> torch.Tensor:
        """[ranks with different tokens, tensor-parallel ranks, hashes]; no rows if no unit has twins."""
        n_data, n_tp, n_hashes = self._shape
        return torch.tensor(numbers, dtype=torch.float64).view(n_data if numbers else 0, n_tp, n_hashes)

    def _first_apart(self, results: Results) -> tuple[str, str]:
        """(the first parameter whose values differ, with its ranks, what differs). Empty if this rank and its twins
        agree. Collective over the tensor-parallel ranks."""
        mine = {
            fragment.slot.name: (
                hash_of(unit.piece(results[unit], fragment)),
                None if (piece := unit.weight_piece_at_hand(fragment)) is None else hash_of(piece),
            )
            for unit in self._units
            for fragment in sorted(unit.fragments, key=lambda fragment: fragment.slot.order)
        }
        everyone = self._tp.gather_objects(mine, label="parameters that have drifted")
        found, kind = "", ""
        for part, what in ((1, "weights"), (0, "gradients")):
            for name in mine:
                hashes = [theirs[name][part] for theirs in everyone]
                other = next((rank for rank, theirs in enumerate(hashes) if theirs != hashes[0]), None)
                if other is not None and not found:
                    ranks = [self._tp.global_ranks[rank] for rank in (0, other)]
                    found, kind = f"the {what} of {name} differ on ranks {ranks[0]} and {ranks[1]}", what
        return found, kind


def _are_alike(table: torch.Tensor) -> bool:
    return bool((table == table[:, :1]).all())


def hash_of(tensor: torch.Tensor) -> int:
    """The sum of the elements' bits, read as integers. The order of the elements does not matter."""
    bits = tensor.detach().contiguous().view(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    return int(bits.sum(dtype=torch.int64)) % HASH_LIMIT
