"""The record of one optimizer step: all numbers for log lines and monitors, collected once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Event", "SampleRate", "StepRecord", "phases_text"]

# Prefix of event names, as in DeepSpeed. The step of such an event is a number of samples.
_TRAIN = "Train/Samples/"

# In the order of a step.
_PHASES = ("data", "forward", "messages", "backward", "step", "other")

# Phase (``Phases.last_step_ms``) -> the last part of the event name.
_PHASE_EVENTS = {
    "forward": "forward",
    "backward": "backward",
    "backward.inner": "backward_inner",
    "backward.reduce": "backward_allreduce",
    "step": "step",
    "data": "data",
    "messages": "messages",
    "other": "other",
}


class Event(NamedTuple):
    """A number at one moment of the run. Programs may pass any tuple (name, value, step) instead."""

    name: str
    value: float
    step: int
    """Samples trained on so far, over all ranks."""


class StepRecord(NamedTuple):
    """One optimizer step. None stands for an unknown number."""

    step: int
    """Optimizer steps so far, skipped ones included."""
    samples: int
    """Samples trained on so far, over all ranks."""
    skipped_steps: int
    lr: Sequence[float]
    """Learning rate of each group."""
    momentum: Sequence[Any]
    """Momentum, or betas, of each group."""
    loss: float | None = None
    """Mean over the micro-batches of the step and over ranks."""
    loss_scale: float | None = None
    """The loss scale after the step; None if there is no loss scale."""
    grad_norm: float | None = None
    """L2 norm of the averaged, unscaled gradients before clipping; inf where they are not finite."""
    n_tokens: int = 0
    """Tokens in the batches of the step, over all ranks; 0 if the model's inputs are not tokens."""
    samples_per_sec: float | None = None
    """Mean over all steps after the first steps, which warm up."""
    phases_ms: Mapping[str, float] = {}
    """``Phases.last_step_ms``."""
    host_bytes: int | None = None
    """Resident memory of this process."""
    device_bytes: int | None = None
    """Bytes in tensors on this rank's device."""

    def events(self) -> list[Event]:
        """The known numbers as events, under DeepSpeed's names if DeepSpeed has the number."""
        named: dict[str, float | None] = {
            "train_loss": self.loss,
            "lr": self.lr[0] if self.lr else None,
            "loss_scale": self.loss_scale,
            "grad_norm": self.grad_norm,
            "skipped_steps": self.skipped_steps,
            "tokens": self.n_tokens or None,
            "samples_per_sec": self.samples_per_sec,
            "host_memory_bytes": self.host_bytes,
            "device_memory_bytes": self.device_bytes,
        }
        for phase, name in _PHASE_EVENTS.items():
            named[f"elapsed_time_ms_{name}"] = self.phases_ms.get(phase)
        return [Event(_TRAIN + name, value, self.samples) for name, value in named.items() if value is not None]

    def line(self, mean_phases_ms: Mapping[str, float]) -> str:
        """The step as a log line. mean_phases_ms: means over the steps since the last line."""
        text = f"step={self.step}, skipped={self.skipped_steps}, lr={list(self.lr)}, mom={list(self.momentum)}"
        if mean_phases_ms:
            text += f", {phases_text(mean_phases_ms)}"
        return text if self.samples_per_sec is None else f"{text}, samples/s={self.samples_per_sec:.4g}"


def phases_text(phases_ms: Mapping[str, float]) -> str:
    """Phases in the order of a step, each with its parts: "forward=1.20 ms (gather 0.10), ..."."""
    texts = []
    for phase in [phase for phase in _PHASES if phase in phases_ms]:
        parts = {name.partition(".")[2]: ms for name, ms in phases_ms.items() if name.startswith(f"{phase}.")}
        parts.pop("inner", None)
        split = ", ".join(f"{part} {ms:.2f}" for part, ms in sorted(parts.items()))
        texts.append(f"{phase}={phases_ms[phase]:.2f} ms" + (f" ({split})" if split else ""))
    return ", ".join(texts)


class SampleRate:
    """Samples per second, without the first steps, which allocate memory and warm up."""

    _SKIPPED_STEPS = 2

    def __init__(self, *, is_counted: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._is_counted, self._clock = is_counted, clock
        self._n_steps = 0
        self._n_samples = 0  # samples since counting began
        self._began = self._last = 0.0

    def end_step(self, n_samples: int) -> None:
        """Called at the end of a step over ``n_samples`` samples of all ranks."""
        if not self._is_counted:
            return
        self._n_steps += 1
        if self._n_steps == self._SKIPPED_STEPS:
            self._began = self._clock()
        elif self._n_steps > self._SKIPPED_STEPS:
            self._n_samples += n_samples
            self._last = self._clock()

    def samples_per_sec(self) -> float | None:
        """None before the first counted step has ended."""
        elapsed = self._last - self._began
        return self._n_samples / elapsed if self._n_samples and elapsed > 0 else None
