"""HTTP and server-sent events as they come in pieces, whole or broken anywhere."""

from __future__ import annotations

import asyncio
import random
import re

import pytest

from deepspeed_c.bench.http_stream import (
    Address,
    EventParser,
    FailedRequest,
    body_pieces,
    error_text,
    parse_url,
    read_head,
    whole_body,
)  # fmt: skip
from deepspeed_c.errors import ConfigError
from tests.deepspeed_c.bench.fake_server import HEAD, chunked, with_length


def read(data: bytes) -> tuple[int, bytes]:
    """The status and the body of an answer; then the connection ends."""

    async def answer():
        reader = asyncio.StreamReader(limit=1 << 16)
        reader.feed_data(data)
        reader.feed_eof()
        head = await read_head(reader)
        return head.status, await whole_body(body_pieces(reader, head))

    return asyncio.run(asyncio.wait_for(answer(), 60))


def kind_of(data: bytes) -> str:
    with pytest.raises(FailedRequest) as failure:
        read(data)
    assert failure.value.message
    return failure.value.kind


def test_bodies_of_each_framing():
    assert read(HEAD + chunked([b"ab", b"c" * 100_000])) == (200, b"ab" + b"c" * 100_000)
    assert read(HEAD + b"2;name=value\r\nab\r\n000\r\nTrailer: 1\r\n\r\n") == (200, b"ab")
    assert read(with_length(b"404 Not Found", b"xyz") + b"rest") == (404, b"xyz")
    assert read(b"HTTP/1.0 200 OK\r\n\r\nto the end") == (200, b"to the end")
    assert read(b"HTTP/1.1 100 Continue\r\nA: b\r\n\r\n" + with_length(b"200 OK", b"")) == (200, b"")


def test_a_cut_anywhere_is_a_cut():
    data = HEAD + chunked([b"data: 1\n\n", b"data: [DONE]\n\n"])
    assert {kind_of(data[:n]) for n in range(len(data))} == {"cut"}
    data = with_length(b"200 OK", b"body")
    assert {kind_of(data[:n]) for n in range(len(data))} == {"cut"}


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 201 + b"\r\n",
        b"HTTP/1.1 200 OK\r\na: " + b"b" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\nbody",
        HEAD + b"zz\r\nab\r\n0\r\n\r\n",
        HEAD + b"-2\r\nab\r\n0\r\n\r\n",
        HEAD + b"\r\nab\r\n0\r\n\r\n",
        HEAD + b"1\r\nab\r\n0\r\n\r\n",
        HEAD + b"f" * 20 + b"\r\nab\r\n0\r\n\r\n",
        with_length(b"200 OK", b"a" * ((1 << 22) + 1)),
    ],
)
def test_broken_answers(data):
    assert kind_of(data) == "malformed"


def naive_events(text: bytes) -> list[bytes]:
    """The rule of the standard, line by line over the whole text."""
    found, data = [], []
    for line in re.split(rb"\r\n|\n|\r", text)[:-1]:
        name, _, value = line.partition(b":")
        if not line:
            found += [b"\n".join(data)] if data else []
            data = []
        elif name == b"data":
            data.append(value[1:] if value[:1] == b" " else value)
    return found


def test_events_do_not_depend_on_where_pieces_end():
    draws = random.Random(5)
    lines = [
        b"data: x",
        b"data:y",
        b"data:  z",
        b"data",
        b"data:",
        b": comment",
        b"event: a",
        b"datax: 1",
        b"",
        b"",
        b"",
    ]
    for _ in range(300):
        text = b"".join(
            draws.choice(lines) + draws.choice([b"\n", b"\r\n", b"\r"]) for _ in range(draws.randrange(1, 14))
        )
        text += b"\n\n"  # the parser waits behind a last CR, which may be the half of a line end
        parser, found, begin = EventParser(), [], 0
        while begin < len(text):
            end = begin + draws.randrange(1, 6)
            found += parser.feed(text[begin:end])
            begin = end
        assert found == naive_events(text), text
        assert EventParser().feed(text) == found


def test_an_event_without_end_is_refused():
    parser = EventParser()
    with pytest.raises(FailedRequest, match="more than 1048576 bytes"):
        for _ in range(40):
            parser.feed(b"data: " + b"x" * (1 << 15))


@pytest.mark.parametrize(
    "url, expected",
    [
        ("http://a:8000", (False, "a", 8000, "")),
        ("http://a:8000/v1/", (False, "a", 8000, "")),
        ("https://a.b/x/v1", (True, "a.b", 443, "/x")),
        ("http://[::1]:9", (False, "::1", 9, "")),
        ("http://a", (False, "a", 80, "")),
    ],
)
def test_addresses(url, expected):
    address = parse_url(url, "--url")
    assert address == expected
    assert parse_url(str(address), "--url") == address


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a:8000",
        "ftp://a",
        "http://",
        "http://a:x",
        "http://a:99999",
        "http://a/?q=1",
        "http://u:p@a",
        "http://a/ b",
    ],
)
def test_wrong_addresses_are_refused(url):
    with pytest.raises(ConfigError, match="--url"):
        parse_url(url, "--url")


def test_the_message_of_an_error():
    assert error_text(b'{"error": {"message": "too long", "type": "x"}}') == "too long"
    assert error_text(b'{"detail": "gone"}') == '{"detail": "gone"}'
    assert error_text(b"\xff<html>") == "\N{REPLACEMENT CHARACTER}<html>"
    assert str(Address(True, "::1", 1, "/x")) == "https://[::1]:1/x"
