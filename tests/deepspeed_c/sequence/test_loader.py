"""The adapter of a loader: parts of the batches of all ranks equal cuts by hand, keys are added and padded, a pass can
be resumed, and refusals come on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_c.errors import ModelError, RankMismatchError, StateError
from deepspeed_c.sequence.loader import UlyssesSPDataLoaderAdapter
from tests.ranks import on_ranks, run_ranks


def batch_of(rank: int, i: int, n_tokens: int) -> dict[str, Any]:
    tokens = torch.arange(2 * n_tokens).view(2, n_tokens) + 1000 * rank + 100 * i
    return {
        "input_ids": tokens,
        "labels": tokens + 5,
        "weights": tokens[..., None].expand(-1, -1, 3).double(),
        "is_first": tokens % 2 == 0,
        "rows": torch.tensor([rank, i]),
        "name": f"batch {i} of rank {rank}",
    }


def parts_body(rank: int, world: int) -> list[dict[str, Any]]:
    data = [batch_of(rank, i, 4 + 3 * i + rank) for i in range(2)]
    adapter = UlyssesSPDataLoaderAdapter(data, rank, None, world, "cpu")
    assert len(adapter) == 2 * world
    first = list(adapter)
    second = list(adapter)
    assert [b["name"] for b in first] == [b["name"] for b in second]
    # Resume from the middle of a pass.
    for n in (1, world, 2 * world - 1):
        again = UlyssesSPDataLoaderAdapter(data, rank, None, world, "cpu")
        again.load_state_dict({"batches": n})
        rest = list(again)
        assert [b["name"] for b in rest] == [b["name"] for b in first[n:]]
        assert torch.equal(rest[0]["input_ids"], first[n]["input_ids"])
        assert again.state_dict() == {"batches": 2 * world}
    assert next(UlyssesSPDataLoaderAdapter(data, rank, None, world, "cpu"))["name"] == first[0]["name"]
    return first


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_rank_gets_its_part_of_each_batch(world: int) -> None:
    everyone = run_ranks(world, parts_body)
    for i in range(2):
        for source in range(world):
            n_tokens = 4 + 3 * i + source
            whole, n_all = batch_of(source, i, n_tokens), -(-n_tokens // world) * world
            given = [of_rank[i * world + source] for of_rank in everyone]
            got = {
                key: torch.cat([each[key] for each in given], 1)
                for key in ("input_ids", "weights", "is_first", "shift_labels", "position_ids")
            }
            for key in ("input_ids", "weights", "is_first"):
                assert got[key].dtype == whole[key].dtype and got[key].shape[1] == n_all
                assert torch.equal(got[key][:, :n_tokens], whole[key]) and not got[key][:, n_tokens:].any()
            assert torch.equal(got["shift_labels"][:, : n_tokens - 1], whole["labels"][:, 1:])
            assert (got["shift_labels"][:, n_tokens - 1 :] == -100).all()
            assert torch.equal(got["position_ids"], torch.arange(n_all).expand(2, -1))
            for each in given:
                assert each["name"] == whole["name"] and torch.equal(each["rows"], whole["rows"])
                assert "labels" not in each


@on_ranks(2)
def test_batches_that_cannot_be_cut_are_refused_on_all_ranks(rank: int, world: int) -> None:
    tokens = torch.ones(1, 4, dtype=torch.int64)
    good = {"input_ids": tokens, "labels": tokens}

    def load(batch: Any) -> Any:
        return next(UlyssesSPDataLoaderAdapter([batch], rank, None, world, "cpu"))

    for wrong, text in (
        ({"input_ids": tokens}, "there are no labels"),
        ({"input_ids": tokens[0], "labels": tokens[0]}, "input_ids are"),
        ({**good, "attention_mask": torch.ones(1, 1, 4, 4)}, r"attention_mask is \(1, 1, 4, 4\)"),
        ({**good, "labels": tokens[:, :3]}, r"labels are \(1, 3\)"),
        ([tokens], "without input_ids"),
    ):
        with pytest.raises(ModelError, match=text):
            load(wrong)
        with pytest.raises(ModelError if rank else RankMismatchError, match=text if rank else "rank 1 has a batch"):
            load(wrong if rank else good)
    with pytest.raises(RankMismatchError, match="has no batch any more|no batch any more"):
        list(UlyssesSPDataLoaderAdapter([good] * (rank + 1), rank, None, world, "cpu"))
    with pytest.raises(RankMismatchError, match="more, position_ids|position_ids, "):
        load({**good, "more": 1} if rank else good)
    with pytest.raises(StateError, match="sp_rank is 1 of 3"):
        UlyssesSPDataLoaderAdapter([good], 1, None, 3, "cpu")
