"""Configurations, engines and training loops that tests share.

A test names its special values, and leaves the rest to the defaults here. ``config`` writes a configuration,
``engine_of`` makes an engine from it, ``step`` and ``train`` run it, ``update`` takes a loss, and ``whole_weights``
reads it at any stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import deepspeed_c
from deepspeed_c.zero import GatheredParameters

__all__ = ["config", "descend", "descend_together", "engine_of", "loss_of", "step", "train", "update", "whole_weights"]


def config(
    stage: int | None = None,
    optimizer: str | dict[str, Any] | None = "SGD",
    *,
    rows: int = 1,
    accumulate: int | None = None,
    zero: dict[str, Any] | None = None,
    **sections: Any,
) -> dict[str, Any]:
    """A configuration with an optimizer of this package. Other keys are left out, unless a test gives them.

    ``stage`` and ``zero``: the section ``zero_optimization``. ``optimizer``: a type, or the whole section. ``rows``:
    samples of a micro-batch. ``accumulate``: micro-batches a step. ``sections``: further keys of the configuration,
    among them ``lr`` and other parameters of the optimizer by ``params``.
    """
    found: dict[str, Any] = {"train_micro_batch_size_per_gpu": rows}
    params = {"lr": sections.pop("lr", 0.1), **sections.pop("params", {})}
    if accumulate is not None:
        found["gradient_accumulation_steps"] = accumulate
    if optimizer is not None:
        found["optimizer"] = optimizer if isinstance(optimizer, dict) else {"type": optimizer, "params": params}
    if stage is not None or zero:
        found["zero_optimization"] = {**({} if stage is None else {"stage": stage}), **(zero or {})}
    return {**found, **sections}


def engine_of(model: nn.Module, settings: dict[str, Any], **more: Any) -> Any:
    """An engine for all parameters of ``model``. ``more``: other arguments of ``initialize``."""
    return deepspeed_c.initialize(model=model, config=settings, **more)[0]


def loss_of(output: Any) -> torch.Tensor:
    """The loss in a model's output: the output itself, its attribute or key ``loss``, or its first entry."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, tuple):
        return output[0]
    return output["loss"] if isinstance(output, dict) else output.loss


def update(engine: Any, loss: torch.Tensor) -> float:
    """Backward and step. Returns the loss."""
    engine.backward(loss)
    engine.step()
    return loss.item()


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    """A step of plain torch, with no gradients of earlier steps. Returns the loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def descend_together(
    optimizer: torch.optim.Optimizer, losses: Iterable[torch.Tensor], clip: float | None = None
) -> float:
    """A step of plain torch with the sum of the gradients of ``losses``. Returns the norm before it was clipped."""
    optimizer.zero_grad()
    for loss in losses:
        loss.backward()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    norm = nn.utils.clip_grad_norm_(params, clip or math.inf)
    optimizer.step()
    return norm.item()


def step(engine: Any, *inputs: Any, **named: Any) -> float:
    """Forward, backward and step with one micro-batch. Returns the loss."""
    return update(engine, loss_of(engine(*inputs, **named)))


def train(engine: Any, batches: Iterable[Any]) -> list[float]:
    """The loss of each micro-batch. A micro-batch is a tensor, a tuple of arguments, or a dict of named arguments."""
    losses = []
    for batch in batches:
        if isinstance(batch, dict):
            losses.append(step(engine, **batch))
        else:
            losses.append(step(engine, *(batch if isinstance(batch, tuple | list) else (batch,))))
    return losses


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the weights that forward uses, by name, at any stage. Collective."""
    with GatheredParameters(list(model.parameters())):
        return {name: p.detach().clone() for name, p in model.named_parameters()}
