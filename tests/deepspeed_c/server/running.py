"""A server in this process, for the clients of tests."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist

from deepspeed_c.config.ragged import RaggedInferenceEngineConfig
from tests import waits
from tests.deepspeed_c.serving.folders import model_folder

LIMIT_SECONDS = 60.0


class Running(NamedTuple):
    model: Any
    app: Any
    http: Any
    url: str
    call: Callable[[Callable[[], Any]], None]
    """Calls a function in the event loop of the server."""


def engine_config(**manager: Any) -> RaggedInferenceEngineConfig:
    defaults = {"memory_config": {"mode": "allocate", "size": 60}, "max_context": 400}
    # Answers are compared to the bit, and requests of one call may share a step or not.
    return RaggedInferenceEngineConfig(state_manager={**defaults, **manager}, deterministic=True)


@contextlib.contextmanager
def served(
    folder: str, settings: Any = None, drain_s: float = 30.0, tls: tuple[str, str] | None = None, **manager: Any
) -> Iterator[Running]:
    """The server of a folder on a free port, until the block ends. tls: files of a key and of its certificate."""
    from deepspeed_c.server.limits import ServerSettings
    from deepspeed_c.server.model import ServedModel

    model = ServedModel.load(folder, "tiny", engine_config(**manager))
    model.start()
    try:
        asyncio.run(_one_token(model))
        # One rank needs no group any more, and no test may leave one.
        dist.destroy_process_group()
        with listening(model, settings or ServerSettings(), drain_s, tls) as found:
            yield found
    finally:
        model.close()
        model.destroy()
        if dist.is_initialized():
            dist.destroy_process_group()


async def _one_token(model: Any) -> None:
    from deepspeed_c.serving import SamplingParams

    async for _ in model.answer([1], SamplingParams(n_new=1)):
        pass


@contextlib.contextmanager
def listening(
    model: Any, settings: Any, drain_s: float = 30.0, tls: tuple[str, str] | None = None
) -> Iterator[Running]:
    """A server of a model that has been started."""
    from deepspeed_c.server.listen import HttpServer, Listening, bind

    where = Listening("127.0.0.1", 0, drain_s, *(tls or ()))
    http = HttpServer(model, settings, where)
    begun, loops = threading.Event(), []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        begun.set()
        await http.serve([sock])

    with bind(where) as sock:
        thread = threading.Thread(target=lambda: asyncio.run(main()), name="server", daemon=True)
        thread.start()
        waits.set_within(begun)
        until(lambda: http.started)
        loop = loops[0]
        port = sock.getsockname()[1]
        try:
            scheme = "http" if tls is None else "https"
            yield Running(model, http.config.app, http, f"{scheme}://127.0.0.1:{port}", loop.call_soon_threadsafe)
        finally:
            http.should_exit = True
            waits.joined(thread)


def until(holds: Callable[[], bool], what: Callable[[], Any] = lambda: "", limit: float = LIMIT_SECONDS) -> None:
    """Waits until something holds, and fails with ``what`` at the limit."""
    end = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < end, f"not within {limit:g} s: {what()}"
        time.sleep(0.005)


TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{# <tool_call> #}"
)
"""Writes calls as Hermes' models do."""


def chat_folder(folder: Any, template: str = TEMPLATE, *special: str) -> str:
    """A model's folder whose tokenizer has a chat template. special: further special tokens."""
    from transformers import AutoTokenizer

    path = model_folder(folder, *special)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path
