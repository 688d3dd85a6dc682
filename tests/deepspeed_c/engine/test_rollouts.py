"""Scripts of reinforcement learning whose text is written by another engine: OpenRLHF's manner of sending weights to it
and of keeping a moving average, and engines that take turns in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deepspeed_c
from deepspeed_c.zero import GatheredParameters
from tests.ranks import run_ranks
from tests.toys import llama
from tests.training import step

transformers = pytest.importorskip("transformers")

VOCAB = 41
CELLS = [(0, False), (2, False), (3, False), (3, True)]


def make_llama(seed: int = 2) -> Any:
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 64, "initializer_range": 0.3}
    return llama(seed, **sizes, pad_token_id=0, eos_token_id=None)


def make(stage: int, joint: bool, seed: int = 2, *, trains: bool = True) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "comm": {"local": "shm", "zero_copy_gather": joint},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 30},
        "hybrid_engine": {"enabled": trains},
    }
    if trains:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
    return deepspeed_c.initialize(model=make_llama(seed), config=config)[0]


def train(engine: Any, tokens: torch.Tensor) -> float:
    engine.train()
    return step(engine, input_ids=tokens, labels=tokens)


def write(model: Any, rank: int, n_tokens: int = 6) -> torch.Tensor:
    return model.generate(torch.tensor([[5, 3 + rank, 7]]), max_new_tokens=n_tokens, do_sample=False)


# -- OpenRLHF ------------------------------------------------------------------------------------------------------------------


def moving_average(model: Any, average: Any, beta: float, stage: int) -> None:
    """OpenRLHF's way: parameter by parameter, whole on all ranks, written by rank 0."""
    with torch.no_grad():
        for param, kept in zip(model.module.parameters(), average.module.parameters(), strict=True):
            with GatheredParameters([param, kept], modifier_rank=0, enabled=stage == 3):
                if stage != 3 or torch.distributed.get_rank() == 0:
                    kept.data.copy_((1 - beta) * param.data + beta * kept.data)


def send(model: Any, other: Any, stage: int) -> None:
    """Each weight on its own to the engine that writes text: whole on all ranks for the time of the broadcast."""
    for (name, param), target in zip(model.module.named_parameters(), other.parameters(), strict=True):
        with GatheredParameters([param], enabled=stage == 3):
            assert param.shape == target.shape, name
            target.data.copy_(param.data)


def openrlhf_body(rank: int, world: int, stage: int, joint: bool) -> Any:
    actor, average = make(stage, joint), make(stage, joint, trains=False)
    other, kept = make_llama().eval(), make_llama()  # the engine for text, and the average as plain torch has it
    tokens, losses = [], []
    for _ in range(3):
        send(actor, other, stage)
        text = write(other, rank)
        actor.eval()
        assert torch.equal(write(actor.module, rank), text)
        tokens.append(text.tolist())
        losses.append(train(actor, text))
        moving_average(actor, average, 0.75, stage)
        whole = actor.module_state_dict()
        with torch.no_grad():
            for name, param in kept.named_parameters():
                param.copy_(0.25 * whole[name] + 0.75 * param)
        found = average.module_state_dict()
        for name, param in kept.named_parameters():
            assert torch.equal(found[name], param), name
        average.eval()
        assert torch.equal(write(average.module, rank), write(kept.eval(), rank))
    actor.close()
    average.close()
    return tokens, losses


def test_weights_are_sent_and_averaged_as_openrlhf_does_it() -> None:
    first, *others = [run_ranks(2, openrlhf_body, stage, joint) for stage, joint in CELLS]
    assert len({str(tokens) for tokens in first[0][0]}) > 1, first
    for run in others:
        for (tokens, losses), (want_tokens, want_losses) in zip(run, first, strict=True):
            assert tokens == want_tokens
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(want_losses), rtol=1e-5, atol=0)


# -- engines that take turns in memory -----------------------------------------------------------------------------------------


def turns_body(rank: int, world: int, stage: int, takes_turns: bool) -> Any:
    """An actor and a critic train; a reference and a reward only judge, and have never been trained."""
    actor, critic = make(stage, False), make(stage, False, seed=3)
    reference, reward = make(stage, False, trains=False), make(stage, False, seed=4, trains=False)
    found = []
    for engine in (actor, critic):
        if takes_turns:
            engine.offload_states()
    for _ in range(3):
        with torch.no_grad():
            if takes_turns:
                actor.reload_states()
            actor.eval()
            text = write(actor.module, rank)
            judged = [engine.eval()(input_ids=text).logits.sum().item() for engine in (reference, reward)]
        losses = [train(actor, text)]
        if takes_turns:
            actor.offload_states()
            critic.reload_states()
        losses.append(train(critic, text))
        if takes_turns:
            critic.offload_states()
        found.append((text.tolist(), judged, losses))
    for engine in (actor, critic):
        if takes_turns:
            engine.reload_states()
    for engine in (actor, critic, reference, reward):
        engine.close()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_engines_that_take_turns_in_memory_train_as_without_turns(stage: int) -> None:
    runs = [run_ranks(2, turns_body, stage, takes_turns) for takes_turns in (True, False)]
    assert runs[0] == runs[1] and runs[0][0][0] != runs[0][0][1], runs
