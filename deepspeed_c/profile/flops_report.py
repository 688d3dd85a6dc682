"""The text of a FLOPs profile: numbers with units, the summary, the heaviest modules by depth, the tree of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from deepspeed_c.profile.flops_counter import Count, FlopsPhase, ModuleCounts

__all__ = [
    "Latencies",
    "Profile",
    "aggregated",
    "bytes_to_string",
    "duration_to_string",
    "flops_to_string",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
    "render",
]

PRECISION = 2
_LARGE = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0}
_SMALL = {"m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = PRECISION) -> str:
    """The number in ``units`` ("T", "G", "M", "K", "", "m" or "u"; by default the largest unit that is not above the
    number)."""
    if units is None:
        units = next((unit for unit, size in _LARGE.items() if num >= size), "")
        if 0 < num < 1:
            units = "m" if num >= 1e-3 else "u"
    return f"{round(num / (_LARGE | _SMALL).get(units, 1.0), precision):g} {units}"


def macs_to_string(macs: float, units: str | None = None, precision: int = PRECISION) -> str:
    return number_to_string(macs, units, precision) + "MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = PRECISION) -> str:
    """Floating-point operations per second."""
    return number_to_string(flops, units, precision) + "FLOPS"


def bytes_to_string(b: float, units: str | None = None, precision: int = PRECISION) -> str:
    return number_to_string(b, units, precision) + "B"


def params_to_string(params_num: float, units: str | None = None, precision: int = PRECISION) -> str:
    """As ``number_to_string``, with "B" (billions) instead of "G"."""
    units = units.replace("B", "G") if units else units
    return number_to_string(params_num, units, precision).replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = PRECISION) -> str:
    return number_to_string(duration, units, precision) + "s"


class Latencies(NamedTuple):
    """Seconds of the phases of a step; None: not measured."""

    forward: float
    backward: float | None = None
    step: float | None = None


class Profile(NamedTuple):
    """All that a report is made from."""

    model: torch.nn.Module
    counts: dict[int, ModuleCounts]
    """Counts by the id of the module."""
    latencies: Latencies
    recompute_fwd_factor: float = 0.0
    engine: Any = None

    def of(self, module: torch.nn.Module, phase: FlopsPhase = FlopsPhase.FORWARD) -> Count:
        counts = self.counts.get(id(module))
        return Count() if counts is None else counts.all[phase]

    def params(self, module: torch.nn.Module) -> int:
        """The number of elements in a module's parameters. Shared parameters count once, sharded parameters with their
        full size."""
        return sum(getattr(param, "ds_numel", None) or param.numel() for param in module.parameters())

    def seconds(self, module: torch.nn.Module) -> float:
        """Seconds in forward. A module that is not called itself (a ModuleList) gets the sum of its submodules."""
        counts = self.counts.get(id(module))
        if counts is not None and counts.seconds:
            return counts.seconds
        return sum(self.seconds(child) for child in module.children())

    def recomputed(self) -> tuple[Count, bool]:
        """(the recomputation, whether it was counted). If it was not counted, the first value is an estimate from
        recompute_fwd_factor."""
        counted = self.of(self.model, FlopsPhase.RECOMPUTED)
        if counted.flops or not self.recompute_fwd_factor:
            return counted, True
        forward = self.of(self.model)
        return Count(*(round(self.recompute_fwd_factor * each) for each in forward)), False


_NOTATIONS = """Notations:
data parallel size (dp_size), model parallel size (mp_size),
number of parameters (params), number of multiply-accumulate operations (MACs),
number of floating-point operations (flops), floating-point operations per second (FLOPS),
fwd latency (forward propagation latency), bwd latency (backward propagation latency),
step (weights update latency), iter latency (sum of fwd, bwd and step latency)
"""

_NOTES = """Each module's profile is listed after its name in this order:
params, part of all params, MACs, part of all MACs, fwd latency, part of the model's fwd latency, fwd FLOPS; then, where a
backward was counted, its MACs, and the MACs of the recomputation in it.

1. Functions that are no modules count as the module that calls them: they are the difference between a module and the sum
   of its submodules. A loss that is computed outside of the model is not counted.
