"""The few collectives that the engine uses. Tensors travel by a transport (``transports/``).

Gradients are sent before they are summed, and our own kernel adds them: in rank order, in f32, rounded once. So a sum
has the same bits in every run, and 16-bit gradients lose no precision on the way. With one rank nothing is sent.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from deepspeed_c.buffers import BufferPool, ordinary_memory
from deepspeed_c.comm.groups import get_all_ranks_from_group, get_rank, get_world_size
from deepspeed_c.comm.ledger import Ledger, LedgerEntry, ledger_of, ledger_of_pair
from deepspeed_c.comm.transports import joint_memory, table
from deepspeed_c.comm.transports.described import N_TAGS
from deepspeed_c.comm.transports.hosts import Hosts
from deepspeed_c.comm.transports.transport import Transport
from deepspeed_c.comm.work import Work, wait_all
from deepspeed_c.config.parallel import LocalTransport
from deepspeed_c.errors import CommError

__all__ = ["Collectives"]

# Arguments: sources of one dtype and length, scale, accumulate, out. Effect: out = (out if accumulate else 0) + scale *
# (sum of sources in order).
ReduceKernel = Callable[[Sequence[torch.Tensor], float, bool, torch.Tensor], Any]

_T = TypeVar("_T")

_LENGTH_BYTES = 8  # of the int64 before a pickled object


class Collectives:
    """One process group, as the engine uses it.

    Tensors are contiguous and one-dimensional unless a method says otherwise. All ranks of the group call the same
    methods in the same order with the same sizes and dtypes. Methods that return ``Work`` leave their tensors in use
    until it has been waited for.

    Every collective that sends something is entered in ``ledger``, with the ``label`` that its caller gives it. A label
    is a short text, the same on all ranks, that names the data (by parameter names, say). Labels are compared over
    shared memory, and in messages over gloo; elsewhere when a rank hangs.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        scratch: BufferPool | None = None,
        reduce: ReduceKernel | None = None,
        is_alone: bool = False,
    ) -> None:
        """group: by default all ranks. scratch: buffers to share with other objects. reduce: a kernel for the sums, in
        place of ours. is_alone: only this rank, even if the group has more ranks.
        """
        self.group = group
        self._local: LocalTransport = "off"
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
        self._pair_ledgers: dict[tuple[int, int, int], Ledger] = {}
        self._on_close: list[Callable[[], None]] = []
        self.scratch = BufferPool() if scratch is None else scratch
        self.reduce: ReduceKernel = _kernel() if reduce is None else reduce
        # {"cpu": "gloo", "cuda": "nccl"}
        names = (
            dict(part.split(":", 1) for part in dist.get_backend_config(group).split(","))
            if self.world_size > 1
            else {}
        )
        self._transports = {device: table.of_backend(name, device) for device, name in names.items()}
        # Numbers are sent from the CPU if the group has a backend for it, otherwise from the accelerator.
        self._number_device = torch.device("cpu" if "cpu" in names or not names else next(iter(names)))

    def use_shared_memory(self, wish: LocalTransport) -> None:
        """Sends CPU tensors through memory that all ranks share, or that the ranks of each host share. ``wish`` has to
        allow it, and the ranks have to be able to. Every later ``part`` does the same.

        Collective. Raises ``CommError`` if ``wish`` is "shm" and the ranks cannot share memory.
        """
        self._local = wish
        transport = None if self.world_size == 1 else table.connect(self, wish)
        if transport is not None:
            self._transports["cpu"] = transport

    def allocate(self, n_bytes: int, device: torch.device) -> torch.Tensor:
        """Uninitialised bytes for tensors to send among these ranks, in the memory from which sending is fastest."""
        transport = self._transports.get(device.type)
        return ordinary_memory(n_bytes, device) if transport is None else transport.allocate(n_bytes, device)

    @cached_property
    def outgoing(self) -> BufferPool:
        """Buffers for messages, in the memory of ``allocate``. A new block of that memory costs more than a copy, so
        blocks are lent repeatedly. Give a buffer back when its messages have been waited for.
        """
        transport = self._transports.get("cpu")
        source = ordinary_memory if transport is None else transport.allocate
        return BufferPool(keeps=lambda device: device.type == "cpu", allocate=source)

    def why_not_joint(self, device: torch.device) -> str:
        """Why these ranks cannot hold the memory of ``device`` together (``join``); "" where they can."""
        if device.type != "cpu":
            return f"weights lie in the memory of {device.type}"
        if self._local == "off":
            return '"comm": {"local": "off"}'
        transport = self._transports.get("cpu")
        return "there is one rank" if transport is None else transport.why_not_joint()

    def join(self, sizes: Sequence[int]) -> joint_memory.JointMemory | None:
        """CPU memory that these ranks hold together: parts of ``sizes`` bytes, multiples of the number of ranks. The
        ranks must be able to (``why_not_joint``). Collective; None on all ranks where there is no room for the memory.
        """
        return joint_memory.join(self, sizes)

    @cached_property
    def by_host(self) -> list[list[int]]:
        """The ranks of each host, ascending; hosts by their lowest ranks. Collective when first asked."""
        if self.world_size == 1:
            return [[0]]
        return Hosts(self, dist.group.WORLD if self.group is None else self.group).by_host

    def alone(self) -> Collectives:
        """This rank by itself: nothing is sent."""
        return Collectives(self.group, scratch=self.scratch, reduce=self.reduce, is_alone=True)

    def part(self, group: dist.ProcessGroup, axes: str) -> Collectives:
        """The collectives of some of these ranks, ``group``, with the same buffers and kernel. axes: names of
        the mesh axes that they lie along.

        A watchdog of these ranks explains failures in the part, too.
        """
        made = Collectives(group, scratch=self.scratch, reduce=self.reduce)
        made.use_shared_memory(self._local)
        made.ledger.make_part_of(self.ledger, axes)
        return made

    def call_on_close(self, function: Callable[[], None]) -> None:
        """Has ``close`` call ``function``, once."""
        self._on_close.append(function)

    def close(self) -> None:
        """Frees the scratch buffers and ends the watchdog. The process group stays: it belongs to the caller."""
        self.scratch.clear()
        self.outgoing.clear()
        while self._on_close:
            self._on_close.pop()()

    def reduce_scatter(
        self, flat: torch.Tensor, out: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False, label: str = ""
    ) -> Work:
        """Sums every rank's ``flat`` [n * s] and leaves this rank's slice of the sum in ``out`` [s].

        out = (out if accumulate else 0) + scale * sum. The sum is held in f32 and rounded once to the dtype of ``out``.
        Dtypes: f32, bf16, f16. ``out`` may have another of these dtypes than ``flat``, and may be this rank's own slice
        of ``flat``.
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
        return self._start(
            "reduce-scatter", flat, label, lambda by: by.reduce_scatter(self, flat, out, scale, accumulate, label)
        )

    def all_gather(self, flat: torch.Tensor, *, use_broadcast: bool = False, label: str = "") -> Work:
        """Sends each rank's slice of ``flat`` [n * s] to all ranks, in place. Any dtype.

        use_broadcast: one broadcast for each slice, on every backend (``allgather_partitions: false``).
        """
        return self._all_gather("all-gather", flat, label, use_broadcast=use_broadcast)

    def _all_gather(self, op: str, flat: torch.Tensor, label: str, *, use_broadcast: bool = False) -> Work:
        _check_flat(flat)
        if flat.numel() % self.world_size:
            raise ValueError(f"flat has {flat.numel()} elements, no multiple of {self.world_size} ranks")
        if flat.numel() == 0 or self.world_size == 1:
            return Work.done()
        if use_broadcast:
            return self._start(op, flat, label, lambda by: by.broadcast_slices(self, flat, label))
        return self._start(op, flat, label, lambda by: by.all_gather(self, flat, label))

    def all_reduce(self, flat: torch.Tensor, *, scale: float = 1.0, label: str = "") -> Work:
        """flat = scale * (sum of every rank's ``flat``), in place. The result has the same bits on every rank.

        f32, bf16, f16; any length.
        """
        _check_flat(flat)
        if flat.numel() == 0:
            return Work.done()
        if self.world_size == 1:
            if scale != 1.0:
                self.reduce([flat], scale, False, flat)
            return Work.done()
        return self._start("all-reduce", flat, label, lambda by: by.all_reduce(self, flat, scale, label))

    def shift(self, sent: torch.Tensor, received: torch.Tensor, distance: int, *, label: str = "") -> Work:
        """Each rank sends ``sent`` to the rank ``distance`` above it, around the group, and receives ``received`` from
        the rank ``distance`` below it. Any dtype. Lengths may differ over ranks, but a message has the same length at
        both ends. distance: not a multiple of the number of ranks.

        On the CPU both ends raise ``CommError`` where dtype, length or label differ.
        """
        _check_flat(sent)
        _check_flat(received)
        if distance % self.world_size == 0:
            raise ValueError(f"a shift by {distance} among {self.world_size} ranks goes nowhere")
        to, source = (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size
        transport = self.transport_of(sent)
        device = None if sent.is_cpu else sent.device
        entry = self.ledger.enter("shift", sent.nbytes, label, device, transport.name)
        handles = _begun(entry, transport.shift, self, sent, to, received, source, label)
        return Work(handles, kept=(sent, received), what="shift").note_in(entry)

    def all_to_all(
        self,
        flat: torch.Tensor,
        out: torch.Tensor,
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        *,
        label: str = "",
    ) -> Work:
        """Sends block i of ``flat`` (``in_splits[i]`` elements) to rank i, and receives block i of ``out``
        (``out_splits[i]`` elements) from rank i. Any dtype; blocks may be empty. The splits of two ranks must fit: each
        rank expects as many elements as the other sends. On the CPU all ranks raise ``CommError`` where they do not.
        """
        _check_flat(flat)
        _check_flat(out)
        for tensor, splits, name in ((flat, in_splits, "flat"), (out, out_splits, "out")):
            if len(splits) != self.world_size or sum(splits) != tensor.numel() or min(splits) < 0:
                raise ValueError(
                    f"{name} has {tensor.numel()} elements; blocks of {list(splits)} are to go to, or come from,"
                    f" {self.world_size} ranks"
                )
        if self.world_size == 1:
            out.copy_(flat)
            return Work.done()
        transport = self.transport_of(flat)
        entry = self.ledger.enter("all-to-all", flat.nbytes, label, flat.device, transport.name)
        what = f"all_to_all of {flat.numel()} {flat.dtype}"
        return _started(
            entry,
            lambda: Work(
                [transport.all_to_all(self, flat, out, in_splits, out_splits, label)], kept=[flat, out], what=what
            ),
        )

    def broadcast(self, tensor: torch.Tensor, src: int, *, label: str = "") -> None:
        """Rank ``src`` of the group sends its contiguous ``tensor`` (any shape and dtype) to all ranks."""
        if self.world_size > 1 and tensor.numel():
            transport = self.transport_of(tensor)
            with self.ledger.enter("broadcast", tensor.nbytes, label, tensor.device, transport.name) as entry:
                wait_all([transport.broadcast(self, tensor, src, label)], "broadcast", entry)

    def message(self, tensor: torch.Tensor, src: int, dst: int, *, tag: int = 0, label: str = "") -> Work:
        """Rank ``src`` of the group sends its contiguous ``tensor`` (any shape and dtype) to rank ``dst``. This rank is
        one of them.

        Messages of one ``tag`` (0 to 4095) from one rank to another arrive in the order of sending. Both ranks enter
        their messages in a ledger for the pair, with the same labels.

        On the CPU both ends raise ``CommError`` where dtype, shape or label differ.
        """
        if not 0 <= tag < N_TAGS:
            raise ValueError(f"tag is {tag}, must be 0 to {N_TAGS - 1}")
        transport = self.transport_of(tensor)
        ledger = self._pair_ledgers.get((src, dst, tag))
        if ledger is None:
            ledger = ledger_of_pair(self.ledger, self.group, self.global_ranks[src], self.global_ranks[dst], tag)
            self._pair_ledgers[src, dst, tag] = ledger
        device = None if tensor.is_cpu else tensor.device
        path = transport.message_name(dst if src == self.rank else src)
        entry = ledger.enter("message", tensor.nbytes, label, device, path)
        handle = _begun(entry, transport.message, self, tensor, src, dst, tag, label)
        return Work(() if handle is None else (handle,), kept=(tensor,), what="message").note_in(entry)

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
        """Sums contiguous tensors; at each element, at most one rank's tensor may be other than zero.

        The sum is in place and exact, for -0.0 and NaN too.
        """
        if self.world_size == 1 or tensor.numel() == 0:
            return
        # Integers add without rounding, and zero bits add nothing.
        flat = tensor.view(-1)
        bits = flat.view(torch.int32 if flat.element_size() % 4 == 0 else torch.uint8)
        self._all_reduce_now(bits, label or "sum_disjoint_bits")

    def _all_reduce_now(self, tensor: torch.Tensor, label: str) -> None:
        transport = self.transport_of(tensor)
        with self.ledger.enter("all-reduce", tensor.nbytes, label, tensor.device, transport.name) as entry:
            wait_all([transport.add_up(self, tensor, label)], "all_reduce", entry)

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
        sums = torch.tensor(numbers, dtype=torch.float64, device=self._number_device)
        self._all_reduce_now(sums, label or "sum_numbers")
        return sums.tolist()

    def gather_objects(self, value: Any, *, label: str = "") -> list[Any]:
        """Every rank's ``value`` (anything that pickles) by rank."""
        if self.world_size == 1:
            return [value]
        pickled, label = pickle.dumps(value), label or "gather_objects"
        return self._gather_pickled(pickled, self._gather_numbers("all-gather", len(pickled), label), label)

    def _gather_pickled(self, pickled: bytes, lengths: Sequence[int], label: str) -> list[Any]:
        block = torch.zeros(max(lengths), dtype=torch.uint8)
        block[: len(pickled)] = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
        blocks = self._all_gather_list("all-gather", block.to(self._number_device), label)
        return [pickle.loads(each[:n].cpu().numpy().tobytes()) for each, n in zip(blocks, lengths, strict=True)]

    def gather_small_objects(self, value: Any, usual_bytes: int, *, label: str = "") -> list[Any]:
        """Every rank's ``value`` by rank, as ``gather_objects``, in one exchange if every rank's value pickles to
        ``usual_bytes`` or less. All ranks must give the same ``usual_bytes``.

        ``gather_objects`` has two exchanges.
        """
        if self.world_size == 1:
            return [value]
        pickled = pickle.dumps(value)
        block = torch.zeros(_LENGTH_BYTES + usual_bytes, dtype=torch.uint8)
        block[:_LENGTH_BYTES].view(torch.int64).fill_(len(pickled))
        if len(pickled) <= usual_bytes:
            block[_LENGTH_BYTES : _LENGTH_BYTES + len(pickled)] = torch.frombuffer(
                bytearray(pickled), dtype=torch.uint8
            )
        blocks = self._all_gather_list("all-gather", block.to(self._number_device), label or "gather_small_objects")
        blocks = [each.cpu() for each in blocks]
        lengths = [int(each[:_LENGTH_BYTES].clone().view(torch.int64)) for each in blocks]
        if max(lengths) > usual_bytes:
            return self._gather_pickled(pickled, lengths, label or "gather_small_objects")
        return [pickle.loads(bytes(each.numpy())[_LENGTH_BYTES:]) for each in blocks]

    def barrier(self, *, label: str = "") -> None:
        """Returns when every rank has come here."""
        self._gather_numbers("barrier", 0, label)

    def _start(self, op: str, flat: torch.Tensor, label: str, send: Callable[[Transport], Work]) -> Work:
        """Enters ``op`` on ``flat`` in the ledger and starts it on the transport for ``flat``."""
        transport = self.transport_of(flat)
        entry = self.ledger.enter(op, flat.nbytes, label, flat.device, transport.name)
        return _started(entry, lambda: send(transport))

    def transport_of(self, tensor: torch.Tensor) -> Transport:
        """The transport for ``tensor``. Raises ``CommError`` where the group has none for its device."""
        transport = self._transports.get("cpu" if tensor.is_cpu else tensor.device.type)
        if transport is None:
            raise CommError(
                f"the group has no backend for {tensor.device.type} tensors"
                f" (it has {dist.get_backend_config(self.group)})",
                where=f"rank {self.rank}",
                fix="leave dist_backend unset in init_distributed, or name one backend for each device",
            )
        return transport

    def own_slice(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's slice [s] of ``flat`` [n * s]."""
        numel = flat.numel() // self.world_size
        return flat.narrow(0, self.rank * numel, numel)


def _started(entry: LedgerEntry, send: Callable[[], Work]) -> Work:
    """The work that ``send`` starts, noted in ``entry``. If ``send`` fails, the entry ends."""
    return _begun(entry, send).note_in(entry)


def _begun(entry: LedgerEntry, start: Callable[..., _T], *args: Any) -> _T:
    """What ``start`` returns. If it fails, the entry ends."""
    try:
        return start(*args)
    except BaseException:
        entry.end()
        raise


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
