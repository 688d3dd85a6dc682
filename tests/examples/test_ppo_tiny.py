"""examples/ppo_tiny.py on two ranks: the reward rises, in the same way at each stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from ppo_tiny import FLOOR, GAMMA, LAMBDA, advantages_of, likelihoods  # it needs transformers

from tests import fresh

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "ppo_tiny.py"


def rewards_of(tmp_path: Path, stage: int, n_rounds: int, *more: str) -> list[float]:
    output = tmp_path / "rewards.json"
    command = [SCRIPT, "--stage", str(stage), "--rounds", str(n_rounds), "--output", output, *more]
    done = fresh.run_ranks_of(2, command, cwd=tmp_path, preload="tests.deepspeed_c.inject.preload", is_told=True)
    said = "".join(rank.stdout + rank.stderr for rank in done)
    assert all(rank.returncode == 0 for rank in done), said
    assert "E2E latency=" in said or n_rounds < 20
    found = json.loads(output.read_text())
    assert len(found) == n_rounds
    return found


def test_the_reward_rises_in_the_same_way_at_each_stage(tmp_path):
    found = {0: rewards_of(tmp_path, 0, 5), 2: rewards_of(tmp_path, 2, 5), 3: rewards_of(tmp_path, 3, 40)}
    print(found)
    for stage in (2, 3):
        # Sums of gradients may be in another order. Later, a byte that is drawn otherwise changes all that follow.
        assert found[stage][:5] == pytest.approx(found[0], abs=1e-3)
    # Bytes at random have about the floor of 12 bits.
    assert found[3][0] < -11 and found[3][-1] > -6, found[3]


@pytest.mark.limit(300, reason="two ranks train and generate: 36 s on a fast machine")
def test_with_lora_on_ranks_that_generate_together_and_states_on_the_host(tmp_path):
    pytest.importorskip("peft")
    together = ("--lora", "8", "--inference_tp_size", "2")
    found = {
        0: rewards_of(tmp_path, 0, 5, *together),
        2: rewards_of(tmp_path, 2, 5, *together, "--offload"),
        3: rewards_of(tmp_path, 3, 40, *together, "--offload"),
    }
    print(found)
    for stage in (2, 3):
        assert found[stage][:5] == pytest.approx(found[0], abs=1e-3)
    assert found[3][0] < -11 and found[3][-1] > -6, found[3]


def test_advantages_are_the_discounted_sums_of_their_definition():
    random = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(3, 7, generator=random, dtype=torch.float64) for _ in range(2))
    after = torch.cat([values, torch.zeros(3, 1, dtype=torch.float64)], 1)
    deltas = [rewards[:, i] + GAMMA * after[:, i + 1] - values[:, i] for i in range(7)]
    want = [sum((GAMMA * LAMBDA) ** k * deltas[i + k] for k in range(7 - i)) for i in range(7)]
    torch.testing.assert_close(advantages_of(rewards, values), torch.stack(want, 1))
    assert advantages_of(rewards[:, :0], values[:, :0]).shape == (3, 0)


def test_likelihoods_are_those_of_pairs():
    found = likelihoods(torch.tensor([1, 2, 1, 2, 1, 3]))
    assert found.shape == (256, 256) and found[2, 1] == 0 and abs(found[1, 3].item() + 1.58496) < 1e-4
    assert found[9, 9] == FLOOR and found[3, 1] == FLOOR
