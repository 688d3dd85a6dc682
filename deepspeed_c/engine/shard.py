"""Puts the ZeRO parts together for one model and base optimizer: layout, gradient reducer, sharded optimizer."""

from __future__ import annotations

import logging

import torch

from deepspeed_c import _C
from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config import Config
from deepspeed_c.engine.precision import Precision
from deepspeed_c.logging import log_dist
from deepspeed_c.offload.place import make_store, place, store_weights
from deepspeed_c.zero.layout import Layout, lay_out, mark_leaves
from deepspeed_c.zero.optimizer import ZeroOptimizer, send_masters
from deepspeed_c.zero.reducer import GradientReducer, ReduceSettings
from deepspeed_c.zero.stages import STAGES

__all__ = ["lay_out_untrained", "shard_model"]


def lay_out_untrained(model: torch.nn.Module, config: Config, precision: Precision, comm: Collectives) -> Layout:
    """As ``shard_model``, of a model that is only evaluated (stage 3)."""
    return _lay_out(model, None, config, precision, comm)


def _lay_out(
    model: torch.nn.Module,
    base: torch.optim.Optimizer | None,
    config: Config,
    precision: Precision,
    comm: Collectives,
) -> Layout:
    if STAGES[config.zero.stage].parameters:
        mark_leaves(model, config)
    groups = [] if base is None else [group["params"] for group in base.param_groups]
    device = torch.device(get_accelerator().current_device_name())
    layout = lay_out(model, groups, config, precision, comm, place(config, base, device), device)
    if layout.fetcher is not None:
        store_weights(config, layout.fetcher, comm)
    return layout


def _leave_cores(part: float) -> None:
    """Updates take ``part`` of this rank's processors: backward, beside which they run, has the others. To be said before states are made, which are
    first touched by the threads that will update them."""
    _C.pool_resize(0)
    _C.pool_resize(max(1, int(_C.pool_n_threads() * part)))


def shard_model(
    model: torch.nn.Module, base: torch.optim.Optimizer, config: Config, precision: Precision, comm: Collectives
) -> tuple[ZeroOptimizer, Layout]:
    """Lays the model out in units, hooks the trained parameters' gradients, and points the optimizer at this rank's shards."""
    sharding = STAGES[config.zero.stage]
    if config.zero.offload_optimizer.super_offload:
        _leave_cores(config.zero.offload_optimizer.cpuadam_cores_perc)
    layout = _lay_out(model, base, config, precision, comm)
    if config.zero.offload_optimizer.super_offload and all(unit.master_is_param for unit in layout.trained):
        log_dist(
            "super_offload has nothing to do here: masters are the weights themselves, which backward reads",
            ranks=[0],
            level=logging.WARNING,
        )
    store = make_store(config, layout.trained, base, comm)
    if store is not None:
        # Before there are buffers for gradients: both need not have room at once.
        send_masters(layout.trained, store)
        get_accelerator().empty_cache()
    if any(unit.placement.states for unit in layout.trained):
        # Gradients go to the host's memory as they come; sums of whole ones would lie on the device.
        sharding = STAGES[max(config.zero.stage, 2)]
    reducer = GradientReducer(
        layout.trained,
        sharding,
        comm,
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
    )
    if layout.fetcher is not None and layout.fetcher.groups:
        reducer.connect(layout.fetcher)
    optimizer = ZeroOptimizer(
        base,
        layout.trained,
        reducer,
        comm,
        clip=config.gradient_clipping,
        checks_overflow=precision.checks_overflow,
        scaler=precision.scaler,
        uses_all_gather=config.zero.allgather_partitions and not config.disable_allgather,
        allow_untested=config.zero_allow_untested_optimizer,
        ignores_unused=config.zero.ignore_unused_parameters,
        fetcher=layout.fetcher,
        store=store,
        reads_ahead=config.zero.offload_optimizer.pipeline_read,
        steps_ahead=config.zero.offload_optimizer.super_offload,
    )
    return optimizer, layout
