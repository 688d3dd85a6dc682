"""Sections checkpoint, nebula, datastates_ckpt and activation_checkpointing."""

from typing import Annotated, Literal

from ..quantity import parse_seconds
from .keys import NonNeg, Positive, PositiveFloat, Section, acts, asks, inherent, tunes

__all__ = ["ActivationCheckpointing", "Checkpoint", "DataStates", "Nebula"]


class ParallelWrite(Section, kw_only=True):
    """Ranks that write at the same time."""

    pipeline_stage: Annotated[bool, inherent("Pipeline stages write in parallel.", "all ranks do")] = False


class Writer(Section, kw_only=True):
    """The checkpoint writer."""

    type: Annotated[Literal["MOCK", "PYTHON", "FAST"], tunes("Which writer.", "checkpoint_writer")] = "FAST"
    io_buffer_size: Annotated[Positive, tunes("Bytes of its buffer.", "checkpoint_writer", floor=True)] = 64 << 20
    io_buffer_double: Annotated[bool, tunes("Use two buffers.", "checkpoint_writer")] = True
    io_multiplier: Annotated[Positive, tunes("Writers per device.", "checkpoint_writer")] = 1
    show_statistics: Annotated[bool, tunes("Report speeds.", "checkpoint_writer")] = False
    data_parallel: Annotated[
        Literal["REPLICA", "SOCKET", "MACHINE"] | None, tunes("Which ranks share a write.", "checkpoint_writer")
    ] = None
    decoupled: Annotated[bool, tunes("Write in another process.", "checkpoint_writer")] = False


