"""``init_inference`` answers as the plain model does, in every dtype, on 1 and 2 ranks, with and without kernels."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.config.inference import DeepSpeedInferenceConfig
from deepspeed_c.errors import ConfigError, FeatureError, ModelError, StateError
from deepspeed_c.inference.limits import positions_of
from deepspeed_c.zero.weights.param import state_of
from scripts.house import counted_reads
from tests.deepspeed_c.inference.models import GENERATING, like_bart, padded_prompts, require_same_tokens, whisper
from tests.deepspeed_c.inject import families
from tests.ranks import on_ranks, run_ranks

pytest.importorskip("transformers")

GREEDY = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
BEAMS = {**GREEDY, "num_beams": 3}


pytestmark = pytest.mark.usefixtures("process_group_of_the_engine")


def answers_body(rank: int, world: int, family: str, uses_kernels: bool) -> None:
    """Generates on ``world`` tensor-parallel ranks as one plain model does."""
    plain = families.make(family).eval()
    config = {"dtype": torch.float32, "tensor_parallel": {"tp_size": world}, "replace_with_kernel_inject": uses_kernels}
    with deepspeed_c.init_inference(families.make(family), config) as engine:
        for how in (GREEDY, BEAMS):
            wanted = plain.generate(**padded_prompts(), **how)
            require_same_tokens(engine.generate(**padded_prompts(), **how), wanted)


@pytest.mark.parametrize("uses_kernels", [False, True], ids=["plain", "kernels"])
@pytest.mark.parametrize("family", GENERATING)
def test_generation_is_that_of_transformers(family, uses_kernels):
    """Left padding, greedy and beams."""
    answers_body(0, 1, family, uses_kernels)


@pytest.mark.parametrize("family", GENERATING)
def test_generation_on_two_ranks(family):
    run_ranks(2, answers_body, family, True)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("family", ["bert", "distilbert", "clip"])
@on_ranks()
def test_encoders(rank: int, world: int, family: str) -> None:
    plain = families.make(family).eval()
    given = {key: value for key, value in families.feed(family).items() if key not in ("labels", "return_loss")}
    config = {"dtype": "fp32", "mp_size": world, "kernel_inject": True}
    with deepspeed_c.init_inference(families.make(family), config) as engine, torch.no_grad():
        ours, theirs = engine(**given).to_tuple(), plain(**given).to_tuple()
        for mine, other in zip(ours, theirs, strict=True):
            if torch.is_tensor(other):
                assert torch.allclose(mine, other, atol=2e-5), float((mine - other).abs().max())


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_whisper(rank: int, world: int) -> None:
    features = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(0))
    plain = whisper()
    with deepspeed_c.init_inference(whisper(), dtype=torch.float32, tensor_parallel={"tp_size": world}) as engine:
        for how in (GREEDY, BEAMS):
            require_same_tokens(engine.generate(features, **how), plain.generate(features, **how))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", ["bart", "mbart", "marian"])
@on_ranks()
def test_models_with_layers_of_bart(rank: int, world: int, kind: str) -> None:
    plain = like_bart(kind)
    config = {"dtype": torch.float32, "tensor_parallel": {"tp_size": world}, "replace_with_kernel_inject": True}
    with deepspeed_c.init_inference(like_bart(kind), config) as engine:
        for how in (GREEDY, BEAMS):
            wanted = plain.generate(**padded_prompts(), **how)
            require_same_tokens(engine.generate(**padded_prompts(), **how), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "t5", "opt"])
def test_16_bits_are_no_further_from_fp32_than_transformers_are(family, dtype, tmp_path):
    model = families.make(family).eval()
    model.save_pretrained(tmp_path)
    given = {"input_ids": padded_prompts()["input_ids"]}
    if family == "t5":
        given["decoder_input_ids"] = given["input_ids"]
    theirs = type(model).from_pretrained(tmp_path, dtype=dtype).eval()
    with torch.no_grad():
        exact = model(**given).logits
        far = (theirs(**given).logits.float() - exact).abs().mean()
        for uses_kernels in (False, True):
            with deepspeed_c.init_inference(
                copy.deepcopy(model), dtype=dtype, replace_with_kernel_inject=uses_kernels
            ) as engine:
                logits = engine(**given).logits
                assert logits.dtype == dtype
                mine = (logits.float() - exact).abs().mean()
            # By chance: over seeds of t5 in bf16 the ratio is 0.82 to 1.13 where others multiply, 0.995 in the mean.
            assert mine <= 1.2 * far, f"{mine} and {far}"


def test_a_module_that_no_policy_knows():
    """Convolutions and a batch norm, in bf16, with kernels asked for."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Hardswish(), nn.Flatten(), nn.Linear(5 * 36, 7))
    x = torch.randn(4, 3, 8, 8)
    net.train()(x)  # running statistics of its own
    exact = net.eval()(x)
    engine = deepspeed_c.init_inference(net.train(), dtype=torch.bfloat16, replace_with_kernel_inject=True)
    assert not engine.module.training
    answer = engine(x.bfloat16())
    assert answer.dtype == torch.bfloat16
    assert torch.allclose(answer.float(), exact, atol=0.05), float((answer.float() - exact).abs().max())
    engine.destroy()


