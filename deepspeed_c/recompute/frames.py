"""A layer that runs again in the backward when autograd needs its saved tensors. The run ends at the last of these
tensors.

In forward autograd saves a *blank* in place of each tensor. When a backward needs the first blank, the layer runs
again. The tensors that autograd would save in this run fill the blanks in order, and the run ends with the last blank.
A tensor is identified by its number, so a layer must do the same in both runs. Shape, dtype and device of each tensor
are checked.

Recomputed layers may be nested. The inputs of the inner layer are then among the tensors with blanks of the outer
layer.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks

from deepspeed_c.errors import DeepSpeedCError, RecomputeError
from deepspeed_c.recompute.compare import Outputs, Trace, digest
from deepspeed_c.recompute.conditions import Conditions
from deepspeed_c.recompute.nests import Arguments
from deepspeed_c.recompute.once import OnceResults
from deepspeed_c.recompute.operators import KeptOutputs
from deepspeed_c.saved_tensors import Packer, counts_all, hooks_around

__all__ = ["NO_BACKWARD", "Frame", "Inputs", "Observers"]

# The number that stands for autograd's pass outside any pass.
NO_BACKWARD = -1


class _Enough(Exception):
    """Every blank that autograd may ask for is filled. This is no error, but hooks that always run must see an
    exception.
    """


class Inputs:
    """The input tensors of a layer, kept until the layer runs again. Each tensor is kept by the first packer that takes
    it, otherwise by the saved-tensor hooks around the layer, otherwise by autograd itself.
    """

    __slots__ = ("_kept", "_label")

    def __init__(self, tensors: Sequence[torch.Tensor], packers: Sequence[Packer], label: str) -> None:
        self._label = label
        pack_rest, unpack_rest = hooks_around()
        # Within another recomputed layer the packers keep no inputs.
        packers = () if counts_all(pack_rest) else packers
        self._kept = []
        for tensor in tensors:
            for packer in packers:
                packed = packer.pack(tensor)
                if packed is not None:
                    self._kept.append((packer.unpack, packed, tensor.requires_grad))
                    break
            else:
                self._kept.append((unpack_rest, pack_rest(tensor), tensor.requires_grad))

    def again(self) -> list[torch.Tensor]:
        """The tensors, outside any graph. Raises RecomputeError where a tensor was overwritten meanwhile."""
        return [self._get(i) for i in range(len(self._kept))]

    def _get(self, i: int) -> torch.Tensor:
        unpack, packed, requires_grad = self._kept[i]
        try:
            tensor = unpack(packed)
        except DeepSpeedCError:
            raise
        except RuntimeError as error:
            raise RecomputeError(
                f"its input {i} is not what it was: {error}",
                where=f"recomputation of {self._label}",
                fix="leave a checkpointed layer's inputs as they are (x + 1, not x.add_(1)), or pass it a clone",
            ) from error
        if tensor.is_leaf and tensor.requires_grad == requires_grad:
            return tensor
        return tensor.detach().requires_grad_(requires_grad)


def describe(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


class _Blank:
    """The object that autograd keeps instead of a tensor. ``values``: the recomputed tensor, for each pass that has
    recomputed it.
    """

    __slots__ = ("__weakref__", "frame", "values")

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.values: dict[int, torch.Tensor] = {}


class Observers(NamedTuple):
    """The observers of a running layer; None: no observer of that kind."""

    trace: Trace | None = None
    """Compares the values of the forward with the values of the recomputation."""
    outputs: KeptOutputs | None = None
    """Outputs of operators that are not run again."""
    looked_at: Outputs | None = None
    """The outputs of the forward, for the comparison with the recomputation."""
    on_save: Callable[[torch.Tensor], None] | None = None
    """Called with each tensor that autograd would save."""


class Frame:
    """One call of a layer. The blanks in the call's graph hold the frame, so it lives as long as any part of that
    graph.
    """

    counts_all = True

    def __init__(
        self,
        function: Callable,
        arguments: Arguments,
        inputs: Inputs,
        conditions: Conditions,
        label: str,
        watch: Observers,
    ) -> None:
        self._function, self._arguments, self._inputs, self._conditions = function, arguments, inputs, conditions
        self._label = label
        self._trace, self._outputs, self._looked_at, self._on_save = watch
        self._blanks: list[weakref.ref[_Blank]] = []
        self._seen: list[Any] = []
        self._lock = threading.RLock()  # autograd runs one thread per device
        self._once = OnceResults(label)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """The context of the forward: saved-tensor hooks, and what is kept of it."""
        with saved_tensors_hooks(self.pack, give), self._once.recording():
            yield

    def pack(self, tensor: torch.Tensor) -> _Blank:
        if self._on_save is not None:
            self._on_save(tensor)
        blank = _Blank(self)
        self._blanks.append(weakref.ref(blank))
        self._seen.append(describe(tensor) if self._trace is None else (describe(tensor), digest(tensor)))
        return blank

    def find(self, blank: _Blank) -> torch.Tensor:
        """The tensor that belongs at ``blank``. The layer is run again unless it was already in this pass."""
        task = torch._C._current_graph_task_id()
        with self._lock:
            if task not in blank.values:
                self._recompute(task)
            value = blank.values.pop(task)
            if task == NO_BACKWARD:
                self._drop(task)
        return value

    def _recompute(self, task: int) -> None:
        if task != NO_BACKWARD:
            # A pass through a part of the graph does not ask for the other blanks, so their values are dropped at its
            # end.
            frame = weakref.ref(self)
            Variable._execution_engine.queue_callback(lambda: _drop_of(frame, task))
        looked_at, self._looked_at = self._looked_at, None
        again = _Again(self._blanks, self._seen, task, self._label, self._trace, ends_early=looked_at is None)
        args, kwargs = self._arguments.with_tensors(self._inputs.again())
        # The graph of the second run is not used: autograd ties the given tensors to the graph of the forward.
        once = self._once.repeating()
        replaying = nullcontext() if self._outputs is None else self._outputs.replaying()
        with self._conditions.replayed(), torch.enable_grad(), saved_tensors_hooks(again.pack, _same), replaying, once:
            try:
                with nullcontext() if self._trace is None else self._trace.repeating():
                    found = self._function(*args, **kwargs)
            except _Enough:
                return
        if looked_at is not None and again.n >= len(self._blanks):
            looked_at.compare(found)
            return
        raise RecomputeError(
            f"saved {len(self._blanks)} tensors in forward and {again.n} when it was run again",
            where=f"recomputation of {self._label}",
            fix="let it do the same for the same inputs, whatever has run in between (a counter, a cache, a mode?)",
        )

    def _drop(self, task: int) -> None:
        for ref in self._blanks:
            blank = ref()
            if blank is not None:
                blank.values.pop(task, None)


def give(blank: _Blank) -> torch.Tensor:
    return blank.frame.find(blank)


def _drop_of(frame: weakref.ref[Frame], task: int) -> None:
    if (living := frame()) is not None:
        living._drop(task)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Again:
    """The tensors that autograd saves while a layer is run again. Each is stored in the matching blank of the forward."""

    counts_all = True

    def __init__(
        self,
        places: Sequence[weakref.ref[_Blank]],
        seen: Sequence[Any],
        task: int,
        label: str,
        trace: Trace | None,
        *,
        ends_early: bool,
    ) -> None:
        self._ends_early = ends_early
        self._blanks, self._seen, self._task, self._label, self._trace = places, seen, task, label, trace
        self.n = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        # Undetached, an operator's output would keep the operator that saves it alive, and a weight might be released
        # before its use.
        tensor = tensor.detach()
        i, self.n = self.n, self.n + 1
        if i < len(self._blanks):
            self._check(i, tensor)
            blank = self._blanks[i]()
            if blank is not None:
                blank.values[self._task] = tensor
        if self._ends_early and self.n >= len(self._blanks):
            raise _Enough
        return tensor

    def _check(self, i: int, tensor: torch.Tensor) -> None:
        seen = self._seen[i]
        if self._trace is not None:
            seen, was = seen
        if describe(tensor) != seen:
            raise RecomputeError(
                f"saved a tensor of {_words(seen)} as number {i} in forward, and one of {_words(describe(tensor))}"
                " when it was run again",
                where=f"recomputation of {self._label}",
                fix="let it do the same for the same inputs, whatever has run in between (a counter, a cache, a mode?)",
            )
        if self._trace is not None and digest(tensor) != was:
            raise self._trace.difference()


def _words(seen: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    shape, dtype, device = seen
    return f"shape {tuple(shape)} and {dtype} on {device}"
