"""``deepspeed_c plan --inference``: weights against a cut model's bytes, the cache against a forward's, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.inference.int8 import quantize_weights
from deepspeed_c.inject import cut_model
from deepspeed_c.launcher.main import main
from deepspeed_c.plan.inference import plan_inference
from tests.deepspeed_c.inference.models import whisper
from tests.deepspeed_c.inject.families import feed, make
from tests.ranks import run_ranks

PRELOAD = "tests.deepspeed_c.inject.preload"
TOKENS = 37
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def save(model: torch.nn.Module, folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    model.config.save_pretrained(folder)
    read = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**read, "architectures": [type(model).__name__], **changes}))
    return folder


def cache_bytes(model: torch.nn.Module, n_samples: int) -> int:
    ids = torch.ones(n_samples, TOKENS, dtype=torch.long)
    inputs = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True, **inputs).past_key_values
    caches = [cache.self_attention_cache, cache.cross_attention_cache] if inputs else [cache]
    return sum(layer.keys.nbytes + layer.values.nbytes for each in caches for layer in each.layers)


def held(rank: int, world: int, family: str, dtype: str) -> tuple[int, int, int]:
    model = make(family).eval()
    model = model if dtype == "int8" else model.to(DTYPES[dtype])
    if world > 1:
        cut_model(model, TensorParallel(), Collectives())
    if dtype == "int8":
        model.bfloat16()
        report = quantize_weights(model)
        return report.bytes_after, cache_bytes(model, 3), 0
    return sum(p.nbytes for p in model.parameters()), cache_bytes(model, 3), sum(b.nbytes for b in model.buffers())


@pytest.mark.parametrize(
    ("family", "world", "dtype"),
    [
        *(("llama", 1, "fp32"), ("llama", 2, "bf16"), ("llama", 3, "int8"), ("llama_tied_shared", 2, "fp32")),
        *(
            *(("gpt2", 2, "int8"), ("gpt2", 1, "bf16"), ("bloom", 2, "fp32"), ("gpt_bigcode", 2, "bf16")),
            ("t5", 2, "fp32"),
        ),
    ],
)
def test_figures_are_those_of_a_cut_model(family: str, world: int, dtype: str, tmp_path: Path) -> None:
    folder = save(make(family), tmp_path)
    plan = plan_inference(folder, n_ranks=world, n_samples=3, n_tokens=TOKENS, dtype=dtype)
    for rank, (weights, cache, buffers) in enumerate(run_ranks(world, held, family, dtype, preload=PRELOAD)):
        planned = plan.ranks[rank]
        assert (planned.weights, planned.cache) == (weights, cache), (planned, weights, cache)
        assert dtype == "int8" or planned.buffers <= max(buffers, 1024), (planned, buffers)
        assert planned.total == planned.weights + planned.buffers + planned.cache + planned.workspace


def test_a_sliding_window_bounds_the_cache(tmp_path: Path) -> None:
    import transformers

    config = transformers.MistralConfig(
        hidden_size=48, intermediate_size=70, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=101, max_position_embeddings=64, sliding_window=9, pad_token_id=0,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).eval()
    plan = plan_inference(save(model, tmp_path), n_samples=2, n_tokens=TOKENS, dtype="fp32")
    found, expected = plan.ranks[0].cache, cache_bytes(model, 2)
    assert found == expected < 2 * 3 * 2 * 8 * TOKENS * 2 * 4, (found, expected)


def test_workspace_is_the_widest_block_or_the_logits(tmp_path: Path) -> None:
    model = make("llama")  # hidden 48, MLP 70, 101 words
    folder = save(model, tmp_path)
    found = plan_inference(folder, n_samples=5, n_tokens=TOKENS, dtype="bf16").ranks[0].workspace
    assert found == 5 * TOKENS * (70 + 70 + 48 + 70) * 2, found
    halves = plan_inference(folder, n_ranks=2, n_samples=5, n_tokens=TOKENS, dtype="bf16").ranks
    assert [rank.workspace for rank in halves] == [5 * TOKENS * (35 + 35 + 48 + 48) * 2] * 2, halves
    found = plan_inference(folder, n_samples=5, n_tokens=1, dtype="bf16").ranks[0].workspace
    assert found == 5 * max(258 * 2, 101 * 6), found


def test_the_command_prints_a_line_for_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save(make("llama"), tmp_path))
    assert main(["plan", "--inference", folder, "--tp", "2", "--batch", "2", "--seq", "9", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in printed["ranks"]] == [0, 1] and printed["dtype"] == "fp32"
    assert (printed["n_samples"], printed["n_tokens"]) == (2, 9)
    assert printed["n_params"] == sum(p.numel() for p in make("llama").parameters())
    assert main(["plan", "--inference", folder]) == 0
    text = capsys.readouterr().out
    assert "weights" in text and "cache" in text and "workspace" in text and "1 sequence(s) of 64 tokens" in text, text


def test_typed_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save(make("llama"), tmp_path / "llama"))
    odd = str(save(make("llama"), tmp_path / "odd", model_type="no_such_model"))
    for words, expected in (
        (["--inference", str(tmp_path / "nowhere")], "no such folder"),
        (["--inference", str(tmp_path)], "no config.json is there"),
        (["--inference", odd], "transformers cannot build it"),
        (["--inference", folder, "--tp", "0"], "0 is not a number of ranks"),
        (["--inference", folder, "--seq", "65"], "65 tokens are more than the 64 positions"),
        (["--inference", folder, "--batch", "0"], "'0' is no number > 0"),
        (["--inference", folder, "--ranks", "2"], "does not go with --ranks"),
        (["--inference", folder, "train.py"], "does not go with train.py"),
        (["--dtype", "int8", "train.py"], "dtype of weights for inference"),
    ):
        assert main(["plan", *words]) == 2, words
        said = capsys.readouterr().err
        assert expected in said and "Fix: " in said, said


def held_by_towers(rank: int, world: int) -> list[tuple[int, int]]:
    """(bytes of weights, bytes of the cache) of Whisper after 24 tokens of 3 sounds, and of CLIP."""
    found = []
    for model in (whisper(), make("clip").eval()):
        if world > 1:
            cut_model(model, TensorParallel(), Collectives())
        with torch.no_grad():
            if model.config.is_encoder_decoder:
                ids = torch.ones(3, 24, dtype=torch.long)
                cache = model(
                    input_features=torch.zeros(3, 8, 40), decoder_input_ids=ids, use_cache=True
                ).past_key_values
                layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
            else:
                model(**feed("clip"))
                layers = []
        n_cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        found.append((sum(p.nbytes for p in model.parameters()), n_cache))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_models_that_hear_or_see(tmp_path: Path, world: int) -> None:
    folders = [save(whisper(), tmp_path / "whisper"), save(make("clip"), tmp_path / "clip")]
    plans = [plan_inference(folder, n_ranks=world, n_samples=3, dtype="fp32") for folder in folders]
    for rank, of_rank in enumerate(run_ranks(world, held_by_towers, preload=PRELOAD)):
        for plan, (weights, cache) in zip(plans, of_rank, strict=True):
            planned = plan.ranks[rank]
            assert (planned.weights, planned.cache) == (weights, cache), f"{planned}, held: {weights}, {cache}"
    heard, seen = plans
    assert heard.n_tokens == 24 and "the encoder hears 40 frames" in str(heard), str(heard)
    assert "the model keeps no cache" in str(seen) and "a picture of 8 x 8 pixels" in str(seen), str(seen)
