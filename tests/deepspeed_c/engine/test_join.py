"""Join mode: generation at stage 3 with a model of more elements than ``stage3_max_live_parameters``. The tokens are
those of a plain model, ranks end alone without being told to, also with an exception, and the limit holds from the first
forward on. ``test_generate.py`` has models that are gathered once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.errors import StateError
from deepspeed_c.zero.weights.drivers.lease import Lease
from deepspeed_c.zero.weights.drivers.rounds import DONE, FORWARD, Rounds
from tests.deepspeed_c.engine.test_generate import (
    bits_of,
    chat,
    in_midst,
    make,
    make_llama,
    prompt_of,
    train,
    write,
)
from tests.deepspeed_c.zero.test_oracle import make_config
from tests.hosts import why_no_hosts
from tests.log_lines import LogLines
from tests.ranks import on_ranks, run_ranks
from tests.toys import twin_of
from tests.training import engine_of

transformers = pytest.importorskip("transformers")

LIMIT = 9000  # of some 17000 elements; the largest gather unit has about 3000


def make_large(**more: Any) -> Any:
    return make(3, False, stage3_max_live_parameters=LIMIT, stage3_prefetch_bucket_size=3000, **more)


def fail() -> None:
    raise ZeroDivisionError


# -- tokens, memory and training ---------------------------------------------------------------------------------------------


def turns_body(rank: int, world: int, generates: bool, more: dict[str, Any]) -> Any:
    losses = []
    with make_large(**more) as engine:
        fetcher = engine._fetcher
        for turn in range(4):
            if generates:
                twin = make_llama().eval() if turn == 0 else twin_of(engine, make_llama())
                if turn == 1:
                    engine.module.gradient_checkpointing_enable()
                engine.eval()
                n_tokens = (9, 2, 5)[(rank + turn) % 3]
                assert chat(engine.module, rank, n_tokens) == chat(twin, rank, n_tokens), f"turn {turn}"
                assert not fetcher.drivers.of(Lease).is_held and fetcher.stats.live_elems == 0
                # The first generation comes before any forward, so no order of use is known.
                assert fetcher.stats.max_live_elems <= LIMIT < sum(group.numel for group in fetcher.groups)
                got = write(engine.module, prompt_of(rank), n_tokens + 1, synced_gpus=True)
                assert torch.equal(got, write(twin, prompt_of(rank), n_tokens + 1))
                engine.train()
            losses.append(train(engine, rank, turn))
        return losses, bits_of(engine)


@pytest.mark.parametrize("world", [2, 3])
def test_tokens_are_those_of_a_plain_model_within_the_limit(world: int) -> None:
    runs = [run_ranks(world, turns_body, generates, {}) for generates in (True, False)]
    for (losses, weights), (other_losses, other_weights) in zip(*runs, strict=True):
        assert losses == other_losses
        for name, value in weights.items():
            assert torch.equal(value, other_weights[name]), name


@pytest.mark.limit(300)
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
def test_tokens_are_those_of_a_plain_model_with_second_shards() -> None:
    run_ranks(4, turns_body, True, {"local": "auto", "zero_hpz_partition_size": 2}, hosts=(0, 0, 1, 1))


def rounds_body(rank: int, world: int) -> list[str]:
    with LogLines() as log, make_large() as engine:
        twin = make_llama().eval()
        engine.eval()
        ledger, n_units = engine._comm.ledger, len(engine._fetcher.groups)
        none = torch.zeros(0, 5, dtype=torch.long)
        for turn in range(2):
            begin = ledger.last
            got = write(engine.module, none if rank == turn else prompt_of(rank), 4)
            assert got.shape == (0, 5) if rank == turn else torch.equal(got, write(twin, prompt_of(rank), 4))
            # One number for each forward and one at the end. The first forward announces each unit.
            n, least = ledger.last - begin, 4 * (n_units + 1) + 1
            assert n > least if turn == 0 else n == least, (turn, n)
    return [line for line in log.lines if "generation gathers" in line]


def test_one_number_is_exchanged_for_each_forward_and_ranks_may_have_no_prompts() -> None:
    lines, other = run_ranks(2, rounds_body)
    assert (
        len(lines) == 1 and "for each token" in lines[0] and "stage3_max_live_parameters (9000); set it to" in lines[0]
    )
    assert other == []


# -- exceptions --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["first", "later", "between", "arguments"])
@on_ranks(2)
def test_a_rank_that_raises_serves_the_others_first(rank: int, world: int, when: str) -> None:
    with make_large() as engine:
        if when != "first":
            train(engine, rank, 0)
        twin = twin_of(engine, make_llama())
        engine.eval()
        if when == "later":
            write(engine.module, prompt_of(rank), 2)
        for culprit in range(world):
            if rank != culprit:
                n_tokens = 4 + rank
                got = write(engine.module, prompt_of(rank), n_tokens)
                assert torch.equal(got, write(twin, prompt_of(rank), n_tokens))
            elif when == "arguments":
                with pytest.raises(ValueError, match="penalty"):
                    write(engine.module, prompt_of(rank), 4, repetition_penalty=-1.0)
            elif when == "between":
                with pytest.raises(ZeroDivisionError):
                    write(engine.module, prompt_of(rank), 4, **in_midst(fail))
            else:
                hook = engine.module.model.layers[1].mlp.register_forward_pre_hook(lambda *_: fail())
                with pytest.raises(ZeroDivisionError):
                    write(engine.module, prompt_of(rank), 4)
                hook.remove()
            assert engine._fetcher.stats.live_elems == 0
        assert engine._fetcher.stats.max_live_elems <= LIMIT
        engine.train()
        train(engine, rank, 1)


@on_ranks(2)
def test_a_rank_that_refuses_its_prompts_serves_the_others_first(rank: int, world: int) -> None:
    hybrid = {"hybrid_engine": {"enabled": True, "max_out_tokens": 8}}
    zero = {"zero_optimization": {"reduce_bucket_size": 3000, "stage3_max_live_parameters": LIMIT}}
    engine = deepspeed_c.initialize(model=make_llama(), config=make_config(3, "fp32", 1, {**zero, **hybrid}))[0]
    with engine:
        engine.eval()
        if rank == 0:
            with pytest.raises(StateError, match="prompt of 9 tokens"):
                write(engine.module, torch.ones(1, 9, dtype=torch.long), 3)
        else:
            assert torch.equal(write(engine.module, prompt_of(rank), 3), write(make_llama().eval(), prompt_of(rank), 3))


# -- other ways to generate --------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_ranks_may_call_a_different_number_of_times_within_synced_generation(rank: int, world: int) -> None:
    with make_large() as engine:
        twin = make_llama().eval()
        engine.eval()
        with engine.synced_generation():
            for n_tokens in range(1, 2 + 2 * rank):
                got = engine.generate(prompt_of(rank), max_new_tokens=n_tokens, synced=True, do_sample=False)
                assert torch.equal(got, twin.generate(prompt_of(rank), max_new_tokens=n_tokens, do_sample=False))
        assert engine._fetcher.stats.max_live_elems <= LIMIT


def t5() -> Any:
    torch.manual_seed(5)
    config = transformers.T5Config(
        vocab_size=61,
        d_model=24,
        d_kv=6,
        d_ff=40,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("is_learnt", [False, True])
@on_ranks(2)
def test_an_encoder_outside_of_the_forward(rank: int, world: int, is_learnt: bool) -> None:
    zero = {"zero_optimization": {"reduce_bucket_size": 1500, "stage3_max_live_parameters": 9000}}
    with deepspeed_c.initialize(model=t5(), config=make_config(3, "fp32", 1, zero))[0] as engine:
        twin = t5()
        engine.eval()
        if is_learnt:
            with torch.no_grad():
                engine(input_ids=prompt_of(rank), labels=prompt_of(rank))
        for turn in range(3):
            if rank == turn:
                assert write(engine.module, prompt_of(rank)[:0], 4).shape == (0, 5)
                continue
            n_tokens = 2 + 3 * rank
            assert torch.equal(write(engine.module, prompt_of(rank), n_tokens), write(twin, prompt_of(rank), n_tokens))
        assert engine._fetcher.stats.max_live_elems <= 9000


# -- any sequence of forwards ------------------------------------------------------------------------------------------------

WIDTH, N_LAYERS = 9, 7


class Paths(nn.Module):
    """Runs its layers in any order. The root has a parameter of its own, and one layer reads another one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(N_LAYERS))

    def forward(self, x: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        for i in path:
            if i < 0:
                raise ZeroDivisionError
            x = torch.tanh(self.layers[i](x) * self.scale)
            if i == 3:
                x = nn.functional.linear(x, self.layers[5].weight)
        return x

    @torch.no_grad()
    def generate(self, x: torch.Tensor, paths: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        found = []
        for path in paths:
            if 6 in path:  # outside of the forward
                x = self.layers[6](x)
            try:
                x = self(x, path)
            except ZeroDivisionError:
                if len(path) % 2:
                    raise
            found.append(x)
        return found


def paths_of(draw: random.Random) -> list[list[int]]:
    """Mostly one order of use, as in real models, and sometimes another one, or an exception."""
    paths = []
    for _ in range(draw.choice((0, 1, 2, 5))):
        path = list(range(N_LAYERS - 1))
        if draw.random() < 0.4:
            path = [draw.randrange(N_LAYERS) for _ in range(draw.randrange(9))]
        if draw.random() < 0.15:
            path.insert(draw.randrange(len(path) + 1), -1)
        paths.append(path)
    return paths


def outcome(model: Any, x: torch.Tensor, paths: Sequence[Sequence[int]]) -> Any:
    try:
        return torch.stack([x, *model.generate(x, paths)])
    except ZeroDivisionError:
        return "raised"


def paths_body(rank: int, world: int) -> int:
    torch.manual_seed(3)
    zero = {
        "reduce_bucket_size": 60, "stage3_prefetch_bucket_size": 200, "stage3_max_live_parameters": 450,
        "stage3_param_persistence_threshold": 0,
    }  # fmt: skip
    model = Paths()
    torch.manual_seed(3)
    plain = Paths()
    draw, n_raised = random.Random(100 + rank), 0
    with engine_of(model, make_config(3, "fp32", 1, {"zero_optimization": zero})) as engine:
        engine.eval()
        for turn in range(60):
            x, paths = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(turn)), paths_of(draw)
            got, want = outcome(engine, x, paths), outcome(plain, x, paths)
            if isinstance(want, str):
                assert got == want, turn
                n_raised += 1
            else:
                assert torch.equal(got, want), (turn, paths)
            assert engine._fetcher.stats.live_elems == 0
    return n_raised


@pytest.mark.parametrize("world", [2, 3])
def test_forwards_of_any_order_and_number(world: int) -> None:
    assert min(run_ranks(world, paths_body)) > 3


# -- the rounds --------------------------------------------------------------------------------------------------------------


class Told:
    """Rank 0 of a group of three, with the numbers of all ranks given."""

    rank, world_size = 0, 3

    def __init__(self) -> None:
        self.events: list[int] = []

    def sum_numbers(self, numbers: list[float], *, label: str) -> list[float]:
        assert numbers == [float(self.events[0]), 0.0, 0.0]
        return [float(event) for event in self.events]


def test_rounds() -> None:
    told = Told()
    join = Rounds(told, 4)  # type: ignore[arg-type]

    def meet(*events: int) -> tuple[list[int], bool, bool]:
        told.events = list(events)
        return tuple(join.meet(events[0]))  # type: ignore[return-value]

    assert meet(DONE, DONE, DONE) == ([], False, True)
    assert meet(DONE, FORWARD, FORWARD) == ([], False, False)  # there is no plan: on demand; rank 1 is followed
    assert meet(DONE, 2, 0) == ([0, 2], False, False)
    assert meet(DONE, 2, FORWARD) == ([2], False, False)  # one unit twice is one step
    assert meet(DONE, 0, 3) == ([0, 3], False, False) and join.steps is None
    assert meet(DONE, FORWARD, 1) == ([1], False, False) and join.steps == [2, 0]  # rank 2 is on demand: rank 1 waits
    assert meet(DONE, FORWARD, FORWARD) == ([], True, False)
    assert meet(DONE, join.missing(3), DONE) == ([3], False, False) and join.steps is None
    assert meet(FORWARD, DONE, DONE) == ([], False, False)
    assert meet(DONE, DONE, DONE) == ([], False, True) and join.steps is None  # no unit was used
