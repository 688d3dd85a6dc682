"""Messages on the sockets of a deployment: four bytes of length (big endian), then JSON in UTF-8.

Nothing is unpickled, so that a message can carry data only.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

from deepspeed_c.errors import CommError

__all__ = ["FRAME_BYTES", "HEADER_BYTES", "REQUEST_BYTES", "dump", "pack", "parse", "read", "receive"]

REQUEST_BYTES = 10_000_000
"""Limit of a request: its prompts and fields as JSON."""
HEADER_BYTES = 64 * 1024
"""Limit of messages without text: the purpose of a connection, the number of the next event's request."""
FRAME_BYTES = 64 * 1024 * 1024
"""Limit of an event. With ``return_full_text`` an event repeats its prompt, and escapes may make it longer."""

_LENGTH = struct.Struct(">I")


def dump(message: Mapping[str, Any]) -> bytes:
    """The JSON of a message. Raises TypeError for a value that JSON does not have."""
    text = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")  # a prompt may be cut within a pair of UTF-16


def pack(body: bytes) -> bytes:
    """The frame of a message, from its JSON."""
    return _LENGTH.pack(len(body)) + body


def parse(body: bytes) -> dict[str, Any]:
    """The message of a frame. Raises CommError if it is not a JSON object."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CommError(f"is no JSON: {error}", where="a message of a deployment") from None
    if not isinstance(message, dict):
        raise CommError(f"is a {type(message).__name__}, not an object", where="a message of a deployment")
    return message


def receive(connection: socket.socket, limit: int = FRAME_BYTES) -> bytes | None:
    """The JSON of the next frame from a blocking socket; None if the other side has closed the connection between two
    frames.

    Raises CommError for a frame that is cut off, or longer than ``limit`` bytes; OSError of the socket.
    """
    head = _receive_exactly(connection, _LENGTH.size)
    if not head:
        return None
    if len(head) < _LENGTH.size:
        raise _cut(len(head), _LENGTH.size)
    n_bytes = _checked(head, limit)
    body = _receive_exactly(connection, n_bytes)
    if len(body) < n_bytes:
        raise _cut(len(body), n_bytes)
    return bytes(body)


async def read(reader: asyncio.StreamReader, limit: int = FRAME_BYTES) -> bytes | None:
    """As ``receive``, from a stream of asyncio."""
    try:
        head = await reader.readexactly(_LENGTH.size)
        return await reader.readexactly(_checked(head, limit))
    except asyncio.IncompleteReadError as error:
        if not error.partial and error.expected == _LENGTH.size and reader.at_eof():
            return None
        raise _cut(len(error.partial), error.expected or 0) from None


def _receive_exactly(connection: socket.socket, n_bytes: int) -> bytearray:
    """``n_bytes`` bytes, or fewer if the connection ends before."""
    buffer = bytearray(n_bytes)
    view, n_received = memoryview(buffer), 0
    while n_received < n_bytes:
        n_more = connection.recv_into(view[n_received:])
        if n_more == 0:
            break
        n_received += n_more
    view.release()
    del buffer[n_received:]
    return buffer


def _checked(head: bytes | bytearray, limit: int) -> int:
    (n_bytes,) = _LENGTH.unpack(head)
    if n_bytes > limit:
        raise CommError(
            f"has {n_bytes} bytes; the limit is {limit}",
            where="a message of a deployment",
            fix="send fewer or shorter prompts in one request",
        )
    return int(n_bytes)


def _cut(n_bytes: int, n_expected: int) -> CommError:
    return CommError(f"ended after {n_bytes} of {n_expected} bytes", where="a message of a deployment")
