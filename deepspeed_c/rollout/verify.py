"""The same probability twice: a rollout's tokens, one by one with cached keys, against one forward of training.

```
 generating path   prompt | token | token | ...   keys and values in blocks       \\
                                                                                   > distributions, modules' outputs
 training path     prompt   token   token   ...   one forward, all rows, padded   /
```
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from deepspeed_c.errors import ModelError
from deepspeed_c.rollout.base import RolloutBatch
from deepspeed_c.rollout.choice import log_probs_of
from deepspeed_c.rollout.decoding import ForkingEngine, Limits
from deepspeed_c.rollout.hybrid import TrainedPolicy, evaluation

__all__ = ["Difference", "verify_rollout"]

# Steps of rounding of the largest logit that count as rounding alone. In 16 bits products add up in float32, so only
# their results are rounded to the dtype; in float32 the sums themselves are rounded, and their order differs.
_STEPS = {torch.float32: 64, torch.bfloat16: 8, torch.float16: 8}


class Difference(NamedTuple):
    """How far the generating path is from a forward of training, in logarithms of probabilities."""

    largest: float
    """Over all words of the vocabulary, at each token of each response."""
    mean: float
    largest_of_tokens: float
    """Over the drawn tokens alone."""
    mean_of_tokens: float
    recorded: float | None
    """The largest difference between the batch's own ``logprobs`` and the generating path now: weights have changed
    since, or the company of a row has changed its bits. None without ``logprobs``."""
    bound: float
    """Differences up to it count as rounding: 64 steps of rounding of the largest logit in float32, 8 in 16 bits."""
    n_tokens: int
    """Tokens of responses."""
    first_module: str | None
    """The first module of the forward with other outputs, for the row with the largest difference. None: no output
    differs."""
    first_difference: float
    """Of that module's outputs, the largest."""

    @property
    def is_same(self) -> bool:
        """Whether all distributions have the same bits."""
        return self.largest == 0

    @property
    def is_within_bound(self) -> bool:
        return self.largest <= self.bound

    def __str__(self) -> str:
        where = "no module differs" if self.first_module is None else f"first in {self.first_module}"
        return (
            f"{self.n_tokens} tokens: log-probabilities differ by at most {self.largest:.3g} (mean {self.mean:.3g}),"
            f" of drawn tokens by {self.largest_of_tokens:.3g} (mean {self.mean_of_tokens:.3g});"
            f" bound {self.bound:.3g}; {where}, by {self.first_difference:.3g}"
        )


@torch.no_grad()
def verify_rollout(
    engine: Any, batch: RolloutBatch, *, temperature: float = 1.0, deterministic: bool = False
) -> Difference:
    """Compares a rollout's distributions with a forward of training.

    The generating path runs as in ``HybridEngineRollout``: the prompt in one forward, then token by token, all rows
    together. The forward of training is the engine's own, of the whole padded batch, in evaluation mode.
    ``temperature``: of the rollout. ``deterministic``: of its configuration.

    Ranks may have different numbers of rows, also none. Collective as ``engine.generate`` is. Raises ModelError for a
    batch without responses in all of its rows.
    """
    n_prompt = _start_of(batch)
    prompts = (batch.input_ids[:, :n_prompt],)
    kwargs = {"attention_mask": batch.attention_mask[:, :n_prompt], "max_new_tokens": batch.seq_len - n_prompt}
    with evaluation(engine), engine._generation.run(prompts, kwargs, check=lambda: _check(batch, n_prompt)):
        if not batch.batch_size:
            return Difference(0.0, 0.0, 0.0, 0.0, None, 0.0, 0, None, 0.0)
        return _compare(engine, batch, n_prompt, temperature, deterministic)


def _start_of(batch: RolloutBatch) -> int:
    return int(batch.response_start_idx[0]) if batch.batch_size else batch.seq_len


def _check(batch: RolloutBatch, n_prompt: int) -> None:
    mask, where = batch.attention_mask != 0, "verify_rollout"
    n_new, is_own = mask[:, n_prompt:].sum(1), bool((batch.response_start_idx == n_prompt).all())
    if not is_own or not bool((n_new > 0).all()) or not bool(mask[:, :n_prompt].any(1).all()):
        raise ModelError(
            f"responses begin at {batch.response_start_idx.tolist()[:8]} and have {n_new.tolist()[:8]} tokens",
            where=where,
            fix="pass a batch of generate: one place for all rows, and one token or more in each",
        )


