"""``mii.pipeline`` and ``mii.async_pipeline``: answers of transformers, fields of a request, ranks, errors."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_c import mii
from deepspeed_c.errors import ConfigError, ModelError, StateError
from deepspeed_c.inference.v2 import SchedulingError
from deepspeed_c.mii import MIIPipeline, ModelConfig, UnknownArgument
from deepspeed_c.mii.tokenizers import HFTokenizer, MIITokenizerWrapper
from tests import waits
from tests.deepspeed_c.serving.folders import END, byte_tokenizer, model_folder
from tests.ranks import RanksFailed, run_ranks

transformers = pytest.importorskip("transformers")

PROMPTS = ["def main(", "größer – ist", "x"]
SMALL = {"state_manager": {"memory_config": {"mode": "allocate", "size": 40}, "max_context": 200}}


pytestmark = pytest.mark.usefixtures("process_group_of_the_engine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model_folder(tmp_path_factory.mktemp("model"))


def pipeline_of(folder: str, **fields: Any) -> MIIPipeline:
    return mii.pipeline(folder, inference_engine_config=SMALL, **fields)


def tokens_by_transformers(folder: str, prompt: str, n_new: int) -> list[int]:
    tokenizer = byte_tokenizer()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([tokenizer.encode(prompt)])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_new, do_sample=False)
    return found[0, ids.shape[1] :].tolist()


def by_transformers(folder: str, prompt: str, n_new: int) -> str:
    return byte_tokenizer().decode(tokens_by_transformers(folder, prompt, n_new), skip_special_tokens=True)


def test_the_programs_of_the_readme(folder: str) -> None:
    pipe = pipeline_of(folder)
    response = pipe(PROMPTS, max_new_tokens=12, do_sample=False)
    assert [str(each) for each in response] == [by_transformers(folder, prompt, 12) for prompt in PROMPTS]
    assert [each.prompt_length for each in response] == [len(byte_tokenizer().encode(each)) for each in PROMPTS]
    assert [each.generated_length for each in response] == [12] * 3
    assert [each.finish_reason for each in response] == ["length"] * 3
    one = pipe(PROMPTS[1], max_new_tokens=12, do_sample=False)
    assert [each.generated_text for each in one] == [response[1].generated_text]
    assert pipe([]) == []
    assert pipe.is_rank_0
    pipe.flush([0, 7])
    pipe.destroy()
    pipe.destroy()
    with pytest.raises(StateError, match="destroyed"):
        pipe("x")


def test_the_fields_of_a_request(folder: str) -> None:
    pipe, tokenizer = pipeline_of(folder), byte_tokenizer()
    prompt = PROMPTS[1]
    (plain,) = pipe(prompt, max_new_tokens=30, do_sample=False)
    (full,) = pipe(prompt, max_new_tokens=30, do_sample=False, return_full_text=True)
    assert str(full) == prompt + str(plain)
    n = plain.prompt_length
    (cut,) = pipe(prompt, max_length=n + 4, max_new_tokens=30, do_sample=False)
    assert (cut.generated_length, cut.finish_reason) == (4, "length")
    drawn = [pipe([prompt] * 3, max_new_tokens=8, seed=3) for _ in range(2)]
    assert list(map(str, drawn[0])) == list(map(str, drawn[1]))
    assert len(set(map(str, drawn[0]))) == 3, drawn
    assert str(pipe(prompt, max_new_tokens=8, seed=4)[0]) == str(drawn[0][1])
    (narrow,) = pipe(prompt, max_new_tokens=30, top_k=1)
    assert str(narrow) == str(plain)
    stop = str(plain)[3:5]
    (stopped,) = pipe(prompt, max_new_tokens=30, do_sample=False, stop=stop)
    assert (str(stopped), stopped.finish_reason) == (str(plain)[: str(plain).index(stop)], "stop")
    assert len(tokenizer.encode(str(stopped))) < 30


def test_the_end_of_a_text(folder: str) -> None:
    """The tokenizer's end and those of generation_config end a text, unless they are ignored."""
    pipe = pipeline_of(folder)
    ends = tokens_by_transformers(folder, PROMPTS[0], 1)
    pipe.inference_engine.model().generation_config.eos_token_id = ends
    again = MIIPipeline(type(pipe._generator)(pipe.inference_engine, pipe.tokenizer, pipe.model_config))
    (ended,) = again(PROMPTS[0], max_new_tokens=9, do_sample=False)
    assert (str(ended), ended.generated_length, ended.finish_reason) == ("", 1, "stop")
    (ignored,) = again(PROMPTS[0], max_new_tokens=9, do_sample=False, ignore_eos=True)
    assert (ignored.generated_length, ignored.finish_reason) == (9, "length")
    (least,) = again(PROMPTS[0], max_new_tokens=9, do_sample=False, min_new_tokens=9)
    assert least.generated_length == 9
    assert END not in str(least)