def test_rotary_frequencies_stay_exact_and_tied_weights_tied():
    model = families.make("llama_tied_shared")
    with deepspeed_c.init_inference(model) as engine:
        assert {p.dtype for p in engine.module.parameters()} == {torch.float16}, "the default"
        assert engine.module.model.rotary_emb.inv_freq.dtype == torch.float32
        assert engine.module.lm_head.weight is engine.module.model.embed_tokens.weight


def test_modules_that_their_class_keeps_in_float32():
    with deepspeed_c.init_inference(families.make("t5"), dtype=torch.float16) as engine:
        dtypes = {name.split(".")[-2]: p.dtype for name, p in engine.module.named_parameters()}
    assert dtypes["wo"] == torch.float32
    assert dtypes["wi"] == torch.float16


def test_a_pipeline_of_transformers():
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{i}": i for i in range(families.VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w2")
    model = families.make("llama").eval()
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=fast, device="cpu")
    how = {"max_new_tokens": 4, "do_sample": False}
    wanted = pipe("w5 w6 w7", **how)
    pipe.model = deepspeed_c.init_inference(pipe.model, dtype=torch.float32, replace_with_kernel_inject=True)
    assert pipe("w5 w6 w7", **how) == wanted
    assert pipe.model.config is model.config
    pipe.model.destroy()


def test_forwards_are_timed_within_generate_too():
    with deepspeed_c.init_inference(families.make("gpt2"), dtype="fp32") as engine:
        with pytest.raises(StateError, match="profile_model_time"):
            engine.model_times()
        engine.profile_model_time()
        engine(torch.tensor([[3, 4]]))
        assert len(engine.model_times()) == 1
        engine.generate(torch.tensor([[3, 4]]), max_new_tokens=3, min_new_tokens=3)
        times = engine.model_times()
        assert len(times) == 3 and min(times) > 0, times
        assert engine.model_times() == []


def test_compile():
    plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).eval()
    with deepspeed_c.init_inference(copy.deepcopy(plain), dtype="fp32") as engine:
        assert not engine.is_compiled
        engine.compile(backend="eager")
        assert engine.is_compiled
        x = torch.randn(2, 6)
        assert torch.equal(engine(x), plain(x))


def test_a_prompt_that_is_too_long():
    with deepspeed_c.init_inference(families.make("gpt2"), dtype="fp32", max_out_tokens=70) as engine:
        with pytest.raises(StateError, match="prompt of 71 tokens is longer than max_out_tokens, which is 70"):
            engine.generate(torch.full((1, 71), 3))
        with pytest.raises(StateError, match="66 tokens and 1 new ones are longer than the model's 64 positions"):
            engine.generate(input_ids=torch.full((1, 66), 3), max_length=67)
    with deepspeed_c.init_inference(families.make("llama"), dtype="fp32", max_out_tokens=12) as engine:
        prompt = torch.full((1, 9), 3)
        assert engine.generate(prompt, max_new_tokens=3, eos_token_id=-1).shape[1] == 12
        embeddings = {"inputs_embeds": torch.zeros(1, 9, 48)}
        for given, how in (
            ({"input_ids": prompt}, {"max_new_tokens": 4}),
            ({"input_ids": prompt}, {"max_length": 13}),
            (embeddings, {"max_new_tokens": 4}),
        ):
            with pytest.raises(StateError, match="9 tokens and 4 new ones are longer than max_out_tokens, which is 12"):
                engine.generate(**given, **how)


