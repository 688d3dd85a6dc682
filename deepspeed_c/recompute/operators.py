"""Expensive operators of a layer: their bytes and times, and repeated runs of a layer with the kept outputs of some of
them.

Expensive operators are matrix products, convolutions, attention and collectives. A layer calls them in the same order
each time, so an operator is identified by its number among the layer's expensive operators.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.errors import RecomputeError
from deepspeed_c.recompute.nests import is_activation
from deepspeed_c.recompute.rng import device_state

__all__ = ["KeptOutputs", "MeasuredLayer", "MeasuredOperator", "Measurement", "Meter"]

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_scaled_mm", "_grouped_mm", "convolution", "_trilinear")
_ATTENTION = "aten::_scaled_dot_product_"
_COLLECTIVES = "_c10d_functional::"
_SENT = ("c10d::", _COLLECTIVES, "deepspeed_c::moe_exchange_")
_WAIT = "_c10d_functional::wait_tensor"
_OWN_WAIT = "deepspeed_c::tp_wait_"
# Tensor-parallel layers sum in place, so a copy of the sum is kept. ``tp_sum_start_`` has the sum only after its wait.
_SUM_STARTS_IN_PLACE = "deepspeed_c::tp_sum_start_"
_SUMS_IN_PLACE = ("deepspeed_c::tp_sum_", _SUM_STARTS_IN_PLACE)
_OWN_SENDS = (*_SUMS_IN_PLACE, *(f"deepspeed_c::tp_{name}_start" for name in ("sum", "gather", "scatter")))
_WAITS = (_WAIT, _OWN_WAIT)
_EXPENSIVE = frozenset((*(f"aten::{name}" for name in _PRODUCTS), "deepspeed_c::nn_attention", *_OWN_SENDS))
# Repeating a collective costs all ranks time, so its time counts twice and its output is kept by preference.
_COLLECTIVE_WEIGHT = 2


def _is_expensive(name: str) -> bool:
    if name.startswith(_ATTENTION):
        return "backward" not in name
    return name in _EXPENSIVE or (name.startswith(_COLLECTIVES) and name != _WAIT)


def _results(name: str, args: Any, outputs: Any) -> Any:
    """The results of an operator. A sum in place that is still under way has no results yet."""
    if name == _SUM_STARTS_IN_PLACE:
        return ()
    return args[0].clone() if name in _SUMS_IN_PLACE else outputs


class MeasuredOperator(NamedTuple):
    """One call of an expensive operator in a layer's forward."""

    name: str
    n_bytes: int  # bytes of its outputs
    ns: int  # 0: the layer saves nothing after this operator, so a repeated run ends before it
    is_saved: bool  # a backward needs its outputs, so they are there after the layer has been run again
    may_keep: bool  # it drew no random numbers, and nothing overwrote its outputs


class MeasuredLayer(NamedTuple):
    """One call of a layer. Bytes are those of storages without parameters; each storage counts once in a forward."""

    label: str
    n_elems: int  # elements of its input tensors
    input_bytes: int  # bytes of its input tensors
    saved_bytes: int  # bytes that autograd keeps for its backward without recomputation
    ns: int  # time of all its operators that are run again
    operators: tuple[MeasuredOperator, ...]
    movable_bytes: int = 0  # bytes of the inputs that may wait elsewhere
    sends: bool = False  # the caller's code in it calls collectives, so all ranks run it again if one does


def _random_state() -> tuple[bytes, Any]:
    """The states of the generators that operators draw from."""
    device = torch.device(get_accelerator().current_device_name())
    other = None if device.type == "cpu" else device_state(device)
    return torch.get_rng_state().numpy().tobytes(), other