def test_the_length_of_a_request_that_does_not_say(folder: str) -> None:
    pipe = pipeline_of(folder, max_length=20)
    assert (pipe.max_length, pipe(PROMPTS[0], ignore_eos=True)[0].generated_length) == (20, 17)
    assert pipeline_of(folder).max_length == 200


@pytest.mark.parametrize(
    ("prompt", "fields", "error", "says"),
    [
        ("", {}, ModelError, "prompt is ''"),
        (3, {}, ModelError, "prompt is 3"),
        ("x", {"max_length": 1}, ConfigError, "max_length"),
        ("x", {"temperature": float("nan")}, ConfigError, "temperature"),
        ("x", {"top_p": 0.0}, ConfigError, "top_p"),
        ("x", {"maxlength": 3}, UnknownArgument, "max_length"),
        ("x", {"max_length": 201}, SchedulingError, "201 tokens, and 200"),
    ],
)
def test_a_wrong_request_changes_nothing(
    folder: str, prompt: Any, fields: dict[str, Any], error: type[Exception], says: str
) -> None:
    pipe = pipeline_of(folder)
    good = str(pipe("x", max_new_tokens=5, do_sample=False)[0])
    with pytest.raises(error, match=says):
        pipe(["x", prompt], **fields)
    assert str(pipe("x", max_new_tokens=5, do_sample=False)[0]) == good


def test_a_failed_step_is_the_error_of_its_call(folder: str) -> None:
    pipe = pipeline_of(folder)
    good = [str(each) for each in pipe(PROMPTS, max_new_tokens=5, do_sample=False)]
    put, n_puts = pipe.inference_engine.put, 0

    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal n_puts
        n_puts += 1
        if n_puts == 3:
            raise RuntimeError("a planted fault")
        return put(*args, **kwargs)

    pipe.inference_engine.put = faulty
    with pytest.raises(RuntimeError, match="planted"):
        pipe(PROMPTS, max_new_tokens=5, do_sample=False)
    assert [str(each) for each in pipe(PROMPTS, max_new_tokens=5, do_sample=False)] == good


class _Letters(MIITokenizerWrapper):
    """A tokenizer of a user: a token is a letter."""

    @property
    def vocab_size(self) -> int:
        return 26

    @property
    def eos_token_id(self) -> int:
        return 25

    def encode(self, input: str) -> torch.Tensor:
        return torch.tensor([ord(each) - ord("a") for each in input])

    def decode(self, tokens: Any) -> str:
        return "".join(chr(ord("a") + int(each)) for each in tokens)


def test_a_tokenizer_of_a_user(folder: str) -> None:
    """Words that it does not have are not chosen, though the model has them."""
    pipe = pipeline_of(folder, tokenizer=_Letters(None))
    text = str(pipe("hello", max_new_tokens=40, ignore_eos=True)[0])
    assert len(text) == 40
    assert set(text) <= set(map(chr, range(ord("a"), ord("z") + 1))), text
    assert str(pipeline_of(folder, tokenizer=HFTokenizer(byte_tokenizer()))("x", max_new_tokens=1)[0]) != ""


