"""A unit: the flat buffers of all parameters that share an optimizer group, a dtype and a reduction dtype.

Everything that the engine does per step is done on a unit's buckets and slices, so its cost does not depend on how many
parameters a model is cut into. Where an element lies is decided by the C core ``csrc/zero`` (see ``dsc/zero.h``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from deepspeed_c import _C
from deepspeed_c.errors import ModelError
from deepspeed_c.ops import flat
from deepspeed_c.zero.sharded import shape_of, take_over, whole_of
from deepspeed_c.zero.store import StateStore, Tagged

__all__ = ["ALIGN_ELEMS", "ON_DEVICE", "SWAP_ELEMS", "Dtypes", "Fragment", "Placement", "Slot", "Unit", "build_units"]

# Every parameter and every slice starts on a 64-byte line, whatever the element is (16 f32 or 32 16-bit elements).
ALIGN_ELEMS = 32

# Most elements of masters and states that are swapped at once: read, updated and written (16 MiB of fp32).
SWAP_ELEMS = 4 << 20

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Dtypes(NamedTuple):
    """What a parameter is stored, reduced and updated in."""

    param: torch.dtype
    comm: torch.dtype
    master: torch.dtype | None  # None: not trained
    is_sparse: bool = False  # rows that were not touched are not sent


class Placement(NamedTuple):
    """Which states lie in host memory while the device computes, apart from the device's own (on a host that computes there is no such memory), and which lie
    in a file between their uses: of those each bucket's have memory of their own."""

    states: bool = False  # masters, moments, and the sums of gradients
    params: bool = False  # the weights' shard (stage 3)
    is_pinned: bool = False
    swaps_states: bool = False
    swaps_params: bool = False


