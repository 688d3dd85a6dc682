"""Ranks on several hosts exchange CPU tensors in two levels: through shared memory inside a host, over gloo between.

[Note: traffic between hosts] Each element of a tensor leaves a host once for each other host that needs it, however
many ranks there are. The data for one host is one *block*: the slices of all ranks of that host. The ranks of the
sending host cut the block into equal pieces, one for each rank. Each rank sums its piece over its host, or gathers it
for its host. It sends the piece to those ranks of the other host whose slices overlap the piece, or receives the piece
from them. Where hosts have equally many ranks, a piece is a slice.

[Note: order of sums] Sums are taken first inside each host in rank order, then over the hosts in the order of their
lowest ranks. Both are in f32 and rounded once at the end: sums of 16-bit numbers inside a host are sent in f32. So a
sum has the same bits on all ranks and in every run. These bits may differ from the bits over gloo alone, or on one
host.

[Note: three steps] A call has three steps, as the generators below show. The caller starts the first transfers; a
thread waits for them and starts the next ones; the caller finishes the call when it waits. The thread takes one call
after the other, so that no rank has to wait for its calls in a certain order. Ranks have to start all calls on shared
memory in one order. So each host has two ends of shared memory: the first for callers, the second for the thread. Data
goes over gloo in messages, which carry the number of their call.

[Note: agreement] gloo ends a process that receives a message of another length than it expects. So messages match only
if lengths are equal (``_tag_of``). With each call every rank also sends a description of the call to one rank of each
other host. Where descriptions differ, the call fails on both ranks, and the error has both descriptions. Ranks of one
host compare their calls without such messages. Descriptions travel together with the data, which does not wait for
them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import threading
import uuid
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from deepspeed_c.background import BackgroundThread
from deepspeed_c.buffers import ordinary_memory
from deepspeed_c.comm.groups import timeout_of
from deepspeed_c.comm.transports.described import (
    all_to_all_described,
    head_of,
    message_described,
    shift_described,
    text_of,
)
from deepspeed_c.comm.transports.hosts import Hosts, NotConnectedError
from deepspeed_c.comm.transports.shared_memory import SHIFT_TAG, SharedMemory, engine_tag, open_ends
from deepspeed_c.comm.transports.transport import Transport
from deepspeed_c.comm.work import Handle, Work

if TYPE_CHECKING:
    from deepspeed_c.comm.collectives import Collectives

__all__ = ["TwoLevels", "connect"]

_HALVES = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float32, *_HALVES)
# Tags of gloo's messages are positive and have 31 bits: the number of a call and the message's purpose, above them a
# hash of the length.
_TAGS_A_CALL = 3
_CALL_BITS = 19
_LENGTH_BITS = 12
# Time for the thread to let go of a failed call at the end of the process. A thread that waits for another host does
# not end in that time, but does not keep the process alive.
_LAST_SECONDS = 1.0


class _Overlap(NamedTuple):
    """Elements [begin, end) of a block, which lie in a single piece and in a single slice."""

    piece: int
    slice: int
    begin: int
    end: int


def _piece_numel(n_pieces: int, numel: int) -> int:
    """Length of all pieces but the last ones, which may be shorter or empty."""
    return -(-numel // n_pieces)


def _overlaps(n_pieces: int, n_slices: int, slice_numel: int) -> Iterator[_Overlap]:
    """Overlaps in a block of ``n_slices`` slices that is cut into ``n_pieces`` pieces."""
    length = _piece_numel(n_pieces, n_slices * slice_numel)
    for piece in range(n_pieces):
        for i in range(n_slices):
            begin = max(piece * length, i * slice_numel)
            end = min((piece + 1) * length, (i + 1) * slice_numel)
            if begin < end:
                yield _Overlap(piece, i, begin, end)


class _Places(NamedTuple):
    """The ranks of the group by host."""

    hosts: tuple[tuple[int, ...], ...]
    """Ranks by host, ascending; hosts by their lowest ranks."""
    rank: int
    host: int
    """The host of ``rank``."""
    local: int
    """The number of ``rank`` on its host."""

    @property
    def mine(self) -> tuple[int, ...]:
        """The ranks of this host."""
        return self.hosts[self.host]

    @property
    def others(self) -> list[int]:
        """The other hosts, the next one first, so that not all ranks send to the same host at once."""
        n = len(self.hosts)
        return [(self.host + i) % n for i in range(1, n)]


class _Messages:
    """Messages over gloo, between ranks of several hosts. Ranks are numbered within the group."""

    def __init__(self, group: dist.ProcessGroup, names: Sequence[int]) -> None:
        """names: the ranks' numbers in the world."""
        self._group: dist.ProcessGroup | None = group
        self._names = names

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Handle:
        return self._start(self._living().send, tensor, rank, _tag_of(tensor, tag))

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Handle:
        return self._start(self._living().recv, tensor, rank, _tag_of(tensor, tag))

    def name(self, rank: int) -> str:
        """A rank of another host, for messages to the user."""
        return f"rank {self._names[rank]}, of another host"

    def _start(self, call: Callable[..., Handle], tensor: torch.Tensor, rank: int, tag: int) -> Handle:
        other = self.name(rank)
        try:
            return _Message(call([tensor], rank, tag), other)
        except RuntimeError as error:  # the rank is known to have gone
            raise _failure_at(other, error) from None

    def _living(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("the connections between the hosts have been closed")
        return self._group

    def close(self) -> None:
        """Closes the connections as soon as nobody holds a message any more: the other ranks notice."""
        self._group = None


class _Message:
    """A message of ``_Messages``; its failure names the other rank."""

    def __init__(self, handle: Handle, other: str) -> None:
        self._handle, self._other = handle, other

    def wait(self) -> None:
        try:
            self._handle.wait()
        except RuntimeError as error:
            raise _failure_at(self._other, error) from None


def _failure_at(other: str, error: RuntimeError) -> RuntimeError:
    return RuntimeError(f"{other}: {str(error).splitlines()[0]}")


def _tag_of(tensor: torch.Tensor, tag: int) -> int:
    """Adds a hash of the length to ``tag``: messages of other lengths do not match, but for one in
    ``1 << _LENGTH_BITS``. See [Note: agreement].
    """
    mixed = tensor.nbytes * 0x9E3779B97F4A7C15 & (1 << 64) - 1
    return (mixed >> 64 - _LENGTH_BITS) << _CALL_BITS | tag % (1 << _CALL_BITS)


class _Agreement:
    """Compares the descriptions of a call across hosts."""

    def __init__(self, owner: TwoLevels, what: str, tag: int) -> None:
        """Sends this rank's description, and receives one from a rank of each other host."""
        self._owner, self._what = owner, what
        places, messages = owner.places, owner.messages
        self._head = head_of(what)
        mine = torch.frombuffer(bytearray(self._head), dtype=torch.uint8)
        self._told: list[tuple[int, torch.Tensor, Handle]] = []
        self._sent: list[Handle] = []
        for host in places.others:  # receive before send: a rank that receives a description has already sent its own
            rank = places.hosts[host][places.local % len(places.hosts[host])]
            theirs = torch.empty_like(mine)
            self._told.append((rank, theirs, messages.receive(theirs, rank, tag)))
        for host in places.others:
            for i, rank in enumerate(places.hosts[host]):
                if i % len(places.mine) == places.local:
                    self._sent.append(messages.send(mine, rank, tag))

    def check(self) -> None:
        """Raises RuntimeError with both descriptions where they differ. The loss of a rank is left for the data
        transfer to report.
        """
        for rank, theirs, handle in self._told:
            try:
                handle.wait()
            except RuntimeError:
                continue
            if (other := theirs.numpy().tobytes()) != self._head:
                raise RuntimeError(
                    f"{self._owner.messages.name(rank)}, has started {text_of(other)}, this one {self._what}; all ranks"
                    " have to start the same, of the same size, dtype and label"
                )

    def end(self) -> None:
        for handle in self._sent:
            handle.wait()


class _Call:
    """One collective under way. Its generator ``steps`` has run to its first yield."""

    def __init__(self, owner: TwoLevels, what: str, tag: int, steps: Generator[None, None, None]) -> None:
        self._owner, self._what, self._tag, self._steps = owner, what, tag, steps
        self._agreement: _Agreement | None = None
        self._is_ready = threading.Event()
        self._error = ""
        self._is_over = False

    def start(self) -> None:
        """The first step. Raises RuntimeError."""
        self._agreement = _Agreement(self._owner, self._what, self._tag + _TAGS_A_CALL - 1)
        next(self._steps)

    def go_on(self) -> None:
        """The second step, on the thread."""
        agreement = self._agreement
        if self._owner.failure or agreement is None:
            self.fail(self._owner.failure)
            return
        try:
            agreement.check()
            next(self._steps)
        except RuntimeError as error:
            self._owner.fail(str(error))
            self.fail(self._owner.failure)
        except StopIteration:  # ``fail`` has closed the generator meanwhile
            pass
        self._is_ready.set()

    def fail(self, error: str) -> None:
        """Stops the call and releases its connections. A thread that is running a step fails by itself."""
        if self._is_over:
            return
        self._error = self._error or error
        self._agreement = None  # connections end with the last message
        with contextlib.suppress(ValueError):  # the generator is running in another thread
            self._steps.close()
        self._is_ready.set()

    def wait(self) -> None:
        """The last step."""
        self._is_ready.wait()
        if self._error:
            raise RuntimeError(self._error)
        try:
            for _ in self._steps:
                pass
            if self._agreement is not None:
                self._agreement.end()
        except RuntimeError as error:
            self._owner.fail(str(error))
            self.fail(str(error))
        if self._error:
            raise RuntimeError(self._error)
        self._is_over = True


class TwoLevels(Transport):
    """The two levels of one process group, as its ranks use them. They end with the group."""

    name = "shm+gloo"

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        hosts: Sequence[Sequence[int]],
        rank: int,
        ends: tuple[SharedMemory, SharedMemory] | None,
        between: dist.ProcessGroup,
        names: Sequence[int],
    ) -> None:
        """hosts: the ranks of ``process_group`` by host. ends: this host's two ends of shared memory, for callers and
        for the thread; None where ``rank`` is alone on its host. between: a gloo group of the same ranks that only this
        object uses. names: the ranks' numbers in the world.
        """
        host = next(i for i, ranks in enumerate(hosts) if rank in ranks)
        self.places = _Places(tuple(tuple(ranks) for ranks in hosts), rank, host, list(hosts[host]).index(rank))
        # Where a rank is alone on its host, nothing uses the two ends of shared memory.
        self._first: Any
        self._second: Any
        self._first, self._second = ends or (None, None)
        self.messages = _Messages(between, names)
        self.failure = ""
        """Why the two levels have ended; "" while they work."""
        self._n_calls = 0
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()
        self._pid = os.getpid()
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._end = weakref.ref(process_group, lambda _: self.close())
        _open.add(self)

    def allocate(self, n_bytes: int, device: torch.device) -> torch.Tensor:
        """As ``SharedMemory.allocate``. Sums inside a host copy data out of this memory, gathers do not."""
        return ordinary_memory(n_bytes, device) if self._second is None else self._second.allocate(n_bytes, device)

    def in_words(self) -> str:
        counts = ", ".join(str(len(ranks)) for ranks in self.places.hosts)
        return f"hosts have {counts} ranks, which talk through shared memory inside each, over gloo between"

    def close(self) -> None:
        """Ends the thread and the connections."""
        if os.getpid() == self._pid:  # a forked child has neither
            self._queue.put(None)
            self.fail("the group has ended")

    def fail(self, why: str) -> None:
        """Ends the connections, so that the other ranks learn of the failure. Ranks of this host learn of it at once,
        other ranks when they wait for this rank.
        """
        with self._lock:
            if self.failure:
                return
            self.failure = why
        for end in (self._first, self._second):
            if end is not None:
                end.close()
        self.messages.close()
        for call in list(self._calls):
            call.fail(why)

    def sum_inside(self, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        """Starts a sum for a caller: ``flat`` [k * m] of the k ranks of this host is summed into ``out`` [m]."""
        return self._first.start("reduce_scatter", flat, out, 1.0, False)

    def gather_inside(self, flat: torch.Tensor) -> Handle:
        """Starts a gather for the thread: each rank's m elements of ``flat`` [k * m] go to all ranks of this host."""
        return self._second.start("all_gather", flat)

    def reduce_scatter(
        self, comm: Collectives, flat: torch.Tensor, out: torch.Tensor, scale: float, accumulate: bool, label: str
    ) -> Work:
        def steps(tag: int) -> Generator[None, None, None]:
            sums = _Sums(self, comm, flat, tag)
            yield
            sums.finish(out, scale, accumulate)
            yield
            sums.end()

        what = f"reduce_scatter of {flat.numel()} {flat.dtype}"
        return Work([self._start(what, label, steps)], kept=[flat, out], what=what)

    def all_gather(self, comm: Collectives, flat: torch.Tensor, label: str) -> Work:
        def steps(tag: int) -> Generator[None, None, None]:
            gather = _HostGather(self, comm, flat, tag)
            gather.post()
            yield
            gather.spread()
            yield
            gather.end()

        what = f"all_gather of {flat.numel()} {flat.dtype}"
        return Work([self._start(what, label, steps)], kept=[flat], what=what)

    def all_reduce(self, comm: Collectives, flat: torch.Tensor, scale: float, label: str) -> Work:
        what = f"all_reduce of {flat.numel()} {flat.dtype}"
        handle = self._start(what, label, lambda tag: self._add(comm, flat, scale, tag))
        return Work([handle], kept=[flat], what=what)

    def add_up(self, comm: Collectives, tensor: torch.Tensor, label: str) -> Handle:
        what = f"all_reduce of {tensor.numel()} {tensor.dtype}"
        return self._start(what, label, lambda tag: self._add(comm, tensor.view(-1), 1.0, tag))

    def _add(self, comm: Collectives, flat: torch.Tensor, scale: float, tag: int) -> Generator[None, None, None]:
        """A reduce-scatter, then an all-gather of the sums."""
        n = comm.world_size
        whole = flat
        if flat.numel() % n:
            whole = comm.scratch.take(n * _piece_numel(n, flat.numel()), flat.dtype, flat.device)
            whole[: flat.numel()].copy_(flat)
            whole[flat.numel() :].zero_()
        sums = _Sums(self, comm, whole, tag)
        gather = _HostGather(self, comm, whole, tag + 1)
        yield
        sums.finish(comm.own_slice(whole), scale, False)
        gather.post()
        gather.spread()
        yield
        sums.end()
        gather.end()
        if whole is not flat:
            flat.copy_(whole[: flat.numel()])
            comm.scratch.give(whole)

    def broadcast(self, comm: Collectives, tensor: torch.Tensor, src: int, label: str) -> Handle:
        """``src`` sends to the first rank of each other host, and that rank sends to its host."""
        places, flat = self.places, tensor.view(-1)
        home = next(i for i, ranks in enumerate(places.hosts) if src in ranks)

        def steps(tag: int) -> Generator[None, None, None]:
            sent: list[Handle] = []
            arrived: list[Handle] = []
            if comm.rank == src:
                sent = [self.messages.send(flat, places.hosts[host][0], tag) for host in places.others]
            elif places.host != home and places.local == 0:
                arrived = [self.messages.receive(flat, src, tag)]
            yield
            for message in arrived:
                message.wait()
            spread: list[Handle] = []
            if self._second is not None:
                begin = places.mine.index(src) if places.host == home else 0
                spread = [self._second.start("broadcast", flat, begin)]
            yield
            for handle in (*spread, *sent):
                handle.wait()

        return self._start(f"broadcast of {flat.numel()} {flat.dtype} by rank {src} of the group", label, steps)

    def all_to_all(
        self,
        comm: Collectives,
        flat: torch.Tensor,
        out: torch.Tensor,
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        label: str,
    ) -> Handle:
        return all_to_all_described(comm, flat, out, in_splits, out_splits, label)

    def shift(
        self, comm: Collectives, sent: torch.Tensor, to: int, received: torch.Tensor, source: int, label: str
    ) -> list[Handle]:
        """Each of the two messages takes the way between its ranks: one may stay on the host while the other leaves."""
        to_near, from_near = self._near(to), self._near(source)
        handles: list[Handle] = []
        if to_near is None or from_near is None:
            handles += shift_described(
                comm, sent, to if to_near is None else None, received, source if from_near is None else None, label
            )
        if to_near is not None:
            handles.append(_Near(self, to_near[0].send(sent, to_near[1], SHIFT_TAG, label)))
        if from_near is not None:
            handles.append(_Near(self, from_near[0].receive(received, from_near[1], SHIFT_TAG, label)))
        return handles

    def message(self, comm: Collectives, tensor: torch.Tensor, src: int, dst: int, tag: int, label: str) -> Handle:
        near = self._near(dst if src == comm.rank else src)
        if near is None:
            return message_described(comm, tensor, src, dst, tag, label)
        memory, peer = near
        start = memory.send if src == comm.rank else memory.receive
        return _Near(self, start(tensor, peer, engine_tag(tag), label))

    def _near(self, peer: int) -> tuple[SharedMemory, int] | None:
        """The memory that this rank shares with ``peer``, and the number of ``peer`` there; None if there is none."""
        # The end whose arena nobody allocates from: every message is copied, so no sender waits for a receiver that
        # waits for a message of gloo meanwhile.
        mine = self.places.mine
        return (self._first, mine.index(peer)) if peer in mine else None

    def message_name(self, peer: int) -> str:
        near = self._near(peer)
        return "gloo" if near is None else near[0].name

    def _start(self, what: str, label: str, make: Callable[[int], Generator[None, None, None]]) -> Handle:
        """Starts a call. what and label: its description, for comparison over all ranks. make: a function from the
        first of the call's tags to its steps.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("this process was forked: only its parent can talk to the other ranks")
        tag = _TAGS_A_CALL * self._n_calls
        self._n_calls += 1
        call = _Call(self, f"{what}, {label!r}" if label else what, tag, make(tag))
        self._calls.add(call)
        if self.failure:
            call.fail(self.failure)
            return call
        try:
            call.start()
        except RuntimeError as error:
            self.fail(str(error))
            call.fail(self.failure)
            return call
        if self._thread is None:
            end = functools.partial(self._queue.put, None)
            calls, name = self._queue, "deepspeed_c hosts"
            self._thread = BackgroundThread(_run, calls, name=name, end=end, limit_s=_LAST_SECONDS)
            self._thread.start()
        self._queue.put(call)
        return call


class _Near:
    """A message inside a host. Its failure ends the two levels, so that the ranks of other hosts learn of it."""

    def __init__(self, owner: TwoLevels, handle: Handle) -> None:
        self._owner, self._handle = owner, handle

    def wait(self) -> None:
        try:
            self._handle.wait()
        except RuntimeError as error:
            self._owner.fail(str(error))
            raise RuntimeError(self._owner.failure) from error


_open: weakref.WeakSet[TwoLevels] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for levels in list(_open):
        levels.close()  # before the threads are waited for, which wait for these connections


def _run(calls: queue.SimpleQueue[_Call | None]) -> None:
    """The loop of the thread of ``TwoLevels``, which it does not keep alive."""
    with torch.no_grad():
        while (call := calls.get()) is not None:
            call.go_on()
            del call


class _Block:
    """The slices of the ranks of one host, one after the other, with padding so that all pieces of this host's ranks
    have one length.
    """

    def __init__(self, comm: Collectives, flat: torch.Tensor, ranks: Sequence[int], n_pieces: int) -> None:
        """flat: [n * s], slices by rank of the group."""
        self.ranks = ranks
        self._comm, self._slices = comm, flat.view(comm.world_size, -1)
        self.slice_numel = self._slices.shape[1]
        numel = len(ranks) * self.slice_numel
        self.piece_numel = _piece_numel(n_pieces, numel)
        is_run = ranks[-1] - ranks[0] + 1 == len(ranks)
        self.is_in_place = is_run and n_pieces * self.piece_numel == numel
        if self.is_in_place:
            self.flat = flat.narrow(0, ranks[0] * self.slice_numel, numel)
        else:
            self.flat = comm.scratch.take(n_pieces * self.piece_numel, flat.dtype, flat.device)

    def piece(self, i: int) -> torch.Tensor:
        return self.flat.narrow(0, i * self.piece_numel, self.piece_numel)

    def _slice(self, i: int) -> torch.Tensor:
        return self.flat.narrow(0, i * self.slice_numel, self.slice_numel)

    def copy_in(self) -> None:
        """Copies from the tensor, unless the block is a view of it."""
        if not self.is_in_place:
            for i, rank in enumerate(self.ranks):
                self._slice(i).copy_(self._slices[rank])
            self.flat[len(self.ranks) * self.slice_numel :].zero_()

    def copy_out(self) -> None:
        """Copies back to the tensor, unless the block is a view of it."""
        if not self.is_in_place:
            for i, rank in enumerate(self.ranks):
                self._slices[rank].copy_(self._slice(i))

    def give_back(self) -> None:
        if not self.is_in_place:
            self._comm.scratch.give(self.flat)


class _Sums:
    """Sums of this rank's slice over all ranks."""

    def __init__(self, owner: TwoLevels, comm: Collectives, flat: torch.Tensor, tag: int) -> None:
        """Starts the sums inside this host, and starts to receive the sums of the other hosts."""
        places = owner.places
        self._owner, self._comm, self._tag = owner, comm, tag
        self._blocks: dict[int, _Block] = {}
        self._pieces: dict[int, torch.Tensor] = {}
        self._inside: dict[int, Handle] = {}
        self._parts: dict[int, torch.Tensor] = {}
        self._arriving: list[Handle] = []
        self._sent: list[Handle] = []
        slice_numel, k = flat.numel() // comm.world_size, len(places.mine)
        for host in places.others:
            ranks = places.hosts[host]
            part = comm.scratch.take(slice_numel, _travels_as(flat.dtype, len(ranks)), flat.device)
            self._parts[host] = part
            for piece, i, begin, end in _overlaps(len(ranks), k, slice_numel):
                if i == places.local:
                    place = part.narrow(0, begin - i * slice_numel, end - begin)
                    self._arriving.append(owner.messages.receive(place, ranks[piece], tag))
        for host in (*places.others, places.host):
            block = self._blocks[host] = _Block(comm, flat, places.hosts[host], k)
            block.copy_in()
            if k == 1:
                self._pieces[host] = block.flat
            else:
                piece = comm.scratch.take(block.piece_numel, _travels_as(flat.dtype, k), flat.device)
                self._pieces[host] = piece
                self._inside[host] = owner.sum_inside(block.flat, piece)

    def finish(self, out: torch.Tensor, scale: float, accumulate: bool) -> None:
        """Sends the sums of this host, and adds up this rank's slice in the order of the hosts."""
        places, comm = self._owner.places, self._comm
        for host in places.others:
            if host in self._inside:
                self._inside[host].wait()
            block, piece = self._blocks[host], self._pieces[host]
            for number, i, begin, end in _overlaps(len(places.mine), len(block.ranks), block.slice_numel):
                if number == places.local:
                    part = piece.narrow(0, begin - number * block.piece_numel, end - begin)
                    self._sent.append(self._owner.messages.send(part, block.ranks[i], self._tag))
        if places.host in self._inside:
            self._inside[places.host].wait()
        for message in self._arriving:
            message.wait()
        parts = {**self._parts, places.host: self._pieces[places.host]}
        sources = [parts[host] for host in range(len(places.hosts))]
        if out.dtype not in _FLOATS:
            total = sources[0].clone()
            for source in sources[1:]:
                total += source
            out.copy_(total)
            return
        if len({source.dtype for source in sources}) > 1:
            sources = [source.to(torch.float32) for source in sources]
        comm.reduce(sources, scale, accumulate, out)

    def end(self) -> None:
        for message in self._sent:
            message.wait()
        give = self._comm.scratch.give
        for part in self._parts.values():
            give(part)
        for host in self._inside:
            give(self._pieces[host])
        for block in self._blocks.values():
            block.give_back()


class _HostGather:
    """Sends every rank's slice to all ranks."""

    def __init__(self, owner: TwoLevels, comm: Collectives, flat: torch.Tensor, tag: int) -> None:
        places = owner.places
        self._owner, self._tag = owner, tag
        self._own = comm.own_slice(flat)
        k = len(places.mine)
        self._blocks = {host: _Block(comm, flat, ranks, k) for host, ranks in enumerate(places.hosts)}
        self._arriving: dict[int, list[Handle]] = {}
        self._sent: list[Handle] = []
        self._inside: list[Handle] = []

    def post(self) -> None:
        """Sends this rank's slice, and starts to receive its pieces of the other hosts' blocks."""
        places, messages, k = self._owner.places, self._owner.messages, len(self._owner.places.mine)
        for host in places.others:
            block = self._blocks[host]
            piece = block.piece(places.local)
            self._arriving[host] = [
                messages.receive(
                    piece.narrow(0, begin - number * block.piece_numel, end - begin), block.ranks[i], self._tag
                )
                for number, i, begin, end in _overlaps(k, len(block.ranks), block.slice_numel)
                if number == places.local
            ]
        numel = self._own.numel()
        for host in places.others:
            ranks = places.hosts[host]
            for number, i, begin, end in _overlaps(len(ranks), k, numel):
                if i == places.local:
                    part = self._own.narrow(0, begin - i * numel, end - begin)
                    self._sent.append(messages.send(part, ranks[number], self._tag))

    def spread(self) -> None:
        """Gathers inside this host: first this host's block, then the blocks of the other hosts."""
        places = self._owner.places
        is_alone = len(places.mine) == 1
        if not is_alone:
            mine = self._blocks[places.host]
            if not mine.is_in_place:
                mine.piece(places.local).copy_(self._own)
            self._inside.append(self._owner.gather_inside(mine.flat))
        for host in places.others:
            for message in self._arriving[host]:
                message.wait()
            if not is_alone:
                self._inside.append(self._owner.gather_inside(self._blocks[host].flat))

    def end(self) -> None:
        places = self._owner.places
        for handle in self._inside:
            handle.wait()
        for message in self._sent:
            message.wait()
        for host, block in self._blocks.items():
            if host != places.host or self._inside:
                block.copy_out()
            block.give_back()


def _travels_as(dtype: torch.dtype, n_summed: int) -> torch.dtype:
    """The dtype in which a sum of ``n_summed`` numbers of ``dtype`` is sent, before it is rounded."""
    return torch.float32 if dtype in _HALVES and n_summed > 1 else dtype


def connect(hosts: Hosts) -> TwoLevels:
    """The two levels of ranks on several hosts, one of which has several ranks. Collective. Raises NotConnectedError."""
    comm, by_host = hosts.comm, hosts.by_host
    if len(by_host) == 1 or max(map(len, by_host)) == 1:
        raise NotConnectedError("")
    # The first end is for callers, the second for the thread.
    ends = open_ends(hosts, 2)
    between: list[dist.ProcessGroup] = []
    try:
        name = hosts.agree(lambda: uuid.uuid4().hex, "hosts")[0]
        hosts.agree(lambda: between.append(_between(hosts, name)), "hosts")
    except NotConnectedError:
        for end in ends:
            end.close()
        raise
    both = (ends[0], ends[1]) if ends else None
    return TwoLevels(hosts.group, by_host, comm.rank, both, between[0], comm.global_ranks)


def _between(hosts: Hosts, name: str) -> dist.ProcessGroup:
    """A gloo group of the same ranks that no other code uses. It ends with its last reference. ``name`` must be unique."""
    store = dist.PrefixStore(f"deepspeed_c/hosts/{name}", dist.distributed_c10d._get_default_store())
    try:
        return dist.ProcessGroupGloo(store, hosts.comm.rank, hosts.comm.world_size, timeout_of(hosts.group))
    except RuntimeError as error:
        raise RuntimeError(f"no connection between the hosts: {error}") from error
