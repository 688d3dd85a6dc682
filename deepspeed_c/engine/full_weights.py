"""The whole weights of an engine, one after the other, while the next ones are gathered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from typing_extensions import Self

from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.engine.parts import Parts
from deepspeed_c.engine.weights import aliases_of, named_tensors
from deepspeed_c.errors import ConfigError, FeatureError, StateError
from deepspeed_c.quantity import parse_bytes
from deepspeed_c.transfer.target import WeightEntry
from deepspeed_c.weights.published import PublishedPiece, TensorFacts, pieces_of
from deepspeed_c.zero.weights.fetch import Fetcher
from deepspeed_c.zero.weights.gather_unit import GatherUnit, PlacedShard
from deepspeed_c.zero.weights.param import state_of

__all__ = ["RECEIVERS", "FullWeights"]

RECEIVERS = ("rank0", "all", "each")
# The numbers of ``_agree``: this rank needs no further tensors, needs some, or its weights have changed.
_DONE, _WANTS, _CHANGED = 0, 1, 2


class FullWeights(Iterator[tuple[str, torch.Tensor]]):
    """(name, whole tensor) of each weight and buffer of a model. ``DeepSpeedEngine.iter_full_weights`` makes it.

    A tensor is valid until the next one is asked for: copy it to keep it, and do not write to it. While the caller
    works with a tensor, the gathers of the next ones are on their way. ``entries`` has the names, shapes and dtypes of
    all tensors, in order, before any of them is gathered.

    The ranks go from piece to piece together. A rank that ends its loop early still takes part in the gathers of the
    others when the iterator is closed: at the end of a ``for`` loop, by an exception too, or by ``close``. If all ranks
    that get tensors have ended, the rest is not gathered.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        fetcher: Fetcher | None,
        mesh: Mesh,
        *,
        bytes_ahead: int | str,
        adapters: str,
        to: str,
        is_wanted: Callable[[PublishedPiece], bool] = lambda piece: True,
    ) -> None:
        if to not in RECEIVERS:
            raise ConfigError(
                f"is {to!r}", where="iter_full_weights(to=...)", fix=f"pass one of {', '.join(RECEIVERS)}"
            )
        where = "iter_full_weights(bytes_ahead=...)"
        self._limit = parse_bytes(str(bytes_ahead), where)
        self._fetcher, self._comm = fetcher, mesh.comm
        if fetcher is not None and fetcher.phase.is_active:
            raise StateError(
                "a forward or backward pass is running",
                where="iter_full_weights",
                fix="call it before the forward, or after engine.step()",
            )
        self._tensors = named_tensors(module, exclude_frozen=False)
        self._parts = Parts(module, self._tensors, mesh)
        self._aliases = aliases_of(self._tensors, self._parts)
        self._pieces = [piece for piece in self._plan(module, adapters) if is_wanted(piece)]
        self._receivers = self._share(to)
        mine = [i for i, rank in enumerate(self._receivers) if rank in (None, self._comm.rank)]
        self._n_wanted = mine[-1] + 1 if mine else 0  # pieces up to the last one for this rank
        self.entries = [entry for piece in self._pieces for entry in self._entries_of(piece)]
        self._units = [self._units_of(piece) for piece in self._pieces]
        self._is_collective = mesh.comm.world_size > 1 and (
            any(unit.source.is_collective for units in self._units for unit in units) or self._parts.are_spread
        )
        self._n_writes = 0 if fetcher is None else fetcher.n_writes
        self._held: dict[int, int] = {}  # index of a gathered unit -> the last piece that needs it
        self._next = self._n_started = 0  # pieces
        self._ready: deque[tuple[str, torch.Tensor]] = deque()
        self._wants, self._is_over = True, False

    def _plan(self, module: torch.nn.Module, adapters: str) -> list[PublishedPiece]:
        facts = {
            name: TensorFacts(self._parts.shape(name, tensor), tensor.dtype, tensor.requires_grad)
            for name, tensor in self._tensors.items()
            if name not in self._aliases
        }
        pieces = pieces_of(module, facts, self._aliases, adapters)
        for piece in pieces:
            spread = [name for name in piece.inputs if len(self._parts.names(name)) > 1]
            if spread and (len(piece.inputs) > 1 or list(piece.outputs) != piece.inputs):
                raise FeatureError(
                    "experts on several ranks are sent as they are only",
                    where=spread[0],
                    fix='pass adapters="apart", or save the model with save_checkpoint',
                )
        return pieces

    def _share(self, to: str) -> list[int | None]:
        """For each piece the rank that gets it; None: all ranks."""
        if to != "each":
            return [0 if to == "rank0" else None] * len(self._pieces)
        loads = [0] * self._comm.world_size
        ranks: list[int | None] = []
        for piece in self._pieces:
            least = loads.index(min(loads))
            loads[least] += sum(shape.numel() * dtype.itemsize for shape, dtype in piece.outputs.values())
            ranks.append(least)
        return ranks

    def _entries_of(self, piece: PublishedPiece) -> Iterator[WeightEntry]:
        for out, (shape, dtype) in piece.outputs.items():
            logical = self._parts.names(out) if piece.inputs == [out] else [out]
            for name in logical:
                entry = WeightEntry(name, shape, dtype, None, piece.is_frozen, piece.is_adapter)
                yield entry
                for other in self._others_of(piece, name):
                    yield entry._replace(name=other, tied_to=name)

    def _others_of(self, piece: PublishedPiece, name: str) -> list[str]:
        """Other names of the tensor that comes as ``name``."""
        ties = piece.ties if name in piece.outputs else self._aliases
        return [other for other, first in ties.items() if first == name]

    def _units_of(self, piece: PublishedPiece) -> list[GatherUnit]:
        states = (state_of(self._tensors[name]) for name in piece.inputs)
        units = {state.group.index: state.group for state in states if isinstance(state, PlacedShard)}
        return [units[index] for index in sorted(units)]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        while not self._ready:
            if not self._advance():
                raise StopIteration
        return self._ready.popleft()

    def close(self) -> None:
        """Ends the iteration on this rank. Takes part in the gathers of ranks that go on, and lets all units go."""
        self._wants = False
        self._ready.clear()
        while self._advance():
            self._ready.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_over", True):
            self.close()

    def _advance(self) -> bool:
        """Makes the next piece. Returns False, with all units let go, if there is none that a rank wants."""
        if self._is_over:
            return False
        try:
            if self._next < len(self._pieces) and self._agree():
                self._make(self._next)
                self._next += 1
                return True
        except BaseException:
            self._end()
            raise
        self._end()
        return False

    def _end(self) -> None:
        self._is_over = True
        self._let_go(list(self._held))

    def _agree(self) -> bool:
        """Whether any rank wants further tensors. Raises StateError on all ranks if the weights have changed."""
        mine = _WANTS if self._wants and self._next < self._n_wanted else _DONE
        if self._fetcher is not None and self._fetcher.n_writes != self._n_writes:
            mine = _CHANGED
        said = self._comm.gather_numbers(mine, label="weights wanted") if self._is_collective else [mine]
        if _CHANGED in said:
            raise StateError(
                f"the weights have changed on rank {said.index(_CHANGED)} since the iteration began"
                f" (at tensor {self._next} of {len(self._pieces)})",
                where="iter_full_weights",
                fix="end the iteration before engine.step(), a load or an edit of weights, and begin a new one after it",
            )
        return max(said) == _WANTS

    def _make(self, number: int) -> None:
        """Gathers the units of a piece, starts the gathers after it, and keeps the piece's tensors for the caller."""
        if self._fetcher is not None:
            self._make_room(number)
            self._start_until(number)
            for unit in self._units[number]:
                unit.finish()
        piece, receiver = self._pieces[number], self._receivers[number]
        whole: dict[str, torch.Tensor] = {}
        for name in piece.inputs:
            found = dict(self._parts.everyone(name, self._tensors[name].detach()))
            whole.update({name: next(iter(found.values()))} if len(found) == 1 else found)
        if not self._wants or receiver not in (None, self._comm.rank):
            return
        made = whole if len(piece.inputs) == 1 and len(whole) > 1 else piece.make(whole)
        for name, tensor in made.items():
            self._ready.append((name, tensor))
            self._ready.extend((other, tensor) for other in self._others_of(piece, name))

    def _make_room(self, number: int) -> None:
        """Lets units go that are not needed any more. The variable of the caller's loop still refers to the piece
        before ``number``, and memory that is referred to cannot be used for the next unit. So the units of that piece
        stay for one piece more if there is room."""
        self._let_go([index for index, last in self._held.items() if last < number - 1])
        groups = self._fetcher.groups
        wanted = self._held.keys() | {unit.index for unit in self._units[number]}
        if sum(groups[index].source.cost.memory for index in wanted) > self._limit:
            self._let_go([index for index, last in self._held.items() if last < number])

    def _start_until(self, number: int) -> None:
        """Starts the gathers of a piece, and of the following ones while they take ``bytes_ahead`` at most."""
        fetcher = self._fetcher
        n_bytes = sum(fetcher.groups[index].source.cost.memory for index in self._held)
        for following in range(self._n_started, len(self._pieces)):
            new = [unit for unit in self._units[following] if unit.index not in self._held]
            n_new = sum(unit.source.cost.memory for unit in new)
            if following > number and n_bytes + n_new > self._limit:
                return
            n_bytes += n_new
            self._n_started = following + 1
            if new:
                fetcher.pin(new, waits=False)
            for unit in self._units[following]:
                self._held[unit.index] = following

    def _let_go(self, indices: Sequence[int]) -> None:
        if indices:
            self._fetcher.unpin([self._fetcher.groups[index] for index in indices])
        for index in indices:
            del self._held[index]
