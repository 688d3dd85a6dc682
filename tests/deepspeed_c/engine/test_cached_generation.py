"""``generate`` with keys and values in blocks: the tokens and the caches of transformers with its own cache, and proof of
the attention that ran."""

from __future__ import annotations

import contextvars
import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import deepspeed_c
from deepspeed_c.kv.attention import attention_in_blocks
from deepspeed_c.ops import kv
from tests import training
from tests.deepspeed_c.inference.models import like_bart, require_same_tokens
from tests.deepspeed_c.inject import families
from tests.log_lines import LogLines

transformers = pytest.importorskip("transformers")

WINDOW = 8
SIZES = {
    "hidden_size": 48, "intermediate_size": 70, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": families.VOCAB, "max_position_embeddings": 64, "sliding_window": WINDOW,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BOTH = {**SIZES, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}
DROPS = {"dropout_rate": 0.0, "classifier_dropout_rate": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MORE: dict[str, Callable[[], Any]] = {
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**BOTH, attn_logit_softcapping=2.0)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**BOTH)),
    "t5gemma": lambda: transformers.T5GemmaForConditionalGeneration(
        transformers.T5GemmaConfig(encoder=dict(BOTH), decoder=dict(BOTH), vocab_size=families.VOCAB, **DROPS)
    ),
    "bart": lambda: like_bart("bart"),
}
WITH_OWN_CACHE = ("falcon", "mpt", "llama4", "t5")
# Prompts are longer than windows and than a block, and so are new tokens.
N_PROMPT, N_NEW = 20, 18
KEPT: dict[str, Any] = {
    "max_new_tokens": N_NEW, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True, "output_scores": True
}  # fmt: skip
HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
}


pytestmark = pytest.mark.usefixtures("process_group_of_the_engine")


def make(family: str) -> Any:
    torch.manual_seed(7)
    return (MORE[family]() if family in MORE else families.make(family)).eval()


def prompts(how: str = "greedy", *, padded: bool = True) -> dict[str, torch.Tensor]:
    """Three prompts; one where candidates are proposed, with repeated tokens. Two of them are padded on the left."""
    one = how == "lookup"
    ids = torch.randint(3, 12 if one else families.VOCAB, (3, N_PROMPT), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if one:
        return {"input_ids": ids[:1], "attention_mask": mask[:1]}
    if padded:
        for row, n in ((0, 9), (1, 1)):
            ids[row, :n] = mask[row, :n] = 0
    return {"input_ids": ids, "attention_mask": mask}


def run(model: Any, given: dict[str, Any], **how: Any) -> Any:
    torch.manual_seed(5)
    with torch.no_grad():
        return model.generate(**given, **{**KEPT, **how})


@contextmanager
def counted() -> Iterator[list[int]]:
    """Context with the number of calls of attention over blocks, so far."""
    n_calls, attention = [0], kv.attention

    def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
        n_calls[0] += 1
        return attention(*args, **kwargs)

    kv.attention = attend
    try:
        yield n_calls
    finally:
        kv.attention = attention


def engine_of(model: Any) -> Any:
    return deepspeed_c.init_inference(model, {"dtype": torch.float32})


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_in_training(stage: int) -> None:
    """Its tokens follow its weights, and a forward between two generations finds the model's own attention."""
    model, given = make("gemma3"), prompts()
    config = training.config(stage, "AdamW", rows=3, lr=1e-2)
    with deepspeed_c.initialize(model=model, config=config)[0] as engine, counted() as n_calls:
        for turn in range(1, 3):
            plain = make("gemma3")
            plain.load_state_dict({name: value.clone() for name, value in engine.module_state_dict().items()})
            engine.eval()
            require_same_tokens(run(model, given), run(plain, given))
            assert n_calls[0] == turn * 2 * N_NEW
            engine.train()
            training.step(engine, **given, labels=given["input_ids"])


@pytest.mark.parametrize("family", WITH_OWN_CACHE)
def test_a_model_that_does_not_find_blocks(family: str) -> None:
    """One line says why. A model without an engine has the same tokens, and leaves the same random numbers."""
    plain, model = make(family), make(family)
    own = model.config._attn_implementation
    with engine_of(model) as engine, LogLines() as log:
        for name in ("samples", "greedy"):
            wanted = run(plain, prompts(), **HOW[name], use_cache=True)
            state = torch.get_rng_state()
            with counted() as n_calls:
                found = run(engine, prompts(), **HOW[name], use_cache=True)
            assert torch.equal(torch.get_rng_state(), state)
            assert torch.equal(found.sequences, wanted.sequences)
            assert type(found.past_key_values) is type(wanted.past_key_values)
        assert not n_calls[0], "the second call does not try again"
        assert model.config._attn_implementation == own
    lines = [line for line in log.lines if "generates with its own cache: " in line]
    assert len(lines) == 1 and type(model).__name__ in lines[0]


def require_same_caches(mine: Any, other: Any) -> None:
    assert type(mine) is type(other)
    if isinstance(other, transformers.EncoderDecoderCache):
        require_same_caches(mine.self_attention_cache, other.self_attention_cache)
        require_same_caches(mine.cross_attention_cache, other.cross_attention_cache)
        return
    assert mine.get_seq_length() == other.get_seq_length() and len(mine.layers) == len(other.layers)
    for ours, theirs in zip(mine.layers, other.layers, strict=True):
        assert type(ours) is type(theirs)
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=0, atol=1e-5)
        torch.testing.assert_close(ours.values, theirs.values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "deepseek_v2", "deepseek_v3", "t5gemma", "bart"])
