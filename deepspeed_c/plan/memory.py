"""Plans the memory of one rank: lays the model out on the meta device with the engine's own objects, and runs them.

Layout, hooks, fetcher, reducer and collectives are those of an engine, among ranks that are not there (``ranks``). What
they borrow is counted by their pools. The model computes nothing (``outline``): its passes are autograd's all the same.
What only a step makes and moves is counted from what its objects say of themselves, in the engine's order: states,
their buffers and files, and what an update takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from typing_extensions import Self

from deepspeed_c import _C
from deepspeed_c.buffers import BufferPool
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.config import Config
from deepspeed_c.engine.precision import Precision
from deepspeed_c.engine.shard import make_reducer
from deepspeed_c.offload.place import placement_of
from deepspeed_c.offload.swap import whole_pages
from deepspeed_c.plan.book import Book, Phase
from deepspeed_c.plan.outline import outline_of
from deepspeed_c.plan.ranks import PretendedRanks
from deepspeed_c.plan.sizes import ModelSizes, OptimizerSizes, ParamSize
from deepspeed_c.zero.gradients.bucket import Bucket
from deepspeed_c.zero.gradients.reducer import GradientPools, GradientReducer
from deepspeed_c.zero.layout.layout import lay_out, mesh_of_config
from deepspeed_c.zero.layout.stages import STAGES
from deepspeed_c.zero.layout.unit import Dtypes, Slot, Unit
from deepspeed_c.zero.weights.fetch import keeps_gathered
from deepspeed_c.zero.weights.hooks import ModuleHooks

__all__ = ["KINDS", "PHASES", "MemoryPlan", "Offload", "plan_memory"]

PHASES = ("initialize", "forward", "backward", "step")

WEIGHTS = "weights"
MASTERS = "master weights"
STATE = "optimizer state"
GRADIENTS = "gradients"
GATHERED = "gathered weights"
STAGING = "gradient staging"
SCRATCH = "collective scratch"
INCOMING = "new gradients"
UPDATE = "step transients"
NEW_MASTERS = "new master weights"
COPIES = "copies before updates ahead"
SWAP = "swap buffers"
GIVEN = "weights as given"
BUFFERS = "module buffers"
ACTIVATIONS = "activations"

# What each kind of bytes is, in the order in which tables show them.
KINDS: dict[str, str] = {
    WEIGHTS: "what forward computes with: whole, or this rank's shard",
    MASTERS: "the weights that the optimizer updates, where they are not the weights themselves",
    STATE: "moments and the like",
    GRADIENTS: "sums of gradients: whole, or this rank's shard",
    GATHERED: "gather units of stage 3 that are put together, and buffers kept for the next ones",
    STAGING: "buckets whose gradients gather, or are on their way",
    SCRATCH: "what collectives receive into, and casts of what they send",
    INCOMING: "gradients of one module, as autograd hands them over",
    UPDATE: "copies that the optimizer makes in a step",
    NEW_MASTERS: "master weights until they are written to NVMe",
    COPIES: "masters and states as they were before updates during backward (super_offload)",
    SWAP: "what is read from NVMe, updated and written again, a bucket at a time",
    GIVEN: "the weights as they were given to initialize, until they are moved",
    BUFFERS: "buffers of modules",
    ACTIVATIONS: "what --activations says",
}

# Windows that are walked through: the first makes what later ones find in the pools.
N_WINDOWS = 3


class Offload(NamedTuple):
    """Where states live between their uses: "none" (on the device), "cpu" (in host memory) or "nvme", as in the
    configuration."""

    optimizer: str = "none"  # masters and optimizer state; gradients' sums are in host memory for both
    params: str = "none"  # the weights' shard (stage 3)
    kept_elems: int = 0  # of the weights' shard, in host memory although ``params`` is "nvme" (max_in_cpu)

    def kinds(self, stage: int, *, is_host: bool = False) -> dict[str, str]:
        """What lives elsewhere than on the device: "host" or "nvme" by kind. ``is_host``: the device is the host's
        processor, and has its memory."""
        found: dict[str, str] = {}
        if self.optimizer == "nvme":
            found |= {MASTERS: "nvme", STATE: "nvme"}
        elif self.optimizer == "cpu":
            found |= {MASTERS: "host", STATE: "host"}
        if self.optimizer != "none":
            found |= dict.fromkeys((GRADIENTS, UPDATE, NEW_MASTERS, COPIES, SWAP), "host")
        if self.params != "none" and STAGES[stage].parameters:
            found |= {WEIGHTS: "nvme" if self.params == "nvme" else "host", SWAP: "host"}
        return {kind: place for kind, place in found.items() if place == "nvme" or not is_host}

    def fits(self, stage: int) -> bool:
        """Whether the stage shards what is to be offloaded."""
        sharding = STAGES[stage]
        return (sharding.optimizer or self.optimizer == "none") and (sharding.parameters or self.params == "none")

    def __str__(self) -> str:
        places: dict[str, list[str]] = {}
        for name, place in (("optimizer", self.optimizer), ("parameters", self.params)):
            if place != "none":
                places.setdefault(place, []).append(name)
        return ", ".join(f"{' and '.join(names)} on {place}" for place, names in places.items()) or "none"


class MemoryPlan(NamedTuple):
    """What one rank holds at one stage."""

    stage: int
    n_ranks: int
    offload: Offload
    phases: dict[str, Phase]  # by name, in order
    n_buckets: int
    largest_unit: str  # of the gather units, or where there are none the buckets: its first parameter
    largest_unit_bytes: int
    window_elems: int  # most elements that the plan of gathers has live; 0 below stage 3

    @property
    def peak(self) -> Phase:
        """The phase that holds most."""
        return max(self.phases.values(), key=lambda phase: (phase.nbytes, phase.host_nbytes))


class _Policy:
    """The engine's precision, for parameters whose modules are not known: what they said stands in the sizes."""

    def __init__(self, precision: Precision, sizes: ModelSizes) -> None:
        self._precision = precision
        self._comm_dtype = {p.name: p.comm_dtype for p in sizes.params if p.comm_dtype is not None}

    def dtypes_of(self, name: str, param: torch.nn.Parameter) -> Dtypes:
        dtypes = self._precision.dtypes_of(name, param)
        comm_dtype = self._comm_dtype.get(name)
        return dtypes if comm_dtype is None else dtypes._replace(comm=comm_dtype)


