"""A deployment's model: requests of several prompts, with events as dictionaries that JSON can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed_c.errors import DeepSpeedCError
from deepspeed_c.mii.config import ModelConfig
from deepspeed_c.mii.data import Response
from deepspeed_c.mii.generator import Generator

__all__ = ["GeneratorService", "build_service"]


class GeneratorService:
    """The model of a replica. One on each tensor-parallel rank."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def submit(
        self, prompts: list[str], fields: dict[str, Any], emit: Callable[[dict[str, Any]], None]
    ) -> Callable[[], None]:
        """Begins a request, and returns a function that cancels it; any thread may call both.

        emit: gets {"index": of the prompt, and the fields of ``Response``}, or {"error": ...} as the last event. The
        engine's thread calls it, so it must not block. With ``fields["stream"]`` an answer comes in
        pieces; all but the last have the finish_reason "none".

        Raises DeepSpeedCError for a wrong field or prompt, before anything has begun.
        """
        loop, has_failed = self._generator.loop, False
        wishes = [self._generator.prepare(prompt, fields, i) for i, prompt in enumerate(prompts)]
        requests: list[Any] = []

        def cancel() -> None:
            for request in requests:
                loop.cancel(request)

        def take(index: int, answer: Response | Exception) -> None:
            nonlocal has_failed
            if has_failed:
                return
            if isinstance(answer, Exception):
                has_failed = True
                cancel()
                emit({"error": _fields_of(answer)})
            else:
                emit({"index": index, **answer.to_msg_dict()})

        try:
            for i, wish in enumerate(wishes):
                requests.append(self._generator.begin(wish, lambda answer, i=i: take(i, answer)))
        finally:
            if has_failed or len(requests) < len(wishes):
                cancel()
        return cancel

    def run(self) -> None:
        """Runs steps until ``close``. Ranks other than 0 run the steps of rank 0."""
        loop = self._generator.loop
        if self._generator.is_rank_0:
            loop.run()
        else:
            loop.follow()

    def close(self) -> None:
        """Makes ``run`` return; requests that run get an error."""
        self._generator.loop.close()


def build_service(model_config: ModelConfig) -> GeneratorService:
    """Loads the model of a deployment."""
    return GeneratorService(Generator.of(model_config))


def _fields_of(error: Exception) -> dict[str, str]:
    kind = type(error).__name__
    if isinstance(error, DeepSpeedCError):
        return {"kind": kind, "what": error.what, "where": error.where, "fix": error.fix}
    return {"kind": "StateError", "what": f"the step failed: {kind}: {error}", "where": "deployment", "fix": ""}