def test_the_cache_that_is_returned(family: str) -> None:
    """It is transformers' own, and generation goes on from it."""
    plain, model = make(family), make(family)
    with engine_of(model) as engine:
        for name in ("greedy", "beams", "lookup"):
            given = prompts(name, padded=False)
            wanted, found = run(plain, given, **HOW[name]), run(engine, given, **HOW[name])
            require_same_tokens(found, wanted)
            require_same_caches(found.past_key_values, wanted.past_key_values)
        if family in ("t5gemma", "bart"):
            return
        first = run(engine, prompts(padded=False), max_new_tokens=4)
        more = {"input_ids": first.sequences, "past_key_values": first.past_key_values}
        both = run(plain, prompts(padded=False)).sequences
        assert torch.equal(run(engine, more, max_new_tokens=N_NEW - 4).sequences, both)


@pytest.mark.parametrize("setting", ["past_key_values", "cache_implementation", "use_cache", "of the config"])
def test_a_users_choice_of_a_cache(setting: str) -> None:
    plain, model = make("llama"), make("llama")
    values: dict[str, Callable[[Any], Any]] = {
        "past_key_values": lambda model: transformers.DynamicCache(config=model.config),
        "cache_implementation": lambda _: "static",
        "use_cache": lambda _: False,
    }
    if setting == "of the config":
        plain.generation_config.use_cache = model.generation_config.use_cache = False
    with engine_of(model) as engine:
        given = prompts()
        hows = [{setting: values[setting](of)} if setting in values else {} for of in (plain, model)]
        with counted() as n_calls:
            wanted, found = run(plain, given, **hows[0]), run(engine, given, **hows[1])
        assert not n_calls[0]
        require_same_tokens(found, wanted)
        if setting == "past_key_values":
            assert found.past_key_values is hows[1][setting]


class Bad(transformers.LogitsProcessor):
    """It raises at its third call."""

    def __init__(self) -> None:
        self.n_calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.n_calls += 1
        if self.n_calls == 3:
            raise ArithmeticError("of the user")
        return scores


def test_an_exception_is_not_tried_again() -> None:
    plain, model, bad = make("llama"), make("llama"), Bad()
    own = model.config._attn_implementation
    with engine_of(model) as engine, LogLines() as log:
        with pytest.raises(ArithmeticError, match="of the user"):
            run(engine, prompts(), logits_processor=[bad])
        assert bad.n_calls == 3 and model.config._attn_implementation == own
        assert not any("own cache" in line for line in log.lines)
        with counted() as n_calls:
            found = run(engine, prompts())
        assert n_calls[0]
        require_same_tokens(found, run(plain, prompts()))


class Words(list[Any]):
    """A streamer: all values that it has got."""

    def put(self, value: torch.Tensor) -> None:
        self.extend(value.flatten().tolist())

    def end(self) -> None:
        self.append("end")


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "bloom"])
def test_a_streamer_gets_each_token_once(family: str) -> None:
    plain, model = make(family), make(family)
    with engine_of(model) as engine:
        for _ in range(2):
            words, wanted = Words(), Words()
            found = run(engine, prompts("lookup"), streamer=words, output_scores=False)
            run(plain, prompts("lookup"), streamer=wanted, output_scores=False)
            assert words == wanted == [*found.sequences[0].tolist(), "end"]


def test_settings_by_their_places() -> None:
    plain, model = make("llama"), make("llama")
    settings = transformers.GenerationConfig(max_new_tokens=40, eos_token_id=None, pad_token_id=0)
    ids = prompts(padded=False)["input_ids"]
    with engine_of(model) as engine, counted() as n_calls:
        found = engine.generate(ids, settings, None, past_key_values=None)
        assert n_calls[0] == 2 * 40 and torch.equal(found, plain.generate(ids, settings))


def test_a_prompt_that_the_model_makes_longer() -> None:
    """Virtual tokens in front of a prompt, more than the cache has room for."""
    peft = pytest.importorskip("peft")

    def tuned() -> Any:
        torch.manual_seed(3)
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=20)
        return peft.get_peft_model(make("llama"), config).eval()

    plain, model = tuned(), tuned()
    plain.prompt_encoder.load_state_dict(model.prompt_encoder.state_dict())
    with engine_of(model) as engine:
        for how in (HOW["greedy"], HOW["beams"], HOW["samples"]):
            found, wanted = (run(of, prompts(padded=False), **how) for of in (engine, plain))
            assert torch.equal(found.sequences, wanted.sequences)


