"""The measurement of one experiment: the engine times some steps, writes the metric file, and ends the run."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from deepspeed_c.checkpoint.native.commit import replace_durably
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.tuning import Autotuning
from deepspeed_c.errors import ConfigError
from deepspeed_c.observe.phases import Phases
from deepspeed_c.profile.timers import measure_memory, shared_memory_of_others

__all__ = ["ExperimentMeter", "MeasuredEngine", "progress_path", "write_json"]


class MeasuredEngine(Protocol):
    """The parts of an engine that an experiment measures."""

    global_steps: int
    device: torch.device
    phases: Phases

    def autotuning_metric_path(self) -> str: ...
    def train_batch_size(self) -> int: ...
    def train_micro_batch_size_per_gpu(self) -> int: ...
    def gradient_accumulation_steps(self) -> int: ...
    def close(self) -> None: ...


class ExperimentMeter:
    """Times the steps ``start_profile_step`` to ``end_profile_step``, counted from 0, of an engine whose configuration
    has ``autotuning.enabled``. Without it the methods do nothing.
    """

    def __init__(
        self, section: Autotuning, engine: MeasuredEngine, comm: Collectives, forward_flops: Callable[[], int | None]
    ) -> None:
        """forward_flops: FLOPs of one counted forward of this rank; None if no forward was counted."""
        self._section, self._engine, self._comm, self._forward_flops = section, engine, comm, forward_flops
        self._inputs: list[dict[str, Any]] | None = None
        self._inputs_vary = False
        self._phases_ms: dict[str, float] = {}
        self._begin = time.perf_counter()

    def look(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Called before each training forward. Notes the shapes of the tensors in the arguments of the first one, and
        whether others have other shapes."""
        if not self._section.enabled:
            return
        leaves = tree_leaves((tuple(inputs), dict(kwargs)))
        found = [
            {"shape": list(leaf.shape), "is_floating_point": leaf.is_floating_point()}
            for leaf in leaves
            if isinstance(leaf, torch.Tensor)
        ]
        if self._inputs is not None:
            self._inputs_vary |= found != self._inputs
            return
        self._inputs = found
        if self._section.start_profile_step == 0:
            self._begin = self._now()

    def end_step(self) -> None:
        """Called after each optimizer step. After the last measured step it writes the metric file and ends the
        process with exit code 0. Collective over all ranks in that step.

        Raises ConfigError on all ranks if the file cannot be written.
        """
        section, n_steps = self._section, self._engine.global_steps
        if not section.enabled:
            return
        if self._comm.rank == 0:
            self._tell_progress(n_steps)
        if n_steps == section.start_profile_step:
            self._begin = self._now()
        elif n_steps > section.start_profile_step:
            for phase, ms in self._engine.phases.last_step_ms().items():
                self._phases_ms[phase] = self._phases_ms.get(phase, 0.0) + ms
        if n_steps == section.end_profile_step + 1:
            self._end_run(self._now() - self._begin)

    def _tell_progress(self, n_steps: int) -> None:
        """Writes the number of steps for a tuner, which does without if it cannot be written."""
        with (
            suppress(OSError),
            open(progress_path(self._engine.autotuning_metric_path()), "w", encoding="ascii") as file,
        ):
            file.write(str(n_steps))

    def _now(self) -> float:
        if self._engine.device.type != "cpu":
            torch.accelerator.synchronize(self._engine.device)
        return time.perf_counter()

    def _end_run(self, seconds: float) -> None:
        engine, path = self._engine, self._engine.autotuning_metric_path()
        memory = measure_memory()
        host_bytes = memory.host_peak_bytes
        if host_bytes is not None:
            # A rank reads the weights and gradients of others in shared memory; its host has those pages once.
            host_bytes -= shared_memory_of_others()
        mine = (seconds, memory.device_peak_allocated_bytes, host_bytes)
        everyone = self._comm.gather_objects(mine, label="results of the experiment")
        problem = ""
        if self._comm.rank == 0:
            try:
                write_json(path, self._metrics(everyone))
            except OSError as error:
                problem = error.strerror or str(error)
        # The ranks leave together: a rank that ends early could be taken for a failed one.
        problem = self._comm.gather_objects(problem, label="end of the experiment")[0]
        if problem:
            raise ConfigError(
                f"{path} cannot be written: {problem}",
                where="autotuning.metric_path",
                fix="name a file in a folder that rank 0 may write",
            )
        if self._comm.rank == 0:
            print(f"autotuning: wrote {path}; the run ends here, after {engine.global_steps} steps", flush=True)
        engine.close()
        sys.exit(0)

    def _metrics(self, everyone: Sequence[tuple[float, int | None, int | None]]) -> dict[str, Any]:
        """The content of the metric file. Times are seconds of a step, of the slowest rank; the phases and FLOPs are
        rank 0's. Bytes are the largest of a rank; ranks have equal parts of memory that they share."""
        engine, section = self._engine, self._section
        n_steps = section.end_profile_step + 1 - section.start_profile_step
        latency = max(seconds for seconds, _, _ in everyone) / n_steps
        seconds = {name: ms / 1e3 / n_steps for name, ms in self._phases_ms.items()}
        flops = self._forward_flops()
        if flops is not None:
            # A backward has twice the FLOPs of its forward. Recomputed layers are not counted, since they are overhead.
            flops = 3 * flops * engine.gradient_accumulation_steps() / latency
        return {
            "throughput": engine.train_batch_size() / latency,
            "latency": latency,
            "forward": seconds.get("forward"),
            "backward": seconds.get("backward"),
            "step": seconds.get("step"),
            "flops": flops,
            "train_batch_size": engine.train_batch_size(),
            "train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu(),
            "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
            "inputs": self._inputs,
            "inputs_vary": self._inputs_vary,
            "peak_device_bytes": max((device for _, device, _ in everyone if device is not None), default=None),
            "peak_host_bytes": max((host for _, _, host in everyone if host is not None), default=None),
            "n_ranks": len(everyone),
        }


def progress_path(metric_path: str) -> str:
    """The file with the number of optimizer steps so far, beside the metric file of an experiment."""
    return os.path.join(os.path.dirname(metric_path), "steps.txt")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes a JSON file that readers see whole or not at all. Makes its folder. Raises OSError."""
    path, text = os.path.abspath(path), json.dumps(value, indent=2) + "\n"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    replace_durably(path, text.encode())