def plan_memory(
    sizes: ModelSizes,
    config: Config,
    n_ranks: int,
    optimizer: OptimizerSizes | None,
    *,
    device_type: str = "cpu",
    offload: Offload = Offload(),  # noqa: B008  (immutable)
    activation_bytes: int = 0,
) -> MemoryPlan:
    """Bytes of one rank of ``n_ranks``, at the peak of each phase, for the stage that ``config`` names.

    ``optimizer`` None plans an engine that only evaluates. ``device_type`` decides how collectives work ("cpu": over
    gloo, anything else: as NCCL does) and whether gathered buffers are kept. ``activation_bytes`` are added to forward
    and backward. Nothing is allocated. Raises what ``initialize`` would raise for the same layout (ModelError).
    """
    with _Walk(sizes, config, n_ranks, optimizer, device_type, offload) as walk:
        walk.initialize()
        held = {ACTIVATIONS: activation_bytes}
        for _ in range(N_WINDOWS):
            walk.window(held)
        walk.book.end()
        if walk.fetcher is not None and walk.fetcher.groups:
            pieces = [(group.unit, group.bucket) for group in walk.fetcher.groups]
        else:
            pieces = [(bucket.unit, bucket.index) for bucket in walk.buckets]
        unit, index = max(pieces, key=lambda piece: piece[0].bucket_bytes(piece[1]), default=(None, 0))
        return MemoryPlan(
            config.zero.stage,
            n_ranks,
            offload,
            {name: walk.book.phases[name] for name in PHASES if name in walk.book.phases},
            len(walk.buckets),
            "" if unit is None else _label(unit.bucket_slots[index]),
            0 if unit is None else unit.bucket_bytes(index),
            0 if walk.fetcher is None else walk.fetcher.stats.max_live_elems,
        )


def _label(slots: Sequence[Slot]) -> str:
    first = min(slots, key=lambda slot: slot.order).name
    return first if len(slots) == 1 else f"{first} (+{len(slots) - 1} more)"


