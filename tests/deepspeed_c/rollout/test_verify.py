"""The same probability twice: the generating path against a forward of training, and the first module that differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_c.errors import ModelError
from deepspeed_c.rollout import (
    HybridEngineRollout,
    HybridEngineRolloutConfig,
    RolloutBatch,
    SamplingConfig,
    verify_rollout,
)
from tests.deepspeed_c.rollout.test_hybrid import (
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


@pytest.mark.parametrize("deterministic", [False, True])
def test_fp32_paths_differ_by_rounding_alone(deterministic: bool) -> None:
    engine = make_engine()
    batch = write(engine, deterministic=deterministic)
    found = verify_rollout(engine, batch, temperature=1.2, deterministic=deterministic)
    assert found.n_tokens == int(batch.attention_mask[:, 23:].sum())
    assert found.is_within_bound and found.bound < 1e-4, str(found)
    assert found.largest >= found.largest_of_tokens >= found.mean_of_tokens and found.largest >= found.mean
    # A token keeps the bits of its probability in another batch, if that was asked for.
    assert found.recorded <= (0 if deterministic else found.bound), str(found)
    assert (found.first_module is None) == found.is_same, str(found)
    assert engine.module.training


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


@pytest.mark.parametrize("name", ["model.embed_tokens", "model.layers.0.input_layernorm"])
def test_the_module_of_the_first_difference_is_named(name: str) -> None:
    """One module has other outputs in the forward of training, which alone gets a mask."""
    engine, has_mask = make_engine(), [False]
    batch = write(engine, deterministic=True)

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        has_mask[0] = "attention_mask" in kwargs

    def disturb(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0.25 if has_mask[0] else output

    hooks = (
        engine.module.register_forward_pre_hook(look, with_kwargs=True),
        engine.module.get_submodule(name).register_forward_hook(disturb),
    )
    found = verify_rollout(engine, batch, temperature=1.2, deterministic=True)
    for hook in hooks:
        hook.remove()
    assert not found.is_within_bound and found.recorded == 0, str(found)
    assert found.first_module == name, str(found)
    assert abs(found.first_difference - 0.25) < 1e-5, str(found)


def body(rank: int, world: int, cell: str) -> list[Any]:
    engine = make_engine(cell)
    batch = write(engine, ((3, 20), ())[rank])
    found = verify_rollout(engine, batch, temperature=1.2)
    return [found.n_tokens, found.is_within_bound, str(found)]


@pytest.mark.parametrize("cell", ["whole", "lease", "join"])
def test_ranks_with_and_without_rows(cell: str) -> None:
    (n, is_within, text), (n_other, *_) = run_ranks(2, body, cell)
    assert n > 4 and is_within, text
    assert n_other == 0


def test_a_batch_without_responses_is_refused() -> None:
    engine, request = make_engine(), request_of((3, 4))
    rows = RolloutBatch(request.prompt_ids, request.prompt_attention_mask, torch.tensor([4, 4]))
    with pytest.raises(ModelError, match=r"begin at \[4, 4\] and have \[0, 0\] tokens"):
        verify_rollout(engine, rows)
