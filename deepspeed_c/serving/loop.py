"""The loop of a ragged engine that serves requests. One thread owns the engine; others submit and cancel.

```
 submit, cancel --inbox--> schedule (C) --plan--> put --logits--> next tokens --> text --> sink of the request
                              ^                                       |
                              +--------- a token more, an end --------+
```
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from deepspeed_c import _C
from deepspeed_c.errors import ModelError, StateError
from deepspeed_c.inference.v2 import InferenceEngineV2, SchedulingError, SchedulingResult
from deepspeed_c.logging import logger
from deepspeed_c.ops import sample
from deepspeed_c.ops.kv import BLOCK_TOKENS
from deepspeed_c.serving.ranks import SILENCE_S, RanksOfSteps, StepOfRanks
from deepspeed_c.serving.sampling import FinishReason, SamplingParams
from deepspeed_c.serving.text import StopStrings, TextStream, decode_shown

__all__ = ["AnswerEvent", "CheckedPrompt", "RequestLoop", "ServedRequest"]


_T = TypeVar("_T")


class AnswerEvent(NamedTuple):
    """A piece of an answer. The last one of a request has a reason or an error."""

    text: str = ""
    token: int | None = None
    """The new token, which may complete no text. None: nothing was chosen."""
    log_prob: float | None = None
    """The logarithm of its probability in the whole distribution, softmax(logits); None unless it was asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens of the whole distribution with their log-probabilities, the first one first."""
    reason: FinishReason | None = None
    error: Exception | None = None


class CheckedPrompt(NamedTuple):
    """A request that the engine can meet, as ``RequestLoop.check`` has found. Another seed leaves it so."""

    tokens: list[int]
    params: SamplingParams


class ServedRequest:
    """One prompt and its answer.

    sink: called with each AnswerEvent from the thread that owns the engine; it does not block, and raises nothing.
    """

    def __init__(
        self,
        prompt: CheckedPrompt,
        sink: Callable[[AnswerEvent], None],
        decode: Callable[[list[int]], str],
        salt: str,
    ) -> None:
        tokens, params = prompt
        self.tokens, self.n_prompt = [*tokens], len(tokens)
        """The prompt, and the new tokens."""
        self.params, self.salt, self.sink = params, salt, sink
        self.number = -1
        """In the schedule, and in the engine while it has blocks there; -1: not there."""
        self.is_ended = False
        self.n_found = 0
        """Tokens of the prompt that were found in the memory at its arrival."""
        self.begun_s: float | None = None
        """The time of its first step, by ``time.monotonic``."""
        self._counts: dict[int, int] = {}
        if params.shown:
            decode = functools.partial(decode_shown, decode, dict(params.shown))
        self._text = TextStream(decode, tokens if params.continues else ())
        self._stop = StopStrings(params.stop)

    @property
    def n_new(self) -> int:
        """New tokens, an end token among them."""
        return len(self.tokens) - self.n_prompt

    def shape(self, logits: torch.Tensor) -> None:
        """Changes the logits of the next token, float [words], as the request wishes."""
        params = self.params
        if params.logit_bias:
            tokens, numbers = zip(*params.logit_bias)
            logits[list(tokens)] += torch.tensor(numbers, dtype=logits.dtype)
        if self._counts:
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32)
            penalties = params.presence_penalty + params.frequency_penalty * counts
            logits[list(self._counts)] -= penalties.to(logits.dtype)
        if params.grammar is not None:
            params.grammar.mask(logits)
        if self.n_new < params.n_least and params.ends:
            logits[[word for word in params.ends if word < len(logits)]] = -torch.inf

    def add(self, token: int, log_prob: float | None = None, top: tuple[tuple[int, float], ...] = ()) -> AnswerEvent:
        """The event of the next token."""
        params = self.params
        if params.grammar is not None:
            params.grammar.accept(token)
        if params.presence_penalty or params.frequency_penalty:
            self._counts[token] = self._counts.get(token, 0) + 1
        self.tokens.append(token)
        reason, text = None, ""
        if token in self.params.ends:
            reason = FinishReason.STOP
        else:
            text = self._stop.add(self._text.add([token]))
            if self._stop.is_found:
                reason = FinishReason.STOP
            elif self.n_new >= self.params.n_new:
                reason = FinishReason.LENGTH
        if reason is not None and not self._stop.is_found:
            text += self._stop.add(self._text.finish())
            text += self._stop.finish()
        return AnswerEvent(text, token, log_prob, top, reason)


class RequestLoop:
    """Runs requests on an engine until they have ended.

    Args:
        engine: only this loop uses it.
        decode: of a tokenizer: from a list of tokens to text.
        n_words: number of words with a text. Others, which only the model has, are not chosen.

    On tensor-parallel ranks rank 0 takes requests and chooses tokens. The others call ``follow``.
    """

    def __init__(self, engine: InferenceEngineV2, decode: Callable[[list[int]], str], n_words: int) -> None:
        limits = engine.limits
        self._engine, self._decode, self._n_words = engine, decode, min(n_words, limits.n_words)
        self._n_blocks, self._step_tokens, self._n_model_words = limits.n_blocks, limits.step_tokens, limits.n_words
        self.max_context = limits.sequence_tokens
        """Tokens of a prompt and its answer, at most."""
        self._schedule = _C.Schedule(limits.n_blocks, limits.step_sequences)
        self._ranks = RanksOfSteps()
        self._requests: dict[int, ServedRequest] = {}
        self._open = set[ServedRequest]()
        self._flushed: list[int] = []  # since the last step
        self._inbox: queue.SimpleQueue[tuple[str, ServedRequest | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._end: Exception | None = None

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its answer that fit the memory, within ``max_context``. The last token needs none."""
        return min(self.max_context, self._n_blocks * BLOCK_TOKENS + 1)

    @property
    def n_requests(self) -> int:
        """Requests that were submitted and have not ended, those in the inbox too."""
        return len(self._open)

    @property
    def n_running(self) -> int:
        """Requests with blocks."""
        return self._schedule.n_running

    @property
    def n_waiting(self) -> int:
        """Requests that have been read from the inbox, and have no blocks."""
        return self._schedule.n_waiting

    @property
    def n_free_blocks(self) -> int:
        """Blocks of keys and values that no request has."""
        return self._schedule.n_free_blocks

    @property
    def n_put_back(self) -> int:
        """Requests that have given their blocks back and are computed again, since the start."""
        return self._schedule.n_put_back

    def submit(self, prompt: CheckedPrompt, sink: Callable[[AnswerEvent], None], salt: str = "") -> ServedRequest:
        """Begins a request that ``check`` has returned; any thread may call it. salt: prefixes are found under the same
        salt alone.

        Raises StateError after the end.
        """
        request = ServedRequest(prompt, sink, self._decode, salt)
        self._tell(("add", request))
        return request

    def cancel(self, request: ServedRequest) -> None:
        """Ends a request before the next step; any thread may call it. Its sink gets nothing more."""
        request.is_ended = True
        with contextlib.suppress(StateError):
            self._tell(("cancel", request))

    def close(self) -> None:
        """Makes ``run`` return before the next step; any thread may call it. Requests that run get a StateError."""
        with contextlib.suppress(StateError):
            self._tell(("close", None))

    def run(self) -> None:
        """Runs steps until ``close``. The calling thread owns the engine meanwhile."""
        self.run_until(lambda: False)

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Runs steps until ``is_done``, which is asked before each, or until ``close``. The loop can run again after
        ``is_done``. Any other end answers all requests."""
        try:
            while not is_done():
                if not self._take_messages():
                    self._finish(
                        StateError("it was closed", where="RequestLoop", fix="send the request to another engine")
                    )
                    break
                self._step()
        except Exception as error:
            self._finish(error)
            raise
        except BaseException:  # a user's interrupt ends the requests, and the engine can go on
            self._answer_all(StateError("it was interrupted", where="RequestLoop", fix="send the request again"))
            raise
        self._ranks.send(StepOfRanks(self._take_flushed(), [], [], {}, is_last=True))

    def follow(self) -> None:
        """Runs the steps of rank 0 on another rank, until rank 0 ends its run."""
        while True:
            step = self._ranks.receive()
            self._flush(step.flushed)
            if step.uids:
                tokens = [torch.tensor(each) for each in step.tokens]
                self._engine.put(step.uids, tokens, do_checks=False, salts=step.salts)
            if step.is_last:
                return

    def share_text(self, text: str) -> str:
        """The text of rank 0, on all ranks, which all call it between runs."""
        return self._ranks.share_text(text)

    def check(self, prompt: Sequence[int], params: SamplingParams) -> CheckedPrompt:
        """The request that ``submit`` takes.

        Raises ModelError for an empty prompt and for tokens that the model does not have, SchedulingError for a request
        that can never fit.
        """
        where, n = "request", len(prompt) + params.n_new
        if not prompt or params.n_new < 1:
            raise ModelError(
                f"the prompt has {len(prompt)} tokens, and {params.n_new} are asked for",
                where=where,
                fix="send one token at least, and ask for one at least",
            )
        n_words = self._n_model_words
        if min(prompt) < 0 or max(prompt) >= n_words:
            wrong = next(token for token in prompt if not 0 <= token < n_words)
            raise ModelError(
                f"the token {wrong} is none of the model's {n_words}", where=where, fix="encode by its own tokenizer"
            )
        if others := [token for token, _ in params.logit_bias if not 0 <= token < self._n_words]:
            raise ModelError(
                f"the token {others[0]} of logit_bias is none of {self._n_words}", where=where, fix="leave it out"
            )
        if n > self.max_context:
            raise SchedulingError(
                SchedulingResult.SequenceTokenLimitExceeded,
                f"prompt and answer have {n} tokens, and {self.max_context} are the most of a sequence",
                where=where,
                fix="shorten the prompt, ask for fewer tokens, or raise max_context",
            )
        if n > self.longest:
            raise SchedulingError(
                SchedulingResult.KVCacheLimitExceeded,
                f"prompt and answer have {n} tokens, and the memory of keys and values has room for {self.longest}",
                where=where,
                fix="shorten the prompt, ask for fewer tokens, or give memory_config more",
            )
        return CheckedPrompt([*prompt], params)

    def _tell(self, message: tuple[str, ServedRequest | None]) -> None:
        with self._lock:
            if self._end is not None:
                raise StateError(
                    f"the engine takes no requests any more: {self._end}", where="submit", fix="start it again"
                )
            kind, request = message
            if kind == "add" and request is not None:
                self._open.add(request)  # before the thread of the engine can end it
            self._inbox.put(message)

    def _finish(self, end: Exception) -> None:
        with self._lock:
            self._end = end
        self._answer_all(end)

    def _answer_all(self, error: Exception) -> None:
        while not self._inbox.empty():
            kind, request = self._inbox.get_nowait()
            if request is not None:
                if kind == "add":
                    self._say(request, AnswerEvent(error=error))
                self._open.discard(request)
        for request in [*self._requests.values()]:
            self._drop(request)
            self._say(request, AnswerEvent(error=error))
            self._open.discard(request)

    def _take_messages(self) -> bool:
        """Takes all messages. Waits for one if no request runs. Returns False after ``close``."""
        while True:
            try:
                is_idle = not self._requests
                kind, request = self._inbox.get(is_idle, SILENCE_S if is_idle and self._ranks.world_size > 1 else None)
            except queue.Empty:
                if self._requests:
                    return True
                self._ranks.send(StepOfRanks(self._take_flushed(), [], [], {}))
                continue
            if request is None:
                return False
            if kind == "add" and not request.is_ended:
                self._add(request)
            elif kind == "cancel":
                self._drop(request)
                self._open.discard(request)

    def _add(self, request: ServedRequest) -> None:
        found = self._engine.count_found(torch.tensor(request.tokens), request.salt)
        number = self._schedule.add(len(request.tokens), request.n_prompt + request.params.n_new, found)
        request.n_found = found
        request.number = number
        self._requests[number] = request

    def _drop(self, request: ServedRequest) -> None:
        """Takes a request out, with its blocks."""
        number, request.number = request.number, -1
        if number < 0:
            return
        del self._requests[number]
        self._schedule.end(number)
        self._give_back([number])

    def _give_back(self, numbers: Iterable[int]) -> None:
        """Ends sequences of the engine, at the other ranks with the next step. A request that waits has none."""
        held = [number for number in numbers if self._engine.holds(number)]
        self._flushed += held
        self._flush(held)

    def _flush(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._engine.flush(number)

    def _take_flushed(self) -> list[int]:
        flushed, self._flushed = self._flushed, []
        return flushed

    def _step(self) -> None:
        """One forward: a token of each request that has its prompt behind it, and pieces of prompts."""
        plan, put_back = self._schedule.plan(self._step_tokens)
        self._give_back(put_back)
        requests = [self._requests[number] for number, _, _ in plan]
        uids = [number for number, _, _ in plan]
        now = time.monotonic()
        for request in requests:
            request.begun_s = request.begun_s or now
        tokens = [request.tokens[begin : begin + n] for request, (_, begin, n) in zip(requests, plan)]
        salts = {number: request.salt for number, request in zip(uids, requests) if request.salt}
        try:
            self._ranks.send(StepOfRanks(self._take_flushed(), uids, tokens, salts))
            logits = self._engine.put(uids, [torch.tensor(each) for each in tokens], do_checks=False, salts=salts)
        except BaseException as error:
            self._schedule.abort()
            if not isinstance(error, Exception) or self._ranks.world_size > 1:
                raise  # the other ranks may have run the step
            self._fail(requests, error)
            return
        places = {number: i for i, number in enumerate(uids)}
        rows = [places[number] for number in self._schedule.commit()]
        if rows:
            self._choose([requests[row] for row in rows], logits[rows, : self._n_words].cpu())

    def _fail(self, requests: Iterable[ServedRequest], error: Exception) -> None:
        """Answers the requests of a step that has failed. Other requests go on."""
        logger.error("a step of the engine has failed: %s", error)
        for request in requests:
            self._drop(request)
            self._say(request, AnswerEvent(error=error))

    def _choose(self, requests: Sequence[ServedRequest], logits: torch.Tensor) -> None:
        """Draws the next token of each. A row whose logits allow no choice ends alone."""
        whole = {i: torch.log_softmax(logits[i].float(), -1) for i, each in enumerate(requests) if _tells(each)}
        errors = [_attempt(request.shape, row) for row, request in zip(logits, requests)]
        try:
            chosen: list[int | Exception] = [*self._draw(requests, logits)]
        except ValueError:
            chosen = [self._draw_alone(request, row) for row, request in zip(logits, requests)]
        for i, (request, choice, error) in enumerate(zip(requests, chosen, errors)):
            event = _attempt(_add, request, error or choice, whole.get(i))
            event = AnswerEvent(error=event) if isinstance(event, Exception) else event
            if event.reason is not None or event.error is not None:
                self._drop(request)
            self._say(request, event)

    def _draw(self, requests: Sequence[ServedRequest], logits: torch.Tensor) -> list[int]:
        params = [request.params for request in requests]
        has_penalty = any(each.rules.repetition_penalty != 1 for each in params)
        words, _ = sample.tokens(
            logits,
            [each.rules for each in params],
            [each.seed for each in params],
            [request.n_new for request in requests],
            [torch.tensor(request.tokens) for request in requests] if has_penalty else None,
        )
        return words.tolist()

    def _draw_alone(self, request: ServedRequest, row: torch.Tensor) -> int | Exception:
        try:
            return self._draw([request], row[None])[0]
        except ValueError as error:
            return ModelError(
                f"no token can be chosen: {error}",
                where="RequestLoop",
                fix="look for NaN in the weights, and for rules that leave no word",
            )

    def _say(self, request: ServedRequest, event: AnswerEvent) -> None:
        """Calls the sink, unless the request was cancelled. A sink that raises ends its own request."""
        if request.is_ended:
            return
        if event.reason is not None or event.error is not None:
            request.is_ended = True
            self._open.discard(request)
        try:
            request.sink(event)
        except Exception:  # noqa: BLE001  (code of a caller)
            logger.exception("the answer of a request could not be given away; the request ends")
            request.is_ended = True
            self._drop(request)
            self._open.discard(request)


def _tells(request: ServedRequest) -> bool:
    return request.params.n_top is not None


def _attempt(function: Callable[..., _T], *args: Any) -> _T | Exception:
    """The result, or the error: code of one request (its grammar, its tokenizer) ends no other one."""
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001  (code of a caller)
        return error


def _add(request: ServedRequest, token: int | Exception, log_probs: torch.Tensor | None) -> AnswerEvent:
    """The event of a chosen token. log_probs: of the whole distribution, float [words], where they are wanted."""
    if isinstance(token, Exception):
        return AnswerEvent(error=token)
    if log_probs is None:
        return request.add(token)
    values, tokens = log_probs.topk(min(request.params.n_top or 0, len(log_probs)))
    return request.add(token, float(log_probs[token]), tuple(zip(tokens.tolist(), values.tolist())))
