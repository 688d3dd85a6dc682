"""Generation with experts over ranks: each rank has prompts of its own, and gets the tokens of one plain process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from deepspeed_c.errors import StateError
from tests.hf.expert_families import VOCAB, make, rows_of
from tests.hf.stack import on_ranks
from tests.training import config, engine_of, update

WAYS: dict[str, dict[str, Any]] = {
    "tokens": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 2},
    "samples": {"do_sample": True, "num_return_sequences": 2},
}
N_NEW = (3, 70, 20, 9)  # by rank


def prompts(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(3, VOCAB, (1 + rank, 4 + 3 * rank), generator=generator)


def generated(model: Any, rank: int, way: str) -> torch.Tensor:
    torch.manual_seed(rank)
    return model.generate(prompts(rank), max_new_tokens=N_NEW[rank], eos_token_id=None, **WAYS[way])


def engine_for(family: str, stage: int, ep: int, **zero: Any) -> Any:
    more = {"stage3_param_persistence_threshold": 0, **zero} if stage == 3 else {}
    section = {"enabled": True, "autoep_size": ep}
    return engine_of(make(family), config(stage, rows=2, lr=0.01, zero=more, expert_parallel=section))


def generate(rank: int, world: int, family: str, stage: int, way: str, zero: dict[str, Any]) -> Any:
    engine = engine_for(family, stage, 2, **zero)
    engine.eval()
    found = [generated(engine.module, rank, way) for _ in range(2)]
    engine.train()
    update(engine, engine(**rows_of(0, 0, rank)).loss)
    engine.destroy()
    assert torch.equal(*found)
    return found[0]


def generate_plainly(rank: int, world: int, family: str, way: str) -> list[torch.Tensor]:
    model = make(family).eval()
    return [generated(model, of, way) for of in range(len(N_NEW))]


@functools.cache
def plain(family: str, way: str) -> list[torch.Tensor]:
    return on_ranks(1, generate_plainly, family, way)[0]


@pytest.mark.parametrize(
    "family, stage, way, zero",
    [
        ("mixtral", 0, "tokens", {}),
        ("mixtral", 2, "samples", {}),
        ("mixtral", 3, "tokens", {}),
        ("mixtral", 3, "beams", {"stage3_max_live_parameters": 3000}),
        ("gpt_oss", 2, "beams", {}),
        ("gpt_oss", 3, "tokens", {"stage3_max_live_parameters": 3000}),
    ],
    ids=str,
)
def test_ranks_end_at_different_lengths(family: str, stage: int, way: str, zero: dict[str, Any]) -> None:
    for rank, found in enumerate(on_ranks(4, generate, family, stage, way, zero)):
        assert torch.equal(found, plain(family, way)[rank])


def refuse(rank: int, world: int, stage: int, odd: str) -> str:
    """The error of a call without rank 1. The next call has all ranks."""
    engine = engine_for("mixtral", stage, 2)
    engine.train(rank == 1 and odd == "training mode")
    mine = prompts(rank)[:0] if rank == 1 and odd == "no prompts" else prompts(rank)
    with pytest.raises(StateError) as caught:
        engine.module.generate(mine, max_new_tokens=4)
    engine.eval()
    found = engine.module.generate(prompts(rank), max_new_tokens=4, eos_token_id=None)
    assert found.shape[1] == prompts(rank).shape[1] + 4
    engine.destroy()
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("odd", ["no prompts", "training mode"])
def test_a_rank_that_does_not_generate_is_an_error_on_all(stage: int, odd: str) -> None:
    for rank, message in enumerate(on_ranks(2, refuse, stage, odd)):
        assert (odd if rank == 1 or odd == "no prompts" else "rank 1 has refused its prompts") in message
