"""examples/gpt.py: causal, position-aware, tied, honest loss; the same numbers when products run in fp32; experts."""

from __future__ import annotations

import math

import gpt
import pytest
import torch
import torch.nn.functional as F
from gpt import GPT, rotate

from deepspeed_c.moe.layer import MoE


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


def test_experts_begin_as_the_mlp_whose_place_they_take():
    dense, sparse = make(layers=5), make(layers=5, experts=4, k=2)
    mixtures = [name for name, module in sparse.named_modules() if isinstance(module, MoE)]
    assert mixtures == ["blocks.1.mlp", "blocks.3.mlp"]
    # With k = 2 the weights of a token's experts add up to 1, and twice the even share drops nothing in evaluation.
    tokens = torch.randint(256, (3, 16))
    torch.testing.assert_close(sparse.eval().logits(tokens), dense.logits(tokens), rtol=1e-5, atol=1e-6)
    experts = sparse.blocks[3].mlp.deepspeed_moe.experts.deepspeed_experts
    assert len(experts) == 4 and len({id(expert.up.weight) for expert in experts}) == 4


def test_the_loss_of_the_gates_counts_in_training_only():
    model = make(layers=4, experts=4, k=1)
    tokens = torch.randint(256, (3, 17))
    wanted = torch.zeros((), dtype=torch.float64)

    def add(layer: MoE, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal wanted
        logits = inputs[0].flatten(0, 1).double() @ layer.deepspeed_moe.gate.wg.weight.double().T
        shares = F.one_hot(logits.argmax(1), 4).double().mean(0)
        wanted = wanted + 4 * (logits.softmax(1).mean(0) * shares).sum()

    for layer in (model.blocks[1].mlp, model.blocks[3].mlp):
        # Nothing is dropped, in training either, so both losses are about the same outputs.
        layer.deepspeed_moe.gate.capacity_factor = layer.deepspeed_moe.gate.eval_capacity_factor = 4.0
        layer.register_forward_pre_hook(add)
    plain = model.eval()(tokens).item()
    wanted.zero_()
    trained = model.train()(tokens)
    assert trained.item() - plain == pytest.approx(0.01 * wanted.item(), rel=1e-3), (trained, plain, wanted)
    trained.backward()
    for layer in (model.blocks[1].mlp, model.blocks[3].mlp):
        assert layer.deepspeed_moe.gate.wg.weight.grad.abs().sum() > 0
