"""The section ``flops_profiler``: the engine counts one micro-batch of one step, and reports it after that step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import msgspec
import torch

from deepspeed_c.config.monitor import FlopsProfilerSection
from deepspeed_c.config.tuning import Autotuning
from deepspeed_c.errors import ConfigError
from deepspeed_c.logging import logger
from deepspeed_c.profile.flops import FlopsProfiler

__all__ = ["ProfiledEngine", "StepFlops", "profiled_section"]


class ProfiledEngine(Protocol):
    """The parts of an engine that a profile needs."""

    module: torch.nn.Module
    global_rank: int
    global_steps: int


def profiled_section(section: FlopsProfilerSection, tuning: Autotuning) -> FlopsProfilerSection:
    """The section ``flops_profiler`` of an engine. An experiment of the tuner that is measured in FLOPs counts them in
    the step before the measured ones, because counting slows a step down."""
    if not (tuning.enabled and tuning.metric == "flops"):
        return section
    step = max(tuning.start_profile_step - 1, 0)
    return msgspec.structs.replace(section, enabled=True, profile_step=step, detailed=False)


class StepFlops:
    """Counts the first training forward and its backward in the step in which ``global_steps`` is ``profile_step``.

    Rank 0 counts. The other ranks, and an engine without the section, do nothing here.
    """

    def __init__(self, section: FlopsProfilerSection, engine: ProfiledEngine) -> None:
        self._section, self._engine = section, engine
        self._is_waiting = section.enabled and engine.global_rank == 0
        self._is_done = False
        self._profiler: FlopsProfiler | None = None
        self.forward_flops: int | None = None
        """FLOPs of the counted forward; None before it."""

    def forward(self) -> AbstractContextManager[None]:
        """Returns a context for one forward. The counted micro-batch ends at the latest when the next micro-batch
        begins."""
        self._stop()
        engine = self._engine
        is_due = self._is_waiting and engine.global_steps == self._section.profile_step
        return self._counted() if is_due and engine.module.training and torch.is_grad_enabled() else nullcontext()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        profiler = FlopsProfiler(self._engine.module, self._engine, self._section.recompute_fwd_factor)
        profiler.start_profile()
        try:
            yield
        except BaseException:
            profiler.end_profile()  # the step may be tried again
            raise
        self._profiler, self._is_waiting = profiler, False

    def end_backward(self) -> None:
        """Called after a backward pass. A micro-batch may have several backward passes."""
        if self._profiler is not None:
            self._profiler.note_backward_end()

    def begin_step(self) -> None:
        """Ends the counted micro-batch."""
        self._stop()
        if self._profiler is not None:
            self._profiler.note_step_begin()

    def end_step(self) -> None:
        """Called after the step. Prints the report if this step was profiled."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        section, self._is_done = self._section, True
        profiler.note_step_end()
        self.forward_flops = profiler.get_total_flops()
        settings = (section.profile_step, section.module_depth, section.top_modules, section.detailed)
        try:
            profiler.print_model_profile(*settings, section.output_file)
        except ConfigError as error:
            # A run must not fail because its report cannot be written.
            logger.warning("rank 0: %s. The report follows instead", error.what)
            profiler.print_model_profile(*settings)
        finally:
            profiler.end_profile()

    def close(self) -> None:
        """Logs a warning if no step was profiled."""
        if self._profiler is not None:
            self._profiler.end_profile()
            self._profiler = None
        if self._section.enabled and self._engine.global_rank == 0 and not self._is_done:
            logger.warning(
                "flops_profiler: no step was profiled: training ended after %d steps, and profile_step is %d (1: the step after the first)",
                self._engine.global_steps,
                self._section.profile_step,
            )

    def _stop(self) -> None:
        if self._profiler is not None:
            self._profiler.stop_profile()
