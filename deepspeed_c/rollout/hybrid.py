"""Rollouts by the model in training, with its weights as they are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_c.engine.group_generation import generates
from deepspeed_c.engine.prompts import has_encoder
from deepspeed_c.engine.whole import WholeModel
from deepspeed_c.errors import FeatureError, ModelError, StateError
from deepspeed_c.inference.limits import positions_of
from deepspeed_c.rollout.base import (
    RolloutBatch,
    RolloutEngine,
    RolloutRequest,
    SamplingConfig,
    check_request,
    check_sampling,
    joined,
    special_tokens,
)
from deepspeed_c.rollout.choice import Choice
from deepspeed_c.rollout.decoding import ForkingEngine, Limits, Rows

__all__ = ["HybridEngineRollout", "HybridEngineRolloutConfig", "TrainedPolicy", "evaluation"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_SEED = 1 << 62


@dataclass
class HybridEngineRolloutConfig:
    """The configuration of ``HybridEngineRollout``."""

    use_graph_capture: bool = False
    """Has no effect: nothing is captured."""
    enable_profiling: bool = False
    """``get_last_profile`` has the times of the last call."""
    use_shared_prefill: bool = False
    """Has no effect: the samples of a prompt share it anyway."""
    max_rows: int | None = None
    """Rows that run at a time; None: as many as there is memory for."""
    deterministic: bool = False
    """A token's probability has the same bits in any company (docs/concepts/inference.md)."""


class TrainedPolicy:
    """The model of a training engine, as the ragged engine calls it."""

    multiplies_by_core = False

    def __init__(self, engine: WholeModel) -> None:
        self._engine, self.module, self.device = engine, engine.module, engine.device

    def __call__(self, **inputs: Any) -> Any:
        return self._engine._run((), inputs)

    def destroy(self) -> None:
        """The engine lives on."""


