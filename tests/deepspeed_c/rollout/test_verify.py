"""The same probability twice: the generating path against a forward of training, and the first module that differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_c.errors import ModelError
from deepspeed_c.kv.cache import BlockCache
from deepspeed_c.rollout import (
    Difference,
    HybridEngineRollout,
    HybridEngineRolloutConfig,
    RolloutBatch,
    SamplingConfig,
    verify_rollout,
)
from tests.deepspeed_c.rollout.test_hybrid import (
    CELLS,
    LENGTHS,
    TOKENIZER,
    log_probs_alone,
    make_engine,
    make_llama,
    request_of,
)
from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers")


pytestmark = pytest.mark.usefixtures("process_group_of_the_engine")


def write(engine: Any, lengths: tuple[int, ...] = LENGTHS, **settings: Any) -> RolloutBatch:
    rollout = HybridEngineRollout(engine, TOKENIZER, HybridEngineRolloutConfig(**settings))
    return rollout.generate(request_of(lengths), SamplingConfig(12, n_samples_per_prompt=2, temperature=1.2), seed=1)


def test_fp32_paths_differ_by_rounding_alone() -> None:
    engine = make_engine()
    batch = write(engine)
    found = verify_rollout(engine, batch, temperature=1.2)
    assert found.n_tokens == int(batch.attention_mask[:, 23:].sum())
    assert found.is_within_bound and found.bound < 1e-4, str(found)
    assert found.largest >= found.largest_of_tokens >= found.mean_of_tokens and found.largest >= found.mean
    assert found.recorded <= found.bound, str(found)
    assert (found.first_module is None) == found.is_same, str(found)
    assert found.training is None and engine.module.training


def numbers(found: Difference) -> tuple[Any, ...]:
    """All that has to be 0 or None with equal bits."""
    return found.largest, found.mean, found.recorded, found.first_module, found.first_difference


SAME = (0.0, 0.0, 0.0, None, 0.0)


@pytest.mark.parametrize("cell", CELLS)
def test_deterministic_fp32_has_the_same_bits(cell: str) -> None:
    """On one rank: a forward of whole rows, tokens one by one, and the record of ``generate``."""
    engine = make_engine(cell)
    batch = write(engine, deterministic=True)
    found = verify_rollout(engine, batch, temperature=1.2, deterministic=True)
    assert numbers(found) == SAME and found.is_same, str(found)
    # A step of training multiplies with torch, and its difference is told.
    beside = found.training
    assert beside.n_tokens == found.n_tokens == int(batch.attention_mask[:, 23:].sum())
    assert beside.recorded == 0 and beside.is_within_bound and str(beside) in str(found), str(found)
    plain = make_llama().eval().double()
    for row in range(batch.batch_size):
        expected = log_probs_alone(plain, batch, row, 1.2)
        assert torch.allclose(batch.logprobs[row, : len(expected)].double(), expected, rtol=0, atol=2e-5), row


def test_a_batch_of_other_weights_shows_in_what_was_recorded() -> None:
    engine = make_engine()
    batch = write(engine)
    with torch.no_grad():
        engine.module.lm_head.weight.mul_(1.01)
    found = verify_rollout(engine, batch, temperature=1.2)
    expected = 0.0
    plain = make_llama().eval().double()
    with torch.no_grad():
        plain.lm_head.weight.mul_(1.01)
    for row in range(batch.batch_size):
        now = log_probs_alone(plain, batch, row, 1.2)
        expected = max(expected, float((now - batch.logprobs[row, : len(now)]).abs().max()))
    assert found.is_within_bound, str(found)
    assert abs(found.recorded - expected) < 1e-4 and expected > 1e-3, (found.recorded, expected)


def is_of_training(inputs: dict[str, Any]) -> bool:
    """Only the forward as a step of training runs it gets a mask."""
    return "attention_mask" in inputs


def is_of_whole_rows(inputs: dict[str, Any]) -> bool:
    return isinstance(inputs.get("past_key_values"), BlockCache)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens", "model.layers.0.input_layernorm", "model.layers.1.mlp.down_proj"]
)
@pytest.mark.parametrize("is_other, by", [(is_of_training, 0.25), (is_of_whole_rows, 0.25), (is_of_whole_rows, 2**-21)])
def test_the_module_of_the_first_difference_is_named(name: str, is_other: Any, by: float) -> None:
    """One module has other outputs in one of the forwards."""
    engine, is_on = make_engine(), [False]
    batch = write(engine, deterministic=True)

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        is_on[0] = is_other(kwargs)

    def disturb(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + by if is_on[0] else output

    hooks = (
        engine.module.register_forward_pre_hook(look, with_kwargs=True),
        engine.module.get_submodule(name).register_forward_hook(disturb),
    )
    found = verify_rollout(engine, batch, temperature=1.2, deterministic=True)
    for hook in hooks:
        hook.remove()
    assert found.recorded == 0, str(found)
    if is_other is is_of_training:
        assert found.is_same and not found.training.is_within_bound, str(found)
        found = found.training
        assert found.first_module in (name, "model.layers.0.self_attn.q_proj"), str(found)
    else:
        assert found.first_module == name and found.largest > 0, str(found)
        assert found.training.is_within_bound, str(found)
    if found.first_module == name:
        assert abs(found.first_difference - by) < 1e-5, str(found)


def body(rank: int, world: int, cell: str, deterministic: bool) -> list[Any]:
    engine = make_engine(cell)
    found = []
    for lengths in (((3, 20), ())[rank], LENGTHS[rank:]):
        batch = write(engine, lengths, deterministic=deterministic)
        found.append(verify_rollout(engine, batch, temperature=1.2, deterministic=deterministic))
    engine.close()
    return found


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_ranks_with_and_without_rows(cell: str, deterministic: bool) -> None:
    mine, other = run_ranks(2, body, cell, deterministic)
    assert other[0].n_tokens == 0
    for found in (*mine, other[1]):
        assert found.n_tokens > 4 and found.is_within_bound, str(found)
        if deterministic:
            assert numbers(found) == SAME and found.training.is_within_bound, str(found)


def test_a_batch_without_responses_is_refused() -> None:
    engine, request = make_engine(), request_of((3, 4))
    rows = RolloutBatch(request.prompt_ids, request.prompt_attention_mask, torch.tensor([4, 4]))
    with pytest.raises(ModelError, match=r"begin at \[4, 4\] and have \[0, 0\] tokens"):
        verify_rollout(engine, rows)
