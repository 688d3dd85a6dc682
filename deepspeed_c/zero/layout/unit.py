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
from deepspeed_c.comm.transports.joint_memory import JointMemory
from deepspeed_c.comm.work import Work
from deepspeed_c.errors import ModelError
from deepspeed_c.inject.cut import Cut
from deepspeed_c.ops import flat
from deepspeed_c.zero.layout.cuts import cut_of
from deepspeed_c.zero.states.home import ON_DEVICE, Home, Placement, Tagged
from deepspeed_c.zero.weights.param import shape_of, state_of, take_over, whole_of
from deepspeed_c.zero.weights.unread import ReadRange, UnreadShard

__all__ = [
    "ALIGN_ELEMS",
    "Dtypes",
    "Fragment",
    "Slot",
    "Unit",
    "UnitGroups",
    "UnitKind",
    "UnitPlan",
    "label_of",
    "plan_units",
]

# Every parameter and every slice starts on a 64-byte line in every dtype (16 f32 or 32 16-bit elements).
ALIGN_ELEMS = 32

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Dtypes(NamedTuple):
    """The dtypes for storing, reducing and updating a parameter."""

    param: torch.dtype
    comm: torch.dtype
    master: torch.dtype | None  # None: not trained
    is_sparse: bool = False  # only rows with gradients are sent


class UnitGroups(NamedTuple):
    """The ranks that hold the states of a parameter: see ``Unit``."""

    comm: Collectives
    replicas: Collectives
    twins: Collectives
    parts: Collectives


class UnitKind(NamedTuple):
    """The common properties of all parameters of a unit. Parameters of one optimizer group that differ in them get
    units of their own."""

    device: torch.device  # the device that computes with the parameters
    dtypes: Dtypes
    is_sharded: bool  # of the weights; masters are sharded if there is more than one shard
    placement: Placement
    groups: UnitGroups
    # Whether the parameters are cut over tensor-parallel ranks. Norms count each element once, and without copies the
    # groups of cut and whole parameters do not differ.
    is_cut: bool


def label_of(names: Sequence[str]) -> str:
    """A short text for a bucket with the parameters of these names, in order of registration."""
    return names[0] if len(names) == 1 else f"{names[0]} (+{len(names) - 1} more)"


class UnitPlan(NamedTuple):
    """A unit that has no buffers yet: nothing of its parameters has moved."""

    group: int  # index of the optimizer group
    params: list[tuple[str, int, torch.nn.Parameter]]  # (name, order of registration, parameter)
    kind: UnitKind
    bucket_elems: int  # the most elements of a bucket

    def layout(self) -> _C.ZeroLayout:
        numels = [shape_of(p).numel() for _, _, p in self.params]
        return _C.ZeroLayout(numels, self.kind.groups.comm.world_size, self.bucket_elems, ALIGN_ELEMS)

    def bucket_numels(self) -> list[int]:
        """Elements of each bucket, with padding."""
        return [n * self.kind.groups.comm.world_size for n in self.layout().slice_elems]

    def bucket_names(self) -> list[list[str]]:
        """Names of the parameters of each bucket, in order of registration."""
        layout = self.layout()
        names: list[list[str]] = [[] for _ in layout.bucket_begin]
        for (name, _, _), bucket in sorted(zip(self.params, layout.bucket_of), key=lambda place: place[0][1]):
            names[bucket].append(name)
        return names


class Fragment(NamedTuple):
    """The piece of one parameter that this rank owns."""

    slot: Slot
    begin: int  # first element within the parameter
    flat_begin: int  # first element within the unit's flat buffer
    shard_begin: int  # first element within this rank's shard
    numel: int


@dataclass(eq=False)
class Slot:
    """The place of one parameter in its unit."""

    param: torch.nn.Parameter
    name: str
    unit: Unit
    index: int  # position within the unit: the expected order of gradients
    order: int  # position within the model, in order of registration
    bucket: int  # bucket of the unit
    offset: int  # first element within the unit's flat buffer
    numel: int
    shape: torch.Size
    # Set by the gradient reducer: index of the parameter over all units.
    tracker_index: int = -1

    def __post_init__(self) -> None:
        # The stride of a dimension is the product of the sizes of all later dimensions.
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
        """A view of the parameter's elements in ``flat``. The first element of ``flat`` is element ``begin`` of the
        unit's flat buffer."""
        # One call instead of two (narrow and view), because every step makes it for every parameter.
        return flat.as_strided(self.shape, self._strides, flat.storage_offset() + self.offset - begin)


