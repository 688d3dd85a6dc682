"""Section scheduler: the five learning-rate schedules that can be named, and the parameters that each takes."""

from typing import Annotated, ClassVar

import msgspec

from .keys import FrozenDict, NonNeg, NonNegFloat, Positive, Section, acts
from .optim import Kind

__all__ = ["SCHEDULES", "Scheduler"]

PerGroup = NonNegFloat | tuple[NonNegFloat, ...]
"""One value, or one for each parameter group."""
LastStep = Annotated[int, msgspec.Meta(ge=-1)]

_LAST = acts("Position to resume at: the last step done, -1 for none.")
_WARMUP_STEPS = acts("Steps of warm-up; 0 means none.", auto="fill")
_WARMUP_TYPE = acts('Shape of the warm-up: "log" or "linear"; another one warns and is "log".')
_WARMUP_MIN = acts("Learning rate at the start; one value, or one per group.", auto="fill")
_WARMUP_MAX = acts("Learning rate after warm-up; null: that of the optimizer.", auto="fill")
_TOTAL = acts("Steps at which the decay ends.", auto="fill")


class LRRangeTestParams(Section, kw_only=True):
    """LRRangeTest: raises the learning rate interval by interval, to find the highest usable rate."""

    lr_range_test_min_lr: Annotated[PerGroup, acts("Learning rate at the start.")] = 1e-3
    lr_range_test_step_size: Annotated[Positive, acts("Steps of one interval.")] = 2000
    lr_range_test_step_rate: Annotated[float, acts("Growth per interval, in units of the first rate.")] = 1.0
    lr_range_test_staircase: Annotated[bool, acts("Grow in stairs.")] = False
    last_batch_iteration: Annotated[LastStep, _LAST] = -1


class OneCycleParams(Section, kw_only=True):
    """OneCycle: up, down, then decay; momentum the other way."""

    cycle_min_lr: Annotated[PerGroup, acts("Lower learning rate.")]
    cycle_max_lr: Annotated[PerGroup, acts("Upper learning rate.")]
    decay_lr_rate: Annotated[NonNegFloat, acts("Decay of the learning rate per interval after the cycle.")] = 0.0
    cycle_first_step_size: Annotated[Positive, acts("Steps of the first half.")] = 2000
    cycle_second_step_size: Annotated[NonNeg | None, acts("Steps of the second half; null: as the first.")] = None
    cycle_first_stair_count: Annotated[NonNeg, acts("Stairs of the first half; 0: smooth.")] = 0
    cycle_second_stair_count: Annotated[NonNeg | None, acts("Stairs of the second half; null: as the first.")] = None
    decay_step_size: Annotated[NonNeg, acts("Steps of one decay interval; 0: no decay.")] = 0
    cycle_momentum: Annotated[bool, acts("Cycle the momentum too.")] = True
    cycle_min_mom: Annotated[PerGroup, acts("Lower momentum.")] = 0.8
    cycle_max_mom: Annotated[PerGroup, acts("Upper momentum.")] = 0.9
    decay_mom_rate: Annotated[NonNegFloat, acts("Decay of the momentum per interval after the cycle.")] = 0.0
    last_batch_iteration: Annotated[LastStep, _LAST] = -1


class WarmupLRParams(Section, kw_only=True):
    """WarmupLR: warm-up, then constant."""

    warmup_min_lr: Annotated[PerGroup, _WARMUP_MIN] = 0.0
    warmup_max_lr: Annotated[PerGroup | None, _WARMUP_MAX] = None
    warmup_num_steps: Annotated[NonNeg, _WARMUP_STEPS] = 1000
    warmup_type: Annotated[str, _WARMUP_TYPE] = "log"
    last_batch_iteration: Annotated[LastStep, _LAST] = -1


class WarmupDecayLRParams(Section, kw_only=True):
    """WarmupDecayLR: warm-up, then linear decay to zero."""

    total_num_steps: Annotated[Positive, _TOTAL]
    warmup_min_lr: Annotated[PerGroup, _WARMUP_MIN] = 0.0
    warmup_max_lr: Annotated[PerGroup | None, _WARMUP_MAX] = 0.001
    warmup_num_steps: Annotated[NonNeg, _WARMUP_STEPS] = 1000
    warmup_type: Annotated[str, _WARMUP_TYPE] = "log"
    last_batch_iteration: Annotated[LastStep, _LAST] = -1


class WarmupCosineLRParams(Section, kw_only=True):
    """WarmupCosineLR: warm-up, then half a cosine, as fractions of the optimizer's learning rate."""

    total_num_steps: Annotated[Positive, _TOTAL]
    warmup_min_ratio: Annotated[NonNegFloat, acts("Part of the learning rate at the start.")] = 0.0
    warmup_num_steps: Annotated[NonNeg, _WARMUP_STEPS] = 1000
    cos_min_ratio: Annotated[NonNegFloat, acts("Part of the learning rate at the end.")] = 0.0001
    warmup_type: Annotated[str, _WARMUP_TYPE] = "log"
    last_batch_iteration: Annotated[LastStep, _LAST] = -1


# The schedules of torch.optim.lr_scheduler, which DeepSpeed looks up by name. They are refused here, and the error says
# how to pass a schedule object.
_TORCH = [
    "ChainedScheduler",
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LambdaLR",
    "LinearLR",
    "MultiStepLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "ReduceLROnPlateau",
    "SequentialLR",
    "StepLR",
]

SCHEDULES: dict[str, Kind] = {
    kind.name.lower(): kind
    for kind in (
        Kind("LRRangeTest", LRRangeTestParams),
        Kind("OneCycle", OneCycleParams),
        Kind("WarmupLR", WarmupLRParams),
        Kind("WarmupDecayLR", WarmupDecayLRParams),
        Kind("WarmupCosineLR", WarmupCosineLRParams),
        *(Kind(name, None, "torch_schedules") for name in _TORCH),
    )
}


class Scheduler(Section, kw_only=True):
    """The schedule that the engine builds. The engine advances it after each step that was applied."""

    kinds: ClassVar[dict[str, Kind]] = SCHEDULES

    type: Annotated[str, acts("The schedule: a name of the table below, in any case.")]
    params: Annotated[
        FrozenDict, acts("What is passed to its constructor: what was written and acts; defaults are its own.")
    ] = FrozenDict()
