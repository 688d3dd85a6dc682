"""Named wall-clock timers, samples per second, and a memory report. Nothing is measured without a call.

On the CPU a timer reads the host's clock. On an accelerator it records events on the current stream, and only reading
the timer synchronises.
"""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed_c.comm.log import trim_mean
from deepspeed_c.errors import StateError
from deepspeed_c.logging import log_dist, logger

__all__ = [
    "MemoryReport",
    "NoopTimer",
    "SynchronizedWallClockTimer",
    "ThroughputTimer",
    "device_bytes",
    "measure_memory",
    "resident_bytes",
    "see_memory_usage",
    "shared_memory_of_others",
]

Clock = Callable[[], float]  # seconds from any origin; must not go backwards

_GIB = 1024**3
_PAGE_BYTES = resource.getpagesize()


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator(check_available=True)


class _Timer:
    """Adds up the time between ``start`` and ``stop``: the accelerator's time if there is an accelerator, else the
    host's."""

    def __init__(self, name: str, clock: Clock, device: torch.device | None) -> None:
        self.name_ = name
        self.started_ = False
        self._clock = clock
        self._device = device  # None: the host's clock
        self._begin: Any = None
        self._spans: list[Any] = []  # seconds, or (begin, end) events

    def _now(self) -> Any:
        if self._device is None:
            return self._clock()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        if self.started_:
            raise StateError("was started already", where=f"timer {self.name_}", fix="stop it before starting it again")
        self._begin, self.started_ = self._now(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Ends a span. ``reset``: the span replaces all earlier spans. ``record`` is accepted for DeepSpeed's
        interface."""
        if not self.started_:
            raise StateError("is not running", where=f"timer {self.name_}", fix="call start() before stop()")
        end = self._now()
        if reset:
            self._spans.clear()
        self._spans.append((self._begin, end) if self._device is not None else end - self._begin)
        self._begin, self.started_ = None, False

    def reset(self) -> None:
        """Forgets all spans, also a running span."""
        self._spans.clear()
        self._begin, self.started_ = None, False

    def spans_ms(self) -> list[float]:
        """Each span in ms; waits for the device."""
        if self._device is None:
            return [span * 1e3 for span in self._spans]
        spans = []
        for begin, end in self._spans:
            end.synchronize()
            spans.append(begin.elapsed_time(end))
        return spans

    def elapsed(self, reset: bool = True) -> float:
        """The sum of all spans in ms, with a running span up to now. A running span continues."""
        is_running = self.started_
        if is_running:
            self.stop()
        total = sum(self.spans_ms())
        if reset:
            self.reset()
        if is_running:
            self.start()
        return total

    def mean(self) -> float:
        """Mean of the spans in ms without the slowest and fastest tenth; 0 if there are no spans."""
        return trim_mean(self.spans_ms(), 0.1)


class SynchronizedWallClockTimer:
    """Timers by name, made when they are first asked for."""

    Timer = _Timer

    def __init__(self, *, clock: Clock | None = None, device: torch.device | None = None) -> None:
        """device: the device whose time is measured; default: the accelerator if there is one. clock: a clock to use
        instead."""
        self.timers: dict[str, _Timer] = {}
        self._clock = time.perf_counter if clock is None else clock
        device = _accelerator() if device is None else device
        self._device = None if clock is not None or device is None or device.type == "cpu" else device

    def __call__(self, name: str) -> _Timer:
        if name not in self.timers:
            self.timers[name] = _Timer(name, self._clock, self._device)
        return self.timers[name]

    def get_timers(self) -> dict[str, _Timer]:
        return self.timers

    @staticmethod
    def memory_usage() -> str:
        """The accelerator's memory, as text."""
        return _device_text(measure_memory())

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Logs the sums of the timers that exist, in ms, divided by ``normalizer``."""
        parts = [f"{name}: {ms:.2f}" for name, ms in self._collect(names, normalizer, reset, _Timer.elapsed)]
        if memory_breakdown:
            parts.append(self.memory_usage())
        log_dist(" | ".join(["time (ms)", *parts]), ranks=list(ranks or [0]))

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """{name: trimmed mean of the timer's spans in ms, divided by ``normalizer``} of the timers that exist."""

        def mean(timer: _Timer, reset: bool) -> float:
            value = timer.mean()
            if reset:
                timer.reset()
            return value

        return dict(self._collect(names, normalizer, reset, mean))

    def _collect(
        self, names: Iterable[str], normalizer: float, reset: bool, read: Callable[..., float]
    ) -> Iterator[tuple[str, float]]:
        if not normalizer > 0:
            raise ValueError(f"normalizer is {normalizer}; a number over 0 is needed")
        for name in names:
            if name in self.timers:
                yield name, read(self.timers[name], reset=reset) / normalizer


class NoopTimer:
    """Replaces ``SynchronizedWallClockTimer`` if nothing is measured."""

    class Timer:
        def start(self) -> None:
            """Nothing."""

        def reset(self) -> None:
            """Nothing."""

        def stop(self, **kwargs: Any) -> None:
            """Nothing."""

        def elapsed(self, **kwargs: Any) -> float:
            return 0.0

        def mean(self) -> float:
            return 0.0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> NoopTimer.Timer:
        return self.timer

    def get_timers(self) -> dict[str, Any]:
        return {}

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Nothing."""

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        return {}


class ThroughputTimer:
    """Samples (and tokens) per second, without the first steps, which warm up.

    Call ``start`` before and ``stop`` after each micro-batch, and ``stop(global_step=True)`` after the last micro-batch
    of a step.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
        *,
        tokens_per_sample: float | None = None,
        global_step_count: int = 0,
        clock: Clock = time.perf_counter,
    ) -> None:
        """config: has ``enabled``, and ``synchronized`` (wait for the accelerator at each reading of the clock).

        batch_size: samples of a step over all ranks. start_step: number of first steps that are not counted.
        steps_per_output: steps between two log lines; None: no log. monitor_memory: whether log lines include the
        host's memory. global_step_count: steps before this object was made.
        """
        self.config = config
        self.batch_size = 1 if batch_size is None else batch_size
        self.start_step, self.steps_per_output, self.monitor_memory = start_step, steps_per_output, monitor_memory
        self.tokens_per_sample = tokens_per_sample
        self.logging = logger.info if logging_fn is None else logging_fn
        self.epoch_count, self.micro_step_count, self.global_step_count = 0, 0, global_step_count
        self.started = False
        self.total_elapsed_time = 0.0  # seconds of the counted steps
        self.step_elapsed_time = 0.0  # seconds of the step that is running
        self._n_counted = 0
        self._begin: float | None = None
        self._clock = clock

    def update_epoch_count(self) -> None:
        """Begins a new epoch: micro-batches are counted from 0."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        if not self.config.enabled:
            return
        self.started = True
        if self.global_step_count >= self.start_step:
            self._begin = self._now()

    def _now(self) -> float:
        if self.config.synchronized and _accelerator() is not None:
            torch.accelerator.synchronize()
        return self._clock()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        if not self.config.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        if self._begin is not None:
            duration = self._now() - self._begin
            self._begin = None
            self.total_elapsed_time += duration
            self.step_elapsed_time += duration
        if not global_step:
            return
        self._n_counted += self.global_step_count >= self.start_step
        self.global_step_count += 1
        is_due = self.steps_per_output is not None and self.global_step_count % self.steps_per_output == 0
        if report_speed and is_due and self._n_counted:
            self.logging(self._line())
        self.step_elapsed_time = 0.0

    def _line(self) -> str:
        now = self.batch_size / self.step_elapsed_time if self.step_elapsed_time else float("inf")
        line = (
            f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
            f"RunningAvgSamplesPerSec={self.avg_samples_per_sec():.4g}, CurrSamplesPerSec={now:.4g}"
        )
        if self.tokens_per_sample is not None:
            line += f", RunningAvgTokensPerSec={self.avg_tokens_per_sec():.4g}"
        memory = measure_memory()
        if memory.device_allocated_bytes is not None:
            line += ", " + _device_text(memory)
        if self.monitor_memory:
            line += ", " + _host_text(memory)
        return line

    def avg_samples_per_sec(self) -> float:
        """Samples per second over the counted steps; -inf before the first counted step (as in DeepSpeed)."""
        if not self._n_counted or self.total_elapsed_time <= 0:
            return float("-inf")
        return self.batch_size * self._n_counted / self.total_elapsed_time

    def avg_tokens_per_sec(self) -> float:
        """Tokens per second over the counted steps, if ``tokens_per_sample`` is known; else -inf."""
        if self.tokens_per_sample is None:
            return float("-inf")
        return self.avg_samples_per_sec() * self.tokens_per_sample


class MemoryReport(NamedTuple):
    """Bytes at one moment; None if the system does not report the number."""

    host_rss_bytes: int | None  # resident, shared pages counted whole
    host_pss_bytes: int | None  # resident, shared pages counted by share
    host_peak_bytes: int | None  # the largest resident size so far
    host_available_bytes: int | None  # of the machine
    host_total_bytes: int | None  # of the machine
    device_allocated_bytes: int | None  # in tensors
    device_peak_allocated_bytes: int | None
    device_reserved_bytes: int | None  # held by the caching allocator
    device_peak_reserved_bytes: int | None


def measure_memory() -> MemoryReport:
    """Reads /proc for the host and torch for the accelerator."""
    status = _proc("/proc/self/status")
    machine = _proc("/proc/meminfo")
    peak = status.get("VmHWM")
    if peak is None:
        # The number is in KiB on Linux and in bytes on macOS.
        scale = 1 if os.uname().sysname == "Darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    device: tuple[int | None, ...] = (None,) * 4
    if _accelerator() is not None:
        device = (
            torch.accelerator.memory_allocated(),
            torch.accelerator.max_memory_allocated(),
            torch.accelerator.memory_reserved(),
            torch.accelerator.max_memory_reserved(),
        )
    return MemoryReport(
        status.get("VmRSS"),
        _proc("/proc/self/smaps_rollup").get("Pss"),
        peak,
        machine.get("MemAvailable"),
        machine.get("MemTotal"),
        *device,
    )


def resident_bytes() -> int | None:
    """Resident memory of this process; None if there is no /proc. Takes a tenth of the time of ``measure_memory``."""
    try:
        # Making a file object takes longer than the read, and this function runs in each step.
        fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(fd, 128)
        finally:
            os.close(fd)
        return int(text.split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return None


def shared_memory_of_others() -> int:
    """Bytes of shared memory that are resident here but count for other processes: a page that n processes have
    resident counts 1/n for each. 0 if there is no /proc."""
    mine = _proc("/proc/self/smaps_rollup").get("Pss_Shmem")
    return 0 if mine is None else max(_proc("/proc/self/status").get("RssShmem", 0) - mine, 0)


def device_bytes(device: torch.device) -> int | None:
    """Memory in tensors on ``device``; None for the CPU."""
    return None if device.type == "cpu" else torch.accelerator.memory_allocated(device)


def _proc(path: str) -> dict[str, int]:
    """The lines "name: n kB" of a file as {name: bytes}; empty if there is no such file."""
    try:
        with open(path) as file:
            lines = file.read().splitlines()
    except OSError:
        return {}
    values = {}
    for line in lines:
        words = line.split()
        if len(words) == 3 and words[0].endswith(":") and words[2] == "kB":
            values[words[0][:-1]] = int(words[1]) * 1024
    return values


def _gib(n_bytes: int | None) -> str:
    return "?" if n_bytes is None else f"{n_bytes / _GIB:.2f} GB"


def _host_text(m: MemoryReport) -> str:
    text = f"host RSS {_gib(m.host_rss_bytes)}, PSS {_gib(m.host_pss_bytes)}, peak {_gib(m.host_peak_bytes)}"
    return f"{text}; machine {_gib(m.host_available_bytes)} free of {_gib(m.host_total_bytes)}"


def _device_text(m: MemoryReport) -> str:
    if m.device_allocated_bytes is None:
        return "no device"
    return (
        f"device allocated {_gib(m.device_allocated_bytes)} (peak {_gib(m.device_peak_allocated_bytes)}), "
        f"reserved {_gib(m.device_reserved_bytes)} (peak {_gib(m.device_peak_reserved_bytes)})"
    )


def see_memory_usage(message: str, force: bool = False) -> MemoryReport | None:
    """Logs host and device memory on rank 0 after ``message``, and returns it. Does nothing unless ``force``.

    Garbage is collected first. Afterwards the device's peak counters are reset.
    """
    if not force:
        return None
    gc.collect()
    memory = measure_memory()
    text = _host_text(memory)
    if memory.device_allocated_bytes is not None:
        text = f"{_device_text(memory)}; {text}"
        torch.accelerator.reset_peak_memory_stats()
    log_dist(f"{message}: {text}", ranks=[0])
    return memory
