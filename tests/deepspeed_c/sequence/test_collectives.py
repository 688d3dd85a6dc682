"""The order of tokens in batches belongs to a model, not to the ranks: several models may share them."""

from __future__ import annotations

import pytest
import torch

from deepspeed_c.errors import ModelError, RankMismatchError, StateError
from deepspeed_c.sequence.collectives import ModelOrder, TokenOrder, order_of, ranks_of
from deepspeed_c.sequence.loader import UlyssesSPDataLoaderAdapter
from deepspeed_c.sequence.masks import WholeSequences, check_order
from deepspeed_c.sequence.plans import SequenceCut
from tests.ranks import on_ranks, run_ranks

TOKENS = 24
CONTIGUOUS, ZIGZAG = TokenOrder("contiguous", 1), TokenOrder("zigzag", 1)


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_batches_are_cut_in_the_order_of_their_model(rank: int, world: int) -> None:
    group = torch.distributed.group.WORLD
    tokens = torch.arange(TOKENS)[None]
    first, second = torch.nn.Linear(1, 1), torch.nn.Bilinear(1, 1, 1)

    def positions(model: torch.nn.Module | None) -> list[int]:
        data = [{"input_ids": tokens, "labels": tokens}]
        return next(UlyssesSPDataLoaderAdapter(data, rank, group, world, "cpu", model=model))["position_ids"][
            0
        ].tolist()

    cuts = {order: SequenceCut(TOKENS, world, *order).positions(rank).tolist() for order in (CONTIGUOUS, ZIGZAG)}
    assert positions(None) == cuts[CONTIGUOUS]
    with pytest.raises(StateError, match="Linear is of no open engine"):
        order_of(group, first)
    of_first, of_second = ModelOrder(first, group, CONTIGUOUS), ModelOrder(second, group, ZIGZAG)
    # All ranks raise. A rank that raised alone would leave the others waiting for its batches.
    with pytest.raises(
        StateError, match=r"different orders: Bilinear \(zigzag\), Linear \(contiguous\).*\n.*model=engine"
    ):
        positions(None)
    assert positions(first) == cuts[CONTIGUOUS] and positions(second) == cuts[ZIGZAG]
    with pytest.raises(RankMismatchError, match="in the order"):
        positions(first if rank == 0 else second)
    of_first.close()
    assert positions(None) == cuts[ZIGZAG]
    again = ModelOrder(second, group, CONTIGUOUS)  # another engine takes the model over
    of_second.close()
    assert positions(None) == cuts[CONTIGUOUS]
    again.close()
    assert order_of(group) == CONTIGUOUS


def refused_body(rank: int, world: int) -> list[str]:
    """The errors of attention in one order over positions that are cut in another order. A model may have a mask of its
    own."""
    found = []
    whole = torch.cat([torch.arange(5), torch.arange(TOKENS - 5)]).expand(2, -1)
    orders = [CONTIGUOUS, ZIGZAG] + ([TokenOrder("zigzag", 2)] if world == 4 else [])
    for given in orders:
        cut = SequenceCut(TOKENS, world, *given)
        for has_mask in (False, True):
            sequences = WholeSequences(ranks_of(None), cut.take(whole, rank, 1).contiguous(), None, has_mask=has_mask)
            for wanted in orders:
                try:
                    check_order(sequences, *wanted, "Attention")
                except ModelError as error:
                    found.append(f"{given} for {wanted}: {error}")
                else:
                    assert given == wanted, (given, wanted)
    return found


@pytest.mark.parametrize("world, n_pairs", [(2, 2), (4, 6)])
def test_attention_refuses_batches_in_an_order_that_is_not_its_own(world: int, n_pairs: int) -> None:
    for texts in run_ranks(world, refused_body):
        assert len(texts) == 2 * n_pairs, texts
        assert all("model=engine" in text for text in texts), texts
