"""Candidates of a cut vocabulary: the largest logit, and the logits that top-k keeps, are those of whole logits."""

from __future__ import annotations

import math

import pytest
import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.inject.candidates import Choice, ColumnGather, gather_candidates
from deepspeed_c.inject.ranks import TensorRanks
from tests.ranks import on_ranks, run_ranks

# Columns of each rank. Some ranks have none, or fewer than candidates.
SIZES = {2: [[19, 18], [0, 41], [61, 2]], 3: [[13, 0, 29]], 4: [[11, 11, 11, 10], [1, 23, 0, 2]]}
INF, NAN = float("inf"), float("nan")


def rows_of(n_columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows [n, columns] with distinct logits, ties, equal logits, infinities, zeros of both signs and NaN."""
    rng = torch.Generator().manual_seed(n_columns)
    rows = torch.randn(9, n_columns, generator=rng)
    rows[1] = torch.randint(0, 3, (n_columns,), generator=rng).float()  # many ties
    rows[2] = 0.25
    rows[3] = -INF
    rows[4, ::5] = INF
    rows[5, -1] = rows[5, 0] = rows[5].max() + 1  # the first and the last column share the maximum
    rows[6] = -0.0
    rows[6, ::3] = 0.0
    rows[7, n_columns // 2 :: 7] = NAN
    rows[8] = -rows[8].abs() * 1e30 if dtype != torch.float16 else rows[8]
    return rows.to(dtype)


def kept(logits: torch.Tensor, k: int, temperature: float) -> list[list[tuple[int, str]]]:
    """By row, the columns and scores that remain after a division and a top-k, by sorting in Python."""
    found = []
    for row in (logits.float() / temperature).tolist():
        ranked = sorted(row, key=lambda x: (math.isnan(x), x), reverse=True)  # NaN is the largest, as for torch.topk
        least = ranked[min(k, len(ranked)) - 1]
        found.append([(i, str(x)) for i, x in enumerate(row) if not x < least and x != -INF])
    return found


def first_largest(row: list[float]) -> int:
    nan = next((i for i, x in enumerate(row) if math.isnan(x)), None)
    return row.index(max(row)) if nan is None else nan


def choose_body(rank: int, world: int, sizes: list[int], name: str) -> tuple[int, int]:
    """Returns how many gathers were of candidates, and how many were not allowed to be."""
    ranks, dtype = TensorRanks(Collectives()), getattr(torch, name)
    begin, n_used, n_not = sum(sizes[:rank]), 0, 0
    for row in rows_of(sum(sizes), dtype):
        whole = row[None].clone()
        mine = whole[:, begin : begin + sizes[rank]]
        first = gather_candidates(mine, sizes, ranks, Choice(0), "test")
        if first is not None:
            n_used += 1
            wanted = first_largest(whole[0].tolist())
            assert first.shape == whole.shape and first.dtype == dtype
            assert int(first.float().argmax(-1)) == wanted, (first, whole, wanted)
        for k in (1, 2, 3, 7):
            for temperature in (1.0, 0.7, 3e38):
                choice = Choice(k, (lambda x, t=temperature: x / t,))
                found = gather_candidates(mine, sizes, ranks, choice, "test")
                n_used += found is not None
                n_not += found is None
                if found is not None:
                    ours, theirs = kept(found, k, temperature), kept(whole, k, temperature)
                    assert ours == theirs, (rank, k, temperature, whole, ours, theirs)
    return n_used, n_not


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("world", "sizes"), [(n, sizes) for n, all_sizes in SIZES.items() for sizes in all_sizes])
def test_the_choice_is_that_of_whole_logits(world: int, sizes: list[int], name: str) -> None:
    results = run_ranks(world, choose_body, sizes, name)
    assert all(result == results[0] for result in results), results
    n_used, n_not = results[0]
    # Both happen: logits that ties or NaN make undecidable are not used, and most others are.
    assert n_used >= 15 and n_not >= 10, results[0]


def decided_body(rank: int, world: int) -> list[str]:
    ranks, sizes, out = TensorRanks(Collectives()), [40, 40], []
    whole = torch.arange(80.0)[None] / 7
    for text, changes in {
        "one tie at the edge": {79: whole[0, 77].item()},
        "a rank with more ties than it sends": {i: 50.0 for i in (1, 2, 3, 5, 8)},
        "as many ties as it sends": {i: 50.0 for i in (1, 2, 3)},
        "NaN in the last that it sends": {39: NAN, 38: NAN, 37: NAN, 36: NAN},
    }.items():
        row = whole.clone()
        for column, value in changes.items():
            row[0, column] = value
        found = gather_candidates(row[:, 40 * rank : 40 * rank + 40], sizes, ranks, Choice(3), "test")
        out.append(f"{text}: {'whole' if found is None else [i for i, _ in kept(found, 3, 1.0)[0]]}")
    big = torch.ones(1, 40)
    big[0, :4] = torch.tensor([2.0, 1.5, 1.2, 1.1]) + rank
    found = gather_candidates(big, sizes, ranks, Choice(2, (lambda x: x / 1e30, lambda x: x / 1e30)), "test")
    out.append(f"a temperature that makes all equal: {'whole' if found is None else 'candidates'}")
    return out


def test_ties_that_cannot_be_told_apart_are_gathered_whole() -> None:
    expected = [
        "one tie at the edge: [77, 78, 79]",
        "a rank with more ties than it sends: whole",
        "as many ties as it sends: [1, 2, 3]",
        "NaN in the last that it sends: whole",
        "a temperature that makes all equal: whole",
    ]
    for found in run_ranks(2, decided_body):
        assert found == expected, found


@on_ranks(2)
def test_shapes_and_bytes(rank: int, world: int) -> None:
    comm = Collectives()
    ranks, sizes = TensorRanks(comm), [30, 31]
    rng = torch.Generator().manual_seed(1)
    for shape in ((61,), (3, 61), (2, 1, 61), (2, 5, 61)):
        whole = torch.randn(shape, generator=rng)
        mine = whole[..., 30 * rank : 30 * rank + sizes[rank]]
        before = {op: total.n_bytes for op, total in comm.ledger.totals.items()}
        found = gather_candidates(mine, sizes, ranks, Choice(4), "test")
        sent = comm.ledger.totals["all-gather"].n_bytes - before.get("all-gather", 0)
        assert found is not None and found.shape == whole.shape, shape
        rows = found[:, -1] if len(shape) == 3 else found.reshape(-1, 61)
        expected = whole[:, -1] if len(shape) == 3 else whole.reshape(-1, 61)
        assert kept(rows, 4, 1.0) == kept(expected, 4, 1.0), shape
        assert sent == world * rows.shape[0] * 5 * 8 <= 2 * world * rows.shape[0] * 4 * (4 + 8), (shape, sent)
    for x in (torch.zeros(0, sizes[rank]), torch.zeros(2, 0, sizes[rank])):
        assert gather_candidates(x, sizes, ranks, Choice(4), "test") is None, x.shape
    wide = torch.randn(2, sizes[rank], generator=rng)
    assert gather_candidates(wide.double(), sizes, ranks, Choice(0), "test") is None
    assert gather_candidates(wide, sizes, ranks, Choice(14), "test") is not None
    assert gather_candidates(wide, sizes, ranks, Choice(15), "test") is None, "16 * 8 bytes are more than 31 * 4"
    assert gather_candidates(wide.half(), sizes, ranks, Choice(7), "test") is None, "8 * 8 bytes are more than 31 * 2"


@on_ranks(2)
def test_only_an_open_gather_without_gradients_is_of_candidates(rank: int, world: int) -> None:
    ranks, sizes = TensorRanks(Collectives()), [20, 20]
    whole = torch.randn(2, 40, generator=torch.Generator().manual_seed(2))
    mine = whole[:, 20 * rank : 20 * rank + 20].clone()
    columns = ColumnGather()
    columns.choice = Choice(0)
    assert torch.equal(columns.gather(mine, sizes, ranks, "test"), whole), "closed"
    columns.open(None, copies=True)
    assert torch.equal(columns.gather(mine, sizes, ranks, "test"), whole)
    (one,) = columns.close()
    assert one.is_whole and torch.equal(one.last, whole)
    columns.open(Choice(0), copies=False)
    with torch.no_grad():
        narrow = columns.gather(mine, sizes, ranks, "test")
    trains = columns.gather(mine.requires_grad_(), sizes, ranks, "test")
    one, two = columns.close()
    assert not one.is_whole and two.is_whole and int(narrow.isfinite().sum()) == 2 * world, narrow
    assert one.last is None and one.logits is narrow and trains.requires_grad
    assert torch.equal(columns.gather(mine, sizes, ranks, "test"), whole), "closed again"
