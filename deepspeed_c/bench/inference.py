"""How fast a server answers a load that does not wait for it: an open-loop client of ``/v1/completions``.

The client starts each request at its own time, whether or not earlier ones have been answered, and notes the
arrival of each piece of a stream. It needs no torch, and works with any server that has OpenAI's API.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Annotated, Any, NamedTuple

import msgspec

from deepspeed_c.bench.http_stream import Address, EventParser, FailedRequest, error_text, exchange, whole_body
from deepspeed_c.bench.load import Load, PlannedRequest
from deepspeed_c.errors import ConfigError

__all__ = [
    "CLOCK",
    "Asked",
    "Clock",
    "ModelCard",
    "RequestOutcome",
    "ServerTarget",
    "ask_all",
    "check_target",
    "read_card",
]

_DONE = b"[DONE]"
# Most time for an answer to GET /v1/models.
_CARD_LIMIT_S = 60.0


class Clock(NamedTuple):
    """Where times come from."""

    now: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]


CLOCK = Clock(time.perf_counter, asyncio.sleep)


class ModelCard(msgspec.Struct):
    """An entry of ``/v1/models``."""

    id: str
    max_model_len: int | None = None
    """Tokens of a prompt and its answer; vLLM and ``deepspeed_c serve`` say so."""
    vocab_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Ids in prompts are below this number; None if the server does not say so."""


class _ModelList(msgspec.Struct):
    data: list[ModelCard]


class ServerTarget(NamedTuple):
    """The server, and how it is asked."""

    address: Address
    model: str
    key: str = ""
    timeout_s: float = 600.0
    """Limit for a request, from its begin to its end."""
    temperature: float = 0.0
    ignores_eos: bool = True
    """Answers have as many tokens as are asked for."""

    def body(self, prompt: list[int] | str, n_new: int) -> bytes:
        """The body of a request."""
        fields: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": n_new,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignores_eos:
            fields["ignore_eos"] = True
        return msgspec.json.encode(fields)


class RequestOutcome(msgspec.Struct, kw_only=True):
    """The result of a request. Times are seconds from the begin of the load."""

    number: int
    at_s: float
    """By the schedule."""
    sent_s: float = 0.0
    end_s: float = 0.0
    n_prompt: int
    """Tokens by the plan, or words of a text."""
    n_wanted: int
    """Tokens that were asked for."""
    piece_s: list[float] = []
    """The time of each piece of the answer that has a token."""
    usage_prompt: int | None = None
    """Tokens of the prompt, as the server says; None if it does not say."""
    usage_new: int | None = None
    """Tokens of the answer, as the server says."""
    error: str = ""
    """The kind of the failure; "" of a whole answer: "status N", "connection", "cut", "malformed", "error event",
    "timeout", "empty"."""
    message: str = ""

    @property
    def n_new(self) -> int:
        """Tokens of the answer: the server's number, or else the number of pieces."""
        return len(self.piece_s) if self.usage_new is None else self.usage_new

    @property
    def late_s(self) -> float:
        """Time between the schedule and the begin of the request."""
        return self.sent_s - self.at_s


class Asked(NamedTuple):
    """All requests of a load."""

    outcomes: list[RequestOutcome]
    processor_share: float
    """Processor time of the client over the time of the load."""


async def ask_all(
    load: Load,
    target: ServerTarget,
    *,
    concurrency: int | None = None,
    clock: Clock = CLOCK,
    report: Callable[[int], None],
) -> Asked:
    """Sends all requests of a load. concurrency: most requests at one time; further ones are sent late.
    report: called with the number of requests that have ended, after each one.
    """
    places = nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
    outcomes = []
    n_ended = 0
    begin, used = clock.now(), time.process_time()

    async def ask(request: PlannedRequest, outcome: RequestOutcome) -> None:
        nonlocal n_ended
        async with places:
            await _ask(target, load.prompt(request), outcome, lambda: clock.now() - begin)
        n_ended += 1
        report(n_ended)

    tasks = []
    for request in load.plan():
        if (wait_s := begin + request.at_s - clock.now()) > 0:
            await clock.sleep(wait_s)
        outcome = RequestOutcome(
            number=request.number, at_s=request.at_s, n_prompt=request.n_prompt, n_wanted=request.n_new
        )
        outcomes.append(outcome)
        tasks.append(asyncio.create_task(ask(request, outcome)))
    await asyncio.gather(*tasks)
    seconds = max(clock.now() - begin, 1e-9)
    return Asked(outcomes, (time.process_time() - used) / seconds)


async def _ask(
    target: ServerTarget, prompt: list[int] | str, outcome: RequestOutcome, now: Callable[[], float]
) -> None:
    body = target.body(prompt, outcome.n_wanted)
    outcome.sent_s = now()
    try:
        await asyncio.wait_for(_read_answer(target, body, outcome, now), target.timeout_s)
    except asyncio.TimeoutError:
        outcome.error, outcome.message = "timeout", f"no whole answer within {target.timeout_s:g} s"
    except FailedRequest as failure:
        outcome.error, outcome.message = failure.kind, failure.message
    outcome.end_s = now()


