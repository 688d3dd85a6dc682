"""Puts the ZeRO parts together for one model and base optimizer: layout, gradient reducer, sharded optimizer."""

from __future__ import annotations

import logging

import torch

from deepspeed_c import threads
from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.config import Config
from deepspeed_c.engine.precision import Precision
from deepspeed_c.logging import log_dist
from deepspeed_c.offload.place import place, store_states, store_weights
from deepspeed_c.zero.gradients.reducer import GradientPools, GradientReducer, ReduceSettings
from deepspeed_c.zero.layout.layout import Layout, lay_out, mark_leaves
from deepspeed_c.zero.layout.stages import STAGES
from deepspeed_c.zero.states.kinds import kind_of
from deepspeed_c.zero.states.optimizer import ZeroOptimizer

__all__ = ["lay_out_untrained", "make_reducer", "shard_model", "take_cores_back"]


def lay_out_untrained(model: torch.nn.Module, config: Config, precision: Precision, mesh: Mesh) -> Layout:
    """As ``shard_model``, of a model that is only evaluated (stage 3)."""
    return _lay_out(model, None, config, precision, mesh)


def _lay_out(
    model: torch.nn.Module,
    base: torch.optim.Optimizer | None,
    config: Config,
    precision: Precision,
    mesh: Mesh,
) -> Layout:
    if STAGES[config.zero.stage].parameters:
        mark_leaves(model, config)
    groups = [] if base is None else [group["params"] for group in base.param_groups]
    device = torch.device(get_accelerator().current_device_name())
    layout = lay_out(model, groups, config, precision, mesh, place(config, base, device), device)
    if layout.fetcher is not None:
        store_weights(config, layout.fetcher, mesh.comm)
    return layout


def take_cores_back(config: Config) -> None:
    """When an engine ends: passes over host memory run on all of this rank's processors again."""
    if config.zero.offload_optimizer.super_offload:
        threads.take_back(config.zero.offload_optimizer.cpuadam_cores_perc)


def shard_model(
    model: torch.nn.Module,
    base: torch.optim.Optimizer,
    config: Config,
    precision: Precision,
    mesh: Mesh,
    optimizer: ZeroOptimizer | None = None,
) -> tuple[ZeroOptimizer, Layout]:
    """Lays the model out in units, hooks the trained parameters' gradients, and points the optimizer at this rank's
    shards.

    ``optimizer``: the one that has stood over ``base`` so far, which then goes on over the new units."""
    if config.zero.offload_optimizer.super_offload:
        threads.leave(config.zero.offload_optimizer.cpuadam_cores_perc)
    try:
        return _shard_model(model, base, config, precision, mesh, optimizer)
    except BaseException:
        take_cores_back(config)
        raise


def make_reducer(
    layout: Layout, config: Config, precision: Precision, mesh: Mesh, pools: GradientPools | None = None
) -> GradientReducer:
    """Hooks the trained parameters' gradients, and makes the buffers of their sums."""
    sharding = STAGES[config.zero.stage]
    if any(unit.states.is_apart for unit in layout.trained):
        # Gradients go to the host's memory as they come; sums of whole ones would lie on the device.
        sharding = STAGES[max(config.zero.stage, 2)]
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
            # What gathers in host memory has room there for fp32.
            accum_dtype=precision.accum_dtype
            or (torch.float32 if config.zero.offload_optimizer.device != "none" else None),
        ),
        pools,
    )
    if layout.fetcher is not None and layout.fetcher.groups:
        reducer.connect(layout.fetcher)
    return reducer


def _shard_model(
    model: torch.nn.Module,
    base: torch.optim.Optimizer,
    config: Config,
    precision: Precision,
    mesh: Mesh,
    optimizer: ZeroOptimizer | None,
) -> tuple[ZeroOptimizer, Layout]:
    layout = _lay_out(model, base, config, precision, mesh)
    if config.zero.offload_optimizer.super_offload and not any(unit.steps_ahead for unit in layout.trained):
        log_dist(
            "super_offload has nothing to do here: masters lie on the device or are the weights that backward reads",
            ranks=[0],
            level=logging.WARNING,
        )
    # Before there are buffers for gradients: both need not have room at once.
    if store_states(config, layout.trained, base, mesh.comm):
        get_accelerator().empty_cache()
    reducer = make_reducer(layout, config, precision, mesh)
    if optimizer is not None:
        optimizer.lay_out(layout.trained, reducer, layout.fetcher)
        return optimizer, layout
    optimizer = kind_of(config, base, layout.trained)(
        base,
        layout.trained,
        reducer,
        mesh.comm,
        clip=config.gradient_clipping,
        checks_overflow=precision.checks_overflow,
        scaler=precision.scaler,
        uses_all_gather=config.zero.allgather_partitions and not config.disable_allgather,
        allow_untested=config.zero_allow_untested_optimizer,
        ignores_unused=config.zero.ignore_unused_parameters,
        fetcher=layout.fetcher,
        steps_ahead=config.zero.offload_optimizer.super_offload,
    )
    return optimizer, layout
