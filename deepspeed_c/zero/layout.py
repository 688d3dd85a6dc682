"""Which parameter lies where: units for what is trained, for what is frozen, and what of them is sharded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config import Config
from deepspeed_c.zero.fetch import Fetcher, FetchLimits
from deepspeed_c.zero.leaf import (
    apply_zero_leaf_module_config,
    find_expert_blocks,
    mark_fine_modules,
    set_z3_leaf_module,
)
from deepspeed_c.zero.sharded import shape_of, state_of, take_over, whole_of
from deepspeed_c.zero.stages import STAGES
from deepspeed_c.zero.unit import ON_DEVICE, SWAP_ELEMS, Dtypes, Placement, Unit, build_units

__all__ = ["Layout", "bucket_elems", "gather_for_good", "lay_out", "mark_leaves", "persistent_params"]

# Unless the user sizes the buckets, a model fills at least this many: what is reduced while backward runs is all but the last one,
# and stages 2 and 3 hold one or two of them beside their shard. Smaller ones than the floor cost more in latency than they hide.
DEFAULT_BUCKETS = 16
DEFAULT_BUCKET_FLOOR_ELEMS = 1 << 20


class DtypePolicy(Protocol):
    """What the layout asks of the engine's precision policy."""

    def dtypes_of(self, name: str, param: torch.nn.Parameter) -> Dtypes: ...


class Layout(NamedTuple):
    """The units of one engine. ``fetcher`` is None below stage 3."""

    trained: list[Unit]
    frozen: list[Unit]
    fetcher: Fetcher | None
    groups: Sequence[Sequence[str]] = ()
    """Names of the parameters of each optimizer group, in the optimizer's order."""


def mark_leaves(model: torch.nn.Module, config: Config) -> None:
    """Marks the modules that the configuration, their size, or their experts make leaves."""
    apply_zero_leaf_module_config(model, config.zero.leaf_module)
    if config.zero.stage3_module_granularity_threshold > 0:
        mark_fine_modules(model, config.zero.stage3_module_granularity_threshold)
    for module in find_expert_blocks(model):
        set_z3_leaf_module(module)


def gather_for_good(model: torch.nn.Module) -> None:
    """Makes every parameter of a model that was built under ``zero.Init`` an ordinary one: stages that keep weights whole. Collective."""
    for param in model.parameters():
        if state_of(param) is not None:
            take_over(param, whole_of(param))


def persistent_params(params: Iterable[torch.nn.Parameter], config: Config) -> set[int]:
    """Ids of the parameters that stay whole under stage 3: smallest first, each below one threshold, together below the other."""
    zero = config.zero
    chosen: set[int] = set()
    total = 0
    for param in sorted(params, key=lambda p: shape_of(p).numel()):
        numel = shape_of(param).numel()
        if numel and (
            numel >= zero.stage3_param_persistence_threshold or total + numel > zero.stage3_model_persistence_threshold
        ):
            break
        chosen.add(id(param))
        total += numel
    return chosen


def params_that_stay(params: Iterable[torch.nn.Parameter], config: Config) -> set[int]:
    """Ids of the parameters whose states are not offloaded where ``offload_optimizer.ratio`` is less than 1 (Twin-Flow).

    They are spread over the model, so that the device's part of the step runs beside the host's from its beginning to its end.
    """
    chosen: set[int] = set()
    offloaded = total = 0
    for param in params:
        numel = shape_of(param).numel()
        total += numel
        if offloaded + numel <= config.zero.offload_optimizer.ratio * total:
            offloaded += numel
        else:
            chosen.add(id(param))
    return chosen


