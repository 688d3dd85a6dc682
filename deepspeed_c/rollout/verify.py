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

from deepspeed_c import kv
from deepspeed_c.accelerator import Accelerator
from deepspeed_c.errors import ModelError
from deepspeed_c.inference.v2.deterministic import Deterministic
from deepspeed_c.kv.group import blocks_of
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
    training: Difference | None = None
    """With ``deterministic``: the difference from a forward as a step of training runs it, with torch's products and
    the model's own attention. None without it, where the other fields say so."""

    @property
    def is_same(self) -> bool:
        """Whether all distributions have the same bits."""
        return self.largest == 0

    @property
    def is_within_bound(self) -> bool:
        return self.largest <= self.bound

    def __str__(self) -> str:
        where = "no module differs" if self.first_module is None else f"first in {self.first_module}"
        text = (
            f"{self.n_tokens} tokens: log-probabilities differ by at most {self.largest:.3g} (mean {self.mean:.3g}),"
            f" of drawn tokens by {self.largest_of_tokens:.3g} (mean {self.mean_of_tokens:.3g});"
            f" bound {self.bound:.3g}; {where}, by {self.first_difference:.3g}"
        )
        return text if self.training is None else f"{text}\nbeside a step of training, {self.training}"


@torch.no_grad()
def verify_rollout(
    engine: Any, batch: RolloutBatch, *, temperature: float = 1.0, deterministic: bool = False
) -> Difference:
    """Compares a rollout's distributions with a forward of training.

    The generating path runs as in ``HybridEngineRollout``: the prompt in one forward, then token by token, all rows
    together. The forward of training is the engine's own, of the whole padded batch, in evaluation mode.

    ``temperature``: of the rollout. ``deterministic``: of its configuration. Then products, activations and attention
    of the forward of whole rows run in the core too. A step of training runs them in torch: ``training`` of the result
    has the difference from it.

    Ranks may have different numbers of rows, also none. Collective as ``engine.generate`` is. Raises ModelError for a
    batch without responses in all of its rows, FeatureError for ``deterministic`` with a model that cannot.
    """
    n_prompt = _start_of(batch)
    prompts = (batch.input_ids[:, :n_prompt],)
    kwargs = {"attention_mask": batch.attention_mask[:, :n_prompt], "max_new_tokens": batch.seq_len - n_prompt}
    with evaluation(engine), engine._generation.run(prompts, kwargs, check=lambda: _check(batch, n_prompt)):
        if not batch.batch_size:
            return Difference(0.0, 0.0, 0.0, 0.0, None, 0.0, 0, None, 0.0)
        mask = batch.attention_mask.cpu() != 0
        rows = _Texts([ids[is_token] for ids, is_token in zip(batch.input_ids.cpu(), mask)], mask[:, n_prompt:].sum(1))
        paths = _Paths(engine, deterministic)
        found = paths.generate(rows)

        trained = paths.train(rows, batch.input_ids, mask)
        training = _compare(paths, rows, found, trained, paths.train_alone, batch.logprobs, temperature)
        if not deterministic:
            return training
        alike = _compare(paths, rows, found, paths.train_alike(rows), paths.train_alike, batch.logprobs, temperature)
        return alike._replace(training=training)


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


