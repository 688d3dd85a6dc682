"""Rollouts by the model in training, with its weights as they are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from deepspeed_c.engine.group_generation import generates
from deepspeed_c.engine.prompts import has_encoder
from deepspeed_c.engine.whole import WholeModel
from deepspeed_c.errors import FeatureError, ModelError, StateError
from deepspeed_c.inference.limits import positions_of
from deepspeed_c.logging import log_dist
from deepspeed_c.rollout import own
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
from deepspeed_c.rollout.choice import SeededChoice
from deepspeed_c.rollout.decoding import ForkingEngine, Limits, Rows
from deepspeed_c.rollout.routes import RolloutRoutes

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


class NotBehindOneAnother(FeatureError):
    """The tokens of a model cannot lie behind one another in a forward."""


class _Written(NamedTuple):
    tokens: list[list[int]]
    log_probs: list[list[float]]
    n_prompt_tokens: int
    """Tokens of prompts that were computed, as far as is known."""
    routes: RolloutRoutes | None


class TrainedPolicy:
    """The model of a training engine, as the ragged engine calls it.

    If peft has put adapters into layers, ``module`` is the model with these layers; forwards run the engine's module.
    """

    multiplies_by_core = False

    def __init__(self, engine: WholeModel) -> None:
        self._engine, self.module, self.device = engine, _without_adapters(engine.module), engine.device

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
        if not isinstance(engine, WholeModel) or not generates(_without_adapters(module)) or has_encoder(module):
            raise ModelError(
                f"{type(engine).__name__} of {type(module).__name__} does not continue prompts",
                where="HybridEngineRollout",
                fix="pass an engine of initialize around a decoder of transformers",
            )
        if engine._generation.group is not None:
            raise FeatureError(
                "rollouts draw tokens of each rank alone, and in this engine ranks generate together",
                where="HybridEngineRollout",
                fix="set hybrid_engine.inference_tp_size to 1, or call engine.generate",
            )
        self.engine, self.tokenizer = engine, tokenizer
        self._pad, self._ends = special_tokens(tokenizer)
        defaults = vars(HybridEngineRolloutConfig())
        self.cfg = HybridEngineRolloutConfig(**{name: getattr(cfg, name, value) for name, value in defaults.items()})
        self._block_bytes: int | None = None
        self._is_fit = True  # for the ragged engine, as far as is known
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
        Raises, before a collective, StateError for wrong prompts and ConfigError for wrong sampling; a rank that would
        wait for such a rank gets a StateError. Raises FeatureError for ``deterministic`` with a model that cannot.
        """
        began = time.perf_counter()
        with evaluation(self.engine), self._running(request, sampling):
            n_samples = len(request.prompt_ids) * sampling.n_samples_per_prompt
            choose = SeededChoice(sampling, self._seeds(n_samples, seed, generator))
            run_from = time.perf_counter()
            found = self._write(request, sampling, choose) if n_samples else _Written([], [], 0, None)
            run_to = time.perf_counter()
        experts_of = None if found.routes is None else found.routes.joined
        batch = joined(request, found.tokens, found.log_probs, self._pad, sampling.n_samples_per_prompt, experts_of)
        if self.cfg.enable_profiling:
            n_prompt_tokens = found.n_prompt_tokens
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
        """The seed of each sample. Tensor-parallel ranks take them from their first rank."""
        if generator is None and seed is not None:
            generator = torch.Generator().manual_seed(seed)
        seeds = torch.randint(0, _MOST_SEED, (n,), generator=generator)
        ranks = self.engine._mesh.tensors
        if ranks.world_size > 1:
            seeds = ranks.gather_objects(seeds, label="seeds")[0]
        return seeds

    def _write(self, request: RolloutRequest, sampling: SamplingConfig, choose: SeededChoice) -> _Written:
        n_ways = sampling.n_samples_per_prompt
        routes = RolloutRoutes(len(request.prompt_ids) * n_ways, n_ways)
        with routes.recording(self.engine.module):
            if self._is_fit and _fits(self.engine):
                try:
                    rows = self._run_rows(request, sampling, choose, routes)
                    return _Written(rows.tokens, rows.log_probs, rows.n_prompt_tokens, routes)
                except NotBehindOneAnother as error:
                    self._is_fit = False
                    log_dist(f"rollouts run by transformers' generate: {error.what}", ranks=[0])
            tokens, log_probs = own.write(self.engine.module, request, sampling, choose, self._pad, self._ends)
            routes.note_batches(request.prompt_ids.shape[1])
        return _Written(tokens, log_probs, request.prompt_ids.numel(), routes)

    def _run_rows(
        self, request: RolloutRequest, sampling: SamplingConfig, choose: SeededChoice, routes: RolloutRoutes
    ) -> Rows:
        prompts = [
            ids[is_token] for ids, is_token in zip(request.prompt_ids.cpu(), request.prompt_attention_mask.cpu() != 0)
        ]
        limits = Limits(
            [len(each) for each in prompts],
            sampling.n_samples_per_prompt,
            sampling.max_new_tokens,
            self.cfg.max_rows,
        )
        try:
            engine = ForkingEngine(TrainedPolicy(self.engine), limits, self.cfg.deterministic, self._block_bytes)
        except FeatureError as error:
            if self.cfg.deterministic:
                raise
            raise NotBehindOneAnother(error.what, where=error.where, fix=error.fix) from error
        try:
            self._block_bytes = engine.block_bytes
            rows = Rows(engine, prompts, limits, choose, self._ends, routes.note)
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


def _without_adapters(module: torch.nn.Module) -> torch.nn.Module:
    """The model around the layers that have adapters of peft; the module itself without adapters in layers."""
    configs = getattr(module, "peft_config", {}).values()
    is_inner = configs and not any(config.is_prompt_learning for config in configs)
    return module.get_base_model() if is_inner and hasattr(module, "get_base_model") else module


def _fits(engine: Any) -> bool:
    """Whether the ragged engine may run the model of this engine."""
    weights = [param for param in engine.module.parameters() if param.is_floating_point()]
    return (
        not engine._generation.is_in_step
        and engine.device.type == "cpu"
        and weights[0].dtype in _DTYPES
        and not any(module._compiled_call_impl is not None for module in engine.module.modules())
    )


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
