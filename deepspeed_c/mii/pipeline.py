"""``mii.pipeline``: a model in this process, for prompts that come together."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deepspeed_c.background import BackgroundThread
from deepspeed_c.errors import StateError
from deepspeed_c.mii.config import ModelConfig, split_arguments
from deepspeed_c.mii.constants import GenerationFinishReason
from deepspeed_c.mii.data import Response
from deepspeed_c.mii.generator import Generator
from deepspeed_c.serving import ServedRequest

__all__ = ["MIIAsyncPipeline", "MIIPipeline", "async_pipeline", "pipeline"]

# A step of a large model ends within this time.
_STEP_LIMIT_S = 60.0


def pipeline(
    model_name_or_path: str = "",
    model_config: dict[str, Any] | None = None,
    all_rank_output: bool = False,
    **kwargs: Any,
) -> MIIPipeline:
    """A model that answers prompts in this process.

    model_name_or_path: folder of a Hugging Face model. model_config, kwargs: fields of ``ModelConfig``.
    all_rank_output: all tensor-parallel ranks get the answers, and not rank 0 alone. Under the launcher each rank calls
    it, and the model is cut over them.

    Raises UnknownArgument for a field that there is not, ConfigError for a wrong one, and as ``build_hf_engine``.
    """
    config = split_arguments(model_name_or_path, model_config, None, kwargs)[0]
    return MIIPipeline(Generator.of(config), all_rank_output)


def async_pipeline(model_config: ModelConfig) -> MIIAsyncPipeline:
    """A model in this process that takes prompts at any time."""
    return MIIAsyncPipeline(Generator.of(model_config))


class _OverGenerator:
    """The common part of both pipelines."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._requests: dict[int, ServedRequest] = {}

    @property
    def inference_engine(self) -> Any:
        """The ragged engine."""
        return self._generator.engine

    @property
    def tokenizer(self) -> Any:
        return self._generator.tokenizer

    @property
    def model_config(self) -> ModelConfig:
        return self._generator.model_config

    @property
    def max_length(self) -> int:
        """Tokens of a prompt and its answer, for requests that do not say."""
        return self._generator.max_length

    @property
    def is_rank_0(self) -> bool:
        """Whether this rank takes prompts and gives answers."""
        return self._generator.is_rank_0

    def flush(self, uids: Iterable[int]) -> None:
        """Ends requests that run. A uid that has ended, or that there is not, changes nothing."""
        for uid in uids:
            request = self._requests.pop(uid, None)
            if request is not None:
                self._generator.loop.cancel(request)


class MIIPipeline(_OverGenerator):
    """Answers prompts, all of a call together. ``mii.pipeline`` makes one."""

    def __init__(self, generator: Generator, all_rank_output: bool = False) -> None:
        super().__init__(generator)
        self._all_rank_output = all_rank_output
        self._is_destroyed = False
        self._lock = threading.Lock()

    def __call__(self, prompts: str | Sequence[str], **generate_kwargs: Any) -> list[Response]:
        """The answers in the order of the prompts; on other ranks than 0 an empty list without ``all_rank_output``.

        generate_kwargs: fields of ``GenerateParamsConfig``. Calls of several threads run one after another.

        Raises StateError after ``destroy``, and before anything runs the errors of ``Generator.prepare``. If a request
        fails within, the others end, and its error is raised.
        """
        with self._lock:
            if self._is_destroyed:
                raise StateError("the pipeline was destroyed", where="MIIPipeline", fix="make one by mii.pipeline")
            texts = [prompts] if isinstance(prompts, str) else list(prompts)
            fields = {**generate_kwargs, "stream": False}
            wishes = [self._generator.prepare(text, fields, i) for i, text in enumerate(texts)]
            answers: list[Response] = []
            if not wishes:
                return answers
            if self.is_rank_0:
                answers = self._answer(wishes)
            else:
                self._generator.loop.follow()
            return self._share(answers) if self._all_rank_output else answers

    def destroy(self) -> None:
        """Frees the model. A second call changes nothing."""
        with self._lock:
            if not self._is_destroyed:
                self._is_destroyed = True
                self._generator.destroy()

    def _answer(self, wishes: Sequence[Any]) -> list[Response]:
        answers: dict[int, Response] = {}
        errors: list[Exception] = []

        def take(uid: int, answer: Response | Exception) -> None:
            if isinstance(answer, Exception):
                errors.append(answer)
            else:
                answers[uid] = answer

        try:
            for uid, wish in enumerate(wishes):
                self._requests[uid] = self._generator.begin(wish, lambda answer, uid=uid: take(uid, answer))
            self._generator.loop.run_until(lambda: bool(errors) or len(answers) == len(wishes))
        finally:
            self.flush([*self._requests])
        if errors:
            raise errors[0]
        return [answers[uid] for uid in range(len(wishes))]

    def _share(self, answers: list[Response]) -> list[Response]:
        text = json.dumps([each.to_msg_dict() for each in answers])
        return [Response.from_msg_dict(each) for each in json.loads(self._generator.loop.share_text(text))]