class _Walk:
    """One rank's run. A context manager, which takes away at its end what the run has hooked."""

    def __init__(
        self,
        sizes: ModelSizes,
        config: Config,
        n_ranks: int,
        optimizer: OptimizerSizes | None,
        device_type: str,
        offload: Offload,
    ) -> None:
        is_host = device_type == "cpu"
        places = offload.kinds(config.zero.stage, is_host=is_host)
        host, nvme = ({kind for kind, place in places.items() if place == name} for name in ("host", "nvme"))
        self.book = book = Book(host, nvme)
        self._sizes, self._config, self._n_ranks, self._optimizer = sizes, config, n_ranks, optimizer
        self._offload, self._is_host = offload, is_host
        self._sharding = STAGES[config.zero.stage]
        self._model, groups = outline_of(sizes, lambda n_bytes: book.take(INCOMING, n_bytes))
        self._precision = Precision(config, self._model)
        placement = placement_of(
            offload.optimizer,
            offload.params,
            is_apart=not is_host,
            is_pinned=False,
            buffer_elems=config.zero.offload_param.buffer_size,
        )
        comm = PretendedRanks(n_ranks, BufferPool(count=book.counter(SCRATCH)), is_host=is_host)
        mesh = mesh_of_config(config, Mesh(comm, connect=comm.along))
        layout = lay_out(
            self._model,
            groups if optimizer is not None else [],
            config,
            _Policy(self._precision, sizes),
            mesh,
            placement,
            gather_pool=BufferPool(keeps=lambda _: keeps_gathered(device_type), count=book.counter(GATHERED)),
        )
        self._trained, self._frozen, self.fetcher = layout.trained, layout.frozen, layout.fetcher
        self._swapped = [unit for unit in self._trained if unit.states.label == "file"]
        self._size_of = {p.name: p for p in sizes.params}
        placed = {slot.name for unit in (*self._trained, *self._frozen) for slot in unit.slots}
        self._cast = [p for p in sizes.params if p.name not in placed]  # what no unit holds
        self._has_state = False
        self._n_buffer_bytes = 0
        self._reducer: GradientReducer | None = None
        self._exit = ExitStack()
        self._exit.callback(mesh.close)
        if optimizer is not None:
            pools = GradientPools.make(lambda name: book.counter(STAGING if name == "staging" else SCRATCH))
            self._reducer = make_reducer(layout, config, self._precision, comm, pools)
            self._exit.callback(self._reducer.close)
            for slot in self._reducer.slots:  # after the reducer has taken it
                slot.param.register_post_accumulate_grad_hook(self._forget_gradient(slot))
        if self.fetcher is not None:
            hooks = ModuleHooks([self._model], self.fetcher, lambda: "train" if torch.is_grad_enabled() else "eval")
            self._exit.callback(hooks.remove)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    @property
    def buckets(self) -> Sequence[Bucket]:
        return [] if self._reducer is None else self._reducer.buckets

    def _forget_gradient(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        return lambda _: self.book.free(INCOMING, slot.numel * slot.unit.dtype.itemsize)

    def _place_of(self, unit: Unit) -> str | None:
        """Where a unit's states lie that stay on the device, although others may be offloaded (``ratio``); None for
        where their kinds lie."""
        return "device" if unit.states.label == "device" else None

    def _given_bytes(self, size: ParamSize) -> int:
        if not self._sizes.is_sharded:
            return size.numel * size.dtype.itemsize
        begin, end = _C.shard_range(size.numel, self._n_ranks, 0)
        return (end - begin) * size.dtype.itemsize

    def initialize(self) -> None:
        book = self.book
        book.begin("initialize")
        book.take(BUFFERS, self._sizes.buffer_bytes)
        given = {p.name: self._given_bytes(p) for p in self._sizes.params}
        for nbytes in given.values():
            book.take(GIVEN, nbytes)
        if self._sizes.is_sharded and not self._sharding.parameters:
            for p in self._sizes.params:  # gathered for good: these stages keep weights whole
                whole = p.numel * p.dtype.itemsize
                book.take(GIVEN, whole)
                book.free(GIVEN, given[p.name])
                given[p.name] = whole
        for unit in (*self._trained, *self._frozen):
            # Weights go to a file when all of them are there; those that are whole stay on the device.
            book.take(WEIGHTS, unit.weight_bytes, unit.weights.memory)
            if unit not in self._swapped:
                book.take(MASTERS, unit.master_bytes(), self._place_of(unit))
            missing = set(range(unit.n_buckets)) if unit in self._swapped else set()
            for slot in unit.slots:
                size = self._size_of[slot.name]
                is_put_together = self._sizes.is_sharded and self._sharding.parameters
                whole = size.numel * size.dtype.itemsize if is_put_together else 0
                book.take(GIVEN, whole)
                if (
                    slot.bucket in missing and slot in unit.fragment_of
                ):  # bucket by bucket, as the weights as given are let go of
                    missing.remove(slot.bucket)
                    book.take(NEW_MASTERS, unit.master_bytes(slot.bucket))
                book.free(GIVEN, whole + given[slot.name])
            book.take(NEW_MASTERS, sum(map(unit.master_bytes, missing)))
        for p in self._cast:
            dtype = (
                self._precision.dtype if self._precision.dtype is not None and p.dtype.is_floating_point else p.dtype
            )
            if dtype != p.dtype:
                book.take(WEIGHTS, p.numel * dtype.itemsize)
                book.free(GIVEN, given[p.name])
            else:
                book.free(GIVEN, given[p.name])
                book.take(WEIGHTS, given[p.name])
        self._swap_weights()
        if self._optimizer is None:
            return
        if self._offload.optimizer == "nvme":
            self._send_masters()
            self._take_buffers(self._swap_bytes(is_start=True))
            self._make_state(self._swapped)
        for unit in self._trained:
            book.take(GRADIENTS, self._reducer.sum_bytes[unit], self._place_of(unit))

    def _swap_weights(self) -> None:
        """What of the weights goes to a file, and the buffers that it is read into."""
        left, largest, n_stored = self._offload.kept_elems, 0, 0
        for group in () if self.fetcher is None else self.fetcher.groups:
            elems = group.unit.slice_elems[group.bucket]
            left -= elems
            if group.unit.weights.label == "file" and left < 0:
                nbytes = elems * group.unit.dtype.itemsize
                self.book.take(WEIGHTS, nbytes)
                self.book.free(WEIGHTS, nbytes, group.unit.weights.memory)
                largest = max(largest, whole_pages(nbytes))
                n_stored += 1
        # One in use, one on its way out where weights change, the others on their way in
        # (``offload.place.store_weights``).
        n_buffers = self._config.zero.offload_param.buffer_count
        n_buffers = max(n_buffers - 1, 1) if self._optimizer is None else max(n_buffers, 2)
        self.book.take(SWAP, min(n_buffers, n_stored) * largest)

    def _send_masters(self) -> None:
        """Each bucket's go through a buffer, in pieces where they are large, while the next ones are still in
        memory."""
        n_out, sent = self._n_buckets_out(), []
        for unit in (unit for unit in self._swapped if unit.master_bytes()):
            for bucket, elems in enumerate(unit.slice_elems):
                nbytes = unit.master_bytes(bucket)
                sent.append(whole_pages((unit.piece_elems(bucket) or elems) * unit.master_dtype.itemsize))
                self._take_buffers(max(sent) * min(1 + n_out, len(sent)))
                self.book.take(MASTERS, nbytes)
                self.book.free(NEW_MASTERS, nbytes)

    def _n_buckets_out(self) -> int:
        settings = self._config.zero.offload_optimizer
        return max(settings.buffer_count - 2, 1) if settings.pipeline_write else 0

    def _take_buffers(self, nbytes: int) -> None:
        """So many in all; none is given back."""
        self.book.take(SWAP, max(nbytes - self._n_buffer_bytes, 0))
        self._n_buffer_bytes = max(nbytes, self._n_buffer_bytes)

    def _swap_bytes(self, *, is_start: bool = False) -> int:
        """Host memory of the buffers: as many buckets as are in use, on their way in and on their way out
        (``offload.swap``). At the start states are made and written, and nothing is read."""
        n_in = 0 if is_start else int(self._config.zero.offload_optimizer.pipeline_read)
        largest = 0
        for unit in self._swapped:
            for bucket, elems in enumerate(unit.slice_elems):
                if self._optimizer.sees_slices:
                    elems = unit.piece_elems(bucket) or elems
                states = self._optimizer.states[unit.group]
                tensors = [nbytes for state in states for nbytes in state.tensor_bytes(elems, unit.master_dtype)]
                if unit.master_bytes() and not is_start:
                    tensors.append(elems * unit.master_dtype.itemsize)
                largest = max(largest, sum(whole_pages(nbytes) for nbytes in tensors))
        n_buckets = sum(unit.n_buckets for unit in self._swapped)
        return largest * min(1 + n_in + self._n_buckets_out(), n_buckets)

    def window(self, held: dict[str, int]) -> None:
        """Micro-batches until a step, as many as differ in what they take."""
        n = 2 if self._optimizer is not None and _accumulates(self._config) else 1
        for i in range(n):
            self.book.begin("forward", held)
            with torch.set_grad_enabled(self._optimizer is not None):
                loss = self._model(torch.zeros(1, device="meta"))
            if self._reducer is not None:
                self.book.begin("backward", held)
                self._reducer.begin_backward(is_boundary=i == n - 1, factor=1.0, starts=[loss.grad_fn])
                loss.backward()
                self._reducer.end_backward()
            del loss
        if self._reducer is not None:
            self.book.begin("step")
            self.step()

    def step(self) -> None:
        self._reducer.discard()  # waits for what is on its way
        if not self._has_state:
            self._has_state = True
            # The others' were made along with their file.
            self._make_state(unit for unit in self._trained if unit not in self._swapped)
            if self._config.zero.offload_optimizer.super_offload:
                self._copy_states()
        if self._offload.optimizer == "nvme":
            self._take_buffers(self._swap_bytes())
        transient = self._copies_of_gradients() + self._largest_update()
        self.book.take(UPDATE, transient)
        self.book.free(UPDATE, transient)
        if self.fetcher is not None:
            self.fetcher.weights_changed()

    def _make_state(self, units: Iterable[Unit]) -> None:
        for unit in units:
            self.book.take(STATE, self._state_bytes(unit), self._place_of(unit))

    def _state_bytes(self, unit: Unit) -> int:
        pieces = unit.slice_elems if self._optimizer.sees_slices else [f.numel for f in unit.fragments]
        states = self._optimizer.states[unit.group]
        return sum(sum(state.tensor_bytes(elems, unit.master_dtype)) for state in states for elems in pieces)

    def _copy_states(self) -> None:
        """At most: buckets that backward comes to last are never updated ahead."""
        for unit in self._trained:
            if unit.master_bytes() and (unit.states.is_apart or self._is_host):
                self.book.take(COPIES, unit.master_bytes() + self._state_bytes(unit))

    def _copies_of_gradients(self) -> int:
        """Bytes of the gradients that another optimizer than ours gets in its own dtype."""
        if self._optimizer.is_fused:
            return 0
        return sum(
            unit.shard_elems * unit.master_dtype.itemsize
            for unit in self._trained
            if self._reducer.sum_dtype(unit) != unit.master_dtype
        )

    def _largest_update(self) -> int:
        """Bytes that the update of one entry takes beside its states: torch's loops make up to two temporaries of its
        size; whole matrices are put together in fp32."""
        largest = 0
        for unit in self._trained:
            for b in range(unit.n_buckets):
                if self._optimizer.is_fused:
                    puts_together = unit.group in self._optimizer.matrix_groups
                    matrices = [f.slot.numel for f in unit.fragments if puts_together and f.slot.bucket == b]
                    nbytes = 4 * unit.bucket_numel(b) if puts_together else 0
                    nbytes += self._optimizer.update_bytes(matrices, on_host=self._is_host)
                else:
                    nbytes = 2 * unit.slice_elems[b] * unit.master_dtype.itemsize
                largest = max(largest, nbytes)
        return largest


def _accumulates(config: Config) -> bool:
    steps = config.gradient_accumulation_steps
    return isinstance(steps, int) and steps > 1
