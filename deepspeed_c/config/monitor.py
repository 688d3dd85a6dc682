"""Sections of the monitors, comms_logger, flops_profiler and timers: measurements, and their outputs."""

from typing import Annotated, Literal

import msgspec

from .keys import NonNegFloat, Positive, Section, acts, asks, tunes

__all__ = [
    "Comet",
    "CommsLoggerSection",
    "CsvMonitor",
    "FlopsProfilerSection",
    "JsonLines",
    "Prometheus",
    "TensorBoard",
    "Timers",
    "Wandb",
]

Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class TensorBoard(Section, kw_only=True):
    """Scalars to TensorBoard."""

    enabled: Annotated[bool, asks("Switch of the section.", "tensorboard")] = False
    output_path: Annotated[str, tunes("Directory; empty: where the program runs.", "tensorboard")] = ""
    job_name: Annotated[str, tunes("Directory below it.", "tensorboard")] = "DeepSpeedJobName"


class Wandb(Section, kw_only=True):
    """Scalars to Weights & Biases."""

    enabled: Annotated[bool, asks("Switch of the section.", "wandb")] = False
    group: Annotated[str | None, tunes("Group of runs.", "wandb")] = None
    team: Annotated[str | None, tunes("Team.", "wandb")] = None
    project: Annotated[str, tunes("Project.", "wandb")] = "deepspeed"
    id: Annotated[str | None, tunes("Id of the run; with resume it is continued. Null: a new one.", "wandb")] = None
    resume: Annotated[
        Literal["allow", "must", "never", "auto"] | None, tunes("Whether a run of this id is continued.", "wandb")
    ] = None
    mode: Annotated[
        Literal["online", "offline", "shared", "disabled"] | None,
        tunes("Where the run is kept; null: WANDB_MODE, or online.", "wandb"),
    ] = None
    name: Annotated[str | None, tunes("Name of the run that the site shows; null: W&B makes one.", "wandb")] = None


class Comet(Section, kw_only=True):
    """Scalars to Comet."""

    enabled: Annotated[bool, asks("Switch of the section.", "comet")] = False
    samples_log_interval: Annotated[Positive, tunes("Samples between records.", "comet")] = 100
    project: Annotated[str | None, tunes("Project.", "comet")] = None
    workspace: Annotated[str | None, tunes("Workspace.", "comet")] = None
    api_key: Annotated[str | None, tunes("API key.", "comet")] = None
    experiment_name: Annotated[str | None, tunes("Name of the experiment.", "comet")] = None
    experiment_key: Annotated[str | None, tunes("Key of the experiment.", "comet")] = None
    online: Annotated[bool | None, tunes("Send at once; null: true.", "comet")] = None
    mode: Annotated[str | None, tunes("get, create or get_or_create.", "comet")] = None


class CsvMonitor(Section, kw_only=True):
    """Scalars to CSV files."""

    enabled: Annotated[bool, asks("Switch of the section.", "csv_monitor")] = False
    output_path: Annotated[str, tunes("Directory; empty: where the program runs.", "csv_monitor")] = ""
    job_name: Annotated[str, tunes("Directory below it.", "csv_monitor")] = "DeepSpeedJobName"


class JsonLines(Section, kw_only=True):
    """Scalars to a file of JSON lines, one object a step."""

    enabled: Annotated[bool, asks("Switch of the section.", "jsonl")] = False
    output_path: Annotated[str, tunes("Directory; empty: where the program runs.", "jsonl")] = ""
    job_name: Annotated[str, tunes("Directory below it.", "jsonl")] = "DeepSpeedJobName"


class Prometheus(Section, kw_only=True):
    """Scalars as gauges that a Prometheus server scrapes from rank 0."""

    enabled: Annotated[bool, asks("Switch of the section.", "prometheus")] = False
    port: Annotated[Port, tunes("TCP port of the endpoint.", "prometheus")] = 9200
    address: Annotated[str, tunes("Address at which it listens; 0.0.0.0: all of the host.", "prometheus")] = "127.0.0.1"
    job_name: Annotated[str, tunes("Value of the label job_name.", "prometheus")] = "DeepSpeedJobName"


class CommsLoggerSection(Section, kw_only=True):
    """A log of collectives."""

    enabled: Annotated[bool, asks("Switch of the section.", "comms_logger")] = False
    verbose: Annotated[bool, tunes("Print each one.", "comms_logger")] = False
    prof_all: Annotated[bool, tunes("Log all operations.", "comms_logger")] = True
    debug: Annotated[bool, tunes("Name the caller.", "comms_logger")] = False
    prof_ops: Annotated[tuple[str, ...], tunes("Log these operations only.", "comms_logger")] = ()


class FlopsProfilerSection(Section, kw_only=True):
    """A count of the model's floating-point operations."""

    enabled: Annotated[bool, asks("Switch of the section.", "flops_profiler")] = False
    recompute_fwd_factor: Annotated[
        NonNegFloat,
        tunes(
            "Part of forward that the backward computes again, for a report that has counted no recomputation.",
            "flops_profiler",
        ),
    ] = 0.0
    profile_step: Annotated[int, tunes("Steps before the profiled one: 1 profiles the second.", "flops_profiler")] = 1
    module_depth: Annotated[
        int, tunes("Depths of modules in the list of the heaviest; -1: all.", "flops_profiler")
    ] = -1
    top_modules: Annotated[Positive, tunes("Modules in that list per depth.", "flops_profiler")] = 1
    detailed: Annotated[bool, tunes("Print the tree of all modules, too.", "flops_profiler")] = True
    output_file: Annotated[str | None, tunes("File of the report; null: it is printed.", "flops_profiler")] = None


class Throughput(Section, kw_only=True):
    """The throughput timer."""

    enabled: Annotated[bool, acts("Measure samples per second.")] = True
    synchronized: Annotated[bool, acts("Wait for the device at each reading.")] = True


class Timers(Section, kw_only=True):
    """Timers that always run."""

    throughput: Annotated[Throughput, acts("The throughput timer.")] = Throughput()
