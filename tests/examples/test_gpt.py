"""examples/gpt.py: causal, position-aware, tied, honest loss; the same numbers when products run in fp32."""

from __future__ import annotations

import math

import gpt
import pytest
import torch
from gpt import GPT, rotate


def make(seed: int = 0, **sizes: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(**{"layers": 2, "width": 32, "heads": 2, "context": 16, **sizes})


def test_size_is_what_the_example_says():
    assert sum(p.numel() for p in GPT(layers=4, width=448, heads=7, context=128).parameters()) == pytest.approx(
        10e6, rel=0.05
    )


def test_a_byte_does_not_see_those_after_it():
    model = make()
    tokens = torch.randint(256, (3, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model.logits(tokens), model.logits(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().amax(-1).min() > 0


def test_rotation_keeps_lengths_and_makes_products_depend_on_distance_only():
    torch.manual_seed(0)
    q, k = torch.randn(2, 64, dtype=torch.float64)
    turned_q, turned_k = rotate(q.expand(12, 64)), rotate(k.expand(12, 64))
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(12))
    products = turned_q @ turned_k.T
    for distance in range(-11, 12):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[0].expand_as(diagonal), rtol=1e-6, atol=1e-6)
    assert products.diagonal(1)[0] != pytest.approx(products.diagonal(0)[0].item(), abs=1e-3)


def test_an_untrained_model_is_as_good_as_a_guess():
    tokens = torch.randint(256, (4, 17), dtype=torch.uint8)
    assert make()(tokens).item() == pytest.approx(math.log(256), abs=0.1)


def test_bf16_parameters_give_the_fp32_loss_and_bf16_gradients(monkeypatch):
    tokens = torch.randint(256, (2, 17))
    exact = make().bfloat16().float()(tokens).item()
    for capability in ("AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        model = make().bfloat16()
        expected = torch.float32 if capability == "AVX2" else torch.bfloat16
        assert gpt.compute_dtype(model.embedding.weight) == expected
        loss = model(tokens)
        loss.backward()
        assert loss.item() == pytest.approx(exact, rel=1e-5 if capability == "AVX2" else 2e-2)
        assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}


def test_samples_repeat_with_their_seed_and_outgrow_the_context():
    model = make()
    first = model.sample(b"def ", n_bytes=40, temperature=1.0, seed=3)
    assert first == model.sample(b"def ", n_bytes=40, temperature=1.0, seed=3)
    assert first != model.sample(b"def ", n_bytes=40, temperature=1.0, seed=4)
    assert first.startswith(b"def ") and len(first) == 44
