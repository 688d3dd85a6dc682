"""An order of samples whose epochs go on into one another, so that it is the same for any number of ranks."""

from __future__ import annotations

from typing import final

from deepspeed_c import _C

__all__ = ["UnbrokenOrder", "place_after"]

_ENDLESS = 2**63 - 1


def place_after(epoch: int, position: int, n_samples: int) -> tuple[int, int]:
    """(epoch, position) where reading goes on, for a position at or behind the end of ``epoch``."""
    n_epochs, rest = divmod(position, n_samples)
    return epoch + n_epochs, rest


@final
class UnbrokenOrder:
    """The rounds of a rank. A round that begins before the end of an epoch belongs to it, and is filled up from the
    beginning of the next epoch. So each sample comes once in an epoch, and all rounds have the same size.
    """

    def __init__(self, n_samples: int, *, n_ranks: int, rank: int, batch: int, seed: int | None, run: int = 1) -> None:
        self._n_samples, self._round = n_samples, n_ranks * batch
        share = {"n_ranks": n_ranks, "rank": rank, "batch": batch, "run": run}
        self._within = _C.SampleOrder(n_samples, **share, seed=seed)
        self._positions = _C.SampleOrder(_ENDLESS, **share)
        self._single = _C.SampleOrder(n_samples, seed=seed)

    def round(self, epoch: int, position: int) -> tuple[list[int], int]:
        """(batch of this rank, position of the next one), from a position of the epoch on. The batch is empty, and the
        position unchanged, at the end of the epoch."""
        end = position + self._round
        if position >= self._n_samples:
            return [], position
        if end <= self._n_samples:
            samples, _ = self._within.round(epoch, position)
            return list(samples), end
        positions, _ = self._positions.round(0, position)
        places = (place_after(epoch, p, self._n_samples) for p in positions)
        return [self._single.round(*place)[0][0] for place in places], end

    def rounds(self, position: int = 0) -> int:
        """Number of rounds from a position to the end of the epoch."""
        return -(-max(0, self._n_samples - position) // self._round)
