"""The layout of a model: its units of trained parameters and of frozen parameters, and which of their states are
sharded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from deepspeed_c.buffers import BufferPool
from deepspeed_c.comm.axes import DP_SHARD, EP, PP, SHARDS, TOKENS, TP
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.config.zero import Zero
from deepspeed_c.errors import CommError, ConfigError
from deepspeed_c.logging import log_dist
from deepspeed_c.zero.layout.cuts import cut_of, numel_alike, summed_over, tied_over
from deepspeed_c.zero.layout.experts import ExpertNames, expert_ranks_of, holders_of
from deepspeed_c.zero.layout.leaf import (
    apply_zero_leaf_module_config,
    find_expert_blocks,
    mark_fine_modules,
    set_z3_leaf_module,
)
from deepspeed_c.zero.layout.second import second_groups
from deepspeed_c.zero.layout.unit import Dtypes, Unit, UnitGroups, UnitPlan, plan_units
from deepspeed_c.zero.states.home import ON_DEVICE, Placement
from deepspeed_c.zero.weights.drivers.recorded import RecordedPlan
from deepspeed_c.zero.weights.drivers.run import FetchLimits
from deepspeed_c.zero.weights.fetch import Fetcher
from deepspeed_c.zero.weights.param import state_of, take_over, whole_of

__all__ = ["Layout", "bucket_elems", "gather_for_good", "lay_out", "mark_leaves", "mesh_of_config", "persistent_params"]

# Number of buckets that a model fills at least, unless the user sets the size of buckets. All buckets but the last are
# reduced while backward runs. At stages 2 and 3 memory holds one or two buckets in addition to the shard. Buckets
# smaller than the floor cost more latency than overlap hides.
DEFAULT_BUCKETS = 16
DEFAULT_BUCKET_FLOOR_ELEMS = 1 << 20


class DtypePolicy(Protocol):
    """The part of the engine's precision policy that the layout needs."""

    def dtypes_of(self, name: str, param: torch.nn.Parameter) -> Dtypes: ...


class Layout(NamedTuple):
    """The units of one engine. ``fetcher`` is None below stage 3."""

    trained: list[Unit]
    frozen: list[Unit]
    fetcher: Fetcher | None
    groups: Sequence[Sequence[str]] = ()
    """Names of the parameters of each optimizer group, in the optimizer's order."""


def mark_leaves(model: torch.nn.Module, zero: Zero) -> None:
    """Marks modules as leaves: the modules that the configuration lists, modules of many small submodules, and modules
    with a list of experts."""
    apply_zero_leaf_module_config(model, zero.leaf_module)
    if zero.stage3_module_granularity_threshold > 0:
        mark_fine_modules(model, zero.stage3_module_granularity_threshold)
    for module in find_expert_blocks(model):
        set_z3_leaf_module(module)


def gather_for_good(model: torch.nn.Module) -> None:
    """Makes every parameter of a model that was built under ``zero.Init`` an ordinary parameter, for stages that keep
    weights whole. Collective."""
    for param in model.parameters():
        if state_of(param) is not None:
            take_over(param, whole_of(param))


def persistent_params(params: Iterable[torch.nn.Parameter], zero: Zero) -> set[int]:
    """Ids of the parameters that stay whole under stage 3. They are chosen from the smallest on, as long as each is
    below ``stage3_param_persistence_threshold`` and all together are within ``stage3_model_persistence_threshold``."""
    chosen: set[int] = set()
    total = 0
    for param in sorted(params, key=numel_alike):
        numel = numel_alike(param)
        if numel and (
            numel >= zero.stage3_param_persistence_threshold or total + numel > zero.stage3_model_persistence_threshold
        ):
            break
        chosen.add(id(param))
        total += numel
    return chosen


def params_that_stay(params: Iterable[torch.nn.Parameter], ratio: float) -> set[int]:
    """Ids of the parameters whose states stay on the device (Twin-Flow). ``ratio`` (of ``offload_optimizer``) is the
    share of elements whose states are offloaded.

    The parameters are spread over the model, so that the device updates its part during the host's whole part of the
    step.
    """
    chosen: set[int] = set()
    offloaded = total = 0
    for param in params:
        numel = numel_alike(param)
        total += numel
        if offloaded + numel <= ratio * total:
            offloaded += numel
        else:
            chosen.add(id(param))
    return chosen


def mesh_of_config(zero: Zero, mesh: Mesh) -> Mesh:
    """``mesh`` with its data-parallel ranks split as the configuration's ZeRO section says: each group of
    ``mics_shard_size`` neighbours holds one copy of the shards.

    Raises ConfigError if the data-parallel ranks have been split already, or cannot be split into such groups."""
    n_shards = zero.mics_shard_size
    if n_shards < 1 or n_shards == mesh.size(DP_SHARD):
        return mesh
    try:
        return mesh.split_data(n_shards)
    except CommError as error:
        raise ConfigError(error.what, where="zero_optimization.mics_shard_size", fix=error.fix) from error


