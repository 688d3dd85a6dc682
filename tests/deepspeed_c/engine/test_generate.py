"""Generation by an engine in training, with a Llama of transformers: at every stage the tokens are those of a plain
model with the same weights, ranks end alone, nothing is gathered for a token, and training goes on with the same bits as
without generation."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch

import deepspeed_c
from deepspeed_c.errors import StateError
from deepspeed_c.zero import GatheredParameters
from deepspeed_c.zero.weights.drivers.lease import Lease
from tests import training
from tests.ranks import on_ranks, run_ranks
from tests.toys import llama, twin_of
from tests.waits import joined

transformers = pytest.importorskip("transformers")

VOCAB = 61
# The stage, and whether weights lie in joint memory.
CELLS = [(0, False), (2, False), (3, False), (3, True)]
SHARDED = [(3, False), (3, True)]


def make_llama() -> Any:
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 3, "max_position_embeddings": 128, "initializer_range": 0.3}
    return llama(5, **sizes, pad_token_id=0)


def make(stage: int, joint: bool, local: str = "shm", **zero: Any) -> Any:
    config = training.config(
        stage,
        "AdamW",
        zero={"reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 30, **zero},
        lr=1e-2,
        comm={"local": local, "zero_copy_gather": joint},
    )
    return deepspeed_c.initialize(model=make_llama(), config=config)[0]


def train(engine: Any, rank: int, step: int) -> float:
    torch.manual_seed(100 * step + rank)
    tokens = torch.randint(1, VOCAB, (1, 11))
    return training.step(engine, input_ids=tokens, labels=tokens)


def prompt_of(rank: int) -> torch.Tensor:
    return torch.tensor([[3 + rank, 7, 11, 2, 5]])


def write(model: Any, prompt: torch.Tensor, n_tokens: int, **more: Any) -> Any:
    """Exactly ``n_tokens`` greedy tokens after the prompt."""
    return model.generate(prompt, max_new_tokens=n_tokens, min_new_tokens=n_tokens, do_sample=False, **more)


def chat(model: Any, rank: int, n_tokens: int) -> list[list[int]]:
    """Two turns; the second one goes on from the cache of the first (DeepSpeed's issue 5212)."""
    first = write(model, prompt_of(rank), n_tokens, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, torch.tensor([[9, 4]])], 1)
    second = write(model, longer, n_tokens + 1, past_key_values=first.past_key_values)
    return [first.sequences[0].tolist(), second[0].tolist()]


def bits_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.module_state_dict().items()}


