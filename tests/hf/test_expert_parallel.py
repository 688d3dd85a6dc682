"""Experts of mixtures over ranks by configuration: training equals transformers in one process, which runs the ranks'
batches one after the other."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.cells import full
from tests.hf.expert_families import FAMILIES, N_EXPERTS, assert_equal_tensors, make, rows_of
from tests.hf.stack import on_ranks
from tests.training import config, descend_together, engine_of, update

WORLD, STEPS = 4, 5
SIZES = (1, 2, 4)
LEARNING_RATE = 0.05
KINDS = ("plain", "checkpointing", "accumulation")


def settings(stage: int, n_ranks: int, optimizer: str = "SGD", **changes: Any) -> dict[str, Any]:
    section = {"enabled": True, "autoep_size": n_ranks}
    given = {"lr": LEARNING_RATE, "gradient_clipping": 0, "rows": 2, "zero": {"stage3_param_persistence_threshold": 0}}
    return config(stage, optimizer, **{**given, "expert_parallel": section, **changes})


def n_micro(kind: str) -> int:
    return 2 if kind == "accumulation" else 1


def model_of(family: str, kind: str, **changes: Any) -> Any:
    """The family's model, with recomputed activations for the kind "checkpointing"."""
    model = make(family, **changes)
    if kind == "checkpointing":
        model.gradient_checkpointing_enable()
    return model


