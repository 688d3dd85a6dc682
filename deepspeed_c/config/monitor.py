"""Sections tensorboard, wandb, comet, csv_monitor, comms_logger, flops_profiler and timers: where numbers go."""

from typing import Annotated

from .keys import NonNegFloat, Positive, Section, acts, asks, tunes

__all__ = ["Comet", "CommsLoggerSection", "CsvMonitor", "FlopsProfiler", "TensorBoard", "Timers", "Wandb"]

_MON = "monitors"


class TensorBoard(Section, kw_only=True):
    """Scalars to TensorBoard."""

    enabled: Annotated[bool, asks("Switch of the section.", _MON)] = False
    output_path: Annotated[str, tunes("Directory; empty: where the program runs.", _MON)] = ""
    job_name: Annotated[str, tunes("Directory below it.", _MON)] = "DeepSpeedJobName"


class Wandb(Section, kw_only=True):
    """Scalars to Weights & Biases."""

    enabled: Annotated[bool, asks("Switch of the section.", _MON)] = False
    group: Annotated[str | None, tunes("Group of runs.", _MON)] = None
    team: Annotated[str | None, tunes("Team.", _MON)] = None
    project: Annotated[str, tunes("Project.", _MON)] = "deepspeed"


class Comet(Section, kw_only=True):
    """Scalars to Comet."""

    enabled: Annotated[bool, asks("Switch of the section.", _MON)] = False
    samples_log_interval: Annotated[Positive, tunes("Samples between records.", _MON)] = 100
    project: Annotated[str | None, tunes("Project.", _MON)] = None
    workspace: Annotated[str | None, tunes("Workspace.", _MON)] = None
    api_key: Annotated[str | None, tunes("API key.", _MON)] = None
    experiment_name: Annotated[str | None, tunes("Name of the experiment.", _MON)] = None
    experiment_key: Annotated[str | None, tunes("Key of the experiment.", _MON)] = None
    online: Annotated[bool | None, tunes("Send at once; null: true.", _MON)] = None
    mode: Annotated[str | None, tunes("get, create or get_or_create.", _MON)] = None


class CsvMonitor(Section, kw_only=True):
    """Scalars to CSV files."""

    enabled: Annotated[bool, asks("Switch of the section.", _MON)] = False
    output_path: Annotated[str, tunes("Directory; empty: where the program runs.", _MON)] = ""
    job_name: Annotated[str, tunes("Directory below it.", _MON)] = "DeepSpeedJobName"


class CommsLoggerSection(Section, kw_only=True):
    """A log of collectives."""

    enabled: Annotated[bool, asks("Switch of the section.", "comms_logger")] = False
    verbose: Annotated[bool, tunes("Print each one.", "comms_logger")] = False
    prof_all: Annotated[bool, tunes("Log all operations.", "comms_logger")] = True
    debug: Annotated[bool, tunes("Name the caller.", "comms_logger")] = False
    prof_ops: Annotated[tuple[str, ...], tunes("Log these operations only.", "comms_logger")] = ()


class FlopsProfiler(Section, kw_only=True):
    """A count of the model's floating-point operations."""

    enabled: Annotated[bool, asks("Switch of the section.", "flops_profiler")] = False
    recompute_fwd_factor: Annotated[NonNegFloat, tunes("Part of forward that is run again.", "flops_profiler")] = 0.0
    profile_step: Annotated[int, tunes("Step that is profiled.", "flops_profiler")] = 1
    module_depth: Annotated[int, tunes("Depth of the report; -1: all.", "flops_profiler")] = -1
    top_modules: Annotated[Positive, tunes("Modules listed per depth.", "flops_profiler")] = 1
    detailed: Annotated[bool, tunes("Print each module.", "flops_profiler")] = True
    output_file: Annotated[str | None, tunes("File of the report.", "flops_profiler")] = None


class Throughput(Section, kw_only=True):
    """The throughput timer."""

    enabled: Annotated[bool, acts("Measure samples per second.")] = True
    synchronized: Annotated[bool, acts("Wait for the device at each reading.")] = True


class Timers(Section, kw_only=True):
    """Timers that always run."""

    throughput: Annotated[Throughput, acts("The throughput timer.")] = Throughput()
