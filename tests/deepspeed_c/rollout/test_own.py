"""Rollouts by transformers' ``generate`` have the tokens of the ragged engine; adapters of peft; the experts of each
token, on one rank and with experts on two."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import deepspeed_c
from deepspeed_c.errors import FeatureError, StateError
from deepspeed_c.moe.replay import record_routing, replay_routing
from deepspeed_c.rollout import (
    HybridEngineRollout,
    HybridEngineRolloutConfig,
    RolloutBatch,
    SamplingConfig,
    verify_rollout,
)
from tests.deepspeed_c.engine.test_families_in_blocks import SIZES
from tests.deepspeed_c.inject import families
from tests.deepspeed_c.rollout.test_hybrid import (
    TOKENIZER,
    greedy,
    log_probs_alone,
    make_engine,
    make_llama,
    make_rollout,
    request_of,
    responses,
)
from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers")

LENGTHS = (9, 4, 1)
MORE = SimpleNamespace(pad_token_id=0, eos_token_id=2)


pytestmark = pytest.mark.usefixtures("process_group_of_the_engine")


@pytest.mark.parametrize("n_ways", [1, 3])
def test_both_ways_draw_the_same_tokens(n_ways: int) -> None:
    request = request_of()
    sampling = SamplingConfig(15, temperature=1.1, top_k=30, n_samples_per_prompt=n_ways)
    rollout = make_rollout()
    expected = rollout.generate(request, sampling, seed=2)
    rollout._is_fit = False
    torch.manual_seed(5)
    state = torch.get_rng_state()
    batch = rollout.generate(request, sampling, seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(batch.input_ids, expected.input_ids)
    assert torch.equal(batch.attention_mask, expected.attention_mask)
    assert torch.allclose(batch.logprobs, expected.logprobs, rtol=0, atol=2e-5)


def test_a_family_that_is_not_fit_writes_by_its_own_generate() -> None:
    model, request = families.make("falcon"), request_of(LENGTHS)
    request.prompt_ids.remainder_(families.VOCAB)
    sampling = SamplingConfig(6, temperature=0.0, n_samples_per_prompt=2)
    rollout = HybridEngineRollout(make_engine(model=model), MORE)
    batch = rollout.generate(request, sampling)
    assert not rollout._is_fit
    plain = families.make("falcon").eval()
    for row, found in enumerate(responses(batch)):
        prompt = request.prompt_ids[row // 2][request.prompt_attention_mask[row // 2] == 1]
        expected = plain.generate(prompt[None], max_new_tokens=6, do_sample=False, eos_token_id=2, pad_token_id=0)
        assert found == expected[0, len(prompt) :].tolist(), row
    with pytest.raises(FeatureError):
        HybridEngineRollout(rollout.engine, MORE, HybridEngineRolloutConfig(deterministic=True)).generate(
            request, sampling
        )


def test_adapters_write_through_the_ragged_engine() -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        model = peft.get_peft_model(make_llama(), peft.LoraConfig(target_modules=["q_proj", "up_proj"], r=2))
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "lora_B" in name:
                    param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(len(name))) / 4)
        return model

    request, plain = request_of(), adapted().eval()
    rollout = HybridEngineRollout(make_engine(model=adapted()), TOKENIZER)
    batch = rollout.generate(request, SamplingConfig(10, temperature=0.0))
    assert rollout._is_fit
    assert responses(batch) != greedy(request, 10)
    for row, found in enumerate(responses(batch)):
        prompt = request.prompt_ids[row][request.prompt_attention_mask[row] == 1][None]
        expected = plain.generate(input_ids=prompt, max_new_tokens=10, do_sample=False)
        assert found == expected[0, prompt.shape[1] :].tolist(), row


# -- mixtures ------------------------------------------------------------------------------------------------------------------


def mixtral() -> Any:
    torch.manual_seed(7)
    sizes = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.3}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))


def mixture_body(
    rank: int, world: int, n_ranks: int, is_fit: bool, lengths: tuple[int, ...], stage: int = 0
) -> list[Any]:
    """(batch, routes of the forward of each row alone by name) of an engine with experts over ``n_ranks``."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "expert_parallel": {"enabled": True, "autoep_size": n_ranks},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 30},
    }
    engine = deepspeed_c.initialize(model=mixtral(), config=config)[0]
    rollout = HybridEngineRollout(engine, MORE)
    rollout._is_fit = is_fit
    request = request_of(lengths, seed=rank)
    request.prompt_ids.remainder_(families.VOCAB)
    batch = rollout.generate(request, SamplingConfig(5 + 3 * rank, temperature=1.5, n_samples_per_prompt=2), seed=7)
    with record_routing(engine.module) as routes, torch.no_grad(), engine.synced_generation():
        engine.eval()
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        positions = (batch.attention_mask.cumsum(1) - 1).clamp(min=0)
        engine(**inputs, position_ids=positions, use_cache=False)
    given = {name: each.flatten(0, 1) for name, each in batch.routed_experts.items()}
    with replay_routing(engine.module, given), torch.no_grad():
        engine(**inputs, position_ids=positions, use_cache=False)
    return [batch, {name: found[0].view(batch.batch_size, batch.seq_len, -1) for name, found in routes.items()}]


