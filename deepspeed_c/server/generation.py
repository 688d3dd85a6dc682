"""The answers of one request: all samples of all its prompts as one asynchronous stream, which is measured."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence

from deepspeed_c.server.metrics import Metrics
from deepspeed_c.server.model import AnswerStream, ServedModel
from deepspeed_c.serving import AnswerEvent, SamplingParams
from deepspeed_c.serving.sampling import Grammar

__all__ = ["RequestAnswers"]


class RequestAnswers:
    """The answers of one request. Answer ``i * n + j`` is sample j of prompt i.

    Args:
        prompts: tokens of each.
        n: samples of each prompt.
        grammars: one for each answer, or none.

    Raises as ``ServedModel.answer``, and nothing has begun then. ``close`` is called at the end in any case.
    """

    def __init__(
        self,
        model: ServedModel,
        metrics: Metrics,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        n: int,
        salt: str,
        grammars: Sequence[Grammar] = (),
    ) -> None:
        self._metrics = metrics
        self.n_prompt = sum(map(len, prompts))
        """Tokens of all prompts."""
        self.n_new = 0
        """Tokens of all answers so far."""
        self._streams: list[tuple[int, AnswerStream]] = []  # (first answer, its stream)
        self._is_complete = self._is_closed = False
        self._begun_s = time.monotonic()
        try:
            for i, prompt in enumerate(prompts):
                if not grammars:
                    self._streams.append((i * n, model.answer(prompt, params, n=n, salt=salt)))
                    continue
                for j in range(n):  # a form belongs to one answer
                    own = dataclasses.replace(params, seed=params.seed + j, grammar=grammars[i * n + j])
                    self._streams.append((i * n + j, model.answer(prompt, own, salt=salt)))
        except BaseException:
            self._cancel()
            raise

    @property
    def n_found(self) -> int:
        """Tokens of the prompts that were in the memory, for the first answer to each."""
        return sum(stream.requests[0].n_found for _, stream in self._streams if stream.requests)

    async def events(self) -> AsyncIterator[tuple[int, AnswerEvent]]:
        """(answer, AnswerEvent). An event with an error is the last one of all."""
        last: dict[int, float] = {}
        async for answer, event in _merged(self._streams):
            if event.error is None:
                self._measure(answer, last)
            self.n_new += event.token is not None
            yield answer, event
            if event.error is not None:
                self._is_complete = True
                return
        self._is_complete = True
        self._metrics.request.observe(time.monotonic() - self._begun_s)

    def close(self) -> None:
        """Ends what still runs. A second call changes nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._cancel()
        if not self._is_complete:
            self._metrics.cancelled.inc()

    def _cancel(self) -> None:
        for _, stream in self._streams:
            stream.cancel()

    def _measure(self, answer: int, last: dict[int, float]) -> None:
        now = time.monotonic()
        if answer in last:
            self._metrics.token.observe(now - last[answer])
        elif not last:
            begun = [request.begun_s for _, stream in self._streams for request in stream.requests if request.begun_s]
            if begun:
                self._metrics.queue.observe(max(min(begun) - self._begun_s, 0))
            self._metrics.first_token.observe(now - self._begun_s)
        last[answer] = now


async def _merged(streams: Sequence[tuple[int, AnswerStream]]) -> AsyncIterator[tuple[int, AnswerEvent]]:
    """The events of all streams, as they come. A reader that is slow leaves them in the streams, which are bounded."""
    if len(streams) == 1:
        first, stream = streams[0]
        async for sample, event in stream:
            yield first + sample, event
        return
    events: asyncio.Queue[tuple[int, AnswerEvent] | None] = asyncio.Queue(1)

    async def read(first: int, stream: AnswerStream) -> None:
        async for sample, event in stream:
            await events.put((first + sample, event))
        await events.put(None)

    tasks = [asyncio.create_task(read(first, stream)) for first, stream in streams]
    try:
        n_open = len(tasks)
        while n_open:
            found = await events.get()
            if found is None:
                n_open -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