class Calls(transformers.StoppingCriteria):
    """Calls a function once, in the middle of a generation."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __call__(self, tokens: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        if tokens.shape[1] == 7:
            self._call()
        return torch.zeros(len(tokens), dtype=torch.bool)


def in_midst(call: Any) -> dict[str, Any]:
    return {"stopping_criteria": transformers.StoppingCriteriaList([Calls(call)])}


def counts(engine: Any) -> tuple[int, int, int]:
    """Gathers, passes, and collectives of the ranks that share the weights."""
    stats = engine._fetcher.stats
    return stats.n_gathers, stats.n_passes, engine._comm.ledger.last


# -- the same tokens, the same training ----------------------------------------------------------------------------------------


def turns_body(rank: int, world: int, stage: int, joint: bool, generates: bool) -> Any:
    losses = []
    with make(stage, joint) as engine:
        for turn in range(3):
            losses.append(train(engine, rank, turn))
            if not generates:
                continue
            twin = twin_of(engine, make_llama())
            n_tokens = 9 if (rank + turn) % 2 else 2
            engine.eval()
            before = counts(engine) if stage == 3 else None
            got = chat(engine.module, rank, n_tokens)
            if stage == 3:
                found = [now - then for now, then in zip(counts(engine), before, strict=True)]
                n_units = len(engine._fetcher.groups)
                assert n_units > 3
                # In joint memory each of the two calls looks at the units where they lie. Otherwise they are gathered
                # once for both, whatever the number of tokens, after the ranks have agreed to it.
                assert found == ([2 * n_units, 0, 0] if joint else [n_units, 0, n_units + 1]), found
            assert got == chat(twin, rank, n_tokens), f"turn {turn}"
            engine.train()
            assert engine.module.training and (stage < 3 or engine._fetcher.stats.live_elems == 0)
        return losses, bits_of(engine)


@pytest.mark.parametrize("stage, joint", CELLS)
def test_tokens_are_those_of_a_plain_model_and_training_keeps_its_bits(stage: int, joint: bool) -> None:
    runs = [run_ranks(2, turns_body, stage, joint, generates) for generates in (True, False)]
    for (losses, weights), (other_losses, other_weights) in zip(*runs, strict=True):
        assert losses == other_losses
        for name, value in weights.items():
            assert torch.equal(value, other_weights[name]), name


# -- ranks end alone -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage, joint", CELLS)
@on_ranks(2)
def test_ranks_end_alone(rank: int, world: int, stage: int, joint: bool) -> None:
    with make(stage, joint) as engine:
        train(engine, rank, 0)
        twin = twin_of(engine, make_llama())
        engine.eval()
        # A rank without prompts, one that asks for ranks in step, and another number of calls on each rank.
        none = torch.zeros(0, 5, dtype=torch.long)
        assert write(engine.module, none if rank else prompt_of(0), 4).shape == ((0, 5) if rank else (1, 9))
        for n_tokens in range(1, 3 + 2 * rank):
            got = write(engine.module, prompt_of(rank), n_tokens, synced_gpus=True)
            assert torch.equal(got, write(twin, prompt_of(rank), n_tokens))
            got = engine.generate(prompt_of(rank), None, None, None, None, True, max_new_tokens=n_tokens)
            assert got.shape[1] <= 5 + n_tokens
        if joint and rank == 0:  # a rank for itself
            write(engine.module, prompt_of(rank), 3)
        with torch.no_grad():  # all ranks evaluate, with the lease or without
            engine(input_ids=prompt_of(0))
        engine.train()
        train(engine, rank, 1)


@on_ranks(2)
def test_a_model_beyond_the_limit_is_gathered_for_each_token(rank: int, world: int) -> None:
    with make(3, False, stage3_max_live_parameters=9000) as engine:
        twin = twin_of(engine, make_llama())
        engine.eval()
        passes = engine._fetcher.stats.n_passes
        assert torch.equal(write(engine.module, prompt_of(rank), 5), write(twin, prompt_of(rank), 5))
        assert engine._fetcher.stats.n_passes == passes + 5 and not engine._fetcher.drivers.of(Lease).is_held
        got = write(engine, prompt_of(rank), 2 + rank, synced=True)
        assert torch.equal(got, write(twin, prompt_of(rank), 2 + rank))
        assert engine._fetcher.stats.live_elems <= 9000


# -- ends of a lease -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage, joint", CELLS[1:])
@on_ranks(2)
def test_a_lease_ends_with_whatever_changes_weights(rank: int, world: int, stage: int, joint: bool) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with make(stage, joint) as engine:
        losses, fetcher = [], engine._fetcher
        for step in range(4):
            losses.append(train(engine, rank, step))
            engine.eval()
            if step == 0 and rank == 0:
                with pytest.raises(ZeroDivisionError):
                    write(engine.module, prompt_of(rank), 5, **in_midst(fail))
            write(engine.module, prompt_of(rank), 3)
            assert fetcher is None or fetcher.drivers.of(Lease).is_held is not joint
            if step == 1:
                engine.module.train()  # the engine is not told: the next training forward ends the lease
                engine.module(input_ids=prompt_of(rank))
                assert fetcher is None or not fetcher.drivers.of(Lease).is_held
            elif step == 2:
                engine.empty_partition_cache()
                assert fetcher is None or not fetcher.drivers.of(Lease).is_held
            elif step == 3:
                engine.load_module_state_dict(engine.module_state_dict())
                assert fetcher is None or not fetcher.drivers.of(Lease).is_held
            if step != 1:
                engine.train()
        # A window that generates between its backward and its step.
        loss = engine(input_ids=prompt_of(rank), labels=prompt_of(rank)).loss
        engine.backward(loss)
        engine.eval()
        write(engine.module, prompt_of(rank), 3)
        engine.step()
        assert engine.was_step_applied() and (fetcher is None or fetcher.stats.live_elems == 0)
        engine.eval()
        write(engine.module, prompt_of(rank), 3)
    assert "generate" not in vars(engine.module)
    with make(stage, joint) as engine:
        assert losses == [train(engine, rank, step) for step in range(4)]


def written_body(rank: int, world: int, joint: bool, how: str) -> None:
    with make(3, joint) as engine:
        weight = engine.module.model.layers[1].mlp.up_proj.weight
        want = bits_of(engine)

        def edit() -> None:
            with torch.no_grad():
                if how == "add":
                    weight.add_(1.0)
                elif how == "data":
                    weight.data[3, 5] = 7.0
                else:
                    weight.data = torch.ones_like(weight.data)

        engine.eval()
        if joint:
            with pytest.raises(StateError, match="written to during generation"):
                write(engine.module, prompt_of(rank), 4, **in_midst(edit))
        else:
            write(engine.module, prompt_of(rank), 4)
            edit()
            with pytest.raises(StateError, match="written to during generation"):
                engine.train()
            engine.train()
        for name, value in bits_of(engine).items():
            assert torch.equal(value, want[name]), name
        train(engine, rank, 0)


@pytest.mark.parametrize("how", ["add", "data", "replace"])
@pytest.mark.parametrize("stage, joint", SHARDED)
def test_weights_written_by_hand_are_found_and_restored(stage: int, joint: bool, how: str) -> None:
    run_ranks(2, written_body, joint, how)


def edited_body(rank: int, world: int, joint: bool) -> None:
    with make(3, joint) as engine:
        weight = engine.module.lm_head.weight
        engine.eval()
        before = write(engine.module, prompt_of(rank), 6)
        with GatheredParameters([weight], modifier_rank=0), torch.no_grad():
            weight.neg_()
        got, twin = write(engine.module, prompt_of(rank), 6), twin_of(engine, make_llama())
        assert torch.equal(got, write(twin, prompt_of(rank), 6)) and not torch.equal(got, before)
        engine.train()
        train(engine, rank, 0)


@pytest.mark.parametrize("stage, joint", SHARDED)
def test_announced_edits_are_seen_by_the_next_generation(stage: int, joint: bool) -> None:
    run_ranks(2, edited_body, joint)


# -- what is refused -----------------------------------------------------------------------------------------------------------


def refused_body(rank: int, world: int, stage: int, joint: bool) -> None:
    with make(stage, joint) as engine:
        twin = twin_of(engine, make_llama())
        loss = engine(input_ids=prompt_of(rank), labels=prompt_of(rank)).loss
        engine.backward(loss)
        count = engine._comm.ledger.last
        for model in (engine, engine.module):
            with pytest.raises(StateError, match="training mode"):
                write(model, prompt_of(rank), 3)
        assert engine._comm.ledger.last == count + (2 if stage == 3 and not joint else 0)  # each rank tells the others
        with torch.no_grad():
            got = write(engine.module, prompt_of(rank), 3)
        assert torch.equal(got, write(twin, prompt_of(rank), 3))
        found: list[BaseException] = []

        def step_in_a_thread() -> None:
            def step() -> None:
                try:
                    engine.step()
                except StateError as error:
                    found.append(error)

            thread = threading.Thread(target=step)
            thread.start()
            joined(thread)

        engine.eval()
        got = write(engine.module, prompt_of(rank), 6, **in_midst(step_in_a_thread))
        assert torch.equal(got, write(twin, prompt_of(rank), 6))
        assert "another thread generates" in str(found[0])
        engine.train()
        engine.step()
        assert engine.was_step_applied()


@pytest.mark.parametrize("stage, joint", CELLS)
def test_training_mode_and_steps_of_other_threads_are_refused(stage: int, joint: bool) -> None:
    run_ranks(2, refused_body, stage, joint)


# -- copies --------------------------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_a_copy_of_the_model_generates_with_its_own_weights(rank: int, world: int) -> None:
    with make(2, False) as engine:
        engine.eval()
        want = write(engine.module, prompt_of(rank), 4)
        for twin in (copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))):
            assert torch.equal(write(twin, prompt_of(rank), 4), want)
            with torch.no_grad():
                twin.lm_head.weight.neg_()
            assert not torch.equal(write(twin, prompt_of(rank), 4), want)
        assert torch.equal(write(engine.module, prompt_of(rank), 4), want)
