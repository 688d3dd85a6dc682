"""Do tensor-parallel ranks compute with the same data? Looked at before the first pass, and now and then afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed_c.comm.mesh import TOKENS, Mesh
from deepspeed_c.errors import RankMismatchError
from deepspeed_c.inject.alike import describe_call, digest_of, first_difference

__all__ = ["InputCheck"]

# Windows from one look to the next.
EVERY = 100


class InputCheck:
    """Compares what the ranks that hold one model together give to its forward."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._last: int | None = None

    def look(self, step: int, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Before the first training forward of the window that ends with step number ``step``; of every ``EVERY``th.
        Collective over all ranks then.

        Raises RankMismatchError, on all of them alike, where arguments differ; it names ranks and argument."""
        if self._mesh.size("tp") == 1 or (self._last is not None and (step == self._last or step % EVERY)):
            return
        self._last = step
        lines = describe_call(inputs, kwargs)
        digest = digest_of(lines)
        comm, mine = self._mesh.comm, self._mesh.index(*TOKENS)
        everyone = comm.gather_objects((mine, digest), label="inputs of tensor-parallel ranks")
        firsts: dict[int, int] = {}
        pairs = ((firsts.setdefault(group, rank), rank) for rank, (group, _) in enumerate(everyone))
        other = next(((a, b) for a, b in pairs if everyone[a][1] != everyone[b][1]), None)
        if other is None:
            return
        ours, theirs = first_difference(comm, lines, *other)
        ranks = [comm.global_ranks[rank] for rank in other]
        raise RankMismatchError(
            f"ranks {ranks[0]} and {ranks[1]} hold one model together and were given different data:"
            f" {ours} and {theirs}",
            where="engine.forward",
            fix="give all ranks of a tensor-parallel group the same batch: sample by the data-parallel rank"
            " (engine.deepspeed_io, deepspeed.utils.groups.get_data_parallel_rank()), not by the rank of the job",
        )
