"""Makes sharded parameters whole just before use and releases them just after.

Parameters are gathered by *gather units*. A gather unit is one bucket of a sharded unit, so small neighbours share one
collective and one call of Python. A unit's source says *where* its elements come from (``sources/``), and the fetcher's
driver says *when* it is gathered and released (``drivers/``).

Autograd saves a reference to a gathered parameter and not its data (``saved.py``). When a backward needs the parameter,
it is gathered again. So no graph points to released memory, and a model may use its weights in any way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from deepspeed_c.buffers import Allocate, BufferPool
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.transports.joint_memory import JointMemory
from deepspeed_c.config.zero import Zero
from deepspeed_c.errors import StateError
from deepspeed_c.logging import logger
from deepspeed_c.saved_tensors import SavedTensors
from deepspeed_c.zero.layout.unit import Unit
from deepspeed_c.zero.weights.drivers.driver import Driver, Drivers
from deepspeed_c.zero.weights.drivers.run import FetchLimits
from deepspeed_c.zero.weights.gather_unit import GatherUnit, PlacedShard, WholeShard
from deepspeed_c.zero.weights.param import StandaloneShard, make_sharded, point_at_nothing, state_of, take_over
from deepspeed_c.zero.weights.phase import FetchPhase
from deepspeed_c.zero.weights.saved import WeightPacker
from deepspeed_c.zero.weights.sources.second import NearRanks
from deepspeed_c.zero.weights.sources.source import Means
from deepspeed_c.zero.weights.sources.stream import GatherStream

if TYPE_CHECKING:
    from deepspeed_c.zero.weights.hooks import ModuleHooks

__all__ = ["FetchStats", "Fetcher", "keeps_gathered"]


def keeps_gathered(device_type: str) -> bool:
    """Whether the pool keeps buffers that are not in use. An accelerator's allocator caches freed memory itself. The C
    library's allocator returns large pieces to the system, which has to clear them before they are used again."""
    return device_type == "cpu"


def _gather_pool(allocate: Allocate) -> BufferPool:
    return BufferPool(keeps=lambda device: keeps_gathered(device.type), waits=True, allocate=allocate)


class FetchStats:
    """Statistics since the engine was made."""

    def __init__(self) -> None:
        self.n_gathers = 0  # gathers, including uses of units in joint memory
        self.n_received_bytes = 0  # bytes that gathers have brought from other ranks
        self.n_fences = 0
        self.n_passes = 0
        self.n_unexpected = 0  # uses that were not in the plan
        self.n_replans = 0  # passes after which an earlier plan was replaced
        self.live_elems = 0  # elements of the units that are gathered now
        self.max_live_elems = 0

    def count_live(self, n_elems: int) -> None:
        self.live_elems += n_elems
        self.max_live_elems = max(self.max_live_elems, self.live_elems)

    def count_pass(self, n_unexpected: int, *, is_replanned: bool) -> None:
        """Called when a pass along a recorded plan has ended."""
        self.n_unexpected += n_unexpected
        self.n_replans += is_replanned

    def as_dict(self) -> dict[str, int]:
        return dict(vars(self))


