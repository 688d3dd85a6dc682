"""Do tensor-parallel ranks compute with the same data? Looked at before the first pass, and now and then afterwards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from deepspeed_c.comm.mesh import TOKENS, Mesh
from deepspeed_c.errors import RankMismatchError

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
        lines = [line for i, value in enumerate(inputs) for line in _describe(f"argument {i}", value)]
        lines += [line for name in sorted(kwargs) for line in _describe(f"argument {name!r}", kwargs[name])]
        digest = hashlib.sha256("\n".join(map(str, lines)).encode()).hexdigest()
        comm, mine = self._mesh.comm, self._mesh.index(*TOKENS)
        everyone = comm.gather_objects((mine, digest), label="inputs of tensor-parallel ranks")
        firsts: dict[int, int] = {}
        pairs = ((firsts.setdefault(group, rank), rank) for rank, (group, _) in enumerate(everyone))
        other = next(((a, b) for a, b in pairs if everyone[a][1] != everyone[b][1]), None)
        if other is None:
            return
        a, b = (comm.gather_objects(lines, label="inputs that differ")[rank] for rank in other)
        ranks = [comm.global_ranks[rank] for rank in other]
        differing = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        ours, theirs = (" ".join(side[differing]) if differing < len(side) else "nothing" for side in (a, b))
        raise RankMismatchError(
            f"ranks {ranks[0]} and {ranks[1]} hold one model together and were given different data:"
            f" {ours} and {theirs}",
            where="engine.forward",
            fix="give all ranks of a tensor-parallel group the same batch: sample by the data-parallel rank"
            " (engine.deepspeed_io, deepspeed.utils.groups.get_data_parallel_rank()), not by the rank of the job",
        )


def _describe(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """(which argument, what it is) of every tensor and plain value in ``value``."""
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        digest = hashlib.sha256(data.numpy().tobytes()).hexdigest()[:12]
        yield path, f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} #{digest}"
    elif isinstance(value, Mapping):
        for key in value:
            yield from _describe(f"{path}[{key!r}]", value[key])
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield from _describe(f"{path}[{i}]", part)
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield path, repr(value)
