"""Messages over gloo that carry descriptions, so that a rank never takes a message for another one.

[Note: descriptions] gloo ends a process that receives a longer message than it expects, and leaves old values behind a
shorter one. So a *description* of each message (dtype, shape, bytes, label) travels in a message of its own, whose
length is fixed. Data and description are under way at the same time. The tag of the data has a hash of the description,
so data of another description does not match (but for one in ``1 << _HASH_BITS``): it stays with its sender, while the
receiver reads the description and finds the difference.

[Note: posts at once] gloo's thread sends each post to the other rank at once, and wakes a thread there. Python between
two posts then takes turns with these threads: with 25 us between the posts, a shift of 4 KiB takes twice as long. So
everything is prepared first.

[Note: closing] gloo cannot refuse a message. A rank that finds a difference writes it into the store of the default
group, and closes its connections of the process group. Ranks that wait for it notice at once, read the difference in
the store, and close their connections, too. So all ranks of the group end with the same error.

[Note: half a message] A connection that closes in the middle of a message makes gloo forget the message: its receiver
waits until the time limit of the group. So a rank lets its own messages leave before it closes its connections, and
after that it does not wait for gloo without a limit.
"""

from __future__ import annotations

import contextlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from deepspeed_c.comm.ledger import ledger_of
from deepspeed_c.comm.signed_store import SignedStore
from deepspeed_c.comm.work import Handle
from deepspeed_c.env import read_env

if TYPE_CHECKING:
    from deepspeed_c.comm.collectives import Collectives

__all__ = [
    "COMPARISON_TAG",
    "N_TAGS",
    "N_USER_TAGS",
    "Members",
    "UserMessage",
    "all_to_all_described",
    "as_bytes",
    "close_connections",
    "collective_tag",
    "head_of",
    "lists_described",
    "message_described",
    "shift_described",
    "text_of",
]

# Tags of gloo's messages are positive and have 31 bits. From the lowest bit: the purpose, the caller's tag, the hash.
_PURPOSE_BITS, _TAG_BITS, _HASH_BITS = 3, 12, 16
N_TAGS = 1 << _TAG_BITS
"""Callers' tags are below it."""
_MESSAGE, _SHIFT, _ALL_TO_ALL, _NEVER = range(0, 8, 2)  # the description; the data has the number above it
_COLLECTIVE = _NEVER + 1  # without a description: ranks at different collectives wait, and the watchdog reports it
_DESCRIPTION_HASH = 0xD5C0  # in tags of descriptions: other users of the group have small tags
_USER_HASH = 0x4000  # in its place for messages of ``deepspeed_c.comm``; the lower bits are the upper bits of their tag
N_USER_TAGS = 1 << _TAG_BITS + 14
"""Tags of messages of ``deepspeed_c.comm`` are below it."""
# Bytes of a description: text, and a hash of the text that was cut off.
_TEXT_BYTES, _HEAD_BYTES = 120, 128
_LEAVING = timedelta(seconds=5)
"""Time for each message of a rank to leave, before the rank closes its connections. (A message of another description
never leaves, but its receiver has found the difference as well, and closes.)
"""
_CLOSING = timedelta(milliseconds=250)
"""Time for unknown messages to leave, before connections close."""
_FORGOTTEN = timedelta(milliseconds=100)
"""Time for a transfer to end after its connection was closed. Later than that, gloo has forgotten the transfer."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor. Backends move some dtypes only (gloo neither int16 nor float8, for example)."""
    return tensor.view(-1).view(torch.uint8)


def _tag(purpose: int, tag: int, hashed: int) -> int:
    return (hashed % (1 << _HASH_BITS)) << (_PURPOSE_BITS + _TAG_BITS) | tag << _PURPOSE_BITS | purpose


def collective_tag(op: str, n_bytes: int, label: str) -> int:
    """The tag of the messages of a collective, which match only messages of this collective, label and length."""
    return _tag(_COLLECTIVE, 0, zlib.crc32(f"{op} {n_bytes} {label}".encode()))


COMPARISON_TAG = _tag(_COLLECTIVE, 1, _DESCRIPTION_HASH)
"""The tag of descriptions of collectives of ``deepspeed_c.comm``."""