class HybridEngineRollout(RolloutEngine):
    """Writes with the model of an engine, at any stage.

    Args:
        engine: of ``initialize``, around a model of transformers that writes text.
        tokenizer: has ``eos_token_id`` (a number or several), ``pad_token_id``, or both.
        cfg: a ``HybridEngineRolloutConfig``, or any object with some of its fields.

    Raises ModelError for a model that does not write, ConfigError for a tokenizer without tokens, FeatureError where
    ranks generate together.
    """

    name = "hybrid_engine"

    def __init__(self, engine: Any, tokenizer: Any, cfg: Any = None) -> None:
        module = getattr(engine, "module", None)
        if not isinstance(engine, WholeModel) or not generates(module) or has_encoder(module):
            raise ModelError(
                f"{type(engine).__name__} of {type(module).__name__} does not continue prompts",
                where="HybridEngineRollout",
                fix="pass an engine of initialize around a decoder of transformers",
            )
        generation = engine._generation
        if generation.group is not None or generation.is_in_step:
            raise FeatureError(
                "rollouts run rows of each rank alone, and in this engine ranks generate together",
                where="HybridEngineRollout",
                fix="set hybrid_engine.inference_tp_size and expert_parallel.autoep_size to 1, or call engine.generate",
            )
        self.engine, self.tokenizer = engine, tokenizer
        self._pad, self._ends = special_tokens(tokenizer)
        own = HybridEngineRolloutConfig()
        names = vars(own)
        self.cfg = HybridEngineRolloutConfig(**{name: getattr(cfg, name, names[name]) for name in names})
        self._block_bytes: int | None = None
        self._profile: dict[str, float] | None = None

    @torch.no_grad()
    def generate(
        self,
        request: RolloutRequest,
        sampling: SamplingConfig,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> RolloutBatch:
        """Writes ``n_samples_per_prompt`` responses to each prompt. Dropout is off meanwhile.

        A response ends with the first end token. Each sample has a seed, which is drawn from ``generator``, else from a
        generator with ``seed``, else from torch's: the same seeds and weights give the same tokens, in any company.

        Ranks may have different numbers of prompts, also none, and of tokens. Collective as ``engine.generate`` is.
        Raises, before a collective, StateError for prompts and ConfigError for sampling that cannot be; a rank that
        would wait for such a rank gets a StateError. FeatureError for a model whose tokens cannot lie behind one another.
        """
        began = time.perf_counter()
        with evaluation(self.engine), self._running(request, sampling):
            n_samples = len(request.prompt_ids) * sampling.n_samples_per_prompt
            choose = Choice(sampling, self._seeds(n_samples, seed, generator))
            run_from = time.perf_counter()
            rows = self._write(request, sampling, choose) if n_samples else None
            run_to = time.perf_counter()
        tokens, log_probs = ([], []) if rows is None else (rows.tokens, rows.log_probs)
        batch = joined(request, tokens, log_probs, self._pad, sampling.n_samples_per_prompt)
        if self.cfg.enable_profiling:
            n_prompt_tokens = 0 if rows is None else rows.n_prompt_tokens
            self._note(request, sampling, batch, n_prompt_tokens, (began, run_from, run_to, time.perf_counter()))
        return batch

    def sync_weights(self, step: int) -> None:
        """Does nothing: the model writes with the weights in training."""

    def get_last_profile(self) -> dict[str, float] | None:
        """Times and sizes of the last call, with ``enable_profiling``; else None."""
        return self._profile

    @contextmanager
    def _running(self, request: RolloutRequest, sampling: SamplingConfig) -> Iterator[None]:
        kwargs = {"attention_mask": request.prompt_attention_mask, "max_new_tokens": sampling.max_new_tokens}
        generation = self.engine._generation
        with generation.run((request.prompt_ids,), kwargs, check=lambda: self._check(request, sampling)):
            yield

    def _check(self, request: RolloutRequest, sampling: SamplingConfig) -> None:
        check_sampling(sampling)
        module = self.engine.module
        text = module.config.get_text_config(decoder=True)
        check_request(request, getattr(text, "vocab_size", None))
        limit = positions_of(module)[1]
        n_longest = int((request.prompt_attention_mask != 0).sum(1).max()) if request.prompt_ids.numel() else 0
        if limit is not None and n_longest + sampling.max_new_tokens - 1 > limit:
            raise StateError(
                f"a prompt of {n_longest} tokens and {sampling.max_new_tokens} new ones are longer than the model's"
                f" {limit} positions",
                where="rollout.generate",
                fix="cut the prompt, or ask for fewer new tokens",
            )

    def _seeds(self, n: int, seed: int | None, generator: torch.Generator | None) -> torch.Tensor:
        """The seed of each sample. Tensor-parallel ranks take the seeds of their first rank, so they draw the same tokens."""
        if generator is None and seed is not None:
            generator = torch.Generator().manual_seed(seed)
        seeds = torch.randint(0, _MOST_SEED, (n,), generator=generator)
        ranks = self.engine._mesh.tensors
        if ranks.world_size > 1:
            seeds = ranks.gather_objects(seeds, label="seeds")[0]
        return seeds

    def _write(self, request: RolloutRequest, sampling: SamplingConfig, choose: Choice) -> Rows:
        prompts = [
            ids[is_token] for ids, is_token in zip(request.prompt_ids.cpu(), request.prompt_attention_mask.cpu() != 0)
        ]
        limits = Limits(
            [len(each) for each in prompts],
            sampling.n_samples_per_prompt,
            sampling.max_new_tokens,
            self.cfg.max_rows,
        )
        policy = TrainedPolicy(self.engine)
        engine = ForkingEngine(policy, limits, self.cfg.deterministic, self._block_bytes)
        try:
            self._block_bytes = engine.block_bytes
            rows = Rows(engine, prompts, limits, choose, self._ends)
            rows.run()
        finally:
            engine.destroy()
        return rows

    def _note(
        self,
        request: RolloutRequest,
        sampling: SamplingConfig,
        batch: RolloutBatch,
        n_prompt_tokens: int,
        times: tuple[float, float, float, float],
    ) -> None:
        began, run_from, run_to, ended = times
        n_prompt = request.prompt_ids.shape[1]
        n_new = int(batch.attention_mask[:, n_prompt:].sum())
        self._profile = {
            "prompt_expansion_ms": 1e3 * (run_from - began),
            "generation_ms": 1e3 * (run_to - run_from),
            "post_processing_ms": 1e3 * (ended - run_to),
            "total_ms": 1e3 * (ended - began),
            "num_generated_tokens": n_new,
            "num_prompt_tokens": n_prompt_tokens,
            "tokens_per_second": n_new / (ended - began),
            "batch_size": len(request.prompt_ids),
            "num_samples_per_prompt": sampling.n_samples_per_prompt,
            "prompt_length": n_prompt,
            "response_length": batch.seq_len - n_prompt,
        }


@contextmanager
def evaluation(engine: Any) -> Iterator[None]:
    """Sets the model to evaluation within the context."""
    is_training = engine.module.training
    if is_training:
        engine.eval()
    try:
        yield
    finally:
        if is_training:
            engine.train()
