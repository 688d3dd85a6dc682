"""A unit: the flat buffers of all parameters that share an optimizer group, a dtype and a reduction dtype.

All work of a step is done on a unit's buckets and slices, so its cost does not depend on the number of a model's
parameters. The C core ``csrc/zero`` decides the place of each element (see ``dsc/zero.h``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from deepspeed_c import _C
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.joint import JointMemory
from deepspeed_c.comm.work import Work
from deepspeed_c.errors import ModelError
from deepspeed_c.inject.cut import Cut
from deepspeed_c.ops import flat
from deepspeed_c.zero.layout.cuts import cut_of
from deepspeed_c.zero.states.home import ON_DEVICE, Home, Placement, Tagged
from deepspeed_c.zero.weights.param import shape_of, take_over, whole_of

__all__ = ["ALIGN_ELEMS", "Dtypes", "Fragment", "Slot", "Unit", "UnitGroups", "UnitKind", "build_units"]

# Every parameter and every slice starts on a 64-byte line in every dtype (16 f32 or 32 16-bit elements).
ALIGN_ELEMS = 32

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Dtypes(NamedTuple):
    """The dtypes for storing, reducing and updating a parameter."""

    param: torch.dtype
    comm: torch.dtype
    master: torch.dtype | None  # None: not trained
    is_sparse: bool = False  # rows that were not touched are not sent


class UnitGroups(NamedTuple):
    """The ranks that hold the states of a parameter: see ``Unit``."""

    comm: Collectives
    replicas: Collectives
    twins: Collectives
    parts: Collectives


class UnitKind(NamedTuple):
    """The common properties of all parameters of a unit. Parameters of one optimizer group that differ in them get
    units of their own."""

    device: torch.device  # computes with them
    dtypes: Dtypes
    is_sharded: bool  # the weights; masters are wherever there is more than one shard
    placement: Placement
    groups: UnitGroups
    # Over tensor-parallel ranks. Norms count each element once; without copies the groups do not tell these apart.
    is_cut: bool


class Fragment(NamedTuple):
    """The piece of one parameter that this rank owns."""

    slot: Slot
    begin: int  # first element within the parameter
    flat_begin: int  # first element within the unit's flat buffer
    shard_begin: int  # first element within this rank's shard
    numel: int


@dataclass(eq=False)
class Slot:
    """Where one parameter lies in its unit."""

    param: torch.nn.Parameter
    name: str
    unit: Unit
    index: int  # position within the unit: the expected order of gradients
    order: int  # position within the model, in order of registration
    bucket: int  # bucket of the unit
    offset: int  # first element within the unit's flat buffer
    numel: int
    shape: torch.Size
    # Filled by the gradient reducer: index of the parameter and of its bucket over all units.
    tracker_index: int = -1

    def __post_init__(self) -> None:
        # The first dimension's is the product of the others', and so on.
        self._strides = tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

    @property
    def cut(self) -> Cut | None:
        """The parameter's part of its logical tensor, where it is cut over tensor-parallel ranks."""
        return cut_of(self.param)

    @property
    def logical_shape(self) -> torch.Size:
        """The shape of the whole tensor; ``shape`` is this rank's part."""
        return self.shape if self.cut is None else self.cut.logical_shape

    def view(self, flat: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """The parameter's place in ``flat``, whose first element is element ``begin`` of the unit's flat buffer."""
        # One call and not two (narrow, view): it is made for every parameter in every step.
        return flat.as_strided(self.shape, self._strides, flat.storage_offset() + self.offset - begin)


class Unit:
    """The parameters of one layout, and this rank's shard of their master weights.

    Weights are whole on every rank, or sharded. Whole weights lie in ``flat_param`` ([flat_elems], in the parameters'
    dtype), which is the storage of ``param.data`` of every member. Of sharded weights a rank keeps ``weight_slices``,
    one slice of each bucket. If the slices are contiguous in memory, ``param_shard`` ([shard_elems]) is all of them.
    ``gather_unit.py`` gathers a bucket while it is used; with joint memory of the ranks (``joint``) the bucket is there
    already. ``master`` holds this rank's slice of each bucket, in fp32, or in the parameters' dtype if the optimizer
    updates parameters in that dtype. If the parameter is its own master, the slices are views of the weights, and no
    second copy exists.

    Masters, states and sharded weights are cut over the ranks of ``comm``: each rank has a slice of each bucket.
    ``replicas`` are the ranks with the same shard as this rank; each of them makes the same update. A parameter's
    gradient is the sum over the ranks of ``comm`` and ``replicas``. ``twins`` are the tensor-parallel ranks with the
    same shard of parameters that are not cut; their gradients are equal without a sum. ``parts`` are the ranks that
    together hold the logical tensors of this rank's parts.

    ``states`` and ``weights`` are the homes of masters with states, and of weights; both may be offloaded. Use
    ``master`` only within ``states.open(bucket)``, and ``weight_slices`` only within ``weights.open(bucket)``.
    """

    def __init__(
        self,
        group: int,
        params: Sequence[tuple[str, int, torch.nn.Parameter]],
        kind: UnitKind,
        *,
        bucket_elems: int,
        joins: bool = False,
    ) -> None:
        """joins: sharded weights lie in joint memory of ``comm`` where there is room for that."""
        dtypes, comm = kind.dtypes, kind.groups.comm
        self.group, self.is_sharded, self.device = group, kind.is_sharded, kind.device
        states, weights = kind.placement.states, (kind.placement if self.is_sharded else ON_DEVICE).weights
        self.states: Home = states.make(states, self.device)
        self.weights: Home = weights.make(weights, self.device)
        self.dtype, self.comm_dtype, self.is_sparse = dtypes.param, dtypes.comm, dtypes.is_sparse
        self.master_dtype = dtypes.master or dtypes.param
        self.comm, self.replicas, self.twins, self.parts = kind.groups
        layout = _C.ZeroLayout([shape_of(p).numel() for _, _, p in params], comm.world_size, bucket_elems, ALIGN_ELEMS)
        # Read once: each look at an attribute of the layout makes a list anew.
        self.flat_elems: int = layout.flat_elems
        self.shard_elems: int = layout.shard_elems
        self.bucket_begin: list[int] = layout.bucket_begin
        self.slice_elems: list[int] = layout.slice_elems
        self.shard_offset: list[int] = layout.shard_offset
        self.slots = [
            Slot(p, name, self, i, order, bucket, offset, shape_of(p).numel(), shape_of(p))
            for i, ((name, order, p), bucket, offset) in enumerate(zip(params, layout.bucket_of, layout.offsets))
        ]
        self.n_buckets = len(self.bucket_begin)
        self.bucket_slots: list[list[Slot]] = [[] for _ in range(self.n_buckets)]
        for slot in self.slots:
            self.bucket_slots[slot.bucket].append(slot)
        fragments: list[tuple[int, int, int, int, int]] = layout.fragments(comm.rank)
        self.fragments = [Fragment(self.slots[i], *rest) for i, *rest in fragments]
        self.fragment_of: dict[Slot, Fragment] = {f.slot: f for f in self.fragments}

        is_trained, is_alike = dtypes.master is not None, self.master_dtype == self.dtype
        is_apart = self.states.is_apart != self.weights.is_apart
        self.copies_up = is_trained and (is_apart or (is_alike and self.weights.has_slices))
        """Whether an update must copy the masters to the weights: these lie in another memory, or in a file of their
        own and in the masters' dtype."""
        # Elsewhere one copy serves as both where dtypes allow.
        self.master_is_param = not is_trained or (is_alike and not self.copies_up)
        self.flat_param: torch.Tensor | None = None
        self.param_shard: torch.Tensor | None = None
        self.weight_slices: list[torch.Tensor] = []
        self.joint: JointMemory | None = None
        if self.is_sharded and joins:
            self.joint = comm.join([self.bucket_bytes(b) for b in range(self.n_buckets)])
        self._labels: dict[int, str] = {}
        self.states.keep(self.masters)
        self.weights.keep(self._weights_of)
        if not self.is_sharded:
            self.flat_param = self.new_zeros(self.flat_elems, self.dtype)
        elif self.joint is not None:
            self.weight_slices = [self.joint.slice(b).view(self.dtype) for b in range(self.n_buckets)]
            if self.device.type == "cpu":
                flat.zero_(self.weight_slices)  # by the threads that will update it: see ``Home.new_zeros``
        elif self.weights.has_slices:
            self.weight_slices = [self.weights.new_zeros(n, self.dtype) for n in self.slice_elems]
        else:
            self.param_shard = self.weights.new_zeros(self.shard_elems, self.dtype)
            self.weight_slices = [self.shard_slice(self.param_shard, b) for b in range(self.n_buckets)]
        self._fill()
        self._versions: list[int] = []
        self.note_weights()

    def _fill(self) -> None:
        """Casts the members' weights into the buffers, and makes the master slices.

        Masters start from the weights as they were given, not from their 16-bit image. It takes one parameter at a
        time: a sharded one gives up its own storage before the next comes. Collective where members are sharded already
        (``zero.Init``).
        """
        with torch.no_grad():
            self._master: list[torch.Tensor] = []
            self._master_flat: torch.Tensor | None = None
            if self.master_is_param:
                self._master = [self.param_slice(b) for b in range(self.n_buckets)]
            elif self.states.has_slices:
                self._master = [self.states.new_zeros(0, self.master_dtype) for _ in self.slice_elems]
            else:
                self._master_flat = self.states.new_zeros(self.shard_elems, self.master_dtype)
                self._master = [self.shard_slice(self._master_flat, b) for b in range(self.n_buckets)]
            for slot in self.slots:
                whole = whole_of(slot.param)
                fragment = self.fragment_of.get(slot)
                if fragment is not None:
                    mine = whole.reshape(-1).narrow(0, fragment.begin, fragment.numel)
                    if not self.master_is_param:
                        self._make_master(slot.bucket)
                        self.piece(self.master, fragment).copy_(mine)
                    if self.is_sharded:
                        self.piece(self.weight_slices, fragment).copy_(mine)
                if self.flat_param is not None:
                    view = slot.view(self.flat_param)
                    view.copy_(whole)
                    take_over(slot.param, view)
                else:
                    take_over(slot.param, torch.empty(0, dtype=self.dtype, device=self.device))
                del whole  # before the next is put together
                mine = None
            for bucket in range(self.n_buckets):
                self._make_master(bucket)  # also for buckets of nothing but padding

    def _make_master(self, bucket: int) -> None:
        """Makes a bucket's masters, where each bucket's have memory of their own. They come one by one as they are
        filled: the weights as given go on the way."""
        if self.master[bucket].numel() != self.slice_elems[bucket]:
            self.master[bucket] = self.states.new_zeros(self.slice_elems[bucket], self.master_dtype)

    def label(self, bucket: int) -> str:
        """This rank's part of a bucket, for messages."""
        if bucket not in self._labels:
            names = [slot.name for slot in self.bucket_slots[bucket] if slot in self.fragment_of]
            self._labels[bucket] = " to ".join(dict.fromkeys((names[0], names[-1]))) if names else "padding"
        return self._labels[bucket]

    @property
    def n_ranks(self) -> int:
        """Over how many ranks its gradients are summed."""
        return self.comm.world_size * self.replicas.world_size

    @property
    def carrier(self) -> Collectives:
        """The ranks that exchange its buckets: the ranks that share it, or else the ranks that hold copies."""
        return self.comm if self.is_cut else self.replicas

    def new_zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros on its device for buffers of collectives."""
        memory = self.carrier.allocate(numel * dtype.itemsize, self.device).view(dtype)
        if self.device.type == "cpu":
            flat.zero_([memory])  # by the threads that will update it: see ``Home.new_zeros``
            return memory
        return memory.zero_()

    @property
    def sums_in_place(self) -> bool:
        """Whether the sums of its gradients are the gradients themselves: there is nothing to sum over, and they stay
        in their memory."""
        return self.n_ranks == 1 and not self.states.is_apart

    @property
    def is_cut(self) -> bool:
        """Whether a rank has but a part of it: masters, states, and the weights where they are sharded."""
        return self.comm.world_size > 1

    @property
    def speaks(self) -> bool:
        """Whether this rank's shard counts in sums over all ranks: of the copies of a shard, one counts."""
        return self.copy_index == 0

    @property
    def n_copies(self) -> int:
        """How many ranks hold the same shard."""
        return self.replicas.world_size * self.twins.world_size

    @property
    def copy_index(self) -> int:
        """This rank's number among those."""
        return self.replicas.rank * self.twins.world_size + self.twins.rank

    @property
    def has_parts(self) -> bool:
        """Whether its parameters are parts of logical tensors, cut over tensor-parallel ranks."""
        return any(slot.cut is not None for slot in self.slots)

    @property
    def master(self) -> list[torch.Tensor]:
        """This rank's masters, one slice a bucket, as the last step left them."""
        self.states.settle()
        return self._master

    @property
    def master_flat(self) -> torch.Tensor | None:
        """All of them, where they lie together and are no parameters."""
        self.states.settle()
        return self._master_flat

    def bucket_numel(self, bucket: int) -> int:
        return self.slice_elems[bucket] * self.comm.world_size

    def bucket_bytes(self, bucket: int) -> int:
        """Bytes of the gathered weights of a bucket."""
        return self.bucket_numel(bucket) * self.dtype.itemsize

    def bucket_view(self, flat: torch.Tensor, bucket: int) -> torch.Tensor:
        """Bucket of a flat buffer of the whole unit."""
        return flat.narrow(0, self.bucket_begin[bucket], self.bucket_numel(bucket))

    def piece_elems(self, bucket: int) -> int:
        """How many elements of a bucket's masters and states their home moves at once; 0: all."""
        return self.states.piece_elems(self.slice_elems[bucket])

    def own_slice(self, bucket_buffer: torch.Tensor, bucket: int) -> torch.Tensor:
        """This rank's slice of a buffer that holds one bucket."""
        n = self.slice_elems[bucket]
        return bucket_buffer.narrow(0, self.comm.rank * n, n)

    def shard_slice(self, shard: torch.Tensor, bucket: int) -> torch.Tensor:
        """Bucket's slice within a buffer that holds this rank's shard."""
        return shard.narrow(0, self.shard_offset[bucket], self.slice_elems[bucket])

    def param_slice(self, bucket: int) -> torch.Tensor:
        """This rank's slice of the parameters themselves."""
        if self.is_sharded:
            return self.weight_slices[bucket]
        return self.own_slice(self.bucket_view(self.flat_param, bucket), bucket)

    def piece(self, slices: Sequence[torch.Tensor], fragment: Fragment) -> torch.Tensor:
        """A fragment's elements in a list of this rank's slices, one per bucket."""
        bucket = fragment.slot.bucket
        return slices[bucket].narrow(0, fragment.shard_begin - self.shard_offset[bucket], fragment.numel)

    def masters(self, bucket: int) -> list[Tagged]:
        """A bucket's masters; none where they are parameters."""
        if self.master_is_param:
            return []
        name = f"masters of {self.label(bucket)}"
        return [Tagged(self.master[bucket], name, self.piece_elems(bucket), is_master=True)]

    @property
    def steps_ahead(self) -> bool:
        """Whether the host may update its masters while backward runs: they lie in host memory, and backward reads
        other tensors."""
        return not self.master_is_param and (self.states.is_apart or self.device.type == "cpu")

    def master_bytes(self, bucket: int | None = None) -> int:
        """How many bytes masters (a bucket's) take beside the weights; 0 where they are parameters."""
        elems = self.shard_elems if bucket is None else self.slice_elems[bucket]
        return 0 if self.master_is_param else elems * self.master_dtype.itemsize

    @property
    def weight_bytes(self) -> int:
        """How many bytes this rank keeps of the weights."""
        return (self.shard_elems if self.is_sharded else self.flat_elems) * self.dtype.itemsize

    def describe(self) -> str:
        """Its size, and where everything of it lies."""
        return (
            f"weights {'sharded' if self.is_sharded else 'whole'}, {len(self.slots)} parameters,"
            f" {self.flat_elems} elements of {self.dtype} ({self.weights.label}), reduced in {self.comm_dtype},"
            f" masters in {self.master_dtype} ({self.states.label}); {self.n_buckets} buckets,"
            f" shard {self.comm.rank + 1} of {self.comm.world_size} with {self.shard_elems} elements,"
            f" copy {self.copy_index + 1} of {self.n_copies}"
        )

    def _weights_of(self, bucket: int) -> list[Tagged]:
        """A bucket's sharded weights. Everybody reads whole ones at any time: those have no home."""
        if not self.is_sharded:
            return []
        return [Tagged(self.weight_slices[bucket], f"weights of {self.label(bucket)}")]

    def weight_piece(self, fragment: Fragment) -> torch.Tensor:
        """A fragment's elements of the weights, flat, within ``weights.open``."""
        if self.is_sharded:
            return self.piece(self.weight_slices, fragment)
        return self.flat_param.narrow(0, fragment.flat_begin, fragment.numel)

    def master_piece(self, fragment: Fragment) -> torch.Tensor | None:
        """A fragment's elements of the masters, flat, within ``states.open``; None where the parameter is its own
        master."""
        return None if self.master_is_param else self.piece(self.master, fragment)

    def put_master(self, fragment: Fragment, values: torch.Tensor) -> None:
        """Overwrites a fragment's elements of the masters by ``values``, flat; does nothing where the parameter is its
        own master."""
        if not self.master_is_param:
            with self.states.open(fragment.slot.bucket):
                self.piece(self.master, fragment).copy_(values)

    def copy_of_masters(self) -> torch.Tensor | None:
        """A copy of all masters, flat; None where they are parameters."""
        return None if self.master_is_param else torch.cat(self.master)

    def put_masters(self, values: torch.Tensor | None) -> None:
        """Overwrites all masters by a result of ``copy_of_masters``."""
        for bucket, mine in enumerate(self.master if values is not None else ()):
            mine.copy_(self.shard_slice(values, bucket))

    def copies(self, bucket: int) -> list[torch.Tensor]:
        """The weights, where an update writes them along with the masters: as casts of those, in the same memory."""
        return [] if self.master_is_param or self.copies_up else [self.param_slice(bucket)]

    def copy_up(self, bucket: int) -> None:
        """Brings the weights that an update has not written (``copies``)."""
        if self.copies_up:
            self.bring_weights(bucket)

    def copy_up_part(self, bucket: int, begin: int, masters: torch.Tensor) -> None:
        """As ``copy_up``, of the elements from ``begin`` on. It waits: ``masters`` may be used again."""
        if self.copies_up:
            self.param_slice(bucket).narrow(0, begin, masters.numel()).copy_(masters)

    def gather_weights(self, bucket: int, *, use_broadcast: bool = False, label: str = "") -> Work:
        """Sends this rank's slice of whole weights to all ranks. Collective; sharded weights wait for their use."""
        if self.is_sharded:
            return Work.done()
        return self.comm.all_gather(self.bucket_view(self.flat_param, bucket), use_broadcast=use_broadcast, label=label)

    def bring_weights(self, bucket: int) -> None:
        """Writes the weights that forward uses from the masters: casts them, or copies from one memory to the other.
        Both are open."""
        if self.copies_up:
            # Unpinned memory is staged before the call returns; a pinned master is not written to before gradients of
            # the new weights have come.
            self.param_slice(bucket).copy_(self.master[bucket], non_blocking=self.states.is_apart)
        elif not self.master_is_param and self.slice_elems[bucket]:
            torch.ops.deepspeed_c.flat_cast_(self.master[bucket], self.param_slice(bucket))

    def refresh_master(self) -> None:
        """Takes the masters anew from the parameters (after somebody wrote to them, e.g. ``load_state_dict``)."""
        if not self.master_is_param:
            for bucket in range(self.n_buckets):
                with self.states.open(bucket), self.weights.open(bucket, writes=False), torch.no_grad():
                    self.master[bucket].copy_(self.param_slice(bucket))
            self.note_weights()

    def note_weights(self) -> None:
        """Masters and weights agree now: earlier writes to the weights are no edits any more."""
        if self._has_whole_copies:
            self._versions = [slot.param._version for slot in self.slots]

    @property
    def _has_whole_copies(self) -> bool:
        return self.flat_param is not None and not self.master_is_param

    def _edited(self, slots: Sequence[Slot]) -> list[Slot]:
        """The ``slots`` with writes in place that their masters do not know. Torch counts such writes, but not those
        through ``.data``; sharded weights have ways of their own (``gathered.py``)."""
        if not self._has_whole_copies:
            return []
        return [slot for slot in slots if slot.param._version != self._versions[slot.index]]

    def keep_edits(self, slots: Sequence[Slot]) -> None:
        """The masters of ``slots`` take over writes in place to their whole weights: the elements that differ from the
        masters' own rounding."""
        for bucket, edited in itertools.groupby(self._edited(slots), key=lambda slot: slot.bucket):
            with self.states.open(bucket), torch.no_grad():
                for slot in edited:
                    fragment = self.fragment_of.get(slot)
                    if fragment is not None:
                        master = self.piece(self.master, fragment)
                        weight = self.weight_piece(fragment).to(master.device)
                        is_other = weight != master.to(weight.dtype)  # true for NaN, which is no harm
                        master.copy_(torch.where(is_other, weight.to(master.dtype), master))
                    self._versions[slot.index] = slot.param._version

    def ranges_of(self, slot: Slot) -> tuple[list[int], list[int]]:
        """The elements of a parameter in each rank's shard: (first elements, counts), by rank."""
        begins, numels = [], []
        first, slice_elems = self.bucket_begin[slot.bucket], self.slice_elems[slot.bucket]
        for rank in range(self.comm.world_size):
            low = min(max(first + rank * slice_elems - slot.offset, 0), slot.numel)
            high = min(max(first + (rank + 1) * slice_elems - slot.offset, 0), slot.numel)
            begins.append(low)
            numels.append(high - low)
        return begins, numels

    def release(self) -> None:
        """Gives every parameter storage of its own again, so that the model outlives the unit."""
        with torch.no_grad():
            if self.flat_param is not None:
                for slot in self.slots:
                    slot.param.data = slot.param.data.clone()
        self.master.clear()
        self.fragments.clear()
        self.fragment_of.clear()
        self._master_flat = None
        self.flat_param = self.param_shard = self.joint = None
        self.weight_slices.clear()
        self.states.end()
        self.weights.end()


def build_units(
    groups: Sequence[Sequence[torch.nn.Parameter]],
    names: dict[int, tuple[str, int]],
    *,
    groups_of: Callable[[torch.nn.Parameter], UnitGroups],
    bucket_elems: Callable[[int], int],
    dtypes_of: Callable[[str, torch.nn.Parameter], Dtypes],
    is_sharded: Callable[[torch.nn.Parameter], bool] = lambda param: False,
    joins: bool = False,
    placement_of: Callable[[torch.nn.Parameter], Placement] = lambda param: ON_DEVICE,
    device: torch.device | None = None,
) -> list[Unit]:
    """Makes the units of all optimizer groups.

    Members lie in reverse order of registration. Backward produces their gradients in about that order, so that the
    first buckets fill first.

    names: ``id(param)`` -> (name, order of registration). bucket_elems: number of ranks that share a unit -> most
    elements of a bucket. dtypes_of: the dtypes of weights, reductions and masters. is_sharded: whether weights are
    sharded; masters are wherever a unit has more than one shard. groups_of: the ranks that hold the shards of a
    parameter, and their copies. joins: sharded weights lie in memory that the ranks hold together. placement_of: where
    its states and weights live. device: computes with them (default: where each is).
    """
    units: list[Unit] = []
    for index, group in enumerate(groups):
        by_kind: dict[UnitKind, list[tuple[str, int, torch.nn.Parameter]]] = {}
        for p in group:
            name, order = names[id(p)]
            dtypes = dtypes_of(name, p)
            if p.requires_grad and dtypes.param not in SUPPORTED_DTYPES:
                raise ModelError(
                    f"trainable parameter has dtype {dtypes.param}; the optimizer step works on fp32, bf16 and fp16",
                    where=name,
                    fix="cast the parameter, or freeze it with requires_grad_(False)",
                )
            kind = UnitKind(
                device or p.device, dtypes, is_sharded(p), placement_of(p), groups_of(p), cut_of(p) is not None
            )
            by_kind.setdefault(kind, []).append((name, order, p))
        for kind, members in by_kind.items():
            members.sort(key=lambda member: -member[1])
            n_shards = kind.groups.comm.world_size
            units.append(Unit(index, members, kind, bucket_elems=bucket_elems(n_shards), joins=joins))
    return units
