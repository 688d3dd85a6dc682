"""Sums of gradients that have the same bits on any number of ranks (``same_bits``).

The global batch is cut into *grains*, and each backward pass of a rank gives the gradients of one grain. A *round* is
one pass on each rank: rank r of W has grain ``round * W + r``. Gradients of grains are added in fp32 in one binary tree
over these positions, whoever has computed them.

[Note: pairs] With two ranks a round is a node of the tree itself: its sum is that of an ordinary reduction, which goes
straight to its place, or is added to the older node there.

[Note: levels] The tree is that of a binary counter. Grains come in order. While the two newest nodes have equally many
grains, they are added, the older one first. At most one node of 1, 2, 4, ... grains is left, and the number of grains
in binary says which. A rank keeps the nodes of its own shard only, so a bucket takes a few buffers of a shard's size.
The sum adds what is left, from the newest node to the oldest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepspeed_c.buffers import BufferPool
from deepspeed_c.comm.work import Work

if TYPE_CHECKING:
    from deepspeed_c.zero.layout.unit import Unit

__all__ = ["TreeSum"]

_LABEL = "gradients of grains"


def _levels_of(n: int) -> set[int]:
    """The levels whose nodes are left after ``n`` grains."""
    return {level for level in range(n.bit_length()) if n >> level & 1}


class TreeSum:
    """The sum of one bucket's gradients over the grains of a window; ``result`` [slice] gets the mean.

    If ranks hold copies of the slice, each of them adds a piece of it, and ``settle`` gathers the pieces.
    """

    def __init__(self, unit: Unit, result: torch.Tensor, staging: BufferPool) -> None:
        self._unit, self._result, self._staging = unit, result, staging
        n_copies = unit.replicas.world_size
        self._piece = -(-result.numel() // n_copies)
        self._begin = min(unit.replicas.rank * self._piece, result.numel())
        self._levels: dict[int, torch.Tensor] = {}
        self._spare: list[torch.Tensor] = []
        self._n_grains = 0
        self._is_settled = True

    @staticmethod
    def planned_bytes(unit: Unit, n_ranks: int, n_grains: int) -> int:
        """The memory of all nodes of ``unit`` in windows of ``n_grains`` grains."""
        rounds = range(n_ranks, n_grains + 1, n_ranks)
        kept = set().union(*(_levels_of(n) for n in rounds))
        return len(kept) * -(-unit.shard_elems // unit.replicas.world_size) * torch.float32.itemsize

    def add(self, gradients: torch.Tensor) -> Work:
        """Sends this rank's gradients [bucket] of a round, and adds those of all ranks. Collective."""
        unit, n = self._unit, self._result.numel()
        n_shards, n_copies = unit.comm.world_size, unit.replicas.world_size
        if n == 0:
            return Work.done()
        if n_shards == 1 and n_copies == 1:
            self._push([gradients])
            return Work.done()
        if n_shards == 1:
            return self._send_to_copies(gradients, n_shards)
        if n_shards == 2 and n_copies == 1 and gradients.device == self._result.device:
            return self._add_pair(gradients)
        received = self._staging.take(gradients.numel(), gradients.dtype, gradients.device)
        splits = [n] * n_shards
        work = unit.comm.all_to_all(gradients, received, splits, splits, label=_LABEL)

        def finish() -> None:
            if n_copies > 1:
                self._send_to_copies(received, n_shards).wait()
            else:
                self._push(list(received.view(n_shards, n)))
            self._staging.give(received)

        return work.then(finish)

    def _add_pair(self, gradients: torch.Tensor) -> Work:
        """``add`` for two ranks; see [Note: pairs]."""
        before = self._n_grains
        has_older = bool(before >> 1 & 1)
        work = self._unit.comm.reduce_scatter(gradients, self._level(1), accumulate=has_older, label=_LABEL)

        def finish() -> None:
            node, level = self._levels.pop(1), 2 if has_older else 1
            while before >> level & 1:
                older = self._levels.pop(level)
                older.add_(node)
                self._spare.append(node)
                node, level = older, level + 1
            self._levels[level] = node
            self._n_grains, self._is_settled = before + 2, False

        return work.then(finish)

    def _level(self, level: int) -> torch.Tensor:
        """The memory of a level."""
        if level not in self._levels:
            spare = self._spare
            self._levels[level] = spare.pop() if spare else self._unit.states.new_zeros(self._piece, torch.float32)
        return self._levels[level]

    def _send_to_copies(self, slices: torch.Tensor, n_slices: int) -> Work:
        """Sends to each rank that holds a copy its piece of each of ``slices`` [n_slices, slice], and adds the pieces
        that come. Rank j of the copies has the grains before those of rank j + 1."""
        copies, n, piece = self._unit.replicas, self._result.numel(), self._piece
        sent = self._staging.take(copies.world_size * n_slices * piece, slices.dtype, slices.device)
        rows = sent.view(copies.world_size, n_slices, piece)
        for j, row in enumerate(rows):
            begin, end = min(j * piece, n), min((j + 1) * piece, n)
            row[:, : end - begin].copy_(slices.view(n_slices, n)[:, begin:end])
            row[:, end - begin :].zero_()
        received = self._staging.take(sent.numel(), sent.dtype, sent.device)
        splits = [n_slices * piece] * copies.world_size
        work = copies.all_to_all(sent, received, splits, splits, label=_LABEL)

        def finish() -> None:
            self._push(list(received.view(-1, piece)))
            self._staging.give(received)
            self._staging.give(sent)

        return work.then(finish)

    def _push(self, leaves: list[torch.Tensor]) -> None:
        if leaves[0].device != self._result.device:
            leaves = [leaf.to(self._result.device) for leaf in leaves]
        before, after = self._n_grains, self._n_grains + len(leaves)
        torch.ops.deepspeed_c.tree_push_(self._nodes(_levels_of(before) | _levels_of(after), after), before, leaves)
        self._n_grains, self._is_settled = after, False

    def _nodes(self, used: set[int], n_grains: int) -> list[torch.Tensor]:
        """A tensor for each level up to that of ``n_grains``; those that are not ``used`` are not touched."""
        levels = {level: self._level(level) for level in used}
        return [levels.get(level, levels[max(used)]) for level in range(n_grains.bit_length())]

    def settle(self, scale: float) -> None:
        """Writes ``scale`` times the sum to the result. Collective if ranks hold copies. The tree stays as it is."""
        if self._is_settled:
            return
        self._is_settled = True
        nodes, copies = self._nodes(_levels_of(self._n_grains), self._n_grains), self._unit.replicas
        if copies.world_size == 1:
            torch.ops.deepspeed_c.tree_sum_(self._result, nodes, self._n_grains, scale)
            return
        whole = self._staging.take(copies.world_size * self._piece, self._result.dtype, self._result.device)
        mine = whole.narrow(0, copies.rank * self._piece, self._piece)
        torch.ops.deepspeed_c.tree_sum_(mine, nodes, self._n_grains, scale)
        copies.all_gather(whole, label=_LABEL).wait()
        self._result.copy_(whole[: self._result.numel()])
        self._staging.give(whole)

    def drop(self, begin: int, numel: int) -> None:
        """Sets elements of the slice to zero in all nodes."""
        low = max(begin, self._begin) - self._begin
        high = min(begin + numel, self._begin + self._piece) - self._begin
        if low < high:
            for node in self._levels.values():
                node[low:high].zero_()

    def reset(self) -> None:
        """Begins a window."""
        self._spare += self._levels.values()
        self._levels.clear()
        self._n_grains, self._is_settled = 0, True