ON_DEVICE = Placement()


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
    index: int  # position within the unit, which is the order in which gradients are expected
    order: int  # position within the model, in order of registration
    bucket: int  # bucket of the unit
    offset: int  # first element within the unit's flat buffer
    numel: int
    shape: torch.Size
    # Filled by the gradient reducer: index of the parameter and of its bucket over all units.
    tracker_index: int = -1

    def view(self, flat: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """The parameter's place in ``flat``, whose first element is element ``begin`` of the unit's flat buffer."""
        return flat.narrow(0, self.offset - begin, self.numel).view(self.shape)


class Unit:
    """The parameters of one layout, and this rank's shard of their master weights.

    The weights themselves are either whole on every rank, ``flat_param`` ([flat_elems], the parameters' dtype) backing ``param.data`` of every member, or
    sharded: ``weight_slices`` (one of each bucket, together ``param_shard``, [shard_elems], where they lie in memory) are then all that is kept, and a bucket is
    put together while it is used (``gather_unit.py``).
    ``master`` holds this rank's slice of each bucket, in fp32 (or in the parameters' own dtype when that is what is trained); where the master is the
    parameter itself, the slices are views of the weights and no second copy exists.

    ``placement`` says what of it lies in host memory. Whoever uses ``master`` does so within ``resident(bucket)``, and whoever uses ``weight_slices`` within
    ``weights(bucket)``: they may be away (offload).
    """

    def __init__(
        self,
        group: int,
        params: Sequence[tuple[str, int, torch.nn.Parameter]],
        *,
        n_shards: int,
        shard_rank: int,
        bucket_elems: int,
        dtypes: Dtypes,
        is_sharded: bool = False,
        placement: Placement = ON_DEVICE,
        device: torch.device | None = None,
    ) -> None:
        self.group, self.is_sharded, self.placement = group, is_sharded, placement
        self.device = device or params[0][2].device
        self.resident: Callable[[int], AbstractContextManager] = lambda bucket: nullcontext()
        self.dtype, self.comm_dtype, self.is_sparse = dtypes.param, dtypes.comm, dtypes.is_sparse
        self.master_dtype = dtypes.master or dtypes.param
        self.n_shards, self.shard_rank = n_shards, shard_rank
        layout = _C.ZeroLayout([shape_of(p).numel() for _, _, p in params], n_shards, bucket_elems, ALIGN_ELEMS)
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
        fragments: list[tuple[int, int, int, int, int]] = layout.fragments(shard_rank)
        self.fragments = [Fragment(self.slots[i], *rest) for i, *rest in fragments]
        self.fragment_of: dict[Slot, Fragment] = {f.slot: f for f in self.fragments}

        is_trained, is_alike = dtypes.master is not None, self.master_dtype == self.dtype
        is_apart = placement.states != (placement.params and is_sharded)
        self.copies_up = is_trained and (is_apart or (is_alike and self.swaps_weights))
        """Updated weights have to be copied from the masters: they lie in another memory, or in a file of their own and in the masters' dtype."""
        # Elsewhere one copy serves as both where dtypes allow.
        self.master_is_param = not is_trained or (is_alike and not self.copies_up)
        self.flat_param: torch.Tensor | None = None
        self.param_shard: torch.Tensor | None = None
        self.weight_slices: list[torch.Tensor] = []
        self._weight_store: StateStore | None = None
        self._stored_weights: dict[int, list[Tagged]] = {}  # by bucket
        self._open_weights: set[int] = set()
        if not is_sharded:
            self.flat_param = self._zeros(self.flat_elems, self.dtype)
        elif placement.swaps_params:
            self.weight_slices = [self._zeros(n, self.dtype, on_host=placement.params) for n in self.slice_elems]
        else:
            self.param_shard = self._zeros(self.shard_elems, self.dtype, on_host=placement.params)
            self.weight_slices = [self.shard_slice(self.param_shard, b) for b in range(self.n_buckets)]
        self._fill()
        self._versions: list[int] = []
        self.note_weights()

    def _zeros(self, numel: int, dtype: torch.dtype, *, on_host: bool = False) -> torch.Tensor:
        if self.device.type == "meta" or not (on_host or self.device.type == "cpu"):
            return torch.zeros(numel, dtype=dtype, device=self.device)
        # Zeroed by the threads that will update it: a page lies in the NUMA node of the thread that touches it first.
        memory = torch.empty(numel, dtype=dtype, pin_memory=self.placement.is_pinned and self.device.type != "cpu")
        flat.zero_([memory])
        return memory

    def new_states(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros where this unit's states lie."""
        return self._zeros(numel, dtype, on_host=self.placement.states)

    def _fill(self) -> None:
        """Moves the members' weights into the buffers, casting them, and makes the master slices.

        Masters start from the weights as they were given, not from their 16-bit image. One parameter at a time: a sharded one's own storage is
        given up before the next is looked at. Collective where members are sharded already (``zero.Init``).
        """
        with torch.no_grad():
            self.master: list[torch.Tensor] = []
            self.master_flat: torch.Tensor | None = None  # all of them, where they lie together and are no parameters
            if self.master_is_param:
                self.master = [self.param_slice(b) for b in range(self.n_buckets)]
            elif self.placement.swaps_states:
                self.master = [self.new_states(0, self.master_dtype) for _ in self.slice_elems]
            else:
                self.master_flat = self.new_states(self.shard_elems, self.master_dtype)
                self.master = [self.shard_slice(self.master_flat, b) for b in range(self.n_buckets)]
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
                self._make_master(bucket)  # those of nothing but padding

    def _make_master(self, bucket: int) -> None:
        """Where each bucket's masters have memory of their own, they are made when they are filled: the weights as given are let go of on the way."""
        if self.master[bucket].numel() != self.slice_elems[bucket]:
            self.master[bucket] = self.new_states(self.slice_elems[bucket], self.master_dtype)

    def label(self, bucket: int) -> str:
        """What of a bucket this rank owns, for messages."""
        names = [slot.name for slot in self.bucket_slots[bucket] if slot in self.fragment_of]
        return f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0] if names else "padding"

    # -- places -----------------------------------------------------------------------------------------------------

    def bucket_numel(self, bucket: int) -> int:
        return self.slice_elems[bucket] * self.n_shards

    def bucket_view(self, flat: torch.Tensor, bucket: int) -> torch.Tensor:
        """Bucket of a flat buffer of the whole unit."""
        return flat.narrow(0, self.bucket_begin[bucket], self.bucket_numel(bucket))

    def piece_elems(self, bucket: int) -> int:
        """How many elements of a bucket's masters and states are moved at once, where they are swapped and a parameter is larger than that; 0: all."""
        return SWAP_ELEMS if self.placement.swaps_states and self.slice_elems[bucket] > SWAP_ELEMS else 0

    def own_slice(self, bucket_buffer: torch.Tensor, bucket: int) -> torch.Tensor:
        """This rank's slice of a buffer that holds one bucket."""
        n = self.slice_elems[bucket]
        return bucket_buffer.narrow(0, self.shard_rank * n, n)

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

    # -- weights that live elsewhere --------------------------------------------------------------------------------

    @property
    def swaps_weights(self) -> bool:
        return self.placement.swaps_params and self.is_sharded

    def store_weights(self, bucket: int, store: StateStore) -> None:
        """From now on the weights of a bucket live in ``store``."""
        self._weight_store = store
        self._stored_weights[bucket] = [Tagged(self.weight_slices[bucket], f"weights of {self.label(bucket)}")]
        store.send(self._stored_weights[bucket])

    def has_stored_weights(self, bucket: int) -> bool:
        return bucket in self._stored_weights

    @contextmanager
    def weights(self, bucket: int, *, reads: bool = True, writes: bool = False) -> Iterator[None]:
        """Within it this rank's slice of a bucket's weights is in memory; may be nested. Without ``reads`` it holds anything, to be overwritten; without ``writes``
        changes are lost."""
        if bucket not in self._stored_weights or bucket in self._open_weights:
            yield
            return
        tagged = self._stored_weights[bucket]
        self._weight_store.bring(tagged, reads=reads)
        self._open_weights.add(bucket)
        try:
            yield
        finally:
            self._open_weights.remove(bucket)
            if writes:
                self._weight_store.send(tagged)
            else:
                self._weight_store.let_go(tagged)

    def read_weights_ahead(self, bucket: int) -> None:
        """Starts to read what ``weights`` will give."""
        if bucket in self._stored_weights and bucket not in self._open_weights:
            self._weight_store.prefetch(self._stored_weights[bucket])

    def weight_piece(self, fragment: Fragment) -> torch.Tensor:
        """A fragment's elements of the weights, flat, within ``weights``."""
        if self.is_sharded:
            return self.piece(self.weight_slices, fragment)
        return self.flat_param.narrow(0, fragment.flat_begin, fragment.numel)

    # -- upkeep -----------------------------------------------------------------------------------------------------

    def refresh_master(self) -> None:
        """Takes the masters anew from the parameters (after somebody wrote to them, e.g. ``load_state_dict``)."""
        if not self.master_is_param:
            for bucket in range(self.n_buckets):
                with self.resident(bucket), self.weights(bucket), torch.no_grad():
                    self.master[bucket].copy_(self.param_slice(bucket))
            self.note_weights()

    def note_weights(self) -> None:
        """Masters and weights agree now: what has been written to the weights before is no edit."""
        if self._has_whole_copies:
            self._versions = [slot.param._version for slot in self.slots]

    @property
    def _has_whole_copies(self) -> bool:
        return self.flat_param is not None and not self.master_is_param

    def edited(self, slots: Sequence[Slot]) -> list[Slot]:
        """Those of ``slots`` that somebody has written to in place, and whose masters do not know of it. Torch counts such writes; those through
        ``.data`` it does not, and sharded weights have ways of their own (``gathered.py``)."""
        if not self._has_whole_copies:
            return []
        return [slot for slot in slots if slot.param._version != self._versions[slot.index]]

    def keep_edits(self, slots: Sequence[Slot]) -> None:
        """The masters of edited slots take over the elements that differ from what their own rounding gives. Within ``resident``."""
        with torch.no_grad():
            for slot in slots:
                fragment = self.fragment_of.get(slot)
                if fragment is not None:
                    master = self.piece(self.master, fragment)
                    weight = self.weight_piece(fragment).to(master.device)
                    is_other = weight != master.to(weight.dtype)  # true for NaN, which is no harm
                    master.copy_(torch.where(is_other, weight.to(master.dtype), master))
                self._versions[slot.index] = slot.param._version

    def ranges_of(self, slot: Slot) -> tuple[list[int], list[int]]:
        """Which elements of a parameter each rank's shard holds: (first ones, counts), by rank."""
        begins, numels = [], []
        first, slice_elems = self.bucket_begin[slot.bucket], self.slice_elems[slot.bucket]
        for rank in range(self.n_shards):
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
        self.master_flat = None
        self.flat_param = self.param_shard = None
        self.weight_slices.clear()
        self._stored_weights.clear()
        self._weight_store = None


def build_units(
    groups: Sequence[Sequence[torch.nn.Parameter]],
    names: dict[int, tuple[str, int]],
    *,
    n_shards: int,
    shard_rank: int,
    bucket_elems: int,
    dtypes_of: Callable[[str, torch.nn.Parameter], Dtypes],
    is_sharded: Callable[[torch.nn.Parameter], bool] = lambda param: False,
    placement_of: Callable[[torch.nn.Parameter], Placement] = lambda param: ON_DEVICE,
    device: torch.device | None = None,
) -> list[Unit]:
    """Makes the units of all optimizer groups.

    ``names`` maps ``id(param)`` to (name, order of registration). Members are laid out in reverse order of registration, which is about the order
    in which backward produces their gradients, so that the first buckets fill first.
    ``dtypes_of(name, param)`` gives the dtypes of the weights, of what is reduced, and of the masters; ``is_sharded(param)`` whether its weights are
    (masters are, wherever ``n_shards`` is more than 1); ``placement_of(param)`` where they lie. ``device`` computes with them (default: where each is).
    """
    units: list[Unit] = []
    for index, group in enumerate(groups):
        by_kind: dict[tuple, list[tuple[str, int, torch.nn.Parameter]]] = {}
        for p in group:
            name, order = names[id(p)]
            dtypes = dtypes_of(name, p)
            if p.requires_grad and dtypes.param not in SUPPORTED_DTYPES:
                raise ModelError(
                    f"trainable parameter has dtype {dtypes.param}; the optimizer step works on fp32, bf16 and fp16",
                    where=name,
                    fix="cast the parameter, or freeze it with requires_grad_(False)",
                )
            by_kind.setdefault((device or p.device, dtypes, is_sharded(p), placement_of(p)), []).append(
                (name, order, p)
            )
        for (of_kind, dtypes, sharded, placement), members in by_kind.items():
            members.sort(key=lambda member: -member[1])
            units.append(
                Unit(
                    index,
                    members,
                    n_shards=n_shards,
                    shard_rank=shard_rank,
                    bucket_elems=bucket_elems,
                    dtypes=dtypes,
                    is_sharded=sharded,
                    placement=placement,
                    device=of_kind,
                )
            )
    return units