def _may_draw(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _same_state(a: tuple[bytes, Any], b: tuple[bytes, Any]) -> bool:
    if torch.is_tensor(a[1]):
        return a[0] == b[0] and torch.equal(a[1], b[1])
    return a == b


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The values of ``tensor`` outside any graph. The alias's version counts the writes to ``tensor``."""
    # Below autograd a detached tensor has a separate version counter, unless the dispatch key that makes views is
    # active.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class _Aliases:
    """Tensors of some storages, each with its version at creation. They show whether anything was written to the
    storages.

    A product without bias comes out of ``_unsafe_view``, and no other tensor shares that output's version counter.
    """

    def __init__(self, outputs: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        self.note_outputs(outputs)
        self.places = {_place_of(tensor) for tensor in self.tensors}

    def note_outputs(self, outputs: Any) -> None:
        for leaf in tree_leaves(outputs):
            if torch.is_tensor(leaf):
                self.tensors.append(_alias(leaf))
                self._versions.append(leaf._version)

    @property
    def are_overwritten(self) -> bool:
        return any(tensor._version != version for tensor, version in zip(self.tensors, self._versions))


class _Followed:
    """Finds the call of which a given tensor is an alias of the outputs."""

    def __init__(self) -> None:
        self._by_place: dict[int, _Aliases] = {}

    def add(self, aliases: _Aliases) -> None:
        self._by_place.update(dict.fromkeys(aliases.places, aliases))

    def note_outputs(self, outputs: Any) -> None:
        """Notes ``outputs`` of an operator that is not followed itself."""
        for leaf in tree_leaves(outputs) if self._by_place else ():
            if torch.is_tensor(leaf) and (aliases := self._by_place.get(_place_of(leaf))) is not None:
                aliases.note_outputs(leaf)


class _Seen:
    """An operator's call while its layer is measured."""

    __slots__ = ("aliases", "is_random", "name", "ns", "outputs")

    def __init__(self, name: str, ns: int, outputs: Any, *, is_random: bool) -> None:
        self.name, self.ns, self.is_random = name, ns, is_random
        self.give(outputs)

    def give(self, outputs: Any) -> None:
        self.aliases = _Aliases(outputs)
        self.outputs = list(self.aliases.tensors)


class Meter:
    """Measures one call of an operator by the clock."""

    def call(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, int, bool]:
        """(results, nanoseconds, whether it drew random numbers). The last value is meaningful for expensive operators
        only.
        """
        accelerator = get_accelerator()
        before = _random_state() if _is_expensive(func._schema.name) and _may_draw(func) else None
        accelerator.synchronize()
        begin = time.perf_counter_ns()
        outputs = func(*args, **kwargs)
        accelerator.synchronize()
        ns = time.perf_counter_ns() - begin
        return outputs, ns, before is not None and not _same_state(before, _random_state())


class _Onlooker(TorchDispatchMode):
    """Sees every operator except those within compiled parts, which it leaves unchanged."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Called by ``torch.compile``. If this were False, ``torch.compile`` would refuse to compile, or skip
        compilation.
        """
        return True


class _LastSaved(NamedTuple):
    """The progress of a layer when autograd saved a tensor."""

    ns: int
    of_operators: tuple[int, ...]  # nanoseconds of each operator so far; waits for some of them may follow


class Measurement(_Onlooker):
    """Bytes and time of one call of a layer. The layer runs within this context. The tensors that the layer would save
    are held until ``done``.

    counted: addresses of storages that earlier layers have counted; this layer adds the addresses of its inputs.
    meter: measures operators; by default by the clock.
    ends_early: a repeated run ends at the last tensor that autograd saves, not at the layer's end.
    """

    def __init__(
        self,
        label: str,
        module: torch.nn.Module | None,
        tensors: list[torch.Tensor],
        counted: set[int],
        meter: Meter | None = None,
        *,
        ends_early: bool = True,
    ) -> None:
        super().__init__()
        self._label, self._module, self._tensors, self._counted = label, module, tensors, counted
        self._meter = Meter() if meter is None else meter
        self._saved: list[torch.Tensor] = []
        self._seen: list[_Seen] = []
        self._followed = _Followed()
        self._under_way: dict[int, _Seen] = {}  # calls of collectives, by the place of their results
        self._ns, self._sends, self._ends_early = 0, False, ends_early
        self._reached: _LastSaved | None = None

    def note_saved(self, tensor: torch.Tensor) -> None:
        """Notes that autograd saves ``tensor``."""
        if self._ends_early:
            self._reached = _LastSaved(self._ns, tuple(seen.ns for seen in self._seen))
        if not self._is_parameter(tensor):
            self._saved.append(tensor.detach())

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
            return True
        if self._module is None:
            return False
        # Parameters of stage 3 lie in one gathered buffer, and are released after the layer.
        place = _place_of(tensor)
        return any(_place_of(p) == place for p in (*self._module.parameters(), *self._module.buffers()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        outputs, ns, is_random = self._meter.call(func, args, kwargs or {})
        self._ns += ns
        self._sends |= name.startswith(_SENT)
        if name in _WAITS:
            self._note_wait(args[0], ns)
        elif _is_expensive(name):
            self._seen.append(_Seen(name, ns, _results(name, args, outputs), is_random=is_random))
            self._followed.add(self._seen[-1].aliases)
            self._note_start(name, args, outputs)
        else:
            self._followed.note_outputs(outputs)
        return outputs

    def _note_start(self, name: str, args: Any, outputs: Any) -> None:
        """Notes a collective that may be under way from now on. Several are under way where halves of a batch overlap."""
        if name.startswith((_COLLECTIVES, *_OWN_SENDS)):
            results = args[0] if name in _SUMS_IN_PLACE else outputs
            self._under_way.update({_place_of(t): self._seen[-1] for t in tree_leaves(results) if torch.is_tensor(t)})

    def _note_wait(self, result: torch.Tensor, ns: int) -> None:
        seen = self._under_way.pop(_place_of(result), None)
        if seen is None:
            return
        seen.ns += ns
        if seen.name == _SUM_STARTS_IN_PLACE:
            seen.give(result.clone())

    def done(self) -> MeasuredLayer:
        """The measured layer. Called once, after the layer."""
        given = {_place_of(t): t.untyped_storage().nbytes() for t in self._tensors if not self._is_parameter(t)}
        saved = {_place_of(t): t.untyped_storage().nbytes() for t in self._saved}
        new = {place: n_bytes for place, n_bytes in given.items() if place not in self._counted}
        movable = {_place_of(t) for t in self._tensors if is_activation(t)}
        if self._reached is not None:
            self._forget_the_rest(self._reached)
        operators = tuple(self._operator(seen, saved) for seen in self._seen)
        found = MeasuredLayer(
            self._label,
            sum(t.numel() for t in self._tensors),
            sum(new.values()),
            sum(n_bytes for place, n_bytes in saved.items() if place not in self._counted),
            # If an operator's time is weighted, the layer's time grows with it. Otherwise nothing would be left for the
            # other operators.
            self._ns + sum(op.ns - seen.ns for op, seen in zip(operators, self._seen)),
            operators,
            sum(n_bytes for place, n_bytes in new.items() if place in movable),
            self._sends,
        )
        self._counted.update(new)
        self._saved, self._seen, self._tensors, self._followed, self._under_way = [], [], [], _Followed(), {}
        self._reached = None
        return found

    def _forget_the_rest(self, reached: _LastSaved) -> None:
        """Sets the last operators of a layer to no time, because a repeated run ends before them. They keep their
        numbers.
        """
        self._ns = reached.ns
        n_later = len(self._seen) - len(reached.of_operators)
        for seen, ns in zip(self._seen, (*reached.of_operators, *[0] * n_later), strict=True):
            seen.ns = ns

    def _operator(self, seen: _Seen, saved: dict[int, int]) -> MeasuredOperator:
        places = {_place_of(tensor): tensor.untyped_storage().nbytes() for tensor in seen.outputs}
        weight = _COLLECTIVE_WEIGHT if seen.name.startswith((_COLLECTIVES, *_OWN_SENDS)) else 1
        return MeasuredOperator(
            seen.name.partition("::")[2],
            sum(places.values()),
            seen.ns * weight,
            any(place in saved for place in places),
            not (seen.is_random or seen.aliases.are_overwritten),
        )


def _place_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _CountedCall(NamedTuple):
    """A call whose outputs are kept."""

    name: str
    outputs: Any
    aliases: _Aliases


class KeptOutputs:
    """Outputs of chosen operators of one call of a layer. They are kept from the forward until the layer is run again.

    chosen: numbers among the layer's expensive operators.
    """

    def __init__(self, label: str, chosen: Collection[int]) -> None:
        self._label, self._chosen = label, frozenset(chosen)
        self._calls: dict[int, _CountedCall] = {}
        self._followed = _Followed()
        self._sums_under_way: dict[int, int] = {}  # numbers of operators, by the place of the sum

    def recording(self) -> TorchDispatchMode:
        """The context of the layer's forward."""
        return _Numbered(self._record, self._followed, on_wait=self._take_sum)

    def replaying(self) -> TorchDispatchMode:
        """The context of the layer's second run. Raises RecomputeError where a kept output was overwritten, or where
        another operator is called.
        """
        return _Numbered(self._replay)

    def _record(self, i: int, func: Any, args: Any, kwargs: Any) -> Any:
        if i not in self._chosen:
            return func(*args, **kwargs)
        before = _random_state() if _may_draw(func) else None
        outputs = func(*args, **kwargs)
        # An operator that draws random numbers has to draw them again, because later operators draw after it.
        if func._schema.name == _SUM_STARTS_IN_PLACE:
            self._sums_under_way[_place_of(args[0])] = i
        elif before is None or _same_state(before, _random_state()):
            kept = tree_map_only(torch.Tensor, _alias, _results(func._schema.name, args, outputs))
            self._calls[i] = _CountedCall(func._schema.name, kept, _Aliases(kept))
            self._followed.add(self._calls[i].aliases)
        return outputs

    def _take_sum(self, total: torch.Tensor) -> None:
        """Notes that ``total`` has been waited for. A sum that is still under way at the layer's end is not kept, but
        computed again.
        """
        i = self._sums_under_way.pop(_place_of(total), None)
        if i is not None:
            kept = total.clone()
            self._calls[i] = _CountedCall(_SUM_STARTS_IN_PLACE, kept, _Aliases(kept))

    def _replay(self, i: int, func: Any, args: Any, kwargs: Any) -> Any:
        call = self._calls.get(i)
        if call is None:
            return func(*args, **kwargs)
        where = f"recomputation of {self._label}"
        if call.name != func._schema.name:
            raise RecomputeError(
                f"called {call.name} as operator {i} in forward, and {func._schema.name} when it was run again",
                where=where,
                fix="let it do the same for the same inputs, whatever has run in between (a counter, a cache, a mode?)",
            )
        if call.aliases.are_overwritten:
            raise RecomputeError(
                f"the output of operator {i} ({call.name}), which is kept, was overwritten",
                where=where,
                fix="do not change its outputs in place (x + 1, not x.add_(1))",
            )
        if call.name in _SUMS_IN_PLACE:
            # No collective is under way in this case, so a wait that follows returns at once.
            args[0].copy_(call.outputs)
            return None
        return tree_map_only(torch.Tensor, _alias, call.outputs)


class _Numbered(_Onlooker):
    """Passes each call of an expensive operator to ``call``, with the operator's number. ``followed`` sees the results
    of other operators, and ``on_wait`` the result of a tensor-parallel collective after its wait.
    """

    def __init__(
        self,
        call: Callable[[int, Any, Any, Any], Any],
        followed: _Followed | None = None,
        *,
        on_wait: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self._call, self._followed, self._on_wait, self._n = call, followed, on_wait, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_expensive(func._schema.name):
            outputs = func(*args, **kwargs)
            if self._followed is not None:
                self._followed.note_outputs(outputs)
            if self._on_wait is not None and func._schema.name == _OWN_WAIT:
                self._on_wait(args[0])
            return outputs
        i, self._n = self._n, self._n + 1
        return self._call(i, func, args, kwargs)
