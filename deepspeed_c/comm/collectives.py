"""The few collectives that the engine runs on, each by the fastest way that a backend has (``BACKENDS``).

Gradients travel unsummed and are added by our own kernel: in rank order, in f32, rounded once. So a sum has the same
bits in every run, and 16-bit gradients lose nothing on the way. With one rank nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deepspeed_c.buffers import BufferPool
from deepspeed_c.comm.groups import get_all_ranks_from_group, get_rank, get_world_size
from deepspeed_c.comm.ledger import ENTERED, LedgerEntry, ledger_of
from deepspeed_c.errors import CommError

__all__ = [
    "BACKENDS",
    "GENERIC",
    "GLOO",
    "Backend",
    "Collectives",
    "Work",
    "all_gather_single",
    "reduce_scatter_single",
]

# torch 2.13 renamed these two and warns about the old names; torch 2.10 has only the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# (sources of one dtype and length, scale, accumulate, out): out = (out if accumulate else 0) + scale * (sum of sources
# in order).
ReduceKernel = Callable[[Sequence[torch.Tensor], float, bool, torch.Tensor], Any]


class Work:
    """Something that was started and is finished by ``wait``.

    Finishing may send as well (``all_reduce`` of 16-bit tensors over gloo), so all ranks wait for their works in the
    same order, and between the same other collectives.
    """

    __slots__ = ("_entry", "_error", "_handles", "_kept", "_steps", "_what")

    def __init__(
        self,
        handles: Sequence[Any] = (),
        *,
        finish: Callable[[], None] | None = None,
        kept: Sequence[torch.Tensor] = (),
        what: str = "",
    ) -> None:
        """handles: of ``torch.distributed``; when they are done, ``finish`` runs. kept: tensors in use until then."""
        self._handles = tuple(handles)
        self._steps: tuple[Callable[[], None], ...] = () if finish is None else (finish,)
        self._kept = tuple(kept)
        self._what = what
        self._entry: LedgerEntry | None = None
        self._error: BaseException | None = None

    @classmethod
    def done(cls) -> Work:
        """Work that is finished already."""
        return cls()

    def then(self, step: Callable[[], None]) -> Work:
        """Runs ``step`` once, after earlier steps, when this work has been waited for (at once if it has been)."""
        if self._error is not None:
            raise self._error
        if self._handles or self._steps:
            self._steps += (step,)
        else:
            step()
        return self

    def wait(self) -> None:
        """Waits and runs the steps; a second call does nothing (or raises what the first one raised).

        Raises ``CommError`` when a rank is gone or the group's timeout is over.
        """
        if self._error is not None:
            raise self._error
        handles, self._handles = self._handles, ()
        steps, self._steps = self._steps, ()
        kept, self._kept = self._kept, ()  # noqa: F841  alive until this call returns
        entry, self._entry = self._entry, None
        if entry is not None:
            entry.begin_wait()
        try:
            _wait_all(handles, self._what, entry)
            for step in steps:
                step()
        except BaseException as error:
            self._error = error
            if entry is not None:
                entry.end()
            raise
        if entry is not None:
            entry.finish()


def _wait_all(handles: Sequence[Any], what: str, entry: LedgerEntry | None = None) -> None:
    """Waits for every handle even when one fails: a buffer must not be freed while a transfer still runs in it."""
    first: RuntimeError | None = None
    for handle in handles:
        try:
            handle.wait()
        except RuntimeError as error:
            first = first or error
    if first is not None:
        at = [f"rank {dist.get_rank()}"] if dist.is_initialized() else []
        why = "" if entry is None else entry.explain()
        raise CommError(
            f"{what} failed: {first}",
            where=", ".join(at if entry is None else [*at, str(entry)]),
            fix=f"{why + '; ' if why else ''}look at the output of the other ranks: one of them has stopped, or runs"
            " something else",
        ) from first


class Collectives:
    """One process group, as the engine uses it.

    Tensors are contiguous and one-dimensional unless a method says otherwise. All ranks of the group call the same
    methods in the same order with the same sizes and dtypes. Methods that return ``Work`` leave their tensors in use
    until it has been waited for.

    Every collective that sends something is entered in ``ledger``, with the ``label`` that its caller gives it: a short
    text, the same on all ranks, that says whose data it carries (parameter names, say). It is read when a rank hangs.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        scratch: BufferPool | None = None,
        reduce: ReduceKernel | None = None,
        is_alone: bool = False,
    ) -> None:
        """group: by default all ranks. scratch: buffers to share with others. reduce: another kernel for the sums than
        ours. is_alone: only this rank, whatever the group is.
        """
        self.group = group
        self.world_size = 1 if is_alone else get_world_size(group)
        self.rank = 0 if is_alone else get_rank(group)
        if self.rank < 0:
            raise CommError(
                "this process is not part of the group",
                where=f"rank {dist.get_rank()}",
                fix="pass a group that this rank belongs to",
            )
        self.global_ranks = [get_rank()] if is_alone else get_all_ranks_from_group(group)
        self.global_rank = self.global_ranks[self.rank]
        self.ledger = ledger_of(group)
        self._on_close: list[Callable[[], None]] = []
        self.scratch = BufferPool() if scratch is None else scratch
        self.reduce: ReduceKernel = _kernel() if reduce is None else reduce
        # {"cpu": "gloo", "cuda": "nccl"}
        names = (
            dict(part.split(":", 1) for part in dist.get_backend_config(group).split(","))
            if self.world_size > 1
            else {}
        )
        self._backends = {device: BACKENDS.get(name, GENERIC) for device, name in names.items()}
        # Numbers travel on the CPU where they can, else on the accelerator.
        self._number_device = torch.device("cpu" if "cpu" in names or not names else next(iter(names)))

    def alone(self) -> Collectives:
        """This rank by itself: nothing is sent."""
        return Collectives(self.group, scratch=self.scratch, reduce=self.reduce, is_alone=True)

    def part(self, group: dist.ProcessGroup, axes: str) -> Collectives:
        """Those of some of these ranks, ``group``, with the same buffers and kernel. axes: of a mesh, along which they
        lie.

        Who watches these ranks explains failures there too.
        """
        made = Collectives(group, scratch=self.scratch, reduce=self.reduce)
        made.ledger.make_part_of(self.ledger, axes)
        return made

    def call_on_close(self, function: Callable[[], None]) -> None:
        """Has ``close`` call ``function``, once."""
        self._on_close.append(function)

    def close(self) -> None:
        """Frees the scratch buffers and ends what watches; the group is not ours to end."""
        self.scratch.clear()
        while self._on_close:
            self._on_close.pop()()

    def reduce_scatter(
        self, flat: torch.Tensor, out: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False, label: str = ""
    ) -> Work:
        """Sums every rank's ``flat`` [n * s] and leaves this rank's slice of the sum in ``out`` [s].

        out = (out if accumulate else 0) + scale * sum, the sum held in f32 and rounded once to out's dtype. f32, bf16,
        f16; out may have another of these than flat, and may be this rank's own slice of flat.
        """
        _check_flat(flat)
        _check_flat(out)
        if flat.numel() != self.world_size * out.numel():
            raise ValueError(
                f"flat has {flat.numel()} elements; {self.world_size} ranks times {out.numel()} are needed"
            )
        if flat.numel() == 0:
            return Work.done()
        if self.world_size == 1:
            if accumulate or scale != 1.0 or not _is_same(flat, out):
                self.reduce([flat], scale, accumulate, out)
            return Work.done()
        way = self._backend(flat).reduce_scatter
        return self._start("reduce-scatter", flat, label, way, flat, out, scale, accumulate)

    def all_gather(self, flat: torch.Tensor, *, use_broadcast: bool = False, label: str = "") -> Work:
        """Each rank's slice of ``flat`` [n * s] goes to all ranks, in place. Any dtype.

        use_broadcast: one broadcast a slice on every backend (``allgather_partitions: false``).
        """
        return self._all_gather("all-gather", flat, label, use_broadcast=use_broadcast)

    def _all_gather(self, op: str, flat: torch.Tensor, label: str, *, use_broadcast: bool = False) -> Work:
        _check_flat(flat)
        if flat.numel() % self.world_size:
            raise ValueError(f"flat has {flat.numel()} elements, no multiple of {self.world_size} ranks")
        if flat.numel() == 0 or self.world_size == 1:
            return Work.done()
        way = _broadcast_slices if use_broadcast else self._backend(flat).all_gather
        return self._start(op, flat, label, way, flat)

    def all_reduce(self, flat: torch.Tensor, *, scale: float = 1.0, label: str = "") -> Work:
        """flat = scale * (sum of every rank's ``flat``), in place, the same bits on every rank.

        f32, bf16, f16; any length.
        """
        _check_flat(flat)
        if flat.numel() == 0:
            return Work.done()
        if self.world_size == 1:
            if scale != 1.0:
                self.reduce([flat], scale, False, flat)
            return Work.done()
        return self._start("all-reduce", flat, label, self._backend(flat).all_reduce, flat, scale)

    def broadcast(self, tensor: torch.Tensor, src: int, *, label: str = "") -> None:
        """Rank ``src`` of the group sends its contiguous ``tensor`` (any shape and dtype) to all."""
        if self.world_size > 1 and tensor.numel():
            with self.ledger.enter("broadcast", tensor.nbytes, label, tensor.device) as entry:
                handle = dist.broadcast(tensor, self.global_ranks[src], group=self.group, async_op=True)
                _wait_all([handle], "broadcast", entry)

    def all_gather_list(self, tensor: torch.Tensor, *, label: str = "") -> list[torch.Tensor]:
        """Every rank's ``tensor`` (any shape, the same everywhere), by rank."""
        return self._all_gather_list("all-gather", tensor, label or "all_gather_list")

    def _all_gather_list(self, op: str, tensor: torch.Tensor, label: str) -> list[torch.Tensor]:
        if self.world_size == 1:
            return [tensor]
        whole = tensor.new_empty((self.world_size, tensor.numel()))
        whole[self.rank].copy_(tensor.reshape(-1))
        self._all_gather(op, whole.view(-1), label).wait()
        return [row.view(tensor.shape) for row in whole]

    def sum_disjoint_bits(self, tensor: torch.Tensor, *, label: str = "") -> None:
        """Sums contiguous tensors of which at most one rank's is other than zero at each element.

        In place and exactly, -0.0 and NaN too.
        """
        if self.world_size == 1 or tensor.numel() == 0:
            return
        # Integers add without rounding, and zero bits add nothing.
        flat = tensor.view(-1)
        bits = flat.view(torch.int32 if flat.element_size() % 4 == 0 else torch.uint8)
        self._all_reduce_now(bits, label or "sum_disjoint_bits")

    def _all_reduce_now(self, tensor: torch.Tensor, label: str) -> None:
        with self.ledger.enter("all-reduce", tensor.nbytes, label, tensor.device) as entry:
            _wait_all([dist.all_reduce(tensor, group=self.group, async_op=True)], "all_reduce", entry)

    def gather_numbers(self, number: float, *, label: str = "") -> list[Any]:
        """Every rank's ``number`` by rank: all int (64 bit) or all float on all ranks."""
        return self._gather_numbers("all-gather", number, label or "gather_numbers")

    def _gather_numbers(self, op: str, number: float, label: str) -> list[Any]:
        if self.world_size == 1:
            return [number]
        dtype = torch.int64 if isinstance(number, int) else torch.float64
        mine = torch.tensor([number], dtype=dtype, device=self._number_device)
        return torch.cat(self._all_gather_list(op, mine, label)).tolist()

    def sum_numbers(self, numbers: Sequence[float], *, label: str = "") -> list[float]:
        """Sums lists of equal length over ranks, element by element, in f64; the same bits on every rank."""
        if self.world_size == 1 or not numbers:
            return [float(number) for number in numbers]
        table = torch.tensor(numbers, dtype=torch.float64, device=self._number_device)
        self._all_reduce_now(table, label or "sum_numbers")
        return table.tolist()

    def gather_objects(self, value: Any, *, label: str = "") -> list[Any]:
        """Every rank's ``value`` (anything that pickles) by rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self.ledger.enter("all-gather", 0, label or "gather_objects"):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self, *, label: str = "") -> None:
        """Returns when every rank has come here."""
        self._gather_numbers("barrier", 0, label)

    def _start(self, op: str, flat: torch.Tensor, label: str, way: Callable[..., Work], *args: Any) -> Work:
        """Enters ``op`` on ``flat`` in the ledger and starts it by ``way``."""
        entry = self.ledger.enter(op, flat.nbytes, label, flat.device)
        try:
            work = way(self, *args)
        except BaseException:
            entry.end()
            raise
        entry.state = ENTERED
        work._entry = entry
        return work

    def _backend(self, flat: torch.Tensor) -> Backend:
        backend = self._backends.get(flat.device.type)
        if backend is None:
            raise CommError(
                f"the group has no backend for {flat.device.type} tensors"
                f" (it has {dist.get_backend_config(self.group)})",
                where=f"rank {self.rank}",
                fix="leave dist_backend unset in init_distributed, or name one backend for each device",
            )
        return backend

    def own_slice(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's slice [s] of ``flat`` [n * s]."""
        numel = flat.numel() // self.world_size
        return flat.narrow(0, self.rank * numel, numel)


