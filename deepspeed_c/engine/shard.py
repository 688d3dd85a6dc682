"""Puts the ZeRO parts together for one model and base optimizer: layout, gradient reducer, sharded optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from deepspeed_c import threads
from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.config import Config
from deepspeed_c.config.offload import OffloadOptimizer
from deepspeed_c.engine.precision import Precision
from deepspeed_c.errors import ConfigError
from deepspeed_c.logging import log_dist
from deepspeed_c.offload.place import place, store_states, store_weights
from deepspeed_c.zero.gradients.bucket import GradientPools
from deepspeed_c.zero.gradients.reducer import GradientReducer
from deepspeed_c.zero.gradients.summing import ReduceSettings
from deepspeed_c.zero.layout.layout import Layout, lay_out, mark_leaves
from deepspeed_c.zero.layout.unit import UnitPlan
from deepspeed_c.zero.states.kinds import kind_of
from deepspeed_c.zero.states.optimizer import StepOptions, ZeroOptimizer

__all__ = ["lay_out_model", "make_reducer", "shard_model", "take_cores_back"]

Check = Callable[[Sequence[UnitPlan]], None]


def lay_out_model(
    model: torch.nn.Module,
    base: torch.optim.Optimizer | None,
    config: Config,
    precision: Precision,
    mesh: Mesh,
    check: Check = lambda plans: None,
) -> Layout:
    """Lays the model out in units, and puts their states and weights where the configuration says. ``base``: the
    optimizer that trains the model; None if it is only evaluated (stage 3). ``check``: see ``lay_out``."""
    if config.zero.sharding.parameters:
        mark_leaves(model, config.zero)
    groups = [] if base is None else [group["params"] for group in base.param_groups]
    device = torch.device(get_accelerator().current_device_name())
    placement = place(config.zero, base, device, forces_own=config.forces_own_optimizer)
    layout = lay_out(
        model,
        groups,
        config.zero,
        precision,
        mesh,
        placement,
        device,
        is_chosen=config.is_chosen,
        joins=config.comm.zero_copy_gather,
        broadcasts=config.disable_allgather,
        check=check,
    )
    if layout.fetcher is not None:
        store_weights(config.zero.offload_param, config.aio, layout.fetcher, mesh.comm)
    return layout


def take_cores_back(offload: OffloadOptimizer) -> None:
    """Called when an engine ends: passes over host memory run on all of this rank's processors again."""
    if offload.super_offload:
        threads.take_back(offload.cpuadam_cores_perc)


def shard_model(
    model: torch.nn.Module,
    base: torch.optim.Optimizer,
    config: Config,
    precision: Precision,
    mesh: Mesh,
    optimizer: ZeroOptimizer | None = None,
    *,
    check: Check = lambda plans: None,
) -> tuple[ZeroOptimizer, Layout]:
    """Lays the model out in units, puts hooks on the trained parameters for their gradients, and points the optimizer
    to this rank's shards.

    ``optimizer``: the present optimizer over ``base``, which takes over the new units; None: make one. ``check``: see
    ``lay_out``."""
    offload = config.zero.offload_optimizer
    with ExitStack() as on_error:
        if offload.super_offload:
            threads.leave(offload.cpuadam_cores_perc)
            on_error.callback(take_cores_back, offload)
        layout = lay_out_model(model, base, config, precision, mesh, check)
        if offload.super_offload and not any(unit.steps_ahead for unit in layout.trained):
            log_dist(
                "super_offload has nothing to do here: masters lie on the device or are the weights that backward reads",
                ranks=[0],
                level=logging.WARNING,
            )
        # Masters move to their file before buffers for gradients are made, so that memory need not hold both at once.
        if store_states(offload, config.aio, layout.trained, base, mesh.comm):
            get_accelerator().empty_cache()
        reducer = make_reducer(layout, config, precision, mesh)
        if optimizer is None:
            gathers_fp32 = config.bf16.enabled and config.data_types.grad_accum_dtype == "fp32"
            is_16bit = config.fp16.enabled or config.bf16.enabled
            kind = kind_of(config.zero, base, layout.trained, is_16bit=is_16bit, gathers_fp32=gathers_fp32)
            optimizer = kind(
                base,
                layout.trained,
                reducer,
                mesh.comm,
                StepOptions(
                    clip=config.gradient_clipping,
                    checks_overflow=precision.checks_overflow,
                    uses_all_gather=config.zero.allgather_partitions and not config.disable_allgather,
                    allow_untested=config.zero_allow_untested_optimizer,
                    ignores_unused=config.zero.ignore_unused_parameters,
                    section=config.zero,
                    steps_ahead=offload.super_offload,
                ),
                scaler=precision.scaler,
                fetcher=layout.fetcher,
            )
        else:
            optimizer.lay_out(layout.trained, reducer, layout.fetcher)
        on_error.pop_all()
    return optimizer, layout


def _n_grains(n_samples: int | None, grain: int | None) -> int:
    """Grains of a step, over all ranks. The planner has a configuration whose batch is not resolved."""
    if n_samples is None or grain is None:
        raise ConfigError(
            "the number of grains in a step is not known, and the memory of same_bits depends on it",
            where="train_batch_size, same_bits.grain",
            fix="write both as numbers",
        )
    return n_samples // grain


def make_reducer(
    layout: Layout, config: Config, precision: Precision, mesh: Mesh, pools: GradientPools | None = None
) -> GradientReducer:
    """Puts hooks on the trained parameters for their gradients, and makes the buffers for the sums of gradients."""
    sharding = config.zero.sharding
    if config.same_bits.enabled or any(unit.states.is_apart for unit in layout.trained):
        # With same_bits every pass is added to the tree of its window when it ends. With states in the host's memory
        # gradients move there as they arrive: without sharding their sums would stay on the device.
        sharding = config.zero.sharding._replace(optimizer=True, gradients=True)
    n_grains = None
    if config.same_bits.enabled:
        n_grains = _n_grains(config.train_batch_size, config.train_micro_batch_size_per_gpu)
    has_fp32_sums = config.same_bits.enabled or config.zero.offload_optimizer.device != "none"
    reducer = GradientReducer(
        layout.trained,
        sharding,
        mesh,
        ReduceSettings(
            overlap_comm=bool(config.zero.overlap_comm),
            reduce_scatter=config.zero.reduce_scatter,
            prescale_gradients=config.prescale_gradients,
            gradient_predivide_factor=config.gradient_predivide_factor,
            is_mean=config.gradient_allreduce_op == "mean",
            # Host memory has room for accumulation in fp32.
            accum_dtype=precision.accum_dtype or (torch.float32 if has_fp32_sums else None),
            n_grains=n_grains,
        ),
        pools,
    )
    if layout.fetcher is not None and layout.fetcher.groups:
        reducer.connect(layout.fetcher)
    return reducer
