"""Sections checkpoint, nebula, datastates_ckpt and activation_checkpointing."""

from typing import Annotated, Literal

from .keys import NonNeg, Positive, Section, asks, tunes

__all__ = ["ActivationCheckpointing", "Checkpoint", "DataStates", "Nebula"]

_CK = "checkpoint"
_ACT = "activation_checkpointing"


class ParallelWrite(Section, kw_only=True):
    """Which ranks write at the same time."""

    pipeline_stage: Annotated[bool, tunes("Pipeline stages write in parallel.", _CK)] = False


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


class Checkpoint(Section, kw_only=True):
    """Saving and loading the engine's state."""

    tag_validation: Annotated[
        Literal["WARN", "IGNORE", "FAIL"], tunes("What to do when ranks use different tags.", _CK)
    ] = "WARN"
    load_universal: Annotated[bool, asks("Load the universal format.", _CK)] = False
    use_node_local_storage: Annotated[bool, tunes("Each node writes its own files.", _CK)] = False
    parallel_write: Annotated[ParallelWrite, tunes("Which ranks write at the same time.", _CK)] = ParallelWrite()
    writer: Annotated[Writer | None, asks("Options of the fast writer.", "checkpoint_writer")] = None
    checkpoint_serialization: Annotated[bool, tunes("Serialise tensors as objects.", _CK)] = True


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
