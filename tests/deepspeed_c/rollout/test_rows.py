"""The order of prompts and samples, with an engine that only counts blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from deepspeed_c.kv.group import blocks_of
from deepspeed_c.ops.kv import BLOCK_TOKENS
from deepspeed_c.rollout.decoding import Limits, Rows

END = 7


class Blocks:
    """Counts the blocks of sequences. A fork shares the full blocks of its source."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self.free_blocks = torch.tensor([n_blocks])
        self.n_tokens: dict[int, int] = {}
        self.shared: dict[int, tuple[int, int]] = {}  # sequence -> (its prompt, full blocks of the prompt)

    def put(self, uids: Sequence[int], tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        for uid, new in zip(uids, tokens, strict=True):
            assert len(new) > 0
            self.n_tokens[uid] = self.n_tokens.get(uid, 0) + len(new)
        assert self.n_used() <= self.n_blocks, (self.n_used(), self.n_blocks)
        return torch.zeros(len(uids), 1)

    def fork(self, uid: int, new_uid: int) -> None:
        self.n_tokens[new_uid] = self.n_tokens[uid]
        self.shared[new_uid] = (uid, self.n_tokens[uid] // BLOCK_TOKENS)

    def flush(self, uid: int) -> None:
        del self.n_tokens[uid]

    def n_used(self) -> int:
        """Blocks of a prompt that has been flushed stay while a fork of it has them."""
        own = sum(blocks_of(n) - self.shared.get(uid, (0, 0))[1] for uid, n in self.n_tokens.items())
        of_gone = {prompt: n for uid, (prompt, n) in self.shared.items() if uid in self.n_tokens}
        return own + sum(n for prompt, n in of_gone.items() if prompt not in self.n_tokens)


class Counted(Rows):
    """Ends with an error in place of turning for ever."""

    n_turns = 0

    def _begin_prompts(self) -> None:
        self.n_turns += 1
        if self.n_turns > 20_000:
            raise RuntimeError(f"{len(self._waiting)} prompts wait, and nothing moves")
        super()._begin_prompts()


def write(
    lengths: list[int], n_samples: int, lives: list[int], n_new: int, most_rows: int | None, spare: int
) -> Blocks:
    """``lives``: tokens of each sample's response, the end token among them."""
    limits = Limits(lengths, n_samples, n_new, most_rows)
    engine = Blocks(limits.least_blocks + spare)

    def choose(logits: torch.Tensor, samples: Sequence[int], done: Sequence[int]) -> tuple[list[int], list[float]]:
        words = [END if n + 1 == lives[sample] else 1 for sample, n in zip(samples, done, strict=True)]
        return words, [0.0] * len(words)

    rows = Counted(engine, [torch.ones(n, dtype=torch.long) for n in lengths], limits, choose, frozenset({END}))
    rows.run()
    assert [len(tokens) for tokens in rows.tokens] == [min(life, n_new) for life in lives], (rows.tokens, lives)
    assert rows.n_prompt_tokens == sum(lengths)
    assert engine.n_tokens == {}
    assert rows._n_free == engine.n_blocks, "all reserved blocks came back"
    return engine


def test_a_prompt_without_blocks_stops_no_other_prompt():
    # The first sample of the first prompt ends at once, and the second prompt takes its blocks.
    write([17, 1], 2, [1, 40, 40, 40], 40, None, 1)


@pytest.mark.parametrize("seed", range(4))
def test_all_rows_end_within_any_number_of_blocks(seed):
    draw = random.Random(seed)
    for _ in range(250):
        n_prompts, n_samples, n_new = draw.randint(1, 6), draw.randint(1, 4), draw.choice([1, 2, 15, 16, 17, 50])
        lengths = [draw.choice([1, 15, 16, 17, 33, 100]) for _ in range(n_prompts)]
        lives = [draw.choice([1, 1, 2, 17, 60]) for _ in range(n_prompts * n_samples)]
        write(lengths, n_samples, lives, n_new, draw.choice([None, 1, 2, 3]), draw.choice([0, 0, 1, 2, 5, 100]))
