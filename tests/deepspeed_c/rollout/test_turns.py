"""Engines of a reinforcement learner that take turns in memory."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from deepspeed_c.errors import ConfigError, StateError
from deepspeed_c.rollout import MemoryTurns
from tests.deepspeed_c.engine.test_rollouts import make, train, write
from tests.ranks import run_ranks

pytest.importorskip("transformers")


def memory_of(engine: Any) -> int:
    """Bytes of the storages of states, sums of gradients and sharded weights that have memory."""
    tensors: list[torch.Tensor] = []
    for unit in (*engine._layout.trained, *engine._layout.frozen):
        tensors += engine._offloaded._optimizer.sums_of(unit)
        for home in (unit.states, unit.weights):
            tensors += [tagged.tensor for bucket in range(unit.n_buckets) for tagged in home.in_memory(bucket)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def body(rank: int, world: int, stage: int, takes_turns: bool) -> Any:
    actor, critic = make(stage, False), make(stage, False, seed=3)
    judges = {"reference": make(stage, False, trains=False), "reward": make(stage, False, seed=4, trains=False)}
    turns = MemoryTurns({"actor": actor, "critic": critic, **judges}) if takes_turns else None
    engines = {"actor": actor, "critic": critic, **judges}

    def of(*names: str) -> Any:
        return turns.of(*names) if turns else nullcontext()

    found = []
    for _ in range(3):
        with of("actor"), torch.no_grad():
            actor.eval()
            text = write(actor.module, rank)
        with of(*judges), torch.no_grad():
            judged = [engine.eval()(input_ids=text).logits.sum().item() for engine in judges.values()]
        with of("actor"):
            losses = [train(actor, text)]
            if turns and actor.movable_bytes():
                with pytest.raises(StateError):
                    critic(input_ids=text)
        with of("critic"):
            losses.append(train(critic, text))
        found.append((text.tolist(), judged, losses))
    if turns:
        order = [["actor"], ["reference", "reward"], ["actor"], ["critic"]]
        costs = turns.plan(order)
        for cost in costs:
            with turns.of(*cost.names):
                found_bytes = {name: memory_of(engine) for name, engine in engines.items()}
                assert sum(found_bytes.values()) == cost.resident, (cost, found_bytes)
        assert costs[0].moved == costs[0].resident + costs[3].resident
        assert costs[2].moved == costs[1].resident + costs[0].resident
        assert all(cost.lease == (0 if stage < 3 else _whole(engines, cost.names)) for cost in costs), costs
        with pytest.raises(ConfigError, match="limit is 10"):
            turns.plan(order, limit_bytes=10)
        for wrong in (lambda: turns.plan([["actr"]]), lambda: turns.of("actr").__enter__()):
            with pytest.raises(ConfigError, match="actr.*\n.*actor"):
                wrong()
        with pytest.raises(ConfigError, match="actor and again are one engine|again and actor are one engine"):
            MemoryTurns({"actor": actor, "again": actor})
        turns.all()
    for engine in engines.values():
        assert not engine.kinds_away
        engine.close()
    return found


def _whole(engines: dict[str, Any], names: tuple[str, ...]) -> int:
    groups = [group for name in names for group in engines[name]._fetcher.groups]
    return sum(group.numel * group.unit.dtype.itemsize for group in groups)


@pytest.mark.parametrize("stage", [2, 3])
def test_turns_change_no_bit_and_cost_what_the_plan_says(stage: int) -> None:
    with_turns, without = (run_ranks(2, body, stage, takes_turns) for takes_turns in (True, False))
    assert with_turns == without
    assert all(math.isfinite(loss) for _, _, losses in with_turns[0] for loss in losses)
