"""Plans the memory of one rank: builds the engine's own objects for the model on the meta device, and runs them.

Layout, hooks, fetcher, reducer, collectives, homes and swap files are the engine's own classes, but their ranks and
files are pretended (``pretended``). Their buffer pools count the memory that they use. The model computes nothing
(``outline``), but its forward and backward run through autograd. The remaining memory is added up in the engine's
order, from the sizes of the objects: weights as given, master weights, optimizer states, and the memory of an update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch

from deepspeed_c import _C
from deepspeed_c.buffers import BufferPool
from deepspeed_c.comm.transports.gloo import Gloo
from deepspeed_c.comm.transports.torch_backend import TorchBackend
from deepspeed_c.comm.transports.transport import Transport
from deepspeed_c.comm.work import Work
from deepspeed_c.config import Config
from deepspeed_c.config.parallel import Comm
from deepspeed_c.config.stages import STAGES
from deepspeed_c.config.zero import Zero
from deepspeed_c.engine.precision import Precision
from deepspeed_c.engine.shard import make_reducer
from deepspeed_c.offload.place import groups_in_file, placement_of, store_states, store_weights
from deepspeed_c.offload.swap import Swapper, SwapSettings
from deepspeed_c.ops.q8 import BLOCK_ELEMS
from deepspeed_c.plan.batch import BatchGathers, PipelineBatch
from deepspeed_c.plan.book import Book, Phase
from deepspeed_c.plan.computing import NO_WORK, Computing, ModuleWork
from deepspeed_c.plan.generation import GenerationMoment
from deepspeed_c.plan.outline import outline_of
from deepspeed_c.plan.pretended import PretendedFile, PretendedRanks, PretendedSharedMemory, pretended_mesh
from deepspeed_c.plan.recorded import Recorder
from deepspeed_c.plan.sizes import ModelSizes, OptimizerSizes, ParamSize
from deepspeed_c.zero.gradients.bucket import Bucket, GradientPools
from deepspeed_c.zero.gradients.reducer import GradientReducer
from deepspeed_c.zero.layout.experts import check_experts
from deepspeed_c.zero.layout.layout import lay_out
from deepspeed_c.zero.layout.unit import Dtypes, Slot, Unit
from deepspeed_c.zero.states.home import MakeZeros, Tagged
from deepspeed_c.zero.weights.drivers.lease import Lease
from deepspeed_c.zero.weights.fetch import keeps_gathered
from deepspeed_c.zero.weights.hooks import ModuleHooks

__all__ = [
    "KINDS",
    "PHASES",
    "Activations",
    "LeasePlan",
    "MemoryPlan",
    "Offload",
    "RankWalk",
    "plan_memory",
]

PHASES = ("initialize", "forward", "backward", "batch", "step", "generate")
"""In order. A pipeline has "batch" in place of "forward" and "backward", which alternate there."""

WEIGHTS = "weights"
MASTERS = "master weights"
STATE = "optimizer state"
GRADIENTS = "gradients"
GATHERED = "gathered weights"
SECOND = "second shards"
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
PASSING = "tensors on the way"
HEAP = "holes in the heap"
HOST_ACTIVATIONS = "activations that wait on the host"
NVME_ACTIVATIONS = "activations that wait on NVMe"
CACHE = "keys and values"
WORKSPACE = "workspace of a forward"

# The kinds of bytes with their meanings, in the order of the printed table.
KINDS: dict[str, str] = {
    WEIGHTS: "what forward computes with: whole, or this rank's shard",
    MASTERS: "the weights that the optimizer updates, where they are not the weights themselves",
    STATE: "moments and the like",
    GRADIENTS: "sums of gradients: whole, or this rank's shard",
    SECOND: "copies of weights for gathers within hosts (hpZ), if a host has as many ranks as share them",
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
    ACTIVATIONS: "what layers keep for the backward, and one of them computes again",
    PASSING: "results of operators that no backward needs, at their peak",
    HEAP: "freed blocks that the C library keeps, because no later tensor fits (CPU)",
    HOST_ACTIVATIONS: "inputs of recomputed layers (cpu_checkpointing)",
    NVME_ACTIVATIONS: "inputs of recomputed layers (activation_checkpointing.offload)",
    CACHE: "of all tokens so far, for the next one (generate)",
    WORKSPACE: "what a forward of generate computes, and the logits from which a token is drawn",
}

# Number of accumulation windows to run. The first window makes the buffers that later windows take from the pools.
N_WINDOWS = 3


class Activations(NamedTuple):
    """Peak bytes of activations. They are added to the memory of the engine's objects."""

    forward: int = 0
    backward: int = 0
    host: int = 0
    nvme: int = 0
    passing: tuple[int, int] = (0, 0)  # in forward and backward
    heap: int = 0

    def held(self, phase: str) -> dict[str, int]:
        """Bytes of activations by kind, in a phase."""
        kept, passing = (self.forward, self.passing[0]) if phase == "forward" else (self.backward, self.passing[1])
        return {
            ACTIVATIONS: kept,
            PASSING: passing,
            HEAP: self.heap,
            HOST_ACTIVATIONS: self.host,
            NVME_ACTIVATIONS: self.nvme,
        }


