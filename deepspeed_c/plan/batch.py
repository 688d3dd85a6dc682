"""The batch of a pipeline in a plan: the engine's runner, plan of gathers and reducer run the actions of one rank over
its outline, with pretended neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from deepspeed_c import _C
from deepspeed_c.pipe.link import Link, LocalLink
from deepspeed_c.pipe.runner import COMPUTATIONS, Lent, Runner, Stage
from deepspeed_c.pipe.units import check_unit
from deepspeed_c.plan.sizes import PipelineSizes
from deepspeed_c.zero.gradients.reducer import GradientReducer
from deepspeed_c.zero.weights.drivers.batch import BatchPlan
from deepspeed_c.zero.weights.fetch import Fetcher, FetchStats
from deepspeed_c.zero.weights.gather_unit import PlacedShard
from deepspeed_c.zero.weights.param import state_of

__all__ = ["BatchGathers", "PipelineBatch"]


class BatchGathers(NamedTuple):
    """The gathers of one rank in a batch, after the order of its units has been learnt."""

    n_units: int
    elems: int  # the sum over all units
    max_elems: int  # stage3_max_live_parameters
    n_gathers: int
    received_bytes: int  # from other ranks
    once_bytes: int  # of one gather of each unit
    live: tuple[tuple[str, int], ...]  # (computation, its most live elements)

    @property
    def peak_elems(self) -> int:
        return max((elems for _, elems in self.live), default=0)

    @property
    def more_gathers(self) -> int:
        """Gathers beyond one of each unit: the cost of the limit."""
        return max(self.n_gathers - self.n_units, 0)

    @property
    def more_bytes(self) -> int:
        """The cost of the limit in bytes."""
        return max(self.received_bytes - self.once_bytes, 0)


class _FromStage:
    """Brings values, or their gradients, from a stage on another rank. A value has one element."""

    def __init__(self, value: Callable[[], Any]) -> None:
        self._value = value

    def send(self, value: Any, label: str) -> None:
        """Does nothing: nobody receives it."""

    def post(self, label: str) -> None:
        """Does nothing: values need no memory here."""

    def take(self) -> Any:
        return self._value()

    flush = clear = lambda self: None


class _NoPeers:
    """No rank computes a part of the same stage."""

    begin = notice = lambda self: None

    def stop(self, stopped: Any) -> None:
        """Layers of an outline do not fail: an exception is the planner's own."""
        raise stopped.cause


class _LiveStats(FetchStats):
    """Also knows the most elements that have been live since ``begin``."""

    recent_elems = 0

    def begin(self) -> None:
        self.recent_elems = self.live_elems

    def count_live(self, n_elems: int) -> None:
        super().count_live(n_elems)
        self.recent_elems = max(self.recent_elems, self.live_elems)


class PipelineBatch:
    """Runs batches of a pipeline on one rank. ``model``: the outline of the rank's stages."""

    def __init__(self, model: torch.nn.Module, pipeline: PipelineSizes) -> None:
        self._pipeline = pipeline
        last = pipeline.n_stages - 1
        local: dict[tuple[int, int], LocalLink] = {}

        def link(source: int, target: int, value: Callable[[], Any]) -> Link | None:
            """The engine's link, with a pretended one in place of a remote one."""
            if not 0 <= min(source, target) <= max(source, target) <= last:
                return None
            if source in pipeline.layers and target in pipeline.layers:
                return local.setdefault((source, target), LocalLink(copies=source < target))
            return _FromStage(value)

        self._modules = {
            stage: [model.get_submodule(name) for name in names] for stage, names in pipeline.layers.items()
        }
        self._stages = {
            s: Stage(
                run=lambda value, s=s: self._run_stage(s, value),
                inputs=link(s - 1, s, lambda: torch.zeros(1, device="cpu", requires_grad=True)),
                input_grads=link(s, s - 1, lambda: None),
                outputs=link(s, s + 1, lambda: None),
                output_grads=link(s + 1, s, lambda: [torch.ones(1, device="cpu")]),
                splits=True,
            )
            for s in pipeline.layers
        }

    def _run_stage(self, stage: int, value: torch.Tensor) -> torch.Tensor:
        for module in self._modules[stage]:
            value = module(value)
        return value

    def _units_of(self, stage: int) -> list[int]:
        states = [state_of(param) for module in self._modules[stage] for param in module.parameters()]
        return list(dict.fromkeys(state.group.index for state in states if type(state) is PlacedShard))

    def run(self, fetcher: Fetcher | None, reducer: GradientReducer) -> BatchGathers | None:
        """Runs one batch, and reduces its gradients. Returns its gathers, or None without sharded weights.

        Raises ConfigError for a unit of more elements than the limit, as the engine does.
        """
        largest = max([] if fetcher is None else fetcher.groups, key=lambda group: group.numel, default=None)
        if largest is not None:
            check_unit(largest.label, largest.numel, fetcher.limits.max_live)
        actions = self._pipeline.actions
        computations = [(kind, stage) for kind, stage, _ in actions if kind in COMPUTATIONS]
        plan = None if fetcher is None or not fetcher.groups else fetcher.drivers.of(BatchPlan)
        stats, live = _LiveStats(), []
        ids = iter(action for action in actions if action[0] in COMPUTATIONS)

        @contextmanager
        def computing(kind: int, stage: int) -> Iterator[None]:
            stats.begin()
            with nullcontext() if plan is None else plan.computing(kind, stage, saves=True):
                yield
            live.append((_C.pipe_format(next(ids)), stats.recent_elems))

        @contextmanager
        def backward() -> Iterator[None]:
            reducer.begin_backward(is_boundary=True, factor=1.0, starts=[])
            yield
            reducer.end_backward()

        lent = Lent(
            first_inputs=lambda k: torch.zeros(1, device="cpu"),
            result=lambda outputs, k: outputs.reshape(()),
            scale=lambda loss: loss,
            backward=backward,
            computing=computing,
        )
        runner = Runner(self._stages, _NoPeers())
        if plan is not None:
            fetcher.count_in(stats)
        n_gathers, n_bytes = stats.n_gathers, stats.n_received_bytes
        units = {stage: self._units_of(stage) for stage in self._modules}
        with reducer.coalesce(), nullcontext() if plan is None else plan.running("batch", computations, units):
            runner.run(actions, lent, has_backward=True)
        if plan is None:
            return None
        return BatchGathers(
            len(fetcher.groups),
            sum(group.numel for group in fetcher.groups),
            fetcher.limits.max_live,
            stats.n_gathers - n_gathers,
            stats.n_received_bytes - n_bytes,
            sum(group.source.cost.received for group in fetcher.groups),
            tuple(live),
        )
