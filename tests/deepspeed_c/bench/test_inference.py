"""The open-loop client of ``bench inference`` against servers that answer, fail and never answer."""

from __future__ import annotations

import asyncio
import math

import pytest

from deepspeed_c.bench.http_stream import parse_url
from deepspeed_c.bench.inference import CLOCK, Clock, RequestOutcome, ServerTarget, ask_all, check_target, read_card
from deepspeed_c.bench.load import Lengths, Load
from deepspeed_c.errors import ConfigError
from tests.deepspeed_c.bench.fake_server import (
    DONE,
    HEAD,
    MODEL,
    FakeServer,
    answer_all,
    chunk,
    chunked,
    event,
    piece,
    usage,
    whole,
    with_length,
)

LIMIT_S = 120.0


def load(n_requests=1, rate=math.inf, **settings) -> Load:
    lengths = {"prompt_tokens": Lengths(2, 9), "new_tokens": Lengths(1, 6)}
    return Load(**({"rate": rate, "n_requests": n_requests, "seed": 3, "n_words": 77, **lengths} | settings))


def run(work):
    """The result of a coroutine that ends in time."""
    return asyncio.run(asyncio.wait_for(work, LIMIT_S))


def ask(server: FakeServer, asked: Load, clock: Clock = CLOCK, concurrency=None, **settings) -> list[RequestOutcome]:
    target = ServerTarget(parse_url(server.url, "url"), "fake", **settings)
    ended = []
    found = run(ask_all(asked, target, clock=clock, concurrency=concurrency, report=ended.append))
    assert ended == list(range(1, asked.n_requests + 1)) and found.processor_share >= 0
    return found.outcomes


def only(answer) -> RequestOutcome:
    """The outcome of a request with this answer."""

    async def write(number, body, writer):
        writer.write(answer)

    with FakeServer(write) as server:
        return ask(server, load())[0]


def test_each_request_is_sent_and_counted():
    asked = load(40)
    with FakeServer() as server:
        found = ask(server, asked, key="secret", temperature=0.5)
        bodies = {tuple(body["prompt"]): body for body in server.bodies}
        assert len(bodies) == 40
        assert all(b"Authorization: Bearer secret\r\n" in head for head in server.heads)
    for planned, outcome in zip(asked.plan(), found, strict=True):
        body = bodies[tuple(asked.prompt(planned))]
        assert body == {
            "model": "fake",
            "prompt": asked.prompt(planned),
            "max_tokens": planned.n_new,
            "temperature": 0.5,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        assert (outcome.error, outcome.message, outcome.number) == ("", "", planned.number)
        assert (outcome.n_new, len(outcome.piece_s), outcome.usage_prompt) == (planned.n_new,) * 2 + (planned.n_prompt,)
        times = [outcome.at_s, outcome.sent_s, *outcome.piece_s, outcome.end_s]
        assert times == sorted(times), times


class FakeTime:
    """A clock that passes when somebody sleeps, or when a test says so."""

    def __init__(self, oversleep_s: float = 0.0) -> None:
        self.now_s, self.n_looks, self._oversleep_s = 100.0, 0, oversleep_s

    def now(self) -> float:
        self.n_looks += 1
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)  # requests that were begun before are sent now
        self.now_s += seconds + self._oversleep_s

    def clock(self) -> Clock:
        return Clock(self.now, self.sleep)


def test_the_times_of_pieces_are_those_of_their_arrival():
    """The server lets the time pass before each piece, and waits until the client has looked at the clock."""
    time, delays = FakeTime(), [0.5, 0.25, 0.0, 2.0]

    async def answer(number, body, writer):
        writer.write(HEAD)
        for delay in delays:
            n_looks = time.n_looks
            time.now_s += delay
            writer.write(chunk(piece()))
            while time.n_looks == n_looks:
                await asyncio.sleep(0.001)
        time.now_s += 0.125
        writer.write(chunked([usage(2, 4), DONE]))

    with FakeServer(answer) as server:
        found = ask(server, load(rate=1.0, new_tokens=Lengths(4, 4)), time.clock())[0]
    assert found.sent_s == pytest.approx(found.at_s, abs=1e-9) and found.at_s == load(rate=1.0).plan()[0].at_s
    assert [at - found.sent_s for at in found.piece_s] == pytest.approx([0.5, 0.75, 0.75, 2.75], abs=1e-9)
    assert found.end_s - found.sent_s == pytest.approx(2.875, abs=1e-9)


