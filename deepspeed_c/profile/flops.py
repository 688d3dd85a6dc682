"""The FLOPs profiler, under DeepSpeed's names: ``deepspeed_c.profiling.flops_profiler``.

``FlopsProfiler`` counts while a model runs; ``get_model_profile`` runs a model once and counts. ``flops_formulas.py``
has the formulas. Forward, backward and recomputation are counted separately, each from its own operators. DeepSpeed's
methods return the numbers of forward.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from deepspeed_c.errors import ConfigError, ModelError, StateError
from deepspeed_c.profile.flops_counter import Count, FlopsCounter, FlopsPhase, ModuleCounts, now, running_counters
from deepspeed_c.profile.flops_report import (
    Latencies,
    Profile,
    aggregated,
    bytes_to_string,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
    render,
)

__all__ = [
    "FlopsProfiler",
    "bytes_to_string",
    "duration_to_string",
    "flops_to_string",
    "get_model_profile",
    "get_module_duration",
    "get_module_flops",
    "get_module_macs",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
    "wrapFunc",
]

_COUNTS = "__flops_counts__"  # attribute of a module while it is profiled


class FlopsProfiler:
    """Counts FLOPs, MACs and time of each module of a model between ``start_profile`` and ``stop_profile``.

    ds_engine: the engine that trains the model; its batch and world sizes go into the report. recompute_fwd_factor: the
    fraction of forward that the backward recomputes. The report uses it if no recomputation has been counted.
    """

    def __init__(self, model: torch.nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._counter: FlopsCounter | None = None
        self._ignored: tuple[type, ...] = ()
        self._backward_end = self._step_begin = self._step_end = 0.0

    def start_profile(self, ignore_list: Sequence[type] | None = None) -> None:
        """Starts a new count. ignore_list: types of modules that count as parts of their parents."""
        self._ignored = tuple(ignore_list or ())
        self.reset_profile()
        self.started = True
        self._counter.start()

    def stop_profile(self) -> None:
        """Ends the count. The numbers stay until ``end_profile``. May be called twice."""
        if self._counter is not None:
            self._counter.stop()

    def reset_profile(self) -> None:
        """Sets all numbers to zero."""
        was_counting = self._counter is not None and self._counter.is_counting
        self.stop_profile()
        self._counter = FlopsCounter(self.model, self._ignored)
        self._backward_end = self._step_begin = self._step_end = 0.0
        counts = {id(each.module): each for each in self._counter.counts()}
        for module in self.model.modules():
            module.__dict__[_COUNTS] = counts.get(id(module)) or ModuleCounts(module)
        if was_counting:
            self._counter.start()

    def end_profile(self) -> None:
        """Ends the count and forgets the numbers."""
        if not self.started:
            return
        self.stop_profile()
        for module in self.model.modules():
            module.__dict__.pop(_COUNTS, None)
        self._counter, self.started = None, False

    def note_backward_end(self) -> None:
        """Called at the end of the counted backward pass."""
        if self._require_counter().is_counting:
            self._backward_end = now()

    def note_step_begin(self) -> None:
        """Called at the begin of the optimizer step that uses the gradients."""
        self._step_begin = now()

    def note_step_end(self) -> None:
        """Called at the end of this step."""
        self._step_end = now()

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """The FLOPs of forward."""
        flops = self._total(FlopsPhase.FORWARD).flops
        return number_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """The multiply-accumulates of forward."""
        macs = self._total(FlopsPhase.FORWARD).macs
        return macs_to_string(macs) if as_string else macs

    def get_backward(self) -> Count:
        """FLOPs and MACs of the backward passes between start and stop."""
        return self._total(FlopsPhase.BACKWARD)

    def get_recomputed(self) -> Count:
        """FLOPs and MACs of the recomputation in these backward passes."""
        return self._total(FlopsPhase.RECOMPUTED)

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Seconds of forward."""
        seconds = self._profile().seconds(self.model)
        return duration_to_string(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Parameters of the model; if ZeRO shards the model, the parameters of all shards."""
        params = self._profile().params(self.model)
        return params_to_string(params) if as_string else params

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Prints the report, or writes it to ``output_file``.

        profile_step: the number of the step, for the headline. module_depth: the number of depths in the list of the
        heaviest modules, -1 for all. top_modules: the number of modules in this list at each depth. detailed: whether
        to print the tree of all modules. Nothing is printed before ``start_profile``. Raises ConfigError if the file
        cannot be written.
        """
        if not self.started:
            return
        text = self.report(profile_step, module_depth, top_modules, detailed)
        if not output_file:
            print(text)
            return
        try:
            os.makedirs(os.path.dirname(os.path.abspath(output_file)), exist_ok=True)
            with open(output_file, "w", encoding="utf-8") as file:
                print(text, file=file)
        except OSError as error:
            raise ConfigError(
                f"the report cannot be written to {output_file}: {error.strerror}",
                where="flops_profiler.output_file",
                fix="name a file in a folder that this process may write, or leave it out: the report is printed then",
            ) from error

    def report(self, profile_step: int = 1, module_depth: int = -1, top_modules: int = 1, detailed: bool = True) -> str:
        """The text of ``print_model_profile``."""
        return render(
            self._profile(),
            profile_step=profile_step,
            module_depth=module_depth,
            top_modules=top_modules,
            detailed=detailed,
        )

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Prints the heaviest classes of modules at each depth."""
        print(aggregated(self._profile(), module_depth, top_modules))

    def _require_counter(self) -> FlopsCounter:
        if self._counter is None:
            raise StateError(
                "nothing has been profiled",
                where="FlopsProfiler",
                fix="call start_profile() before the forward, and end_profile() after the numbers have been read",
            )
        return self._counter

    def _total(self, phase: FlopsPhase) -> Count:
        return self._require_counter().root.all[phase]

    def _profile(self) -> Profile:
        counter = self._require_counter()
        counts = {id(each.module): each for each in counter.counts()}
        profile = Profile(self.model, counts, Latencies(0.0), self.recompute_fwd_factor, self.ds_engine)
        backward = step = None
        if counter.backward_begin is not None and self._backward_end:
            backward = self._backward_end - counter.backward_begin
            step = self._step_end - self._step_begin if self._step_end else None
        return profile._replace(latencies=Latencies(profile.seconds(self.model), backward, step))


def _counts_of(module: torch.nn.Module, what: str) -> ModuleCounts:
    if _COUNTS not in module.__dict__:
        raise StateError(
            f"{type(module).__name__} is not being profiled",
            where=what,
            fix="call it between FlopsProfiler(model).start_profile() and end_profile()",
        )
    return module.__dict__[_COUNTS]


def get_module_flops(module: torch.nn.Module) -> int:
    """The FLOPs of a module's forward, with its submodules. A ``FlopsProfiler`` must have counted the module."""
    return _counts_of(module, "get_module_flops").all[FlopsPhase.FORWARD].flops


def get_module_macs(module: torch.nn.Module) -> int:
    """The MACs of a module's forward, with its submodules."""
    return _counts_of(module, "get_module_macs").all[FlopsPhase.FORWARD].macs


def get_module_duration(module: torch.nn.Module) -> float:
    """Seconds of a module's forward."""
    counts = {id(each): _counts_of(each, "get_module_duration") for each in module.modules()}
    return Profile(module, counts, Latencies(0.0)).seconds(module)


def wrapFunc(func: Callable[..., Any], funcFlopCompute: Callable[..., tuple[int, int]]) -> Callable[..., Any]:
    """A function that runs ``func`` and counts the (FLOPs, MACs) that ``funcFlopCompute`` returns for the same
    arguments.

    Use it for functions whose work is not visible as operators of torch, such as the caller's own kernels. ``func`` is
    not changed.
    """

    @functools.wraps(func)
    def counted(*args: Any, **kwargs: Any) -> Any:
        counters = running_counters()
        if not counters:
            return func(*args, **kwargs)
        count = Count(*funcFlopCompute(*args, **kwargs))
        with counters[-1].counted_as(count):
            return func(*args, **kwargs)

    return counted


def get_model_profile(
    model: torch.nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = [],
    kwargs: Mapping[str, Any] = {},
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type] | None = None,
    mode: Literal["forward", "generate"] = "forward",
) -> tuple[int | str, int | str, int | str]:
    """Runs a model in evaluation mode and returns the FLOPs, the MACs and the number of its parameters.

    Args:
        model: the model; it is left in evaluation mode, as DeepSpeed leaves it.
        input_shape: the shape of the input, for a model that takes one tensor of its parameters' dtype on their device.
        args, kwargs: the arguments for all other models.
        print_profile, detailed, module_depth, top_modules, output_file: options of the report, as in
            ``print_model_profile``.
        warm_up: runs before the counted run.
        as_string: return texts with units.
        ignore_modules: types of modules that count as parts of their parents.
        mode: "forward" calls the model, "generate" its method ``generate``.

    Raises:
        ModelError: ``model`` is no module, the input is missing, or the mode is unknown.
    """
    if not isinstance(model, torch.nn.Module):
        raise ModelError(
            f"model must be a torch.nn.Module, not {type(model).__name__}",
            where="get_model_profile(model=...)",
            fix="pass the model",
        )
    if input_shape is not None:
        args = [_input_of(model, input_shape)]
    if not args and not kwargs:
        raise ModelError(
            "the model has no input",
            where="get_model_profile",
            fix="pass input_shape=(batch, ...), or args=[...] and kwargs={...}",
        )
    if mode not in ("forward", "generate"):
        raise ModelError(f"is {mode!r}", where="get_model_profile(mode=...)", fix='pass "forward" or "generate"')
    run = model if mode == "forward" else model.generate
    model.eval()
    for _ in range(warm_up):
        run(*args, **kwargs)
    profiler = FlopsProfiler(model)
    profiler.start_profile(ignore_list=ignore_modules)
    try:
        run(*args, **kwargs)
        profiler.stop_profile()
        flops, macs, params = profiler.get_total_flops(), profiler.get_total_macs(), profiler.get_total_params()
        if print_profile:
            profiler.print_model_profile(
                profile_step=warm_up,
                module_depth=module_depth,
                top_modules=top_modules,
                detailed=detailed,
                output_file=output_file,
            )
    finally:
        profiler.end_profile()
    if as_string:
        return number_to_string(flops), macs_to_string(macs), params_to_string(params)
    return flops, macs, params


def _input_of(model: torch.nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    if type(shape) is not tuple or not shape:
        raise ModelError(
            f"is {shape!r}", where="get_model_profile(input_shape=...)", fix="pass a tuple with at least one number"
        )
    first = next(model.parameters(), torch.ones(()))
    return first.new_ones(shape).detach()
