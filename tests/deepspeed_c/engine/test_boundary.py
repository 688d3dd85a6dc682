"""engine/boundary.py: gradients of all outputs are scaled once, and callers may use outputs as in plain torch."""

from __future__ import annotations

import torch

from deepspeed_c.engine.boundary import scale_outputs


def outputs(x: torch.Tensor) -> dict[str, torch.Tensor]:
    y = x * 2
    return {"loss": y.sum(), "logits": y}


def test_an_output_that_feeds_another_is_scaled_once():
    x = torch.ones(4, requires_grad=True)
    scaled = scale_outputs(outputs(x), lambda: 8.0)
    (scaled["loss"] + scaled["logits"].sum()).backward()
    assert x.grad.tolist() == [8.0 * (2 + 2)] * 4


def test_a_loss_may_be_changed_in_place():
    x = torch.ones(4, requires_grad=True)
    plain, scaled = outputs(x), scale_outputs(outputs(x), lambda: 8.0)
    scaled["loss"] *= 3
    scaled["loss"].backward()
    assert x.grad.tolist() == [8.0 * 3 * 2] * 4
    assert scaled["loss"].item() == 3 * plain["loss"].item() == 24.0
