"""Loading of mixtures with their experts over ranks: sharded, on the meta device and from files. No rank holds all
experts of two stacks."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.config.parallel import ExpertParallel
from deepspeed_c.moe.spread import spread_experts
from deepspeed_c.plan.live_bytes import LiveBytes
from deepspeed_c.zero import Init
from tests.hf.expert_families import assert_equal_tensors, make, rows_of
from tests.hf.stack import forget, on_ranks
from tests.hf.test_expert_parallel import settings, whole_state
from tests.training import engine_of, update


def state_body(rank: int, world: int, family: str, seed: int) -> dict[str, torch.Tensor]:
    return make(family, seed).state_dict()


def seeds_body(rank: int, world: int, stage: int, n_ranks: int) -> dict[str, torch.Tensor]:
    with engine_of(make("mixtral", 20 + rank), settings(stage, n_ranks)) as engine:
        return whole_state(engine)


@pytest.mark.parametrize(("stage", "n_ranks"), [(0, 2), (1, 4), (3, 2), (3, 4)])
def test_values_are_those_of_the_first_rank(stage: int, n_ranks: int) -> None:
    (expected,) = on_ranks(1, state_body, "mixtral", 20)
    assert_equal_tensors(on_ranks(4, seeds_body, stage, n_ranks)[0], expected)


def write_body(rank: int, world: int, folder: Path, family: str) -> float:
    model = make(family)
    model.save_pretrained(folder, max_shard_size="20KB")
    return model(**rows_of(0, 0, 0)).loss.item()


def read_body(rank: int, world: int, folder: Path, n_ranks: int) -> tuple[dict[str, torch.Tensor], float]:
    """``from_pretrained`` of a sharded model, as a user of stage 3 calls it."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    forget()
    config = settings(3, n_ranks)
    kept = HfDeepSpeedConfig(config)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert all(param.ds_tensor.numel() <= -(-param.ds_numel // world) for param in model.parameters())
    del kept
    with engine_of(model.train(), config) as engine:
        state = whole_state(engine)
        loss = engine(**rows_of(0, 0, 0)).loss
        update(engine, loss)
        return state, loss.item()


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_sharded_model_from_files(tmp_path: Path, family: str) -> None:
    (expected,) = on_ranks(1, state_body, family, 5)
    (loss,) = on_ranks(1, write_body, tmp_path, family)
    found = on_ranks(4, read_body, tmp_path, 2)
    assert_equal_tensors(found[0][0], expected)
    assert [of_rank[1] for of_rank in found] == pytest.approx([loss] * 4, rel=1e-5)


def meta_body(rank: int, world: int, stage: int, n_ranks: int) -> tuple[dict[str, torch.Tensor], float]:
    with torch.device("meta"):
        model = make("mixtral")
    with engine_of(model, settings(stage, n_ranks)) as engine:
        state = whole_state(engine)
        loss = engine(**rows_of(0, 0, 0)).loss
        update(engine, loss)
        return state, loss.item()


def loss_body(rank: int, world: int, state: dict[str, torch.Tensor]) -> float:
    model = make("mixtral")
    model.load_state_dict(state)
    return model(**rows_of(0, 0, 0)).loss.item()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_on_the_meta_device_is_initialised(stage: int) -> None:
    found = on_ranks(4, meta_body, stage, 2)
    state = found[0][0]
    for name, value in state.items():
        if "experts" in name:
            assert value.std().item() == pytest.approx(0.02, rel=0.15), name
            assert value.std((1, 2)).min() > 0.015, name
    (loss,) = on_ranks(1, loss_body, state)
    assert [of_rank[1] for of_rank in found] == pytest.approx([loss] * 4, rel=1e-5)


SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 6, "num_local_experts": 8}
STACK = 4 * 8 * 128 * 64  # bytes of gate_up_proj
ALL_STACKS = 6 * (STACK + STACK // 2)


def measured_body(rank: int, world: int, kind: str) -> tuple[int, int, int]:
    """The bytes before the experts are spread, the peak meanwhile, and bytes after it."""
    forget()
    section = ExpertParallel(enabled=True, autoep_size=world)
    live = LiveBytes()
    with live:
        if kind == "sharded":
            with Init(config_dict_or_path=settings(3, world)):
                model = make("mixtral", **SIZES)
        else:
            with torch.device("meta" if kind == "meta" else "cpu"):
                model = make("mixtral", **SIZES)
        gc.collect()
        before = live.nbytes()
        with live.phase("spread"):
            spread_experts(model, section, Mesh(Collectives()), torch.device("cpu"))
        gc.collect()
        return before, live.peaks["spread"], live.nbytes()


def test_stacks_are_spread_one_after_the_other() -> None:
    some = STACK // 16  # buffers of collectives
    for before, peak, after in on_ranks(4, measured_body, "sharded"):
        # One stack, and the part of it that this rank keeps.
        assert peak <= before + STACK + STACK // 4 + some
        assert after <= before + STACK + some
    for before, peak, after in on_ranks(4, measured_body, "plain"):
        assert peak <= before + STACK // 4 + some
        # A thread of gloo may hold the last stack for a moment.
        assert after <= before - ALL_STACKS * 3 // 4 + STACK + some


def test_no_stack_of_a_model_on_the_meta_device_is_whole() -> None:
    for before, peak, after in on_ranks(4, measured_body, "meta"):
        assert before == 0
        assert after <= ALL_STACKS // 4 + STACK // 16
        assert peak <= after + STACK // 16