def test_a_client_that_wakes_late_says_so():
    with FakeServer() as server:
        right = ask(server, load(20, rate=5.0), FakeTime().clock())
        late = ask(server, load(20, rate=5.0), FakeTime(oversleep_s=0.03).clock())
    assert [each.late_s for each in right] == pytest.approx([0.0] * 20, abs=1e-9)
    now_s, expected = 0.0, []
    for planned in load(20, rate=5.0).plan():
        # After a gap that is shorter than the delay, there is no time left to sleep.
        now_s = planned.at_s + 0.03 if planned.at_s > now_s else now_s
        expected.append(now_s - planned.at_s)
    assert [each.late_s for each in late] == pytest.approx(expected, abs=1e-9) and min(expected) < 0.03


def test_requests_do_not_wait_for_answers():
    """No request is answered before all have come."""
    n_open, most = 0, 0

    async def count(number, body, writer):
        nonlocal n_open, most
        n_open += 1
        most = max(most, n_open)
        while most < 16:
            await asyncio.sleep(0.001)
        writer.write(HEAD + chunked(whole(body)))
        n_open -= 1

    with FakeServer(count) as server:
        assert [each.error for each in ask(server, load(16))] == [""] * 16
    assert most == 16


def test_concurrency_is_a_limit():
    n_open, seen = 0, []

    async def answer(number, body, writer):
        nonlocal n_open
        n_open += 1
        seen.append(n_open)
        while len(seen) < 3:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.001)
        writer.write(HEAD + chunked(whole(body)))
        n_open -= 1

    with FakeServer(answer) as server:
        found = ask(server, load(15), concurrency=3)
    assert [each.error for each in found] == [""] * 15 and max(seen) == 3, seen
    assert found[-1].late_s > 0, "the wait for a place is a late send"


def test_the_last_piece_counts_if_the_server_counts_it():
    bare = piece("", "length")
    for events, expected in (
        ([piece(), piece(), bare, usage(2, 2)], (2, 2)),
        ([piece(), piece(), bare, usage(2, 3)], (3, 3)),
        ([piece(), piece(), bare], (2, 2)),
        ([piece(), piece(" z", "length")], (2, 2)),
        ([piece(""), piece(), bare, usage(2, 7)], (7, 3)),
    ):
        found = only(HEAD + chunked([*events, DONE]))
        assert (found.error, found.n_new, len(found.piece_s)) == ("", *expected), (events, found)


def test_a_whole_answer_may_come_in_one_chunk():
    found = only(HEAD + chunked([piece() + piece() + usage(2, 2) + DONE]))
    assert (found.error, found.n_new, found.piece_s[0]) == ("", 2, found.piece_s[1])


