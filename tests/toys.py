"""Toy models for tests of several parts. Names say what is hard about a model."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["ODD_WIDTH", "odd_net"]

ODD_WIDTH = 7  # the number of inputs


def odd_net() -> nn.Sequential:
    """Two layers of odd sizes, with equal weights in every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(ODD_WIDTH, ODD_WIDTH), nn.Tanh(), nn.Linear(ODD_WIDTH, 3))
