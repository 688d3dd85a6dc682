"""Routers of mixtures with their experts over ranks: biases for an even load, replayed choices, and ranks that hold parts
of the other layers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_c.errors import ConfigError, ModelError, RoutingError, StateError
from deepspeed_c.moe.replay import record_routing, replay_routing
from tests.hf.expert_families import FAMILIES, N_CHOSEN, N_EXPERTS, assert_equal_tensors, make, rows_of
from tests.hf.stack import on_ranks
from tests.training import config, engine_of, update

LEARNING_RATE, COEFF, STEPS = 0.05, 0.01, 3
EXPERTS = "model.layers.1.mlp.experts"


def settings(stage: int, n_ranks: int, section: dict[str, Any], **changes: Any) -> dict[str, Any]:
    section = {"enabled": True, "autoep_size": n_ranks, **section}
    given = {"lr": LEARNING_RATE, "gradient_clipping": 0, "rows": 2, "zero": {"stage3_param_persistence_threshold": 0}}
    return config(stage, "SGD", **{**given, "expert_parallel": section, **changes})


def bias_of(model: torch.nn.Module) -> torch.Tensor:
    return model.model.layers[1].mlp.gate.e_score_correction_bias


def balanced_body(
    rank: int, world: int, cases: list[tuple[int, int, bool, dict[str, Any]]], folder: str
) -> list[dict[str, Any]]:
    found = []
    for i, (stage, n_ranks, checkpoints, more) in enumerate(cases):
        model = make("deepseek_v3")
        if checkpoints:
            model.gradient_checkpointing_enable()
        given = settings(stage, n_ranks, {"load_balance_coeff": COEFF}, accumulate=2, **more)
        with engine_of(model, given) as engine:
            biases, losses = [], []
            for step in range(STEPS):
                losses.append([update(engine, engine(**rows_of(step, micro, rank)).loss) for micro in range(2)])
                biases.append(bias_of(engine.module).clone())
            engine.eval()
            engine(**rows_of(50, 0, rank))  # evaluation counts for no bias
            engine.save_checkpoint(f"{folder}/{i}")
            with torch.no_grad():
                bias_of(engine.module).zero_()
            engine.load_checkpoint(f"{folder}/{i}")
            found.append({"losses": losses, "biases": biases, "loaded": bias_of(engine.module).clone()})
    return found


def balanced_alone_body(rank: int, world: int, n_ranks: int) -> dict[str, Any]:
    """The rule by hand: counts of all ranks and micro-batches, from the indices that the router returns."""
    model, counts = make("deepseek_v3"), torch.zeros(N_EXPERTS)
    gate = model.model.layers[1].mlp.gate

    def count(module: torch.nn.Module, args: Any, output: tuple) -> None:
        counts.add_(output[2].flatten().bincount(minlength=N_EXPERTS))

    gate.register_forward_hook(count)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses, biases = [], []
    for step in range(STEPS):
        counts.zero_()
        of_step = [[model(**rows_of(step, micro, each)).loss for micro in range(2)] for each in range(n_ranks)]
        (sum(map(sum, of_step)) / (2 * n_ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            bias_of(model).add_(torch.sign(counts.mean() - counts), alpha=COEFF)
        losses.append([[loss.item() for loss in of_rank] for of_rank in of_step])
        biases.append(bias_of(model).clone())
    return {"losses": losses, "biases": biases}


@functools.cache
def balanced_alone() -> dict[str, Any]:
    return on_ranks(1, balanced_alone_body, 2)[0]


def test_biases_follow_the_loads_of_all_ranks(tmp_path: Path) -> None:
    cases = [(0, 2, False, {}), (1, 1, True, {}), (2, 2, True, {}), (3, 2, False, {}), (3, 1, True, {})]
    expected = balanced_alone()
    for rank, of_rank in enumerate(on_ranks(2, balanced_body, cases, str(tmp_path))):
        for case, found in zip(cases, of_rank, strict=True):
            for step in range(STEPS):
                assert found["losses"][step] == pytest.approx(expected["losses"][step][rank], abs=1e-5), (case, step)
                assert torch.equal(found["biases"][step], expected["biases"][step]), (case, step)
            assert torch.equal(found["loaded"], found["biases"][-1]), case
    assert not torch.equal(expected["biases"][0], expected["biases"][-1])


def test_a_bias_is_kept_in_fp32_and_rests_in_a_skipped_step(tmp_path: Path) -> None:
    skips = {"fp16": {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}}
    bf16, skipped = on_ranks(
        2, balanced_body, [(2, 2, False, {"bf16": {"enabled": True}}), (2, 2, False, skips)], str(tmp_path)
    )[0]
    moved = bf16["biases"][1] - bf16["biases"][0]
    assert bf16["biases"][0].dtype == torch.float32
    assert moved.any() and all(step in (0, pytest.approx(COEFF, rel=1e-4)) for step in moved.abs().tolist()), moved
    assert torch.equal(skipped["biases"][0], skipped["biases"][1])


def refused_body(rank: int, world: int, family: str, section: dict[str, Any]) -> tuple[str, str, str, bool]:
    model = make(family)
    before = {name: param.clone() for name, param in model.named_parameters()}
    with pytest.raises(ConfigError) as caught:
        engine_of(model, settings(2, 2, section))
    is_unchanged = all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    return caught.value.what, caught.value.where, caught.value.fix, is_unchanged


@pytest.mark.parametrize(
    ("family", "section", "where", "words"),
    [
        ("mixtral", {"load_balance_coeff": 0.1}, "load_balance_coeff", ["model.layers.0.mlp", "router_aux_loss_coef"]),
        ("deepseek_v3", {"load_balance_coeff": 0.1, "router_pattern": "router"}, "router_pattern", ["gate"]),
    ],
)
def test_a_router_without_a_bias_is_refused(family: str, section: dict, where: str, words: list[str]) -> None:
    for what, found, fix, is_unchanged in on_ranks(2, refused_body, family, section):
        assert found == f"expert_parallel.{where}"
        assert all(word in what + fix for word in words), (what, fix)
        assert is_unchanged


def replay_body(rank: int, world: int, family: str, n_ranks: int, recomputes: bool) -> dict[str, Any]:
    model = make(family)
    if recomputes:
        model.gradient_checkpointing_enable()
    with engine_of(model, settings(2, n_ranks, {})) as engine:
        batch = rows_of(0, 0, rank)
        with record_routing(engine.module) as recorded:
            own = engine(**batch).logits
        own_indices = {name: of_forwards[0] for name, of_forwards in recorded.items()}
        with replay_routing(engine.module, own_indices):
            again = engine(**batch).logits
        others = {name: (indices + 1) % N_EXPERTS for name, indices in own_indices.items()}
        with replay_routing(engine.module, others), record_routing(engine.module) as recorded:
            loss = engine(**batch).loss
            update(engine, loss)
        assert all(torch.equal(recorded[name][0], others[name]) for name in others)
        state = {name: value.clone() for name, value in engine.module.state_dict().items()}
        return {"own": own, "again": again, "loss": loss.item(), "others": others, "state": state}


def replayed_alone_body(rank: int, world: int, family: str, others: list[dict[str, Any]]) -> dict[str, Any]:
    """One process in which ``topk`` itself gives the choices of the ranks. Layers run in the order of ``others``."""
    model = make(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    topk, losses = torch.topk, []
    for each, of_rank in enumerate(others):
        left = [of_rank[name].long() for name in sorted(of_rank)]

        def chosen(scores: torch.Tensor, k: int, dim: int = -1, left: list = left, **more: Any) -> Any:
            if scores.shape[-1] != N_EXPERTS or k != N_CHOSEN:
                return topk(scores, k, dim, **more)
            indices = left.pop(0)
            return scores.gather(-1, indices), indices

        torch.topk = chosen
        try:
            losses.append(model(**rows_of(0, 0, each)).loss)
        finally:
            torch.topk = topk
    (sum(losses) / len(losses)).backward()
    optimizer.step()
    return {"losses": [loss.item() for loss in losses], "state": model.state_dict()}


@pytest.mark.parametrize(
    ("family", "n_ranks", "recomputes"),
    [(name, 2, i % 2 == 0) for i, name in enumerate(FAMILIES)] + [("mixtral", 1, False)],
)
def test_a_replay_takes_given_experts(family: str, n_ranks: int, recomputes: bool) -> None:
    found = on_ranks(2, replay_body, family, n_ranks, recomputes)
    expected = on_ranks(1, replayed_alone_body, family, [of_rank["others"] for of_rank in found])[0]
    for rank, of_rank in enumerate(found):
        assert torch.equal(of_rank["own"], of_rank["again"])
        assert of_rank["loss"] == pytest.approx(expected["losses"][rank], abs=1e-5)
        assert_equal_tensors(of_rank["state"], expected["state"], rtol=1e-5, atol=1e-5)


def wrong_replay_body(rank: int, world: int) -> list[str]:
    found = []
    with engine_of(make("mixtral"), settings(2, 2, {})) as engine:
        indices = torch.zeros(12 + 2 * rank, N_CHOSEN, dtype=torch.int32)
        for error, given in [
            (StateError, {"model.layers.7.mlp.experts": indices}),
            (ModelError, {EXPERTS: indices + N_EXPERTS}),
            (ModelError, {EXPERTS: indices.float()}),
            (ModelError, {EXPERTS: indices[:, 0]}),
        ]:
            with pytest.raises(error) as caught, replay_routing(engine.module, given):
                pass
            found.append(str(caught.value))
        with pytest.raises(ModelError) as caught, replay_routing(engine.module, {EXPERTS: indices[1:]}):
            engine(**rows_of(0, 0, rank))
        found.append(str(caught.value))
        update(engine, engine(**rows_of(0, 0, rank)).loss)  # nothing is left behind
    with pytest.raises(StateError) as caught, record_routing(torch.nn.Linear(2, 2)):
        pass
    return [*found, str(caught.value)]


def test_a_replay_that_does_not_fit_is_refused() -> None:
    for found in on_ranks(2, wrong_replay_body):
        for text, word in zip(
            found, ["layers.7", EXPERTS, "float32", "integers [tokens, k]", "tokens", "enabled"], strict=True
        ):
            assert word in text


def beside_body(rank: int, world: int, family: str, cases: list[tuple[int, int]]) -> list[dict[str, Any]]:
    found = []
    for stage, n_ranks in cases:
        section = {"validate_folding_routing": True}
        with engine_of(make(family), settings(stage, n_ranks, section, tensor_parallel={"autotp_size": 2})) as engine:
            losses = [update(engine, engine(**rows_of(step, 0, rank // 2)).loss) for step in range(STEPS)]
            shapes = {name: tuple(value.shape) for name, value in engine.module.state_dict(keep_vars=True).items()}
            whole = (
                engine._zero3_consolidated_16bit_state_dict() if stage == 3 else engine._consolidated_16bit_state_dict()
            )
            load = {name: of_layer.tokens for name, of_layer in engine.expert_load().items()}
            found.append({"losses": losses, "whole": dict(whole or {}), "load": load, "shapes": shapes})
    return found


def alone_body(rank: int, world: int, family: str, n_ranks: int) -> dict[str, Any]:
    model = make(family)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), []
    for step in range(STEPS):
        of_ranks = [model(**rows_of(step, 0, each)).loss for each in range(n_ranks)]
        (sum(of_ranks) / n_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in of_ranks])
    return {"losses": losses, "state": model.state_dict()}


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_tensor_parallel_ranks_hold_whole_experts(family: str) -> None:
    cases = [(1, 2), (2, 1), (3, 2)]
    expected = on_ranks(1, alone_body, family, 2)[0]
    of_ranks = on_ranks(4, beside_body, family, cases)
    for i, case in enumerate(cases):
        for rank, of_rank in enumerate(of_ranks):
            losses = [of_step[rank // 2] for of_step in expected["losses"]]
            assert of_rank[i]["losses"] == pytest.approx(losses, abs=2e-5), case
            tokens = sum((6 + each) * 2 * N_CHOSEN for each in range(2))
            assert all(sum(of_layer) == tokens for of_layer in of_rank[i]["load"].values()), of_rank[i]["load"]
        assert_equal_tensors(of_ranks[0][i]["whole"], expected["state"], rtol=1e-5, atol=2e-5)
    assert of_ranks[0][0]["shapes"][f"{EXPERTS}.down_proj"][0] == N_EXPERTS // 2


def folding_body(rank: int, world: int) -> str:
    section = {"validate_folding_routing": True}
    with engine_of(make("mixtral"), settings(1, 1, section, tensor_parallel={"autotp_size": 2})) as engine:
        engine.eval()
        layer = engine.module.get_submodule(EXPERTS)
        indices = torch.tensor([[0, 1], [2, rank]], dtype=torch.int64)
        with pytest.raises(RoutingError) as caught:
            layer(torch.ones(2, 32), indices, torch.ones(2, 2))
        return str(caught.value)


def test_tensor_parallel_ranks_that_choose_otherwise_are_named() -> None:
    for text in on_ranks(2, folding_body):
        assert "rank 1 chose other experts than rank 0 for 1 of 2 tokens" in text
        assert EXPERTS in text


def sequence_body(rank: int, world: int, stage: int, attention: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    from deepspeed_c.sequence.loader import UlyssesSPDataLoaderAdapter

    more = {"sequence_parallel_size": 2, "sequence_parallel": {"attention": attention}}
    with engine_of(make("mixtral"), settings(stage, 2, {}, **more)) as engine:
        group, losses = engine.get_sequence_parallel_group(), []
        for step in range(STEPS):
            ids = rows_of(step, 0, 0)["input_ids"][:1]
            loader = UlyssesSPDataLoaderAdapter(
                [{"input_ids": ids, "labels": ids.clone()}], rank, group, 2, engine.device, model=engine
            )
            batch = next(iter(loader))
            losses.append(update(engine, engine(**batch, labels=batch["shift_labels"], use_cache=False).loss))
        whole = engine._zero3_consolidated_16bit_state_dict() if stage == 3 else engine.module.state_dict()
        return losses, {name: value.clone() for name, value in (whole or {}).items()}


def whole_sequence_body(rank: int, world: int) -> dict[str, torch.Tensor]:
    model = make("mixtral")
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        ids = rows_of(step, 0, 0)["input_ids"][:1]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(("stage", "attention"), [(1, "ulysses"), (3, "ring")])
def test_parts_of_a_sequence_go_to_experts_on_all_ranks(stage: int, attention: str) -> None:
    expected = on_ranks(1, whole_sequence_body)[0]
    _, whole = on_ranks(2, sequence_body, stage, attention)[0]
    assert_equal_tensors(whole, expected, rtol=2e-5, atol=2e-5)