def _kernel() -> ReduceKernel:
    from deepspeed_c import ops  # noqa: F401  registers the operators

    return torch.ops.deepspeed_c.flat_reduce_


def _check_flat(tensor: torch.Tensor) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"a contiguous one-dimensional tensor is needed, not {tuple(tensor.shape)} with strides {tensor.stride()}"
        )


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype


def _exchange_then_reduce(
    comm: Collectives, flat: torch.Tensor, out: torch.Tensor, scale: float, accumulate: bool
) -> Work:
    """Every rank gets all ranks' versions of its slice and adds them up itself."""
    received = comm.scratch.take(flat.numel(), flat.dtype, flat.device)
    handle = dist.all_to_all_single(received, flat, group=comm.group, async_op=True)

    def finish() -> None:
        comm.reduce(list(received.view(comm.world_size, -1)), scale, accumulate, out)
        comm.scratch.give(received)

    return Work([handle], finish=finish, kept=[flat, out], what=f"reduce_scatter of {flat.numel()} {flat.dtype}")


def _reduce_scatter_by_backend(
    comm: Collectives, flat: torch.Tensor, out: torch.Tensor, scale: float, accumulate: bool
) -> Work:
    """The backend sums (in flat's dtype); scaling and adding to what is there is ours."""
    what = f"reduce_scatter of {flat.numel()} {flat.dtype}"
    if scale == 1.0 and not accumulate and out.dtype == flat.dtype:
        handle = reduce_scatter_single(out, flat, group=comm.group, async_op=True)
        return Work([handle], kept=[flat, out], what=what)
    received = comm.scratch.take(out.numel(), flat.dtype, flat.device)
    handle = reduce_scatter_single(received, flat, group=comm.group, async_op=True)

    def finish() -> None:
        comm.reduce([received], scale, accumulate, out)
        comm.scratch.give(received)

    return Work([handle], finish=finish, kept=[flat, out], what=what)


