"""The whole schema: the top-level keys, and functions that walk over all keys."""

import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from .checkpoint import ActivationCheckpointing, Checkpoint, DataStates, Nebula
from .compiler import Compile
from .compression import Compression
from .data import Curriculum, DataEfficiency
from .keys import DType, Infinity, KeyInfo, NonNegFloat, Positive, PositiveFloat, Section, acts, asks, inherent, tunes
from .model import Eigenvalue, LayerDrop, QuantizeTraining, SparseAttention, WeightQuantization
from .monitor import (
    Comet,
    CommsLoggerSection,
    CsvMonitor,
    FlopsProfilerSection,
    JsonLines,
    Prometheus,
    TensorBoard,
    Timers,
    Wandb,
)
from .offload import Aio
from .optim import Kind, OptimizerSection
from .parallel import Comm, ExpertParallel, HybridEngine, Inference, Pipeline, TensorParallel
from .precision import Amp, Bf16, DataTypes, Fp16, MsAmp, TorchAutocast
from .same_bits import SameBits
from .schedule import Scheduler
from .sequence import SequenceParallel
from .tuning import Autotuning, Elasticity
from .zero import Zero

__all__ = ["Root", "SectionField", "fields_of", "find", "info_of", "kinds_of", "walk"]


class Root(Section, kw_only=True, rename={"zero": "zero_optimization"}):
    """The top-level keys."""

    strict: Annotated[
        bool, acts("Every note on the configuration (keys without effect, old names, parked keys) is an error.")
    ] = False

    # Batch sizes
    train_batch_size: Annotated[
        Positive | None,
        acts("Samples of one optimizer step over all ranks: micro batch x accumulation x ranks.", auto="derive"),
    ] = None
    train_micro_batch_size_per_gpu: Annotated[
        Positive | None, acts("Samples of one forward and backward on one rank.", auto="derive")
    ] = None
    gradient_accumulation_steps: Annotated[
        Positive | None, acts("Micro batches summed into one optimizer step.", auto="derive")
    ] = None
    managed_gradient_accumulation: Annotated[
        bool, acts("The engine counts micro batches; false: each call of step() is a boundary.")
    ] = True

    # Gradients
    gradient_clipping: Annotated[NonNegFloat, acts("Limit of the global gradient norm; 0: none.", auto="fill")] = 1.0
    communication_data_type: Annotated[
        DType | None, acts("Format gradients are reduced in; null: that of the weights.")
    ] = None
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], acts("How gradients of the ranks are combined.")] = "mean"
    prescale_gradients: Annotated[bool, acts("Divide gradients before the reduction, not after it.")] = False
    gradient_predivide_factor: Annotated[
        PositiveFloat, acts("Part of the division that is done before the reduction.")
    ] = 1.0
    sparse_gradients: Annotated[bool, acts("Reduce gradients of embeddings as rows.")] = False
    disable_allgather: Annotated[bool, acts("Broadcast updated weights where all-gather would be used.")] = False

    # Optimizer and schedule
    optimizer: Annotated[OptimizerSection | None, acts("The optimizer that the engine builds.")] = None
    scheduler: Annotated[Scheduler | None, acts("The learning-rate schedule that the engine builds and advances.")] = (
        None
    )
    zero_allow_untested_optimizer: Annotated[
        bool, acts("Accept any client optimizer with ZeRO; false accepts those that are elementwise and tested.")
    ] = False
    zero_force_ds_cpu_optimizer: Annotated[
        bool, tunes("With offload, demand our CPU optimizer.", "offload_optimizer")
    ] = True

    # Precision
    fp16: Annotated[Fp16, acts("fp16 training.")] = Fp16()
    bf16: Annotated[Bf16, acts("bf16 training.")] = Bf16()
    torch_autocast: Annotated[TorchAutocast, acts("Autocast training.")] = TorchAutocast()
    data_types: Annotated[DataTypes, acts("Formats that do not follow from these.")] = DataTypes()
    cpu_products: Annotated[
        Literal["auto", "torch"],
        acts(
            "Who multiplies bf16 and fp16 on a CPU. auto: until the last engine with this value is closed, kernels that"
            " compute in fp32, if torch takes longer by half or more (processors below AVX-512). torch: torch.",
            auto="value",
        ),
    ] = "auto"
    amp: Annotated[Amp, tunes("Apex AMP.", "amp")] = Amp()
    msamp: Annotated[MsAmp, tunes("MS-AMP.", "msamp")] = MsAmp()

    # Sharding and offload
    zero: Annotated[Zero, acts("What is sharded.")] = Zero()
    aio: Annotated[Aio, tunes("Requests of the I/O engine.", "nvme")] = Aio()

    # Reports
    steps_per_print: Annotated[
        Positive | Infinity | None, acts("Steps between progress lines; null or infinity: none.", allow_inf=True)
    ] = None
    fingerprint_every: Annotated[
        Positive | None,
        acts(
            "Steps between comparisons of the ranks' weights and states, with a line of their fingerprint; null: none."
        ),
    ] = None
    wall_clock_breakdown: Annotated[bool, acts("Time the phases of a step and log them.")] = False
    dump_state: Annotated[bool, acts("Log the engine's state after it is made.")] = False
    memory_breakdown: Annotated[bool, acts("Log memory at the phases of a step.")] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"] | None, acts("Level of the logger; null leaves it.")
    ] = None
    timers: Annotated[Timers, acts("Timers.")] = Timers()
    comm: Annotated[Comm, acts("How ranks exchange data.")] = Comm()
    collective_timeout_s: Annotated[
        NonNegFloat,
        acts("Seconds a rank waits in a collective before all ranks compare where they are; 0: never."),
    ] = 30.0
    vocabulary_size: Annotated[
        Positive | None, inherent("Size of the vocabulary.", "informational: nothing is computed from it")
    ] = None

    # Data
    dataloader_drop_last: Annotated[bool, acts("Drop the last, incomplete batch of the engine's loader.")] = False
    seed: Annotated[int, acts("Seed of data sampling, and of the random numbers of grains (same_bits).")] = 1234
    same_bits: Annotated[SameBits, acts("Bits that do not depend on the number of ranks.")] = SameBits()

    # Features of their own
    disable_python_gc: Annotated[
        bool,
        acts(
            "Turn Python's automatic cycle collections off until the last engine with this key is closed, after one"
            " collection: they stop ranks at different moments. engine.collect_python_gc() runs one."
        ),
    ] = False
    graph_harvesting: Annotated[bool, asks("Capture parts of backward in CUDA graphs.", "graph_harvesting")] = False
    seq_parallel_communication_data_type: Annotated[
        DType | None,
        acts(
            "Format gradients are reduced in where there are sequence-parallel ranks; null: communication_data_type, or"
            " that of the gradient."
        ),
    ] = "fp32"
    sequence_parallel_size: Annotated[Positive, acts("Neighbouring ranks that hold parts of the same sequences.")] = 1
    data_parallel_size: Annotated[
        Positive | None,
        acts("Data-parallel ranks, where the key above says how many share a sequence; null: the rest."),
    ] = None
    sequence_parallel: Annotated[SequenceParallel, acts("Sequences that are cut over ranks.")] = SequenceParallel()
    use_data_before_expert_parallelism: Annotated[
        bool, acts("Neighbouring ranks hold the same experts; false: different experts of one layer.")
    ] = False
    tensor_parallel: Annotated[TensorParallel, tunes("Tensor parallelism.", "tensor_parallel")] = TensorParallel()
    expert_parallel: Annotated[ExpertParallel, tunes("Expert parallelism.", "expert_parallel")] = ExpertParallel()
    pipeline: Annotated[Pipeline, acts("Pipeline parallelism.")] = Pipeline()
    inference: Annotated[Inference, tunes("Generation.", "inference")] = Inference()
    hybrid_engine: Annotated[HybridEngine, tunes("Train and generate.", "hybrid_engine")] = HybridEngine()
    compile: Annotated[Compile, tunes("Compiled graphs.", "deepcompile")] = Compile()
    activation_checkpointing: Annotated[ActivationCheckpointing, acts("Activations that are computed again.")] = (
        ActivationCheckpointing()
    )
    checkpoint: Annotated[Checkpoint, acts("Saving and loading.")] = Checkpoint()
    nebula: Annotated[Nebula, tunes("Nebula.", "nebula")] = Nebula()
    datastates_ckpt: Annotated[DataStates | None, asks("DataStates.", "datastates")] = None
    flops_profiler: Annotated[FlopsProfilerSection, tunes("Operations of the model.", "flops_profiler")] = (
        FlopsProfilerSection()
    )
    autotuning: Annotated[Autotuning, tunes("Search for settings.", "autotuning")] = Autotuning()
    elasticity: Annotated[Elasticity, tunes("Batch for many world sizes.", "elasticity")] = Elasticity()
    tensorboard: Annotated[TensorBoard, tunes("TensorBoard.", "tensorboard")] = TensorBoard()
    wandb: Annotated[Wandb, tunes("Weights & Biases.", "wandb")] = Wandb()
    comet: Annotated[Comet, tunes("Comet.", "comet")] = Comet()
    csv_monitor: Annotated[CsvMonitor, tunes("CSV files.", "csv_monitor")] = CsvMonitor()
    jsonl: Annotated[JsonLines, tunes("JSON lines.", "jsonl")] = JsonLines()
    prometheus: Annotated[Prometheus, tunes("Prometheus.", "prometheus")] = Prometheus()
    comms_logger: Annotated[CommsLoggerSection, tunes("Log of collectives.", "comms_logger")] = CommsLoggerSection()
    sparse_attention: Annotated[SparseAttention | None, asks("Block-sparse attention.", "sparse_attention")] = None
    progressive_layer_drop: Annotated[LayerDrop, tunes("Layer drop.", "progressive_layer_drop")] = LayerDrop()
    eigenvalue: Annotated[Eigenvalue, tunes("Curvature.", "eigenvalue")] = Eigenvalue()
    quantize_training: Annotated[QuantizeTraining, tunes("Old section.", "eigenvalue")] = QuantizeTraining()
    curriculum_learning: Annotated[Curriculum, tunes("Old form of curriculum learning.", "curriculum")] = Curriculum()
    data_efficiency: Annotated[DataEfficiency, tunes("Sampling and token dropping.", "data_efficiency")] = (
        DataEfficiency()
    )
    compression_training: Annotated[Compression, tunes("Compression during training.", "compression")] = Compression()
    weight_quantization: Annotated[WeightQuantization | None, asks("Quantized weights.", "inference_quantization")] = (
        None
    )


