"""The compiled model of an engine: what its graphs' operators act on, and how it is undone. The compiled backward, for
a model that ``torch.compile`` compiles without operators of ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.compile.backend import GraphBackend, Roles
from deepspeed_c.compile.operators import ZERO_REDUCE, register_host
from deepspeed_c.compile.schedule import Schedule
from deepspeed_c.compile.torch_internals import compiling_backward, leave_alone
from deepspeed_c.config.compiler import Compile
from deepspeed_c.engine.backward import BackwardPass
from deepspeed_c.inject.swap import swap_forward
from deepspeed_c.zero.gradients.reducer import GradientReducer
from deepspeed_c.zero.weights.drivers.graphs import Graphs
from deepspeed_c.zero.weights.fetch import Fetcher
from deepspeed_c.zero.weights.gather_unit import PlacedShard
from deepspeed_c.zero.weights.grad_face import GradFace, notice_cleared, stop_noticing
from deepspeed_c.zero.weights.hooks import OUTSIDE_OF_GRAPHS
from deepspeed_c.zero.weights.param import state_of

__all__ = ["CompiledBackward", "CompiledModel"]


class CompiledModel:
    """A module whose forward runs as graphs that gather sharded weights and reduce gradients by themselves.

    The hooks of the module stay: they begin and end passes, and gather for what runs outside of a graph.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        fetcher: Fetcher | None,
        reducer: GradientReducer | None,
        step: Callable[[], int],
        config: Compile,
        backend: str,
        options: dict[str, Any] | None,
        schedule: Schedule,
        log: Path | None,
    ) -> None:
        self._module, self._fetcher, self._reducer = module, fetcher, reducer
        self._graphs = None if fetcher is None else fetcher.drivers.of(Graphs)
        self._config = config
        self.step = step
        self.number = register_host(self)
        # Raises before anything is changed.
        self.backend = GraphBackend(backend, self, schedule, options, log)
        # Parameters that frames of the running forward have read, and those that two runs of frames have read in one
        # forward. Autograd adds the parts of such a parameter's gradient before its hook gets the sum. Parts that
        # graphs put into the bucket one by one would be rounded otherwise, so they leave the graphs.
        self._read: set[int] = set()
        self._shared: set[int] = set()
        self._undo: Callable[[], None] | None = None
        self._hooks = None if fetcher is None else fetcher.hooks
        if self._hooks is not None:
            for code in OUTSIDE_OF_GRAPHS:
                leave_alone(code)
            self._hooks.compile(True)

    def compile(self, **options: Any) -> None:
        """Has the module run as graphs. options: further arguments of ``torch.compile``."""
        forward = torch.compile(self._module.forward, backend=self.backend, **options)
        self._undo = swap_forward(self._module, self._noting(forward))

    def _noting(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled forward, which reports what it compiles and what runs eagerly."""
        report = self.backend.report

        @wraps(compiled)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with report:
                return compiled(*args, **kwargs)

        return forward

    def close(self) -> None:
        """The module runs its own forward again, under the ordinary hooks."""
        if self._undo is not None:
            self._undo()
        if self._hooks is not None:
            self._hooks.compile(False)

    def roles_of(self, tensors: Sequence[Any], runs: bool) -> Roles:
        return Roles(tuple(map(self._place_of, tensors)), self._slots_of(tensors, runs))

    def _place_of(self, tensor: Any) -> tuple[int, int] | None:
        state = state_of(tensor)
        if type(state) is not PlacedShard or state.fetcher is not self._fetcher:
            return None
        return state.group.index, state.group.slots.index(state.slot)

    def _slots_of(self, tensors: Sequence[Any], runs: bool) -> tuple[int | None, ...]:
        if self._reducer is None:
            return (None,) * len(tensors)
        slots = [self._reducer.intake.number_of(tensor) for tensor in tensors]
        if torch.is_grad_enabled() and not self._reducer.is_in_backward:
            reads = {slot for slot in slots if slot is not None}
            self._shared |= reads & self._read
            if runs:
                self._read |= reads
        return tuple(None if slot in self._shared else slot for slot in slots)

    def begin_forward(self) -> None:
        """Called when a forward of the engine begins."""
        self._read.clear()

    def running_graph(self) -> AbstractContextManager[None]:
        return nullcontext() if self._graphs is None else self._graphs.running()

    def gather(self, unit: int) -> None:
        if self._config.sync_before_allgather:
            get_accelerator().synchronize()
        self._graphs.start(unit)
        if self._config.sync_after_allgather:
            self._graphs.finish(unit)
            get_accelerator().synchronize()

    def wait(self, unit: int, weights: Sequence[torch.Tensor], places: Sequence[int]) -> None:
        self._graphs.finish(unit)
        # Autograd gives a backward other tensor objects than the forward has saved.
        slots = self._fetcher.groups[unit].slots
        for weight, place in zip(weights, places):
            if weight is not slots[place].param:
                weight.data = slots[place].param.data

    def release(self, unit: int, weights: Sequence[torch.Tensor], places: Sequence[int]) -> None:
        slots = self._fetcher.groups[unit].slots
        for weight, place in zip(weights, places):
            if weight is not slots[place].param:
                weight.data = state_of(slots[place].param).hollow
        self._graphs.release(unit)

    def reduce(self, gradient: torch.Tensor, slot: int) -> None:
        # A pass of ``autograd.grad`` runs the whole backward graph too, but adds to no parameter's gradient.
        if not self._reducer.is_in_backward:
            return
        if self._config.sync_before_reduce:
            get_accelerator().synchronize()
        if slot in self._shared:
            # The graph was chosen before another frame of its forward has read the parameter.
            self._reducer.intake.take_part(slot, gradient)
        else:
            self._reducer.intake.take(slot, gradient)
        if self._config.sync_after_reduce:
            self._reducer.flight.wait()
            get_accelerator().synchronize()


class CompiledBackward:
    """Has torch trace and compile the backward passes of ``engine.backward`` as they run (compiled autograd). Each
    gradient is handed to the reducer by the operator ``zero_reduce``, so the traced pass is not broken at a hook.

    options: arguments of ``torch.compile`` for the traced passes.
    """

    def __init__(self, reducer: GradientReducer, passes: BackwardPass, **options: Any) -> None:
        self._reducer, self._passes = reducer, passes
        # The hooks that notice how a pass begins are never traced, so a traced pass has breaks at its beginning.
        options.pop("fullgraph", None)
        self._compiler = torch.compile(**options)
        self._order = torch.empty(1, dtype=torch.uint8)
        self._number = register_host(self)
        reducer.intake.wrap_hooks(lambda i, _: self._hook(i))
        passes.compile_by(self)

    def _hook(self, i: int) -> Callable[[torch.Tensor], None]:
        order, number = self._order, self._number

        def hook(param: torch.Tensor) -> None:
            ZERO_REDUCE(param.grad, order, number, i)
            param.grad = None

        return hook

    def reduce(self, gradient: torch.Tensor, slot: int) -> None:
        self._reducer.intake.take(slot, gradient)

    @contextmanager
    def running(self) -> Iterator[None]:
        # Dynamo cannot trace an assignment to ``param.grad`` of these classes.
        noticed = [slot.param for slot in self._reducer.slots if isinstance(slot.param, GradFace)]
        for param in noticed:
            stop_noticing(param)
        try:
            with compiling_backward(self._compiler):
                yield
        finally:
            for param in noticed:
                notice_cleared(param)

    def outside(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compiler.disable(hook)

    def close(self) -> None:
        """Passes run as they are again."""
        self._passes.compile_by(None)
        self._reducer.intake.wrap_hooks(lambda _, hook: hook)