def _broadcast_slices(comm: Collectives, flat: torch.Tensor) -> Work:
    """All ranks' broadcasts run at once. Over gloo 3 to 5 times as fast as its all_gather, which copies into lists."""
    handles = [
        dist.broadcast(part, comm.global_ranks[r], group=comm.group, async_op=True)
        for r, part in enumerate(flat.view(comm.world_size, -1))
    ]
    return Work(handles, kept=[flat], what=f"all_gather of {flat.numel()} {flat.dtype}")


def _all_gather_by_backend(comm: Collectives, flat: torch.Tensor) -> Work:
    handle = all_gather_single(flat, comm.own_slice(flat), group=comm.group, async_op=True)
    return Work([handle], kept=[flat], what=f"all_gather of {flat.numel()} {flat.dtype}")


def _all_reduce_by_backend(comm: Collectives, flat: torch.Tensor, scale: float) -> Work:
    handle = dist.all_reduce(flat, group=comm.group, async_op=True)
    finish = None if scale == 1.0 else lambda: comm.reduce([flat], scale, False, flat)
    return Work([handle], finish=finish, kept=[flat], what=f"all_reduce of {flat.numel()} {flat.dtype}")


def _exchange_reduce_broadcast(comm: Collectives, flat: torch.Tensor, scale: float) -> Work:
    """Each rank sums one piece (as ``_exchange_then_reduce``) and sends it to all. Pieces differ by at most 1."""
    n, rank, numel = comm.world_size, comm.rank, flat.numel()
    sizes = [numel // n + (r < numel % n) for r in range(n)]
    pieces = flat.split(sizes)
    received = comm.scratch.take(n * sizes[rank], flat.dtype, flat.device)
    handle = dist.all_to_all_single(received, flat, [sizes[rank]] * n, sizes, group=comm.group, async_op=True)
    what = f"all_reduce of {numel} {flat.dtype}"

    def finish() -> None:
        if sizes[rank]:
            comm.reduce(list(received.view(n, -1)), scale, False, pieces[rank])
        comm.scratch.give(received)
        _wait_all(
            [
                dist.broadcast(piece, comm.global_ranks[r], group=comm.group, async_op=True)
                for r, piece in enumerate(pieces)
                if piece.numel()
            ],
            what,
        )

    return Work([handle], finish=finish, kept=[flat], what=what)


def _all_reduce_gloo(comm: Collectives, flat: torch.Tensor, scale: float) -> Work:
    """gloo's ring sums 16-bit numbers one by one and rounds at each rank; in f32 it is fast, and takes no scratch."""
    way = _all_reduce_by_backend if flat.dtype == torch.float32 else _exchange_reduce_broadcast
    return way(comm, flat, scale)


class Backend(NamedTuple):
    """How each collective is done over one backend of ``torch.distributed``. Lengths are > 0, ranks > 1."""

    reduce_scatter: Callable[[Collectives, torch.Tensor, torch.Tensor, float, bool], Work]
    all_gather: Callable[[Collectives, torch.Tensor], Work]
    all_reduce: Callable[[Collectives, torch.Tensor, float], Work]


# Measured over gloo with 48 MiB, 2 / 3 ranks on 2 cores: reduce_scatter 38 / 51 ms by all_to_all (its own
# reduce_scatter: 120 ms for 64 MiB and 2 ranks), all_gather 20-28 / 32 ms by broadcasts (its own: 75-109 / 93-230),
# all_reduce f32 55 / 79 ms by its ring (ours 56 / 85), fp16 104 / 129 ms by its ring, 68 / 89 by ours.
GLOO = Backend(_exchange_then_reduce, _broadcast_slices, _all_reduce_gloo)
# What a backend made for large machines does best itself.
GENERIC = Backend(_reduce_scatter_by_backend, _all_gather_by_backend, _all_reduce_by_backend)

BACKENDS: dict[str, Backend] = {"gloo": GLOO}