class PreemptionSection(Section, kw_only=True):
    """Reaction to SIGTERM, which clusters send before they take a machine away."""

    enabled: Annotated[
        bool, acts("On SIGTERM to any rank, save after the step under way and end all ranks with exit code 0.")
    ] = False
    save_dir: Annotated[
        str | None,
        acts("Folder to save to; null: the one of auto_resume, or else the one that was last saved to or loaded from."),
    ] = None
    signals: Annotated[
        tuple[Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"], ...],
        acts("The signals that mean it.", one_or_many=True),
    ] = ("SIGTERM",)


class Checkpoint(Section, kw_only=True, rename={"is_async": "async"}):
    """Saving and loading the engine's state."""

    is_async: Annotated[bool, acts("save_checkpoint returns when the state has been copied; a thread writes it.")] = (
        False
    )
    format: Annotated[
        Literal["deepspeed_c", "deepspeed"],
        acts('Layout of what is saved; "deepspeed" writes what DeepSpeed 0.19 loads.'),
    ] = "deepspeed_c"
    auto_resume: Annotated[
        str | None,
        acts(
            "Folder whose newest complete checkpoint initialize loads, if it has one. A section elasticity that would"
            " change the batch since the save is refused; load_checkpoint accepts it. null: only load_checkpoint loads."
        ),
    ] = None
    every: Annotated[
        PositiveFloat | str | None,
        acts(
            'Time after which the engine saves to the folder of auto_resume by itself, asynchronously: "60s", "5m", "1h" or'
            " seconds since the last save; null: never."
        ),
    ] = None
    keep_last: Annotated[Positive | None, acts("Checkpoints that stay in a folder; null: all.")] = None
    keep_every: Annotated[
        Positive | None, acts("Of the older ones, those stay whose step is a multiple of this, besides keep_last.")
    ] = None
    preemption: Annotated[PreemptionSection, acts("What SIGTERM does.")] = PreemptionSection()
    tag_validation: Annotated[Literal["WARN", "IGNORE", "FAIL"], acts("What to do when ranks use different tags.")] = (
        "WARN"
    )
    load_universal: Annotated[
        bool, inherent("Load the universal format.", "every format is recognised by what lies in the folder")
    ] = False
    use_node_local_storage: Annotated[bool, acts("Each node writes and commits its own folder.")] = False
    parallel_write: Annotated[ParallelWrite, inherent("Which ranks write at the same time.", "all do")] = (
        ParallelWrite()
    )
    writer: Annotated[Writer | None, asks("Options of the fast writer.", "checkpoint_writer")] = None
    checkpoint_serialization: Annotated[
        bool, inherent("Serialise tensors as objects.", "tensors are always written as bytes")
    ] = True

    @property
    def every_seconds(self) -> float | None:
        """The key ``every`` in seconds. Raises ConfigError if it is no time."""
        return parse_seconds(self.every, "checkpoint.every") if isinstance(self.every, str) else self.every


class Nebula(Section, kw_only=True):
    """Azure's asynchronous checkpoints."""

    enabled: Annotated[bool, asks("Switch of the section.", "nebula")] = False
    persistent_storage_path: Annotated[str | None, tunes("Directory.", "nebula")] = None
    persistent_time_interval: Annotated[NonNeg, tunes("Seconds between copies.", "nebula")] = 100
    num_of_version_in_retention: Annotated[NonNeg, tunes("Versions kept.", "nebula")] = 2
    enable_nebula_load: Annotated[bool, tunes("Load through Nebula.", "nebula")] = True
    nebula_load_path: Annotated[str | None, tunes("Directory to load from.", "nebula")] = None


class DataStates(Section, kw_only=True):
    """Asynchronous checkpoints through DataStates."""

    host_cache_size: Annotated[NonNeg | None, tunes("GB of host cache.", "datastates")] = None


class ActivationOffload(Section, kw_only=True):
    """Where inputs of recomputed layers wait for the backward."""

    device: Annotated[
        Literal["none", "cpu", "nvme"],
        asks('"cpu": in host memory, as with cpu_checkpointing; "nvme": in a file.', "activation_offload"),
    ] = "none"
    nvme_path: Annotated[str | None, tunes("Folder of the file.", "activation_offload")] = None
    max_in_cpu: Annotated[
        int | str | None,
        tunes(
            'With nvme: bytes that stay in host memory, a number or "8GiB"; null: none. Not with a budget where that is'
            " the memory that computes.",
            "activation_offload",
        ),
    ] = None


class ActivationCheckpointing(Section, kw_only=True):
    """Layers whose activations are recomputed in the backward, and how the layers' inputs are kept until then."""

    layers: Annotated[
        str | None,
        acts(
            'Layers of the model to recompute: a regular expression that fits their whole names; "auto", or (under'
            ' accelerate and transformers) "repeated": its repeated blocks; null: what it calls through checkpoint().',
            auto="value",
        ),
    ] = None
    use_reentrant: Annotated[
        bool, acts("Run a layer's backward within autograd's, as one operator, instead of through saved tensors.")
    ] = False
    check: Annotated[bool, acts("Compare all values of a layer that is run again with those of its forward. Slow.")] = (
        False
    )
    python_random: Annotated[bool, acts("Replay Python's random as well.")] = False
    partition_activations: Annotated[bool, acts("Cut a layer's inputs over model-parallel ranks.")] = False
    cpu_checkpointing: Annotated[bool, acts("Keep a layer's inputs in host memory.")] = False
    contiguous_memory_optimization: Annotated[
        bool, acts("Keep what is cut in one piece of memory; with partition_activations.")
    ] = False
    number_checkpoints: Annotated[
        NonNeg | None, acts("Layers that it is for: a hint, since its size is that of the first step's inputs.")
    ] = None
    synchronize_checkpoint_boundary: Annotated[bool, acts("Wait for the device at each layer's beginning and end.")] = (
        False
    )
    profile: Annotated[
        bool, acts("Log times and bytes of each layer every steps_per_print steps: a mean of its calls since the last.")
    ] = False
    profile_path: Annotated[
        str | None, acts("Folder for the newest such table as activations.json and activations.svg, of rank 0.")
    ] = None
    budget: Annotated[
        int | str | None,
        acts(
            'Bytes that the activations of layers may take, such as "6GiB": those that fit are kept instead of'
            ' recomputed, or wait where offload or cpu_checkpointing says; "auto": what the device leaves after the first'
            " step; null: all layers are recomputed.",
            auto="value",
        ),
    ] = None
    budget_plan: Annotated[
        str | None, acts("File of the plan that fits the budget: followed where it exists, and else written.")
    ] = None
    offload: Annotated[ActivationOffload, tunes("Host memory and files for the inputs.", "activation_offload")] = (
        ActivationOffload()
    )
