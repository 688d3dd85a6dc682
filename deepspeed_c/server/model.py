"""The model of a server: an engine in a thread of its own, whose answers come into an event loop of asyncio."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed_c.background import BackgroundThread
from deepspeed_c.config.ragged import RaggedInferenceEngineConfig
from deepspeed_c.errors import StateError
from deepspeed_c.inference.v2 import InferenceEngineV2, build_hf_engine
from deepspeed_c.logging import logger
from deepspeed_c.serving import AnswerEvent, CheckedPrompt, RequestLoop, SamplingParams, ServedRequest
from deepspeed_c.serving.tokenizer import end_tokens, read_tokenizer

__all__ = ["AnswerStream", "Counts", "ServedModel"]

# Events that wait for a reader. A stream that is read slower than it is written ends there.
_MOST_EVENTS = 4096
# A step of a large model ends within this time.
_STEP_LIMIT_S = 60.0
_LOOK_S = 0.05
_SEEDS = 1 << 63


class Counts(NamedTuple):
    """The work of a model. The first three are of this moment, the others since the start."""

    running: int
    """Samples with blocks of keys and values."""
    waiting: int
    """Samples without."""
    free_blocks: int
    put_back: int
    """Samples that have given their blocks back, to be computed again."""
    prompt_tokens: int
    found_tokens: int
    """Tokens of prompts that were in the memory already."""
    new_tokens: int


class ServedModel:
    """A model, its tokenizer and the thread of its engine.

    Args:
        engine: only this object uses it.
        tokenizer: of transformers.
        name: of the model, as clients write it.

    On tensor-parallel ranks other than 0 the thread runs the steps of rank 0, and nothing else is called but ``close``.
    """

    def __init__(self, engine: InferenceEngineV2, tokenizer: Any, name: str) -> None:
        self.engine, self.tokenizer, self.name = engine, tokenizer, name
        self.created = int(time.time())
        """Seconds since 1970."""
        self.n_words = min(len(tokenizer), engine.limits.n_words)
        """Words that answers and prompts may have."""
        self.loop = RequestLoop(engine, self.decode, self.n_words)
        self.max_model_len = self.loop.longest
        """Tokens of a prompt and its answer, at most."""
        self.ends = end_tokens(engine.model(), tokenizer.eos_token_id)
        """Tokens that end an answer."""
        self._lock = threading.Lock()
        self._tokens = {"prompt": 0, "found": 0, "new": 0}
        self._end: Exception | None = None
        self._thread = BackgroundThread(
            self._run, name="deepspeed_c engine", end=self.loop.close, limit_s=_STEP_LIMIT_S
        )

    @classmethod
    def load(
        cls,
        folder: str,
        name: str,
        config: RaggedInferenceEngineConfig,
        tokenizer: str = "",
        kv_cache_memory_bytes: int | None = None,
    ) -> ServedModel:
        """The model of a Hugging Face folder. tokenizer: a folder; "": that of the model. kv_cache_memory_bytes: of
        keys and values; None: as ``config`` says.

        Raises as ``build_hf_engine``, and ModelError for a folder without a tokenizer.
        """
        words = read_tokenizer(tokenizer or folder)
        return cls(build_hf_engine(folder, config, kv_cache_memory_bytes=kv_cache_memory_bytes), words, name)

    def start(self) -> None:
        """Begins the thread."""
        self._thread.start()

    @property
    def is_rank_0(self) -> bool:
        return torch.distributed.get_rank() == 0

    @property
    def is_alive(self) -> bool:
        """Whether requests are answered."""
        return self._thread.is_alive() and self._end is None

    @property
    def why_dead(self) -> str:
        """The error that has ended the engine; "" if there is none."""
        return "" if self._end is None else f"{type(self._end).__name__}: {self._end}"

    @property
    def counts(self) -> Counts:
        loop, tokens = self.loop, self._tokens
        return Counts(
            loop.n_running,
            loop.n_waiting,
            loop.n_free_blocks,
            loop.n_put_back,
            tokens["prompt"],
            tokens["found"],
            tokens["new"],
        )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a text. special: with those that begin or end each text of this tokenizer."""
        return self.tokenizer.encode(text, add_special_tokens=special)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens. special: with the text of special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=not special)

    def answer(self, prompt: Sequence[int], params: SamplingParams, *, n: int = 1, salt: str = "") -> AnswerStream:
        """Begins ``n`` samples of a prompt; sample i has the seed of ``params`` plus i. Samples after the first one
        begin when it has its first token, and find the prompt in the memory then. salt: prompts are found under the
        same salt alone.

        Called from an event loop. Raises as ``RequestLoop.check``, and StateError where the engine has ended.
        """
        prompts = [self.loop.check(prompt, params)]
        for i in range(1, n):
            own = dataclasses.replace(params, seed=(params.seed + i) % _SEEDS)
            prompts.append(prompts[0]._replace(params=own))
        return AnswerStream(self, prompts, salt)

    def close(self, drain_s: float = 0.0) -> None:
        """Ends the engine when its requests have ended, at the latest after ``drain_s`` seconds; requests that run
        then get a StateError. A second call changes nothing."""
        end = time.monotonic() + drain_s
        while self.is_alive and self.loop.n_requests and time.monotonic() < end:
            time.sleep(_LOOK_S)
        self.loop.close()
        if self._thread.ident is not None:
            self._thread.join(_STEP_LIMIT_S)

    def destroy(self) -> None:
        """Frees the model, after ``close``."""
        self.engine.destroy()

    def count(self, prompt: int = 0, found: int = 0, new: int = 0) -> None:
        """Adds to the numbers of tokens."""
        with self._lock:
            self._tokens["prompt"] += prompt
            self._tokens["found"] += found
            self._tokens["new"] += new

    def _run(self) -> None:
        try:
            if self.is_rank_0:
                self.loop.run()
            else:
                self.loop.follow()
        except Exception as error:  # noqa: BLE001  (whoever asks for an answer gets it)
            self._end = error
            logger.exception("the engine has ended; no further request is answered")


