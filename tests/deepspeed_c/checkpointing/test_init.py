"""checkpointing/__init__.py: what configure accepts and refuses, and DeepSpeed's names for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deepspeed_c
from deepspeed_c import checkpointing
from deepspeed_c.errors import ConfigError, FeatureError

SECTION = {"partition_activations": False, "cpu_checkpointing": False, "number_checkpoints": 4}


@pytest.fixture(autouse=True)
def unconfigured() -> Any:
    checkpointing._configured.clear()
    yield
    checkpointing._configured.clear()


def section() -> Any:
    return checkpointing._configured.recomputer.section


def test_arguments_win_over_the_section() -> None:
    assert not checkpointing.is_configured()
    config = {"activation_checkpointing": {**SECTION, "cpu_checkpointing": True}, "train_batch_size": 1}
    checkpointing.configure(None, deepspeed_config=config)
    assert checkpointing.is_configured() and section().cpu_checkpointing and section().number_checkpoints == 4
    checkpointing.configure(None, config, checkpoint_in_cpu=False, num_checkpoints=7, synchronize=True)
    assert (section().cpu_checkpointing, section().number_checkpoints) == (False, 7)
    assert section().synchronize_checkpoint_boundary
    checkpointing.configure(None, deepspeed_config={"train_batch_size": 1})
    assert section().number_checkpoints is None
    checkpointing.reset()
    assert checkpointing.is_configured()


def test_what_lightning_says() -> None:
    off = dict.fromkeys(("partition_activations", "contiguous_checkpointing", "checkpoint_in_cpu", "profile"), False)
    checkpointing.configure(mpu_=None, **off)
    assert checkpointing.is_configured()


def test_profile_is_an_error() -> None:
    with pytest.raises(FeatureError, match="profile"):
        checkpointing.configure(None, profile=True)
    assert not checkpointing.is_configured()


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"num_checkpoints": 3}, "partition_activations"),
        ({"partition_activations": True}, "number_checkpoints"),
        ({}, "partition_activations.*number_checkpoints"),
    ],
)
def test_contiguous_without_what_it_needs(given: dict, missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        checkpointing.configure(None, contiguous_checkpointing=True, **given)
    assert not checkpointing.is_configured()


def test_set_num_layers_is_enough_of_a_count() -> None:
    checkpointing.set_num_layers(12)
    checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True)
    with pytest.raises(ConfigError, match="partition_activations_in_checkpoint"):
        checkpointing.partition_activations_in_checkpoint(False)
    checkpointing.configure(None)
    checkpointing.partition_activations_in_checkpoint(True)
    assert section().partition_activations


def test_which_tensors_are_activations() -> None:
    x = torch.randn(3)
    assert checkpointing.is_activation_to_checkpoint(x)
    assert not any(map(checkpointing.is_activation_to_checkpoint, (None, 3, torch.arange(3), x > 0, x[:0])))
    x.no_checkpointing = True
    assert not checkpointing.is_activation_to_checkpoint(x)
    x.no_checkpointing = False
    assert checkpointing.is_activation_to_checkpoint(x)
    assert (checkpointing.get_partition_start(x), checkpointing.get_partition_size(x)) == (0, 3)


def test_it_is_an_attribute_of_the_package() -> None:
    assert deepspeed_c.checkpointing is checkpointing
