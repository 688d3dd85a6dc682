"""Responses by the ragged engine: a prompt is read once for all of its samples, rows that end leave the batch, and
prompts that wait enter it.

```
 waiting prompts --pieces--> read prompt --fork--> row of a sample --end token, limit--> response
      (no blocks)            (logits of its last token)   (shares the blocks of its prompt)
```
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch

from deepspeed_c.accelerator import Accelerator
from deepspeed_c.errors import StateError
from deepspeed_c.inference.engine import InferenceEngine
from deepspeed_c.inference.v2 import InferenceEngineV2, RaggedInferenceEngineConfig
from deepspeed_c.kv.group import blocks_of
from deepspeed_c.ops.kv import BLOCK_TOKENS

__all__ = ["ForkingEngine", "Limits", "ModelOfRollout", "Rows"]

# New tokens of a forward: enough for products at full speed.
_MOST_TOKENS = 2048

# (logits [rows, words], samples, tokens that each response has) -> (tokens, log-probabilities)
Choose = Callable[[torch.Tensor, Sequence[int], Sequence[int]], tuple[list[int], list[float]]]


class ModelOfRollout(Protocol):
    """The model of a training engine, as the ragged engine calls it."""

    module: torch.nn.Module
    device: torch.device
    multiplies_by_core: bool

    def __call__(self, **inputs: Any) -> Any: ...

    def destroy(self) -> None: ...


class Limits:
    """The sizes of a call.

    lengths: tokens of each prompt. n_samples: of a prompt. n_new: the most tokens of a response. most_rows: rows that
    run at a time; None: as many as there is memory for. least_tokens: room for new tokens in a forward.
    """

    def __init__(
        self, lengths: Sequence[int], n_samples: int, n_new: int, most_rows: int | None, least_tokens: int = 0
    ) -> None:
        self.lengths, self.n_samples, self.n_new = lengths, n_samples, n_new
        self.most_rows = min(len(lengths) * n_samples, most_rows or len(lengths) * n_samples)
        self.most_tokens = max(_MOST_TOKENS, 2 * self.most_rows, least_tokens)

    def blocks_of_prompt(self, prompt: int) -> int:
        return blocks_of(self.lengths[prompt])

    def blocks_of_row(self, prompt: int) -> int:
        """The blocks that a sample has for itself."""
        n_shared = self.lengths[prompt] // BLOCK_TOKENS
        return blocks_of(self.lengths[prompt] + self.n_new) - n_shared

    @property
    def least_blocks(self) -> int:
        """Blocks for the longest prompt and one of its samples."""
        return max(self.blocks_of_prompt(i) + self.blocks_of_row(i) for i in range(len(self.lengths)))

    @property
    def most_blocks(self) -> int:
        """Blocks that the rows can use at one time."""
        of_prompts = sum(map(self.blocks_of_prompt, range(len(self.lengths))))
        return of_prompts + (self.most_rows + len(self.lengths)) * max(
            map(self.blocks_of_row, range(len(self.lengths)))
        )


class ForkingEngine(InferenceEngineV2):
    """A ragged engine for one call, with sequences that begin as another one.

    block_bytes: of all layers, which an earlier engine of the same model has found; the model is not tried again then.

    Raises StateError where the memory has no room for one prompt with one response, and as its base.
    """

    def __init__(
        self, policy: ModelOfRollout, limits: Limits, deterministic: bool, block_bytes: int | None = None
    ) -> None:
        self.block_bytes = block_bytes or 0
        self._is_tried, self._limits = block_bytes is not None, limits
        n_sequences = limits.most_rows + len(limits.lengths)
        manager = {
            "max_tracked_sequences": n_sequences,
            "max_ragged_sequence_count": n_sequences,
            "max_ragged_batch_size": limits.most_tokens + n_sequences,
            "max_context": max(limits.lengths) + limits.n_new,
            "enable_prefix_caching": False,
        }
        config = RaggedInferenceEngineConfig(state_manager=manager, deterministic=deterministic)
        super().__init__(cast(InferenceEngine, policy), config)

    def fork(self, uid: int, new_uid: int) -> None:
        """Begins a sequence with the tokens of another one, whose blocks it shares."""
        source = self._state.get_sequence(uid)
        if source is None:
            raise StateError(f"the engine knows no sequence {uid}", where="fork", fix="fork a sequence after its put")
        self._state.cache.share(self._state.get_or_create_sequence(new_uid).cached, source.cached)

    def _tell(self, line: str) -> None:
        """Nothing: each rollout makes an engine."""

    def _try_out(self, takes: Any) -> int:
        if not self._is_tried:
            self.block_bytes = super()._try_out(takes)
        return self.block_bytes

    def _compare_bits(self) -> None:
        if not self._is_tried:
            super()._compare_bits()

    def _n_blocks(self, block_bytes: int) -> int:
        host = Accelerator("cpu")
        n_free = host.available_memory() // host.device_count() // max(block_bytes, 1)
        if n_free < self._limits.least_blocks:
            raise StateError(
                f"a prompt and a response need {self._limits.least_blocks} blocks of keys and values of {block_bytes}"
                f" bytes, and the memory has room for {n_free}",
                where="rollout.generate",
                fix="cut the prompt, or ask for fewer new tokens",
            )
        return min(n_free, self._limits.most_blocks)


class _Prompt:
    """A running prompt. samples: the numbers of its samples."""

    def __init__(self, index: int, tokens: torch.Tensor, samples: Sequence[int]) -> None:
        self.index, self.tokens, self.waiting = index, tokens, deque(samples)
        self.n_read, self.n_open, self.has_spare = 0, len(self.waiting), True
        self.logits = torch.empty(0)


class Rows:
    """The prompts and samples of one call, over one engine. Sample i * n + j is sample j of prompt i.

    ends: tokens that end a response. watch: called after each forward with the uids of its sequences and their numbers
    of new tokens; uids below the number of samples are samples, the others are prompts.
    """

    def __init__(
        self,
        engine: ForkingEngine,
        prompts: Sequence[torch.Tensor],
        limits: Limits,
        choose: Choose,
        ends: frozenset[int],
        watch: Callable[[list[int], list[int]], None] | None = None,
    ) -> None:
        n = limits.n_samples
        self._engine, self._limits, self._choose, self._ends, self._watch = engine, limits, choose, ends, watch
        self._n_samples = len(prompts) * n
        self._waiting = deque(_Prompt(i, p, range(i * n, (i + 1) * n)) for i, p in enumerate(prompts))
        self._reading: list[_Prompt] = []
        self._ready: list[_Prompt] = []
        self._rows: dict[int, _Prompt] = {}  # by sample, in the order of their begin
        self._n_free = int(engine.free_blocks.min())
        self.tokens: list[list[int]] = [[] for _ in range(self._n_samples)]
        """The response of each sample, with the end token."""
        self.log_probs: list[list[float]] = [[] for _ in range(self._n_samples)]
        self.n_prompt_tokens = 0
        """Tokens of prompts that were computed."""
        self.n_forwards = 0

    def run(self) -> None:
        """Writes all responses."""
        while self._waiting or self._reading or self._ready or self._rows:
            self._begin_rows()
            self._begin_prompts()
            if self._reading or self._rows:
                self._forward()

    def _uid(self, prompt: _Prompt) -> int:
        return self._n_samples + prompt.index

    def _begin_rows(self) -> None:
        """Samples whose prompt is read get their first token, from the same logits.

        A prompt without blocks for a further sample stops no other prompt: one that has entered later may have its
        blocks, and give them back when it ends.
        """
        begun: list[tuple[int, _Prompt]] = []
        for prompt in self._ready:
            while prompt.waiting and len(self._rows) + len(begun) < self._limits.most_rows and self._take_row(prompt):
                begun.append((prompt.waiting.popleft(), prompt))
        self._ready = [prompt for prompt in self._ready if prompt.waiting]
        if not begun:
            return
        samples = [sample for sample, _ in begun]
        going = self._add(samples, torch.stack([prompt.logits for _, prompt in begun]))
        for sample, prompt in begun:
            if sample in going:
                self._engine.fork(self._uid(prompt), sample)
                self._rows[sample] = prompt
            else:
                self._close(prompt)
        for prompt in {id(prompt): prompt for _, prompt in begun}.values():
            if not prompt.waiting:
                self._engine.flush(self._uid(prompt))

    def _take_row(self, prompt: _Prompt) -> bool:
        """Takes the blocks of one sample. The first of a prompt has them already."""
        if prompt.has_spare:
            prompt.has_spare = False
            return True
        needed = self._limits.blocks_of_row(prompt.index)
        if needed > self._n_free:
            return False
        self._n_free -= needed
        return True

    def _begin_prompts(self) -> None:
        """Prompts enter while there are rows and blocks for their samples."""
        n_coming = sum(len(prompt.waiting) for prompt in (*self._reading, *self._ready))
        while self._waiting and len(self._rows) + n_coming < self._limits.most_rows:
            prompt = self._waiting[0]
            needed = self._limits.blocks_of_prompt(prompt.index) + self._limits.blocks_of_row(prompt.index)
            if needed > self._n_free:
                break
            self._n_free -= needed
            n_coming += len(prompt.waiting)
            self._reading.append(self._waiting.popleft())

    def _forward(self) -> None:
        """One forward: a token of each row, and pieces of prompts."""
        rows = list(self._rows)
        uids, tokens = list(rows), [torch.tensor(self.tokens[row][-1:]) for row in rows]
        n_left, read = self._limits.most_tokens - len(rows), list[_Prompt]()
        for prompt in self._reading:
            if n_left <= 0:
                break
            piece = prompt.tokens[prompt.n_read : prompt.n_read + n_left]
            prompt.n_read, n_left = prompt.n_read + len(piece), n_left - len(piece)
            self.n_prompt_tokens += len(piece)
            uids.append(self._uid(prompt))
            tokens.append(piece)
            read.append(prompt)
        logits = self._engine.put(uids, tokens)
        self.n_forwards += 1
        if self._watch is not None:
            self._watch(uids, [len(each) for each in tokens])
        for prompt, row in zip(read, logits[len(rows) :], strict=True):
            if prompt.n_read == len(prompt.tokens):
                self._reading.remove(prompt)
                prompt.logits = row.clone()  # not a view, which would keep the logits of the whole forward
                self._ready.append(prompt)
        going = self._add(rows, logits[: len(rows)]) if rows else set()
        for row in rows:
            if row not in going:
                self._engine.flush(row)
                self._close(self._rows.pop(row))

    def _add(self, samples: list[int], logits: torch.Tensor) -> set[int]:
        """Draws the next token of samples. Returns the samples without an end."""
        words, log_probs = self._choose(logits, samples, [len(self.tokens[sample]) for sample in samples])
        going = set[int]()
        for sample, word, log_prob in zip(samples, words, log_probs, strict=True):
            self.tokens[sample].append(word)
            self.log_probs[sample].append(log_prob)
            if word not in self._ends and len(self.tokens[sample]) < self._limits.n_new:
                going.add(sample)
        return going

    def _close(self, prompt: _Prompt) -> None:
        """Gives back the blocks of a sample that has ended, and of the prompt with its last sample."""
        self._n_free += self._limits.blocks_of_row(prompt.index)
        prompt.n_open -= 1
        if not prompt.n_open:
            self._n_free += self._limits.blocks_of_prompt(prompt.index)
