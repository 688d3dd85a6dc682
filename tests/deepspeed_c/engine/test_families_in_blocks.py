"""Families of models whose keys and values lie in blocks: in each way to generate, the tokens of transformers with its
own cache. Weights are large, so that a wrong key changes the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import deepspeed_c
from deepspeed_c import kv
from deepspeed_c.kv.group import blocks_of
from tests.cells import cells
from tests.deepspeed_c.inference.models import like_bart, whisper
from tests.deepspeed_c.inject import families
from tests.log_lines import LogLines
from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers")

WINDOW = 5
SIZES = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "vocab_size": families.VOCAB, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WIDE = {**SIZES, "head_dim": 8}
BOTH = {
    **WIDE,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 8,
}
DROPS = {"dropout_rate": 0.0, "classifier_dropout_rate": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_embd": 48, "n_head": 6, "n_layer": 2, "n_positions": 64, "vocab_size": families.VOCAB}
DECODERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**WIDE),
    "gemma2": lambda: transformers.Gemma2Config(**BOTH, attn_logit_softcapping=2.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(**BOTH),
    "phi3": lambda: transformers.Phi3Config(**SIZES, sliding_window=WINDOW),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.5),
    "gpt2": lambda: transformers.GPT2Config(**GPT2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    "opt": lambda: transformers.OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=48, dropout=0.0),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "cohere": lambda: transformers.CohereConfig(**SIZES),
    "stablelm": lambda: transformers.StableLmConfig(**SIZES),
    "gpt_oss": lambda: transformers.GptOssConfig(**WIDE, sliding_window=WINDOW, num_local_experts=3, num_experts_per_tok=2),
}  # fmt: skip
WITH_ENCODER: dict[str, Callable[[], Any]] = {
    "t5gemma": lambda: transformers.T5GemmaForConditionalGeneration(
        transformers.T5GemmaConfig(encoder=dict(BOTH), decoder=dict(BOTH), vocab_size=families.VOCAB, **DROPS)
    ),
    "bart": lambda: like_bart("bart"),
    "marian": lambda: like_bart("marian"),
    "t5": lambda: families.make("t5"),
    "whisper": whisper,
}
WRITTEN_OUT = ("gptj", "codegen", "falcon_7b", "falcon_40b", "bloom")
MORE = (
    "deepseek_v2",
    "deepseek_v3",
    "llama_tied_shared",
    "phi",
    "gpt_bigcode",
    "gpt_bigcode_heads",
    "starcoder2",
    "granite",
    "apertus",
    *WRITTEN_OUT,
)
OWN_CACHE = {
    "falcon": "its attention is part of its layers, and adds a bias of positions",
    "t5": "T5Attention adds a bias of positions",
    "whisper": None,  # its prompts are sounds
}
FAMILIES = (*DECODERS, *MORE, *WITH_ENCODER, "falcon")
N_PROMPT, N_NEW = 25, 10
KEPT: dict[str, Any] = {
    "max_new_tokens": N_NEW, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True, "output_scores": True
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "padded": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
    "beams of samples": {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
    "assistant": {"do_sample": False},
}
# Of the largest score, that scores of 16 bits may be apart by: ours are rounded once, others at each product.
N_ULPS = 4


pytestmark = pytest.mark.usefixtures("process_group_of_the_engine")


def make(family: str, dtype: torch.dtype = torch.float32, seed: int = 7) -> Any:
    torch.manual_seed(seed)
    if family in DECODERS:
        model = transformers.AutoModelForCausalLM.from_config(DECODERS[family]())
    else:
        model = WITH_ENCODER[family]() if family in WITH_ENCODER else families.make(family)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1 and family != "t5":
                weight *= 6
    return model.to(dtype).eval()


def prompts(family: str, way: str) -> dict[str, torch.Tensor]:
    """Three prompts longer than the windows, or one with repeated tokens where something proposes tokens."""
    random = torch.Generator().manual_seed(0)
    if family == "whisper":
        return {"input_features": torch.randn(2, 8, 40, generator=random)}
    ids = torch.randint(3, families.VOCAB, (3, N_PROMPT), generator=random)
    mask = torch.ones_like(ids)
    if way in ("lookup", "assistant"):
        ids = ids[:1, :5].repeat(1, N_PROMPT // 5)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if way != "greedy":
        for row, n in ((0, 17), (1, 3)):  # encoders are padded on the right
            places = slice(-n, None) if family in WITH_ENCODER else slice(n)
            ids[row, places] = mask[row, places] = 0
    return {"input_ids": ids, "attention_mask": mask}


def run(model: Any, given: dict[str, Any], how: dict[str, Any]) -> Any:
    torch.manual_seed(5)
    with torch.no_grad():
        return model.generate(**given, **KEPT, **how)


@contextmanager
def kept_in_blocks() -> Iterator[list[Any]]:
    """Context with the caches in blocks whose calls have ended with them. A call that began anew with another cache has
    none."""
    found: list[Any] = []
    dense = kv.cache.dense

    def made_dense(cache: Any) -> Any:
        found.append(cache)
        return dense(cache)

    with mock.patch.object(kv.cache, "dense", made_dense):
        yield found


def require_same(found: Any, wanted: Any, atol: float) -> None:
    """Scores of rows with the same tokens so far differ by at most ``atol``, and so does a token in its score. Beams
    are compared by their sums of scores, as equal ones may change places."""
    assert found.sequences.shape == wanted.sequences.shape
    if getattr(wanted, "sequences_scores", None) is not None:
        torch.testing.assert_close(found.sequences_scores, wanted.sequences_scores, rtol=0, atol=atol)
        return
    is_same = found.sequences == wanted.sequences
    n_before = wanted.sequences.shape[1] - len(wanted.scores)
    for step, (mine, other) in enumerate(zip(found.scores, wanted.scores, strict=True)):
        rows = is_same[:, : n_before + step].all(1)
        torch.testing.assert_close(mine[rows], other[rows], rtol=0, atol=atol)


def require_prompts_once(cache: kv.cache.CrossCache, ids: torch.Tensor) -> None:
    """The blocks of an encoder's tokens are as many as for one row of each prompt."""
    n_blocks = len(ids) * blocks_of(ids.shape[1])
    assert [layer.blocks[0].shape[0] for layer in cache.layers] == [n_blocks] * 2