def whole_state(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of the weights with all experts, on the first rank. Collective."""
    is_cut = engine.zero_optimization_stage() == 3
    state = engine._zero3_consolidated_16bit_state_dict() if is_cut else engine.module.state_dict()
    return {} if engine.global_rank else {name: value.detach().float().clone() for name, value in state.items()}


def descend(model: torch.nn.Module, optimizer: Any, kind: str, world: int, steps: int) -> list[list[float]]:
    """Trains ``model`` on the batches of ``world`` ranks. The losses of each step, by micro-batch and rank."""
    found = []
    for step in range(steps):
        losses = [model(**rows_of(step, micro, rank)).loss for micro in range(n_micro(kind)) for rank in range(world)]
        (sum(losses) / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.item() for loss in losses])
    return found


def plain_body(rank: int, world: int, family: str, kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    model = make(family, **changes)
    losses = descend(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), kind, WORLD, STEPS)
    model.eval()
    with torch.no_grad():
        logits = model(**rows_of(99, 0, 0)).logits
    return {"losses": losses, "logits": logits, "state": model.state_dict()}


@functools.cache
def plain(family: str, kind: str, **changes: Any) -> dict[str, Any]:
    return on_ranks(1, plain_body, family, "plain" if kind == "checkpointing" else kind, changes)[0]


def train(engine: Any, kind: str, rank: int, steps: int = STEPS) -> list[list[float]]:
    """Trains on the batches of this rank. The losses of each step, by micro-batch."""
    return [
        [update(engine, engine(**rows_of(step, micro, rank)).loss) for micro in range(n_micro(kind))]
        for step in range(steps)
    ]


def spread_body(rank: int, world: int, cases: list[tuple], changes: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for family, kind, stage, n_ranks in cases:
        more = {"accumulate": 2} if kind == "accumulation" else {}
        with engine_of(model_of(family, kind, **changes), settings(stage, n_ranks, **more)) as engine:
            losses = train(engine, kind, rank)
            engine.eval()
            with torch.no_grad():
                logits = engine(**rows_of(99, 0, 0)).logits
            found.append({"losses": losses, "logits": logits, "state": whole_state(engine)})
    return found


def assert_trained_alike(cases: list[tuple], **changes: Any) -> None:
    """Compares losses, logits and weights of each case with one process."""
    of_ranks = on_ranks(WORLD, spread_body, cases, changes)
    for i, (family, kind, stage, n_ranks) in enumerate(cases):
        expected, found = plain(family, kind, **changes), [of_rank[i] for of_rank in of_ranks]
        case = f"{family} {kind} stage {stage} ep {n_ranks}"
        for step in range(STEPS):
            losses = [found[rank]["losses"][step][micro] for micro in range(n_micro(kind)) for rank in range(WORLD)]
            assert losses == pytest.approx(expected["losses"][step], abs=1e-5, rel=1e-5), (case, step)
        for of_rank in found:
            assert_equal_tensors(of_rank, expected, ["logits"], rtol=1e-5, atol=1e-4)
        assert found[0]["state"].keys() == expected["state"].keys(), case
        assert_equal_tensors(found[0]["state"], expected["state"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_one_process(family: str) -> None:
    # Other families have other pairs of a stage with a number of ranks and a kind.
    turn = FAMILIES.index(family)
    assert_trained_alike(
        [
            (family, KINDS[(turn // 3 + stage) % len(KINDS)], stage, SIZES[(turn + stage) % len(SIZES)])
            for stage in range(4)
        ]
    )


@full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("family", FAMILIES)
def test_training_of_each_kind_equals_one_process(family: str, stage: int, kind: str) -> None:
    assert_trained_alike([(family, kind, stage, n_ranks) for n_ranks in SIZES])


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "olmoe"])
def test_the_loss_of_the_router_is_the_models(family: str) -> None:
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    assert_trained_alike([(family, "plain", 1, 4), (family, "accumulation", 3, 2)], **changes)
    losses = [of_family["losses"][0][0] for of_family in (plain(family, "plain"), plain(family, "plain", **changes))]
    assert losses[1] - losses[0] > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_the_plain_models_move(family: str) -> None:
    before = {name: value for name, value in on_ranks(1, state_body, family)[0].items() if value.dim() == 3}
    after = plain(family, "plain")["state"]
    assert before
    for name, value in before.items():
        assert ((after[name] - value).abs().amax((1, 2)) > 1e-3).all(), name


def state_body(rank: int, world: int, family: str) -> dict[str, torch.Tensor]:
    return make(family).state_dict()


CLIP = 0.5


def plain_clipped_body(rank: int, world: int, family: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = make(family)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
    norms = []
    for step in range(STEPS):
        losses = [model(**rows_of(step, 0, rank)).loss / WORLD for rank in range(WORLD)]
        norms.append(descend_together(optimizer, losses, CLIP))
    return norms, model.state_dict()


def clipped_body(rank: int, world: int, family: str, cases: list[tuple]) -> list[tuple]:
    found = []
    for stage, n_ranks in cases:
        more = {"gradient_clipping": CLIP, "lr": 0.01, "params": {"eps": 1e-3}}
        norms = []
        with engine_of(make(family), settings(stage, n_ranks, "Adam", **more)) as engine:
            for step in range(STEPS):
                update(engine, engine(**rows_of(step, 0, rank)).loss)
                norms.append(float(engine.get_global_grad_norm()))
            found.append((norms, whole_state(engine)))
    return found


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_the_norm_counts_each_expert_once(family: str) -> None:
    norms, state = on_ranks(1, plain_clipped_body, family)[0]
    assert min(norms) > 1.5 * CLIP
    cases = [(stage, n_ranks) for stage in range(4) for n_ranks in SIZES[1:]]
    for of_rank in on_ranks(WORLD, clipped_body, family, cases):
        for found, weights in of_rank:
            assert found == pytest.approx(norms, rel=1e-5)
            assert_equal_tensors(weights, state, weights, rtol=1e-5, atol=2e-5)


def optimizer_body(rank: int, world: int, cases: list[tuple]) -> list[tuple]:
    found = []
    for stage, n_ranks, optimizer, changes in cases:
        with engine_of(make("mixtral"), settings(stage, n_ranks, optimizer, **changes)) as engine:
            losses = train(engine, "plain", rank)
            found.append((losses, whole_state(engine)))
    return found


HOST = {"device": "cpu"}
SMALL = {"reduce_bucket_size": 2000, "stage3_prefetch_bucket_size": 1000, "stage3_max_live_parameters": 3000}
ADAM = {"lr": 0.01, "params": {"eps": 1e-3}}
# name -> (stage, optimizer, configuration)
SETTINGS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "lamb 0": (0, "Lamb", {"lr": 0.02}),
    "lamb 3": (3, "Lamb", {"lr": 0.02}),
    "muon 1": (1, "Muon", {"params": {"muon_lr": 0.02, "adam_lr": 0.01}}),
    "muon 3": (3, "Muon", {"params": {"muon_lr": 0.02, "adam_lr": 0.01}}),
    "host 2": (2, "AdamW", {**ADAM, "zero": {"offload_optimizer": HOST}}),
    "host 3": (3, "AdamW", {**ADAM, "zero": {"offload_optimizer": HOST, "offload_param": HOST}}),
    "small 3": (3, "SGD", {"zero": {**SMALL, "stage3_param_persistence_threshold": 0, "sub_group_size": 1500}}),
    "kept 3": (3, "SGD", {"zero": {"stage3_param_persistence_threshold": 10**6}}),
    "mics": (3, "SGD", {"zero": {"mics_shard_size": 2, "stage3_param_persistence_threshold": 0}}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_equal_whole_experts(name: str) -> None:
    """LAMB and Muon need whole stacks for their norms and products."""
    stage, optimizer, changes = SETTINGS[name]
    cases = [(stage, n_ranks, optimizer, changes) for n_ranks in SIZES if name != "mics" or n_ranks < 4]
    of_ranks = on_ranks(WORLD, optimizer_body, cases)
    for (expected, state), *others in of_ranks:
        for losses, weights in others:
            assert [loss for (loss,) in losses] == pytest.approx([loss for (loss,) in expected], abs=2e-5)
            assert_equal_tensors(weights, state, rtol=1e-5, atol=2e-5)


def test_bf16_is_near_to_whole_experts() -> None:
    cases = [(2, n_ranks, "SGD", {"bf16": {"enabled": True}}) for n_ranks in SIZES]
    (expected, state), *others = on_ranks(WORLD, optimizer_body, cases)[0]
    for losses, weights in others:
        assert [loss for (loss,) in losses] == pytest.approx([loss for (loss,) in expected], rel=0.02)
        assert_equal_tensors(weights, state, rtol=0, atol=0.05)


def with_an_idle_expert(family: str) -> torch.nn.Module:
    """A model whose router never chooses expert 1, where the router has biases."""
    model = make(family)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("router.bias", "e_score_correction_bias")):
                tensor[1] = -100
    return model


def count(of_layer: torch.Tensor, experts: torch.nn.Module, given: tuple) -> None:
    of_layer += torch.bincount(given[1].flatten(), minlength=N_EXPERTS)


def plain_load_body(rank: int, world: int, family: str) -> dict[str, Any]:
    model, counts = with_an_idle_expert(family), {}
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            counts[name] = torch.zeros(N_EXPERTS, dtype=torch.int64)
            module.register_forward_pre_hook(functools.partial(count, counts[name]))
    loss = sum(model(**rows_of(0, 0, rank)).loss for rank in range(WORLD)) / WORLD
    loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {"counts": {name: of_layer.tolist() for name, of_layer in counts.items()}, "grads": grads}


def load_body(rank: int, world: int, family: str, cases: list[tuple]) -> list[tuple]:
    found = []
    for stage, n_ranks in cases:
        with engine_of(with_an_idle_expert(family), settings(stage, n_ranks, lr=1.0)) as engine:
            before = whole_state(engine)
            update(engine, engine(**rows_of(0, 0, rank)).loss)
            load = {name: (numbers.tokens, sum(numbers.dropped)) for name, numbers in engine.expert_load().items()}
            after = whole_state(engine)
            found.append((load, {name: before[name] - after[name] for name in before}))
    return found


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_the_load_is_that_of_the_plain_model_and_an_expert_may_have_no_tokens(family: str) -> None:
    expected = on_ranks(1, plain_load_body, family)[0]
    assert family == "mixtral" or all(of_layer[1] == 0 for of_layer in expected["counts"].values())
    for of_rank in on_ranks(WORLD, load_body, family, [(0, 4), (3, 2), (2, 4)]):
        for load, grads in of_rank:
            assert load == {name: (of_layer, 0) for name, of_layer in expected["counts"].items()}
            names = [name for name in grads if name in expected["grads"]]
            assert_equal_tensors(grads, expected["grads"], names, rtol=1e-4, atol=1e-5)