def check_routes(batch: RolloutBatch, expected: dict[str, torch.Tensor]) -> None:
    assert batch.routed_experts.keys() == expected.keys() and len(expected) == 2
    for name, found in batch.routed_experts.items():
        assert found.dtype == torch.int32 and found.shape == expected[name].shape
        for row, mask in enumerate(batch.attention_mask):
            read = mask.nonzero()[:-1, 0]
            assert torch.equal(found[row][read].sort(-1)[0], expected[name][row][read].int().sort(-1)[0]), (name, row)
            others = torch.ones_like(mask).scatter(0, read, 0).nonzero()[:, 0]
            assert (found[row][others] == torch.arange(2)).all()


@pytest.mark.parametrize("is_fit", [True, False])
def test_the_experts_of_each_token(is_fit: bool) -> None:
    check_routes(*mixture_body(0, 1, 1, is_fit, LENGTHS))


@pytest.mark.parametrize("stage", [0, 2])
def test_experts_on_two_ranks(stage: int) -> None:
    for batch, expected in run_ranks(2, mixture_body, 2, True, LENGTHS, stage):
        assert batch.batch_size == 6
        check_routes(batch, expected)


@pytest.mark.parametrize("n_ranks, is_fit", [(1, True), (1, False), (2, True)])
def test_the_experts_of_each_token_with_sharded_weights(n_ranks: int, is_fit: bool) -> None:
    """Two ranks at stage 3, each with all experts' shards, or with half of the experts."""
    for batch, expected in run_ranks(2, mixture_body, n_ranks, is_fit, LENGTHS, 3):
        assert batch.batch_size == 6
        check_routes(batch, expected)


def lonely_body(rank: int, world: int) -> str:
    try:
        mixture_body(rank, world, 2, True, LENGTHS if rank else ())
    except StateError as error:
        return str(error)
    return ""


def test_a_rank_without_prompts_where_experts_lie_on_both() -> None:
    assert all("rank 0 has no prompts, and experts lie on all ranks" in text for text in run_ranks(2, lonely_body))


# -- tensor-parallel ranks -----------------------------------------------------------------------------------------------------


def cut_body(rank: int, world: int, stage: int, is_fit: bool) -> list[Any]:
    """(greedy batch, drawn batch, difference from a forward of training); ranks of one pair have the same prompts."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "tensor_parallel": {"autotp_size": 2},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 30},
    }
    engine = deepspeed_c.initialize(model=make_llama(), config=config)[0]
    rollout = HybridEngineRollout(engine, TOKENIZER)
    rollout._is_fit = is_fit
    request = request_of(LENGTHS[rank // 2 :], seed=rank // 2)
    written = rollout.generate(request, SamplingConfig(9 + 4 * (rank // 2), temperature=0.0))
    torch.manual_seed(rank)  # tensor-parallel ranks take their seeds from one of them
    drawn = rollout.generate(request, SamplingConfig(7, temperature=1.2, n_samples_per_prompt=3))
    found = verify_rollout(engine, drawn, temperature=1.2) if is_fit else None
    tokens = torch.full((1, 5), 9)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.close()
    return [written, drawn, found]


@pytest.mark.parametrize("n_ranks, stage, is_fit", [(2, 0, True), (2, 0, False), (2, 3, True), (4, 3, True)])
def test_tensor_parallel_ranks_write_together(n_ranks: int, stage: int, is_fit: bool) -> None:
    outcome = run_ranks(n_ranks, cut_body, stage, is_fit)
    plain = make_llama().eval().double()
    for rank, (written, drawn, found) in enumerate(outcome):
        request = request_of(LENGTHS[rank // 2 :], seed=rank // 2)
        assert responses(written) == greedy(request, 9 + 4 * (rank // 2)), rank
        first = outcome[rank // 2 * 2][1]
        assert torch.equal(drawn.input_ids, first.input_ids), (rank, drawn.input_ids, first.input_ids)
        for row, response in enumerate(responses(drawn)):
            expected = log_probs_alone(plain, drawn, row, 1.2)
            assert torch.allclose(drawn.logprobs[row, : len(response)].double(), expected, rtol=0, atol=2e-5), (
                rank,
                row,
            )
        assert found is None or (found.is_within_bound and found.n_tokens == sum(map(len, responses(drawn)))), str(
            found
        )
