"""Models with sequences split over ranks, in uses other than training: generation, evaluation, LoRA, two models,
closing engines, and errors at registration.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deepspeed_c
from deepspeed_c.errors import ConfigError, ModelError
from tests import ranks
from tests.hf.stack import PRELOAD, VOCAB, llama, on_ranks
from tests.training import config, update

CONFIG = config(2)


def register(model: Any, core: str = "sdpa", **more: Any) -> Any:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    return UlyssesSPAttentionHF.register_with_transformers(model, core, torch.distributed.get_world_size(), 1, **more)


def engine_of(model: Any, core: str = "sdpa", config: dict[str, Any] = CONFIG, **more: Any) -> Any:
    mpu = register(model, core, **more)
    params = [p for p in model.parameters() if p.requires_grad]
    return deepspeed_c.initialize(model=model, model_parameters=params, config=config, mpu=mpu)[0]


def whole() -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(5))
    return {"input_ids": tokens, "position_ids": torch.arange(12).expand(2, -1)}


def part(rank: int, world: int) -> dict[str, torch.Tensor]:
    return {key: value.chunk(world, 1)[rank] for key, value in whole().items()}


@ranks.on_ranks(2, preload=PRELOAD)
def test_autocast_trains_as_one_plain_process(rank: int, world: int) -> None:
    """Rotary positions leave queries and keys in fp32 under autocast. Training equals one plain process there."""
    from deepspeed_c.sequence.loader import UlyssesSPDataLoaderAdapter

    ids = torch.randint(3, VOCAB, (1, 16), generator=torch.Generator().manual_seed(1))
    for attention in ("ulysses", "ring"):
        for where in ("configuration", "script"):
            plain = llama()
            before = {name: p.detach().clone() for name, p in plain.named_parameters()}
            with torch.autocast("cpu", torch.bfloat16):
                loss = plain(input_ids=ids, labels=ids).loss
            loss.backward()
            section = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}} if where == "configuration" else {}
            config = {
                **CONFIG, "gradient_clipping": 0.0, "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
                "sequence_parallel_size": world, "sequence_parallel": {"attention": attention}, **section,
            }  # fmt: skip
            with deepspeed_c.initialize(model=llama(), config=config)[0] as engine:
                group = engine.get_sequence_parallel_group()
                samples = [{"input_ids": ids, "labels": ids.clone()}]
                loader = UlyssesSPDataLoaderAdapter(samples, rank, group, world, engine.device, model=engine)
                batch = next(iter(loader))
                with torch.autocast("cpu", torch.bfloat16, enabled=where == "script"):
                    mine = engine(**batch, labels=batch["shift_labels"], use_cache=False).loss
                update(engine, mine)
                for (name, p), want in zip(engine.module.named_parameters(), plain.parameters(), strict=True):
                    off = ((before[name] - p) - want.grad).norm() / want.grad.norm()
                    assert off < 0.05, f"{attention}, {where}, {name}: moved {off} away from the plain gradient"


@ranks.on_ranks(2, preload=PRELOAD)
def test_evaluation_generation_and_two_models(rank: int, world: int) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    model, other = llama(), llama(seed=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    with torch.no_grad():
        expected, of_other = model(**whole()).logits, other(**whole()).logits
    text = whole()["input_ids"][:, :5]
    generated = model.generate(text, max_new_tokens=4, do_sample=False)
    engine = engine_of(model)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not plain
    # Evaluates cut sequences in batches of other sizes. Generated texts are whole on each rank.
    with torch.no_grad():
        engine.eval()
        torch.testing.assert_close(engine(**part(rank, world)).logits, expected.chunk(world, 1)[rank])
        one = {key: value[:1] for key, value in part(rank, world).items()}
        torch.testing.assert_close(engine(**one).logits, expected.chunk(world, 1)[rank][:1])
        assert torch.equal(engine.module.generate(text, max_new_tokens=4, do_sample=False), generated)
        # A model that is not registered stays unaffected.
        torch.testing.assert_close(other(**whole()).logits, of_other)
    second = engine_of(other, disable_in_eval=True)
    with torch.no_grad():
        second.eval()
        torch.testing.assert_close(second(**whole()).logits, of_other)
        second.train()
        torch.testing.assert_close(second(**part(rank, world)).logits, of_other.chunk(world, 1)[rank])
        torch.testing.assert_close(engine(**part(rank, world)).logits, expected.chunk(world, 1)[rank])
    with pytest.raises(ModelError, match="would be shifted within it"):
        engine(**part(rank, world), labels=part(rank, world)["input_ids"])
    with pytest.raises(ModelError, match="position_ids"):
        engine(input_ids=part(rank, world)["input_ids"])
    engine.close()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not plain and "generate" not in vars(model)
    second.close()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is plain


def lora(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = llama()
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    batch = whole() if world == 1 else part(rank, world)
    labels = torch.nn.functional.pad(whole()["input_ids"][:, 1:], (0, 1), value=-100).chunk(world, 1)[rank].contiguous()
    weight = next(p for name, p in model.named_parameters() if "lora_B" in name)
    if world == 1:
        loss = model(**batch, labels=labels, shift_labels=labels).loss
        loss.backward()
        return weight.detach() - 0.1 * weight.grad, loss.detach()
    with engine_of(model, config={**CONFIG, "gradient_clipping": 0.0}) as engine:
        loss = engine(**batch, labels=labels, shift_labels=labels).loss
        update(engine, loss)
        return weight.detach().clone(), loss.detach()


def test_lora() -> None:
    (expected, _), *_ = on_ranks(1, lora)
    for got, _ in on_ranks(2, lora):
        assert got.abs().sum() > 0
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7)


@ranks.on_ranks(2, preload=PRELOAD)
def test_the_configuration_alone_is_enough(rank: int, world: int) -> None:
    """The configuration alone turns sequence parallelism on; the model is not registered."""
    model = llama()
    with torch.no_grad():
        expected = model(**whole()).logits.chunk(world, 1)[rank]
    with deepspeed_c.initialize(model=model, config={**CONFIG, "sequence_parallel_size": world})[0] as engine:
        with torch.no_grad():
            torch.testing.assert_close(engine(**part(rank, world)).logits, expected)
            before = dict(engine._mesh.along("sp").ledger.totals)
            engine(**part(rank, world))
            after = dict(engine._mesh.along("sp").ledger.totals)
        # Shapes and positions are gathered once a forward, not once a layer. Each layer makes one exchange before
        # attention and one after it.
        assert after["all-gather"].count - before["all-gather"].count == 2
        assert after["all-to-all"].count - before["all-to-all"].count == 4
    with pytest.raises(ConfigError, match="have runs of tokens"):
        deepspeed_c.initialize(
            model=llama(),
            config={
                **CONFIG,
                "sequence_parallel_size": world,
                "sequence_parallel": {"attention": "ulysses", "order": "zigzag"},
            },
        )


@ranks.on_ranks(2, preload=PRELOAD)
def test_what_cannot_be_cut_is_refused_at_registration(rank: int, world: int) -> None:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers import MambaConfig, MambaForCausalLM, T5Config, T5ForConditionalGeneration
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = dict(ALL_ATTENTION_FUNCTIONS)
    with pytest.raises(ConfigError, match="3 does not divide the 2 ranks"):
        UlyssesSPAttentionHF.register_with_transformers(llama(), "sdpa", 3, 1)
    assert UlyssesSPAttentionHF.register_with_transformers(llama(), "sdpa", 1, 1) is None
    with pytest.raises(ConfigError, match="eager attention"):
        register(llama(attn_implementation="eager"), "eager")
    with pytest.raises(ConfigError, match="flex_attention takes a mask of blocks"):
        register(llama(attn_implementation="flex_attention"), "flex_attention")
    with pytest.raises(ConfigError, match="is 'flash_attention_2', and the model uses 'sdpa'"):
        register(llama(), "flash_attention_2")
    small = {"hidden_size": 16, "vocab_size": VOCAB, "num_hidden_layers": 1}
    with pytest.raises(ModelError, match=r"carry a state along the sequence: .*Mamba"):
        register(MambaForCausalLM(MambaConfig(**small, num_heads=2, num_attention_heads=2)))
    t5 = T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    with pytest.raises(ModelError, match="attends from one sequence to another"):
        register(T5ForConditionalGeneration(t5))
    assert dict(ALL_ATTENTION_FUNCTIONS) == before
    with pytest.raises(ConfigError, match="heads"):
        engine_of(
            llama(num_attention_heads=1, num_key_value_heads=1),
            config={**CONFIG, "sequence_parallel": {"attention": "ulysses"}},
        )
    assert dict(ALL_ATTENTION_FUNCTIONS) == before
