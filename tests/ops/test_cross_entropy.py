"""Cross-entropy over a split vocabulary.

Losses of rows and gradients are compared with torch's in float64, in every dtype. Bad arguments are refused.
"""

from __future__ import annotations

import pytest
import torch

from deepspeed_c.ops import cross_entropy
from tests.ops.data import DTYPES

CUTS = {1: [(0, 1)], 103: [(0, 35), (35, 69), (69, 103)], 2: [(0, 1), (1, 2), (2, 2)], 2051: [(0, 1026), (1026, 2051)]}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("vocab_size", list(CUTS))
def test_loss_and_gradient_of_a_cut_vocabulary_are_the_whole_ones(dtype, smoothing, vocab_size):
    random = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(17, vocab_size, generator=random) * 5).to(dtype)
    targets = torch.randint(0, vocab_size, (17,), generator=random)
    scale = torch.rand(17, generator=random)
    scale[3] = 0
    whole = logits.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(whole, targets, reduction="none", label_smoothing=smoothing)
    (loss * scale).sum().backward()
    parts = [cross_entropy.rows(logits[:, begin:end].contiguous(), targets - begin) for begin, end in CUTS[vocab_size]]
    log_sum, target, total = cross_entropy.join(parts)
    got = log_sum - (1 - smoothing) * target - smoothing * total / vocab_size
    assert (got - loss).abs().max() < 2e-5
    grads = []
    for begin, end in CUTS[vocab_size]:
        grad = logits[:, begin:end].contiguous()
        cross_entropy.grad_(grad, targets - begin, log_sum, scale, smoothing, vocab_size)
        grads.append(grad)
    tolerance = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}[dtype]
    assert (torch.cat(grads, 1) - whole.grad).abs().max() < tolerance
    assert not torch.cat(grads, 1)[3].any()


def test_what_does_not_fit_is_refused():
    logits, targets = torch.rand(3, 5), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match="targets is int32, must be int64"):
        cross_entropy.rows(logits, targets.int())
    with pytest.raises(ValueError, match="logits must be a contiguous tensor of the host or of an accelerator"):
        cross_entropy.rows(torch.rand(5, 3).t(), targets)
    with pytest.raises(ValueError, match="int32, must be float32, bfloat16 or float16"):
        cross_entropy.rows(logits.int(), targets)
    with pytest.raises(ValueError, match="16 elements for 3 targets"):
        cross_entropy.rows(torch.rand(2, 8), targets)
    with pytest.raises(ValueError, match=r"smoothing is 1\.5"):
        cross_entropy.grad_(logits, targets, torch.zeros(3), torch.ones(3), 1.5, 5)