class MIIAsyncPipeline(_OverGenerator):
    """Takes prompts from any thread, at any time, and gives each thread the answers to its own. ``start`` begins it,
    ``shutdown`` ends it.

    On tensor-parallel ranks each calls ``start``; rank 0 takes the prompts.
    """

    def __init__(self, generator: Generator) -> None:
        super().__init__(generator)
        self._answers: dict[int, queue.SimpleQueue[tuple[int, Response | Exception]]] = {}
        self._n_uids = 0
        self._lock = threading.Lock()
        self._thread: BackgroundThread | None = None
        self._is_shutdown = False

    def start(self) -> None:
        """Begins the thread that owns the engine."""
        loop = self._generator.loop
        run = loop.run if self.is_rank_0 else loop.follow
        self._thread = BackgroundThread(run, name="mii async_pipeline", end=loop.close, limit_s=_STEP_LIMIT_S)
        self._thread.start()

    def put_request(self, prompt: str, kwargs: Mapping[str, Any]) -> int:
        """Sends a prompt, and returns its uid. kwargs: fields of ``GenerateParamsConfig``; with ``stream`` the answer
        comes in pieces.

        Raises StateError after ``shutdown``, and the errors of ``Generator.prepare``.
        """
        wish = self._generator.prepare(prompt, kwargs) if self.is_rank_0 else None
        with self._lock:
            self._n_uids += 1
            uid = self._n_uids
            answers = self._answers.setdefault(threading.get_ident(), queue.SimpleQueue())
            if wish is not None:
                self._requests[uid] = self._generator.begin(wish, lambda answer: answers.put((uid, answer)))
        return uid

    def get_response(self) -> tuple[int, Response]:
        """(uid, the next answer or piece) of the requests of this thread. Waits for it. On other ranks than 0: (-1, an
        empty response).

        Raises the error of a request that has failed, StateError where this thread has sent none.
        """
        if not self.is_rank_0:
            return -1, Response("", 0, 0, GenerationFinishReason.NONE)
        answers = self._answers.get(threading.get_ident())
        if answers is None:
            raise StateError("this thread has sent no prompt", where="get_response", fix="call put_request before")
        uid, answer = answers.get()
        if isinstance(answer, Exception):
            raise answer
        return uid, answer

    def flush_uid(self, uid: int) -> None:
        """Ends a request. A uid that has ended, or that there is not, changes nothing."""
        with self._lock:
            self.flush([uid])

    def shutdown(self) -> None:
        """Ends the thread; requests that run get a StateError."""
        self._generator.loop.close()
        if self._thread is not None and self.is_rank_0:
            self._thread.join(_STEP_LIMIT_S)
        self._is_shutdown = True

    def is_shutdown(self) -> bool:
        return self._is_shutdown
