"""The whole weights of an engine, one after the other, while the next ones are gathered."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

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
# The answers of a rank at a meeting: no further tensors needed, some needed, weights changed.
_DONE, _WANTS, _CHANGED = 0, 1, 2


class _EndedTensor(torch.Tensor):
    """The class of a tensor of the iterator when the next one has been asked for. Its memory is used again, so each
    read raises StateError."""

    _dsc_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        held = (*args, *(kwargs or {}).values())
        flat = [each for value in held for each in (value if isinstance(value, list | tuple) else [value])]
        name = next((each._dsc_name for each in flat if isinstance(each, cls)), "a tensor")
        raise StateError(
            "its memory was given to the next weights when they were asked for",
            where=name,
            fix="copy a tensor of iter_full_weights in the same turn of the loop, to read it later: tensor.clone()",
        )


def _end_tensor(name: str, tensor: torch.Tensor) -> None:
    """Takes its memory from a tensor that was handed out. Views that the caller has made of it keep the memory, and it
    is not used again then."""
    if type(tensor) is not torch.Tensor:  # a library's class, with memory of its own
        return
    tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    tensor._dsc_name = name
    tensor.__class__ = _EndedTensor


class _Stop(NamedTuple):
    """The gather units, by index, to let go before a piece, and those to start after that."""

    ended: list[int]
    started: list[int]


def _stops_of(needs: Sequence[Sequence[int]], memory: Callable[[int], int], limit: int) -> dict[int, _Stop]:
    """The stops by the number of their piece. needs: for each piece its units. memory: bytes that a unit takes.

    The units of one piece are held, and those of further pieces up to ``limit`` bytes. The next stop comes when half of
    the bytes have been used and the next unit has room. So the gathers of one half run while the caller
    works with the other half. Between two stops nothing is gathered or let go.
    """
    stops: dict[int, _Stop] = {}
    uses: Counter[int] = Counter()  # of units by the pieces first to end - 1
    held: set[int] = set()
    first = end = n_bytes = 0

    def fits() -> bool:
        new = sum(memory(unit) for unit in needs[end] if not uses[unit])
        return not new or n_bytes + new <= limit

    while end < len(needs):
        while end < len(needs) and (end == first or fits()):
            n_bytes += sum(memory(unit) for unit in needs[end] if not uses[unit])
            uses.update(needs[end])
            end += 1
        now = set(uses)
        stops[first] = _Stop(sorted(held - now), sorted(now - held))
        held, half = now, n_bytes / 2
        while first < end < len(needs) and (n_bytes > half or not fits()):
            uses.subtract(needs[first])
            for unit in needs[first]:
                if not uses[unit]:
                    del uses[unit]
                    n_bytes -= memory(unit)
            first += 1
    return stops


class FullWeights(Iterator[tuple[str, torch.Tensor]]):
    """(name, whole tensor) of each weight and buffer of a model. ``DeepSpeedEngine.iter_full_weights`` makes it.

    A tensor is valid until the next one is asked for: copy it to keep it, and do not write to it. Its memory is used
    again then, even if a variable still refers to it, and reads of it raise StateError. While the caller works with a
    tensor, the gathers of the next ones are on their way. ``entries`` has the names, shapes and dtypes of all tensors,
    in order, before any of them is gathered.

    The ranks meet before they start gathers, and before each piece whose parts are spread over ranks. Where they meet
    follows from the model and the arguments, which are the same on all ranks. Between two meetings a rank goes on by
    itself, and holds the same gathered units as the others. At a meeting each rank says whether it wants further
    tensors, and whether its weights have changed since the iteration began; if any rank's have, all raise StateError. A
    rank that ends its loop early goes to the remaining meetings when the iterator is closed: at the end of a ``for``
    loop, by an exception too, or by ``close``. If all ranks that get tensors have ended, the rest is not gathered.
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
        self._spread = [any(map(self._parts.is_spread, piece.inputs)) for piece in self._pieces]
        groups = [] if fetcher is None else fetcher.groups
        indices = [[unit.index for unit in units] for units in self._units]
        self._stops = _stops_of(indices, lambda index: groups[index].source.cost.memory, self._limit)
        self._meetings: set[int] = set()  # numbers of pieces, each with a meeting before it
        if mesh.comm.world_size > 1:
            self._meetings.update(i for i, is_spread in enumerate(self._spread) if is_spread)
            for i, stop in self._stops.items():
                if any(groups[index].source.is_collective for index in stop.started):
                    self._meetings.add(i)
        self._last_meeting = max(self._meetings, default=-1)
        self._n_writes = 0 if fetcher is None else fetcher.n_writes
        self._changed_at: int | None = None  # the next piece at the time of the change
        self._is_withheld = False  # a tensor of this rank was held back for the change
        self._held: set[int] = set()  # indices of gathered units
        self._next = 0  # the number of the next piece
        self._ready: deque[tuple[str, torch.Tensor]] = deque()
        self._last: tuple[str, torch.Tensor] | None = None
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
        self._end_last()
        if self._ready and self._has_changed():
            self._is_withheld = True
            self._ready.clear()
        while not self._ready:
            if not self._advance():
                raise StopIteration
        self._last = self._ready.popleft()
        return self._last

    def close(self) -> None:
        """Ends the iteration on this rank. Goes to the meetings with ranks that go on, and lets all units go. The
        tensor that was handed out last stays valid."""
        self._wants, self._last = False, None
        self._ready.clear()
        while self._advance():
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_over", True):
            self.close()

    def _end_last(self) -> None:
        """Ends the tensor that was handed out last, unless it comes again under another name."""
        if self._last is not None and not (self._ready and self._ready[0][1] is self._last[1]):
            _end_tensor(*self._last)
            self._last = None

    @property
    def _has_ended(self) -> bool:
        """Whether this rank gets no further tensors, though there may be some for it."""
        return self._is_withheld or not self._wants

    def _has_changed(self) -> bool:
        """Whether this rank's weights have changed since the iteration began."""
        if self._changed_at is None and self._fetcher is not None and self._fetcher.n_writes != self._n_writes:
            self._changed_at = self._next
        return self._changed_at is not None

    def _advance(self) -> bool:
        """Makes the next piece, if this rank gets it. Returns False, with all units let go, if there is none that a
        rank wants."""
        if self._is_over:
            return False
        try:
            if self._next <= self._last_meeting or (self._next < self._n_wanted and not self._has_ended):
                if self._next not in self._meetings or self._meet():
                    self._go_on()
                    return True
            elif self._wants and self._is_withheld:
                raise self._changed(self._comm.rank)
        except BaseException:
            self._end()
            raise
        self._end()
        return False

    def _end(self) -> None:
        self._is_over = True
        self._let_go(list(self._held))

    def _meet(self) -> bool:
        """Whether any rank wants further tensors. Raises StateError on all ranks if the weights of one have changed."""
        mine = _WANTS if self._wants and self._next < self._n_wanted else _DONE
        said = self._comm.gather_numbers(_CHANGED if self._has_changed() else mine, label="weights wanted")
        if _CHANGED in said:
            raise self._changed(said.index(_CHANGED))
        return max(said) == _WANTS

    def _changed(self, rank: int) -> StateError:
        at = self._next if self._changed_at is None else self._changed_at
        return StateError(
            f"the weights have changed on rank {rank} since the iteration began"
            f" (at tensor {at} of {len(self._pieces)})",
            where="iter_full_weights",
            fix="end the iteration before engine.step(), a load or an edit of weights, and begin a new one after it",
        )

    def _go_on(self) -> None:
        """Takes part in the collectives of the next piece, and keeps its tensors for the caller."""
        number = self._next
        stop = self._stops.get(number)
        is_mine = self._wants and self._receivers[number] in (None, self._comm.rank)
        is_withheld = is_mine and self._has_changed()
        self._is_withheld |= is_withheld
        if stop is not None:
            self._let_go([index for index in stop.ended if index in self._held])
            self._start(stop.started)
        if is_mine and not is_withheld:
            whole = self._whole(number)
            try:
                self._hand_out(number, whole)
            except Exception:
                # The other ranks need nothing of this one's tensors, but they wait for it at their meetings.
                self._next += 1
                self.close()
                raise
        elif self._spread[number]:
            self._whole(number)
        self._next += 1

    def _whole(self, number: int) -> dict[str, torch.Tensor]:
        """The whole tensors of a piece, by the names of the module, or of all ranks' experts. Collective if they are
        spread."""
        for unit in self._units[number]:
            unit.finish()
        whole: dict[str, torch.Tensor] = {}
        for name in self._pieces[number].inputs:
            found = dict(self._parts.everyone(name, self._tensors[name].detach()))
            whole.update({name: next(iter(found.values()))} if len(found) == 1 else found)
        return whole

    def _hand_out(self, number: int, whole: dict[str, torch.Tensor]) -> None:
        piece = self._pieces[number]
        made = whole if len(piece.inputs) == 1 and len(whole) > 1 else piece.make(whole)
        for name, found in made.items():
            tensor = found.detach()  # an object of ours, which can be ended
            self._ready.append((name, tensor))
            self._ready.extend((other, tensor) for other in self._others_of(piece, name))

    def _start(self, indices: Sequence[int]) -> None:
        """Starts the gathers of units."""
        if indices:
            self._fetcher.pin([self._fetcher.groups[index] for index in indices], waits=False)
            self._held.update(indices)

    def _let_go(self, indices: Sequence[int]) -> None:
        if indices:
            self._fetcher.unpin([self._fetcher.groups[index] for index in indices])
            self._held.difference_update(indices)
