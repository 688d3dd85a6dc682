"""A model is built in a dtype on a device. Everything is as before afterwards."""

import pytest
import torch
from torch import nn

from deepspeed_c.errors import StateError
from deepspeed_c.utils import OnDevice


def test_on_the_meta_device_in_16_bits():
    with OnDevice(torch.bfloat16):
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
        named = torch.zeros(2, dtype=torch.float64, device="cpu")
        index = torch.arange(3)
    for tensor in (*model.parameters(), model[1].running_mean):
        assert tensor.is_meta and tensor.dtype is torch.bfloat16
    assert index.dtype is torch.int64 and named.dtype is torch.float64 and not named.is_meta
    assert torch.ones(1).dtype is torch.float32 and not torch.ones(1).is_meta


def test_on_a_device_with_values_and_nested():
    with OnDevice(torch.float16, "cpu") as outer:
        with OnDevice(torch.float64, "meta"), OnDevice(torch.bfloat16, enabled=False):
            inner = nn.Linear(2, 2)
        after = nn.Linear(2, 2)
        with pytest.raises(StateError, match="open already"):
            outer.__enter__()
    assert inner.weight.is_meta and inner.weight.dtype is torch.float64
    assert after.weight.dtype is torch.float16 and after.weight.abs().sum() > 0


def test_an_error_within_leaves_nothing_behind():
    with pytest.raises(KeyError), OnDevice(torch.float16, "meta"):
        raise KeyError
    assert torch.ones(1).dtype is torch.float32 and not torch.ones(1).is_meta
