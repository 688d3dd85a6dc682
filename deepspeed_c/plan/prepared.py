"""The inputs of a plan: the resolved configuration, the model as it is cut and spread, its sizes and its optimizer."""

from __future__ import annotations

from contextlib import closing
from typing import Any, NamedTuple

import torch

from deepspeed_c.buffers import BufferPool
from deepspeed_c.config import Config, ReadConfig, read_config
from deepspeed_c.config.parallel import Pipeline
from deepspeed_c.config.source import GivenConfig, read_source
from deepspeed_c.config.zero import Zero
from deepspeed_c.engine.build import build_optimizer
from deepspeed_c.engine.precision import Precision
from deepspeed_c.errors import ConfigError, ModelError
from deepspeed_c.inject import cut_model
from deepspeed_c.moe.spread import plan_spread
from deepspeed_c.offload.place import place
from deepspeed_c.pipe import PipelineModule, TiedLayerSpec
from deepspeed_c.pipe.schedule import Cost, fitting, make_table, traits_of
from deepspeed_c.plan.pretended import PretendedRanks, PretendedSharedMemory, pretended_mesh
from deepspeed_c.plan.sizes import ModelSizes, OptimizerSizes, PipelineSizes, group_sizes, model_of, sizes_of
from deepspeed_c.plan.tiers import NVME_PATH
from deepspeed_c.quantity import count_in_words
from deepspeed_c.zero.layout.layout import mark_leaves

__all__ = ["Prepared", "optimizer_sizes", "pipeline_sizes", "prepare"]

# The assumed optimizer if only sizes are planned and the configuration names no optimizer.
ASSUMED_OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-4}}


class Prepared(NamedTuple):
    """A model and its configuration, ready to be planned."""

    source: GivenConfig
    overrides: dict[str, Any]
    """Keys that a plan sets in ``source``."""
    model: torch.nn.Module
    sizes: ModelSizes
    base: torch.optim.Optimizer | None
    """None for an engine that only evaluates."""
    precision: Precision | None
    """None if sizes were given in place of a model."""
    ranks: PretendedRanks
    """The tensor-parallel ranks."""
    n_ranks: int
    """Data-parallel ranks."""
    n_tensor: int
    nvme_path: str | None
    """As configured."""
    notes: list[str]

    def resolve(self, *, has_batch: bool) -> Config:
        """``source`` with ``overrides``. Without a batch, its keys need not fit the number of ranks. Raises
        ConfigError."""
        read = read_config(self.source, overrides=self.overrides)
        return read.resolve(world_size=self.n_ranks, batch="resolve" if has_batch else "skip")


def prepare(
    source: Any,
    n_ranks: int,
    *,
    sizes: ModelSizes | None = None,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    is_sharded: bool = False,
    n_tensor: int | None = None,
) -> Prepared:
    """Arguments and errors are those of ``plan_table``."""
    notes: list[str] = []
    overrides: dict[str, Any] = {}
    source = read_source(source)
    read = read_config(source)
    if isinstance(model, PipelineModule):
        n_ranks //= model.num_stages
    n_tensor, n_ranks = _tensor_ranks(read, n_tensor, n_ranks, overrides, has_model=model is not None)
    config = read_config(source, overrides=overrides).resolve(world_size=n_ranks, batch="skip")
    if sizes is not None and config.optimizer is None:
        overrides["optimizer"] = ASSUMED_OPTIMIZER
        notes.append(f"the configuration names no optimizer: {ASSUMED_OPTIMIZER['type']} is assumed")
        config = read_config(source, overrides=overrides).resolve(world_size=n_ranks, batch="skip")
    nvme_path = config.zero.offload_optimizer.nvme_path or config.zero.offload_param.nvme_path
    for section in ("offload_optimizer", "offload_param"):
        if getattr(config.zero, section).nvme_path is None:
            overrides[f"zero_optimization.{section}.nvme_path"] = nvme_path or NVME_PATH
    is_given_sizes, precision = model is None, None
    if is_given_sizes:
        model, _ = model_of(sizes)
    ranks = PretendedRanks(n_tensor, BufferPool(), PretendedSharedMemory())
    if config.expert_parallel.enabled:
        if is_given_sizes:
            raise ModelError(
                "sizes alone do not say which of them are experts",
                where="expert_parallel.enabled",
                fix="give a script in place of --params",
            )
        everyone = PretendedRanks(n_ranks * n_tensor, BufferPool(), PretendedSharedMemory())
        data_first = config.use_data_before_expert_parallelism
        with closing(pretended_mesh(everyone, config.zero, n_tensor, data_first=data_first)) as mesh:
            notes.append(str(plan_spread(model, config.expert_parallel, mesh)))
    if n_tensor > 1:
        notes.append(cut_model(model, config.tensor_parallel, ranks).summary)
    is_pipeline = isinstance(model, PipelineModule)
    base = build_optimizer(config.optimizer, config.bf16, model, optimizer, model_parameters, may_be_empty=is_pipeline)
    if not is_given_sizes:
        mark_leaves(model, config.zero)
        precision = Precision(config, model)
        sizes = _sizes_of(model, base, precision, is_sharded)._replace(n_tensor=n_tensor)
        if is_pipeline:
            sizes = sizes._replace(
                pipeline=pipeline_sizes(model, config.pipeline, config.gradient_accumulation_steps or 1)
            )
        if sizes.n_held < sizes.numel:
            notes.append(
                f"a rank holds {count_in_words(sizes.n_held)} of the {count_in_words(sizes.numel)} parameters: experts are spread over"
                f" ranks (ep_size {', '.join(map(str, sorted({p.n_expert_ranks for p in sizes.params} - {1})))})"
            )
    return Prepared(source, overrides, model, sizes, base, precision, ranks, n_ranks, n_tensor, nvme_path, notes)


