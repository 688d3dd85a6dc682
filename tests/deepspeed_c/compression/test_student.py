"""A student made of its teacher's layers (deepspeed_c/compression/student.py)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.compression.compress import init_compression, student_initialization
from deepspeed_c.errors import ConfigError, DeepSpeedCError, ModelError, StateError
from tests.ranks import run_ranks
from tests.training import engine_of


class Stack(nn.Module):
    def __init__(self, n_layers: int, width: int = 4, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(5, width)
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(n_layers)
        )
        self.head = nn.Linear(width, 5)
        for norm in (layer[1] for layer in self.body.layers):
            nn.init.normal_(norm.running_mean)


def config_of(**keys: object) -> dict:
    section = {
        "enabled": True,
        "keep_number_layer": 2,
        "module_name_prefix": "body.layers",
        "teacher_layer": [1, 3],
        "other_module_name": ["table"],
    }
    return {"train_batch_size": 2, "compression_training": {"layer_reduction": {**section, **keys}}}


def differences(student: nn.Module, teacher: nn.Module, before: dict[str, torch.Tensor]) -> list[str]:
    """Tensors unlike DeepSpeed's section: layers 1 and 3 and the table are the teacher's, the head is the student's."""
    wanted, state = dict(before), {name: value.to(torch.float32) for name, value in teacher.state_dict().items()}
    for name in before:
        for number, source in enumerate((1, 3)):
            prefix = f"body.layers.{number}."
            if name.startswith(prefix):
                wanted[name] = state[f"body.layers.{source}." + name.removeprefix(prefix)]
        if name.startswith("table"):
            wanted[name] = state[name]
    return [
        name for name, value in student.state_dict().items() if not torch.equal(value.float(), wanted[name].float())
    ]


@pytest.mark.parametrize("by", ["init_compression", "student_initialization"])
def test_layers_and_modules_of_the_teacher_are_copied(by: str):
    teacher, student = Stack(4).double(), Stack(2, seed=1)
    before, ids = copy.deepcopy(student.state_dict()), [id(param) for param in student.parameters()]
    if by == "init_compression":
        assert init_compression(student, config_of(), teacher) is student
    else:
        assert student_initialization(student, teacher, config_of()) is student
    found = differences(student, teacher, before)
    print(found)
    assert not found and ids == [id(param) for param in student.parameters()]
    assert student.table.weight.dtype == torch.float32 and student.table.weight is not teacher.table.weight


def test_only_other_modules():
    teacher, student = Stack(4), Stack(2, seed=1)
    layers = copy.deepcopy(student.body.state_dict())
    student_initialization(
        student, teacher, config_of(keep_number_layer=None, teacher_layer=None, module_name_prefix=None)
    )
    assert torch.equal(student.table.weight, teacher.table.weight)
    assert all(torch.equal(value, layers[name]) for name, value in student.body.state_dict().items())


@pytest.mark.parametrize(
    ("keys", "student", "error", "text"),
    [
        ({"module_name_prefix": "body.layer"}, Stack(2), ConfigError, "body.layers"),
        ({"module_name_prefix": None}, Stack(2), ConfigError, "layer_reduction.module_name_prefix: is missing"),
        ({"teacher_layer": None, "other_module_name": None}, Stack(2), ConfigError,
         "layer_reduction.teacher_layer: is missing"),
        ({"teacher_layer": [1, 4]}, Stack(2), ConfigError, "write numbers from 0 to 3"),
        ({"keep_number_layer": 3}, Stack(2), ConfigError, "is 3, and teacher_layer names 2 layers"),
        ({}, Stack(3), ConfigError, "the student has 3 in body.layers"),
        ({"other_module_name": ["tables"]}, Stack(2), ConfigError, "the teacher has no module 'tables'"),
        ({}, Stack(2, width=3), ModelError,
         "body.layers.0.0.weight: is [3, 3], and body.layers.1.0.weight of the teacher is [4, 4]"),
    ],
)  # fmt: skip
def test_wrong_input_changes_nothing(keys: dict, student: nn.Module, error: type[DeepSpeedCError], text: str):
    before = copy.deepcopy(student.state_dict())
    with pytest.raises(error) as raised:
        init_compression(student, config_of(**keys), Stack(4))
    print(raised.value)
    assert text in str(raised.value)
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())


def sharded_body(rank: int, world: int) -> list[str]:
    base = {"train_batch_size": world, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    plain, before = Stack(4), Stack(2, seed=1).state_dict()
    with deepspeed_c.zero.Init(config_dict_or_path=base):
        teacher, student = Stack(4), Stack(2, seed=1)
    config = {**config_of(), **base, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    student_initialization(student, teacher, config)
    engine = engine_of(student, config)
    state = engine.module_state_dict()
    try:
        student_initialization(engine.module, teacher, config)
    except StateError as error:
        refusal = str(error)
    copied = Stack(2)
    copied.load_state_dict(state)
    return [*differences(copied, plain, before), refusal]


def test_sharded_models():
    for found in run_ranks(2, sharded_body):
        print(found)
        assert len(found) == 1 and "belongs to an engine" in found[0]