class _PieceChoice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _PieceUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _CompletionPiece(msgspec.Struct):
    choices: list[_PieceChoice] = []
    usage: _PieceUsage | None = None
    error: Any = None


_decode_piece = msgspec.json.Decoder(_CompletionPiece).decode


async def _read_answer(target: ServerTarget, body: bytes, outcome: RequestOutcome, now: Callable[[], float]) -> None:
    """Fills the outcome. Raises FailedRequest."""
    is_last_bare = is_done = False
    parser = EventParser()
    async with exchange(target.address, "POST", "/v1/completions", target.key, body) as (head, pieces):
        if head.status != 200:
            raise FailedRequest(f"status {head.status}", error_text(await whole_body(pieces)))
        if "text/event-stream" not in (kind := head.headers.get("content-type", "")):
            raise FailedRequest("malformed", f"the answer is no stream of events: its content-type is {kind[:60]!r}")
        async for piece in pieces:
            seen_s = now()
            for data in parser.feed(piece):
                if data == _DONE:
                    is_done = True
                    break
                event = _decode(data)
                if event.error is not None:
                    raise FailedRequest("error event", error_text(data))
                if event.usage is not None:
                    outcome.usage_prompt = event.usage.prompt_tokens
                    outcome.usage_new = event.usage.completion_tokens
                if event.choices:
                    outcome.piece_s.append(seen_s)
                    is_last_bare = not event.choices[0].text and event.choices[0].finish_reason is not None
            if is_done:
                break
    if not is_done:
        raise FailedRequest("cut", "the stream ended without [DONE]")
    # Some servers send the reason alone after the last token, others send it with a token that may have no text.
    if is_last_bare and outcome.usage_new in (None, len(outcome.piece_s) - 1):
        outcome.piece_s.pop()
    if not outcome.piece_s:
        raise FailedRequest("empty", "the answer has no tokens")


def _decode(data: bytes) -> _CompletionPiece:
    try:
        return _decode_piece(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FailedRequest("malformed", f"an event is no piece of a completion: {error}") from error


async def read_card(address: Address, key: str, name: str, where: str) -> ModelCard:
    """The model of a server: the one with the name, "": the first one.

    Raises ConfigError where no server answers, or it has no such model.
    """

    async def read() -> bytes:
        async with exchange(address, "GET", "/v1/models", key) as (head, pieces):
            found = await whole_body(pieces)
            if head.status != 200:
                raise FailedRequest(f"status {head.status}", error_text(found))
            return found

    try:
        models = msgspec.json.decode(await asyncio.wait_for(read(), _CARD_LIMIT_S), type=_ModelList).data
    except FailedRequest as error:
        raise ConfigError(
            f"{address}/v1/models gives no models: {error.kind}: {error.message}",
            where=where,
            fix="start the server first; --api-key has the key if the server wants one",
        ) from error
    except asyncio.TimeoutError as error:
        raise ConfigError(
            f"{address}/v1/models has not answered in {_CARD_LIMIT_S:g} s", where=where, fix="look at the server"
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{address}/v1/models is no list of models: {error}",
            where=where,
            fix="write the address of a server with OpenAI's API",
        ) from error
    for card in models:
        if name in ("", card.id):
            return card
    raise ConfigError(
        f"the server has no model {name!r}" if name else "the server has no model",
        where="--model",
        fix=f"it has {', '.join(card.id for card in models) or 'none at all'}",
    )


async def check_target(load: Load, target: ServerTarget, card: ModelCard, where: str) -> None:
    """Sends one request before the load, so that a server which refuses all of them is asked once.

    Raises ConfigError for lengths beyond the model's, and for a request that fails.
    """
    longest = load.prompt_tokens.high + load.new_tokens.high
    if card.max_model_len is not None and longest > card.max_model_len and not load.is_text:
        raise ConfigError(
            f"a prompt of {load.prompt_tokens.high} tokens and an answer of {load.new_tokens.high} are {longest}, and"
            f" {card.id} takes {card.max_model_len}",
            where="--prompt-tokens and --new-tokens",
            fix="ask for less, or start the server with a larger --max-model-len",
        )
    probe = RequestOutcome(number=-1, at_s=0.0, n_prompt=load.prompt_tokens.low, n_wanted=load.new_tokens.low)
    await _ask(target, load.probe(), probe, CLOCK.now)
    if probe.error:
        raise ConfigError(
            f"a first request to {target.address} failed: {probe.error}: {probe.message}",
            where=where,
            fix="--vocab-size N sends ids below N, --text sends words in place of ids, --allow-eos leaves ignore_eos out",
        )