class Offload(NamedTuple):
    """Where states live between their uses: "none" (on the device), "cpu" (in host memory) or "nvme", as in the
    configuration."""

    optimizer: str = "none"  # master weights and state; for "cpu" and "nvme" the sums of gradients are on the host
    params: str = "none"  # the weights' shard (stage 3)
    kept_elems: int = 0  # elements of the shard that stay on the host with params "nvme" (max_in_cpu)

    @classmethod
    def of(cls, zero: Zero) -> Offload:
        """The offload that a configuration asks for."""
        states, params = zero.offload_optimizer, zero.offload_param
        return cls(states.device, params.device, params.max_in_cpu if params.device == "nvme" else 0)

    def kinds(self, stage: int, *, is_host: bool = False) -> dict[str, str]:
        """The place, "host" or "nvme", of each kind that does not live on the device. ``is_host``: the device is the
        CPU, with the host's memory."""
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
        """Whether the stage shards the states of this offload."""
        sharding = STAGES[stage]
        return (sharding.optimizer or self.optimizer == "none") and (sharding.parameters or self.params == "none")

    def __str__(self) -> str:
        places: dict[str, list[str]] = {}
        for name, place in (("optimizer", self.optimizer), ("parameters", self.params)):
            if place != "none":
                places.setdefault(place, []).append(name)
        return ", ".join(f"{' and '.join(names)} on {place}" for place, names in places.items()) or "none"


class LeasePlan(NamedTuple):
    """What a lease on whole weights (``drivers/lease.py``) is in this layout."""

    is_taken: bool
    elems: int  # elements of all gather units
    nbytes: int  # the memory that they take while they are gathered; 0 in joint memory
    max_elems: int  # stage3_max_live_parameters