def _answers(rank: int, world: int, folder: str, all_rank_output: bool) -> Any:
    pipe = mii.pipeline(folder, inference_engine_config=SMALL, all_rank_output=all_rank_output)
    refused = ""
    try:
        pipe(["x", ""])
    except ModelError as error:
        refused = str(error)
    found = [pipe(PROMPTS, max_new_tokens=12, do_sample=False), pipe("größer" * 9, max_new_tokens=9, do_sample=False)]
    drawn = pipe(PROMPTS, max_new_tokens=12)
    pipe.destroy()
    return [[str(each) for each in call] for call in found], len(drawn), refused, pipe.is_rank_0


@pytest.mark.parametrize("all_rank_output", [False, True])
def test_ranks_answer_as_one(folder: str, all_rank_output: bool) -> None:
    pipe = pipeline_of(folder)
    expected = [[str(each) for each in pipe(PROMPTS, max_new_tokens=12, do_sample=False)]]
    expected.append([str(each) for each in pipe("größer" * 9, max_new_tokens=9, do_sample=False)])
    dist.destroy_process_group()
    first, second = run_ranks(2, _answers, folder, all_rank_output)
    assert first[0] == expected
    assert second[0] == (expected if all_rank_output else [[], []])
    assert (first[1], second[1]) == (3, 3 if all_rank_output else 0)
    assert "prompts[1]" in first[2] and first[2] == second[2]
    assert (first[3], second[3]) == (True, False)


def _lost(rank: int, world: int, folder: str) -> tuple[str, float]:
    pipe = mii.pipeline(folder, inference_engine_config=SMALL)
    if rank == world - 1:
        put, n_puts = pipe.inference_engine.put, 0

        def last(*args: Any, **kwargs: Any) -> Any:
            nonlocal n_puts
            n_puts += 1
            if n_puts == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return put(*args, **kwargs)

        pipe.inference_engine.put = last
    begin = time.monotonic()
    try:
        pipe(PROMPTS, max_new_tokens=12)
    except Exception as error:  # noqa: BLE001  (any error is looked at)
        return f"{type(error).__name__} {error}", time.monotonic() - begin
    return "", 0.0


def test_a_rank_that_is_lost_is_named(folder: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, _lost, folder, fresh=True, grace=100.0)
    first, last = caught.value.outcomes
    assert "killed by SIGKILL" in last.text
    assert first.kind == "returned", first
    text, seconds = first.value
    assert text.startswith("CommError") and "rank 1" in text and seconds < 60, (text, seconds)


def test_an_async_pipeline_gives_each_thread_its_own(folder: str) -> None:
    pipe = mii.async_pipeline(ModelConfig(model_name_or_path=folder, inference_engine_config=SMALL))
    pipe.start()
    expected = {prompt: by_transformers(folder, prompt, 15) for prompt in PROMPTS}
    found: dict[str, tuple[str, bool]] = {}

    def ask(prompt: str) -> None:
        fields = {"max_new_tokens": 15, "do_sample": False, "stream": prompt != "x"}
        uid, pieces = pipe.put_request(prompt, fields), []
        while not pieces or pieces[-1].finish_reason == "none":
            got, response = pipe.get_response()
            assert got == uid
            pieces.append(response)
        pipe.flush_uid(uid)
        found[prompt] = "".join(map(str, pieces)), len(pieces) > 1

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        waits.joined(thread)
    assert found == {prompt: (text, prompt != "x") for prompt, text in expected.items()}
    with pytest.raises(StateError, match="sent no prompt"):
        pipe.get_response()
    pipe.shutdown()
    assert pipe.is_shutdown()
    with pytest.raises(StateError, match="no requests any more"):
        pipe.put_request("x", {})
