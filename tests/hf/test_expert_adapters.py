"""A part of a mixture trains, with experts over ranks: adapters of peft, experts alone, or all but the experts.

The reference is the same model in one plain process, with the batches of all ranks.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hf.expert_families import VOCAB, make
from tests.hf.stack import on_ranks
from tests.training import config, engine_of, update

ROWS, RATE, STEPS = 8, 0.01, 5
FAMILIES = ("mixtral", "gpt_oss", "qwen3_moe")
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
OVER_RANKS = [(4, 2), (4, 4)]  # (ranks, autoep_size)


def adapted(family: str) -> Any:
    """Adapters on attention and on both stacks of experts, all different from 0."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"], target_parameters=STACKS)
    model = get_peft_model(make(family), settings)
    generator = torch.Generator().manual_seed(5)
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = torch.randn(param.shape, generator=generator) * 0.2
    return model


def model_of(family: str, part: str) -> Any:
    """A model. Only ``part`` trains."""
    if part == "adapters":
        return adapted(family)
    model = make(family)
    for name, param in model.named_parameters():
        param.requires_grad_((".experts." in name) == (part == "experts"))
    return model


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (ROWS, 9), generator=torch.Generator().manual_seed(step))


def settings_of(world: int, ep: int, stage: int, optimizer: str = "SGD") -> dict[str, Any]:
    section = {"expert_parallel": {"enabled": True, "autoep_size": ep}} if ep else {}
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return config(stage, optimizer, rows=ROWS // world, lr=RATE, zero=zero, gradient_clipping=0.0, **section)


def steps(engine: Any, rank: int, world: int, numbers: range) -> list[float]:
    """The losses of this rank."""
    found = []
    for number in numbers:
        ids = tokens(number).chunk(world)[rank]
        found.append(update(engine, engine(input_ids=ids, labels=ids).loss))
    return found


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    """The weights with all experts. Collective."""
    return {name: value.clone() for name, value in engine.module_state_dict().items()}


def train(rank: int, world: int, family: str, part: str, ep: int, stage: int, recomputes: bool) -> Any:
    model = model_of(family, part).train()
    if recomputes:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine = engine_of(model, settings_of(world, ep, stage))
    losses = steps(engine, rank, world, range(STEPS))
    found = losses, state_of(engine)
    engine.destroy()
    return found


def train_plainly(rank: int, world: int, family: str, part: str) -> Any:
    """(weights at first, losses of each step's rows, weights at last)."""
    model = model_of(family, part).train()
    first = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=RATE)
    losses = []
    for step in range(STEPS):
        each = [model(input_ids=ids, labels=ids).loss for ids in tokens(step).chunk(4)]
        losses.append(torch.stack(each).detach())
        optimizer.zero_grad()
        torch.stack(each).mean().backward()
        optimizer.step()
    return first, torch.stack(losses), model.state_dict()


@functools.cache
def plain(family: str, part: str) -> Any:
    return on_ranks(1, train_plainly, family, part)[0]


def assert_trains(world: int, family: str, part: str, ep: int, stage: int, *, recomputes: bool = False) -> None:
    first, losses, last = plain(family, part)
    moved = {name: (last[name] - value).abs().max().item() for name, value in first.items()}
    assert max(n for name, n in moved.items() if ".experts." in name) > 1e-3 or part == "rest"
    found = on_ranks(world, train, family, part, ep, stage, recomputes)
    for rank, (mine, weights) in enumerate(found):
        torch.testing.assert_close(torch.tensor(mine), losses.chunk(world, 1)[rank].mean(1), rtol=1e-5, atol=0)
        if stage == 3 and rank > 0:
            continue
        assert weights.keys() == last.keys()
        off = {name: (weights[name] - value).abs().max().item() for name, value in last.items()}
        assert max(off.values()) < 1e-5, max(off.items(), key=lambda item: item[1])
        assert all(torch.equal(weights[name], first[name]) for name in first if not moved[name])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world, ep", OVER_RANKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_on_experts_over_ranks(family: str, world: int, ep: int, stage: int) -> None:
    assert_trains(world, family, "adapters", ep, stage)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_on_experts_of_one_rank(family: str, stage: int) -> None:
    """peft makes a parametrization of the stack within each forward; stage 3 gathers the stack for it."""
    assert_trains(2, family, "adapters", 0, stage)
    assert_trains(2, family, "adapters", 1, stage)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_adapters_with_recomputed_layers(family: str, stage: int) -> None:
    assert_trains(4, family, "adapters", 4, stage, recomputes=True)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("part", ["experts", "rest"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_alone_or_all_but_experts(family: str, part: str, stage: int) -> None:
    assert_trains(4, family, part, 2, stage)
    assert_trains(4, family, part, 4, stage)


def save_adapters(rank: int, world: int, folder: str, ep: int, stage: int) -> torch.Tensor:
    """Saves trained adapters. Returns logits."""
    engine = engine_of(adapted("gpt_oss").train(), settings_of(world, ep, stage))
    steps(engine, rank, world, range(2))
    given = {"state_dict": engine._zero3_consolidated_16bit_state_dict()} if stage == 3 else {}
    if stage < 3 or rank == 0:
        engine.module.save_pretrained(folder, **given)
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=tokens(9)).logits
        if stage < 3:
            engine.module.merge_adapter()
            torch.testing.assert_close(engine(input_ids=tokens(9)).logits, logits, rtol=0, atol=1e-4)
    engine.destroy()
    return logits


def load_adapters(rank: int, world: int, folder: str) -> torch.Tensor:
    from peft import PeftModel

    model = PeftModel.from_pretrained(make("gpt_oss"), folder).eval()
    with torch.no_grad():
        return model(input_ids=tokens(9)).logits


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world, ep", [(2, 2), (4, 4)])
def test_saved_adapters_load_into_plain_peft(tmp_path: Path, world: int, ep: int, stage: int) -> None:
    found = on_ranks(world, save_adapters, str(tmp_path), ep, stage)
    (want,) = on_ranks(1, load_adapters, str(tmp_path))
    for logits in found:
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-5)


def checkpoint(rank: int, world: int, folder: str, ep: int, stage: int, loads: bool) -> dict[str, torch.Tensor]:
    """The weights after two steps, saved or loaded with their moments, and two more."""
    engine = engine_of(adapted("mixtral").train(), settings_of(world, ep, stage, "AdamW"))
    if loads:
        engine.load_checkpoint(folder)
    else:
        steps(engine, rank, world, range(2))
        engine.save_checkpoint(folder)
    steps(engine, rank, world, range(2, 4))
    found = state_of(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_of_adapters_loads_at_other_sizes(tmp_path: Path, stage: int) -> None:
    want = on_ranks(2, checkpoint, str(tmp_path), 2, stage, False)[0]
    for world, ep in [(2, 1), (4, 4), (4, 2), (2, 2)]:
        found = on_ranks(world, checkpoint, str(tmp_path), ep, stage, True)[0]
        for name, value in want.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=f"{world} {ep} {name}")
