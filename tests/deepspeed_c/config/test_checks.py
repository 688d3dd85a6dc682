"""Pairs of values that contradict each other are found. Similar pairs without a contradiction are accepted."""

import pytest

from deepspeed_c.config import problems_of
from deepspeed_c.config.features import FEATURES

ON = {"enabled": True}


def found(tree):
    return [problem.where for problem in problems_of(tree, batch="skip")]


@pytest.mark.parametrize(
    "tree, where",
    [
        ({"fp16": ON, "bf16": ON}, "fp16.enabled, bf16.enabled"),
        ({"fp16": {**ON, "loss_scale_window": 0}}, "fp16.loss_scale_window"),
        ({"fp16": {**ON, "min_loss_scale": 0}}, "fp16.min_loss_scale"),
        (
            {"fp16": {**ON, "initial_scale_power": 3, "min_loss_scale": 9}},
            "fp16.initial_scale_power, fp16.min_loss_scale",
        ),
        (
            {"bf16": {**ON, "bf16_optimizer_states": True}, "zero_optimization": {"stage": 1}},
            "bf16.bf16_optimizer_states",
        ),
        ({"bf16": {**ON, "bf16_master_weights_and_grads": True}}, "bf16.bf16_master_weights_and_grads"),
        ({"fp16": ON, "data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype"),
        ({"bf16": ON, "data_types": {"param_dtype": "fp32"}}, "data_types.param_dtype"),
        ({"data_types": {"param_dtype": "fp16"}}, "data_types.param_dtype"),
        (
            {"managed_gradient_accumulation": False, "zero_optimization": {"stage": 1, "overlap_comm": True}},
            "managed_gradient_accumulation",
        ),
        ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, "optimizer.params.amsgrad"),
        ({"optimizer": {"type": "Adam", "params": {"foreach": True}}}, "optimizer.params.foreach"),
        ({"optimizer": {"type": "Adam", "params": {"foreach": False}}}, "optimizer.params.foreach"),
        (
            {"optimizer": {"type": "Adam", "params": {"torch_adam": True, "bias_correction": False}}},
            "optimizer.params.bias_correction",
        ),
        ({"optimizer": {"type": "lamb", "params": {"state_dtype": "int8"}}}, "optimizer.params.state_dtype"),
        ({"optimizer": {"type": "Adagrad", "params": {"state_dtype": "int8"}}}, "optimizer.params.state_dtype"),
        ({"optimizer": {"type": "Muon", "params": {"state_dtype": "int8"}}}, "optimizer.params.state_dtype"),
        (
            {"optimizer": {"type": "Adam", "params": {"torch_adam": True, "state_dtype": "bf16"}}},
            "optimizer.params.state_dtype",
        ),
        (
            {
                "bf16": {**ON, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
                "zero_optimization": {"stage": 1},
                "optimizer": {"type": "AdamW", "params": {"state_dtype": "fp32"}},
            },
            "optimizer.params.state_dtype, bf16.bf16_optimizer_states",
        ),
        ({"optimizer": {"type": "AdamW", "params": {"state_dtype": "fp16"}}}, "optimizer.params.state_dtype"),
        ({"checkpoint": {"every": "60s"}}, "checkpoint.every"),
        ({"checkpoint": {"every": 0, "auto_resume": "here"}}, "checkpoint.every"),
        ({"checkpoint": {"every": "0m", "auto_resume": "here"}}, "checkpoint.every"),
        ({"checkpoint": {"every": "soon", "auto_resume": "here"}}, "checkpoint.every"),
        ({"checkpoint": {"every": "9e999h", "auto_resume": "here"}}, "checkpoint.every"),
        ({"checkpoint": {"auto_resume": ""}}, "checkpoint.auto_resume"),
    ],
)
def test_conflict(tree, where):
    assert found(tree) == [where]


@pytest.mark.parametrize(
    "tree",
    [
        {"fp16": ON, "bf16": {"enabled": False}},
        {"fp16": {"loss_scale_window": 0, "min_loss_scale": 0}},
        {"fp16": {**ON, "loss_scale": 128, "loss_scale_window": 0, "min_loss_scale": 0}},
        {"fp16": {**ON, "initial_scale_power": 3, "min_loss_scale": 8}},
        {
            "bf16": {**ON, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
            "zero_optimization": {"stage": 1},
        },
        {"bf16": ON, "data_types": {"param_dtype": "bfloat16"}},
        {"data_types": {"param_dtype": "fp32"}},
        {"managed_gradient_accumulation": False, "zero_optimization": {"stage": 2, "overlap_comm": True}},
        {"managed_gradient_accumulation": False, "zero_optimization": {"stage": 1}},
        {"optimizer": {"type": "AdamW", "params": {"amsgrad": True, "torch_adam": True, "foreach": False}}},
        {"optimizer": {"type": "AdamW", "params": {"amsgrad": False, "bias_correction": False, "foreach": None}}},
        {"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 2}},
        {"optimizer": {"type": "Lamb", "params": {"state_dtype": "bf16"}}},
        {"optimizer": {"type": "AdamW", "params": {"state_dtype": None, "torch_adam": True}}},
        {"optimizer": {"type": "SGD", "params": {"state_dtype": "INT8"}}},
        {
            "bf16": {**ON, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"state_dtype": "bfloat16"}},
        },
    ],
)
def test_no_conflict(tree):
    assert found(tree) == []


def test_conflicts_that_wait_for_a_feature(monkeypatch):
    monkeypatch.setitem(FEATURES, "amp", FEATURES["amp"]._replace(is_built=True))
    assert found({"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}}) == ["gradient_allreduce_op"]
    assert found({"amp": ON, "bf16": ON}) == ["amp.enabled"]
    assert found({"amp": ON}) == []


@pytest.mark.parametrize(
    "tree, where",
    [
        ({"zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "cpu"}}}, []),
        ({"zero_optimization": {"stage": "auto", "offload_param": {"device": "nvme", "nvme_path": "auto"}}}, []),
        ({"fp16": ON, "bf16": {"enabled": "auto"}}, []),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}, "data_types": {"param_dtype": "bf16"}}, []),
        ({"fp16": ON, "bf16": ON, "zero_optimization": {"stage": "auto"}}, ["fp16.enabled, bf16.enabled"]),
        # fp16 is on, so any other dtype of weights contradicts it.
        ({"fp16": ON, "bf16": {"enabled": "auto"}, "data_types": {"param_dtype": "bf16"}}, ["data_types.param_dtype"]),
        (
            {
                "zero_optimization": {
                    "stage": 0,
                    "offload_optimizer": {"device": "cpu"},
                    "offload_param": {"device": "auto"},
                }
            },
            ["zero_optimization.offload_optimizer.device"],
        ),
    ],
)
def test_only_what_holds_whatever_an_auto_becomes_is_a_conflict(tree, where):
    assert found(tree) == where
