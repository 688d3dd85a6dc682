"""The served model: samples of a prompt in an event loop, readers that go or are slow, an engine that ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from deepspeed_c.config.ragged import RaggedInferenceEngineConfig
from deepspeed_c.errors import ModelError, StateError
from deepspeed_c.inference.v2 import SchedulingError
from deepspeed_c.ops.sample import Rules
from deepspeed_c.serving import FinishReason, SamplingParams
from tests.deepspeed_c.serving.folders import model_folder

pytest.importorskip("transformers")
module = pytest.importorskip("deepspeed_c.server.model")

PROMPT = "def main(self, value): " * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(folder: str) -> Iterator[Any]:
    memory = {"mode": "allocate", "size": 40}
    config = RaggedInferenceEngineConfig(
        state_manager={"memory_config": memory, "max_context": 300}, deterministic=True
    )
    found = module.ServedModel.load(folder, "tiny", config)
    found.start()
    yield found
    found.close()
    found.destroy()
    dist.destroy_process_group()


async def read(stream: Any) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    async for sample, event in stream:
        found.setdefault(sample, []).append(event)
    return found


async def until(holds: Callable[[], bool], model: Any) -> None:
    for _ in range(3000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{model.counts} after 30 s")


def tokens_of(found: dict[int, list[Any]], sample: int) -> list[int]:
    return [event.token for event in found[sample]]


def test_samples_find_their_prompt_and_are_those_alone(model: Any) -> None:
    prompt = model.encode(PROMPT)
    params = SamplingParams(n_new=9, rules=Rules(temperature=2.0), seed=5)

    async def ask() -> tuple[dict[int, list[Any]], list[dict[int, list[Any]]]]:
        together = await read(model.answer(prompt, params, n=3))
        alone = [
            await read(model.answer(prompt, SamplingParams(n_new=9, rules=Rules(temperature=2.0), seed=5 + i)))
            for i in range(3)
        ]
        return together, alone

    together, alone = asyncio.run(ask())
    assert [tokens_of(together, i) for i in range(3)] == [tokens_of(each, 0) for each in alone]
    assert len({tuple(tokens_of(together, i)) for i in range(3)}) == 3
    assert [together[i][-1].reason for i in range(3)] == [FinishReason.LENGTH] * 3
    n_found = (len(prompt) - 1) // 16 * 16
    counts = model.counts
    assert (counts.prompt_tokens, counts.found_tokens, counts.new_tokens) == (6 * len(prompt), 5 * n_found, 54)


def test_a_reader_that_goes_ends_all_samples(model: Any) -> None:
    async def ask() -> None:
        stream = model.answer(model.encode(PROMPT), SamplingParams(n_new=200), n=3)
        async for sample, _ in stream:
            if sample == 2:
                break
        stream.cancel()
        stream.cancel()
        await until(lambda: model.loop.n_requests == 0, model)

    asyncio.run(ask())
    assert (model.loop.n_requests, model.counts.free_blocks) == (0, 40)


def test_a_reader_that_is_too_slow_is_cut_off(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_EVENTS", 5)

    async def ask() -> list[Any]:
        stream = model.answer([1, 2, 3], SamplingParams(n_new=200))
        await until(lambda: stream._is_ended, model)
        return (await read(stream))[0]

    events = asyncio.run(ask())
    assert len(events) == 6
    assert isinstance(events[-1].error, StateError) and "nobody reads" in str(events[-1].error)


def test_a_failed_step_is_the_last_event(model: Any) -> None:
    put = model.engine.put

    def faulty(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a planted fault")

    async def ask() -> Any:
        model.engine.put = faulty
        found = await read(model.answer([1, 2, 3], SamplingParams(n_new=5), n=2))
        model.engine.put = put
        return found, await read(model.answer([1, 2, 3], SamplingParams(n_new=5), n=2))

    failed, good = asyncio.run(ask())
    assert list(failed) == [0] and "planted" in str(failed[0][-1].error)
    assert [len(good[i]) for i in range(2)] == [5, 5]
    assert model.is_alive


def test_an_engine_that_ends_says_why(model: Any) -> None:
    def broken(*args: Any) -> Any:
        raise MemoryError("a planted end")

    async def ask() -> Any:
        model.loop._schedule = type("Broken", (), {"plan": broken, "add": lambda *_: 0, "end": lambda *_: None})()
        found = await read(model.answer([1, 2, 3], SamplingParams(n_new=5)))
        await until(lambda: not model.is_alive, model)
        with pytest.raises(StateError, match="a planted end"):
            model.answer([1, 2, 3], SamplingParams(n_new=5))
        return found

    found = asyncio.run(ask())
    assert isinstance(found[0][-1].error, MemoryError)
    assert model.why_dead == "MemoryError: a planted end"


def test_wrong_requests_are_refused_before_they_begin(model: Any) -> None:
    async def ask() -> None:
        with pytest.raises(ModelError):
            model.answer([], SamplingParams(n_new=5))
        with pytest.raises(SchedulingError):
            model.answer([1], SamplingParams(n_new=300))

    asyncio.run(ask())
    assert model.loop.n_requests == 0


def test_a_close_waits_for_what_runs(model: Any) -> None:
    async def ask() -> Any:
        stream = model.answer([1, 2, 3], SamplingParams(n_new=60))
        await asyncio.get_running_loop().run_in_executor(None, model.close, 30.0)
        return await read(stream)

    assert len(asyncio.run(ask())[0]) == 60
    assert not model.is_alive