def optimizer_sizes(
    base: torch.optim.Optimizer | None,
    zero: Zero,
    n_ranks: int,
    device_type: str,
    *,
    forces_own: bool,
    allow_untested: bool,
) -> OptimizerSizes | None:
    """The states of ``base``. None for an engine that only evaluates. forces_own, allow_untested: as configured. Raises
    ConfigError for an impossible offload, and OptimizerError."""
    if base is None:
        return None
    place(zero, base, torch.device(device_type), forces_own=forces_own)
    return group_sizes(base, is_sharded=zero.sharding.optimizer and n_ranks > 1, allow_untested=allow_untested)


def _tensor_ranks(
    config: ReadConfig, wanted: int | None, n_ranks: int, overrides: dict[str, Any], *, has_model: bool
) -> tuple[int, int]:
    """(number of tensor-parallel ranks, number of data-parallel ranks) of ``n_ranks``. The first number is also written
    to ``overrides``."""
    found, key = config.tensor_parallel_size
    n_tensor = found if wanted is None else wanted
    where = key if wanted is None else "--tp"
    if n_tensor < 1 or n_ranks % n_tensor:
        raise ConfigError(
            f"{n_ranks} ranks cannot be cut into groups of {n_tensor}",
            where=where,
            fix="give a number of ranks (--ranks) that is a multiple of it",
        )
    if n_tensor == 1 == found:
        return 1, n_ranks
    if n_tensor > 1 and not has_model:
        raise ModelError(
            f"sizes alone do not say what of a model is cut over {n_tensor} tensor-parallel ranks",
            where=where,
            fix="give a script in place of --params",
        )
    overrides["tensor_parallel.autotp_size"] = n_tensor
    overrides["tensor_parallel.tp.tp_size"] = n_tensor
    return n_tensor, n_ranks // n_tensor


def pipeline_sizes(module: PipelineModule, section: Pipeline, n: int) -> PipelineSizes:
    """A rank's part of a batch of ``n`` micro-batches. The engine of ``module`` would find the same schedule."""
    is_v = traits_of(module.schedule, "PipelineModule").is_v
    costs = [Cost()] * len(module.rank_of)
    name = fitting(section.schedule or module.schedule, module.num_stages, n, costs, None, is_v=is_v)
    table = make_table(name, module.num_stages, module.virtual_stages, n, "pipeline.schedule")
    layers: dict[int, tuple[str, ...]] = {}
    for stage in module.stages:
        specs = enumerate(module.specs[module.parts[stage] : module.parts[stage + 1]], module.parts[stage])
        names = [f"tied_modules.{spec.key}" if isinstance(spec, TiedLayerSpec) else str(i) for i, spec in specs]
        layers[stage] = tuple(name for name in names if _has_weights(module, name))
    return PipelineSizes(tuple(table.actions(module.stage_id)), layers, len(module.rank_of), module.num_stages, n)


def _has_weights(module: PipelineModule, name: str) -> bool:
    """Whether there is a layer of this name with parameters. Functions are layers, too."""
    layer = dict(module.named_modules()).get(name)
    return layer is not None and any(True for _ in layer.parameters())


def _sizes_of(
    model: torch.nn.Module, base: torch.optim.Optimizer | None, precision: Precision, is_sharded: bool
) -> ModelSizes:
    groups = [] if base is None else [group["params"] for group in base.param_groups]
    autocasts = precision.autocast_dtype is not None
    found = sizes_of(model, groups, lambda name, p: precision.dtypes_of(name, p).comm if autocasts else None)
    if not is_sharded:
        return found
    # Under zero.Init parameters are made in the dtype of the configuration.
    params = tuple(
        p._replace(dtype=precision.dtype) if precision.dtype is not None and p.dtype.is_floating_point else p
        for p in found.params
    )
    return found._replace(params=params, is_sharded=True)