@pytest.mark.parametrize("name", ["gpt2", "opt", "bart", "mbart", "marian", "llama"])
def test_positions_are_refused_where_transformers_fails(name):
    """Around the end of the table, by trial on the plain model. Rotary positions have no end."""
    like = name in ("bart", "mbart", "marian")
    plain = (like_bart(name) if like else families.make(name)).eval()
    n_positions = plain.config.max_position_embeddings
    with deepspeed_c.init_inference(copy.deepcopy(plain), dtype="fp32", max_out_tokens=4096) as engine:
        lengths = [(n_positions + 1, 1), (n_positions, 1), (n_positions, 2), (n_positions - 4, 5), (n_positions - 4, 6)]
        for n_prompt, n_new in [*lengths, (3, n_positions + 1)]:
            ids = torch.full((1, n_prompt), 5)
            how = {"max_new_tokens": n_new, "min_new_tokens": n_new, "do_sample": False}
            try:
                wanted = plain.generate(ids, attention_mask=torch.ones_like(ids), **how)
            except IndexError:
                wanted = None
            print(name, n_prompt, n_new, wanted is not None)
            if wanted is None:
                with pytest.raises(StateError, match=f"the model's {n_positions} positions"):
                    engine.generate(ids, attention_mask=torch.ones_like(ids), **how)
            else:
                assert torch.equal(engine.generate(ids, attention_mask=torch.ones_like(ids), **how), wanted)


def test_ids_outside_the_vocabulary():
    with deepspeed_c.init_inference(families.make("llama"), dtype="fp32") as engine:
        for wrong in (families.VOCAB, -1):
            words = rf"token 2 of prompt 1 is {wrong}, and the model has {families.VOCAB} words"
            with pytest.raises(StateError, match=words):
                engine.generate(torch.tensor([[3, 4, 5], [3, 4, wrong]]), max_new_tokens=1)
        assert engine.generate(torch.tensor([[0, families.VOCAB - 1]]), max_new_tokens=1).shape[1] == 3


def picture_models() -> dict[str, nn.Module]:
    import transformers as t

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    words = {**sizes, "vocab_size": 211}
    torch.manual_seed(3)
    text = t.LlamaConfig(**words, num_key_value_heads=2, max_position_embeddings=512, eos_token_id=None)
    llava = t.LlavaConfig(text_config=text, vision_config=t.CLIPVisionConfig(**vision), image_token_id=200)
    # The id for pictures is no word of the model.
    gemma = {**words, "model_type": "gemma", "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 200}
    paligemma = t.PaliGemmaConfig(text_config=gemma, vision_config=vision, image_token_id=200, projection_dim=64)
    return {
        "llava": t.LlavaForConditionalGeneration(llava).eval(),
        "paligemma": t.PaliGemmaForConditionalGeneration(paligemma).eval(),
    }


def test_pictures_in_prompts():
    """The tower of LLaVA has a table of 17 places, for the patches of a picture: it limits no prompt."""
    for name, plain in picture_models().items():
        ids = torch.cat([torch.full((1, 16), 200), torch.arange(3, 15)[None]], 1)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(1, 3, 32, 32)}
        how = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5, "pad_token_id": 0}
        wanted = plain.generate(**given, **how)
        with deepspeed_c.init_inference(copy.deepcopy(plain), dtype=torch.float32) as engine:
            for generate in (engine.generate, engine.module.generate):
                found = generate(**given, **how)
                print(name, wanted[0, 28:].tolist(), found[0, 28:].tolist())
                assert torch.equal(found, wanted)


