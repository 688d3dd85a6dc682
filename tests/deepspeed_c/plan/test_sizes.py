"""Sizes of models and optimizers: the layers of a stack sum exactly, every kind of parameter counts with its whole
size, and the sizes of states come from a trial step."""

from __future__ import annotations

import pytest
import torch

from deepspeed_c.errors import ModelError, OptimizerError
from deepspeed_c.ops.adam import FusedAdam
from deepspeed_c.ops.lion import FusedLion
from deepspeed_c.ops.muon import Muon
from deepspeed_c.ops.sgd import FusedSGD
from deepspeed_c.plan.sizes import (
    ModelSizes,
    ParamSize,
    StateSize,
    group_sizes,
    guess_layers,
    model_of,
    sizes_of,
    stack_of,
)


@pytest.mark.parametrize(("n_params", "n_layers"), [(4, 1), (7, 1), (12_289, 3), (999_983, 7), (7_000_000_000, 33)])
def test_a_stack_sums_to_its_count(n_params, n_layers):
    sizes = stack_of(n_params, n_layers)
    assert sizes.numel == sizes.n_trained == n_params
    assert len({p.name for p in sizes.params}) == len(sizes.params) == 4 * n_layers
    layers = [sum(p.numel for p in sizes.params[4 * i : 4 * i + 4]) for i in range(n_layers)]
    assert max(layers) - min(layers) <= 1
    largest = max(sizes.params, key=lambda p: p.numel)
    assert largest.numel <= -(-n_params // (3 * n_layers))


@pytest.mark.parametrize(("n_params", "n_layers"), [(0, 1), (-5, 1), (100, 0), (100, 26)])
def test_what_is_no_stack_is_refused(n_params, n_layers):
    with pytest.raises(ModelError, match="cannot be cut into"):
        stack_of(n_params, n_layers)


def test_layers_are_guessed_as_transformers_have_them():
    assert [guess_layers(n) for n in (1, 125_000_000, 7_000_000_000, 175_000_000_000)] == [1, 9, 33, 96]


def test_sizes_of_a_model_and_back():
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3, bias=False).half()
    )
    model[2].weight.requires_grad_(False)
    model.register_parameter("tied", model[0].weight)
    model.register_parameter("scalar", torch.nn.Parameter(torch.tensor(1.0)))
    model.register_parameter("empty", torch.nn.Parameter(torch.zeros(0, 4)))
    groups = [[model[0].weight, model.scalar], [model[0].bias, model[1].weight, model[1].bias, model.empty]]
    sizes = sizes_of(model, groups)
    assert [tuple(p)[:4] for p in sizes.params] == [
        ("tied", 15, torch.float32, 0), ("scalar", 1, torch.float32, 0), ("empty", 0, torch.float32, 1),
        ("0.bias", 5, torch.float32, 1), ("1.weight", 5, torch.float32, 1), ("1.bias", 5, torch.float32, 1),
        ("2.weight", 15, torch.float16, None),
    ]  # fmt: skip
    assert sizes.buffer_bytes == 5 * 4 + 5 * 4 + 8 and not sizes.is_sharded
    made, made_groups = model_of(sizes)
    assert all(p.is_meta for p in made.parameters())
    assert [len(group) for group in made_groups] == [2, 4]
    assert sizes_of(made, made_groups).params == sizes.params


def test_a_model_of_no_parameters():
    assert model_of(ModelSizes(()))[1] == []
    assert ParamSize("weight", 3, torch.float32).module == ""


def params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.empty(40, 30, device="meta"))]


FP32 = StateSize(None)


@pytest.mark.parametrize(
    ("make", "states"),
    [
        *((lambda p: FusedAdam(p), (FP32, FP32)), (lambda p: FusedLion(p), (FP32,))),
        *((lambda p: FusedSGD(p, lr=0.1), ()), (lambda p: FusedSGD(p, lr=0.1, momentum=0.9), (FP32,))),
        (lambda p: torch.optim.AdamW(p), (FP32, FP32)),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), (FP32, FP32, FP32)),
        *((lambda p: torch.optim.SGD(p, lr=0.1), ()), (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), (FP32,))),
        (lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.1), (FP32, FP32, FP32)),
        (lambda p: torch.optim.Adagrad([torch.nn.Parameter(torch.empty(40, 30))]), (FP32,)),
    ],
)
def test_state_of_an_optimizer(make, states):
    sizes = group_sizes(make(params()), is_sharded=True)
    assert sizes.states == (states,)
    assert sizes.sees_slices


def test_trying_an_optimizer_leaves_it_alone():
    base = torch.optim.AdamW(params(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ConstantLR(base)  # wraps ``step`` of the instance
    before = base.state_dict()
    assert group_sizes(base, is_sharded=True).states == ((FP32, FP32),)
    assert base.state_dict() == before and not base.state
    assert schedule.last_epoch == 0


def test_groups_differ_and_muon_puts_matrices_together():
    base = Muon(params(), lr=0.1)
    sizes = group_sizes(base, is_sharded=True)
    assert sizes.matrix_groups == {i for i, g in enumerate(base.param_groups) if g["use_muon"]} != set()
    assert not sizes.sees_slices


def test_state_in_16_bits_is_seen():
    base = FusedAdam(params())
    base.state_dtype = torch.bfloat16
    assert group_sizes(base, is_sharded=True).states == ((StateSize(torch.bfloat16),) * 2,)


def test_codes_of_8_bits_have_scales_beside_them():
    base = FusedAdam(params(), state_dtype=torch.int8)
    (states,) = group_sizes(base, is_sharded=True).states
    assert len(states) == 2
    for numel in (1, 255, 256, 257, 1200, 100_003):
        # The optimizer itself holds two tensors of codes and two of scales.
        piece = torch.nn.Parameter(torch.empty(numel, device="meta"))
        own = [n * dtype.itemsize for dtype, n in base.layout_of_state(0, piece).values()]
        planned = [nbytes for state in states for nbytes in state.tensor_bytes(numel, torch.float32)]
        assert sorted(planned) == sorted(own), f"{numel} elements: {planned} planned, {own} held"
    assert FP32.tensor_bytes(7, torch.bfloat16) == [14]


class Strange(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("only on Tuesdays")


def test_an_optimizer_that_cannot_be_cut_or_tried_is_refused():
    with pytest.raises(OptimizerError, match="not known to be elementwise"):
        group_sizes(torch.optim.LBFGS(params()), is_sharded=True)
    with pytest.raises(OptimizerError, match="could not be tried.*only on Tuesdays"):
        group_sizes(Strange(params(), lr=0.1), is_sharded=False)