def bucket_elems(zero: Zero, n_elems: int, *, is_sized: bool) -> int:
    """The most elements that a bucket may have in a model of ``n_elems`` elements. All collectives use the same
    buckets, so the smallest of their keys' limits applies. ``is_sized``: the user sets the size of buckets."""
    limit = min(zero.reduce_bucket_size, zero.allgather_bucket_size or zero.reduce_bucket_size)
    if zero.sharding.parameters:
        limit = min(limit, zero.sub_group_size)
    if not is_sized:
        limit = min(limit, max(n_elems // DEFAULT_BUCKETS, DEFAULT_BUCKET_FLOOR_ELEMS))
        if zero.sharding.parameters:
            # Two or three buckets are gathered at a time. Together they must not become larger than a shard of a large
            # model on many ranks.
            limit = min(limit, max(zero.stage3_prefetch_bucket_size, DEFAULT_BUCKET_FLOOR_ELEMS))
    return max(limit, 1)


def _limits(zero: Zero, elems: int, *, is_sized: bool) -> FetchLimits:
    """The fetcher's limits. Unless the user sets the amount to prefetch (``is_sized``), it is at most one bucket of
    ``elems`` elements, which is enough to hide a gather."""
    ahead = zero.stage3_prefetch_bucket_size
    if not is_sized:
        ahead = min(ahead, elems)
    offload = zero.offload_param
    # Of the buffers one holds the bucket that is being gathered and one a bucket that is being written. The others are
    # for buckets that are being read.
    n_read_ahead = max(offload.buffer_count - 2, 0) if offload.device == "nvme" else 0
    return FetchLimits(zero.stage3_max_live_parameters, ahead, zero.stage3_max_reuse_distance, n_read_ahead)


def _why_copied(
    zero: Zero, comm: Collectives, placement: Placement, device: torch.device, *, shards_params: bool
) -> str:
    """The reason why gathers copy the weights although ``comm.zero_copy_gather`` asks for gathers without a copy; "" if
    they need no copy."""
    if not zero.sharding.parameters:
        return f"no weights are gathered at ZeRO stage {zero.stage}"
    if not shards_params:
        return "there is nobody to gather weights from"
    if placement.weights != ON_DEVICE.weights:
        return f'weights are offloaded ("offload_param": {{"device": "{zero.offload_param.device}"}})'
    return comm.why_not_joint(device)


def lay_out(
    model: torch.nn.Module,
    groups: Sequence[Sequence[torch.nn.Parameter]],
    zero: Zero,
    precision: DtypePolicy,
    mesh: Mesh,
    placement: Placement = ON_DEVICE,
    device: torch.device | None = None,
    *,
    is_chosen: Callable[[str], bool],
    joins: bool,
    broadcasts: bool,
    shard_axes: Callable[[torch.nn.Parameter], Sequence[str]] = lambda param: SHARDS,
    gather_pool: BufferPool | None = None,
    check: Callable[[Sequence[UnitPlan]], None] = lambda plans: None,
) -> Layout:
    """Makes the units of a model with the optimizer groups ``groups`` (empty for an engine that only evaluates), and
    shards the model's states as the stage says.

    ``is_chosen``: whether the user chose the value of a key (``Config.is_chosen``). ``joins``: weights are gathered
    without copies where this is possible. ``broadcasts``: updated weights are broadcast and not gathered. ``device``:
    the device that computes (default: each parameter's own). ``shard_axes``: returns the axes among ``TOKENS`` over
    which the stage cuts a parameter; ranks along the other axes hold copies. ``gather_pool``: a pool for the fetcher to
    use instead of a new one. ``check`` gets the plans of all units before any weight moves, and may raise. Collective
    if the process groups of such axes have not been made yet.
    """
    sharding = zero.sharding

    def is_sized(key: str) -> bool:
        return is_chosen(f"zero_optimization.{key}")

    def unit_groups(param: torch.nn.Parameter, axes: Sequence[str]) -> UnitGroups:
        others = [axis for axis in TOKENS if axis not in axes]
        n_expert_ranks = expert_ranks_of(param)
        if n_expert_ranks > 1:
            # Ranks along ep hold other experts: they share no shard, and their gradients belong to other parameters.
            comm, replicas = (holders_of(mesh, n_expert_ranks, some) for some in (axes, others))
            # Stacked experts are one logical tensor, experts apart are tensors of their own.
            parts = mesh.with_experts(n_expert_ranks).along(EP) if cut_of(param) is not None else mesh.along()
            return UnitGroups(comm, replicas, mesh.tensors, parts)
        summed = summed_over(param, mesh.size(TP))
        tied = tied_over(param)
        if tied:
            # Copies of some heads in layers that stages share have been refused (``cut_model``): all ranks or one.
            replicas = mesh.among(tied, PP, *others, *([TP] if len(summed) > 1 else []))
        else:
            replicas = mesh.among(summed, TP, *others) if len(summed) > 1 else mesh.along(*others)
        is_part, alone = cut_of(param) is not None, mesh.along()
        twins = alone if is_part or len(summed) > 1 else mesh.tensors
        return UnitGroups(mesh.along(*axes), replicas, twins, mesh.tensors if is_part else alone)

    def groups_of(param: torch.nn.Parameter) -> UnitGroups:
        return unit_groups(param, shard_axes(param))

    def groups_of_trained(param: torch.nn.Parameter) -> UnitGroups:
        return unit_groups(param, shard_axes(param) if sharding.optimizer else ())

    numbered = ExpertNames(model)
    names: Mapping[int, tuple[str, int]] = {
        id(p): (numbered.logical(name), i) for i, (name, p) in enumerate(model.named_parameters())
    }
    names_by_group = [[names[id(p)][0] for p in group] for group in groups]
    trained_ids = {id(p) for group in groups for p in group}
    # If a parameter requires a gradient and is in no group, it stays out of the layout: the caller handles it and its
    # gradient.
    frozen = [p for p in model.parameters() if id(p) not in trained_ids and not (groups and p.requires_grad)]
    n_trained = sum(numel_alike(p) for group in groups for p in group)
    # A single rank shards as well if its shard is kept in another place than the weights in use.
    shards_params = sharding.parameters and (mesh.size(*SHARDS) > 1 or placement.weights != ON_DEVICE.weights)
    whole: set[int] = set()
    if shards_params:
        whole = persistent_params([*frozen, *(p for group in groups for p in group)], zero)

    def elems_of(n_elems: int, placement: Placement) -> Callable[[int], int]:
        def elems_of_bucket(n_shards: int) -> int:
            most = bucket_elems(zero, n_elems, is_sized=is_sized("reduce_bucket_size"))
            return min([most, *(p.most_elems * n_shards for p in placement if p.most_elems)])

        return elems_of_bucket

    if joins:
        why = _why_copied(
            zero, mesh.along(*SHARDS), placement, device or torch.device("cpu"), shards_params=shards_params
        )
        joins = not why
        if why and (device is None or device.type != "meta"):
            log_dist(f'"comm": {{"zero_copy_gather": true}} has no effect: {why}', ranks=[0], level=logging.WARNING)

    second = second_groups(zero, mesh, is_joint=joins) if shards_params else None
    staying = params_that_stay((p for p in model.parameters() if id(p) in trained_ids), zero.offload_optimizer.ratio)
    on_device = placement._replace(states=ON_DEVICE.states)

    def is_sharded(param: torch.nn.Parameter) -> bool:
        return shards_params and id(param) not in whole

    trained = plan_units(
        groups,
        names,
        groups_of=groups_of_trained,
        bucket_elems=elems_of(n_trained, placement),
        dtypes_of=precision.dtypes_of,
        is_sharded=is_sharded,
        placement_of=lambda param: on_device if id(param) in staying else placement,
        device=device,
    )
    if not sharding.parameters:
        check(trained)
        return Layout([Unit(plan) for plan in trained], [], None, names_by_group)

    def frozen_dtypes(name: str, param: torch.nn.Parameter) -> Dtypes:
        dtype = precision.dtypes_of(name, param).param
        return Dtypes(dtype, dtype, None)

    n_frozen = sum(numel_alike(p) for p in frozen)
    kept = plan_units(
        [frozen] if frozen else [],
        names,
        groups_of=groups_of,
        bucket_elems=elems_of(n_frozen, on_device),
        dtypes_of=frozen_dtypes,
        is_sharded=is_sharded,
        placement_of=lambda param: on_device,
        device=device,
    )
    check([*trained, *kept])
    trained_units, frozen_units = ([Unit(plan, joins=joins) for plan in plans] for plans in (trained, kept))
    units = [*trained_units, *frozen_units]
    sharded = [unit for unit in units if unit.is_sharded]
    largest = max((unit.bucket_numel(b) for unit in sharded for b in range(unit.n_buckets)), default=0)
    fetcher = Fetcher(
        sharded,
        [unit for unit in units if unit not in sharded],
        mesh.tokens,
        _limits(zero, largest, is_sized=is_sized("stage3_prefetch_bucket_size")),
        RecordedPlan,
        zero,
        use_broadcast=not zero.allgather_partitions or broadcasts,
        pool=gather_pool,
        near_of=(lambda unit: None) if second is None else second.near_of,
    )
    if second is not None:
        second.tell([unit for unit in sharded if unit.device.type != "meta"])  # a plan has a table instead
    return Layout(trained_units, frozen_units, fetcher, names_by_group)
