"""Generation by a cut model: all ranks of a group get the same sequence, even with different random states and
prompts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.errors import DeepSpeedCError, RankMismatchError, StateError
from deepspeed_c.inject import cut_model
from tests.deepspeed_c.inject.families import feed, make
from tests.ranks import run_ranks

PRELOAD = "tests.deepspeed_c.inject.preload"
HOW = {"do_sample": {"do_sample": True}, "beams": {"do_sample": True, "num_beams": 3}, "greedy": {"do_sample": False}}


def tokens(model: torch.nn.Module, seed: int, how: str) -> list:
    torch.manual_seed(seed)
    return model.generate(feed("llama")["input_ids"][:, :4], max_new_tokens=6, **HOW[how]).tolist()


def sample(rank: int, world: int, apart: int) -> tuple[dict[str, Any], Any, Any]:
    cut = make("llama").eval()
    cut_model(cut, TensorParallel(), Collectives())
    found = {how: tokens(cut, 5 + apart * rank, how) for how in HOW}
    torch.manual_seed(5 + apart * rank)
    before = torch.get_rng_state()
    cut.generate(feed("llama")["input_ids"], max_new_tokens=3, do_sample=True)
    return found, bool(torch.equal(before, torch.get_rng_state())), torch.rand(3).tolist()


@pytest.mark.parametrize(("world", "apart"), [(2, 1), (3, 1), (3, 0)])
def test_all_ranks_draw_the_tokens_of_rank_0(world: int, apart: int) -> None:
    whole = make("llama").eval()
    expected = {how: tokens(whole, 5, how) for how in HOW}
    results = run_ranks(world, sample, apart, preload=PRELOAD)
    for rank, (found, is_same_state, numbers) in enumerate(results):
        assert found == expected, (rank, found, expected)
        # The random state of rank 0 advances as in one process. The other ranks get their own states back if states
        # differed before; equal states stay equal.
        assert is_same_state == bool(apart and rank), rank
        if not apart:
            assert numbers == results[0][2], (rank, numbers, results[0][2])


def ask(rank: int, world: int) -> dict[str, str]:
    cut = make("llama").eval()
    cut_model(cut, TensorParallel(), Collectives())
    ids = feed("llama")["input_ids"]
    calls = {
        "prompts": lambda: cut.generate(ids + rank, max_new_tokens=2, do_sample=False),
        "lengths": lambda: cut.generate(ids, max_new_tokens=2 + rank, do_sample=False),
        "attentions": lambda: cut(input_ids=ids, output_attentions=True),
        "attentions of the model inside": lambda: cut.model(input_ids=ids, output_attentions=True),
        "attentions of generate": lambda: cut.generate(
            ids, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True
        ),
        "an id past the vocabulary": lambda: cut(input_ids=torch.cat([ids[:, :-1], torch.tensor([[101], [3]])], 1)),
        "a far id": lambda: cut(input_ids=ids + 10**12),
        "a negative id": lambda: cut(input_ids=ids.clone().fill_(-1)),
        "a good call": lambda: cut(input_ids=ids),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "no error"
        except (DeepSpeedCError, IndexError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_what_one_process_refuses_or_ranks_cannot_do_together_is_refused_on_all() -> None:
    whole = make("llama").eval()
    with pytest.raises(IndexError):
        whole(input_ids=torch.tensor([[101, 3]]))
    for world in (2, 3):
        first, *others = run_ranks(world, ask, preload=PRELOAD)
        assert all(other == first for other in others), (first, others)
        for name in ("prompts", "lengths"):
            assert first[name].startswith(RankMismatchError.__name__) and "ranks 0 and 1" in first[name], first[name]
        assert "max_new_tokens" in first["lengths"] and "2" in first["lengths"] and "3" in first["lengths"]
        for name in ("attentions", "attentions of the model inside", "attentions of generate"):
            assert first[name].startswith(StateError.__name__) and "own heads" in first[name], first[name]
        assert "embed_tokens: id 101 is not in the vocabulary of 101" in first["an id past the vocabulary"], first
        assert (
            "IndexError" in first["a far id"] and "id -1 is not in the vocabulary of 101" in first["a negative id"]
        ), first
        assert first["a good call"] == "no error"


def few_words(rank: int, world: int) -> tuple[str, float]:
    """A table has fewer rows than there are ranks, so the last rank has no rows."""
    import transformers

    config = make("llama").config
    config.vocab_size = 3
    torch.manual_seed(2)
    whole, cut = (transformers.LlamaForCausalLM(config).eval() for _ in range(2))
    cut.load_state_dict(whole.state_dict())
    cut_model(cut, TensorParallel(), Collectives())
    ids = torch.tensor([[0, 1, 2]])
    error = (cut(input_ids=ids).logits - whole(input_ids=ids).logits).abs().max().item()
    try:
        cut(input_ids=ids + 1)
    except IndexError as wrong:
        return str(wrong), error
    return "no error", error


def test_a_rank_without_words_refuses_as_the_others_do() -> None:
    for text, error in run_ranks(4, few_words, preload=PRELOAD):
        assert "id 3 is not in the vocabulary of 3" in text and error < 1e-5, (text, error)
