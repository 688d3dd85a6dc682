"""Experts of cut models: a bias after ``down_proj`` is added once, and experts with a norm of their own stay whole."""

from __future__ import annotations

import pytest
import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.parallel import PartitionConfig, TensorParallel
from deepspeed_c.errors import ModelError
from deepspeed_c.inject import cut_model
from deepspeed_c.inject.styles import expert_cuts
from tests.deepspeed_c.inject.families import feed, make
from tests.deepspeed_c.zero.test_tensor_parallel import logical
from tests.ranks import run_ranks
from tests.training import config, descend, engine_of, update

PRELOAD = "tests.deepspeed_c.inject.preload"
STEPS, LR = 3, 0.3


def trained(model: torch.nn.Module) -> tuple[torch.nn.Module, list[float]]:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = [descend(optimizer, model(**feed("gpt_oss")).loss) for _ in range(STEPS)]
    return model, losses


def with_values(family: str) -> torch.nn.Module:
    """A model with random biases and attention sinks, because their initial zeros would hide errors."""
    model = make(family)
    rng = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "bias" in name or "sinks" in name:
                param.copy_(0.5 * torch.randn(param.shape, generator=rng))
    return model


def steps(rank: int, world: int, family: str, stages: list[int]) -> list[tuple]:
    found = []
    for stage in stages:
        zero = {"stage3_param_persistence_threshold": 10}
        settings = config(
            stage, rows=2, lr=LR, zero=zero, gradient_clipping=0.0, tensor_parallel={"autotp_size": world}
        )
        losses = []
        with engine_of(with_values(family).train(), settings) as engine:
            for _ in range(STEPS):
                losses.append(update(engine, engine(**feed("gpt_oss")).loss))
            found.append((logical(engine), losses))
    return found


# Over 3 ranks, 44 columns of experts in grains of 8 are cut to 16, 16 and 12. CodeGen has 4 stripes of 4 heads, cut to
# 8, 4 and 4.
CASES = [("gpt_oss", 3, [0, 3]), ("gpt_oss", 2, [1]), ("codegen", 3, [1]), ("mpt", 3, [2])]


@pytest.mark.parametrize(("family", "world", "stages"), CASES)
def test_trained_as_in_one_process(family: str, world: int, stages: list[int]) -> None:
    start = {name: param.detach().clone() for name, param in with_values(family).named_parameters()}
    model, losses = trained(with_values(family))
    weights = {name: param.detach() for name, param in model.named_parameters()}
    for of_rank in run_ranks(world, steps, family, stages, preload=PRELOAD):
        for stage, (got, got_losses) in zip(stages, of_rank, strict=True):
            torch.testing.assert_close(got_losses, losses, rtol=1e-5, atol=0, msg=f"{stage=} {got_losses} {losses}")
            for name, value in weights.items():
                moved = (value - start[name]).abs().max().item()
                error = (got[name] - value).abs().max().item()
                assert error < 1e-3 * moved + 1e-6, (stage, name, error, moved)


def all_experts(rank: int, world: int) -> dict[str, float]:
    """There are more ranks than grains of columns, so the last rank has no columns."""
    whole, cut = with_values("gpt_oss").train(), with_values("gpt_oss").train()
    for model in (whole, cut):
        for layer in model.model.layers:
            experts = layer.mlp.experts
            for name, param in list(experts.named_parameters()):
                size = {"gate_up_proj": (2, 16), "gate_up_proj_bias": (1, 16), "down_proj": (1, 8)}.get(name)
                if size is not None:
                    setattr(experts, name, torch.nn.Parameter(param.detach().narrow(size[0], 0, size[1]).clone()))
            experts.intermediate_size = 8
    section = TensorParallel(partition_config=PartitionConfig(strict_mode=True))
    with pytest.raises(ModelError, match=r"no rule cuts 2 matrices: \S*router.weight, \S*router.weight"):
        cut_model(cut, section, Collectives())
    report = cut_model(cut, TensorParallel(), Collectives())
    whole(**feed("gpt_oss")).loss.backward()
    cut(**feed("gpt_oss")).loss.backward()
    errors = {}
    for name, param in cut.named_parameters():
        grad = whole.get_parameter(name).grad
        grad = param.tp_cut.take(grad) if param.tensor_model_parallel else grad
        if grad.numel():
            errors[name] = (param.grad - grad).abs().max().item()
    rules = {row.name: row.rule for row in report.rows}
    assert rules["model.layers.0.mlp.experts.down_proj_bias"] == "policy gpt_oss: whole, used on the first rank"
    bias = cut.get_parameter("model.layers.0.mlp.experts.down_proj_bias")
    assert cut.model.layers[0].mlp.experts.down_proj_bias is bias and bias.grad.abs().max() > 1e-4
    return {name: error for name, error in errors.items() if not error < 1e-6}


def test_a_rank_without_columns_adds_no_bias() -> None:
    for errors in run_ranks(2, all_experts, preload=PRELOAD):
        assert not errors, errors


class Normed(torch.nn.Module):
    """Experts with a norm after ``down_proj``, as in MuseSpark."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.ones(2, 16, 4))
        self.down_proj = torch.nn.Parameter(torch.ones(2, 4, 8))
        self.post_expert_norm = torch.nn.RMSNorm(4)


def test_experts_with_a_norm_behind_them_are_not_cut() -> None:
    found = expert_cuts(Normed())
    assert isinstance(found, str) and "post_expert_norm.weight" in found, found
