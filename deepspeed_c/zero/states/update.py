"""The update of all weights from their summed gradients, for any base optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import chain

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.work import Work
from deepspeed_c.ops.optim import Call
from deepspeed_c.ops.scope import Shards, declaration
from deepspeed_c.zero.gradients.sums import GradientSums
from deepspeed_c.zero.layout.unit import Slot, Unit
from deepspeed_c.zero.states.entries import Entry
from deepspeed_c.zero.states.pieces import Pieces
from deepspeed_c.zero.states.stored import StoredBuckets
from deepspeed_c.zero.states.whole import WholeMatrices, sum_norms
from deepspeed_c.zero.weights.fetch import Fetcher

__all__ = ["Updates"]

Key = tuple[Unit, int]


class Updates:
    """Updates masters and states bucket by bucket, and copies the masters to the weights that forward uses.

    A base that updates bucket by bucket does unscale, clip, decay, moments, update and 16-bit copy in one pass. Any
    other base gets gradients in ``param.grad``, and ``step_base`` steps it once for all buckets. Buckets are updated
    and gathered in ``order``, the forward's order of use. ``use_broadcast``: whole weights are sent by broadcasts.
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        sums: GradientSums,
        comm: Collectives,
        pieces: Pieces,
        stored: StoredBuckets,
        fetcher: Fetcher | None,
        *,
        order: Sequence[Key],
        step_base: Callable[[], None],
        use_broadcast: bool,
    ) -> None:
        self._base, self._sums, self._comm, self._pieces, self._stored = base, sums, comm, pieces, stored
        self._fetcher, self._order, self._step_base = fetcher, order, step_base
        self._use_broadcast = use_broadcast

    def run(self, grad_scale: float, unused: Sequence[Slot], done: set[Key]) -> None:
        """Updates every parameter with its gradient times ``grad_scale``. Parameters in ``unused`` stay unchanged, as
        in plain torch. ``done``: buckets whose masters have been updated already."""
        skipped = set(unused)
        for unit, bucket in {(slot.unit, slot.bucket) for slot in unused if slot in slot.unit.fragment_of}:
            with unit.states.open(bucket):
                self._pieces.split(unit, bucket)
        self.begin_writes()
        with torch.no_grad():
            if declaration(self._base).updates_buckets:
                works = self._run_fused(grad_scale, skipped, done)
            else:
                works = self._run_plain(grad_scale, skipped)
        for work in works:
            work.wait()
        if self._fetcher is not None:
            self._fetcher.weights_changed()

    def begin_writes(self) -> None:
        """Call it before weights are written. Collective in the same cases as ``Fetcher.begin_writes``."""
        if self._fetcher is not None:
            self._fetcher.begin_writes()

    def write_back(self, unit: Unit, bucket: int) -> None:
        """Copies a bucket's edited masters to the weights. Collective if masters are sharded."""
        with unit.states.open(bucket, writes=False), unit.weights.open(bucket, reads=False):
            unit.bring_weights(bucket)
        self._gather(unit, bucket).wait()
        gather_unit = None if self._fetcher is None else self._fetcher.group_at(unit, bucket)
        if gather_unit is not None:
            self._fetcher.weights_changed(gather_unit)

    def _gather(self, unit: Unit, bucket: int) -> Work:
        return unit.gather_weights(bucket, use_broadcast=self._use_broadcast)

    def update_masters(self, unit: Unit, bucket: int, grad_scale: float) -> None:
        """Updates masters and states (``changed``) of a bucket, and leaves the weights as they are."""
        shards = self._shards(unit, self._pieces.entries_of(unit, bucket), grad_scale)
        self._base.update_bucket(shards._replace(copies=[]))

    def changed(self, unit: Unit, bucket: int) -> list[torch.Tensor]:
        """The tensors that ``update_masters`` changes: masters and states, flat. Reading them does not undo an update
        ahead of the step."""
        found: list[torch.Tensor] = []
        for entry in self._pieces.entries_of(unit, bucket):
            state = self._base.state.get(entry.param, {})
            found += [entry.param, *(value for value in state.values() if torch.is_tensor(value) and value.dim() > 0)]
        return [tensor.detach().view(-1) for tensor in found]

    def _used_entries(self, unit: Unit, bucket: int, skipped: set[Slot]) -> list[Entry]:
        entries = self._pieces.entries_of(unit, bucket)
        if not skipped:
            return entries
        return [entry for entry in entries if entry.fragment is None or entry.fragment.slot not in skipped]

    def _run_fused(self, grad_scale: float, skipped: set[Slot], done: set[Key]) -> list[Work]:
        base = self._base
        used = {key: self._used_entries(*key, skipped) for key in self._order}
        if not done:
            base.begin_step([entry.param for entries in used.values() for entry in entries] if skipped else None)
        sums = self._sum_norms(grad_scale, used) if base.scope == "norms" else {}
        works: list[Work] = []
        joined: list[Key] = []
        for unit, bucket in self._stored.visit(list(used)):
            entries = used[unit, bucket]
            if (unit, bucket) not in done and self._may_join(unit, bucket):
                if joined and joined[0][0].group != unit.group:
                    self._update_joined(joined, used, grad_scale)
                    joined.clear()
                joined.append((unit, bucket))
                continue
            # The update does not write skipped parameters.
            with unit.weights.open(bucket, reads=bool(skipped)):
                if (unit, bucket) in done:
                    unit.bring_weights(bucket)
                elif self._stored.is_streamed(unit, bucket):
                    self._update_pieces(entries[0], grad_scale)
                else:
                    self._update_bucket(unit, bucket, entries, grad_scale, sums.get((unit, bucket)))
            works.append(self._gather(unit, bucket))
        self._update_joined(joined, used, grad_scale)
        return works

    def _may_join(self, unit: Unit, bucket: int) -> bool:
        """Whether a bucket may be updated by one call together with others: all its tensors are in memory, its update
        takes no other ranks, and nothing is to be sent or copied while the next bucket is updated."""
        return (
            self._base.scope_of_group(unit.group) == "element"
            and unit.is_at_hand(bucket)
            and not unit.copies_up
            and (unit.is_sharded or unit.comm.world_size == 1)
        )

    def _update_joined(self, keys: list[Key], used: dict[Key, list[Entry]], grad_scale: float) -> None:
        """Updates buckets of one parameter group by one call.

        A pass over memory evicts Python from the caches: between two calls this costs 0.3 ms a bucket."""
        shards = [self._shards(unit, used[unit, bucket], grad_scale) for unit, bucket in keys if used[unit, bucket]]
        if shards:
            lists = zip(*((part.params, part.grads, part.copies) for part in shards), strict=True)
            self._base.update_bucket(Shards(shards[0].group, *map(list, map(chain.from_iterable, lists)), grad_scale))

    def _update_bucket(
        self, unit: Unit, bucket: int, entries: list[Entry], grad_scale: float, sums: torch.Tensor | None
    ) -> None:
        """Updates a bucket whose states and weights are open."""
        is_gathered = self._base.scope_of_group(unit.group) == "matrix"
        # If matrices are gathered, a rank takes part even if it holds only padding: the other ranks wait for its slice.
        if entries or is_gathered:
            matrices = WholeMatrices(unit, bucket, entries) if is_gathered else None
            shards = self._shards(unit, entries, grad_scale)
            self._base.update_bucket(shards._replace(sums=sums, matrices=matrices))
        unit.copy_up(bucket)

    def _update_pieces(self, entry: Entry, grad_scale: float) -> None:
        """Updates a streamed bucket whose weights are open."""
        base, unit, bucket = self._base, entry.unit, entry.bucket
        piece, names = unit.piece_elems(bucket), base.names_of_states(unit.group)
        weights, gradients = unit.param_slice(bucket), self._sums.results[unit][bucket]
        has_masters, copies = bool(unit.masters(bucket)), unit.copies(bucket)
        with closing(self._stored.stream(entry, names)) as pieces:
            # ``pieces`` comes first in ``zip``: the home writes the last pieces when it is asked for more and has none.
            for tensors, begin in zip(pieces, range(0, unit.slice_elems[bucket], piece)):
                mine = slice(begin, begin + piece)
                masters, *states = tensors if has_masters else [weights[mine], *tensors]
                slots, copied = [[tensor] for tensor in states], [copy[mine] for copy in copies]
                call = Call([masters], [gradients[mine]], slots[: len(names)], copied, slots[len(names) :])
                is_last = mine.stop >= unit.slice_elems[bucket]
                base.step_slice(unit.group, entry.param, call, grad_scale, is_last=is_last)
                unit.copy_up_part(bucket, begin, masters)

    def _tensors(self, entries: list[Entry]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """(masters, gradients, 16-bit copies) of entries of one bucket. The list of copies is empty if masters are the
        parameters themselves or weights lie in another place."""
        unit, bucket = entries[0].unit, entries[0].bucket
        results = self._sums.results[unit]
        params = [entry.param for entry in entries]
        grads = [entry.part_of(results) for entry in entries]
        copies = [{bucket: copy} for copy in unit.copies(bucket)]
        # type: ignore[arg-type]
        return params, grads, [entry.part_of(of_bucket) for of_bucket in copies for entry in entries]

    def _shards(self, unit: Unit, entries: list[Entry], grad_scale: float) -> Shards:
        return Shards(unit.group, *(self._tensors(entries) if entries else ([], [], [])), grad_scale)

    def _sum_norms(self, grad_scale: float, used: dict[Key, list[Entry]]) -> dict[Key, torch.Tensor]:
        keys = self._stored.visit([key for key, entries in used.items() if entries])
        buckets = ((key, used[key], self._shards(key[0], used[key], grad_scale)) for key in keys)
        is_exact = self._sums.summing.is_in_tree
        return sum_norms(self._base, buckets, self._sums.units, self._comm, is_exact=is_exact)

    def _run_plain(self, grad_scale: float, skipped: set[Slot]) -> list[Work]:
        """Updates with any ``torch.optim`` optimizer: sets scaled gradients in the masters' dtype, calls the
        optimizer's own step, then makes the 16-bit copies."""
        for unit, bucket in self._order:
            for entry in self._used_entries(unit, bucket, skipped):
                grad = entry.part_of(self._sums.results[unit]).to(entry.param.dtype)
                if grad_scale != 1.0:
                    torch.ops.deepspeed_c.flat_scale_([grad], grad_scale)
                entry.param.grad = grad
        with torch.enable_grad():
            self._step_base()
        works: list[Work] = []
        for unit, bucket in self._order:
            for entry in self._pieces.entries_of(unit, bucket):
                entry.param.grad = None
            with unit.weights.open(bucket, reads=False):
                unit.bring_weights(bucket)
            works.append(self._gather(unit, bucket))
        return works