class Unit:
    """The parameters of one layout, and this rank's shard of their master weights.

    Weights are whole on every rank, or sharded. Whole weights lie in ``flat_param`` ([flat_elems], in the parameters'
    dtype), which is the storage of ``param.data`` of every member. If weights are sharded, a rank keeps
    ``weight_slices``, one slice of each bucket. If the slices are contiguous in memory, ``param_shard`` ([shard_elems])
    holds all of them. ``gather_unit.py`` gathers a bucket while it is used. If the slices lie in joint memory of the
    ranks (``joint``), every rank sees the whole bucket there without a gather.``master`` holds this rank's slice of
    each bucket, in fp32, or in the parameters' dtype if the optimizer updates parameters in that dtype. If the
    parameter is its own master, the slices are views of the weights, and no second copy exists.

    Masters, states and sharded weights are cut over the ranks of ``comm``: each rank has a slice of each bucket.
    ``replicas`` are the ranks with the same shard as this rank; each of them makes the same update. A parameter's
    gradient is the sum over the ranks of ``comm`` and ``replicas``. ``twins`` are the tensor-parallel ranks with the
    same shard of parameters that are not cut; their gradients are equal without a sum. ``parts`` are the ranks that
    together hold the logical tensors of this rank's parts.

    ``states`` and ``weights`` are the homes of masters with states, and of weights; both may be offloaded. Use
    ``master`` only within ``states.open(bucket)``, and ``weight_slices`` within ``weights.open(bucket)``.
    """

    def __init__(self, plan: UnitPlan, *, joins: bool = False) -> None:
        """joins: put sharded weights into joint memory of ``comm`` if there is room for them."""
        kind, params = plan.kind, plan.params
        dtypes, comm = kind.dtypes, kind.groups.comm
        self.group, self.is_sharded, self.device = plan.group, kind.is_sharded, kind.device
        states, weights = kind.placement.states, (kind.placement if self.is_sharded else ON_DEVICE).weights
        self.states: Home = states.make(states, self.device)
        self.weights: Home = weights.make(weights, self.device)
        self.dtype, self.comm_dtype, self.is_sparse = dtypes.param, dtypes.comm, dtypes.is_sparse
        self.master_dtype = dtypes.master or dtypes.param
        self.comm, self.replicas, self.twins, self.parts = kind.groups
        layout = plan.layout()
        # The attributes of the layout are read once, because each access makes a new list.
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
        """Whether the masters must be copied to the weights after an update. This is so if the weights lie in another
        memory, or if they have the masters' dtype but lie in a file of their own."""
        # If the dtypes are equal and no such copy is needed, the same memory holds masters and weights.
        self.master_is_param = not is_trained or (is_alike and not self.copies_up)
        self.flat_param: torch.Tensor | None = None
        self.param_shard: torch.Tensor | None = None
        self.weight_slices: list[torch.Tensor] = []
        self._unread: dict[int, list[tuple[Fragment, ReadRange]]] = {}  # by bucket: values that ``read_bucket`` reads
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
            # The slice of a bucket whose values are still in a file is made when the bucket is read.
            unread = {slot.bucket for slot in self.slots if isinstance(state_of(slot.param), UnreadShard)}
            self.weight_slices = [
                self.weights.new_zeros(0 if bucket in unread else n, self.dtype)
                for bucket, n in enumerate(self.slice_elems)
            ]
            self._unread = {bucket: [] for bucket in sorted(unread)}
        else:
            self.param_shard = self.weights.new_zeros(self.shard_elems, self.dtype)
            self.weight_slices = [self.shard_slice(self.param_shard, b) for b in range(self.n_buckets)]
        self._fill()
        self._versions: list[int] = []
        self.note_weights()

    def _fill(self) -> None:
        """Casts the members' weights into the buffers, and makes the master slices.

        Masters start from the weights as they were given, not from the weights rounded to 16 bits. Parameters are
        handled one at a time: the storage of a sharded parameter is freed before the next parameter is read. Collective
        if members are sharded already (``zero.Init``).
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
                fragment = self.fragment_of.get(slot)
                state = state_of(slot.param)
                if isinstance(state, UnreadShard):
                    self._fill_from_source(slot, fragment, state.read)
                    continue
                if slot.bucket in self._unread:
                    self._make_slice(slot.bucket)
                whole = whole_of(slot.param)
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
                del whole  # before the next parameter is gathered
                mine = None
            for bucket in range(self.n_buckets):
                self._make_master(bucket)  # also for buckets that hold only padding

    def _fill_from_source(self, slot: Slot, fragment: Fragment | None, read: ReadRange) -> None:
        """Reads the weights of one member that is not trained: this rank's piece, or all of it if weights are whole. A
        bucket that will live in a file is read when it moves there (``read_bucket``)."""
        if self.flat_param is not None:
            read(0, self.flat_param.narrow(0, slot.offset, slot.numel))
            take_over(slot.param, slot.view(self.flat_param))
            return
        take_over(slot.param, torch.empty(0, dtype=self.dtype, device=self.device))
        if fragment is None:
            return
        if slot.bucket in self._unread:
            self._unread[slot.bucket].append((fragment, read))
        else:
            read(fragment.begin, self.piece(self.weight_slices, fragment))

    def _make_slice(self, bucket: int) -> None:
        """Makes this rank's slice of a bucket of sharded weights, if it has not been made."""
        if self.weight_slices[bucket].numel() != self.slice_elems[bucket]:
            self.weight_slices[bucket] = self.weights.new_zeros(self.slice_elems[bucket], self.dtype)
            if self.master_is_param:
                self._master[bucket] = self.weight_slices[bucket]

    def read_bucket(self, bucket: int) -> None:
        """Reads the weights of a bucket whose values are still in a file. Called just before the bucket moves into its
        home, so that at most one bucket's weights are in memory."""
        reads = self._unread.pop(bucket, None)
        if reads is None:
            return
        self._make_slice(bucket)
        with torch.no_grad():
            for fragment, read in reads:
                read(fragment.begin, self.piece(self.weight_slices, fragment))

    def _make_master(self, bucket: int) -> None:
        """Makes a bucket's masters if each bucket's masters have memory of their own. A bucket's masters are made just
        before they are filled, while the given weights are freed one by one."""
        if not self.master_is_param and self.master[bucket].numel() != self.slice_elems[bucket]:
            self.master[bucket] = self.states.new_zeros(self.slice_elems[bucket], self.master_dtype)

    def label(self, bucket: int) -> str:
        """A name of this rank's part of a bucket, for messages."""
        if bucket not in self._labels:
            names = [slot.name for slot in self.bucket_slots[bucket] if slot in self.fragment_of]
            self._labels[bucket] = " to ".join(dict.fromkeys((names[0], names[-1]))) if names else "padding"
        return self._labels[bucket]

    def gather_label(self, bucket: int) -> str:
        """A name of a whole bucket, the same on all ranks: that of its first parameter, and the number of others."""
        return label_of([slot.name for slot in sorted(self.bucket_slots[bucket], key=lambda slot: slot.order)])

    @property
    def n_ranks(self) -> int:
        """The number of ranks over which the unit's gradients are summed."""
        return self.comm.world_size * self.replicas.world_size

    @property
    def carrier(self) -> Collectives:
        """The ranks that exchange the unit's buckets: the ranks that hold its shards if it is cut, otherwise the ranks
        that hold copies."""
        return self.comm if self.is_cut else self.replicas

    def new_zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros on the unit's device, in memory that suits collectives."""
        memory = self.carrier.allocate(numel * dtype.itemsize, self.device).view(dtype)
        if self.device.type == "cpu":
            flat.zero_([memory])  # by the threads that will update it: see ``Home.new_zeros``
            return memory
        return memory.zero_()

    @property
    def sums_in_place(self) -> bool:
        """Whether the unit's gradients need no reduction: no other rank has gradients to add, and the sums are kept
        where the gradients are."""
        return self.n_ranks == 1 and not self.states.is_apart

    @property
    def is_cut(self) -> bool:
        """Whether each rank has only a part of the unit's masters and states, and of its weights if they are sharded."""
        return self.comm.world_size > 1

    @property
    def speaks(self) -> bool:
        """Whether this rank's shard counts in sums over all ranks. If several ranks hold the same shard, only one of
        them counts it."""
        return self.copy_index == 0

    @property
    def n_copies(self) -> int:
        """How many ranks hold the same shard."""
        return self.replicas.world_size * self.twins.world_size

    @property
    def copy_index(self) -> int:
        """This rank's number among the ranks that hold the same shard."""
        return self.replicas.rank * self.twins.world_size + self.twins.rank

    @property
    def has_parts(self) -> bool:
        """Whether any of the unit's parameters is a part of a logical tensor that is cut over tensor-parallel ranks."""
        return any(slot.cut is not None for slot in self.slots)

    @property
    def master(self) -> list[torch.Tensor]:
        """This rank's masters, one slice a bucket, as the last step left them."""
        self.states.settle()
        return self._master

    @property
    def master_flat(self) -> torch.Tensor | None:
        """This rank's masters as one tensor; None if they are not contiguous or are the parameters themselves."""
        self.states.settle()
        return self._master_flat

    def bucket_numel(self, bucket: int) -> int:
        return self.slice_elems[bucket] * self.comm.world_size

    def bucket_bytes(self, bucket: int) -> int:
        """Bytes of the gathered weights of a bucket."""
        return self.bucket_numel(bucket) * self.dtype.itemsize

    def bucket_view(self, flat: torch.Tensor, bucket: int) -> torch.Tensor:
        """A view of bucket ``bucket`` in a flat buffer of the whole unit."""
        return flat.narrow(0, self.bucket_begin[bucket], self.bucket_numel(bucket))

    def piece_elems(self, bucket: int) -> int:
        """The number of elements that the home moves at once of a bucket's masters and states; 0: all."""
        return self.states.piece_elems(self.slice_elems[bucket])

    def own_slice(self, bucket_buffer: torch.Tensor, bucket: int) -> torch.Tensor:
        """This rank's slice of a buffer that holds one bucket."""
        n = self.slice_elems[bucket]
        # Every gather and reduction makes this view. ``narrow`` would take twice as long.
        return bucket_buffer.as_strided((n,), (1,), bucket_buffer.storage_offset() + self.comm.rank * n)

    def shard_slice(self, shard: torch.Tensor, bucket: int) -> torch.Tensor:
        """The slice of bucket ``bucket`` in a buffer that holds this rank's shard."""
        return shard.narrow(0, self.shard_offset[bucket], self.slice_elems[bucket])

    def param_slice(self, bucket: int) -> torch.Tensor:
        """This rank's slice of a bucket's weights."""
        if self.is_sharded:
            return self.weight_slices[bucket]
        return self.own_slice(self.bucket_view(self.flat_param, bucket), bucket)

    def piece(self, slices: Sequence[torch.Tensor], fragment: Fragment) -> torch.Tensor:
        """A view of a fragment's elements in ``slices``, a list of this rank's slices with one slice per bucket."""
        bucket = fragment.slot.bucket
        return slices[bucket].narrow(0, fragment.shard_begin - self.shard_offset[bucket], fragment.numel)

    def masters(self, bucket: int) -> list[Tagged]:
        """A bucket's masters; empty if the masters are the parameters themselves."""
        if self.master_is_param:
            return []
        name = f"masters of {self.label(bucket)}"
        return [Tagged(self.master[bucket], name, self.piece_elems(bucket), is_master=True)]

    @property
    def steps_ahead(self) -> bool:
        """Whether the host may update the unit's masters while backward runs. It may if they lie in host memory and are
        not the weights that backward reads."""
        return not self.master_is_param and (self.states.is_apart or self.device.type == "cpu")

    def master_bytes(self, bucket: int | None = None) -> int:
        """The bytes that masters (of one bucket, or of all) take in addition to the weights; 0 if the masters are the
        parameters themselves."""
        elems = self.shard_elems if bucket is None else self.slice_elems[bucket]
        return 0 if self.master_is_param else elems * self.master_dtype.itemsize

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights that this rank keeps."""
        return (self.shard_elems if self.is_sharded else self.flat_elems) * self.dtype.itemsize

    def describe(self) -> str:
        """A text for messages: the unit's size, dtypes, and the places of its weights and states."""
        return (
            f"weights {'sharded' if self.is_sharded else 'whole'}, {len(self.slots)} parameters,"
            f" {self.flat_elems} elements of {self.dtype} ({self.weights.label}), reduced in {self.comm_dtype},"
            f" masters in {self.master_dtype} ({self.states.label}); {self.n_buckets} buckets,"
            f" shard {self.comm.rank + 1} of {self.comm.world_size} with {self.shard_elems} elements,"
            f" copy {self.copy_index + 1} of {self.n_copies}"
        )

    def _weights_of(self, bucket: int) -> list[Tagged]:
        """A bucket's sharded weights. Empty for whole weights: they are read at any time, so they have no home."""
        if not self.is_sharded:
            return []
        return [Tagged(self.weight_slices[bucket], f"weights of {self.label(bucket)}")]

    def weight_piece(self, fragment: Fragment) -> torch.Tensor:
        """A fragment's elements of the weights, flat. Use it within ``weights.open``."""
        if self.is_sharded:
            return self.piece(self.weight_slices, fragment)
        return self.flat_param.narrow(0, fragment.flat_begin, fragment.numel)

    def weight_piece_at_hand(self, fragment: Fragment) -> torch.Tensor | None:
        """A fragment's elements of the weights, flat, if they may be used at any time; None if they live in a file."""
        return None if self.weights.needs_open(fragment.slot.bucket) else self.weight_piece(fragment)

    def slice_at_hand(self, bucket: int) -> torch.Tensor | None:
        """This rank's slice of a bucket's weights, if it may be used at any time; None if it lives in a file."""
        return None if self.weights.needs_open(bucket) else self.param_slice(bucket)

    def is_at_hand(self, bucket: int) -> bool:
        """Whether all tensors of a bucket may be used at any time: weights, masters and states."""
        return not (self.states.needs_open(bucket) or self.weights.needs_open(bucket))

    def master_piece(self, fragment: Fragment) -> torch.Tensor | None:
        """A fragment's elements of the masters, flat; None if the parameter is its own master. Use it within
        ``states.open``."""
        return None if self.master_is_param else self.piece(self.master, fragment)

    def put_master(self, fragment: Fragment, values: torch.Tensor) -> None:
        """Overwrites a fragment's elements of the masters with ``values`` (flat). Does nothing if the parameter is its
        own master."""
        if not self.master_is_param:
            with self.states.open(fragment.slot.bucket):
                self.piece(self.master, fragment).copy_(values)

    def copy_of_masters(self) -> torch.Tensor | None:
        """A copy of all masters, flat; None if the masters are the parameters themselves."""
        return None if self.master_is_param else torch.cat(self.master)

    def put_masters(self, values: torch.Tensor | None) -> None:
        """Overwrites all masters with a result of ``copy_of_masters``."""
        for bucket, mine in enumerate(self.master if values is not None else ()):
            mine.copy_(self.shard_slice(values, bucket))

    def copies(self, bucket: int) -> list[torch.Tensor]:
        """The weights that an update writes together with the masters: they are casts of the masters, in the same
        memory. Empty if the update does not write weights separately."""
        return [] if self.master_is_param or self.copies_up else [self.param_slice(bucket)]

    def copy_up(self, bucket: int) -> None:
        """Copies the masters to the weights if the update has not written the weights itself (``copies``)."""
        if self.copies_up:
            self.bring_weights(bucket)

    def copy_up_part(self, bucket: int, begin: int, masters: torch.Tensor) -> None:
        """As ``copy_up``, for the elements from ``begin`` on. The copy has ended on return, so ``masters`` may be used
        again."""
        if self.copies_up:
            self.param_slice(bucket).narrow(0, begin, masters.numel()).copy_(masters)

    def gather_weights(self, bucket: int, *, use_broadcast: bool = False, label: str = "") -> Work:
        """Sends this rank's slice of whole weights to all ranks. Collective. Does nothing for sharded weights, which
        are gathered when they are used."""
        if self.is_sharded:
            return Work.done()
        return self.comm.all_gather(self.bucket_view(self.flat_param, bucket), use_broadcast=use_broadcast, label=label)

    def bring_weights(self, bucket: int) -> None:
        """Writes the masters to the weights that forward uses: casts them, or copies them from one memory to the other.
        Masters and weights must be open."""
        if self.copies_up:
            # The copy may still run when the call returns. Unpinned memory has been staged by then. A pinned master is
            # not written to before gradients of the new weights have arrived.
            self.param_slice(bucket).copy_(self.master[bucket], non_blocking=self.states.is_apart)
        elif not self.master_is_param and self.slice_elems[bucket]:
            torch.ops.deepspeed_c.flat_cast_(self.master[bucket], self.param_slice(bucket))

    def refresh_master(self) -> None:
        """Overwrites the masters with the parameters' values, after somebody wrote to the parameters (e.g.
        ``load_state_dict``)."""
        if not self.master_is_param:
            for bucket in range(self.n_buckets):
                with self.states.open(bucket), self.weights.open(bucket, writes=False), torch.no_grad():
                    self.master[bucket].copy_(self.param_slice(bucket))
            self.note_weights()

    def note_weights(self) -> None:
        """Records that masters and weights agree now: earlier writes to the weights no longer count as edits."""
        if self._has_whole_copies:
            self._versions = [slot.param._version for slot in self.slots]

    @property
    def _has_whole_copies(self) -> bool:
        return self.flat_param is not None and not self.master_is_param

    def _edited(self, slots: Sequence[Slot]) -> list[Slot]:
        """The ``slots`` whose weights have been written to in place since the masters last agreed with them. Torch's
        version counter shows such writes, except for writes through ``.data``. Edits of sharded weights are handled in
        ``gathered.py``."""
        if not self._has_whole_copies:
            return []
        return [slot for slot in slots if slot.param._version != self._versions[slot.index]]

    def keep_edits(self, slots: Sequence[Slot]) -> None:
        """Copies edits in place of whole weights to the masters of ``slots``. An element counts as edited if it differs
        from its master rounded to the weights' dtype."""
        for bucket, edited in itertools.groupby(self._edited(slots), key=lambda slot: slot.bucket):
            with self.states.open(bucket), torch.no_grad():
                for slot in edited:
                    fragment = self.fragment_of.get(slot)
                    if fragment is not None:
                        master = self.piece(self.master, fragment)
                        weight = self.weight_piece(fragment).to(master.device)
                        is_other = weight != master.to(weight.dtype)  # also true for NaN, which does no harm
                        master.copy_(torch.where(is_other, weight.to(master.dtype), master))
                    self._versions[slot.index] = slot.param._version

    def ranges_of(self, slot: Slot) -> tuple[list[int], list[int]]:
        """The range of a parameter's elements in each rank's shard: (first element of each rank, count of each rank)."""
        begins, numels = [], []
        first, slice_elems = self.bucket_begin[slot.bucket], self.slice_elems[slot.bucket]
        for rank in range(self.comm.world_size):
            low = min(max(first + rank * slice_elems - slot.offset, 0), slot.numel)
            high = min(max(first + (rank + 1) * slice_elems - slot.offset, 0), slot.numel)
            begins.append(low)
            numels.append(high - low)
        return begins, numels

    def release(self) -> None:
        """Gives every parameter storage of its own again, so that the model can be used after the unit is gone."""
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