def bucket_elems(config: Config, n_elems: int) -> int:
    """Most elements of a bucket of a model of ``n_elems``. One list of buckets serves all collectives, so the smallest limit of their keys holds."""
    zero = config.zero
    limit = min(zero.reduce_bucket_size, zero.allgather_bucket_size or zero.reduce_bucket_size)
    if STAGES[zero.stage].parameters:
        limit = min(limit, zero.sub_group_size)
    if config.source_of("zero_optimization.reduce_bucket_size") in ("default", "auto"):
        limit = min(limit, max(n_elems // DEFAULT_BUCKETS, DEFAULT_BUCKET_FLOOR_ELEMS))
        if STAGES[zero.stage].parameters:
            # Two or three of them are live at a time, which must not outgrow a shard of a large model on many ranks.
            limit = min(limit, max(zero.stage3_prefetch_bucket_size, DEFAULT_BUCKET_FLOOR_ELEMS))
    return max(limit, 1)


def _limits(config: Config, elems: int) -> FetchLimits:
    """In elements. Prefetching takes what hides a gather, one bucket, unless the user sizes it."""
    zero = config.zero
    ahead = zero.stage3_prefetch_bucket_size
    if config.source_of("zero_optimization.stage3_prefetch_bucket_size") in ("default", "auto"):
        ahead = min(ahead, elems)
    return FetchLimits(zero.stage3_max_live_parameters, ahead, zero.stage3_max_reuse_distance)


def lay_out(
    model: torch.nn.Module,
    groups: Sequence[Sequence[torch.nn.Parameter]],
    config: Config,
    precision: DtypePolicy,
    comm: Collectives,
    placement: Placement = ON_DEVICE,
    device: torch.device | None = None,
) -> Layout:
    """Makes the units of a model whose optimizer groups are ``groups`` (empty for an engine that only evaluates), and shards what the stage shards.

    ``device``: which computes (default: where each parameter is).
    """
    sharding = STAGES[config.zero.stage]
    names: Mapping[int, tuple[str, int]] = {id(p): (name, i) for i, (name, p) in enumerate(model.named_parameters())}
    names_by_group = [[names[id(p)][0] for p in group] for group in groups]
    trained_ids = {id(p) for group in groups for p in group}
    # What requires a gradient and is in no group is the caller's: its gradients are, too.
    frozen = [p for p in model.parameters() if id(p) not in trained_ids and not (groups and p.requires_grad)]
    n_trained = sum(shape_of(p).numel() for group in groups for p in group)
    # On one rank too where the shard lies elsewhere than the weights that are used.
    shards_params = sharding.parameters and (comm.world_size > 1 or placement.params or placement.swaps_params)
    whole: set[int] = set()
    if shards_params:
        whole = persistent_params([*frozen, *(p for group in groups for p in group)], config)
    size = {"n_shards": comm.world_size, "shard_rank": comm.rank}

    def elems_of(n_elems: int, swaps_states: bool) -> int:
        elems = bucket_elems(config, n_elems)
        if swaps_states:
            elems = min(elems, SWAP_ELEMS * comm.world_size)
        if placement.swaps_params:
            elems = min(elems, max(config.zero.offload_param.buffer_size, 1) * comm.world_size)
        return elems

    staying = params_that_stay((p for p in model.parameters() if id(p) in trained_ids), config)
    on_device = placement._replace(states=False, swaps_states=False)

    def is_sharded(param: torch.nn.Parameter) -> bool:
        return shards_params and id(param) not in whole

    trained_units = build_units(
        groups,
        names,
        **(size if sharding.optimizer else {"n_shards": 1, "shard_rank": 0}),
        bucket_elems=elems_of(n_trained, placement.swaps_states),
        dtypes_of=precision.dtypes_of,
        is_sharded=is_sharded,
        placement_of=lambda param: on_device if id(param) in staying else placement,
        device=device,
    )
    if not sharding.parameters:
        return Layout(trained_units, [], None, names_by_group)

    def frozen_dtypes(name: str, param: torch.nn.Parameter) -> Dtypes:
        dtype = precision.dtypes_of(name, param).param
        return Dtypes(dtype, dtype, None)

    n_frozen = sum(shape_of(p).numel() for p in frozen)
    frozen_units = build_units(
        [frozen] if frozen else [],
        names,
        **size,
        bucket_elems=elems_of(n_frozen, False),
        dtypes_of=frozen_dtypes,
        is_sharded=is_sharded,
        placement_of=lambda param: on_device,
        device=device,
    )
    units = [*trained_units, *frozen_units]
    largest = max((u.bucket_numel(b) for u in units if u.is_sharded for b in range(u.n_buckets)), default=0)
    fetcher = Fetcher(
        [u for u in units if u.is_sharded],
        [u for u in units if not u.is_sharded],
        comm,
        _limits(config, largest),
        use_broadcast=not config.zero.allgather_partitions or config.disable_allgather,
    )
    return Layout(trained_units, frozen_units, fetcher, names_by_group)