class AnswerStream:
    """The samples of one prompt, as they are written: an asynchronous iterator of (sample, AnswerEvent).

    prompts: one for each sample, with the same tokens.

    The last event of a sample has a reason. An event with an error is the last one of all.
    """

    def __init__(self, model: ServedModel, prompts: Sequence[CheckedPrompt], salt: str) -> None:
        self._model, self._n_prompt, self._salt = model, len(prompts[0].tokens), salt
        self._waiting = deque(enumerate(prompts))
        self._n_open = len(prompts)
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[int, AnswerEvent]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_woken = self._is_ended = False
        self._lock = threading.RLock()
        self.requests: list[ServedRequest] = []
        """The samples that have begun. Their fields are read only."""
        self.arrived_s = time.monotonic()
        self._begin(1)

    def cancel(self) -> None:
        """Ends all samples before the next step. Any thread may call it, also after the end."""
        with self._lock:
            self._is_ended = True
            requests = [*self.requests]
            self._waiting.clear()
        for request in requests:
            self._model.loop.cancel(request)

    async def __aiter__(self) -> AsyncIterator[tuple[int, AnswerEvent]]:
        try:
            while self._n_open:
                while not self._events:
                    self._waiter = self._loop.create_future()
                    await self._waiter
                sample, event = self._events.popleft()
                self._n_open -= event.reason is not None
                yield sample, event
                if event.error is not None:
                    return
        finally:
            self.cancel()

    def _begin(self, n: int) -> None:
        """Sends the next samples."""
        for _ in range(min(n, len(self._waiting))):
            with self._lock:
                if self._is_ended:
                    return
                sample, prompt = self._waiting.popleft()
                self.requests.append(
                    self._model.loop.submit(prompt, lambda event, sample=sample: self._take(sample, event), self._salt)
                )

    def _take(self, sample: int, event: AnswerEvent) -> None:
        """Called from the engine's thread."""
        if self._is_ended:
            return
        if event.token is not None:
            with self._lock:  # the sample is in the list
                request = self.requests[sample]
            is_first = request.n_new == 1
            self._model.count(self._n_prompt if is_first else 0, request.n_found if is_first else 0, 1)
        if len(self._events) >= _MOST_EVENTS:
            event = AnswerEvent(
                error=StateError(
                    f"{_MOST_EVENTS} pieces wait, and nobody reads them",
                    where="stream",
                    fix="read the stream faster, or ask without stream",
                )
            )
        if event.error is not None:
            self.cancel()
        self._events.append((sample, event))
        if sample == 0 and event.error is None:
            self._begin(len(self._waiting))
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_woken = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
