"""Models of transformers whose keys travel around a ring, or whose ranks stand in rows: weights after steps of SGD are those of one plain process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_c.errors import ConfigError, DeepSpeedCError, ModelError
from tests.hf.stack import llama, on_ranks
from tests.hf.test_sequence import BATCH, batches, cell, plain, train

RING, CONTIGUOUS, ROWS = ("zigzag", 1), ("contiguous", 1), ("zigzag", 2)

CELLS = [
    cell("grouped", "plain", "gathered", 1, 0.0, 0, ring=RING),
    cell("grouped", "tail", "weighted", 2, 0.1, 1, ring=RING),
    cell("single", "packed", "model's own", 1, 0.0, 3, ring=RING),
    cell("uneven", "padded", "gathered", 1, 0.1, 2, ring=RING),
    cell("window", "packed", "weighted", 2, 0.0, 0, ring=CONTIGUOUS),
    cell("grouped", "padded", "model's own", 1, 0.0, 3, ring=CONTIGUOUS, checkpointing="other"),
    cell("grouped", "plain", "gathered", 1, 0.1, 3, ring=ROWS),
    cell("uneven", "packed", "weighted", 1, 0.0, 1, ring=ROWS, checkpointing="reentrant"),
    cell("window", "tail", "gathered", 2, 0.1, 2, ring=ROWS),
]


@pytest.mark.parametrize("sp", [2, 4])
def test_as_one_plain_process(sp: int) -> None:
    everyone = on_ranks(sp, train, sp, CELLS)
    for i, each in enumerate(CELLS):
        weights, norms = plain(each["model"], each["case"], each["gas"], each["clip"])
        for of_rank in everyone:
            got, got_norms, *_ = of_rank[i]
            torch.testing.assert_close(got_norms, norms, rtol=1e-4, atol=0, msg=f"{each} {got_norms} {norms}")
            for name, value in weights.items():
                torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=lambda m: f"{each} {name} {m}")  # noqa: B023


def more_ranks_than_heads(rank: int, world: int) -> bool:
    """One step with 2 heads: Ulysses refuses, the ring does not."""
    from deepspeed_c.sequence.huggingface import UlyssesSPAttentionHF

    with pytest.raises(ConfigError, match='2 query heads for 4 ranks[^"]*"ring"'):
        UlyssesSPAttentionHF.register_with_transformers(llama(num_attention_heads=2, num_key_value_heads=1), "sdpa", world, BATCH)
    weights, norms, *_ = train(rank, world, world, [cell("pair", "plain", "gathered", 1, 0.0, 0, ring=RING)])[0]
    expected, expected_norms = plain("pair", "plain", 1, 0.0)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-4, atol=0)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
    return True


def test_more_ranks_than_heads() -> None:
    assert on_ranks(4, more_ranks_than_heads) == [True] * 4


def refused(rank: int, world: int) -> list[str]:
    """What this rank is told by a forward, or by the registration."""
    from deepspeed_c.sequence import SequenceCut
    from deepspeed_c.sequence.ring_huggingface import RingSPAttentionHF

    def forward(order: str, changes: dict[str, Any], given: dict[str, Any], **config: Any) -> None:
        model = llama(**config).train()
        RingSPAttentionHF.register_with_transformers(model, "sdpa", world, BATCH)
        batch = {**batches("plain", 0), "position_ids": torch.arange(13).expand(BATCH, -1), **given}
        batch.pop("labels")
        cut = SequenceCut(12, world, order)
        model(**{key: cut.take(value[:, :12], rank, 1) for key, value in batch.items()}, **changes, use_cache=False)

    holes = torch.ones(BATCH, 13, dtype=torch.int64)
    holes[0, 5:7] = 0
    rows = type("Rows", (RingSPAttentionHF,), {"n_inner": 3})
    calls = [
        lambda: forward("contiguous", {}, {}),
        lambda: forward("zigzag", {}, {}, attention_dropout=0.1),
        lambda: forward("zigzag", {}, {"attention_mask": holes}),
        lambda: rows.register_with_transformers(llama(), "sdpa", world, BATCH),
    ]
    said = []
    for call in calls:
        with pytest.raises(DeepSpeedCError) as caught:
            call()
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    return said


def test_what_a_ring_cannot_do() -> None:
    for said in on_ranks(2, refused):
        assert "positions go from 2 to 6 at token 3, in the order 'zigzag'" in said[0]
        assert said[0].startswith(ModelError.__name__)
        assert "dropout 0.1" in said[1]
        assert "padding between the tokens" in said[2]
        assert said[3].startswith(ConfigError.__name__) and "rows of 3 ranks do not divide 2" in said[3]
