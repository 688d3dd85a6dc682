"""The work of each rank of a ring at each hop, the number of hops of each part of the keys, and the traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from deepspeed_c import _C
from deepspeed_c.errors import ConfigError
from deepspeed_c.sequence.plans import SequenceCut

__all__ = ["BAND", "CAUSAL", "WHOLE", "Block", "RingPlan", "plan_ring"]

WHOLE, CAUSAL, BAND = _C.SEQ_WHOLE, _C.SEQ_CAUSAL, _C.SEQ_BAND

# A mask that is stored has at most so many rows. With a window of w it then has TILE * (TILE + w) elements.
TILE = 1024


class Block(NamedTuple):
    """Queries of one rank that are multiplied with keys of the same or another rank: ranges of each rank's tokens."""

    kind: int
    """WHOLE: each query sees each key. CAUSAL: query i sees keys 0 to i. BAND: by distance, i + shift - j."""
    query_begin: int
    query_end: int
    key_begin: int
    key_end: int
    shift: int
    """The first query's position minus the first key's position, in the whole sequence."""
    n_pairs: int
    """Number of pairs of a query and a key that the query sees."""


@dataclass(frozen=True)
class RingPlan:
    """Attention of one sequence around a ring. At each hop keys and values go from rank r to rank r + 1."""

    cut: SequenceCut
    """A cut in which each part belongs to one rank."""
    is_causal: bool
    window: int
    """Queries see keys at a distance below this number of tokens; 0: at any distance."""

    @cached_property
    def _runs(self) -> tuple:
        return tuple(self.cut.runs(rank) for rank in range(self.cut.n_ranks))

    def blocks(self, rank: int, source: int) -> tuple[Block, ...]:
        """The blocks of the queries of ``rank`` and the keys of ``source``; () where the hop is skipped."""
        return self._blocks[rank][source]

    @cached_property
    def _blocks(self) -> tuple[tuple[tuple[Block, ...], ...], ...]:
        ends, n_tokens = list(self.cut.document_ends), self.cut.n_tokens
        return tuple(
            tuple(
                tuple(Block(*found) for found in _C.seq_blocks(self.is_causal, self.window, TILE, ends, n_tokens, q, k))
                for k in self._runs
            )
            for q in self._runs
        )

    @cached_property
    def work(self) -> tuple[int, ...]:
        """Number of pairs of a query and a key that the query sees, by rank."""
        return tuple(sum(block.n_pairs for blocks in of_rank for block in blocks) for of_rank in self._blocks)

    @cached_property
    def travel(self) -> tuple[int, ...]:
        """Number of hops of each rank's keys, up to the last rank that needs them."""
        n = self.cut.n_ranks
        return tuple(max(hop for hop in range(n) if hop == 0 or self._blocks[(s + hop) % n][s]) for s in range(n))

    def wire_elems(self, rank: int, n_key_heads: int, width: int) -> RingTraffic:
        """The traffic of ``rank`` for one sequence, in elements of keys and values of ``width`` each."""
        return traffic(self.travel, self.cut.tokens, rank, 2 * n_key_heads * width)


class RingTraffic(NamedTuple):
    """Elements that one rank sends."""

    keys: int
    """Keys and values in the forward. The backward sends the same number again."""
    grads: int
    """Gradients of keys and values in the backward, in float32 (float64 if the model is in float64)."""


def traffic(travel: Sequence[int], tokens: Sequence[int], rank: int, elems_per_token: int) -> RingTraffic:
    """Elements that ``rank`` sends, if part s of ``tokens[s]`` tokens makes ``travel[s]`` hops.

    At hop h rank r has part r - h. It sends the keys on if the part goes further. It sends the gradients in any case,
    except at their own rank: on with the part, or back to their own rank in one message.
    """
    n = len(tokens)
    parts = [((rank - hop) % n, hop) for hop in range(n)]
    keys = sum(tokens[part] for part, hop in parts if travel[part] > hop)
    grads = sum(tokens[part] for part, hop in parts if 0 < hop <= travel[part])
    return RingTraffic(keys * elems_per_token, grads * elems_per_token)


@lru_cache(maxsize=64)
def plan_ring(cut: SequenceCut, *, is_causal: bool = True, window: int = 0) -> RingPlan:
    """The plan of ``cut``, the same on all ranks. Plans of recent cuts are kept.

    Raises ConfigError for a cut whose ranks share parts (use ``cut.parts()``), and for a window below 0.
    """
    if cut.n_inner != 1:
        raise ConfigError(
            f"the cut has rows of {cut.n_inner} ranks", where="plan_ring", fix="give the cut of its parts: cut.parts()"
        )
    if window < 0:
        raise ConfigError(f"a window of {window} tokens", where="plan_ring", fix="write 0 for none")
    return RingPlan(cut, is_causal, window)