class MemoryPlan(NamedTuple):
    """The memory of one rank at one stage."""

    stage: int
    n_ranks: int
    offload: Offload
    phases: dict[str, Phase]  # by name, in order
    n_buckets: int
    largest_unit: str  # first parameter of the largest gather unit, or of the largest bucket
    largest_unit_bytes: int
    window_elems: int  # most elements that training gathers at the same time; 0 below stage 3
    lease: LeasePlan | None = None  # None if no weights are sharded
    batch: BatchGathers | None = None  # of a pipeline whose weights are sharded

    @property
    def peak(self) -> Phase:
        """The phase with the most bytes."""
        return max(self.phases.values(), key=lambda phase: (phase.nbytes, phase.host_nbytes))

    @property
    def saved_bytes(self) -> int:
        """The rank's bytes in a checkpoint: weights, masters and optimizer state. Ranks share out the tensors that each
        of them holds whole. 0 for an engine that only evaluates."""
        if "step" not in self.phases:
            return 0
        kinds, sharding = self.phases["step"].kinds, STAGES[self.stage]
        is_cut = {WEIGHTS: sharding.parameters, MASTERS: sharding.optimizer, STATE: sharding.optimizer}
        return sum(kinds.get(kind, 0) // (1 if cut else self.n_ranks) for kind, cut in is_cut.items())


class _Policy:
    """The engine's precision policy for parameters whose modules do not exist here: the sizes record the dtypes that
    modules ask for."""

    def __init__(self, precision: Precision, sizes: ModelSizes) -> None:
        self._precision = precision
        self._comm_dtype = {p.name: p.comm_dtype for p in sizes.params if p.comm_dtype is not None}

    def dtypes_of(self, name: str, param: torch.nn.Parameter) -> Dtypes:
        dtypes = self._precision.dtypes_of(name, param)
        comm_dtype = self._comm_dtype.get(name)
        return dtypes if comm_dtype is None else dtypes._replace(comm=comm_dtype)


def _transport(section: Comm, *, is_host: bool) -> Transport:
    """How ranks exchange tensors. It is not known yet which ranks share a host. If ranks may share a host, the larger
    of both memory needs is planned."""
    if not is_host:
        return TorchBackend("nccl")
    return PretendedSharedMemory() if section.local == "shm" else Gloo()


def plan_memory(
    sizes: ModelSizes,
    config: Config,
    n_ranks: int,
    optimizer: OptimizerSizes | None,
    *,
    device_type: str = "cpu",
    activations: Activations = Activations(),  # noqa: B008  (immutable)
    generation: GenerationMoment | None = None,
) -> MemoryPlan:
    """The memory of one of ``n_ranks`` ranks at the peak of each phase, for the stage of ``config``.

    ``optimizer`` None plans an engine that only evaluates. ``device_type`` determines the backend of collectives
    ("cpu": gloo, unless "comm.local" is "shm"; other devices: like NCCL) and whether gathered buffers are kept.
    ``activations`` are added to forward and backward. With ``generation``, the rank generates between steps. Nothing is
    allocated. Raises ModelError if ``initialize`` would raise it for the same layout.
    """
    with ExitStack() as at_end:
        walk = RankWalk(sizes, config, n_ranks, optimizer, device_type, at_end)
        walk.initialize()
        for _ in range(N_WINDOWS):
            walk.window(activations)
        window_elems = 0 if walk.fetcher is None else walk.fetcher.stats.max_live_elems
        if generation is not None:
            walk.generate(generation)
            walk.window(activations)  # beside the buffers that the lease leaves in the pool
            walk.generate(generation)
        walk.book.end()
        if walk.fetcher is not None and walk.fetcher.groups:
            pieces = [(group.unit, group.bucket) for group in walk.fetcher.groups]
        else:
            pieces = [(bucket.unit, bucket.index) for bucket in walk.buckets]
        unit, index = max(pieces, key=lambda piece: piece[0].bucket_bytes(piece[1]), default=(None, 0))
        return MemoryPlan(
            config.zero.stage,
            n_ranks,
            walk.offload,
            {name: walk.book.phases[name] for name in PHASES if name in walk.book.phases},
            len(walk.buckets),
            "" if unit is None else unit.gather_label(index),
            0 if unit is None else unit.bucket_bytes(index),
            window_elems,
            walk.lease,
            walk.batch,
        )


class RankWalk:
    """The run of one rank. ``at_end`` removes the run's hooks. work: the times of the rank's computations."""

    def __init__(
        self,
        sizes: ModelSizes,
        config: Config,
        n_ranks: int,
        optimizer: OptimizerSizes | None,
        device_type: str,
        at_end: ExitStack,
        work: ModuleWork = NO_WORK,
    ) -> None:
        is_host = device_type == "cpu"
        self.offload = offload = Offload.of(config.zero)
        places = offload.kinds(config.zero.stage, is_host=is_host)
        host, nvme = ({kind for kind, place in places.items() if place == name} for name in ("host", "nvme"))
        self.book = book = Book(host | {HOST_ACTIVATIONS}, nvme | {NVME_ACTIVATIONS})
        self._sizes, self._config, self._n_ranks, self._optimizer = sizes, config, n_ranks, optimizer
        self._is_host = is_host
        self._sharding = config.zero.sharding
        self._recorder = Recorder()
        self._model, groups = outline_of(sizes, self._take_gradients, lambda *of: self._computing.on_work(*of))
        paths = (name for name, _ in self._model.named_modules())
        self._computing = Computing(self._recorder, work, paths)
        self._pipeline = None if sizes.pipeline is None else PipelineBatch(self._model, sizes.pipeline)
        self._precision = Precision(config, self._model)
        placement = placement_of(
            offload.optimizer,
            offload.params,
            is_apart=not is_host,
            is_pinned=False,
            buffer_elems=config.zero.offload_param.buffer_size,
        )
        scratch = BufferPool(count=book.counter(SCRATCH))
        n_pipeline = 1 if sizes.pipeline is None else sizes.pipeline.n_ranks
        n_all = n_ranks * sizes.n_tensor * n_pipeline
        n_near = config.zero.zero_hpz_partition_size
        self._comm = comm = PretendedRanks(
            n_all,
            scratch,
            _transport(config.comm, is_host=is_host),
            n_host=n_near * sizes.n_tensor if n_near > 1 else 0,
            recorder=self._recorder,
        )
        data_first = config.use_data_before_expert_parallelism
        mesh = pretended_mesh(comm, config.zero, sizes.n_tensor, data_first=data_first, n_pipeline=n_pipeline)
        self._at_end, self._mesh = at_end, mesh
        at_end.callback(mesh.close)
        check_experts(self._model, mesh)
        layout = lay_out(
            self._model,
            groups if optimizer is not None else [],
            config.zero,
            _Policy(self._precision, sizes),
            mesh,
            placement,
            is_chosen=config.is_chosen,
            joins=config.comm.zero_copy_gather,
            broadcasts=config.disable_allgather,
            gather_pool=BufferPool(keeps=lambda _: keeps_gathered(device_type), count=book.counter(GATHERED)),
        )
        self._trained, self._frozen, self.fetcher = layout.trained, layout.frozen, layout.fetcher
        self._swapped = [unit for unit in self._trained if unit.states.label == "file"]
        self._size_of = {p.name: p for p in sizes.params}
        placed = {slot.name for unit in (*self._trained, *self._frozen) for slot in unit.slots}
        self._cast = [p for p in sizes.params if p.name not in placed]  # parameters outside units
        self.batch: BatchGathers | None = None
        self._has_state = False
        self._states: dict[tuple[Unit, int], list[Tagged]] = {}  # states in the swap file
        self._reducer: GradientReducer | None = None
        if optimizer is not None:
            pools = GradientPools.make(count=lambda name: book.counter(STAGING if name == "staging" else SCRATCH))
            self._reducer = make_reducer(layout, config, self._precision, mesh, pools)
            at_end.callback(self._reducer.close)
            for slot in self._reducer.slots:  # runs after the reducer's own hook
                slot.param.register_post_accumulate_grad_hook(self._forget_gradient(slot))
        if self.fetcher is not None:
            hooks = ModuleHooks([self._model], self.fetcher, lambda: "train" if torch.is_grad_enabled() else "eval")
            at_end.callback(hooks.remove)

    @property
    def buckets(self) -> Sequence[Bucket]:
        return [] if self._reducer is None else self._reducer.buckets

    @property
    def _order(self) -> list[Bucket]:
        """The buckets in the order in which an optimizer updates them."""
        return list(reversed(self.buckets))

    def _take_gradients(self, n_bytes: int) -> None:
        if torch.autograd._is_checkpoint_valid():  # not so in a half of a split backward, see ``_forget_gradient``
            self.book.take(INCOMING, n_bytes)

    def _forget_gradient(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        n_bytes = slot.numel * slot.unit.dtype.itemsize

        def forget(_: torch.Tensor) -> None:
            # The second half of a split backward computes the gradients of a module's parameters one by one.
            if not torch.autograd._is_checkpoint_valid():
                self.book.take(INCOMING, n_bytes)
            self.book.free(INCOMING, n_bytes)
            self._computing.move_bytes(2 * n_bytes, f"gradient of {slot.name}")  # copied into its bucket

        return forget

    def _place_of(self, unit: Unit) -> str | None:
        """The place of a unit's states if they stay on the device although other units are offloaded (``ratio``); None
        for the place of their kinds."""
        return "device" if unit.states.label == "device" else None

    def _given_bytes(self, size: ParamSize) -> int:
        """Bytes of a parameter as given, before it is cut over ranks."""
        if not self._sizes.is_sharded:
            return size.logical_numel * size.dtype.itemsize
        begin, end = _C.shard_range(size.logical_numel, self._n_ranks * self._sizes.n_tensor, 0)
        return (end - begin) * size.dtype.itemsize

    @property
    def _are_given_in_shards(self) -> bool:
        """Whether parameters are given as shards, which are then gathered one by one."""
        return self._sizes.is_sharded and self._sharding.parameters and self._sizes.n_tensor == 1

    def initialize(self) -> None:
        book = self.book
        book.begin("initialize")
        book.take(BUFFERS, self._sizes.buffer_bytes)
        given = {p.name: self._given_bytes(p) for p in self._sizes.params}
        for nbytes in given.values():
            book.take(GIVEN, nbytes)
        for p in self._sizes.params:
            if p.cut is not None and p.n_expert_ranks > 1:  # stack by stack
                part, whole = p.numel * p.dtype.itemsize, p.logical_numel * p.dtype.itemsize
                gathered = whole if self._sizes.is_sharded else 0
                book.take(GIVEN, part + gathered)
                book.free(GIVEN, given[p.name] + gathered)
                given[p.name] = part
        if self._sizes.is_sharded and not self._are_given_in_shards:
            for p in self._sizes.params:  # gathered for good: stages and rules that need whole weights
                if p.cut is not None and p.n_expert_ranks > 1:
                    continue
                whole = p.logical_numel * p.dtype.itemsize
                book.take(GIVEN, whole)
                book.free(GIVEN, given[p.name])
                given[p.name] = whole
        for p in self._sizes.params:
            if p.cut is not None and p.n_expert_ranks == 1:
                part = p.numel * p.dtype.itemsize
                book.take(GIVEN, part)
                book.free(GIVEN, given[p.name])
                given[p.name] = part
        for unit in (*self._trained, *self._frozen):
            # Sharded weights go to a file after all of them are made; whole weights stay on the device.
            book.take(WEIGHTS, unit.weight_bytes, unit.weights.memory)
            if unit not in self._swapped:
                book.take(MASTERS, unit.master_bytes(), self._place_of(unit))
            missing = set(range(unit.n_buckets)) if unit in self._swapped else set()
            for slot in unit.slots:
                size = self._size_of[slot.name]
                is_put_together = self._are_given_in_shards and size.cut is None
                whole = size.numel * size.dtype.itemsize if is_put_together else 0
                book.take(GIVEN, whole)
                if (
                    slot.bucket in missing and slot in unit.fragment_of
                ):  # bucket by bucket, while the given weights are freed
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
        self._store_weights()
        if self.fetcher is not None:
            seconds = [(g.unit.bucket_bytes(g.bucket), g.source.near) for g in self.fetcher.groups]
            book.take(SECOND, sum(n_bytes // near.world_size for n_bytes, near in seconds if near is not None))
        if self._optimizer is None:
            return
        self._store_states()
        for unit in self._trained:
            book.take(GRADIENTS, self._reducer.sums.n_bytes[unit], self._place_of(unit))

    def _store_weights(self) -> None:
        if self.fetcher is not None:
            offload = self._config.zero.offload_param
            for group in groups_in_file(offload, self.fetcher):
                n_bytes = group.unit.slice_elems[group.bucket] * group.unit.dtype.itemsize
                self.book.take(WEIGHTS, n_bytes)
                self.book.free(WEIGHTS, n_bytes, group.unit.weights.memory)
            store_weights(offload, self._config.aio, self.fetcher, self._comm, self._make_swapper)

    def _store_states(self) -> None:
        """Store the master weights, then the states that the optimizer makes in their place of storage."""

        def note_moved(unit: Unit, bucket: int) -> None:
            self.book.take(MASTERS, unit.master_bytes(bucket))
            self.book.free(NEW_MASTERS, unit.master_bytes(bucket))

        for unit in self._swapped:
            unit.states.keep(unit.masters, partial(note_moved, unit))
        offload, aio = self._config.zero.offload_optimizer, self._config.aio
        store_states(offload, aio, self._trained, self._optimizer, self._comm, self._make_swapper)
        for unit in self._swapped:
            unit.states.keep(partial(self._stored, unit))
        for bucket in self._order:
            bucket.unit.states.move_in(bucket.index, partial(self._make_states, bucket))
        self._count_states(self._swapped)

    def _make_swapper(
        self, folder: str, n_bytes: int, settings: SwapSettings, where: str, comm: object, *, n_buffers: int, what: str
    ) -> Swapper:
        made = Swapper(PretendedFile(settings, self.book.counter(SWAP), self._recorder), n_buffers=n_buffers)
        self._at_end.callback(made.close)
        return made

    def _stored(self, unit: Unit, bucket: int) -> list[Tagged]:
        return unit.masters(bucket) + self._states.get((unit, bucket), [])

    def _make_states(self, bucket: Bucket, make_zeros: MakeZeros) -> None:
        unit = bucket.unit
        found = self._states[unit, bucket.index] = []
        piece = unit.piece_elems(bucket.index)
        for master in self._pieces(unit, bucket.index):
            for name, (dtype, numel) in self._optimizer.layout_of_state(unit.group, master).items():
                part = piece if numel == master.numel() else piece // BLOCK_ELEMS
                found.append(Tagged(make_zeros(torch.Size([numel]), dtype, name, part), name, part))

    def _pieces(self, unit: Unit, bucket: int) -> list[torch.Tensor]:
        """The master weights of a bucket, as the optimizer gets them."""
        if self._optimizer.sees_slices:
            return [unit.master[bucket]]
        return [unit.piece(unit.master, fragment) for fragment in unit.fragments if fragment.slot.bucket == bucket]

    def _is_streamed(self, bucket: Bucket) -> bool:
        is_large = bucket.unit.piece_elems(bucket.index) > 0 and self._optimizer.sees_slices
        return is_large and bool(self._stored(bucket.unit, bucket.index))

    def _update(self) -> None:
        """Update bucket by bucket; during an update the next bucket is read, and weights that ranks hold whole are
        gathered."""
        works: list[Work] = []
        for bucket, follower in zip(self._order, [*self._order[1:], None]):
            unit, index = bucket.unit, bucket.index
            if self._is_streamed(bucket):
                with unit.weights.open(index, reads=False):
                    deque(unit.states.stream(self._stored(unit, index)), maxlen=0)
                    self._computing.update(self._updated_bytes(bucket), f"update of {unit.gather_label(index)}")
            else:
                if follower is not None and not self._is_streamed(follower):
                    follower.unit.states.read_ahead(follower.index)
                with unit.states.open(index), unit.weights.open(index, reads=False):
                    self._computing.update(self._updated_bytes(bucket), f"update of {unit.gather_label(index)}")
            works.append(unit.gather_weights(index, use_broadcast=self._config.disable_allgather))
        for work in works:
            work.wait()

    def _updated_bytes(self, bucket: Bucket) -> int:
        """Bytes that the update of a bucket reads or writes: sums of gradients once, masters and states twice, and the
        weights that are not masters."""
        unit, index = bucket.unit, bucket.index
        n_bytes = unit.slice_elems[index] * self._reducer.sums.summing.dtype_of(unit).itemsize
        if unit.master_bytes(index):
            n_bytes += unit.slice_elems[index] * unit.dtype.itemsize
        pieces = self._pieces(unit, index)
        n_bytes += 2 * sum(piece.nbytes for piece in pieces)
        for piece in pieces:
            layout = self._optimizer.layout_of_state(unit.group, piece).values()
            n_bytes += 2 * sum(numel * dtype.itemsize for dtype, numel in layout)
        return n_bytes

    def window(self, activations: Activations, n_passes: int | None = None) -> None:
        """Run the micro-batches of one step; of a pipeline all, as its table says. n_passes: by default as many as
        differ in their memory."""
        if self._pipeline is not None and self._reducer is not None:
            self.book.begin("batch", activations.held("backward"))
            self.batch = self._pipeline.run(self.fetcher, self._reducer)
            self.book.begin("step")
            self.step()
            return
        n = n_passes
        if n is None:
            n = 2 if self._optimizer is not None and (self._config.gradient_accumulation_steps or 1) > 1 else 1
        for i in range(n):
            self.book.begin("forward", activations.held("forward"))
            self._recorder.enter_phase("forward")
            with torch.set_grad_enabled(self._optimizer is not None):
                loss = self._model(torch.zeros(1, device="cpu"))
            if self._reducer is not None:
                self.book.begin("backward", activations.held("backward"))
                self._recorder.enter_phase("backward")
                self._computing.begin_backward()
                self._reducer.begin_backward(is_boundary=i == n - 1, factor=1.0, starts=[loss.grad_fn])
                loss.backward()
                self._reducer.end_backward()
            del loss
        if self._reducer is not None:
            self.book.begin("step")
            self.step()

    def record_step(self) -> Recorder:
        """The program of the rank in a step, after the engine has learnt its order of use."""
        self.initialize()
        for _ in range(N_WINDOWS - 1):
            self.window(Activations())
        self._recorder.begin()
        self.window(Activations(), n_passes=self._config.gradient_accumulation_steps or 1)
        self._recorder.end()
        return self._recorder

    @property
    def lease(self) -> LeasePlan | None:
        """None if no weights are sharded."""
        fetcher = self.fetcher
        if fetcher is None or not fetcher.groups:
            return None
        elems = sum(group.numel for group in fetcher.groups)
        return LeasePlan(fetcher.drivers.of(Lease).can_begin, elems, fetcher.whole_bytes, fetcher.limits.max_live)

    def generate(self, moment: GenerationMoment) -> None:
        """Run one call of ``generate``: with a lease, or else one of its forwards."""
        self.book.begin("generate", {CACHE: moment.cache, WORKSPACE: moment.workspace})
        lease = self.lease
        if lease is None:
            return
        if lease.is_taken:
            # Without the lease's checksums of weights, which have no values here.
            self.fetcher.pin(self.fetcher.groups)
            self.fetcher.unpin(self.fetcher.groups)
        else:
            with torch.no_grad():
                self._model(torch.zeros(1, device="cpu"))

    def step(self) -> None:
        self._recorder.enter_phase("step")
        late = self._reducer.late
        late.plan(late.flags())
        self._reducer.discard()  # waits for pending reductions
        self._exchange_facts()
        if not self._has_state:
            self._has_state = True
            # States in the swap file were made together with the file.
            self._count_states(unit for unit in self._trained if unit not in self._swapped)
            if self._config.zero.offload_optimizer.super_offload:
                self._copy_states()
        self._update()
        transient = self._copies_of_gradients() + self._largest_update()
        self.book.take(UPDATE, transient)
        self.book.free(UPDATE, transient)
        if self.fetcher is not None:
            self.fetcher.weights_changed()

    def _exchange_facts(self) -> None:
        """The collectives of ``FactsExchange``, over numbers that have no values here."""
        n_bytes = sum(self._reducer.sums.n_bytes[unit] for unit in self._trained)
        self._computing.move_bytes(n_bytes, "norm")
        of_stage, of_stages = self._reducer.sizes_of_facts
        self._mesh.stage.sum_numbers([0.0] * of_stage)
        self._mesh.pipeline.sum_numbers([0.0] * of_stages, label="facts of all stages")

    def _count_states(self, units: Iterable[Unit]) -> None:
        for unit in units:
            self.book.take(STATE, self._state_bytes(unit), self._place_of(unit))

    def _state_bytes(self, unit: Unit) -> int:
        pieces = (piece for bucket in range(unit.n_buckets) for piece in self._pieces(unit, bucket))
        layouts = (self._optimizer.layout_of_state(unit.group, piece).values() for piece in pieces)
        return sum(numel * dtype.itemsize for layout in layouts for dtype, numel in layout)

    def _copy_states(self) -> None:
        """Count the copies of states. This is an upper bound: the last buckets of backward are never updated ahead."""
        for unit in self._trained:
            if unit.master_bytes() and (unit.states.is_apart or self._is_host):
                self.book.take(COPIES, unit.master_bytes() + self._state_bytes(unit))

    def _copies_of_gradients(self) -> int:
        """Bytes of gradients that are converted to the masters' dtype for an optimizer of another package."""
        if self._optimizer.is_fused:
            return 0
        return sum(
            unit.shard_elems * unit.master_dtype.itemsize
            for unit in self._trained
            if self._reducer.sums.summing.dtype_of(unit) != unit.master_dtype
        )

    def _largest_update(self) -> int:
        """The most bytes that the update of one bucket needs besides its states. Optimizers of torch make up to two
        temporaries of the bucket's size. Optimizers of whole matrices gather the matrices in fp32."""
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