def test_threads_with_one_model() -> None:
    """The model has its own attention back when the last of them has ended, and blocks until then."""
    model = make("gemma2")
    own = model.config._attn_implementation
    first, second = (attention_in_blocks(model) for _ in range(2))
    threads = [contextvars.copy_context() for _ in range(2)]
    for thread, context in zip(threads, (first, second)):
        thread.run(context.__enter__)
    during = model.config._attn_implementation
    assert during != own
    threads[0].run(first.__exit__, None, None, None)
    assert model.config._attn_implementation == during
    threads[1].run(second.__exit__, None, None, None)
    assert model.config._attn_implementation == own


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_forward_of_another_thread_is_the_models_own(family: str) -> None:
    plain, model = make(family), make(family)
    given, found = prompts(), []

    def forward() -> None:
        with torch.no_grad():
            found.append(model(**given, use_cache=False).logits)

    class Between(transformers.LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=forward)
            thread.start()
            thread.join(300)
            return scores

    with engine_of(model) as engine, counted() as n_calls:
        words = run(engine, given, **HOW["greedy"], logits_processor=transformers.LogitsProcessorList([Between()]))
        assert n_calls[0] > 0
    assert torch.equal(words.sequences, run(plain, given, **HOW["greedy"]).sequences)
    wanted = plain(**given, use_cache=False).logits
    is_token = given["attention_mask"].bool()
    assert found and all(torch.allclose(each[is_token], wanted[is_token], atol=1e-5) for each in found)


LENGTHS: dict[str, dict[str, Any]] = {
    "of transformers": {"max_new_tokens": None},
    "max_length": {"max_new_tokens": None, "max_length": 40},
    "generation_config": {
        "max_new_tokens": None,
        "generation_config": transformers.GenerationConfig(max_new_tokens=30),
    },
    "min_new_tokens": {"min_new_tokens": 8},
    "stop": {"eos_token_id": list(range(3, 60))},
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", ["llama", "t5gemma"])
def test_the_cache_has_room_for_any_length(family: str, length: str) -> None:
    plain, model = make(family), make(family)
    with engine_of(model) as engine:
        for given in (prompts(), {"input_ids": torch.full((2, 14), 5)}):
            for name in ("greedy", "beams"):
                how = {**KEPT, **HOW[name], **copy.deepcopy(LENGTHS[length])}
                if length == "generation_config":
                    del how["max_new_tokens"]
                with counted() as n_calls, torch.no_grad():
                    found = engine.generate(**given, **copy.deepcopy(how))
                    wanted = plain.generate(**given, **how)
                assert n_calls[0]
                require_same_tokens(found, wanted)


@pytest.mark.parametrize("own", ["eager", "sdpa"])
def test_the_models_own_attention(own: str) -> None:
    """The implementation that a model has without blocks is its own again, in all its configurations."""
    plain, model = make("gemma3"), make("gemma3")
    for each in (plain, model):
        each.set_attn_implementation(own)
    with engine_of(model) as engine, counted() as n_calls:
        found = run(engine, prompts())
        assert n_calls[0]
        assert {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")} == {own}
        require_same_tokens(found, run(plain, prompts()))
        n_before = n_calls[0]
        with torch.no_grad():
            torch.testing.assert_close(model(**prompts()).logits, plain(**prompts()).logits, rtol=0, atol=1e-5)
        assert n_calls[0] == n_before


@pytest.mark.parametrize(
    "how", [HOW["beams"], {"do_sample": True, "num_return_sequences": 4}], ids=["beams", "samples"]
)
def test_samples_and_beams_read_their_prompt_once(how: dict[str, Any]) -> None:
    plain, model = make("llama"), make("llama")
    shapes, n_ways = [], how.get("num_beams", how.get("num_return_sequences"))
    model.model.embed_tokens.register_forward_hook(lambda _, inputs, __: shapes.append(tuple(inputs[0].shape)))
    with engine_of(model) as engine:
        found = run(engine, prompts(), **how)
    assert torch.equal(found.sequences, run(plain, prompts(), **how).sequences)
    assert shapes[:3] == [(3, N_PROMPT - 1), (3 * n_ways, 1), (3 * n_ways, 1)], shapes[:3]


def both_ways(model: Any) -> Any:
    model.config.is_causal = False
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model


def compiled(model: Any) -> Any:
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("change", [both_ways, compiled])
def test_models_that_keep_their_own_cache_for_another_reason(change: Any) -> None:
    """A decoder that attends to later tokens, and one whose forward is a graph."""
    plain, model = change(make("llama")), change(make("llama"))
    with engine_of(model) as engine, counted() as n_calls:
        found = run(engine, prompts(padded=False), **HOW["greedy"])
        wanted = run(plain, prompts(padded=False), **HOW["greedy"])
    assert n_calls == [0] and torch.equal(found.sequences, wanted.sequences)