class _Texts:
    """Texts without padding, and the numbers of tokens of their responses."""

    def __init__(self, texts: Sequence[torch.Tensor], n_new: torch.Tensor) -> None:
        self.texts, self.n_new = texts, n_new.tolist()

    def alone(self, row: int) -> _Texts:
        return _Texts([self.texts[row]], torch.tensor(self.n_new[row : row + 1]))

    @property
    def n_prompts(self) -> list[int]:
        return [len(text) - n for text, n in zip(self.texts, self.n_new, strict=True)]

    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, padded on the right with 0, bool mask of tokens), both [rows, columns]."""
        ids = torch.nn.utils.rnn.pad_sequence(list(self.texts), batch_first=True)
        lengths = torch.tensor([len(text) for text in self.texts])
        return ids, torch.arange(ids.shape[1]) < lengths[:, None]


class _Paths:
    """The ways to the logits of responses. Each returns a tensor [tokens, words] for each row."""

    def __init__(self, engine: Any, deterministic: bool) -> None:
        self.engine, self._deterministic = engine, deterministic
        self._block_bytes: int | None = None
        self._takes = inspect.signature(engine.module.forward).parameters

    def generate(self, rows: _Texts) -> list[torch.Tensor]:
        """Token by token, with cached keys."""
        limits = Limits(rows.n_prompts, 1, max(rows.n_new), None, least_tokens=sum(rows.n_prompts))
        own = ForkingEngine(TrainedPolicy(self.engine), limits, self._deterministic, self._block_bytes)
        found: list[list[torch.Tensor]] = [[] for _ in rows.texts]
        try:
            self._block_bytes = own.block_bytes
            for step in range(max(rows.n_new)):
                going = [row for row, n in enumerate(rows.n_new) if step < n]
                ends = [rows.n_prompts[row] + step for row in going]
                pieces = [rows.texts[row][0 if step == 0 else end - 1 : end] for row, end in zip(going, ends)]
                for row, logits in zip(going, own.put(going, pieces).cpu(), strict=True):
                    found[row].append(logits)
        finally:
            own.destroy()
        return [torch.stack(each) for each in found]

    def train(self, rows: _Texts, ids: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        """One forward as a step of training runs it. ids, mask: [rows, columns], padded anywhere."""
        device = self.engine.device
        inputs: dict[str, Any] = {
            "input_ids": ids.cpu().masked_fill(~mask, 0).to(device),  # a pad may be no word of the model
            "attention_mask": mask.long().to(device),
            "use_cache": False,
        }
        if "position_ids" in self._takes:
            inputs["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0).to(device)
        return self._responses(rows, mask, self.engine._run((), inputs).logits)

    def train_alone(self, rows: _Texts) -> list[torch.Tensor]:
        return self.train(rows, *rows.padded())

    def train_alike(self, rows: _Texts) -> list[torch.Tensor]:
        """One forward of whole rows by the products, activations and attention of the deterministic rollout.

        Padding stands on the right, where no token sees it: sums over keys are made by blocks, which begin with the
        first key.
        """
        engine, (ids, mask) = self.engine, rows.padded()
        host = Accelerator("cpu")
        cache = kv.cache.BlockCache(
            TrainedPolicy(engine).module.config.get_text_config(decoder=True),
            len(ids) * blocks_of(ids.shape[1]),
            host.available_memory() // host.device_count(),
        )
        with Deterministic(), kv.attention.attention_in_blocks(engine.module):
            inputs = {"input_ids": ids.to(engine.device), "past_key_values": cache, "use_cache": True}
            return self._responses(rows, mask, engine._run((), inputs).logits)

    def _responses(self, rows: _Texts, mask: torch.Tensor, logits: torch.Tensor) -> list[torch.Tensor]:
        places = [is_token.nonzero()[-n - 1 : -1, 0] for is_token, n in zip(mask, rows.n_new, strict=True)]
        return [own[place].cpu() for own, place in zip(logits, places, strict=True)]


def _compare(
    paths: _Paths,
    rows: _Texts,
    found: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    alone: Callable[[_Texts], Any],
    recorded_log_probs: torch.Tensor | None,
    temperature: float,
) -> Difference:
    """found, expected: logits of each row by the generating path and by another one. alone: the other one, of a row."""
    sums, most, largest_logit, worst, recorded = [0.0, 0.0], [0.0, 0.0], 0.0, (-1.0, 0), 0.0
    for row, (text, mine, theirs) in enumerate(zip(rows.texts, found, expected, strict=True)):
        largest_logit = max(largest_logit, float(theirs.float().abs().max()))
        own, other = log_probs_of(mine, temperature), log_probs_of(theirs, temperature)
        off, drawn = (own - other).abs(), text[-len(mine) :, None]
        for i, part in enumerate((off, off.gather(1, drawn))):
            sums[i] += float(part.sum(dtype=torch.float64))
            most[i] = max(most[i], float(part.max()))
        worst = max(worst, (float(off.max()), -row))
        if recorded_log_probs is not None:
            before = recorded_log_probs[row, : len(mine)].cpu()
            recorded = max(recorded, float((own.gather(1, drawn)[:, 0] - before).abs().max()))
    dtype, n = expected[0].dtype, sum(rows.n_new)
    name, by = _first_difference(paths, rows.alone(-worst[1]), alone)
    return Difference(
        most[0],
        sums[0] / (n * expected[0].shape[-1]),
        most[1],
        sums[1] / n,
        None if recorded_log_probs is None else recorded,
        _STEPS[dtype] * torch.finfo(dtype).eps * largest_logit / (max(temperature, 0.0) or 1.0),
        n,
        name,
        by,
    )


def _first_difference(paths: _Paths, row: _Texts, alone: Callable[[_Texts], Any]) -> tuple[str | None, float]:
    """(the first module whose outputs differ between both paths for one row, the largest difference of its outputs)."""
    with _outputs(paths.engine.module) as trained:
        alone(row)
    with _outputs(paths.engine.module) as generated:
        paths.generate(row)
    for name, pieces in trained.items():
        mine, theirs = _joined(generated.get(name, [])), _joined(pieces)
        if mine is None or theirs is None or mine.shape[2:] != theirs.shape[2:]:
            continue
        theirs = theirs[:, : len(row.texts[0]) - 1]  # the generating path does not read the last token
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
