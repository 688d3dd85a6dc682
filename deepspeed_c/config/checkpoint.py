"""Sections checkpoint, nebula, datastates_ckpt and activation_checkpointing."""

from typing import Annotated, Literal

from .keys import NonNeg, Positive, Section, acts, asks, inherent, tunes

__all__ = ["ActivationCheckpointing", "Checkpoint", "DataStates", "Nebula"]

_ACT = "activation_checkpointing"


class ParallelWrite(Section, kw_only=True):
    """Which ranks write at the same time."""

    pipeline_stage: Annotated[bool, tunes("Pipeline stages write in parallel.", "pipeline")] = False


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
    """What SIGTERM does, which clusters send before they take a machine away."""

    enabled: Annotated[
        bool, acts("On SIGTERM to any rank, save after the step under way and end all ranks with exit code 0.")
    ] = False
    save_dir: Annotated[str | None, acts("Folder to save to; null: the one that was last saved to or loaded from.")] = (
        None
    )
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
    parallel_write: Annotated[ParallelWrite, tunes("Which ranks write at the same time.", "pipeline")] = ParallelWrite()
    writer: Annotated[Writer | None, asks("Options of the fast writer.", "checkpoint_writer")] = None
    checkpoint_serialization: Annotated[
        bool, inherent("Serialise tensors as objects.", "tensors are always written as bytes")
    ] = True


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


class ActivationCheckpointing(Section, kw_only=True):
    """How activations that backward needs again are kept."""

    partition_activations: Annotated[bool, asks("Cut saved activations over model-parallel ranks.", _ACT)] = False
    cpu_checkpointing: Annotated[bool, asks("Keep saved activations in host memory.", _ACT)] = False
    contiguous_memory_optimization: Annotated[bool, asks("Keep them in one buffer.", _ACT)] = False
    number_checkpoints: Annotated[NonNeg | None, tunes("Checkpoints that buffer holds.", _ACT)] = None
    synchronize_checkpoint_boundary: Annotated[bool, asks("Wait for the device at each checkpoint.", _ACT)] = False
    profile: Annotated[bool, asks("Time each checkpoint.", _ACT)] = False