class SectionField(NamedTuple):
    """One key of a section."""

    name: str
    """The name in JSON."""
    attribute: str
    """The struct's attribute."""
    hint: Any
    """Its type."""
    default: Any
    """Its default; msgspec.NODEFAULT for a required key."""
    info: KeyInfo
    section: type[Section] | None
    """The struct of a nested section, or of the entries of a container of sections."""
    container: str
    """"" for a plain key or section, "dict" for sections by name, "list" for a list of sections."""


@cache
def fields_of(cls: type[Section]) -> dict[str, SectionField]:
    """The keys of a section by their JSON names, in the order of the struct."""
    fields = {}
    for field in msgspec.structs.fields(cls):
        info = info_of(field.type)
        if info is None:
            raise TypeError(f"{cls.__name__}.{field.name} has no acts(), inherent(), asks() or tunes()")
        section, container = _section_of(field.type)
        fields[field.encode_name] = SectionField(
            field.encode_name, field.name, field.type, field.default, info, section, container
        )
    return fields


def arms(hint: Any) -> tuple:
    """The members of a union, or the type itself. The outermost annotation is dropped only if the type is a union."""
    base = hint
    while typing.get_origin(base) is Annotated:
        base = base.__origin__
    if typing.get_origin(base) in (typing.Union, types.UnionType):
        return typing.get_args(base)
    return (hint,)


