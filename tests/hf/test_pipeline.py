"""Models of transformers as pipelines: they train as the same model does in one plain process, each rank reads its
stages only, and the saved folder is a whole model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hf.stack import on_ranks
from tests.training import config, descend

VOCAB, WIDTH, STEPS, N_BATCHES, LAYERS = 61, 32, 2, 3, 3
LLAMA = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
MOE = {**LLAMA, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
HEADS = {**LLAMA, "head_dim": 8}
EXPERTS = {**HEADS, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
           **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
           **dict.fromkeys(("n_group", "topk_group"), 1),
           **dict.fromkeys(("router_jitter_noise", "input_jitter_noise"), 0.0)}  # fmt: skip
MULTIPLIERS = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0, "attention_multiplier": 0.2,
}  # fmt: skip
NO_DROPOUT = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "llama tied": ("llama", {**LLAMA, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {**LLAMA, **WINDOWS}),
    "qwen2 tied": ("qwen2", {**LLAMA, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", {**GPT, **NO_DROPOUT}),
    "opt": ("opt", {**LLAMA, "ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0, "activation_function": "relu"}),
    "mistral": ("mistral", {**LLAMA, "sliding_window": 3}),
    "qwen3": ("qwen3", {**LLAMA, "head_dim": 8}),
    "gemma": ("gemma", {**LLAMA, "head_dim": 8}),
    "gemma2": ("gemma2", {**LLAMA, "head_dim": 8, "sliding_window": 3}),
    "olmo": ("olmo", LLAMA),
    "stablelm": ("stablelm", LLAMA),
    "starcoder2": ("starcoder2", LLAMA),
    "phi3": ("phi3", LLAMA),
    "phi": ("phi", LLAMA),
    "mixtral": ("mixtral", {**LLAMA, "num_local_experts": 4}),
    "qwen2_moe": ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("qwen3_moe", {**MOE, "head_dim": 8}),
    "gpt_oss": ("gpt_oss", {**LLAMA, "head_dim": 8, "num_local_experts": 4, "sliding_window": 3}),
    "deepseek_v3": ("deepseek_v3", {**LLAMA, "num_key_value_heads": 4, "moe_intermediate_size": 24,
     "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "kv_lora_rank": 8,
     "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1}),
    "gpt_bigcode": ("gpt_bigcode", {**GPT, **NO_DROPOUT}),
    "gptj": ("gptj", {**GPT, "rotary_dim": 4}),
    "codegen": ("codegen", {**GPT, "rotary_dim": 4}),
    "falcon": ("falcon", {**LLAMA, "alibi": False}),
    "falcon alibi": ("falcon", {**LLAMA, "alibi": True}),
    "bloom": ("bloom", {"hidden_size": WIDTH, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCAB}),
    "mpt": ("mpt", {"d_model": WIDTH, "n_layers": LAYERS, "n_heads": 4, "vocab_size": VOCAB, "max_seq_len": 64}),
    "gpt_neox": ("gpt_neox", LLAMA),
    "granite": ("granite", {**LLAMA, **MULTIPLIERS}),
    "granitemoe": ("granitemoe", {**EXPERTS, **MULTIPLIERS}),
    "granitemoeshared": ("granitemoeshared", {**EXPERTS, **MULTIPLIERS}),
    "glm": ("glm", {**HEADS, "partial_rotary_factor": 0.5, "attention_bias": True}),
    "glm4": ("glm4", {**HEADS, "partial_rotary_factor": 0.5}),
    "smollm3": ("smollm3", {**LLAMA, "no_rope_layer_interval": 2}),
    "gemma3_text": ("gemma3_text", {**HEADS, "sliding_window": 3, "layer_types": ["sliding_attention",
     "full_attention", "sliding_attention"]}),
    "cohere2": ("cohere2", {**HEADS, "sliding_window": 3, "sliding_window_pattern": 2}),
    "deepseek_v2": ("deepseek_v2", {**EXPERTS, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8,
     "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}),
    "qwen3_next": ("qwen3_next", {**EXPERTS, "layer_types": ["linear_attention", "full_attention",
     "linear_attention"]}),
    "seed_oss": ("seed_oss", {**HEADS, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "xglm": ("xglm", {**LLAMA, "d_model": WIDTH, "ffn_dim": 48, "num_layers": LAYERS, "attention_heads": 4,
     "dropout": 0.0, "attention_dropout": 0.0}),
    "biogpt": ("biogpt", {**LLAMA, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    **{kind: (kind, HEADS) for kind in ("apertus", "arcee", "bitnet", "cohere", "cwm", "diffllama", "doge", "ernie4_5",
     "exaone4", "helium", "hunyuan_v1_dense", "hyperclovax", "jais2", "lfm2", "ministral", "ministral3", "nemotron",
     "olmo2", "olmo3", "persimmon", "vaultgemma")},
    **{kind: (kind, EXPERTS) for kind in ("afmoe", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "jetmoe",
     "minimax_m2", "olmoe", "phimoe", "solar_open")},
}  # fmt: skip
TRAINED = ["llama", "llama tied", "qwen2", "qwen2 tied", "gpt2", "opt", "granite", "glm", "smollm3"]


def config_of(name: str) -> Any:
    from transformers import AutoConfig

    kind, settings = CONFIGS[name]
    return AutoConfig.for_model(kind, **settings)


def model_of(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float32)


def batches_of(step: int, data_rank: int = 0, *, is_padded: bool = True) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """Micro-batches of other lengths, with padding and labels to leave out."""
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    made = []
    for k in range(N_BATCHES):
        length = 7 + k
        ids = torch.randint(3, VOCAB, (2, length), generator=generator)
        labels = ids.clone()
        labels[0, :2] = -100
        inputs = {"input_ids": ids}
        if is_padded and k != 1:
            inputs["attention_mask"] = torch.ones_like(ids)
            inputs["attention_mask"][1, -3:] = 0
            labels[1, -3:] = -100
        made.append((inputs, labels))
    return made


def plain_run(name: str, n_pipelines: int = 1) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """(losses of steps, the loss of an evaluation, weights)."""
    model = model_of(name).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        batches = [batch for rank in range(n_pipelines) for batch in batches_of(step, rank)]
        losses.append(
            descend(optimizer, sum(model(**inputs, labels=labels).loss for inputs, labels in batches) / len(batches))
        )
    with torch.no_grad():
        evaluation = sum(float(model.eval()(**x, labels=y).loss) for x, y in batches_of(9)) / N_BATCHES
    return losses, evaluation, {key: value.detach() for key, value in model.named_parameters()}


def engine_of(module: Any, stage: int = 0, **more: Any) -> Any:
    import deepspeed_c

    settings = config(
        stage, rows=2, params={"momentum": 0.9}, accumulate=N_BATCHES, **{"gradient_clipping": 0.0, **more}
    )
    return deepspeed_c.initialize(model=module, model_parameters=list(module.parameters()), config=settings)[0]


def bare(name: str) -> str:
    """transformers' name of a weight of the pipeline."""
    return name.split(".", 2 if name.startswith("tied_modules.") else 1)[-1]