class Fetcher:
    """The sharded units of one engine: which are gathered, which are held, and what that has cost.

    ``driver`` is the kind of driver that decides when nobody else does (``drivers/recorded.py``). ``pool`` provides the
    buffers of gathered units. ``zero``: the configuration's section, for sources that one of its keys asks for.
    ``near_of``: returns the ranks that keep second shards of a unit.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        whole_units: Sequence[Unit],
        comm: Collectives,
        limits: FetchLimits,
        driver: type[Driver],
        zero: Zero,
        *,
        use_broadcast: bool = False,
        pool: BufferPool | None = None,
        near_of: Callable[[Unit], NearRanks | None] = lambda unit: None,
    ) -> None:
        self.comm, self.limits = comm, limits
        self.stats = FetchStats()
        self.phase = FetchPhase()
        largest = max(units, key=lambda unit: unit.flat_elems, default=None)
        carrier = comm if largest is None else largest.carrier
        self.means = Means(
            _gather_pool(carrier.allocate) if pool is None else pool, GatherStream(), zero, near_of, use_broadcast
        )
        self.lock = threading.RLock()  # autograd runs one thread per device
        self.packer = WeightPacker(self.use)
        self.saved = SavedTensors()
        self.saved.add(self.packer)
        self.hooks: ModuleHooks | None = None
        """The hooks that begin and end this fetcher's forwards; None before an engine has set them."""
        self.n_writes = 0
        """How many times weights have been written."""
        self._is_closed = False
        places = [(unit, b) for unit in units for b in range(unit.n_buckets) if unit.bucket_slots[b]]
        places.sort(key=lambda place: min(slot.order for slot in place[0].bucket_slots[place[1]]))
        self.groups = [GatherUnit(i, unit, bucket, self) for i, (unit, bucket) in enumerate(places)]
        for group in self.groups:
            for slot in group.slots:
                make_sharded(slot.param, PlacedShard(slot, group, self))
                point_at_nothing(slot.param)
        self._whole_slots = [slot for unit in whole_units for slot in unit.slots]
        for slot in self._whole_slots:
            make_sharded(slot.param, WholeShard(slot, comm))
        self._shared: dict[JointMemory, Collectives] = {
            group.source.shared: group.unit.comm for group in self.groups if group.source.shared is not None
        }
        self.drivers = Drivers(self, driver)
        self.end_writes()

    @property
    def driver(self) -> Driver:
        """The driver that decides now."""
        return self.drivers.top

    def connect_hooks(self, hooks: ModuleHooks) -> None:
        """Sets the hooks that begin and end forwards. Earlier hooks must have been removed."""
        self.hooks = hooks

    def group_at(self, unit: Unit, bucket: int) -> GatherUnit | None:
        return next((g for g in self.groups if g.unit is unit and g.bucket == bucket), None)

    @property
    def is_collective(self) -> bool:
        """Whether any gather needs other ranks."""
        return any(group.source.is_collective for group in self.groups)

    @property
    def whole_bytes(self) -> int:
        """Bytes of memory that all units take if they are gathered at once."""
        return sum(group.source.cost.memory for group in self.groups)

    @property
    def is_too_large(self) -> bool:
        """Whether all units gathered at once take memory for more elements than ``FetchLimits.max_live``."""
        return sum(group.numel for group in self.groups if group.source.cost.memory) > self.limits.max_live

    def count_in(self, stats: FetchStats) -> None:
        """Continues the statistics in ``stats``, from their present values."""
        vars(stats).update(vars(self.stats))
        self.stats = stats

    def live(self) -> list[int]:
        """The units that are gathered."""
        return [group.index for group in self.groups if group.buffer is not None and not group.is_leaving]

    def begin_pass(self, *, is_backward: bool, expects_grads: bool) -> None:
        self.phase.begin(is_backward=is_backward, expects_grads=expects_grads)
        if self.phase.hollows:
            self._show_released()
        self.stats.n_passes += 1

    def end_pass(self) -> None:
        was_hollow = self.phase.hollows
        self.phase.rest()
        if was_hollow:
            self._show_released()

    def _show_released(self) -> None:
        for group in self.groups:
            group.show_released()

    def gather(self, group: GatherUnit) -> None:
        """Starts a gather, and counts it."""
        n_bytes = group.source.cost.received
        group.start()
        self.stats.n_gathers += 1
        self.stats.n_received_bytes += n_bytes

    def let_all_go(self, keep: int = -1) -> None:
        """Releases all gathered units except held units and unit ``keep``."""
        for group in self.groups:
            if group.buffer is not None and group.index != keep and not group.pins:
                group.let_go(expects_grads=self.phase.expects_grads)

    def is_in_use(self, group: GatherUnit) -> bool:
        """Whether a use of the unit needs no action: the unit is available, and it is held or was the last one used."""
        return group.is_ready and (group is self.phase.used_last or group.pins > 0)

    def use(self, group: GatherUnit) -> None:
        """Makes a gather unit available now. Collective, unless the plan has gathered it already."""
        if self.is_in_use(group):
            return
        with self.lock:
            self.start_use(group)
            if not group.is_ready:
                group.finish()

    def start_use(self, group: GatherUnit) -> None:
        """Starts the gathers that are due for a use of the unit."""
        self._require_open()
        self.driver.use(group)
        self.phase.note_use(group)

    def _require_open(self) -> None:
        if self._is_closed:
            raise StateError(
                "the engine is closed, so its weights cannot be gathered any more",
                where="backward",
                fix="run backward before engine.close()",
            )

    def pin(self, groups: Sequence[GatherUnit], *, waits: bool = True) -> None:
        """Makes gather units available until ``unpin``. Collective. waits: False only starts their gathers; call
        ``finish`` of each unit before its use."""
        with self.lock:
            self._require_open()
            wanted = sorted(groups, key=lambda group: group.index)
            for group in wanted:
                if group.buffer is None:
                    self.gather(group)
                group.hold()
            if waits:
                for group in wanted:
                    group.finish()
            self._rest()

    def unpin(self, groups: Sequence[GatherUnit]) -> None:
        with self.lock:
            live = set(self.driver.live) if self.phase.is_active else set()
            for group in groups:
                if group.unhold() and group.buffer is not None and group.index not in live:
                    group.let_go(expects_grads=self.phase.expects_grads)
            self._rest()

    def _rest(self) -> None:
        if not self.phase.is_active:
            self.driver.rest()

    def hold(self, group: GatherUnit) -> None:
        """Keeps an available unit while a module runs, even if the plan releases it."""
        group.hold()

    def unhold(self, group: GatherUnit) -> None:
        if group.unhold() and group.is_leaving and group.buffer is not None:
            with self.lock:
                group.let_go(expects_grads=self.phase.expects_grads)

    def weights_changed(self, group: GatherUnit | None = None) -> None:
        """Called when shards have been written to: gathered weights are out of date and are released or gathered again.
        Collective if units are pinned or lie in joint memory."""
        with self.lock:
            self.end_writes()  # has ended the lease, so no unit is held for it
            for g in self.groups if group is None else [group]:
                if g.buffer is None:
                    continue
                if g.pins:
                    g.start()
                    g.finish()
                else:
                    g.let_go(expects_grads=self.phase.expects_grads)
            self._rest()

    def begin_writes(self) -> None:
        """Call it before weights are written. If weights lie in joint memory it is collective, and no rank reads them
        any more when it returns. Otherwise there is nothing to wait for, because no rank reads another rank's shards.
        """
        self.driver.begin_writes()
        self._fence("weights about to be written")

    def end_writes(self) -> None:
        """Call it when weights have been written. When it returns, the writes of all ranks are visible. Collective in
        the same cases as ``begin_writes``."""
        self.driver.end_writes()
        self.n_writes += 1
        for group in self.groups:
            group.source.stale()
        self._fence("weights written")
        self.forget_writes()

    def forget_writes(self) -> None:
        """Drops this rank's own writes to gathered weights in joint memory."""
        for joint in dict.fromkeys(group.source.read_in for group in self.groups):
            if joint is not None:
                joint.forget()

    def _fence(self, label: str) -> None:
        for comm in dict.fromkeys(self._shared.values()):
            comm.barrier(label=label)
            self.stats.n_fences += 1

    def close(self) -> None:
        """Detaches all parameters from the engine. Sharded parameters stay released, and each rank keeps its pieces of
        them; whole parameters become ordinary."""
        if self._is_closed:
            return
        self.drivers.drop()
        self._is_closed = True
        self.phase.train()
        for group in self.groups:
            group.close()
        for group in self.groups:
            for slot in group.slots:
                state = state_of(slot.param)
                alone = StandaloneShard(
                    slot.param,
                    slot.name,
                    state.comm,
                    shape=slot.shape,
                    piece=state.piece.clone(),
                    ranges=(list(state.begins), list(state.numels)),
                    everyone=self.comm,
                )
                make_sharded(slot.param, alone)
                point_at_nothing(slot.param)
        for slot in self._whole_slots:
            take_over(slot.param, slot.param.data)
        self.means.pool.clear()
        self._shared.clear()
        for group in self.groups:
            group.unit.weights.end()
        logger.debug("stage 3: %s", self.stats.as_dict())