def bare(hint: Any) -> Any:
    """The type without its annotations."""
    while typing.get_origin(hint) is Annotated:
        hint = hint.__origin__
    return hint


def info_of(hint: Any) -> KeyInfo | None:
    """The facts about a key, which its annotation has; None for another type."""
    for meta in getattr(hint, "__metadata__", ()):
        if isinstance(meta, msgspec.Meta) and meta.extra and "key" in meta.extra:
            return meta.extra["key"]
    return None


def _section_of(hint: Any) -> tuple[type[Section] | None, str]:
    for arm in arms(hint):
        arm = bare(arm)
        if isinstance(arm, type) and issubclass(arm, Section):
            return arm, ""
        origin, args = typing.get_origin(arm), typing.get_args(arm)
        if origin in (dict, tuple) and args:
            entry = bare(args[1] if origin is dict else args[0])
            if isinstance(entry, type) and issubclass(entry, Section):
                return entry, "dict" if origin is dict else "list"
    return None, ""


def kinds_of(cls: type[Section] | None) -> dict[str, Kind] | None:
    """The table of types of a section whose params depend on its type; None for other sections."""
    return getattr(cls, "kinds", None)


def walk(cls: type[Section] = Root, prefix: str = "") -> Iterator[tuple[str, SectionField]]:
    """Every key with its path, sections before their keys.

    Entries of a container are written ``<name>`` (by name) or ``[]`` (in a list). The params of optimizers and
    schedules are yielded once for each type that has them.
    """
    for field in fields_of(cls).values():
        path = prefix + field.name
        yield path, field
        if field.section is not None:
            yield from walk(field.section, path + {"": ".", "dict": ".<name>.", "list": "[]."}[field.container])
        elif field.name == "params" and kinds_of(cls) is not None:
            for params in dict.fromkeys(kind.params for kind in kinds_of(cls).values() if kind.params is not None):
                yield from walk(params, path + ".")


def find(path: str) -> SectionField | None:
    """The key at a path as ``walk`` writes it. The entry of a container may also be written with a real name or
    index."""
    cls: type[Section] | None = Root
    field: SectionField | None = None
    parts = path.replace("[", ".[").split(".")
    i = 0
    while i < len(parts):
        if cls is None:
            return None
        field = fields_of(cls).get(parts[i])
        if field is None:
            return None
        i += 1
        if field.container:
            i += 1  # the entry's name or index
        if field.section is None and field.name == "params" and kinds_of(cls) is not None and i < len(parts):
            if i + 1 != len(parts):
                return None
            tables = (kind.params for kind in kinds_of(cls).values() if kind.params is not None)
            return next((fields_of(table)[parts[i]] for table in tables if parts[i] in fields_of(table)), None)
        cls = field.section
    return field
