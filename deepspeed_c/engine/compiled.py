"""The compiled model of an engine: what its graphs' operators act on, and how it is undone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from deepspeed_c.compile.backend import GraphBackend
from deepspeed_c.compile.operators import register_host
from deepspeed_c.compile.schedule import Schedule
from deepspeed_c.compile.torch_internals import leave_alone
from deepspeed_c.inject.swap import swap_forward
from deepspeed_c.zero.gradients.reducer import GradientReducer
from deepspeed_c.zero.weights.fetch import Fetcher
from deepspeed_c.zero.weights.gather_unit import PlacedShard
from deepspeed_c.zero.weights.hooks import OUTSIDE_OF_GRAPHS
from deepspeed_c.zero.weights.param import state_of

__all__ = ["CompiledModel"]


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
        backend: str,
        compile_kwargs: dict[str, Any],
        schedule: Schedule,
        log: Path | None,
    ) -> None:
        self._fetcher, self._reducer = fetcher, reducer
        self.step = step
        self.number = register_host(self)
        options = dict(compile_kwargs)
        # Raises before anything is changed.
        self.backend = GraphBackend(backend, self, schedule, options.pop("options", None), log)
        self._hooks = None if fetcher is None else fetcher.hooks
        if self._hooks is not None:
            for code in OUTSIDE_OF_GRAPHS:
                leave_alone(code)
            self._hooks.compile(True)
        self._undo = swap_forward(module, torch.compile(module.forward, backend=self.backend, **options))

    def close(self) -> None:
        """The module runs its own forward again, under the ordinary hooks."""
        self._undo()
        if self._hooks is not None:
            self._hooks.compile(False)

    def place_of(self, tensor: Any) -> tuple[int, int] | None:
        state = state_of(tensor)
        if type(state) is not PlacedShard or state.fetcher is not self._fetcher:
            return None
        return state.group.index, state.group.slots.index(state.slot)

    def slot_of(self, tensor: Any) -> int | None:
        return None if self._reducer is None else self._reducer.number_of(tensor)

    def running_graph(self) -> AbstractContextManager[None]:
        return nullcontext() if self._fetcher is None else self._fetcher.in_graph()

    def gather(self, unit: int) -> None:
        self._fetcher.start_in_graph(unit)

    def wait(self, unit: int, weights: Sequence[torch.Tensor], places: Sequence[int]) -> None:
        self._fetcher.finish_in_graph(unit)
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
        self._fetcher.release_in_graph(unit)

    def reduce(self, gradient: torch.Tensor, slot: int) -> None:
        # A pass of ``autograd.grad`` runs the whole backward graph too, but adds to no parameter's gradient.
        if self._reducer.is_in_backward:
            self._reducer.take(slot, gradient)