def tokens_body(rank: int, world: int, family: str, ways: list[str], dtype: torch.dtype) -> None:
    plain, model = make(family, dtype), make(family, dtype)
    config = {"dtype": dtype, "tensor_parallel": {"tp_size": world}}
    with deepspeed_c.init_inference(model, config) as engine, LogLines() as log:
        for way in ways:
            how, given = dict(WAYS[way]), prompts(family, way)
            if "input_features" in given:
                given["input_features"] = given["input_features"].to(dtype)
            if way == "assistant":
                how["assistant_model"] = make(family if family in WITH_ENCODER else "llama", dtype, seed=8)
            wanted = run(plain, given, how)
            with kept_in_blocks() as caches:
                found = run(engine, given, how)
            assert len(caches) == (family not in OWN_CACHE), (family, way)
            if caches and family in WITH_ENCODER:
                require_prompts_once(caches[0].cross_attention_cache, given["input_ids"])
            scale = max(float(scores[scores.isfinite()].abs().max()) for scores in wanted.scores)
            require_same(found, wanted, 1e-4 if dtype == torch.float32 else N_ULPS * scale * torch.finfo(dtype).eps)
            if dtype == torch.float32 and "num_beams" not in how:
                assert torch.equal(found.sequences, wanted.sequences), (family, way, found.sequences, wanted.sequences)
    why = [line.split("own cache: ")[1] for line in log.lines if "generates with its own cache: " in line]
    assert why == ([OWN_CACHE[family]] if rank == 0 and OWN_CACHE.get(family) else []), why


def ways_of(family: str) -> list[str]:
    return ["greedy", "samples"] if family in OWN_CACHE else list(WAYS)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens(family: str) -> None:
    tokens_body(0, 1, family, ways_of(family), torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_on_two_ranks(family: str) -> None:
    run_ranks(2, tokens_body, family, ways_of(family), torch.float32)


@pytest.mark.parametrize("family, dtype", cells(FAMILIES, (torch.bfloat16, torch.float16), at_once=1))
def test_tokens_of_16_bits(family: str, dtype: torch.dtype) -> None:
    tokens_body(0, 1, family, ["padded", "beams"], dtype)
