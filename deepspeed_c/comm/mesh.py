"""The ranks of an engine as a grid of named axes, and the process group of the ranks along given axes.

A rank has one place on each axis. Ranks that differ only on data-parallel axes see different samples and train the same
parameters. ``zero/layout/layout.py`` decides for each parameter which of these axes cut its states, and which other
axes sum its gradient.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_c.comm.axes import (
    AXES,
    AXIS_ROWS,
    DATA,
    DP_REPLICATE,
    DP_SHARD,
    EP,
    NEEDING_MODULE,
    PP,
    SP,
    TOKENS,
    TP,
    WITHIN_STAGE,
    refuse_axes_needing_module,
)
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.groups import new_group_of, timeout_of
from deepspeed_c.errors import CommError

__all__ = ["Mesh", "mesh_of_device_mesh", "mesh_of_mpu", "mesh_of_pair"]

# Other names for the dimensions of a DeviceMesh.
_ALIASES = {name: axis.name for axis in AXIS_ROWS for name in (axis.name, *axis.dim_names)}
# Names of the axes in versions of Megatron and DeepSpeed. Each has get_<name>_group, get_<name>_rank and
# get_<name>_world_size.
_MPU_NAMES = {axis.name: axis.mpu_names for axis in AXIS_ROWS}
# Names in an mpu for the ranks along dp_shard and sp together.
_MPU_BOTH = ("sequence_data_parallel",)

Connect = Callable[[Sequence[int], Sequence[str]], Any]


class Mesh:
    """The ranks of ``comm``, laid out on ``AXES``.

    ``sizes`` has the sizes of axes; an axis that is left out has size 1. By default all ranks lie along ``dp_shard``.
    ``grid`` ([size of each of AXES], int64) has the rank of ``comm`` at each place; by default ranks are counted along
    the last axis first. ``connect`` makes the group of some ranks of ``comm`` along some axes; by default it makes a
    new group of ``torch.distributed``. It is called for the same axes in the same order on all ranks.

    Raises CommError where sizes and ranks do not fit.
    """

    def __init__(
        self,
        comm: Collectives,
        sizes: Mapping[str, int] | None = None,
        *,
        grid: torch.Tensor | None = None,
        connect: Connect | None = None,
    ) -> None:
        sizes = {DP_SHARD: comm.world_size} if sizes is None else sizes
        unknown = [axis for axis in sizes if axis not in AXES]
        if unknown or math.prod(sizes.values()) != comm.world_size or min(sizes.values(), default=1) < 1:
            raise CommError(
                f"axes {dict(sizes)} do not fit {comm.world_size} ranks"
                if not unknown
                else f"there is no axis {unknown[0]!r}",
                where="mesh",
                fix=f"name axes of {', '.join(AXES)} whose sizes multiply to {comm.world_size}",
            )
        self.comm = comm
        """All ranks of the mesh."""
        self.axes: dict[str, int] = {axis: sizes.get(axis, 1) for axis in AXES}
        """Size by axis."""
        shape = tuple(self.axes.values())
        self._grid = torch.arange(comm.world_size).view(shape) if grid is None else grid.view(shape)
        places = (self._grid == comm.rank).nonzero()
        if len(places) != 1:
            raise CommError(
                f"rank {comm.rank} has {len(places)} places on the mesh",
                where="mesh",
                fix="give each rank one place",
            )
        self._place = dict(zip(AXES, places[0].tolist()))
        self._connect = connect
        self._groups: dict[tuple[int, ...], Collectives] = {}
        self._with_experts: dict[int, Mesh] = {}
        self._data_first = False
        self.near: Collectives | None = None
        """The ranks that keep second shards of weights together; None where no configuration asks for them."""
        self._forget_groups()

    @property
    def wide_axes(self) -> dict[str, int]:
        """The axes of more than one rank, and their sizes."""
        return {axis: size for axis, size in self.axes.items() if size > 1}

    def size(self, *axes: str) -> int:
        """How many ranks lie along ``axes`` together."""
        return math.prod(self.axes[axis] for axis in axes)

    def ranks(self, *axes: str) -> list[int]:
        """The ranks of ``comm`` that differ from this rank on ``axes`` at most. The order is ascending, as
        ``torch.distributed`` numbers the ranks of a group.
        """
        at = tuple(slice(None) if axis in axes else self._place[axis] for axis in AXES)
        return sorted(self._grid[at].reshape(-1).tolist())

    def index(self, *axes: str) -> int:
        """This rank's position among the ranks along ``axes``."""
        return self.ranks(*axes).index(self.comm.rank)

    def along(self, *axes: str) -> Collectives:
        """The collectives of the ranks along ``axes``.

        Collective at the first call for these axes: all ranks make the first calls in the same order.
        """
        return self.connected(self.ranks(*axes), *axes)

    def connected(self, ranks: Sequence[int], *axes: str) -> Collectives:
        """The collectives of these ``ranks`` of ``comm``, ascending. This rank is one of them. axes: their names in
        ledgers.

        Collective among them at the first call.
        """
        found = self._groups.get(tuple(ranks))
        if found is None:
            found = self._groups[tuple(ranks)] = (self._connect or self._new_group)(tuple(ranks), axes)
        return found

    def connect_near(self, ranks: Sequence[int]) -> Collectives:
        """Sets ``near`` to the collectives of these ranks, and returns them. Collective among them at the first call."""
        self.near = self.connected(ranks, "hpz")
        return self.near

    def process_group(self, *axes: str) -> dist.ProcessGroup:
        """The ``torch.distributed`` group of the ranks along ``axes``, for callers that need it. There is a group even
        where this rank is alone. Collective as ``along`` is.
        """
        part = self.along(*axes)
        if part.world_size == 1 < self.comm.world_size:
            return _shared_group((self.comm.global_rank,), self.comm.group)
        return dist.group.WORLD if part.group is None else part.group

    @property
    def stage(self) -> Collectives:
        """The ranks that hold the same layers; without a pipeline, all ranks."""
        return self.along(*WITHIN_STAGE)

    @property
    def pipeline(self) -> Collectives:
        """The ranks that hold the stages of one model."""
        return self.along(PP)

    @property
    def sequence(self) -> Collectives:
        """The ranks that hold parts of the same sequences, and train the same parameters."""
        return self.along(SP)

    @property
    def tensors(self) -> Collectives:
        """The ranks that hold parts of the same layers' parameters and see the same tokens."""
        return self.along(TP)

    @property
    def data(self) -> Collectives:
        """The ranks that see different samples: along the axes ``DATA``."""
        return self.along(*DATA)

    @property
    def tokens(self) -> Collectives:
        """The ranks that train the same parameters on different tokens: along the axes ``TOKENS``."""
        return self.along(*TOKENS)

    def among(self, neighbours: Sequence[int], axis: str, *axes: str) -> Collectives:
        """The collectives of the ranks along ``axes`` that lie at the positions ``neighbours`` along ``axis``. This
        rank's position has to be in ``neighbours``.

        Collective as ``along`` is, among those ranks.
        """
        grid = self._grid
        for dim, name in enumerate(AXES):
            if name not in axes:
                chosen = neighbours if name == axis else [self._place[name]]
                grid = grid.index_select(dim, torch.tensor(list(chosen)))
        return self.connected(sorted(grid.reshape(-1).tolist()), axis, *axes)

    def connect_some(self, lists: Sequence[Sequence[int]], axis: str, *axes: str) -> None:
        """Makes the groups of ``among`` for those of several lists of neighbours that this rank is in. Collective over
        the ranks of each list at the first call.
        """
        for neighbours in lists:
            if self._place[axis] in neighbours:
                self.among(neighbours, axis, *axes)

    def _new_group(self, ranks: Sequence[int], axes: Sequence[str]) -> Collectives:
        if len(ranks) == 1:
            return self.comm.alone()
        group = _shared_group(tuple(self.comm.global_ranks[rank] for rank in ranks), self.comm.group)
        wide = [axis for axis in AXES if axis in axes and self.axes[axis] > 1]
        return self.comm.part(group, " x ".join(wide or axes))

    def enter_phase(self, phase: str) -> None:
        """Sets the phase that the ledgers of all groups note beside the collectives that follow: "forward", "backward",
        "step" or ""."""
        for part in self._groups.values():
            if part.world_size > 1:
                part.ledger.phase = phase

    def split_data(self, n_shards: int) -> Mesh:
        """The same ranks with ``n_shards`` neighbours along dp_shard. Ranks with copies of the same shards lie along
        dp_replicate.

        Raises CommError where the data-parallel ranks cannot be cut so, or have been cut already.
        """
        n_data, is_cut = self.size(DP_REPLICATE, DP_SHARD), self.size(DP_REPLICATE) > 1
        if n_shards < 1 or n_data % n_shards or is_cut:
            raise CommError(
                f"{n_data} data-parallel ranks cannot be cut into groups of {n_shards}: the mesh has {self}",
                where="mesh",
                fix=f"use a divisor of {n_data}" + (", or leave it out: the mesh says it" if is_cut else ""),
            )
        sizes = {**self.axes, DP_REPLICATE: n_data // n_shards, DP_SHARD: n_shards}
        return Mesh(self.comm, sizes, grid=self._grid.reshape(tuple(sizes.values())), connect=self._connect)

    def split_tensors(self, n_ranks: int) -> Mesh:
        """The same ranks with ``n_ranks`` neighbours along tp, which hold one model together. dp_shard becomes smaller
        by that factor.

        Raises CommError where the ranks cannot be cut so, or have been cut already.
        """
        return self._split(TP, n_ranks)

    def split_sequences(self, n_ranks: int) -> Mesh:
        """The same ranks with ``n_ranks`` neighbours along sp, which hold parts of the same sequences. dp_shard becomes
        smaller by that factor. Call it after ``split_tensors``, whose ranks are closer neighbours.

        Raises CommError where the ranks cannot be cut so, or have been cut already.
        """
        return self._split(SP, n_ranks)

    def _split(self, axis: str, n_ranks: int) -> Mesh:
        n_data, is_cut = self.size(DP_SHARD), self.size(axis, DP_REPLICATE) > 1
        if n_ranks < 1 or n_data % n_ranks or is_cut:
            raise CommError(
                f"{self.comm.world_size} ranks cannot be cut into groups of {n_ranks}: the mesh has {self}",
                where="mesh",
                fix=f"use a divisor of {n_data}" + (", or leave it out: the mesh says it" if is_cut else ""),
            )
        sizes = {**self.axes, DP_SHARD: n_data // n_ranks, axis: n_ranks}
        # The ranks of a new axis are neighbours along dp_shard and stay neighbours; other axes keep their places.
        grid = self._grid.unflatten(AXES.index(DP_SHARD), (n_data // n_ranks, n_ranks))
        grid = grid.movedim(AXES.index(DP_SHARD) + 1, AXES.index(axis)).reshape(tuple(sizes.values()))
        return Mesh(self.comm, sizes, grid=grid, connect=self._connect)

    def place_experts(self, *, data_first: bool) -> None:
        """Sets which ranks share experts: the nearest neighbours hold different experts, or the same experts if
        ``data_first`` (``use_data_before_expert_parallelism``). Call it before ``with_experts``."""
        self._data_first = data_first

    def with_experts(self, n_ranks: int) -> Mesh:
        """The same ranks as experts see them that are spread over ``n_ranks`` ranks: these lie along ep, and the ranks
        with the same experts along dp_shard. Both meshes use the same groups.

        All ranks that see different tokens can hold different experts, so ep takes its ranks from sp as well as from
        dp_shard. A mesh that has ``n_ranks`` along ep already stays as it is.

        Raises CommError where the ranks cannot be divided so.
        """
        if n_ranks == self.axes[EP]:
            return self
        found = self._with_experts.get(n_ranks)
        if found is None:
            n_tokens = self.size(DP_SHARD, EP, SP)
            if n_ranks < 1 or n_tokens % n_ranks:
                raise CommError(
                    f"experts cannot be spread over {n_ranks} of the {n_tokens} ranks that share one copy of the model:"
                    f" the mesh has {self}",
                    where="ep_size",
                    fix=f"use a divisor of {n_tokens}",
                )
            at, n_same = AXES.index(DP_SHARD), n_tokens // n_ranks
            grid = self._grid.flatten(at, at + 2)
            if self._data_first:
                grid = grid.unflatten(at, (n_ranks, n_same)).transpose(at, at + 1)
            sizes = {**self.axes, DP_SHARD: n_same, EP: n_ranks, SP: 1}
            found = Mesh(self.comm, sizes, grid=grid.reshape(tuple(sizes.values())), connect=self._connect)
            found._groups = self._groups
            self._with_experts[n_ranks] = found
        return found

    def to_device_mesh(self, device_type: str = "cpu") -> Any:
        """The axes of more than one rank as a ``DeviceMesh``. If there are none, it has the single dimension dp_shard.

        Collective: the ``DeviceMesh`` makes new groups.
        """
        from torch.distributed.device_mesh import DeviceMesh

        names = list(self.wide_axes) or [DP_SHARD]
        ranks = torch.tensor(self.comm.global_ranks)[self._grid].view([self.axes[name] for name in names])
        return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(names))

    def close(self) -> None:
        """Frees the buffers of all groups. A group ends when no sharded parameter needs it any more."""
        for part in self._groups.values():
            part.close()
        self._forget_groups()

    def _forget_groups(self) -> None:
        self._groups.clear()  # in place: ``with_experts`` shares it
        self._groups[tuple(range(self.comm.world_size))] = self.comm

    def __str__(self) -> str:
        """``dp_replicate 2 x dp_shard 4``; axes of one rank are left out."""
        return " x ".join(f"{axis} {size}" for axis, size in self.wide_axes.items()) or "1 rank"


# Groups of some ranks of a world, kept as long as the world. There is one group for each set of ranks. Later engines
# use the groups of earlier engines, as all engines use the world's group. Sharded parameters that outlive their engine
# still need these groups.
_groups: weakref.WeakKeyDictionary[Any, dict[tuple, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def _shared_group(ranks: tuple[int, ...], like: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group of these global ranks with the backend and the timeout of ``like``."""
    backend, timeout = dist.get_backend_config(like), timeout_of(like)
    known = _groups.setdefault(dist.group.WORLD, {})
    group = known.get((ranks, backend, timeout))
    if group is None:
        group = known[ranks, backend, timeout] = new_group_of(ranks, backend=backend, timeout=timeout)
    return group


_DEVICE_MESH = "initialize(mesh_device=...)"


def mesh_of_device_mesh(device_mesh: Any) -> Mesh:
    """The ranks of a ``torch.distributed.device_mesh.DeviceMesh``, on the axes that the names of its dimensions stand
    for.

    Collective.

    Raises CommError where a dimension's name is missing or no axis, and FeatureError for an axis that cannot be used
    yet.
    """
    names = [_ALIASES.get(name) for name in device_mesh.mesh_dim_names or ()]
    if not names or None in names or len(set(names)) < len(names):
        raise CommError(
            f"the dimensions of the device mesh are named {device_mesh.mesh_dim_names}",
            where=_DEVICE_MESH,
            fix=f"name each dimension for another axis: {', '.join(AXES)}",
        )
    grid = device_mesh.mesh.cpu()
    refuse_axes_needing_module(dict(zip(names, grid.shape)), _DEVICE_MESH)
    ranks = sorted(grid.reshape(-1).tolist())
    is_world = len(ranks) == dist.get_world_size()
    group = None if is_world else _shared_group(tuple(ranks), None)
    order = sorted(range(len(names)), key=lambda i: AXES.index(names[i]))
    places = torch.searchsorted(torch.tensor(ranks), grid.permute(order).contiguous())
    return Mesh(Collectives(group), {names[i]: grid.shape[i] for i in order}, grid=places)


def mesh_of_pair(sizes: Any) -> Mesh:
    """All ranks of the job on the axes dp_shard and sp, with these two ``sizes``.

    Raises CommError if ``sizes`` is not two sizes, or if the sizes do not fit the ranks.
    """
    if not isinstance(sizes, Sequence) or len(sizes) != 2 or not all(isinstance(size, Integral) for size in sizes):
        raise CommError(
            f"{sizes!r} is not two numbers, the sizes of the axes {DP_SHARD} and {SP}",
            where="initialize(mesh_param=...)",
            fix="pass two numbers, or name axes in mesh_device=...",
        )
    return Mesh(Collectives(), dict(zip((DP_SHARD, SP), sizes)))


def mesh_of_mpu(mpu: Any) -> Mesh:
    """The data-parallel, sequence-parallel and tensor-parallel ranks of an mpu: an object with some of Megatron's
    methods (``_MPU_NAMES``).

    Collective where there are sequence-parallel or tensor-parallel ranks. Raises FeatureError where the mpu has ranks
    of another kind, and CommError where its methods do not say enough, or where its ranks do not make up the job.
    """
    refuse_axes_needing_module({axis: _size_by_mpu(mpu, axis) for axis in NEEDING_MODULE}, _MPU)
    n_seq, seq_rank = _ask(mpu, SP, default=1)
    # An mpu for sequence parallelism alone calls sequence parallelism "model parallel", too.
    n_tp, tp_rank = _ask(mpu, TP, default=1, names=_MPU_NAMES[TP][: 2 if n_seq > 1 else 3])
    if n_tp * n_seq == 1:
        return Mesh(Collectives(mpu.get_data_parallel_group()))
    comm = Collectives()
    n_data, data_rank = _ask(mpu, DP_SHARD, default=0)
    if n_data == 0 and n_seq > 1:
        n_both, rank_of_both = _ask(mpu, DP_SHARD, default=comm.world_size // n_tp, names=_MPU_BOTH)
        n_data, data_rank = n_both // n_seq, rank_of_both // n_seq
    elif n_data == 0:
        n_data, data_rank = _ask(mpu, DP_SHARD, names=(*_MPU_BOTH, *_MPU_NAMES[DP_SHARD]))
    if n_tp * n_seq * n_data != comm.world_size:
        sequences = f" times {n_seq} sequence-parallel" if n_seq > 1 else ""
        raise CommError(
            f"the mpu has {n_data} data-parallel{sequences} times {n_tp} tensor-parallel ranks,"
            f" the job {comm.world_size}",
            where=_MPU,
            fix="give the mpu all ranks of the job, and no axis but these",
        )
    places = comm.gather_numbers((data_rank * n_seq + seq_rank) * n_tp + tp_rank, label="places of the mpu")
    if sorted(places) != list(range(comm.world_size)):
        twice = next(place for place in places if not 0 <= place < comm.world_size or places.count(place) > 1)
        ranks = [rank for rank, place in enumerate(places) if place == twice]
        sequences = f" sequence-parallel {twice // n_tp % n_seq}," if n_seq > 1 else ""
        raise CommError(
            f"ranks {ranks} have the same place, or none, in the mpu:"
            f" data-parallel {twice // n_tp // n_seq},{sequences} tensor-parallel {twice % n_tp}",
            where=_MPU,
            fix="number the ranks of each group from 0",
        )
    grid = torch.tensor([places.index(place) for place in range(comm.world_size)])
    return Mesh(comm, {DP_SHARD: n_data, SP: n_seq, TP: n_tp}, grid=grid)


_MPU = "initialize(mpu=...)"


def _size_by_mpu(mpu: Any, axis: str) -> int:
    """The largest number of ranks along ``axis`` that any method of the mpu returns."""
    getters = (getattr(mpu, f"get_{name}_world_size", None) for name in _MPU_NAMES[axis])
    return max([1, *(getter() for getter in getters if getter is not None)])


def _ask(mpu: Any, axis: str, default: int | None = None, names: Sequence[str] = ()) -> tuple[int, int]:
    """(number of ranks, number of this rank) along ``axis``, from the methods that the mpu has. ``default`` is the
    number of ranks where no method returns one.
    """
    answers: dict[str, Any] = {}
    names = names or _MPU_NAMES[axis]
    for name in names:
        for what in ("world_size", "rank", "group"):
            getter = getattr(mpu, f"get_{name}_{what}", None)
            if getter is not None and what == "world_size":
                answers[what] = max(answers.get(what, 1), getter())  # names that a version does not use return 1
            elif getter is not None and what not in answers:
                answers[what] = getter()
    size, rank = answers.get("world_size"), answers.get("rank")
    if answers.get("group") is not None:
        size = dist.get_world_size(answers["group"]) if size is None else size
        rank = dist.get_rank(answers["group"]) if rank is None else rank
    if size is None and default is not None:
        size, rank = default, rank if rank is not None or default < 2 else dist.get_rank() % default
    if size is None or (rank is None and size > 1):
        lacking = "world_size" if size is None else "rank"
        methods = ", ".join(f"get_{name}_{lacking}()" for name in names)
        raise CommError(
            f"the mpu has none of {methods}, and no method for the group",
            where=_MPU,
            fix=f"give it one of them{'' if size is None else f': it says that there are {size} such ranks'}",
        )
    return int(size), int(rank or 0)