def train(rank: int, world: int, name: str, schedule: str, stage: int, more: dict[str, Any]) -> Any:
    from deepspeed_c.pipe import from_transformers

    module = from_transformers(model_of(name), min(world, 2), schedule=schedule)
    data_rank = module.mpu().get_data_parallel_rank()
    with engine_of(module, stage, **more) as engine:
        losses = [float(engine.train_batch(iter(batches_of(step, data_rank)))) for step in range(STEPS)]
        evaluation = float(engine.eval_batch(iter(batches_of(9))))
        return losses, evaluation, {bare(key): p.detach().clone() for key, p in module.named_parameters()}


def check(outcome: list[Any], expected: Any) -> None:
    losses, evaluation, weights = expected
    seen = set()
    for got, evaluated, mine in outcome:
        assert got == pytest.approx(losses, rel=1e-5) and evaluated == pytest.approx(evaluation, rel=1e-5)
        for name, value in mine.items():
            torch.testing.assert_close(
                value, weights[name], rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
            )
            seen.add(name)
    assert seen == set(weights)


def test_every_family_that_can_be_cut_is_compared():
    from deepspeed_c.pipe.transformers import _FAMILIES

    assert set(_FAMILIES) == {kind for kind, _ in CONFIGS.values()}
    page = Path(__file__).parents[2] / "docs" / "concepts" / "pipeline.md"
    rows = [line.split("|")[1] for line in page.read_text().splitlines() if re.match(r"\|[^|]*\| yes", line)]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(_FAMILIES)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_on_one_rank(name):
    check(on_ranks(1, train, name, "1f1b", 0, {}), plain_run(name))


