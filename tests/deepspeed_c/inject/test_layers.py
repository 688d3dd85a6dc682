"""Layers of DeepSpeed's names, made by hand. Pairs of them compute the same as the whole layers, also on numbers of
ranks that do not divide the sizes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_c.errors import ConfigError, DeepSpeedCError, ModelError, StateError
from deepspeed_c.inject.by_hand import GatherReplacedLayerParams
from deepspeed_c.inject.layers import (
    LinearAllreduce,
    LinearLayer,
    LmHeadLinearAllreduce,
    SubParamLinearAllreduce,
    SubParamLinearLayer,
)
from tests import fresh
from tests.ranks import run_ranks


class Gated(nn.Module):
    """A gated MLP. Gate and up, of 10 columns each, are one matrix; their product is the input of ``down``."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(torch.nn.functional.silu(gate) * up)


def pairs(group: dist.ProcessGroup | None) -> dict[str, tuple[nn.Module, nn.Module]]:
    """A whole model, and the same model with layers made by hand from the same weights."""
    torch.manual_seed(0)
    made = {}
    for name, whole, swap in (
        (
            "column, row",
            nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 5)),
            lambda m: nn.Sequential(LinearLayer(m[0], group), m[1], LinearAllreduce(m[2], group)),
        ),
        (
            "gathered column, head",
            nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 11, bias=False)),
            lambda m: nn.Sequential(LinearLayer(m[0], group, False, True), m[1], LmHeadLinearAllreduce(m[2], group)),
        ),
        (
            "two parts, row",
            Gated(nn.Linear(6, 20), nn.Linear(10, 5)),
            lambda m: Gated(
                SubParamLinearLayer(m.up, group, (2, -1), 0, name="gate_up"), LinearAllreduce(m.down, group)
            ),
        ),
        (
            "unequal parts on both sides",
            nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5)),
            lambda m: nn.Sequential(
                SubParamLinearLayer(m[0], group, [[4, 5], -1]), m[1], SubParamLinearAllreduce(m[2], group, (-1, (4, 5)))
            ),
        ),
    ):
        made[name] = (whole, swap(copy.deepcopy(whole)))
    return made


def compute(rank: int, world: int) -> list[tuple[str, float]]:
    found = []
    for name, (whole, cut) in pairs(dist.group.WORLD).items():
        x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))
        mine = x.clone().requires_grad_()
        x.requires_grad_()
        expected, got = whole(x), cut(mine)
        expected.square().sum().backward()
        got.square().sum().backward()
        found += [
            (f"{name}: output", (got - expected).abs().max().item()),
            (f"{name}: input", (mine.grad - x.grad).abs().max().item()),
        ]
        for (label, before), param in zip(whole.named_parameters(), cut.parameters(), strict=True):
            of = param.tp_cut.take if hasattr(param, "tp_cut") else torch.Tensor.clone
            assert torch.equal(param, of(before.detach()))
            found.append((f"{name}: {label}", (param.grad - of(before.grad)).abs().max().item()))
        # Gather the parameters, edit them, and cut them again: they return to their former memory.
        for layer in (module for module in cut.modules() if hasattr(module, "gather_params")):
            params, places = [layer.weight, layer.bias], [p.data_ptr() for p in layer.parameters()]
            layer.gather_params(params)
            if world > 1:
                with pytest.raises(StateError, match="whole already"):
                    layer.gather_params(params)
            layer.weight.data.mul_(2)
            layer._tp_partition(params)
            assert [p.data_ptr() for p in layer.parameters()] == places
        for before, param in zip(whole.parameters(), cut.parameters(), strict=True):
            of = param.tp_cut.take if hasattr(param, "tp_cut") else torch.Tensor.clone
            if param.dim() > 1:
                assert torch.equal(param, of(before.detach() * 2))
    return found


def test_pairs_of_layers_compute_what_whole_ones_compute() -> None:
    for world in (2, 3):
        for found in run_ranks(world, compute):
            wrong = [entry for entry in found if not entry[1] < 2e-5]
            assert len(found) > 20 and not wrong, (world, wrong)


def test_without_a_group_they_are_the_layers_themselves() -> None:
    for name, (whole, alone) in pairs(None).items():
        x = torch.randn(2, 6)
        assert torch.equal(whole(x), alone(x)), name
        assert not any(hasattr(param, "tp_cut") for param in alone.parameters())


