"""Losses of distillation (deepspeed_c/compression/distillation.py) against formulas in NumPy's fp64, and a student that
learns from a frozen teacher at ZeRO stage 3."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepspeed_c.compression.distillation import Distillation, attention_loss, hidden_states_loss, logits_loss
from deepspeed_c.errors import ConfigError, ModelError
from tests.deepspeed_c.compression.oracle import Model, batch, loss_of
from tests.ranks import run_ranks
from tests.training import descend_together, engine_of, update


def divergence(student: torch.Tensor, teacher: torch.Tensor, temperature: float, mask: np.ndarray | None) -> float:
    own, wanted = (
        np.float64(t.detach().float().numpy()).reshape(-1, t.shape[-1]) / temperature for t in (student, teacher)
    )
    p, q = (np.exp(x - x.max(1, keepdims=True)) for x in (wanted, own))
    p, q = (x / x.sum(1, keepdims=True) for x in (p, q))
    each = (p * (np.log(p) - np.log(q))).sum(1)
    kept = np.ones(len(each), bool) if mask is None else mask.reshape(-1)
    return float(each[kept].sum() / max(kept.sum(), 1) * temperature**2)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_divergence_of_logits(temperature: float, dtype: torch.dtype):
    torch.manual_seed(0)
    student, teacher = (3 * torch.randn(2, 5, 7).to(dtype) for _ in range(2))
    student.requires_grad_()
    teacher.requires_grad_()
    mask = torch.rand(2, 5) > 0.4
    for where in (None, mask):
        ours = logits_loss(student, teacher, temperature, where)
        wanted = divergence(student, teacher, temperature, None if where is None else where.numpy())
        print(ours.item(), wanted)
        assert ours.dtype == torch.float32 and abs(ours.item() - wanted) <= 2e-5 * max(wanted, 1)
    ours.backward()
    assert teacher.grad is None and student.grad.isfinite().all() and not student.grad[~mask].any()


def test_the_divergence_is_0_of_equal_logits_and_of_no_positions():
    logits = torch.randn(2, 3, 5)
    assert logits_loss(logits, logits).item() == 0
    assert logits_loss(logits, -logits, mask=torch.zeros(2, 3, dtype=torch.bool)).item() == 0
    assert logits_loss(logits[:0], logits[:0]).item() == 0


def test_hidden_states_and_attention_compare_the_layers_that_are_named():
    torch.manual_seed(1)
    teacher = [torch.randn(2, 3, 4) for _ in range(5)]  # the embeddings and four layers
    student = [torch.randn(2, 3, 4) for _ in range(3)]
    wanted = np.mean(
        [
            ((a - b).double() ** 2).mean().item()
            for a, b in zip(student, (teacher[0], teacher[2], teacher[4]), strict=True)
        ]
    )
    ours = hidden_states_loss(student, teacher, (1, 3)).item()
    print(ours, wanted)
    assert abs(ours - wanted) < 1e-6
    wanted = np.mean(
        [((a - b).double() ** 2).mean().item() for a, b in zip(student[:2], (teacher[3], teacher[0]), strict=True)]
    )
    assert abs(attention_loss(student[:2], teacher, (3, 0)).item() - wanted) < 1e-6


def test_the_weighted_sum():
    torch.manual_seed(2)
    outputs = [
        SimpleNamespace(
            logits=torch.randn(2, 3), hidden_states=tuple(torch.randn(2, 2, 2)), attentions=tuple(torch.randn(1, 2, 2))
        )
        for _ in range(2)
    ]
    distil = Distillation(layers=(0,), logits=0.5, hidden_states=2.0, attentions=3.0, temperature=2.0)
    parts = [
        0.5 * logits_loss(outputs[0].logits, outputs[1].logits, 2.0),
        2.0 * hidden_states_loss(outputs[0].hidden_states, outputs[1].hidden_states, (0,)),
        3.0 * attention_loss(outputs[0].attentions, outputs[1].attentions, (0,)),
    ]
    assert torch.allclose(distil(*outputs), sum(parts))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: logits_loss(torch.zeros(2, 3), torch.zeros(2, 4)), ModelError,
         "the student's are [2, 3], the teacher's [2, 4]"),
        (lambda: logits_loss(torch.zeros(2, 3), torch.zeros(2, 3), 0.0), ConfigError, "temperature: is 0.0"),
        (lambda: hidden_states_loss([torch.zeros(1)] * 2, [torch.zeros(1)] * 2, (3,)), ModelError,
         "output_hidden_states=True"),
        (lambda: attention_loss([torch.zeros(1)], [torch.zeros(1)] * 2, (0, 1)), ModelError, "output_attentions=True"),
        (lambda: Distillation(logits=0.0)(None, None), ConfigError, "give logits a weight above 0"),
        (lambda: Distillation()(SimpleNamespace(logits=None), None), ModelError, "the student's output has none"),
    ],
)  # fmt: skip
def test_wrong_input(call, error, text):
    with pytest.raises(error) as raised:
        call()
    print(raised.value)
    assert text in str(raised.value)


def teacher_body(rank: int, world: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    teacher = Model()
    with torch.no_grad():
        teacher.mid.weight.mul_(-1)
    frozen = engine_of(
        teacher, {"train_batch_size": 4, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    )
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": 2},
    }
    engine = engine_of(Model(), config)
    losses = []
    for step in range(3):
        words = batch(step).chunk(world)[rank]
        with torch.no_grad():
            wanted = frozen(words)
        out = engine(words)
        losses.append(update(engine, loss_of(out, words) + logits_loss(out, wanted, 2.0)))
    return losses, {name: value.clone() for name, value in engine.module.state_dict().items()}


def test_a_frozen_engine_at_stage_3_teaches():
    teacher, student = Model(), Model()
    with torch.no_grad():
        teacher.mid.weight.mul_(-1)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.5)
    losses = []
    for step in range(3):
        words = batch(step)
        out = student(words)
        loss = loss_of(out, words) + logits_loss(out, teacher(words), 2.0)
        descend_together(optimizer, [loss], 1.0)  # the engine's default
        losses.append(loss.item())
    found = run_ranks(2, teacher_body)
    means = [sum(pair) / 2 for pair in zip(*(losses for losses, _ in found), strict=True)]
    print(means, losses)
    torch.testing.assert_close(means, losses, rtol=1e-5, atol=1e-5)
    for _, weights in found:
        torch.testing.assert_close(weights, dict(student.state_dict()), rtol=1e-5, atol=1e-5)