def head_of(text: str) -> bytes:
    """A text as bytes of a fixed number: its begin, and a hash of the rest."""
    encoded = text.encode()
    rest = zlib.crc32(encoded[_TEXT_BYTES:]).to_bytes(_HEAD_BYTES - _TEXT_BYTES, "little")
    return encoded[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0") + rest


def text_of(head: bytes | bytearray) -> str:
    """The begin of the text that ``head_of`` was given."""
    return head[:_TEXT_BYTES].rstrip(b"\0").decode(errors="replace")


class Members(NamedTuple):
    """The ranks of a group, as far as messages need them."""

    group: dist.ProcessGroup | None
    global_ranks: Sequence[int]
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Members:
        whole = dist.group.WORLD if group is None else group
        return cls(group, ledger_of(group).ranks, whole.rank())


class _Description(NamedTuple):
    """A description in the forms that messages need."""

    text: str
    head: bytes
    sent: torch.Tensor
    """The bytes of ``head`` as a tensor, to send."""
    hashed: int


@lru_cache(maxsize=256)
def _describe(dtype: torch.dtype, shape: torch.Size, label: str) -> _Description:
    """The description of a message. It is kept, because the same messages come in every step."""
    of = f" of {label!r}" if label else ""
    n_bytes = shape.numel() * dtype.itemsize
    text = f"{str(dtype).removeprefix('torch.')} {list(shape)}{of} ({n_bytes} bytes)"
    head = head_of(text)
    return _Description(text, head, _as_tensor(bytearray(head)), zlib.crc32(text.encode()))


def _as_tensor(buffer: bytearray) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)


# The other rank of a message, and the handle.
_Started = tuple[int, Handle]
# The handles that it joins, the call of the group, and the arguments of the call.
_Post = tuple[list[_Started], Callable[[list[torch.Tensor], int, int], Handle], list[torch.Tensor], int, int]


class _Described(ABC):
    """Messages with descriptions, between this rank and others of the group of ``comm``, as one handle. ``receive`` and
    ``send`` prepare them, and ``start`` posts them in this order. Prepare receives before sends: a rank that receives a
    description has already sent its own.
    """

    def __init__(
        self, comm: Collectives | Members, purpose: int, tag: int, description_hash: int = _DESCRIPTION_HASH
    ) -> None:
        self._group = dist.group.WORLD if comm.group is None else comm.group
        self._names, self._rank = comm.global_ranks, comm.rank
        self._purpose, self._tag = purpose, tag
        self._description_tag = _tag(purpose, tag, description_hash)
        self._heads: dict[int, bytearray] = {}
        self._descriptions: list[_Started] = []
        self._received: list[_Started] = []
        self._sent: list[_Started] = []
        self._posts: list[_Post] = []
        self._posts_failed = ""

    def receive(self, tensor: torch.Tensor, rank: int, hashed: int, n_head_bytes: int = _HEAD_BYTES) -> None:
        self._heads[rank] = head = bytearray(n_head_bytes)
        way = self._group.recv
        self._posts.append((self._descriptions, way, [_as_tensor(head)], rank, self._description_tag))
        if tensor.numel():
            self._posts.append((self._received, way, [tensor], rank, _tag(self._purpose + 1, self._tag, hashed)))

    def send(self, tensor: torch.Tensor, rank: int, hashed: int, head: torch.Tensor) -> None:
        way = self._group.send
        self._posts.append((self._sent, way, [head], rank, self._description_tag))
        if tensor.numel():
            self._posts.append((self._sent, way, [tensor], rank, _tag(self._purpose + 1, self._tag, hashed)))

    def start(self) -> None:
        posts, self._posts = self._posts, []
        try:
            for handles, way, tensors, rank, tag in posts:
                handles.append((rank, way(tensors, rank, tag)))
        except RuntimeError as error:  # the connections are closed already; ``wait`` raises it, as for other failures
            self._posts_failed = f"rank {self._name(rank)}: {error}"

    def wait(self, limit: timedelta | None = None) -> None:
        """Waits until all messages are over. Raises RuntimeError with both values where descriptions differ, and where
        another rank has found a difference. ``limit``: the longest time for each message, in place of the group's.
        """
        difference = ""
        try:
            if self._posts_failed:
                raise RuntimeError(self._posts_failed)
            self._take_descriptions(limit)
            difference = self._difference(self._heads)
            if difference:
                raise RuntimeError(difference)
            self._wait_for(self._received, limit)
            self._wait_for(self._sent, limit)
        except RuntimeError as error:
            raise RuntimeError(self._close(difference) or str(error).splitlines()[0]) from None

    def _take_descriptions(self, limit: timedelta | None) -> None:
        self._wait_for(self._descriptions, limit)

    def _wait_for(self, handles: list[_Started], limit: timedelta | None = None) -> None:
        """Takes the handles out one by one: a second wait for a message of gloo would never end. A wait that ends by
        ``limit`` closes all connections of the group.
        """
        while handles:
            rank, handle = handles.pop(0)
            try:
                handle.wait() if limit is None else handle.wait(limit)
            except RuntimeError as error:  # gloo says the other rank's address only
                raise RuntimeError(f"rank {self._name(rank)}: {error}") from None

    def _end(self, handles: list[_Started], limit: timedelta) -> None:
        """Waits until no transfer uses a tensor any more. Failures of the transfers are known already."""
        while handles:
            with contextlib.suppress(RuntimeError):
                self._wait_for(handles, limit)

    @abstractmethod
    def _difference(self, heads: dict[int, bytearray]) -> str:
        """The first difference in the descriptions that have come, by their senders; "" if there is none."""

    def _name(self, rank: int) -> int:
        return self._names[rank]

    def _close(self, difference: str) -> str:
        """Closes the connections of the group for this rank. ``difference``: what this rank has found, or "". Returns
        what some rank has found.
        """
        store = SignedStore(
            dist.PrefixStore("deepspeed_c/described", dist.distributed_c10d._get_default_store()),
            read_env().run_token or "",
        )
        with contextlib.suppress(RuntimeError):  # the store has gone with rank 0
            if difference:
                store.claim(self._group.group_name, difference)
            else:
                difference = store.read(self._group.group_name) or ""
        self._end(self._sent, _LEAVING)
        close_connections(self._group, timedelta(milliseconds=1))
        self._end(self._descriptions, _FORGOTTEN)
        self._end(self._received, _FORGOTTEN)
        return difference