2. A module with several parents counts once in the model and in full at each place where it is printed.
3. Latencies are those of the profiled step, which is slower than others by the count itself.
"""


def render(
    profile: Profile,
    *,
    profile_step: int = 1,
    module_depth: int = -1,
    top_modules: int = 1,
    detailed: bool = True,
) -> str:
    """The whole report."""
    lines = ["", _titled("DeepSpeed Flops Profiler"), f"Profile Summary at step {profile_step}:", _NOTATIONS]
    lines += [f"{label + ': ':<70}  {value:<8}" for label, value in _summary(profile)]
    lines += ["", _titled("Aggregated Profile per GPU"), aggregated(profile, module_depth, top_modules)]
    if detailed:
        lines += ["", _titled("Detailed Profile per GPU"), _NOTES, _tree(profile, profile.model)]
    return "\n".join([*lines, "-" * 78])


def _titled(title: str) -> str:
    return f" {title} ".center(78, "-")


def _summary(profile: Profile) -> Iterator[tuple[str, Any]]:
    engine, model = profile.engine, profile.model
    n_cuts = 1 if engine is None else engine.mp_world_size
    params, forward, backward = profile.params(model), profile.of(model), profile.of(model, FlopsPhase.BACKWARD)
    if engine is not None:
        yield "world size", engine.world_size
        yield "data parallel size", engine.dp_world_size
        yield "model parallel size", n_cuts
        yield "batch size per GPU", engine.train_micro_batch_size_per_gpu()
    yield "params per GPU", params_to_string(params)
    yield "params of model = params per GPU * mp_size", params_to_string(params * n_cuts)
    yield "fwd MACs per GPU", macs_to_string(forward.macs)
    yield "fwd flops per GPU", number_to_string(forward.flops)
    yield "fwd flops of model = fwd flops per GPU * mp_size", number_to_string(forward.flops * n_cuts)
    again, is_counted = profile.recomputed()
    if backward.flops:
        yield "bwd MACs per GPU", macs_to_string(backward.macs)
        yield "bwd flops per GPU", number_to_string(backward.flops)
    if again.flops:
        how = "counted" if is_counted else f"recompute_fwd_factor {profile.recompute_fwd_factor:g} * fwd"
        yield f"recomputed MACs per GPU ({how})", macs_to_string(again.macs)
        yield f"recomputed flops per GPU ({how})", number_to_string(again.flops)
    latencies = profile.latencies
    yield "fwd latency", duration_to_string(latencies.forward)
    yield "fwd FLOPS per GPU = fwd flops per GPU / fwd latency", _rate(forward.flops, latencies.forward)
    if latencies.backward is None:
        return
    in_backward, in_both = backward.flops + again.flops, forward.flops + backward.flops + again.flops
    both = latencies.forward + latencies.backward
    yield "bwd latency", duration_to_string(latencies.backward)
    yield "bwd FLOPS per GPU = (bwd + recomputed flops per GPU) / bwd latency", _rate(in_backward, latencies.backward)
    yield "fwd+bwd FLOPS per GPU = all flops per GPU / (fwd + bwd latency)", _rate(in_both, both)
    if latencies.step is None:
        return
    yield "step latency", duration_to_string(latencies.step)
    n = engine.gradient_accumulation_steps()
    seconds = n * both + latencies.step
    yield f"iter latency = {n} * (fwd + bwd latency) + step latency", duration_to_string(seconds)
    yield f"FLOPS per GPU = {n} * all flops per GPU / iter latency", _rate(n * in_both, seconds)
    yield "samples/second", round(engine.train_batch_size() / seconds, PRECISION) if seconds else 0


def _rate(flops: float, seconds: float) -> str:
    return flops_to_string(flops / seconds if seconds else 0)


def aggregated(profile: Profile, module_depth: int = -1, top_modules: int = 1) -> str:
    """The ``top_modules`` heaviest classes of modules at each depth up to ``module_depth``; -1: at all depths."""
    depths: list[dict[str, list[float]]] = []

    def walk(module: torch.nn.Module, depth: int) -> None:
        if depth == len(depths):
            depths.append({})
        numbers = (profile.params(module), profile.of(module).macs, profile.seconds(module))
        sums = depths[depth].setdefault(type(module).__name__, [0, 0, 0])
        sums[:] = [a + b for a, b in zip(sums, numbers, strict=True)]
        for child in module.children():
            walk(child, depth + 1)

    walk(profile.model, 0)
    lines = [f"Top {top_modules} modules in terms of params, MACs or fwd latency at different model depths:"]
    columns: tuple[tuple[str, Callable[[float], str]], ...] = (
        ("params", params_to_string),
        ("MACs", macs_to_string),
        ("fwd latency", duration_to_string),
    )
    for depth, sums in enumerate(depths[: None if module_depth == -1 else module_depth]):
        lines.append(f"depth {depth}:")
        for i, (label, in_words) in enumerate(columns):
            top = sorted(sums.items(), key=lambda item: item[1][i], reverse=True)[:top_modules]
            lines.append(f"    {label:<11} - { {name: in_words(numbers[i]) for name, numbers in top} }")
    return "\n".join(lines)


def _percent(part: float, whole: float) -> str:
    return f"{round(100 * part / whole, PRECISION) if whole else 0:g}%"


def _tree(profile: Profile, module: torch.nn.Module) -> str:
    """The module's ``repr``, with the module's numbers before its description."""
    model = profile.model
    params, forward, seconds = profile.params(module), profile.of(module), profile.seconds(module)
    items = [
        f"{params_to_string(params)} = {_percent(params, profile.params(model))} Params",
        f"{macs_to_string(forward.macs)} = {_percent(forward.macs, profile.of(model).macs)} MACs",
        f"{duration_to_string(seconds)} = {_percent(seconds, profile.seconds(model))} latency",
        _rate(forward.flops, seconds),
    ]
    for phase, word in ((FlopsPhase.BACKWARD, "bwd"), (FlopsPhase.RECOMPUTED, "recomputed")):
        if profile.of(model, phase).flops:
            items.append(f"{macs_to_string(profile.of(module, phase).macs)} {word}")
    if own := module.extra_repr():
        items.append(own.replace("\n", " "))
    head = f"{type(module).__name__}({', '.join(items)}"
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    if not children:
        return head + ")"
    body = [f"  ({name}): " + _tree(profile, child).replace("\n", "\n  ") for name, child in children]
    return "\n".join([head, *body, ")"])