@pytest.mark.parametrize(("schedule", "stage"), [("1f1b", 0), ("zb_h1", 1)])
@pytest.mark.parametrize("name", TRAINED)
def test_two_stages(name, schedule, stage):
    outcome = on_ranks(2, train, name, schedule, stage, {})
    check(outcome, plain_run(name))
    # Only a tied embedding is on both ranks.
    shared = outcome[0][2].keys() & outcome[1][2].keys()
    is_tied = name in ("llama tied", "qwen2 tied", "gpt2", "opt", "smollm3")
    assert len(shared) == is_tied and all("embed_tokens" in key or "wte" in key for key in shared)


def test_two_pipelines_whose_layers_are_recomputed():
    more = {"pipeline": {"activation_checkpoint_interval": 1}}
    check(on_ranks(4, train, "qwen2 tied", "1f1b", 1, more), plain_run("qwen2 tied", 2))


DROPPING = {
    "xglm": {"dropout": 0.5},
    "biogpt": {"hidden_dropout_prob": 0.5},
    "starcoder2": {"embedding_dropout": 0.5},
    "gpt2": {"embd_pdrop": 0.5, "resid_pdrop": 0.5},
}


def dropping_body(rank: int, world: int) -> dict[str, list[torch.Tensor]]:
    """By family: logits of the model and of its pipeline, in training and in evaluation."""
    from transformers import AutoModelForCausalLM

    from deepspeed_c.pipe import from_transformers

    ids, found = torch.arange(14).view(2, 7), {}
    for name, dropouts in DROPPING.items():
        config = config_of(name)
        config.update(dropouts)
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config)
        pipeline = from_transformers(model, 1)
        logits = found[name] = []
        for is_training in (True, False):
            for module in (model, pipeline):
                torch.manual_seed(5)
                output = module.train(is_training)(ids)
                logits.append((output if module is pipeline else output.logits).detach())
    return found


def test_a_decoder_that_drops_elements_itself_drops_them_in_training_alone():
    """Some decoders call ``torch.nn.functional.dropout`` on their embeddings."""
    for name, (trained, trained_in_stages, evaluated, evaluated_in_stages) in on_ranks(1, dropping_body)[0].items():
        assert not torch.allclose(trained, evaluated), name
        torch.testing.assert_close(trained_in_stages, trained, msg=lambda m, name=name: f"{name} in training: {m}")
        torch.testing.assert_close(evaluated_in_stages, evaluated, msg=lambda m, name=name: f"{name}: {m}")


def adapted(name: str, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        model_of(name), LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False, **options)
    )
    for p in model.parameters():
        p.data = p.data.to(torch.float32 if p.requires_grad else torch.bfloat16)
    return model


