"""Make an engine from a model and a configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

import torch

from deepspeed_c import lr_schedules
from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.comm import init_distributed, is_initialized
from deepspeed_c.comm.axes import DATA, SP, TOKENS, TP, WITHIN_STAGE
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.comm import configure
from deepspeed_c.comm.mesh import Mesh, mesh_of_device_mesh, mesh_of_mpu, mesh_of_pair
from deepspeed_c.comm.watchdog import watch
from deepspeed_c.compression.model import check_compression
from deepspeed_c.config import ReadConfig, read_config
from deepspeed_c.config.offload import OffloadParam
from deepspeed_c.config.optim import OptimizerSection
from deepspeed_c.config.parallel import HybridEngine, TensorParallel
from deepspeed_c.config.schedule import Scheduler
from deepspeed_c.config.source import GivenConfig, source_of_engine
from deepspeed_c.config.zero import Zero
from deepspeed_c.data.loader import DeepSpeedDataLoader
from deepspeed_c.engine.build import OptimizerFactory, build_optimizer
from deepspeed_c.engine.consistency import broadcast_model, check_same_model, check_same_text
from deepspeed_c.engine.edits import EditContext, Edits, need_of_plain_weights
from deepspeed_c.engine.engine import DeepSpeedEngine
from deepspeed_c.engine.host import take_from_others
from deepspeed_c.engine.hybrid import DeepSpeedHybridEngine
from deepspeed_c.engine.packed_models import dequantize_packed
from deepspeed_c.engine.pipeline import PipelineEngine, check_pipeline, connect_pipeline
from deepspeed_c.engine.precision import Precision, dtype_of_weights
from deepspeed_c.engine.python_gc import CollectorPause
from deepspeed_c.engine.same_bits import OptimizerCheck, check_alignment, refuse_what_depends_on_ranks
from deepspeed_c.engine.shard import lay_out_model, shard_model
from deepspeed_c.engine.training import Training, TrainingHost
from deepspeed_c.errors import CommError, ConfigError, FeatureError, ModelError, OptimizerError
from deepspeed_c.logging import log_dist, set_level
from deepspeed_c.moe.connect import connect_experts
from deepspeed_c.moe.spread import spread_experts
from deepspeed_c.pipe import PipelineModule
from deepspeed_c.pipe.units import check_units
from deepspeed_c.utils import groups
from deepspeed_c.zero.layout.layout import Layout, gather_for_good, mesh_of_config
from deepspeed_c.zero.layout.unit import UnitPlan
from deepspeed_c.zero.states.optimizer import DeepSpeedOptimizer
from deepspeed_c.zero.weights.code_layers import check_layers
from deepspeed_c.zero.weights.init import Init, materialize, store_whole
from deepspeed_c.zero.weights.param import whole_of
from deepspeed_c.zero.weights.wrappers import check_wrappers

__all__ = ["initialize"]


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | OptimizerFactory | None = None,
    model_parameters: Any = None,
    training_data: torch.utils.data.Dataset | None = None,
    lr_scheduler: Any | Callable[[torch.optim.Optimizer], Any] | None = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable | None = None,
    config: str | dict[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | dict[str, Any] | None = None,
    mesh_device: Any = None,
) -> tuple[DeepSpeedEngine, DeepSpeedOptimizer | torch.optim.Optimizer | None, DeepSpeedDataLoader | None, Any]:
    """Builds an engine around ``model``.

    Args:
        args: an object that may hold ``deepspeed_config``, the path of the configuration.
        model: the module to train. It is moved to this rank's device, and its trainable parameters are moved into flat
            buffers.
        optimizer: a ``torch.optim.Optimizer`` over the model's parameters, or a function that makes an optimizer from a
            list of parameters, or of groups if ``model_parameters`` has groups; default: the optimizer of the
            configuration's section ``optimizer``. Without any optimizer the engine only evaluates.
        model_parameters: parameters, or groups of them, to train; default: all that require gradients. A
            ``torch.optim.Optimizer`` has its own groups, which act: a warning says where these differ.
        training_data: a dataset. The third returned value is then a loader of this rank's micro-batches.
        lr_scheduler: an object with ``step()``, or a function that makes such an object from the optimizer; default:
            the schedule of the section ``scheduler``.
        distributed_port: port of rank 0, used if ``torch.distributed`` has to be started and the environment names no
            port.
        mpu: an object with ``get_data_parallel_group()``; the ranks of this group hold copies of the model. For tensor
            parallelism the object also has Megatron's methods (``get_tensor_model_parallel_rank()``, ...). The model's
            layers must then be cut by hand, and their parameters must have Megatron's attributes
            (docs/concepts/zero.md). For sequence parallelism the object has ``get_sequence_parallel_world_size()`` and
            related methods, like the result of ``UlyssesSPAttentionHF.register_with_transformers``; they give the ranks
            that hold parts of one sequence (docs/concepts/sequence.md).
        dist_init_required: False: ``torch.distributed`` is initialised already. Default: initialise it if necessary.
        collate_fn: merges samples to a batch.
        config, config_params: path of a JSON file, or a dict; see docs/config.md. Never modified. Of several
            configurations, ``args.deepspeed_config`` included, all must be equal.
        mesh_param: (number of data-parallel ranks, number of sequence-parallel ranks), DeepSpeed's form of a mesh.
        mesh_device: a ``torch.distributed.device_mesh.DeviceMesh`` whose dimensions are named for axes: "dp_shard" for
            the ranks that share model states, "dp_replicate" for the ranks that hold copies of the same shards
            (``comm/axes.py`` has the other names).

    Returns:
        (engine, optimizer, training_dataloader, lr_scheduler); the last three are None unless requested. The returned
        optimizer works on shards, and its attribute ``optimizer`` is the given or configured optimizer. At stage 0 in
        fp32 the given optimizer itself is returned.

    Raises:
        ConfigError, BatchSizeError: the configuration is wrong. ModelError, OptimizerError: the model or the optimizer
            is unsuitable.
        CheckpointError, StateError: the folder of ``checkpoint.auto_resume`` holds only damaged checkpoints, or
            checkpoints of another model. ElasticityConfigError: its newest one is of a run with another section
            ``elasticity``.
        RankMismatchError: ranks were given different models or configurations. CommError: communication could not be
        set up.
    """
    if not isinstance(model, torch.nn.Module):
        raise ModelError(
            f"model must be a torch.nn.Module, not {type(model).__name__}",
            where="initialize(model=...)",
            fix="pass the model",
        )
    source = _config_source(args, config, config_params)
    read = read_config(source)
    if dist_init_required is not False and not is_initialized():
        init_distributed(distributed_port=distributed_port)
    pipeline = model if isinstance(model, PipelineModule) else None
    mesh = _make_mesh(pipeline, mpu, mesh_param, mesh_device)
    comm = mesh.comm
    mesh = _cut_for_sequences(_cut_for_tensors(mesh, read), read)
    settings = read.resolve(world_size=mesh.size(*DATA))
    if pipeline is not None:
        check_pipeline(pipeline, settings.pipeline, settings.zero)
        pipeline.lie_on(mesh)
    engine_class = _engine_class(settings.hybrid_engine, is_pipeline=pipeline is not None)
    _check_data_parallel_size(settings.data_parallel_size, mesh)
    mesh = mesh_of_config(settings.zero, mesh)
    mesh.place_experts(data_first=settings.use_data_before_expert_parallelism)
    groups.set_mesh(mesh)
    set_level(settings.log_level)
    watch(comm, settings.collective_timeout_s)
    log_dist(settings.summary_line(_idle_sections(settings.optimizer, optimizer, lr_scheduler, pipeline)), ranks=[0])
    for note in settings.notes:
        log_dist(note, ranks=[0])
    if "comms_logger" in settings.as_dict():  # without this section the log keeps the settings of `comm.configure`
        configure(deepspeed_config=settings)

    check_layers(model, is_cut=_is_cut(settings.tensor_parallel, settings.hybrid_engine))
    check_same_text("the configuration", settings.lines(), comm, "start all ranks with the same configuration file")
    optimizer_check = None
    if settings.same_bits.enabled:
        refuse_what_depends_on_ranks(model, mesh, settings.compile, settings.expert_parallel)
        optimizer_check = OptimizerCheck(
            model, settings.fp16, settings.bf16, allows_untested=settings.zero_allow_untested_optimizer
        )
        optimizer_check.check_given(optimizer, settings.optimizer, comm)
    comm.use_shared_memory(settings.comm.local)
    others_train = pipeline is not None and connect_pipeline(pipeline, mesh)
    dequantize_packed(model)
    check_same_model(model, mesh.stage)
    device = torch.device(get_accelerator().current_device_name())
    spread_experts(model, settings.expert_parallel, mesh, device)
    connect_experts(model, mesh, seeds_differ=settings.same_bits.enabled)
    take_from_others(model)
    autocast = settings.torch_autocast
    check_wrappers(
        model,
        dtype_of_weights(settings.fp16, settings.bf16),
        scales_loss=settings.fp16.enabled or (autocast.enabled and autocast.dtype == "fp16"),
        why_plain=need_of_plain_weights(mesh, settings.tensor_parallel, settings.hybrid_engine),
    )
    sharding = settings.zero.sharding
    is_meta = any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    if pipeline is not None:  # the layers of other stages may be on other devices
        is_meta = any(comm.gather_numbers(int(is_meta), label="parameters on the meta device"))
    if is_meta and sharding.parameters:  # shard by shard
        _fill_shards(model, mesh, source)
    elif is_meta:
        materialize(model, device)
    if not sharding.parameters:
        gather_for_good(model)
    _bring_model(model, device, settings.zero.offload_param)
    check_compression(model, settings.compression_training, settings.tensor_parallel)
    edits = Edits(model)
    with ExitStack() as undo:
        undo.callback(edits.close)
        edits.make(EditContext(settings, mesh))
        broadcast_model(model, mesh, device)

        precision = Precision(settings, model, mesh.size(SP))
        base = build_optimizer(
            settings.optimizer, settings.bf16, model, optimizer, model_parameters, may_be_empty=others_train
        )
        if optimizer_check is not None and base is not None:
            optimizer_check.check(base)
        zero_optimizer, layout = None, Layout([], [], None)
        check = _check_of(pipeline, settings.zero, comm)
        if base is not None:
            zero_optimizer, layout = shard_model(model, base, settings, precision, mesh, check=check)
        elif sharding.parameters:
            layout = lay_out_model(model, None, settings, precision, mesh, check)
        placed = {id(slot.param) for unit in (*layout.trained, *layout.frozen) for slot in unit.slots}
        model.to(device)  # parameters and buffers outside units
        precision.cast_frozen(model, placed)
        if settings.same_bits.enabled:
            check_alignment(model, comm)
        # The original weights have been freed. The allocator may keep their memory until its cache is emptied.
        get_accelerator().empty_cache()

        scheduler = _build_scheduler(settings.scheduler, lr_scheduler, base)
        pause = undo.enter_context(closing(CollectorPause())) if settings.disable_python_gc else None
        engine = engine_class(
            model,
            settings,
            mesh,
            precision,
            device,
            edits,
            layout,
            Training(zero_optimizer, scheduler, training_data, collate_fn, mpu, mesh_device, pause),
        )
        undo.pop_all()
    with ExitStack() as undo:
        undo.callback(engine.close)
        engine.auto_resume()
        undo.pop_all()
    face = None if zero_optimizer is None else zero_optimizer.face
    return engine, face, engine.training_dataloader, scheduler


def _check_of(pipeline: PipelineModule | None, zero: Zero, comm: Collectives) -> Callable[[Sequence[UnitPlan]], None]:
    """The check of planned units. Ranks without a parameter to train have units of other kinds, and take part."""
    if pipeline is None or not zero.sharding.parameters:
        return lambda plans: None
    return lambda plans: check_units(plans, zero.stage3_max_live_parameters, comm)


def _fill_shards(model: torch.nn.Module, mesh: Mesh, source: GivenConfig) -> None:
    """Gives values to a model on the meta device, and leaves each rank its shards alone. Ranks with the same weights
    get the same values. Collective."""
    is_cut = any(map(_is_part, model.parameters()))
    if isinstance(model, PipelineModule):  # layers of other stages may be cut
        is_cut = any(mesh.comm.gather_numbers(int(is_cut), label="cut parameters"))
    # Tensor-parallel ranks have the same weights until the engine cuts them, but not if the program has cut the layers.
    group = mesh.process_group(*(TOKENS if is_cut else WITHIN_STAGE))
    Init(module=model, config_dict_or_path=source, data_parallel_group=group)
    for name, param in model.named_parameters() if is_cut and mesh.size(TP) > 1 else ():
        if not _is_part(param):
            whole = whole_of(param)
            mesh.tensors.broadcast(whole, 0, label=name)
            store_whole(param, whole)
    if isinstance(model, PipelineModule):
        model.share_tied(mesh)


def _is_part(param: torch.nn.Parameter) -> bool:
    """Whether the program has cut ``param`` over tensor-parallel ranks."""
    return bool(getattr(param, "tensor_model_parallel", False))


def _is_cut(tensors: TensorParallel, hybrid: HybridEngine) -> bool:
    """Whether the configuration cuts the model over tensor-parallel ranks, or a copy of it."""
    of_copy = hybrid.inference_tp_size if hybrid.enabled else 1
    return max(tensors.autotp_size, tensors.tp.tp_size, of_copy) > 1


def _engine_class(section: HybridEngine, *, is_pipeline: bool) -> type[TrainingHost]:
    """Raises FeatureError for a pipeline that is to generate."""
    if not section.enabled:
        return PipelineEngine if is_pipeline else DeepSpeedEngine
    if is_pipeline:
        raise FeatureError(
            "a PipelineModule does not generate",
            where="hybrid_engine.enabled",
            fix='set "enabled": false, or train the layers as a plain module, without a PipelineModule',
        )
    return DeepSpeedHybridEngine


def _config_source(args: Any, config: Any, config_params: Any) -> GivenConfig:
    source = source_of_engine({"config": config, "config_params": config_params, "args": args})
    if source is None:
        raise ConfigError(
            "no configuration was given",
            where="initialize",
            fix="pass config=... (a path or a dict), or args with --deepspeed_config FILE",
        )
    return source


def _make_mesh(pipeline: PipelineModule | None, mpu: Any, mesh_param: Any, mesh_device: Any) -> Mesh:
    """The mesh of data-parallel ranks, from the argument that gives them; by default all ranks.

    Raises ConfigError if several arguments give them."""
    given = [
        name
        for name, value in (("mpu", mpu), ("mesh_param", mesh_param), ("mesh_device", mesh_device))
        if value is not None
    ]
    if len(given) > 1:
        raise ConfigError(
            f"{' and '.join(given)} both say which ranks work together", where="initialize", fix="pass one of them"
        )
    if pipeline is not None:
        if given:
            raise ConfigError(
                "a PipelineModule has its ranks from its own topology",
                where=f"initialize({given[0]}=...)",
                fix=f"leave {given[0]} out; give PipelineModule num_stages=... or topology=...",
            )
        return pipeline.mesh
    if mpu is not None:
        return mesh_of_mpu(mpu)
    if mesh_device is not None:
        return mesh_of_device_mesh(mesh_device)
    return Mesh(Collectives()) if mesh_param is None else mesh_of_pair(mesh_param)


def _cut_for_tensors(mesh: Mesh, config: ReadConfig) -> Mesh:
    """The mesh, divided into tensor-parallel groups if the configuration requests them.

    Raises ConfigError where the ranks cannot be divided so, or have been divided otherwise."""
    wanted, key = config.tensor_parallel_size
    if wanted in (1, mesh.size(TP)):
        return mesh
    try:
        return mesh.split_tensors(wanted)
    except CommError as error:
        raise ConfigError(error.what, where=key, fix=error.fix) from error


def _cut_for_sequences(mesh: Mesh, config: ReadConfig) -> Mesh:
    """The mesh, divided into sequence-parallel groups if the configuration requests them.

    Raises ConfigError where the ranks cannot be divided so, or have been divided otherwise."""
    wanted = config.sequence_parallel_size
    if wanted in (1, mesh.size(SP)):
        return mesh
    try:
        return mesh.split_sequences(wanted)
    except CommError as error:
        raise ConfigError(error.what, where="sequence_parallel_size", fix=error.fix) from error


def _check_data_parallel_size(size: int | None, mesh: Mesh) -> None:
    if size not in (None, mesh.size(*DATA)):
        raise ConfigError(
            f"{size} data-parallel times {mesh.size(SP)} sequence-parallel ranks are not the"
            f" {mesh.size(*TOKENS)} that see different tokens",
            where="data_parallel_size",
            fix=f"set it to {mesh.size(*DATA)}, or leave it out: it follows from the other",
        )


def _bring_model(model: torch.nn.Module, device: torch.device, offload: OffloadParam) -> None:
    """Moves a model to the device. If weights are offloaded, moves only the buffers, because the whole model may not
    fit on the device.
    """
    if offload.device == "none":
        model.to(device)
        return
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _idle_sections(
    section: OptimizerSection | None, optimizer: Any, lr_scheduler: Any, pipeline: PipelineModule | None
) -> dict[str, str]:
    """Sections without an effect beside these arguments, each with the reason."""
    idle = {}
    if optimizer is not None:
        idle["optimizer"] = "initialize(optimizer=...) acts in its place"
    if lr_scheduler is not None:
        idle["scheduler"] = "initialize(lr_scheduler=...) acts in its place"
    elif optimizer is None and section is None:
        idle["scheduler"] = "there is no optimizer"
    if pipeline is None:
        idle["pipeline"] = "the model is no PipelineModule"
    return idle


def _build_scheduler(section: Scheduler | None, client: Any, base: torch.optim.Optimizer | None) -> Any:
    if callable(client) and base is None:
        raise OptimizerError(
            "there is no optimizer whose learning rate it could set",
            where="initialize(lr_scheduler=...)",
            fix='pass optimizer=..., add a section "optimizer" to the configuration, or leave lr_scheduler out',
        )
    if client is not None:
        return client(base) if callable(client) else client
    if section is None or base is None:
        return None
    return lr_schedules.build_scheduler(section.type, section.params, base)
