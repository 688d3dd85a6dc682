"""Models are built under zero.Init, whole or cut by hand, and trained on tensor-parallel ranks. Their weights equal
those of one plain torch process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.errors import ModelError
from tests.deepspeed_c.inject.families import make
from tests.deepspeed_c.inject.test_engine import make_config, plain, train
from tests.deepspeed_c.zero.megatron import Mpu, _Copy, _Reduce
from tests.deepspeed_c.zero.test_tensor_parallel import logical
from tests.ranks import run_ranks
from tests.training import descend_together


def whole_body(rank: int, world: int, n_tp: int, how: str):
    config = make_config(n_tp, 3)
    if how == "meta":
        with torch.device("meta"):
            model = make("llama").train()
        whole = make("llama").state_dict()
        with deepspeed_c.initialize(model=model, config=config)[0] as engine:
            engine.load_module_state_dict(whole)
            norms = train(engine)
            return logical(engine), norms
    with deepspeed_c.zero.Init(config_dict_or_path=config):
        model = make("llama").train()
    assert all(hasattr(param, "ds_id") for param in model.parameters())
    with deepspeed_c.initialize(model=model, config=config)[0] as engine:
        norms = train(engine)
        return logical(engine), norms


@pytest.mark.parametrize(("n_tp", "n_data"), [(2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("how", ["init", "meta"])
def test_a_model_that_is_sharded_already_is_cut(n_tp: int, n_data: int, how: str) -> None:
    weights, norms = plain("llama", n_data)
    for got, got_norms in run_ranks(n_tp * n_data, whole_body, n_tp, how, preload="tests.deepspeed_c.inject.preload"):
        torch.testing.assert_close(got_norms, norms, rtol=1e-4, atol=0)
        for name, value in weights.items():
            torch.testing.assert_close(got[name], value, rtol=1e-3, atol=2e-5, msg=lambda m: f"{name} {m}")  # noqa: B023


WIDTH, INNER = 6, 10


class Column(nn.Module):
    """A layer as in Megatron: each rank makes only its part."""

    def __init__(self, whole: torch.Tensor, dim: int, rank: int, n_ranks: int) -> None:
        super().__init__()
        size = whole.shape[dim] // n_ranks
        self.weight = nn.Parameter(whole.narrow(dim, rank * size, size).clone())
        if n_ranks > 1:
            self.weight.tensor_model_parallel, self.weight.partition_dim, self.weight.partition_stride = True, dim, 1


class HandCut(nn.Module):
    def __init__(self, group=None, rank: int = 0, n_ranks: int = 1) -> None:
        super().__init__()
        torch.manual_seed(1)
        up, down = torch.randn(INNER, WIDTH) * 0.3, torch.randn(WIDTH, INNER) * 0.3
        self.group = group
        self.up, self.down = Column(up, 0, rank, n_ranks), Column(down, 1, rank, n_ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.group is None else _Copy.apply(x, self.group)
        y = torch.tanh(x @ self.up.weight.t()) @ self.down.weight.t()
        y = y if self.group is None else _Reduce.apply(y, self.group)
        return y.square().mean()


def samples(step: int, data_rank: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + data_rank))


def hand_body(rank: int, world: int):
    mpu = Mpu(2)
    group, place = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_rank()
    config = {**make_config(1, 3), "tensor_parallel": {}}
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    with deepspeed_c.zero.Init(config_dict_or_path=config):
        model = HandCut(group, place, 2)
    with pytest.raises(ModelError, match=r"up\.weight: zero\.Init has sharded it over ranks .* other parts"):
        deepspeed_c.initialize(model=model, config=config, mpu=mpu)
    with deepspeed_c.zero.Init(config_dict_or_path=config, mpu=mpu):
        model = HandCut(group, place, 2)
    with deepspeed_c.initialize(model=model, config=config, mpu=mpu)[0] as engine:
        for step in range(3):
            engine.backward(engine(samples(step, rank // 2)))
            engine.step()
        return logical(engine)


@pytest.mark.parametrize("n_data", [1, 2])
def test_a_model_cut_by_hand_is_sharded_over_the_ranks_with_the_same_part(n_data: int) -> None:
    model = HandCut()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
    for step in range(3):
        descend_together(optimizer, (model(samples(step, rank)) / n_data for rank in range(n_data)), 0.5)
    for got in run_ranks(2 * n_data, hand_body):
        for name, param in model.named_parameters():
            torch.testing.assert_close(got[name], param.detach(), rtol=1e-4, atol=1e-6)


class Drawn(nn.Module):
    """A layer whose weight is cut by hand beside one that all ranks have whole. Both draw their values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.part = nn.Parameter(torch.empty(WIDTH, 3)), nn.Parameter(torch.empty(INNER, WIDTH))
        self.part.tensor_model_parallel, self.part.partition_dim, self.part.partition_stride = True, 0, 1

    def reset_parameters(self) -> None:
        nn.init.normal_(self.norm)
        nn.init.normal_(self.part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.part.t()).square().mean() + (x @ self.norm).square().mean()


def drawn_body(rank: int, world: int, how: str) -> dict[str, torch.Tensor]:
    """The weights that ``initialize`` gives a model on the meta device; ranks draw different numbers."""
    torch.manual_seed(rank)
    config = make_config(2 if how == "llama" else 1, 3)
    with torch.device("meta"):
        model = Drawn() if how == "by hand" else make("llama")
    mpu = None
    if how == "by hand":
        mpu, config["tensor_parallel"] = Mpu(2), {}
    with deepspeed_c.initialize(model=model, config=config, mpu=mpu)[0] as engine:
        return logical(engine)


@pytest.mark.parametrize("n_data", [1, 2])
@pytest.mark.parametrize("how", ["llama", "by hand"])
def test_ranks_of_a_model_on_the_meta_device_share_what_is_whole_and_draw_their_own_parts(how: str, n_data: int):
    outcome = run_ranks(2 * n_data, drawn_body, how, preload="tests.deepspeed_c.inject.preload")
    for rank, found in enumerate(outcome):  # `logical` compares the ranks of a model
        for name, value in found.items():
            assert torch.equal(value, outcome[0][name]), f"rank {rank}, {name}: {value} and {outcome[0][name]}"
    if how == "by hand":
        first, second = outcome[0]["part"].chunk(2)
        assert not torch.equal(first, second), first