def test_positions_are_those_of_the_text():
    """GIT has a table of 17 places for patches, and one of 40 for words; Whisper has 20 for sound, and 24 for words."""
    import transformers as t

    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 6}
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    words = {**sizes, "vocab_size": families.VOCAB, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1}
    git = t.GitForCausalLM(t.GitConfig(**words, max_position_embeddings=40, vision_config=vision))
    roberta = t.RobertaForCausalLM(t.RobertaConfig(**words, max_position_embeddings=42, is_decoder=True))
    assert positions_of(git) == (None, 40) and positions_of(whisper()) == (20, 24)
    assert positions_of(roberta) == (None, 40)  # its positions begin behind padding's
    assert positions_of(like_bart("bart")) == (40, 40) and positions_of(nn.Linear(2, 2)) == (None, None)


def test_bad_input_changes_nothing():
    with pytest.raises(ModelError, match="must be a torch.nn.Module, not str"):
        deepspeed_c.init_inference("gpt2")
    net = nn.Linear(3, 3)
    with pytest.raises(ConfigError, match="tp_size"):
        deepspeed_c.init_inference(net, tensor_parallel={"tp_size": 2})
    assert net.weight.dtype == torch.float32
    with pytest.raises(ModelError, match="meta"):
        deepspeed_c.init_inference(nn.Linear(3, 3, device="meta"))
    with deepspeed_c.init_inference(nn.Linear(3, 3)) as engine, pytest.raises(FeatureError, match="no generate"):
        engine.generate(torch.ones(1, 1))
    with pytest.raises(StateError, match="closed"):
        engine(torch.ones(1, 3))


def test_the_configuration_is_read_once(tmp_path):
    """``zero`` is read once, and its file once. A section that a caller has changed since then is read again."""
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "prefetch_bucket_size": 5}
    given = {"dtype": "fp32", "zero": zero}
    file = tmp_path / "inference.json"
    file.write_text(json.dumps(given))
    made = DeepSpeedInferenceConfig(**given)
    for config, n in ((given, 1), (str(file), 2), (made, 0), (copy.deepcopy(made), 0), ({"dtype": "fp32"}, 0)):
        with counted_reads() as counts:
            deepspeed_c.init_inference(nn.Linear(3, 2), config).close()
        found = counts["read"]
        print(type(config), found, n)
        assert found == n
    made.zero["stage"] = True  # equal to 1, and no stage
    with pytest.raises(ConfigError, match=r"zero\.stage: true"):
        deepspeed_c.init_inference(nn.Linear(3, 2), made)
    made.zero["stage"] = 3
    made.zero["offload_param"]["device"] = "moon"
    with pytest.raises(ConfigError, match=r'zero\.offload_param\.device: "moon"'):
        deepspeed_c.init_inference(nn.Linear(3, 2), made)
    made.zero["offload_param"]["device"] = "none"
    with deepspeed_c.init_inference(nn.Linear(3, 2), made) as engine:
        assert engine._config.zero.offload_param.device == "none" and engine.inference_config.zero is not made.zero
    assert zero["offload_param"] == {"device": "cpu"}


def test_more_ranks_than_heads():
    """One head a rank is the most; the message has both numbers."""
    for text in run_ranks(4, few_heads_body):
        assert "heads" in text and "4" in text, text


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_a_second_engine_takes_the_model_over(rank: int, world: int) -> None:
    """As in a notebook, whose cell is run again."""
    config = {"dtype": "fp32", "tensor_parallel": {"tp_size": world}, "replace_with_kernel_inject": True}
    plain, model = families.make("llama").eval(), families.make("llama")
    wanted = plain.generate(**padded_prompts(), **GREEDY)
    first = deepspeed_c.init_inference(model, config)
    second = deepspeed_c.init_inference(model, config)
    for engine in (first, second):
        require_same_tokens(engine.generate(**padded_prompts(), **GREEDY), wanted)
    second.destroy()
    first.destroy()