def gather_replaced(rank: int, world: int) -> list[str]:
    """Whole parameters within DeepSpeed's context, and edits that stay."""
    said = []
    for name, (whole, cut) in pairs(dist.group.WORLD).items():
        before = {key: param.detach().clone() for key, param in whole.named_parameters()}
        places = [param.data_ptr() for param in cut.parameters()]
        params = list(cut.parameters())
        with GatherReplacedLayerParams(params, cut, enabled=False):
            assert [param.data_ptr() for param in params] == places
        with GatherReplacedLayerParams(iter(params), cut):
            for value, param in zip(before.values(), params, strict=True):
                assert torch.equal(param, value), name
                param.data.mul_(3)
        assert [param.data_ptr() for param in params] == places
        for value, param in zip(before.values(), params, strict=True):
            want = value * 3
            assert torch.equal(param, param.tp_cut.take(want) if hasattr(param, "tp_cut") else want), name
        first = next(param for param in params if hasattr(param, "tp_cut"))
        with GatherReplacedLayerParams(first, cut):
            assert first.shape == first.tp_cut.logical_shape
        with pytest.raises(ModelError) as caught:
            GatherReplacedLayerParams(params, nn.Identity())
        said.append(str(caught.value))
    return said


def test_replaced_layers_are_whole_within_a_context() -> None:
    for world in (2, 3):
        for said in run_ranks(world, gather_replaced):
            assert len(said) > 2 and all("no linear layer of Identity" in text for text in said), said


def refuse(rank: int, world: int) -> list[str]:
    group, said = dist.group.WORLD, []
    for make in (
        lambda: SubParamLinearLayer(nn.Linear(6, 20), group, (3, -1)),
        lambda: SubParamLinearLayer(nn.Linear(6, 20), group, ((4, 15), -1), name="qkv"),
        lambda: SubParamLinearAllreduce(nn.Linear(6, 20), group, (-1, 2), partition_dim=0),
        lambda: LinearLayer(LinearLayer(nn.Linear(6, 20), group), group),
        lambda: LinearLayer(nn.Linear(6, 20), group, True, True),
    ):
        try:
            make()
            said.append("nothing")
        except DeepSpeedCError as error:
            said.append(f"{type(error).__name__} {error}")
    layer = LinearLayer(nn.Linear(6, 20), group)
    with pytest.raises(StateError, match="not whole"):
        layer._tp_partition([layer.weight])
    return said


def test_what_does_not_fit_is_refused() -> None:
    expected = (
        (ConfigError, "20 elements of weight are no 3 equal parts"),
        (ModelError, "the parts [4, 15] make 19, the dimension has 20"),
        (ModelError, "cut along dimension 1, not 0"),
        (ModelError, "it is cut already"),
        (ModelError, "pass the whole layer"),
    )
    for (kind, text), said in zip(expected, run_ranks(2, refuse)[1], strict=True):
        assert said.startswith(kind.__name__) and text in said and "Fix: " in said, said


ALIASES = """
import deepspeed_c
deepspeed_c.install_as_deepspeed(force=True)
import deepspeed
from deepspeed.module_inject import LinearLayer
from deepspeed.module_inject.layers import LmHeadLinearAllreduce
from deepspeed_c.inject import layers
assert LinearLayer is layers.LinearLayer and LmHeadLinearAllreduce is layers.LmHeadLinearAllreduce
assert deepspeed.tp_model_init is deepspeed_c.tp_model_init
from deepspeed.module_inject import AutoTPConfig, AutoTPPresets, EmbeddingLayer, HFBertLayerPolicy, PartitionType
from deepspeed.module_inject import TPLayerSpec, generic_injection, merge_autotp_configs, set_autotp_mode
from deepspeed.module_inject.autotp_config import AutoTPConfig as same_config
from deepspeed.module_inject.containers import HFDistilBertLayerPolicy
from deepspeed.module_inject.layers import fused_LinearLayer, is_autotp_training_mode
from deepspeed.module_inject.replace_module import get_transformer_name, replace_module, skip_level_0_prefix
from deepspeed.runtime.state_dict_factory import AUTO_MODULE_KEY, MegatronSDLoader, SDLoaderFactory
from deepspeed_c.inject import by_hand, replace
assert AutoTPConfig is same_config and AutoTPPresets.llama().layer_specs[0].partition_type is PartitionType.ROW
assert deepspeed.set_autotp_mode is set_autotp_mode and EmbeddingLayer is by_hand.EmbeddingLayer
assert deepspeed.replace_transformer_layer is replace.replace_transformer_layer
assert deepspeed.revert_transformer_layer is replace.revert_transformer_layer
"""


def test_deepspeeds_paths_lead_to_them() -> None:
    done = fresh.run(["-c", ALIASES])
    assert done.returncode == 0, done.stderr