class _OneWay(_Described):
    """At most one message that arrives here, and at most one that leaves."""

    def __init__(
        self,
        comm: Collectives | Members,
        purpose: int,
        tag: int,
        label: str,
        description_hash: int = _DESCRIPTION_HASH,
    ) -> None:
        super().__init__(comm, purpose, tag, description_hash)
        self._label = label
        self._expected: _Description | None = None

    def expect(self, tensor: torch.Tensor, rank: int) -> None:
        self._expected = _describe(tensor.dtype, tensor.shape, self._label)
        self.receive(tensor, rank, self._expected.hashed)

    def give(self, tensor: torch.Tensor, rank: int) -> None:
        description = _describe(tensor.dtype, tensor.shape, self._label)
        self.send(tensor, rank, description.hashed, description.sent)

    def _difference(self, heads: dict[int, bytearray]) -> str:
        for rank, head in heads.items():
            if head != self._expected.head:
                return (
                    f"rank {self._name(rank)} sends {text_of(head)}, rank {self._name(self._rank)} expects"
                    f" {self._expected.text}"
                )
        return ""


class UserMessage(_OneWay):
    """A message of ``deepspeed_c.comm``, one-dimensional and contiguous. Its tags are no tags of the engines, nor of
    calls of ``torch.distributed`` with small tags.
    """

    def __init__(self, members: Members, tag: int) -> None:
        upper, lower = divmod(tag, N_TAGS)
        super().__init__(members, _MESSAGE, lower, f"tag {tag}", _USER_HASH | upper)
        self._open: tuple[torch.Tensor, bytearray, Handle] | None = None
        self.source = -1
        """The rank in the group that sends. -1 until the message from anyone has come."""

    def expect(self, tensor: torch.Tensor, rank: int) -> None:
        super().expect(tensor, rank)
        self.source = rank

    def expect_anyone(self, tensor: torch.Tensor) -> None:
        """Receives from the rank whose description comes first. So the data is asked for only after that."""
        self._expected = _describe(tensor.dtype, tensor.shape, self._label)
        head = bytearray(_HEAD_BYTES)
        self._open = tensor, head, self._group.recv_anysource([_as_tensor(head)], self._description_tag)

    def _take_descriptions(self, limit: timedelta | None) -> None:
        super()._take_descriptions(limit)
        opened, self._open = self._open, None
        if opened is None:
            return
        tensor, head, handle = opened
        handle.wait() if limit is None else handle.wait(limit)
        self.source = rank = handle._source_rank()
        self._heads[rank] = head
        if tensor.numel() and not self._difference(self._heads):
            tag = _tag(self._purpose + 1, self._tag, self._expected.hashed)
            self._received.append((rank, self._group.recv([tensor], rank, tag)))


