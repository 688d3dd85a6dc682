"""Pretended ranks and files for the engine's objects in a plan. They count the same memory as real ranks and files, and
move no data."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.distributed_c10d import _world

from deepspeed_c.buffers import BufferPool, ordinary_memory
from deepspeed_c.comm.axes import DP_SHARD, PP
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.comm.transports.shared_memory import SharedMemory
from deepspeed_c.comm.transports.transport import Transport
from deepspeed_c.comm.work import Work
from deepspeed_c.config.zero import Zero
from deepspeed_c.offload.swap import SwapFile, SwapSettings
from deepspeed_c.plan.recorded import READ, WRITE, RecordedLedger, Recorder
from deepspeed_c.zero.layout.layout import mesh_of_config

__all__ = ["PretendedFile", "PretendedRanks", "PretendedSharedMemory", "pretended_mesh"]


_NUMBER_BYTES = 8  # a number that ranks exchange


class _NoGroup:
    """A stand-in for the process group that ``torch.distributed`` passes transfers to. Each method has an older and a
    newer name of torch."""

    def _transfer(self, *_: Any) -> _NoGroup:
        return self

    allreduce = broadcast = send = recv = _transfer
    all_to_all_single = alltoall_base = _transfer
    reduce_scatter_single = _reduce_scatter_base = _transfer

    def wait(self) -> None:
        """Returns at once, because there is no transfer."""


def _done(*_: Any) -> Work:
    return Work([_NoGroup()])


class PretendedSharedMemory(SharedMemory):
    """Memory that ranks share: until the wait, other ranks read the sent bytes in place."""

    def __init__(self) -> None:
        """There is no process group."""

    reduce_scatter = all_gather = all_reduce = broadcast = add_up = all_to_all = _done

    def allocate(self, n_bytes: int, device: torch.device) -> torch.Tensor:
        return ordinary_memory(n_bytes, device)


class PretendedJoint:
    """Joint memory (``comm/transports/joint_memory.py``): the unit counts the slices of a rank; whole tensors take no
    further memory.
    """

    def __init__(self, sizes: Sequence[int], n_ranks: int) -> None:
        self._sizes, self._n_ranks = sizes, n_ranks

    def slice(self, part: int) -> torch.Tensor:
        return torch.empty(self._sizes[part] // self._n_ranks, dtype=torch.uint8, device="meta")

    def whole(self, part: int) -> torch.Tensor:
        return torch.empty(self._sizes[part], dtype=torch.uint8, device="meta")

    def forget(self) -> None:
        """Does nothing, because nothing has been written."""


class PretendedRanks(Collectives):
    """Rank 0 of ``world_size`` ranks, for objects of the engine with tensors on the meta device.

    transport: how ranks exchange tensors. scratch: the pool of the buffers that collectives receive into. ranks: their
    numbers among all ranks, of which the first is 0. n_host: ranks of each host. recorder: records the collectives.
    """

    def __init__(
        self,
        world_size: int,
        scratch: BufferPool,
        transport: Transport,
        ranks: Sequence[int] = (),
        n_host: int = 0,
        recorder: Recorder | None = None,
    ) -> None:
        self.group: Any = _NoGroup()
        self.world_size, self.rank, self.global_rank = world_size, 0, 0
        self.global_ranks = list(ranks or range(world_size))
        self._n_host = n_host or world_size
        self.recorder = Recorder() if recorder is None else recorder
        self.ledger = RecordedLedger(self.global_ranks, self.recorder)
        self._on_close = [lambda: _world.pg_group_ranks.pop(self.group, None)]
        # Torch looks up the source of a broadcast here.
        _world.pg_group_ranks[self.group] = {rank: i for i, rank in enumerate(self.global_ranks)}
        self.scratch = scratch
        self.reduce = lambda sources, scale, accumulate, out: None
        # Fake tensors of a traced model report the host as their device.
        self._transports = {"meta": transport, "cpu": PretendedSharedMemory()}

    def along(self, ranks: Sequence[int], axes: Sequence[str]) -> PretendedRanks:
        """The ranks along an axis of a mesh. They share the buffers of these ranks."""
        made = PretendedRanks(len(ranks), self.scratch, self._transports["meta"], ranks, recorder=self.recorder)
        made.ledger.make_part_of(self.ledger, " x ".join(axes))
        return made

    @property
    def by_host(self) -> list[list[int]]:  # type: ignore[override]
        ranks = range(self.world_size)
        return [list(ranks[i : i + self._n_host]) for i in range(0, self.world_size, self._n_host)]

    def alone(self) -> PretendedRanks:
        return PretendedRanks(1, self.scratch, self._transports["meta"], recorder=self.recorder)

    def all_gather(self, flat: torch.Tensor, *, use_broadcast: bool = False, label: str = "") -> Work:
        """A gather takes no further memory on any backend. Some backends would start one transfer for each rank."""
        if flat.numel() == 0 or self.world_size == 1:
            return Work.done()
        return _done().note_in(self.ledger.enter("all-gather", flat.nbytes, label, flat.device))

    def all_to_all(
        self,
        flat: torch.Tensor,
        out: torch.Tensor,
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        *,
        label: str = "",
    ) -> Work:
        """Takes no memory: the caller has made both buffers."""
        if self.world_size == 1:
            return Work.done()
        return _done().note_in(self.ledger.enter("all-to-all", flat.nbytes, label, flat.device))

    def _gather_numbers(self, op: str, number: float, label: str) -> list[Any]:
        """All ranks have the same number."""
        self._exchange(op, _NUMBER_BYTES * self.world_size, label)
        return [number] * self.world_size

    def _exchange(self, op: str, n_bytes: int, label: str) -> None:
        """A collective that this rank waits for at once."""
        if self.world_size > 1 and n_bytes:
            with self.ledger.enter(op, n_bytes, label):
                pass

    def why_not_joint(self, device: torch.device) -> str:
        return (
            ""
            if isinstance(self._transports["meta"], SharedMemory)
            else "nobody knows yet which ranks will share memory"
        )

    def join(self, sizes: Sequence[int]) -> Any:
        return PretendedJoint(sizes, self.world_size)

    def barrier(self, *, label: str = "") -> None:
        """Returns at once, because there are no other ranks."""
        self._gather_numbers("barrier", 0, label)

    def sum_numbers(self, numbers: Sequence[float], *, label: str = "") -> list[float]:
        """The sum if all ranks have the same numbers."""
        self._exchange("all-reduce", _NUMBER_BYTES * len(numbers), label or "sum_numbers")
        return [float(number) * self.world_size for number in numbers]

    def gather_objects(self, value: Any, *, label: str = "") -> list[Any]:
        """The objects of all ranks if they have equal ones."""
        n_bytes = len(pickle.dumps(value)) if self.recorder.is_on and self.world_size > 1 else 0
        self._gather_numbers("all-gather", n_bytes, label or "gather_objects")
        self._exchange("all-gather", n_bytes * self.world_size, label or "gather_objects")
        return [value] * self.world_size


def pretended_mesh(comm: PretendedRanks, zero: Zero, n_tensor: int, *, data_first: bool, n_pipeline: int = 1) -> Mesh:
    """The mesh of these ranks as ``initialize`` makes it. ``n_tensor``: of them, that hold the model together.
    ``n_pipeline``: of them, that hold the stages of a pipeline."""
    mesh = Mesh(comm, {PP: n_pipeline, DP_SHARD: comm.world_size // n_pipeline}, connect=comm.along)
    mesh = mesh_of_config(zero, mesh if n_tensor == 1 else mesh.split_tensors(n_tensor))
    mesh.place_experts(data_first=data_first)
    return mesh


class PretendedFile(SwapFile):
    """A swap file for tensors on the meta device. count: called with the bytes of each new buffer. recorder: records
    reads and writes."""

    device = torch.device("meta")
    has_given_up = False
    buffer_bytes = 0

    def __init__(self, settings: SwapSettings, count: Callable[[int], None], recorder: Recorder) -> None:
        self.settings, self.folder = settings._replace(checksum=False), ""
        self._count, self._recorder = count, recorder
        self._started: list[tuple[int | None, int]] = []  # by request: (number of its transfer, its bytes)

    def new_buffer(self, n_bytes: int) -> torch.Tensor:
        self._count(n_bytes)
        self.buffer_bytes += n_bytes
        return torch.empty(n_bytes, dtype=torch.uint8, device=self.device)

    def start_read(self, offset: int, buffer: torch.Tensor, n_bytes: int) -> int:
        return self._start(READ, n_bytes)

    def start_write(self, offset: int, data: torch.Tensor, n_bytes: int, buffer: torch.Tensor) -> int:
        return self._start(WRITE, n_bytes)

    def _start(self, op: str, n_bytes: int) -> int:
        self._started.append((self._recorder.start(op, (), n_bytes, "swap file"), n_bytes))
        return len(self._started) - 1

    def wait(self, request: int) -> int:
        number, n_bytes = self._started[request]
        self._recorder.wait(number)
        return n_bytes

    def close(self) -> None:
        """Does nothing, because no file is open."""