def adapted_body(rank: int, world: int, folder: str) -> Any:
    from peft import PromptTuningConfig, get_peft_model

    from deepspeed_c.errors import DeepSpeedCError
    from deepspeed_c.pipe import from_transformers

    model = adapted("llama", modules_to_save=["lm_head"])
    pipeline = from_transformers(model, world)
    given = dict(model.get_base_model().named_parameters())
    for name, p in pipeline.named_parameters():
        origin = given[bare(name)]
        assert torch.equal(p, origin) and (p.dtype, p.requires_grad) == (origin.dtype, origin.requires_grad), name
    # The way to a file of the adapter.
    stages: list[Any] = [None] * world
    torch.distributed.all_gather_object(
        stages, {name: value.detach() for name, value in pipeline.own_tensors().items()}
    )
    whole = adapted("llama", modules_to_save=["lm_head"])
    for p in whole.parameters():
        p.data.zero_()
    for tensors in stages:
        whole.get_base_model().load_state_dict(tensors, strict=False)
    assert all(torch.equal(p, given[name]) for name, p in whole.get_base_model().named_parameters())
    found = []
    quantized = adapted("llama")
    layer = quantized.get_base_model().model.layers[0].mlp.up_proj.base_layer
    layer.weight.data = layer.weight.data.flatten()
    for call in (
        lambda: pipeline.save_pretrained(folder),
        lambda: from_transformers(get_peft_model(model_of("llama"), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")), world),
        lambda: from_transformers(quantized, world),
        lambda: from_transformers(model.to("meta"), world),
    ):  # fmt: skip
        with pytest.raises(DeepSpeedCError) as caught:
            call()
        found.append(str(caught.value))
    return {bare(name) for name, _ in pipeline.named_parameters()}, found


def test_adapters_are_cut_with_their_layers(tmp_path):
    """Values, dtypes and frozen weights of each stage. tests/deepspeed_c/engine/fuzz_parallel.py trains them."""
    outcomes = on_ranks(2, adapted_body, str(tmp_path))
    assert set.union(*(names for names, _ in outcomes)) == {
        name for name, _ in adapted("llama", modules_to_save=["lm_head"]).get_base_model().named_parameters()
    }
    for _, (saved, prompts, quantized, blank) in outcomes:
        assert "its adapters have no values" in blank
        assert "adapters" in saved and "own_tensors()" in saved
        assert "'default'" in prompts and "such as LoRA" in prompts
        assert "model.layers.0.mlp.up_proj.base_layer.weight has shape (1536,)" in quantized


def load_body(rank: int, world: int, folder: str, schedule: str) -> Any:
    """Returns (names -> tensors, bytes that were read, elements with memory among those of the whole model)."""
    from unittest import mock

    from deepspeed_c.checkpoint.formats.huggingface import HuggingFaceSource
    from deepspeed_c.pipe import from_transformers

    n_read = []
    read = HuggingFaceSource.read

    def counting(self: Any, reads: Any) -> None:
        n_read.extend(each.into.nbytes for each in reads)
        read(self, reads)

    with mock.patch.object(HuggingFaceSource, "read", counting):
        module = from_transformers(folder, world, schedule=schedule)
    (whole,) = module._whole
    held = {id(p): p.numel() for p in whole.parameters() if not p.is_meta}
    tensors = {bare(key): value.clone() for key, value in module.state_dict().items()}
    return tensors, sum(n_read), sum(held.values())


@pytest.mark.parametrize("name", ["llama", "llama tied", "gpt2", "opt", "qwen3_moe", "mixtral", "bloom"])
def test_a_folder_is_read_once_by_the_ranks_that_need_it(tmp_path, name):
    model = model_of(name)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    wanted = model.state_dict()
    outcome = on_ranks(2, load_body, str(tmp_path), "1f1b")
    for tensors, n_read, n_held in outcome:
        assert n_read == sum(value.nbytes for value in tensors.values()) < sum(v.nbytes for v in wanted.values())
        assert n_held == sum(value.numel() for value in tensors.values())
        for key, value in tensors.items():
            assert torch.equal(value, wanted[key]), key
    both = outcome[0][0].keys() | outcome[1][0].keys()
    assert both | {"lm_head.weight"} == wanted.keys()


def save_body(rank: int, world: int, name: str, folder: str, more: dict[str, Any]) -> Any:
    from deepspeed_c.errors import CheckpointError, ConfigError
    from deepspeed_c.pipe import from_transformers

    module = from_transformers(model_of(name), 2, schedule="zb_v" if name == "gpt2" else "1f1b")
    with engine_of(module, 1, **more) as engine:
        engine.train_batch(iter(batches_of(0, module.mpu().get_data_parallel_rank())))
        with pytest.raises((CheckpointError, ConfigError), match="no size"):
            engine.save_16bit_model(folder, max_shard_size="much")
        with pytest.raises(CheckpointError):
            engine.save_16bit_model("/dev/null/model")
        assert engine.save_16bit_model(folder, max_shard_size="50KB")
        logits = engine.eval_batch(iter(batches_of(5)), compute_loss=False)
        return {bare(key): p.detach().clone() for key, p in module.named_parameters()}, logits


@pytest.mark.parametrize(
    ("world", "name", "more"),
    [
        (2, "llama", {"bf16": {"enabled": True}}),
        (4, "qwen2 tied", {}),
        (2, "gpt2", {}),
        (2, "opt", {}),
        (2, "mixtral", {}),
    ],
)
def test_the_saved_folder_is_a_model_of_transformers(tmp_path, world, name, more):
    from transformers import AutoModelForCausalLM

    outcome = on_ranks(world, save_body, name, str(tmp_path / "model"), more)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == [type(model).__name__]
    assert (tmp_path / "model" / "generation_config.json").exists()
    loaded = model.state_dict()
    assert model.dtype == (torch.bfloat16 if more else torch.float32)
    for mine, _ in outcome:
        for key, value in mine.items():
            assert torch.equal(value, loaded[key]), key
    assert set().union(*(mine for mine, _ in outcome)) | {"lm_head.weight"} == set(dict(model.named_parameters())) | {
        "lm_head.weight"
    }
    logits = next(found for _, found in outcome if found is not None)
    tolerance = 0.05 if more else 1e-5
    with torch.no_grad():
        for got, (inputs, _) in zip(logits, batches_of(5), strict=True):
            torch.testing.assert_close(got, model(**inputs).logits, rtol=tolerance, atol=tolerance)


def tensors_body(rank: int, world: int, name: str, folder: str) -> Any:
    """Two stages on two tensor-parallel ranks each."""
    from deepspeed_c.errors import FeatureError
    from deepspeed_c.pipe import from_transformers

    module = from_transformers(model_of(name), 2)
    more = {"tensor_parallel": {"autotp_size": 2, "preset_model": CONFIGS[name][0]}}
    with engine_of(module, 1, **more) as engine:
        losses = [float(engine.train_batch(iter(batches_of(step)))) for step in range(STEPS)]
        with pytest.raises(FeatureError, match="parts of tensors"):
            module.save_pretrained(folder)
        engine.save_16bit_model(folder)
        return losses, float(engine.eval_batch(iter(batches_of(9))))


@pytest.mark.parametrize("name", ["llama", "qwen2 tied", "gpt2"])
def test_stages_over_tensor_parallel_ranks(tmp_path, name):
    from transformers import AutoModelForCausalLM

    losses, evaluation, weights = plain_run(name)
    for got, evaluated in on_ranks(4, tensors_body, name, str(tmp_path / "model")):
        assert got == pytest.approx(losses, rel=1e-5) and evaluated == pytest.approx(evaluation, rel=1e-5)
    saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    assert saved.keys() == weights.keys()
    for key, value in saved.items():
        torch.testing.assert_close(
            value.detach(), weights[key], rtol=1e-5, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}"
        )


def resume_body(rank: int, world: int, folder: str, step: int, schedule: str) -> tuple[list[float], set[torch.dtype]]:
    """Loads the checkpoint unless it is the first step, trains two steps in bf16, and saves."""
    from deepspeed_c.pipe import from_transformers

    module = from_transformers(config_of("deepseek_v3"), world, schedule=schedule)
    with engine_of(module, 1, bf16={"enabled": True}) as engine:
        if step:
            engine.load_checkpoint(folder)
        losses = [float(engine.train_batch(iter(batches_of(at)))) for at in (step, step + 1)]
        engine.save_checkpoint(folder)
        biases = [value.dtype for name, value in module.named_buffers() if "e_score_correction_bias" in name]
        return losses, set(biases)


def test_a_checkpoint_loads_with_other_stages_and_routers_keep_fp32(tmp_path):
    losses = []
    for world, schedule in ((2, "1f1b"), (1, "1f1b"), (2, "zb_v")):
        folder = str(tmp_path / f"{world} {schedule}")
        on_ranks(2, resume_body, folder, 0, "1f1b")
        outcome = on_ranks(world, resume_body, folder, 2, schedule)
        assert set().union(*(dtypes for _, dtypes in outcome)) == {torch.float32}
        losses.append(outcome[0][0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3) and losses[2] == pytest.approx(losses[0], rel=1e-3)


def seeded_body(rank: int, world: int, name: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    from deepspeed_c.pipe import from_transformers

    module = from_transformers(config_of(name), world, dtype=torch.float32, **options)
    return {bare(key): value.clone() for key, value in module.state_dict().items()}


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gpt_oss"])
def test_weights_of_a_configuration_do_not_depend_on_the_number_of_stages(name):
    (one,) = on_ranks(1, seeded_body, name, {})
    for options in ({}, {"schedule": "zb_v"}):
        seen = set()
        for mine in on_ranks(2, seeded_body, name, options):
            seen |= mine.keys()
            assert all(torch.equal(value, one[key]) for key, value in mine.items())
        assert seen == one.keys()
    (other,) = on_ranks(1, seeded_body, name, {"base_seed": 5})
    stds = {key: float(value.std()) for key, value in model_of(name).state_dict().items() if value.ndim > 1}
    for key, std in stds.items():
        if key in one and std > 0:
            assert not torch.equal(one[key], other[key]), key
            assert 0.7 < float(one[key].std()) / std < 1.4, key


PARTS = ("'bert'", "output_router_logits", "is a Linear", "no head", "shape", "no folder")


def refuse_body(rank: int, world: int, folder: str) -> list[str]:
    from transformers import AutoConfig, AutoModel

    from deepspeed_c.errors import DeepSpeedCError
    from deepspeed_c.pipe import from_transformers

    mixtral = AutoConfig.for_model("mixtral", **{**LLAMA, "output_router_logits": True})
    found = []
    for model in (
        AutoConfig.for_model("bert"),
        mixtral,
        torch.nn.Linear(2, 2),
        AutoModel.from_config(config_of("llama")),
        folder,
        folder + "/missing",
    ):
        with pytest.raises(DeepSpeedCError) as caught:
            from_transformers(model, world)
        found.append(str(caught.value))
    module = from_transformers(model_of("llama"), world)
    with engine_of(module) as engine:
        for generate in (module.generate, engine.generate):
            with pytest.raises(DeepSpeedCError, match="all layers") as caught:
                generate(torch.ones(1, 1, dtype=torch.long))
            assert "init_inference" in str(caught.value)
        for call in (engine.iter_full_weights, lambda: engine.send_weights(print)):
            with pytest.raises(DeepSpeedCError, match="its stages only") as caught:
                call()
            assert "save_16bit_model" in str(caught.value)
    if rank == 0:
        with pytest.raises(DeepSpeedCError, match="labels are the second"):
            module.run_stage(0, {"input_ids": torch.ones(1, 2, dtype=torch.long), "labels": torch.ones(1, 2)})
    return found


def test_what_cannot_be_cut_is_refused_by_name(tmp_path):
    model_of("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    for found in on_ranks(2, refuse_body, str(tmp_path)):
        for text, part in zip(found, PARTS, strict=True):
            assert part in text


def test_one_token_and_tensors_without_a_dictionary():
    model = model_of("llama").eval()
    for got, shape in zip(on_ranks(1, small_body)[0], SHAPES, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(got, model(torch.full(shape, 7)).logits)


SHAPES = ((1, 1), (2, 1), (1, 13))


def small_body(rank: int, world: int) -> list[torch.Tensor]:
    from deepspeed_c.pipe import from_transformers

    module = from_transformers(model_of("llama"), 1).eval()
    with torch.no_grad():
        return [module(torch.full(shape, 7)) for shape in SHAPES]


def profiled(rank: int, world: int, name: str) -> tuple[list[int], int, bool]:
    """(cut, number of times, whether the weights are those of the same cut as a list)."""
    from deepspeed_c.pipe import from_transformers

    config = config_of(name)
    net = from_transformers(config, world, partition_method="profile")
    given = from_transformers(model_of(name), world, partition_method="profile", example_input=torch.ones(2, 3).long())
    plain = from_transformers(config, world, partition_method=net.partitions())
    assert all(param.grad is None and not param.is_meta for param in net.parameters())
    whole = model_of(name).state_dict()
    assert all(torch.equal(whole[key], tensor) for key, tensor in given.own_tensors().items())
    values, expected = net.state_dict(), plain.state_dict()
    same = values.keys() == expected.keys() and all(torch.equal(values[key], expected[key]) for key in values)
    return net.partitions(), len(net.layer_times_ns), same


@pytest.mark.parametrize("name", ["llama", "llama tied", "gpt2", "opt", "bloom", "qwen3_moe"])
def test_layers_are_dealt_out_by_their_times(name):
    outcomes = on_ranks(2, profiled, name)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] == LAYERS + 4 and outcomes[0][2]