def _compare(engine: Any, batch: RolloutBatch, n_prompt: int, temperature: float, deterministic: bool) -> Difference:
    mask = batch.attention_mask != 0
    texts = [ids[is_token].cpu() for ids, is_token in zip(batch.input_ids, mask)]
    n_new = mask[:, n_prompt:].sum(1).tolist()
    expected = _train(engine, batch.input_ids, mask)[:, n_prompt - 1 : -1].cpu()
    sums, most, largest_logit, worst, recorded = [0.0, 0.0], [0.0, 0.0], 0.0, (-1.0, 0), 0.0
    n_words = expected.shape[-1]
    found, block_bytes = _generate(engine, texts, n_new, deterministic)
    for row, (text, mine) in enumerate(zip(texts, found, strict=True)):
        theirs = expected[row, : n_new[row]]
        largest_logit = max(largest_logit, float(theirs.float().abs().max()))
        own, other = log_probs_of(mine, temperature), log_probs_of(theirs, temperature)
        off, drawn = (own - other).abs(), text[-n_new[row] :, None]
        for i, part in enumerate((off, off.gather(1, drawn))):
            sums[i] += float(part.sum(dtype=torch.float64))
            most[i] = max(most[i], float(part.max()))
        worst = max(worst, (float(off.max()), -row))
        if batch.logprobs is not None:
            before = batch.logprobs[row, : n_new[row]].cpu()
            recorded = max(recorded, float((own.gather(1, drawn)[:, 0] - before).abs().max()))
    n = sum(n_new)
    scale = max(temperature, 0.0) or 1.0
    name, by = _first_difference(engine, texts[-worst[1]], n_new[-worst[1]], deterministic, block_bytes)
    return Difference(
        most[0],
        sums[0] / (n * n_words),
        most[1],
        sums[1] / n,
        None if batch.logprobs is None else recorded,
        _STEPS[expected.dtype] * torch.finfo(expected.dtype).eps * largest_logit / scale,
        n,
        name,
        by,
    )


def _train(engine: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The logits of the forward of training, [rows, tokens, words]."""
    ids = ids.masked_fill(~mask, 0).to(engine.device)  # a pad may be no word of the model
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask.long().to(engine.device), "use_cache": False}
    takes = inspect.signature(engine.module.forward).parameters
    if "position_ids" in takes:
        inputs["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0).to(engine.device)
    return engine._run((), inputs).logits


def _generate(
    engine: Any,
    texts: Sequence[torch.Tensor],
    n_new: Sequence[int],
    deterministic: bool,
    block_bytes: int | None = None,
) -> tuple[list[torch.Tensor], int]:
    """(logits [tokens, words] of each row's response by the generating path, the bytes of a block)."""
    n_prompts = [len(text) - n for text, n in zip(texts, n_new, strict=True)]
    limits = Limits(n_prompts, 1, max(n_new), None, least_tokens=sum(n_prompts))
    own = ForkingEngine(TrainedPolicy(engine), limits, deterministic, block_bytes)
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    try:
        for step in range(max(n_new)):
            rows = [row for row, n in enumerate(n_new) if step < n]
            ends = [n_prompts[row] + step for row in rows]
            pieces = [texts[row][0 if step == 0 else end - 1 : end] for row, end in zip(rows, ends)]
            for row, logits in zip(rows, own.put(rows, pieces).cpu(), strict=True):
                found[row].append(logits)
    finally:
        own.destroy()
    return [torch.stack(each) for each in found], own.block_bytes


def _first_difference(
    engine: Any, text: torch.Tensor, n_new: int, deterministic: bool, block_bytes: int
) -> tuple[str | None, float]:
    """(the first module whose outputs differ between both paths for one row, the largest difference of its outputs)."""
    is_token = torch.ones(1, len(text) - 1, dtype=torch.bool)
    with _outputs(engine.module) as trained:
        _train(engine, text[None, :-1], is_token)
    with _outputs(engine.module) as generated:
        _generate(engine, [text], [n_new], deterministic, block_bytes)
    for name, pieces in trained.items():
        mine, theirs = _joined(generated.get(name, [])), _joined(pieces)
        if mine is None or theirs is None or mine.shape[2:] != theirs.shape[2:]:
            continue
        n = min(mine.shape[1], theirs.shape[1])  # a head computes the last tokens alone
        off = float((mine[:, -n:].double() - theirs[:, -n:].double()).abs().max())
        if off != 0:
            return name, off
    return None, 0.0


@contextmanager
def _outputs(model: torch.nn.Module) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Within the context, yields a dict that fills: name of a module -> its outputs [1, tokens, ...]."""
    found: dict[str, list[torch.Tensor]] = {}

    def noting(name: str) -> Callable[..., None]:
        def note(module: Any, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            if torch.is_tensor(first) and first.dim() >= 2 and first.is_floating_point() and len(first) == 1:
                found.setdefault(name, []).append(first.detach().cpu().clone())

        return note

    hooks = [module.register_forward_hook(noting(name)) for name, module in model.named_modules() if name]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The outputs of one module behind one another, [1, tokens, ...]; None for outputs of several shapes."""
    return torch.cat(list(pieces), 1) if len({piece.shape[2:] for piece in pieces}) == 1 else None