@pytest.mark.parametrize(
    "answer, kind, message",
    [
        (with_length(b"500 Oops", b'{"error": {"message": "out of memory"}}'), "status 500", "out of memory"),
        (with_length(b"429 Slow", b"later"), "status 429", "later"),
        (with_length(b"200 OK", b"{}"), "malformed", "application/json"),
        (HEAD + chunked([piece(), b"data: {]\n\n", DONE]), "malformed", "no piece of a completion"),
        (HEAD + chunked([piece(), b'data: {"choices": 5}\n\n', DONE]), "malformed", "no piece of a completion"),
        (HEAD + chunk(piece()) + b"xyz\r\n", "malformed", "size of a chunk is 'xyz'"),
        (HEAD + chunk(piece()), "cut", "before the answer did"),
        (HEAD + chunk(piece())[:-9], "cut", "bytes before"),
        (HEAD + chunked([piece()]), "cut", "without [DONE]"),
        (HEAD + chunked([piece(), event({"error": {"message": "engine died"}}), DONE]), "error event", "engine died"),
        (HEAD + chunked([DONE]), "empty", "no tokens"),
        (b"", "cut", "before the answer did"),
        (b"SSH-2.0\r\n", "malformed", "SSH-2.0"),
    ],
)
def test_failures_by_their_kind(answer, kind, message):
    found = only(answer)
    assert found.error == kind and message in found.message, found
    assert found.end_s >= found.sent_s


def test_a_server_that_never_answers_and_one_that_is_not_there():
    async def never(number, body, writer):
        writer.write(HEAD + chunk(piece()))
        await asyncio.sleep(LIMIT_S)

    with FakeServer(never) as server:
        found = ask(server, load(3), timeout_s=0.3)
        assert [each.error for each in found] == ["timeout"] * 3 and "0.3 s" in found[0].message
        address = parse_url(server.url, "url")
    found = run(ask_all(load(2), ServerTarget(address, "fake"), report=lambda _: None)).outcomes
    assert [each.error for each in found] == ["connection"] * 2 and str(address.port) in found[0].message


def test_faults_of_some_requests_leave_the_others():
    faults = [with_length(b"500 Oops", b""), HEAD + chunk(piece()), HEAD + b"?\r\n"]

    async def answer(number, body, writer):
        if number % 4 == 3:
            await answer_all(number, body, writer)
        else:
            writer.write(faults[number % 4])

    with FakeServer(answer) as server:
        kinds = [each.error for each in ask(server, load(40))]
    assert {kind: kinds.count(kind) for kind in kinds} == {"": 10, "status 500": 10, "cut": 10, "malformed": 10}


def test_the_model_of_a_server():
    with FakeServer(models=b'{"data": [{"id": "a"}, {"id": "b", "max_model_len": 5}]}') as server:
        address = parse_url(server.url, "url")
        assert run(read_card(address, "", "", "w")).id == "a"
        assert run(read_card(address, "", "b", "w")).max_model_len == 5
        with pytest.raises(ConfigError, match="no model 'c'\nFix: it has a, b"):
            run(read_card(address, "", "c", "w"))
    with pytest.raises(ConfigError, match="gives no models: connection"):
        run(read_card(address, "", "", "w"))
    for models in (b"{}", b"[1]", b"\xff", b'{"data": [{"name": 1}]}'):
        with FakeServer(models=models) as server, pytest.raises(ConfigError, match="no list of models"):
            run(read_card(parse_url(server.url, "url"), "", "", "w"))
    with FakeServer(models=b'{"data": []}') as server, pytest.raises(ConfigError, match="none at all"):
        run(read_card(parse_url(server.url, "url"), "", "", "w"))


def check(server: FakeServer, asked: Load) -> None:
    target = ServerTarget(parse_url(server.url, "url"), "fake")

    async def both():
        await check_target(asked, target, await read_card(target.address, "", "", "w"), "w")

    run(both())


def test_one_request_shows_whether_a_load_makes_sense():
    async def refuse(number, body, writer):
        writer.write(with_length(b"400 No", b'{"error": {"message": "ids are not taken"}}'))

    with FakeServer(refuse) as server:
        with pytest.raises(ConfigError, match="status 400: ids are not taken"):
            check(server, load(500))
        assert len(server.bodies) == 1
    long = load(prompt_tokens=Lengths(1, 500), new_tokens=Lengths(1, 101))
    with FakeServer() as server:
        with pytest.raises(
            ConfigError, match=f"500 tokens and an answer of 101 are 601, and fake takes {MODEL['max_model_len']}"
        ):
            check(server, long)
        assert server.bodies == []
        check(server, load())
