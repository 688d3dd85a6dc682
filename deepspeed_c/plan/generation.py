"""The memory that ``generate`` takes in a rank that trains, beside the weights: keys and values, and what a forward
computes.

The model's own forward runs on tensors without data, first over the prompts, then for one token with the keys and
values of all tokens before it, and the bytes of live tensors are counted after every operator.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.engine.precision import Precision
from deepspeed_c.errors import ConfigError, DeepSpeedCError, ModelError
from deepspeed_c.plan.activations import MODELS_OWN, refuse_experts, running_without_data, twin_without_data
from deepspeed_c.plan.inference import CACHES, layers_of_cache, positions_of
from deepspeed_c.plan.live_bytes import LiveBytes

__all__ = ["GenerationMoment", "GenerationShape", "trace_generation"]

_WHERE = "--generate"


class GenerationShape(NamedTuple):
    """One call of ``generate`` of a rank."""

    n_samples: int
    n_prompt: int  # tokens of the longest prompt
    n_new: int  # tokens that are made


class GenerationMoment(NamedTuple):
    """The bytes of one forward of ``generate`` at its peak, without weights."""

    name: str
    cache: int  # keys and values after the forward
    workspace: int

    @property
    def nbytes(self) -> int:
        return self.cache + self.workspace


def trace_generation(
    model: torch.nn.Module,
    shape: GenerationShape,
    precision: Precision,
    device_type: str,
    ranks: Collectives | None = None,
) -> list[GenerationMoment]:
    """The bytes of the forward of the prompts, and of the forward for the last token, if there is another one.

    Prompts are padded, and tokens are drawn with a temperature: three rows of fp32 logits are alive for each sample.
    ``model`` may be on the meta device, and is not changed. ranks: pretended tensor-parallel ranks.

    Raises ModelError for a model without a ``generate`` of transformers, and for one whose forward reads values of
    tensors; ConfigError for more tokens than the model has positions.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # a large import

    refuse_experts(model, _WHERE)
    generator = _generator_of(model)
    is_cut_in_two = generator.config.is_encoder_decoder
    n_longest = max(shape.n_prompt, shape.n_new) if is_cut_in_two else shape.n_prompt + shape.n_new
    positions = positions_of(generator.config)
    if positions is not None and n_longest > positions:
        raise ConfigError(
            f"{n_longest} tokens are more than the {positions} positions of the model",
            where=_WHERE,
            fix=f"ask for {positions} or fewer, prompt and new tokens together",
        )
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        twin = twin_without_data(generator, precision.dtype, fake, ranks).eval()
        weights = [leaf for leaf in tree_leaves([vars(module) for module in twin.modules()]) if torch.is_tensor(leaf)]
        try:
            with torch.no_grad(), running_without_data(precision, device_type, ranks):
                return _moments(twin, shape, weights)
        except DeepSpeedCError:
            raise
        except MODELS_OWN as error:
            raise ModelError(
                f"its forward fails on tensors without data: {type(error).__name__}: {str(error).strip()}",
                where=f"deepspeed_c plan: {type(generator).__name__}",
                fix=f"leave out {_WHERE}, and measure a run",
            ) from error


def _generator_of(model: torch.nn.Module) -> Any:
    """The first module that is a model of transformers with a ``generate``; wrappers (``peft``) are passed over."""
    for module in model.modules():
        can_generate = getattr(type(module), "can_generate", None)
        if can_generate is not None and module.can_generate():
            return module
    raise ModelError(
        f"{type(model).__name__} has no model of transformers in it that generates text",
        where=_WHERE,
        fix="plan a causal or a sequence-to-sequence language model, or leave it out",
    )


def _moments(twin: Any, shape: GenerationShape, weights: Sequence[torch.Tensor]) -> list[GenerationMoment]:
    first = 1 if twin.config.is_encoder_decoder else shape.n_prompt
    call = _Generating(twin, shape)
    with LiveBytes(without=weights) as live:
        found = [_moment("the prompts", live, call, first)]
    if shape.n_new == 1:
        return found
    n_before = first + shape.n_new - 2  # tokens in the cache before the last forward
    is_cached = call.cache is not None
    call = _Generating(twin, shape)
    with LiveBytes(without=weights) as live:
        if is_cached:
            # A sliding window of keys lets go of what has left it in a forward of one token.
            if n_before > 1:
                call.forward(n_before - 1)
            call.forward(1)
        return [*found, _moment("the last token", live, call, 1 if is_cached else n_before + 1)]


def _moment(name: str, live: LiveBytes, call: _Generating, n_tokens: int) -> GenerationMoment:
    with live.phase(name):
        call.forward(n_tokens)
    storages = {}
    for _, layer in layers_of_cache(call.cache):
        for leaf in tree_leaves(list(vars(layer).values())):
            if torch.is_tensor(leaf) and leaf.dim():
                storages[leaf.untyped_storage()._cdata] = leaf.untyped_storage().nbytes()
    cache = sum(storages.values())
    return GenerationMoment(name, cache, live.peaks[name] - cache)


class _Generating:
    """Forwards of one call of ``generate``, one after another."""

    def __init__(self, twin: Any, shape: GenerationShape) -> None:
        self._twin, self._shape = twin, shape
        self._names = inspect.signature(twin.forward).parameters
        self._encoded: Any = None
        self._cache_name = ""
        self.cache: Any = None
        """After a forward, if the model keeps one."""
        self._n_cached = 0
        self._logits: torch.Tensor | None = None
        self._scores: torch.Tensor | None = None
        self._probabilities: torch.Tensor | None = None

    def forward(self, n_tokens: int) -> None:
        """The next ``n_tokens`` tokens, those of the prompt or of the decoder, and the choice of one after them."""
        n_samples, n_prompt, _ = self._shape
        ids = torch.zeros(n_samples, n_tokens, dtype=torch.int64, device="cpu")
        self._n_cached += n_tokens
        given: dict[str, Any] = {}
        if self._twin.config.is_encoder_decoder:
            mask = torch.ones(n_samples, n_prompt, dtype=torch.int64, device="cpu")
            if self._encoded is None:
                prompts = torch.zeros(n_samples, n_prompt, dtype=torch.int64, device="cpu")
                self._encoded = self._twin.get_encoder()(input_ids=prompts, attention_mask=mask)
            given |= {"encoder_outputs": self._encoded, "decoder_input_ids": ids}
        else:
            mask = torch.ones(n_samples, self._n_cached, dtype=torch.int64, device="cpu")
            given["input_ids"] = ids
        options = {"attention_mask": mask, "use_cache": True, "logits_to_keep": 1}
        given |= {name: value for name, value in options.items() if name in self._names}
        if self.cache is not None:
            given[self._cache_name] = self.cache
        outputs = self._twin(**given)
        self._cache_name = next((name for name in CACHES if outputs.get(name) is not None), "")
        self.cache = outputs[self._cache_name] if self._cache_name else None
        # Transformers keeps these rows until the next ones replace them, one by one.
        self._logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
        self._scores = self._logits / 0.5
        self._probabilities = torch.nn.functional.softmax(self._scores, dim=-1)
