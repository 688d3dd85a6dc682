"""Plans the memory of one rank: lays the model out with the engine's own layout on the meta device, then walks through
a run in bytes.

What is walked through is what the engine does, in its order: ``initialize`` replaces the weights by flat buffers or
shards; a forward gathers and releases along the C core's plan; a backward gathers again, stages gradients bucket by
bucket and reduces them, a bounded number at a time; the step makes optimizer state. The pools in which the engine
keeps buffers for the next time are kept here as well (``book``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch

from deepspeed_c import _C
from deepspeed_c.buffers import BufferPool
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.config import Config
from deepspeed_c.engine.precision import Precision
from deepspeed_c.offload.place import placement_of
from deepspeed_c.offload.swap import whole_pages
from deepspeed_c.plan.book import Book, Phase
from deepspeed_c.plan.sizes import ModelSizes, OptimizerSizes, ParamSize, model_of
from deepspeed_c.zero.gradients.reducer import MAX_IN_FLIGHT
from deepspeed_c.zero.layout.layout import Layout, lay_out, mesh_of_config
from deepspeed_c.zero.layout.stages import STAGES, Sharding
from deepspeed_c.zero.layout.unit import Dtypes, Slot, Unit
from deepspeed_c.zero.weights.fetch import PACE_STEPS, FetchLimits
from deepspeed_c.zero.weights.gather_unit import GatherUnit

__all__ = ["KINDS", "PHASES", "MemoryPlan", "Offload", "plan_memory"]

PHASES = ("initialize", "forward", "backward", "step")

WEIGHTS = "weights"
MASTERS = "master weights"
STATE = "optimizer state"
GRADIENTS = "gradients"
GATHERED = "gathered weights"
STAGING = "gradient staging"
SCRATCH = "collective scratch"
META = torch.device("meta")
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


class _Ranks(NamedTuple):
    """As much of a group of ranks as a layout asks for."""

    world_size: int
    rank: int = 0

    @classmethod
    def of(cls, ranks: Sequence[int], axes: Sequence[str]) -> _Ranks:
        return cls(len(ranks))


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
    walk = _Walk(sizes, config, n_ranks, optimizer, device_type == "cpu", offload)
    walk.initialize()
    held = {ACTIVATIONS: activation_bytes}
    for _ in range(N_WINDOWS):
        walk.book.begin("forward", held)
        walk.forward()
        if optimizer is not None:
            walk.book.begin("backward", held)
            walk.backward()
            walk.book.begin("step")
            walk.step()
    walk.book.end()
    units = [(group.slots, group.numel * group.unit.dtype.itemsize) for group in walk.groups] or [
        (bucket.slots, bucket.numel * bucket.unit.dtype.itemsize) for bucket in walk.buckets
    ]
    slots, nbytes = max(units, key=lambda unit: unit[1], default=([], 0))
    return MemoryPlan(
        config.zero.stage,
        n_ranks,
        offload,
        {name: walk.book.phases[name] for name in PHASES if name in walk.book.phases},
        len(walk.buckets),
        _label(slots),
        nbytes,
        walk.window_elems,
    )


def _label(slots: Sequence[Slot]) -> str:
    if not slots:
        return ""
    first = min(slots, key=lambda slot: slot.order).name
    return first if len(slots) == 1 else f"{first} (+{len(slots) - 1} more)"


class _Bucket:
    """A bucket of gradients, as the reducer handles it."""

    def __init__(self, unit: Unit, index: int, has_whole: bool) -> None:
        self.unit, self.index, self.has_whole = unit, index, has_whole
        self.slots = unit.bucket_slots[index]
        self.numel = unit.bucket_numel(index)
        self.reset()

    def reset(self) -> None:
        self.n_missing = len(self.slots)
        self.is_launched = False
        self.is_open = False
        self.staging: torch.Tensor | None = None  # None while open: the gradients gather in the whole bucket


class _Work(NamedTuple):
    """A reduction on its way, and what it holds."""

    scratch: torch.Tensor | None
    sent_copy: int  # bytes
    staging: torch.Tensor | None


class _Module(NamedTuple):
    """A module that has parameters of its own."""

    slots: list[Slot]  # its own, trained or not
    groups: list[int]  # their gather units
    children: list[_Module]
    is_leaf: bool = False  # all below it belong to it, and are gathered at once

    def in_order(self) -> Iterator[_Module]:
        """It and what is below it, in the order of forward."""
        yield self
        for child in self.children:
            yield from child.in_order()


class _Walk:
    """One rank's run, in bytes."""

    def __init__(
        self,
        sizes: ModelSizes,
        config: Config,
        n_ranks: int,
        optimizer: OptimizerSizes | None,
        is_host: bool,
        offload: Offload,
    ) -> None:
        places = offload.kinds(config.zero.stage, is_host=is_host)
        host, nvme = ({kind for kind, place in places.items() if place == name} for name in ("host", "nvme"))
        self.book = Book(host, nvme)
        self._offload = offload
        states_apart = offload.optimizer != "none" and not is_host  # states have another memory than what computes
        self._sizes, self._config, self._n_ranks, self._optimizer = sizes, config, n_ranks, optimizer
        self._is_host = is_host
        # Gradients that go to the host go there as they come.
        self._sharding: Sharding = STAGES[max(config.zero.stage, 2) if states_apart else config.zero.stage]
        model, groups = model_of(sizes)
        self._precision = Precision(config, model)
        policy = _Policy(self._precision, sizes)
        placement = placement_of(
            offload.optimizer,
            offload.params,
            is_apart=not is_host,
            is_pinned=False,
            buffer_elems=config.zero.offload_param.buffer_size,
        )
        layout: Layout = lay_out(
            model,
            groups if optimizer is not None else [],
            config,
            policy,
            mesh_of_config(config, Mesh(_Ranks(n_ranks), connect=_Ranks.of)),
            placement,
        )
        self._trained, self._frozen = layout.trained, layout.frozen
        self._swapped = [unit for unit in self._trained if unit.states.label == "file"]
        self._size_of = {p.name: p for p in sizes.params}
        placed = {slot.name for unit in (*self._trained, *self._frozen) for slot in unit.slots}
        self._cast = [p for p in sizes.params if p.name not in placed]  # what no unit holds
        self.groups: list[GatherUnit] = [] if layout.fetcher is None else layout.fetcher.groups
        self._limits = FetchLimits(0, 0, 0) if layout.fetcher is None else layout.fetcher.limits
        self._elems = [group.numel for group in self.groups]
        self._run = _C.Fetch(self._elems)
        self.window_elems = 0
        self._forward_steps = list(range(len(self.groups)))  # until a forward has been recorded
        # The engine's own pools, which lend tensors without memory here.
        self._gather_pool = BufferPool(keeps=lambda device: is_host, count=self.book.counter(GATHERED))
        self._staging_pool = BufferPool(count=self.book.counter(STAGING))
        self._scratch = BufferPool(count=self.book.counter(SCRATCH))
        self._live: dict[int, torch.Tensor] = {}  # gathered units
        self._pins = [0] * len(self.groups)
        self._leaving: set[int] = set()
        self._make_buckets()
        self._roots = self._make_modules()
        self._read_in_backward = self._find_read_in_backward()
        self._has_learnt = False
        self._works: deque[_Work] = deque()
        self._depth = MAX_IN_FLIGHT if config.zero.overlap_comm else 0
        self._has_state = False
        self._n_buffer_bytes = 0

    def _make_plan(self, steps: list[int]) -> Any:
        plan = _C.FetchPlan(steps, self._elems, *self._limits)
        self.window_elems = max(self.window_elems, plan.peak_elems)
        return plan

    def _accum_dtype(self, unit: Unit) -> torch.dtype:
        offloaded = torch.float32 if self._offload.optimizer != "none" else None
        return self._precision.accum_dtype or offloaded or unit.dtype

    def _place_of(self, unit: Unit) -> str | None:
        """Where a unit's states lie that stay on the device, although others may be offloaded (``ratio``); None for
        where their kinds lie."""
        return "device" if unit.states.label == "device" else None

    def _has_whole(self, unit: Unit) -> bool:
        """Whether its gradients gather whole, and the shard's sums are a part of that."""
        return not self._sharding.gradients or unit.sums_in_place

    def _make_buckets(self) -> None:
        """In the order of the reducer: a bucket is full when the gradient of the parameter registered first has
        come."""
        entries = [
            (-min((slot.order for slot in unit.bucket_slots[b]), default=0), unit, b)
            for unit in self._trained
            for b in range(unit.n_buckets)
        ]
        entries.sort(key=lambda entry: entry[0])
        self.buckets = [_Bucket(unit, b, self._has_whole(unit)) for _, unit, b in entries]
        self._bucket_of = {slot: i for i, bucket in enumerate(self.buckets) for slot in bucket.slots}
        place = {(bucket.unit, bucket.index): i for i, bucket in enumerate(self.buckets)}
        self._bucket_of_group = {
            group.index: place[group.unit, group.bucket] for group in self.groups if (group.unit, group.bucket) in place
        }

    def _make_modules(self) -> list[_Module]:
        """The modules that have parameters, as a tree, from the parameters' names."""
        group_of = {slot: group.index for group in self.groups for slot in group.slots}
        slots = sorted((s for unit in (*self._trained, *self._frozen) for s in unit.slots), key=lambda s: s.order)
        modules: dict[str, _Module] = {}
        for slot in slots:
            path = self._size_of[slot.name].module
            leaf = self._leaf_above(path)
            module = modules.setdefault(path if leaf is None else leaf, _Module([], [], [], leaf is not None))
            module.slots.append(slot)
            if slot in group_of and group_of[slot] not in module.groups:
                module.groups.append(group_of[slot])
        roots: list[_Module] = []
        for path, module in modules.items():
            module.groups.sort()
            parent = path
            while parent:
                parent = parent.rpartition(".")[0]
                if parent in modules:
                    modules[parent].children.append(module)
                    break
            else:
                roots.append(module)
        return roots

    def _leaf_above(self, path: str) -> str | None:
        """The outermost leaf that a module is, or lies in."""
        parts = path.split(".")
        outward = ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]
        return next((name for name in outward if name in self._sizes.leaves), None)

    def _find_read_in_backward(self) -> set[int]:
        """Gather units whose weights a backward reads: of the modules behind the first that is trained, whose input
        needs no gradient."""
        found: set[int] = set()
        is_behind = False
        for root in self._roots:
            for module in root.in_order():
                if is_behind:
                    found.update(module.groups)
                is_behind = is_behind or any(slot in self._bucket_of for slot in module.slots)
        return found

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
            elems = unit.flat_elems if self._has_whole(unit) else unit.shard_elems
            book.take(GRADIENTS, elems * self._accum_dtype(unit).itemsize, self._place_of(unit))

    def _swap_weights(self) -> None:
        """What of the weights goes to a file, and the buffers that it is read into."""
        left, largest, n_stored = self._offload.kept_elems, 0, 0
        for group in self.groups:
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

    def _apply(self, actions: Sequence[tuple[int, int]]) -> None:
        for kind, index in actions:
            if kind == _C.Fetch.STEP:
                self._n_passed += 1
                if self._is_in_backward and self._n_passed > PACE_STEPS:
                    self._pace(self._n_passed - 1 - PACE_STEPS)
            elif kind == _C.Fetch.GATHER:
                if index not in self._live:
                    group = self.groups[index]
                    self._live[index] = self._gather_pool.take(group.numel, group.unit.dtype, META)
                self._leaving.discard(index)
            elif self._pins[index]:
                self._leaving.add(index)
            else:
                self._let_go(index)

    def _let_go(self, index: int) -> None:
        if index in self._live:
            self._gather_pool.give(self._live.pop(index))
        self._leaving.discard(index)

    def _begin_pass(self, plan: Any, keep: int) -> None:
        self._n_passed = 0
        for index in [i for i in self._live if i != keep]:
            self._let_go(index)
        self._run.abort()
        self._run.begin(plan, sorted(self._live))

    def _enter(self, module: _Module) -> bool:
        """Gathers what a module reads; True where it is held until the module is left."""
        holds = module.is_leaf or len(module.groups) > 1 or bool(module.children)
        for index in module.groups:
            if not (self._pins[index] and index in self._live):  # held: the plan stands still
                self._apply(self._run.use(index))
            if holds:
                self._pins[index] += 1
        return holds

    def _leave(self, groups: Sequence[int]) -> None:
        for index in groups:
            self._pins[index] -= 1
            if self._pins[index] == 0 and index in self._leaving:
                self._let_go(index)

    def forward(self) -> None:
        if not self.groups:
            return
        self._is_in_backward = False
        self._begin_pass(self._make_plan(self._forward_steps), keep=self._forward_steps[0])
        for module in self._roots:
            self._forward_of(module)
        last = self._forward_steps[-1]
        is_kept = self._optimizer is not None and self._elems[last] <= min(
            self._limits.max_reuse, self._limits.max_live
        )
        self._apply(self._run.end(last if is_kept else -1))
        self._forward_steps = list(self._run.record[0])

    def _forward_of(self, module: _Module) -> None:
        holds = self._enter(module)
        for child in module.children:
            self._forward_of(child)
        if holds:
            self._leave(module.groups)

    def backward(self) -> None:
        if self.groups:
            # What the first backward turned out not to use is in no later plan.
            is_first, self._has_learnt = not self._has_learnt, True
            units = [u for u in reversed(self._forward_steps) if is_first or u in self._read_in_backward]
            self._steps = [unit for unit, _ in groupby(units)]
            self._last_use = {unit: step for step, unit in enumerate(self._steps)}
            self._is_in_backward = True
            self._begin_pass(self._make_plan(self._steps), keep=self._steps[0] if self._steps else -1)
        for bucket in self.buckets:
            bucket.reset()
        self._next = 0
        for module in reversed(self._roots):
            self._backward_of(module)
        if self.groups:
            self._apply(self._run.end(-1))
        for i, bucket in enumerate(self.buckets):
            if not bucket.is_launched:
                self._start(i)
        self._wait()

    def _backward_of(self, module: _Module) -> None:
        for child in reversed(module.children):
            self._backward_of(child)
        for index in reversed(module.groups):
            if index in self._read_in_backward:
                if not (self._pins[index] and index in self._live):
                    self._apply(self._run.use(index))
                if module.is_leaf:
                    self._pins[index] += 1
        trained = [slot for slot in reversed(module.slots) if slot in self._bucket_of]
        # One operator hands over the gradients of one module, not those of all in a leaf.
        for _, slots in groupby(trained, key=lambda slot: self._size_of[slot.name].module):
            slots = list(slots)
            for slot in slots:
                self.book.take(INCOMING, slot.numel * slot.unit.dtype.itemsize)
            for slot in slots:
                self._add(slot)
                self.book.free(INCOMING, slot.numel * slot.unit.dtype.itemsize)
        if module.is_leaf:
            self._leave([index for index in module.groups if index in self._read_in_backward])

    def _add(self, slot: Slot) -> None:
        i = self._bucket_of[slot]
        bucket = self.buckets[i]
        if not bucket.is_open:
            bucket.is_open = True
            if not bucket.has_whole:
                bucket.staging = self._staging_pool.take(bucket.numel, bucket.unit.comm_dtype, META)
        bucket.n_missing -= 1
        if not self.groups:
            while self._next < len(self.buckets) and self.buckets[self._next].n_missing == 0:
                self._start(self._next)
                self._next += 1

    def _pace(self, step: int) -> None:
        """Sends the gradients of the gather unit of a step of the backward, if it was the last of that unit."""
        unit = self._steps[step]
        i = self._bucket_of_group.get(unit)
        if i is not None and self._last_use[unit] == step and not self.buckets[i].is_launched:
            self._start(i)

    def _start(self, i: int) -> None:
        while self._works and len(self._works) >= self._depth:
            self._finish(self._works.popleft())
        self._works.append(self._reduce(i))
        if self._depth == 0:
            self._wait()

    def _reduce(self, i: int) -> _Work:
        bucket = self.buckets[i]
        unit, n = bucket.unit, bucket.unit.n_ranks
        bucket.is_launched = True
        if n == 1 or bucket.numel == 0:
            return _Work(None, 0, bucket.staging)
        comm_bytes = unit.comm_dtype.itemsize
        gathers_in = self._accum_dtype(unit) if bucket.has_whole else unit.comm_dtype
        sent_copy = 0 if gathers_in == unit.comm_dtype else bucket.numel * comm_bytes
        self.book.take(SCRATCH, sent_copy)
        scratch_bytes = 0
        if unit.is_cut and self._config.zero.reduce_scatter:
            n = unit.comm.world_size
            if unit.replicas.world_size > 1:  # summed over the copies before it is added
                beside = bucket.numel // n * self._accum_dtype(unit).itemsize
                self.book.take(SCRATCH, beside)
                sent_copy += beside
            accumulates = self._sharding.gradients and _accumulates(self._config)
            if self._is_host:
                scratch_bytes = bucket.numel * comm_bytes
            elif (
                unit.states.is_apart and unit.replicas.world_size == 1
            ):  # received beside, and brought to the host from there
                beside = bucket.numel // n * comm_bytes
                self.book.take(SCRATCH, beside)
                sent_copy += beside
            elif accumulates or self._accum_dtype(unit) != unit.comm_dtype:
                scratch_bytes = bucket.numel // n * comm_bytes
        elif self._is_host and unit.comm_dtype != torch.float32:
            scratch_bytes = n * -(-bucket.numel // n) * comm_bytes
        scratch = self._scratch.take(scratch_bytes, torch.uint8, META) if scratch_bytes else None
        return _Work(scratch, sent_copy, bucket.staging)

    def _finish(self, work: _Work) -> None:
        if work.scratch is not None:
            self._scratch.give(work.scratch)
        self.book.free(SCRATCH, work.sent_copy)
        if work.staging is not None:
            self._staging_pool.give(work.staging)

    def _wait(self) -> None:
        while self._works:
            self._finish(self._works.popleft())

    def step(self) -> None:
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
        for index in list(self._live):
            self._let_go(index)  # out of date

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
            if self._accum_dtype(unit) != unit.master_dtype
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
