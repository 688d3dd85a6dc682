"""Frames on sockets: messages arrive unchanged, and a broken frame is an error with its reason."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading

import pytest

from deepspeed_c.errors import CommError
from deepspeed_c.mii.deployment import frames
from tests import waits

MESSAGES = [
    {},
    {"prompts": ["", "a\0b", "\N{GRINNING FACE}", "\ud83d"], "fields": {"x": None, "nested": [[1.5, True]]}},
    {"text": "x" * 1_000_003},
]
BROKEN = {
    b"\0\0": "ended after 2 of 4 bytes",
    b"\0\0\0\5abc": "ended after 3 of 5 bytes",
    b"\0\0\0\5": "ended after 0 of 5 bytes",
    b"\xff\xff\xff\xff": "has 4294967295 bytes; the limit is 67108864",
}


def received(sent: bytes) -> list[dict]:
    """The messages that a blocking socket receives from bytes and their end."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        with theirs, contextlib.suppress(BrokenPipeError):  # a receiver may stop at an error
            theirs.sendall(sent)

    thread = threading.Thread(target=send)
    thread.start()
    found = []
    try:
        while (body := frames.receive(ours)) is not None:
            found.append(frames.parse(body))
    finally:
        ours.close()
        waits.joined(thread)
    return found


def read(sent: bytes) -> list[dict]:
    """The same through a stream of asyncio."""

    async def run() -> list[dict]:
        reader = asyncio.StreamReader()
        reader.feed_data(sent)
        reader.feed_eof()
        found = []
        while (body := await frames.read(reader)) is not None:
            found.append(frames.parse(body))
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("take", [received, read])
def test_messages_arrive_in_order(take):
    sent = b"".join(frames.pack(frames.dump(message)) for message in MESSAGES)
    assert take(sent) == MESSAGES
    assert take(b"") == []


@pytest.mark.parametrize("take", [received, read])
@pytest.mark.parametrize("sent", list(BROKEN), ids=list(BROKEN.values()))
def test_broken_frames_say_how(take, sent):
    with pytest.raises(CommError, match=BROKEN[sent]):
        take(sent)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe{", b'"text"', b"[1]", b"null", b"[" * 100_000], ids=lambda body: repr(body[:8])
)
def test_what_is_no_object_is_an_error(body):
    with pytest.raises(CommError, match="is no JSON|not an object"):
        frames.parse(body)


def test_the_length_is_four_bytes_big_endian():
    assert frames.pack(frames.dump({"é": 1})) == struct.pack(">I", 8) + '{"é":1}'.encode()


def test_a_limit_is_that_of_the_call():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(frames.pack(b"{} "))
        with pytest.raises(CommError, match="has 3 bytes; the limit is 2"):
            frames.receive(ours, 2)
