"""Models of transformers with ring attention, or with a hybrid of rings and Ulysses.

The weights after steps of SGD equal those of one plain process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_c.errors import ConfigError, DeepSpeedCError, ModelError
from tests.hf.stack import llama, on_ranks
from tests.hf.test_sequence import BATCH, batches, cell, check, plain, train

CONTIGUOUS = {"sequence_parallel": {"attention": "ring", "order": "contiguous"}}
ROWS = {"sequence_parallel": {"attention": "hybrid", "order": "contiguous"}}

CELLS = [
    cell("grouped", "plain", "gathered", 1, 0.0, 0, attention="ring"),
    cell("grouped", "tail", "weighted", 2, 0.1, 1, attention="ring"),
    cell("single", "packed", "model's own", 1, 0.0, 3, attention="ring"),
    cell("uneven", "padded", "gathered", 1, 0.1, 2, attention="ring"),
    cell("window", "packed", "weighted", 2, 0.0, 2, config=CONTIGUOUS),
    cell("grouped", "padded", "model's own", 1, 0.0, 3, config=CONTIGUOUS, checkpointing="other"),
    cell("grouped", "plain", "gathered", 1, 0.1, 3, attention="hybrid"),
    cell("uneven", "packed", "weighted", 1, 0.0, 1, attention="hybrid", checkpointing="reentrant"),
    cell("window", "tail", "gathered", 2, 0.1, 0, attention="hybrid"),
    cell("single", "padded", "gathered", 1, 0.0, 2, config=ROWS),
]


@pytest.mark.parametrize("sp", [2, 4])
def test_as_one_plain_process(sp: int) -> None:
    everyone = on_ranks(sp, train, sp, CELLS)
    for i, each in enumerate(CELLS):
        weights, norms = plain(each["model"], each["case"], each["gas"], each["clip"])
        for of_rank in everyone:
            check(each, of_rank[i], weights, norms)


def more_ranks_than_heads(rank: int, world: int) -> bool:
    """A model with two heads on four ranks: Ulysses refuses it; rings and hybrids accept it."""
    with pytest.raises(ConfigError, match='2 query heads for 4 ranks[^"]*"ring"'):
        train(rank, world, world, [cell("pair", "plain", "gathered", 1, 0.0, 0, attention="ulysses")])
    expected, expected_norms = plain("pair", "plain", 1, 0.0)
    for attention in ("ring", "auto"):
        weights, norms, *_ = train(
            rank, world, world, [cell("pair", "plain", "gathered", 1, 0.0, 0, attention=attention)]
        )[0]
        torch.testing.assert_close(norms, expected_norms, rtol=1e-4, atol=0)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
    return True


def test_more_ranks_than_heads() -> None:
    assert on_ranks(4, more_ranks_than_heads) == [True] * 4


def refused(rank: int, world: int) -> list[str]:
    """This rank's errors from a forward or from the registration."""
    from deepspeed_c.sequence import SequenceCut
    from deepspeed_c.sequence.ring_huggingface import RingSPAttentionHF

    def forward(order: str, given: dict[str, Any], n_inner: int = 1, **config: Any) -> None:
        model = llama(**config).train()
        kind = type("Rows", (RingSPAttentionHF,), {"n_inner": n_inner})
        kind.register_with_transformers(model, "sdpa", world, BATCH)
        batch = {**batches("plain", 0), "position_ids": torch.arange(13).expand(BATCH, -1), **given}
        batch.pop("labels")
        cut = SequenceCut(12, world, order)
        model(**{key: cut.take(value[:, :12], rank, 1) for key, value in batch.items()}, use_cache=False)

    holes = torch.ones(BATCH, 13, dtype=torch.int64)
    holes[0, 5:7] = 0
    calls = [
        lambda: forward("contiguous", {}),
        lambda: forward("zigzag", {}, attention_dropout=0.1),
        lambda: forward("zigzag", {"attention_mask": holes}),
        lambda: forward("zigzag", {}, n_inner=3),
    ]
    said = []
    for call in calls:
        with pytest.raises(DeepSpeedCError) as caught:
            call()
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    return said


def test_what_a_ring_cannot_do() -> None:
    for said in on_ranks(2, refused):
        assert "lie in the order 'contiguous', and its attention has the order 'zigzag'" in said[0]
        assert said[0].startswith(ModelError.__name__)
        assert "dropout 0.1" in said[1]
        assert "padding between the tokens" in said[2]
        assert said[3].startswith(ConfigError.__name__) and "n_inner is 3, must divide n_ranks, which is 2" in said[3]
