"""``deepspeed_c plan --inference``: weights against a cut model's bytes, the cache against the blocks of a generation or
the cache of a forward, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from deepspeed_c import kv
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.engine.cached_generation import generate_in_blocks
from deepspeed_c.inference.int8 import quantize_weights
from deepspeed_c.inject import cut_model
from deepspeed_c.kv.group import Group
from deepspeed_c.launcher.main import main
from deepspeed_c.plan.inference import plan_inference
from tests.deepspeed_c.inference.models import whisper
from tests.deepspeed_c.inject.families import VOCAB, feed, make
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


def generate_counted(model: Any, n_prompt: int, n_ways: int = 1, n_prompts: int = 3) -> tuple[int, dict]:
    """(bytes of the most blocks that a call of TOKENS tokens uses at a time, their number by window); (0, {}) where the
    model keeps its own cache."""
    caches, most, grow = [], {}, Group._grow

    class Seen(kv.cache.BlockCache):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            caches.append(self)

    def grow_counted(group: Group, *args: Any) -> Any:
        step = grow(group, *args)
        most[group.window] = max(most.get(group.window, 0), group.n_used)
        return step

    ids = torch.randint(3, VOCAB, (n_prompts, n_prompt), generator=torch.Generator().manual_seed(0))
    lengths = {"max_new_tokens": TOKENS - n_prompt, "eos_token_id": None, "pad_token_id": 0}
    how = {"input_ids": ids, "do_sample": n_ways > 1, "num_return_sequences": n_ways, **lengths}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv.cache, "BlockCache", Seen)
        patch.setattr(Group, "_grow", grow_counted)
        generate_in_blocks(model, model.generate, (), how)
    layers = caches[0].layers if caches else []
    if not layers or layers[-1].length < TOKENS - 1:
        return 0, {}
    return sum(most[each.group.window] * sum(blocks[0].nbytes for blocks in each.tensors) for each in layers), most


def cache_bytes(model: torch.nn.Module, n_samples: int) -> int:
    if not model.config.is_encoder_decoder and (found := generate_counted(model, TOKENS - 5, n_prompts=n_samples)[0]):
        return found
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


def config_of(kind: str) -> Any:
    import transformers

    sizes = {
        "hidden_size": 48, "intermediate_size": 70, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
        "head_dim": 8, "vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return {
        "llama": lambda: transformers.LlamaConfig(**sizes),
        "mistral": lambda: transformers.MistralConfig(**sizes, sliding_window=9),
        "gemma2": lambda: transformers.Gemma2Config(
            **sizes, sliding_window=9, layer_types=kinds, query_pre_attn_scalar=8
        ),
    }[kind]()


def build(kind: str, dtype: torch.dtype) -> Any:
    import transformers

    torch.manual_seed(7)
    return transformers.AutoModelForCausalLM.from_config(config_of(kind)).to(dtype).eval()


def generated(rank: int, world: int, kind: str, dtype: str, calls: list[tuple[int, int]]) -> list[tuple[int, dict]]:
    model = build(kind, DTYPES[dtype])
    if world > 1:
        cut_model(model, TensorParallel(), Collectives())
    return [generate_counted(model, *call) for call in calls]


@pytest.mark.parametrize(
    ("kind", "dtype", "world"),
    [("llama", "fp32", 1), ("llama", "bf16", 2), ("mistral", "bf16", 1), ("gemma2", "fp32", 1), ("gemma2", "bf16", 2)],
)
def test_blocks_are_those_of_a_generation(kind: str, dtype: str, world: int, tmp_path: Path) -> None:
    folder = save(build(kind, DTYPES[dtype]), tmp_path)
    calls = [(n_prompt, n_ways) for n_prompt in (1, 17, 33, TOKENS - 1) for n_ways in (1, 3)]
    asked = {"n_ranks": world, "n_samples": 3, "n_tokens": TOKENS, "dtype": dtype}
    plans = [plan_inference(folder, **asked, n_prompt=n, n_ways=ways) for n, ways in calls]
    for rank, found in enumerate(run_ranks(world, generated, kind, dtype, calls, preload=PRELOAD)):
        for plan, call, (nbytes, most) in zip(plans, calls, found, strict=True):
            planned = {group.window: group.n_blocks for group in plan.blocks}
            assert (planned, plan.ranks[rank].cache) == (most, nbytes), (call, rank)
            assert sum(group.n_layers for group in plan.blocks) == 3
    assert plan_inference(folder, **asked).blocks == plans[0].blocks, "without a prompt, a call ends as after one token"


def test_a_sliding_window_bounds_the_cache(tmp_path: Path) -> None:
    folder = save(build("mistral", torch.float32), tmp_path)
    for n_prompt, n_blocks in ((None, 2), (36, 3)):  # of 36 tokens the last 9 are seen, in blocks 1 and 2
        plan = plan_inference(folder, n_samples=2, n_tokens=TOKENS, dtype="fp32", n_prompt=n_prompt)
        assert [group.n_blocks for group in plan.blocks] == [2 * n_blocks], plan
        assert plan.ranks[0].cache == 2 * n_blocks * 16 * 3 * 2 * 2 * 8 * 4, plan
        assert ("--prompt N counts its blocks" in str(plan)) == (n_prompt is None), str(plan)


def test_samples_share_their_prompt(tmp_path: Path) -> None:
    folder = save(build("llama", torch.float32), tmp_path)
    plan = plan_inference(folder, n_samples=2, n_tokens=64, dtype="fp32", n_prompt=49, n_ways=8)
    # 48 tokens of each prompt in 3 blocks, and one block a sample.
    assert [group.n_blocks for group in plan.blocks] == [2 * (3 + 8)] and "16 sequence(s) of 64" in str(plan), str(plan)
    assert "22 blocks of 16 tokens in each of 3 layer(s) with full attention" in str(plan), str(plan)
    assert plan.ranks[0].workspace == 2 * 49 * (70 + 70 + 48 + 70) * 4, "prompts are read once"


@pytest.mark.parametrize(
    "family",
    [
        *("llama_tied_shared", "qwen3", "mixtral", "phi", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "cohere", "starcoder2"),
        *("codegen", "gptj", "bloom", "falcon", "mpt", "deepseek_v3", "llama4"),
    ],
)  # fmt: skip
def test_a_plan_knows_which_models_find_blocks(family: str, tmp_path: Path) -> None:
    model = make(family).eval()
    plan = plan_inference(save(model, tmp_path), n_samples=2, n_tokens=TOKENS, dtype="fp32", n_prompt=TOKENS - 5)
    nbytes, most = generate_counted(model, TOKENS - 5, n_prompts=2)
    assert {group.window: group.n_blocks for group in plan.blocks} == most, str(plan)
    assert not most or plan.ranks[0].cache == nbytes, str(plan)
    assert ("the model's own, not in blocks: " in str(plan)) == (not most), str(plan)


def test_recurrent_states_are_counted(tmp_path: Path) -> None:
    import transformers

    config = transformers.MambaConfig(hidden_size=48, num_hidden_layers=2, vocab_size=VOCAB, state_size=8)
    model = transformers.MambaForCausalLM(config).eval().bfloat16()
    with torch.no_grad():
        kept = model(input_ids=torch.ones(3, TOKENS, dtype=torch.long), use_cache=True).cache_params
    tensors = [leaf for layer in kept.layers for leaf in tree_leaves(list(vars(layer).values()))]
    plan = plan_inference(save(model, tmp_path), n_samples=3, n_tokens=TOKENS, dtype="bf16")
    assert plan.ranks[0].cache == sum(t.nbytes for t in tensors if torch.is_tensor(t)) > 0, str(plan)
    assert not plan.blocks and "a layer of the model keeps a LinearAttentionLayer" in str(plan), str(plan)


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
    assert printed["blocks"] == [{"window": None, "n_layers": 2, "n_blocks": 2}]
    words = ["--batch", "2", "--seq", "40", "--prompt", "33", "--ways", "4", "--json"]
    assert main(["plan", "--inference", folder, *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["n_prompt"], printed["n_ways"], printed["blocks"][0]["n_blocks"]) == (33, 4, 2 * (2 + 4))
    assert main(["plan", "--inference", folder]) == 0
    text = capsys.readouterr().out
    assert "weights" in text and "cache" in text and "workspace" in text and "1 sequence(s) of 64 tokens" in text, text


def test_typed_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save(make("llama"), tmp_path / "llama"))
    odd = str(save(make("llama"), tmp_path / "odd", model_type="no_such_model"))
    with_encoder = str(save(make("t5"), tmp_path / "t5"))
    for words, expected in (
        (["--inference", str(tmp_path / "nowhere")], "no such folder"),
        (["--inference", str(tmp_path)], "no config.json is there"),
        (["--inference", odd], "transformers cannot build it"),
        (["--inference", folder, "--tp", "0"], "0 is not a number of ranks"),
        (["--inference", folder, "--seq", "65"], "65 tokens are more than the 64 positions"),
        (["--inference", folder, "--batch", "0"], "'0' is no number > 0"),
        (["--inference", folder, "--ways", "0"], "'0' is no number > 0"),
        (["--inference", folder, "--prompt", "0"], "'0' is no number > 0"),
        (["--inference", folder, "--seq", "9", "--prompt", "9"], "a prompt of 9 tokens leaves no new one of the 9"),
        (["--inference", with_encoder, "--prompt", "9"], "the encoder reads the prompt"),
        (["--prompt", "9", "train.py"], "one call of generate for inference"),
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
