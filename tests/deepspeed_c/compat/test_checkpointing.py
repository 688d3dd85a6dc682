"""recompute/__init__.py: the arguments that configure accepts and refuses, and DeepSpeed's names for configure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed_c
from deepspeed_c import checkpointing
from deepspeed_c.errors import ConfigError
from deepspeed_c.recompute.configured import configured

SECTION = {"partition_activations": False, "cpu_checkpointing": False, "number_checkpoints": 4}


@pytest.fixture(autouse=True)
def unconfigured() -> Any:
    configured.clear()
    yield
    configured.clear()


def section() -> Any:
    return configured.recomputer.section


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


def test_the_profile_of_layers() -> None:
    assert checkpointing.profile_of_layers() == {}
    checkpointing.configure(None, profile=True)
    x = torch.randn(3, 5, requires_grad=True)
    checkpointing.checkpoint(torch.nn.Linear(5, 5), checkpointing.checkpoint(torch.tanh, x)).sum().backward()
    found = checkpointing.profile_of_layers()
    assert len(found) == 2 and "Linear" in found, found
    for figures in found.values():
        assert figures["n"] == 1 and figures["forward_ns"] > 0 and figures["recompute_ns"] > 0, found
        assert (figures["bytes_kept"], figures["bytes_moved"]) == (60, 0), found


def test_offloaded_without_running_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[checkpointing.offload_activations.__module__], "_GROUP_BYTES", 10_000)
    torch.manual_seed(1)
    layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(6)))
    x = torch.randn(100, 16)
    layers(x).square().sum().backward()
    want = [param.grad.clone() for param in layers.parameters()]
    layers.zero_grad()
    there = checkpointing.offload_activations("nvme", str(tmp_path), min_bytes=1000)
    with there:
        loss = layers(x).square().sum()
    assert there.stash.file_bytes > 4 * x.nbytes
    loss.backward()
    assert all(torch.equal(param.grad, grad) for param, grad in zip(layers.parameters(), want, strict=True))
    assert there.stash.read_bytes > 0 and there.stash.file_bytes == 0
    args = [x, None, torch.arange(3)]
    kept = checkpointing.get_offloaded_activations_for_backward(args, there)
    assert not torch.is_tensor(kept[0]) and kept[1] is None and kept[2] is args[2] and x.numel() == 1600
    again = checkpointing.restore_offloaded_activations(kept, there)
    assert torch.equal(again[0], x) and again[1:] == args[1:]
    copies = [x.clone(), None, args[2].clone()]
    found = checkpointing.get_cpu_activations_for_backward(args, copies)
    assert found[0] is copies[0] and found[1] is None and found[2] is args[2]
    for wrong in ({"device": "disk"}, {"device": "nvme"}, {"device": "cpu", "nvme_path": "/"}):
        with pytest.raises(ConfigError, match="offload_activations"):
            checkpointing.offload_activations(**wrong)


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
