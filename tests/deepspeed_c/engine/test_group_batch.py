"""The calls of several ranks as one batch: each rank's rows are what its own call would have returned alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_c.engine.group_batch import GroupBatch, request_of
from deepspeed_c.errors import FeatureError, RankMismatchError, StateError
from tests.toys import llama

transformers = pytest.importorskip("transformers")

VOCAB, PAD, END = 17, 0, 2


@pytest.fixture(scope="module")
def model() -> Any:
    """In double precision, so that padding cannot change which logit is the largest."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    return llama(3, **sizes, pad_token_id=PAD, eos_token_id=END, initializer_range=0.4).double().eval()


def prompts(n_rows: int, n_tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (n_rows, n_tokens), generator=torch.Generator().manual_seed(seed))


def together(model: Any, calls: list[tuple[tuple, dict[str, Any]]]) -> list[torch.Tensor]:
    """The results of calls of ``generate`` on as many ranks."""
    made = [request_of(model, model.generate, args, kwargs) for args, kwargs in calls]
    requests, results = [request for request, _ in made], []
    for rank, (_, shared) in enumerate(made):
        batch = GroupBatch(model, requests, rank, shared)
        rows, mask = batch.prompts(torch.device("cpu"))
        assert len(rows) == batch.n_rows
        results.append(batch.own_part(model.generate(inputs=rows, attention_mask=mask, **batch.kwargs)))
    return results


def alone(model: Any, call: tuple[tuple, dict[str, Any]]) -> torch.Tensor:
    args, kwargs = call
    return model.generate(*args, **kwargs)


def check(model: Any, calls: list[tuple[tuple, dict[str, Any]]]) -> list[torch.Tensor]:
    results = together(model, calls)
    for got, call in zip(results, calls, strict=True):
        want = alone(model, call)
        assert torch.equal(got, want), f"\ngot  {got.tolist()}\nwant {want.tolist()}"
    return results


def test_rows_end_where_they_would_alone(model: Any) -> None:
    lengths = set()
    for seed in range(8):
        calls = [
            (
                (prompts(1 + (seed + rank) % 3, 1 + 2 * rank, 10 * seed + rank),),
                {"max_new_tokens": 7 - 2 * rank, "do_sample": False},
            )
            for rank in range(3)
        ]
        lengths |= {got.shape[1] - call[0][0].shape[1] for got, call in zip(check(model, calls), calls, strict=True)}
    assert lengths > {3, 5, 7}, f"some rows must end by themselves: {lengths}"


def test_lengths_are_those_of_each_rank(model: Any) -> None:
    padded = torch.tensor([[PAD, PAD, 5, 6], [3, 4, 7, 9]])
    calls = [
        ((padded,), {"max_length": 9, "min_length": 9, "num_beams": 1, "do_sample": False}),
        ((prompts(1, 2, 4),), {"max_length": 9, "min_length": 9, "num_beams": 1, "do_sample": False}),
    ]
    assert [got.shape for got in check(model, calls)] == [(2, 9), (1, 9)]
    by_name = {"input_ids": padded, "attention_mask": (padded != PAD).long(), "max_new_tokens": 3, "synced_gpus": True}
    config = transformers.GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=PAD, eos_token_id=END)
    other = transformers.GenerationConfig(max_new_tokens=2, do_sample=False, pad_token_id=PAD, eos_token_id=END)
    check(model, [((prompts(2, 3, 8), config), {}), ((prompts(1, 3, 9),), {"generation_config": other})])
    without = {name: value for name, value in by_name.items() if name != "synced_gpus"}
    got = together(model, [((), by_name), ((prompts(1, 1, 2),), {"max_new_tokens": 4})])
    assert torch.equal(got[0], model.generate(**without))


def test_several_sequences_of_a_prompt(model: Any) -> None:
    more = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    got = check(model, [((prompts(2, 3, 1),), more), ((prompts(1, 5, 2),), more)])
    assert [rows.shape for rows in got] == [(4, 7), (2, 9)]


def test_ranks_without_prompts(model: Any) -> None:
    few = {"max_new_tokens": 3, "do_sample": False}
    calls = [((prompts(0, 4, 1),), few), ((prompts(2, 3, 2),), few), ((prompts(0, 9, 1),), few)]
    got = together(model, calls)
    assert torch.equal(got[1], alone(model, calls[1])) and [len(rows) for rows in got] == [0, 2, 0]
    none = [request_of(model, model.generate, *calls[0])[0]] * 2
    assert GroupBatch(model, none, 0, few).n_rows == 0


def test_what_cannot_be_one_batch(model: Any) -> None:
    ids = prompts(1, 3, 1)

    def batch(*calls: dict[str, Any]) -> None:
        made = [request_of(model, model.generate, (ids,), call) for call in calls]
        for rank, (_, shared) in enumerate(made):
            with pytest.raises(RankMismatchError, match=r"inference_tp_size") as raised:
                GroupBatch(model, [request for request, _ in made], rank, shared)
        texts.append(str(raised.value))

    texts: list[str] = []
    batch({"max_new_tokens": 3, "top_k": 5}, {"max_new_tokens": 3, "top_k": 6})
    batch({"max_new_tokens": 3}, {"max_new_tokens": 3, "do_sample": True})
    batch({"max_new_tokens": 3}, {})
    batch({"max_new_tokens": 9, "min_new_tokens": 3}, {"max_new_tokens": 9})
    config = transformers.GenerationConfig
    batch({"generation_config": config(temperature=0.5)}, {"generation_config": config(temperature=0.25)})
    for text, part in zip(
        texts, ("top_k is 5", "do_sample is absent", "how many tokens", "end after [0, 3]", "0.25"), strict=True
    ):
        assert part in text, text
    # A row that may not end before its last token has the same tokens with a larger minimum.
    same = [{"max_new_tokens": 9, "min_new_tokens": 5}, {"max_new_tokens": 4, "min_new_tokens": 4}]
    check(model, [((ids,), {**call, "do_sample": False}) for call in same])


def test_arguments_of_single_rows_are_refused(model: Any) -> None:
    ids = prompts(1, 3, 1)
    for args, kwargs, error, text in (
        ((), {"inputs_embeds": torch.ones(1, 3, 16)}, FeatureError, "not NoneType"),
        ((ids.float(),), {}, FeatureError, r"shape \(1, 3\)"),
        ((ids[0],), {}, FeatureError, r"shape \(3,\)"),
        ((ids,), {"past_key_values": transformers.DynamicCache()}, FeatureError, "past_key_values"),
        ((ids,), {"stopping_criteria": [lambda *_: True]}, FeatureError, "stopping_criteria"),
        ((ids,), {"position_ids": ids}, FeatureError, "position_ids"),
        ((ids,), {"return_dict_in_generate": True}, FeatureError, "return_dict_in_generate"),
        ((ids,), {"attention_mask": torch.ones(1, 1, 3, 3)}, FeatureError, r"\(1, 1, 3, 3\)"),
        ((ids,), {"max_length": 3}, StateError, "3 tokens leaves no room"),
    ):
        with pytest.raises(error, match=text):
            request_of(model, model.generate, args, kwargs)
    with pytest.raises(FeatureError, match="no name"):
        request_of(model, lambda *args, **kwargs: None, (ids, 3), {})