def close_connections(group: dist.ProcessGroup, after: timedelta = _CLOSING) -> None:
    """Closes the connections of a gloo group for this rank. Its messages have the time ``after`` to leave before that.
    Ranks that wait for this rank then notice at once.
    """
    unsent = torch.empty(1, dtype=torch.uint8)
    with contextlib.suppress(RuntimeError):  # a wait that ends by its own time limit closes all connections
        group.recv([unsent], (group.rank() + 1) % group.size(), _tag(_NEVER, 0, 0)).wait(after)


def message_described(comm: Collectives, tensor: torch.Tensor, src: int, dst: int, tag: int, label: str) -> Handle:
    """The message of ``Transport.message``."""
    message = _OneWay(comm, _MESSAGE, tag, label)
    if src == comm.rank:
        message.give(tensor, dst)
    else:
        message.expect(tensor, src)
    message.start()
    return message


def shift_described(
    comm: Collectives, sent: torch.Tensor, to: int | None, received: torch.Tensor, source: int | None, label: str
) -> list[Handle]:
    """The messages of ``Transport.shift``; None: that one takes another way. Of a message without elements only the
    description is sent.
    """
    messages = _OneWay(comm, _SHIFT, 0, label)
    if source is not None:
        messages.expect(received, source)
    if to is not None:
        messages.give(sent, to)
    messages.start()
    return [messages]


class _AllToAll(_Described):
    """Blocks between all ranks, as bytes. Every description has all lengths, so that every rank finds the same
    difference.
    """

    def __init__(
        self,
        comm: Collectives | Members,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        dtype: torch.dtype,
        label: str,
    ) -> None:
        super().__init__(comm, _ALL_TO_ALL, 0)
        n, rank, size = len(comm.global_ranks), comm.rank, dtype.itemsize
        of = f" of {label!r}" if label else ""
        text = f"{str(dtype).removeprefix('torch.')}{of}"
        in_splits, out_splits = [each.numel() // size for each in sent], [each.numel() // size for each in received]
        splits = torch.tensor([in_splits, out_splits], dtype=torch.int64)
        self._head = head_of(text) + splits.numpy().tobytes()
        head = _as_tensor(bytearray(self._head))
        begun = zlib.crc32(text.encode())
        others = [(rank + i) % n for i in range(1, n)]
        for other in others:
            self.receive(received[other], other, begun + out_splits[other] * 0x9E3779B1, len(self._head))
        for other in others:
            self.send(sent[other], other, begun + in_splits[other] * 0x9E3779B1, head)
        self.start()
        if in_splits[rank] == out_splits[rank]:
            received[rank].copy_(sent[rank])

    def _difference(self, heads: dict[int, bytearray]) -> str:
        rows = [bytes(heads.get(rank, self._head)) for rank in range(len(self._names))]
        for rank, row in enumerate(rows):
            if row[:_HEAD_BYTES] != rows[0][:_HEAD_BYTES]:
                return (
                    f"rank {self._name(rank)} has blocks of {text_of(row)}, rank {self._name(0)} of {text_of(rows[0])}"
                )
        splits = torch.frombuffer(bytearray(b"".join(row[_HEAD_BYTES:] for row in rows)), dtype=torch.int64)
        to, of = splits.view(len(rows), 2, len(rows)).unbind(1)
        wrong = (to != of.T).nonzero()
        if not len(wrong):
            return ""
        src, dst = wrong[0].tolist()
        return (
            f"rank {self._name(src)} sends {int(to[src, dst])} elements to rank {self._name(dst)}, which expects"
            f" {int(of[dst, src])}"
        )


def all_to_all_described(
    comm: Collectives,
    flat: torch.Tensor,
    out: torch.Tensor,
    in_splits: Sequence[int],
    out_splits: Sequence[int],
    label: str,
) -> Handle:
    """The all-to-all of ``Transport.all_to_all``, in messages: gloo's own ends the process where splits do not fit."""
    size = flat.element_size()
    sent = as_bytes(flat).split([length * size for length in in_splits])
    received = as_bytes(out).split([length * size for length in out_splits])
    return _AllToAll(comm, sent, received, flat.dtype, label)


def lists_described(
    members: Members, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], dtype: torch.dtype
) -> Handle:
    """The all-to-all of ``deepspeed_c.comm``: bytes for each rank and from each rank, of numbers of ``dtype``."""
    return _AllToAll(members, sent, received, dtype, "deepspeed_c.comm")
