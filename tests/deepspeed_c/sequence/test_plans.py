"""Plans of sequences in Python: cuts and joins of tensors, positions, heads compared with plain grouped attention, and
bad input."""

from __future__ import annotations

import itertools

import pytest
import torch

from deepspeed_c.errors import ConfigError
from deepspeed_c.sequence import SequenceCut, plan_exchange, plan_heads


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "documents"])
@pytest.mark.parametrize(("n_ranks", "n_inner"), [(1, 1), (3, 1), (4, 2), (6, 3)])
@pytest.mark.parametrize("ends", [(), (1,), (2, 3, 9, 17, 19)])
def test_what_is_taken_joins_to_the_whole(order: str, n_ranks: int, n_inner: int, ends: tuple[int, ...]) -> None:
    n_tokens = ends[-1] if ends else (0 if order == "documents" else 13)
    cut = SequenceCut(n_tokens, n_ranks, order, n_inner, ends)
    whole = torch.randn(2, n_tokens, 3)
    parts = [cut.take(whole, rank, dim=1) for rank in range(n_ranks)]
    assert cut.join(parts, dim=1).equal(whole)
    for rank, part in enumerate(parts):
        assert part.shape[1] == cut.tokens[rank] == cut.local_tokens(rank)
        assert part.equal(whole[:, cut.positions(rank)])
    # The ranks of a row together have the positions of one part of the ring, in order.
    for row in range(cut.n_parts):
        of_row = torch.cat([cut.positions(row * n_inner + inner) for inner in range(n_inner)])
        assert of_row.equal(cut.parts().positions(row))


def test_document_positions_start_again() -> None:
    cut = SequenceCut(9, 2, "zigzag", document_ends=(2, 3, 9))
    whole = torch.tensor([0, 1, 0, 0, 1, 2, 3, 4, 5])
    for rank in range(2):
        assert cut.document_positions(rank).equal(cut.take(whole, rank))
    assert SequenceCut(4, 2, "contiguous").document_positions(1).tolist() == [2, 3]


@pytest.mark.parametrize(
    ("n_heads", "n_key_heads", "n_ranks"), [(8, 8, 4), (8, 2, 4), (7, 1, 3), (8, 4, 3), (6, 3, 5), (12, 2, 3)]
)
def test_heads_of_all_ranks_are_grouped_attention(n_heads: int, n_key_heads: int, n_ranks: int) -> None:
    torch.manual_seed(1)
    query = torch.randn(1, n_heads, 5, 4, dtype=torch.float64)
    key, value = (torch.randn(1, n_key_heads, 5, 4, dtype=torch.float64) for _ in range(2))
    attention = torch.nn.functional.scaled_dot_product_attention
    expected = attention(query, key, value, is_causal=True, enable_gqa=True)
    found = []
    for rank in range(n_ranks):
        plan = plan_heads(n_heads, n_key_heads, n_ranks, rank)
        keys = torch.tensor(plan.keys)
        local = [tensor[:, plan.key_begin : plan.key_end] for tensor in (key, value)]
        if plan.repeats_keys:
            local = [tensor.index_select(1, keys) for tensor in local]
        assert local[0].shape[1] * plan.group == plan.n_queries
        found.append(attention(query[:, plan.query_begin : plan.query_end], *local, is_causal=True, enable_gqa=True))
    torch.testing.assert_close(torch.cat(found, 1), expected)


def test_both_ends_of_an_exchange_count_the_same() -> None:
    tokens = [3, 0, 5]
    plans = [plan_exchange(8, 2, tokens, rank, query_width=24, value_width=7) for rank in range(3)]
    for a, b in itertools.product(range(3), repeat=2):
        assert plans[a].sent[b] == plans[b].received[a]
        assert plans[a].returned[b] == plans[b].got[a]
    assert sum(plans[0].got) == 3 * 8 * 7  # the outputs of every head for the rank's three tokens


def test_numbers_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"n_inner is 3.*n_ranks, which is 4"):
        SequenceCut(8, 4, n_inner=3)
    with pytest.raises(ConfigError, match="'sideways'.*\n.*contiguous"):
        SequenceCut(8, 4, "sideways")
    with pytest.raises(ConfigError, match="n_tokens is -1"):
        SequenceCut(-1, 4)
    with pytest.raises(ConfigError, match="ends at 7.*8 tokens"):
        SequenceCut(8, 4, document_ends=(3, 7))
    with pytest.raises(ConfigError, match="document 1 ends at 3"):
        SequenceCut(8, 4, "documents", document_ends=(3, 3, 8))
    with pytest.raises(ConfigError, match="rank is 4"):
        SequenceCut(8, 4).runs(4)
    with pytest.raises(ConfigError, match="9 tokens, the cut is of 8"):
        SequenceCut(8, 4).take(torch.zeros(9), 0)
    with pytest.raises(ConfigError, match=r"\[8\] tokens, the cut gives them \[4, 4\]"):
        SequenceCut(8, 2).join([torch.zeros(8)])
    with pytest.raises(ConfigError, match='2 query heads for 4 ranks[^"]*"ring"'):
        plan_heads(2, 2, 4, 0)
    with pytest.raises(ConfigError, match="8 query heads do not divide among 3"):
        plan_exchange(8, 3, [1, 1], 0, query_width=4, value_width=4)