def few_heads_body(rank: int, world: int) -> str:
    import transformers as t

    torch.manual_seed(0)
    config = t.LlamaConfig(hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                           num_key_value_heads=1, vocab_size=11)  # fmt: skip
    model = t.LlamaForCausalLM(config)
    before: dict[str, Any] = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises((ConfigError, ModelError)) as caught:
        deepspeed_c.init_inference(model, dtype=torch.float32, tensor_parallel={"tp_size": world})
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    return str(caught.value)


def data_parallel_body(rank: int, world: int) -> list[int]:
    with deepspeed_c.init_inference(families.make("gpt2"), dtype="fp32") as engine:
        return engine.generate(torch.tensor([[3 + rank, 4]]), max_new_tokens=3, do_sample=False)[0].tolist()


def test_ranks_that_hold_a_model_each():
    plain = families.make("gpt2").eval()
    for rank, tokens in enumerate(run_ranks(2, data_parallel_body)):
        assert tokens == plain.generate(torch.tensor([[3 + rank, 4]]), max_new_tokens=3, do_sample=False)[0].tolist()


def folder_body(rank: int, world: int, folder: str, out: str) -> None:
    """A model on the meta device is filled from a folder, cut, with kernels; and what it writes is read again."""
    import transformers as t

    plain = t.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    wanted = plain.generate(**padded_prompts(), **GREEDY)
    for checkpoint, written in ((folder, out), (out, None)):
        with deepspeed_c.OnDevice(dtype=torch.float32, device="meta"):
            model = t.AutoModelForCausalLM.from_config(plain.config)
        engine = deepspeed_c.init_inference(
            model,
            dtype=torch.float32,
            tensor_parallel={"tp_size": world},
            replace_with_kernel_inject=True,
            checkpoint=checkpoint,
            save_mp_checkpoint_path=written,
        )
        with engine:
            require_same_tokens(engine.generate(**padded_prompts(), **GREEDY), wanted)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_weights_from_a_folder_into_a_meta_model(family, world, tmp_path):
    families.make(family).save_pretrained(tmp_path / "model")
    run_ranks(world, folder_body, str(tmp_path / "model"), str(tmp_path / "written"))


def int8_body(rank: int, world: int) -> tuple[float, float]:
    plain = families.make("llama").eval()
    given = {"input_ids": padded_prompts()["input_ids"]}
    exact = plain(**given).logits
    with (
        deepspeed_c.init_inference(
            families.make("llama"), dtype=torch.int8, tensor_parallel={"tp_size": world}
        ) as engine,
        torch.no_grad(),
    ):
        engine.generate(**padded_prompts(), max_new_tokens=2)
        return float((engine(**given).logits - exact).abs().max()), float(exact.abs().max())


@pytest.mark.parametrize("world", [1, 2])
def test_int8_weights(world):
    """One part in 127 of the largest weight of a row is the step of its codes."""
    for far, largest in run_ranks(world, int8_body):
        assert 0 < far < 0.05 * largest, (far, largest)


def sharded_body(rank: int, world: int, offload: dict[str, Any], folder: str) -> None:
    offload = {key: folder if value == "FOLDER" else value for key, value in offload.items()}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **({"offload_param": offload} if offload else {})}
    plain = families.make("llama").eval()
    with deepspeed_c.init_inference(families.make("llama"), dtype=torch.float32, zero=zero) as engine:
        assert all(state_of(p) is not None for p in engine.module.model.layers[0].mlp.parameters())
        wanted = plain.generate(**padded_prompts(), **GREEDY)
        require_same_tokens(engine.generate(**padded_prompts(), **GREEDY), wanted)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "offload",
    [{}, {"device": "cpu"}, {"device": "nvme", "nvme_path": "FOLDER", "max_in_cpu": 0}],
    ids=["shards", "host", "nvme"],
)
def test_weights_that_are_sharded_or_offloaded(offload, world, tmp_path):
    """ZeRO-Inference: a layer's weights are in memory while it runs."""
    run_ranks(world, sharded_body, offload, str(tmp_path))