def plan_units(
    groups: Sequence[Sequence[torch.nn.Parameter]],
    names: dict[int, tuple[str, int]],
    *,
    groups_of: Callable[[torch.nn.Parameter], UnitGroups],
    bucket_elems: Callable[[int], int],
    dtypes_of: Callable[[str, torch.nn.Parameter], Dtypes],
    is_sharded: Callable[[torch.nn.Parameter], bool] = lambda param: False,
    placement_of: Callable[[torch.nn.Parameter], Placement] = lambda param: ON_DEVICE,
    device: torch.device | None = None,
) -> list[UnitPlan]:
    """Plans the units of all optimizer groups.

    Members lie in reverse order of registration. Backward produces their gradients in about that order, so that the
    first buckets fill first.

    names: ``id(param)`` -> (name, order of registration). bucket_elems: number of ranks that share a unit -> most
    elements of a bucket. dtypes_of: the dtypes of weights, reductions and masters. is_sharded: whether a parameter's
    weights are sharded; masters are sharded if the unit has more than one shard. groups_of: the ranks that hold the
    shards of a parameter, and the ranks that hold copies. placement_of: where a parameter's states and weights live.
    device: the device that computes with the parameters (default: each parameter's own).
    """
    units: list[UnitPlan] = []
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
            units.append(UnitPlan(index, members, kind, bucket_elems(n_shards)))
    return units
