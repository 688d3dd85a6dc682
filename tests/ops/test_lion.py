"""FusedLion and DeepSpeedCPULion against the paper's algorithm written out in torch."""

from __future__ import annotations

import pytest
import torch

from deepspeed_c.errors import OptimizerError
from deepspeed_c.ops.lion import DeepSpeedCPULion, FusedLion
from tests.ops.interchange import assert_equal, fresh_params, train


@pytest.mark.parametrize("cls", [FusedLion, DeepSpeedCPULion])
def test_as_the_paper(cls):
    lr, (beta1, beta2), decay = 0.01, (0.8, 0.95), 0.1
    params, want = fresh_params(), [p.detach().clone() for p in fresh_params()]
    momenta = [torch.zeros_like(p) for p in want]
    optimizer = cls(params, lr=lr, betas=(beta1, beta2), weight_decay=decay)
    for seed in range(5):
        train(optimizer, params, range(seed, seed + 1))
        for i, p in enumerate(params):
            update = torch.sign(beta1 * momenta[i] + (1 - beta1) * p.grad)
            want[i] = want[i] - lr * (update + decay * want[i])
            momenta[i] = beta2 * momenta[i] + (1 - beta2) * p.grad
    assert_equal([p.detach() for p in params], want, "Lion")
    assert_equal([optimizer.state[p]["exp_avg"] for p in params], momenta, "Lion's momentum")


def test_zero_gradient_moves_nothing():
    param = torch.nn.Parameter(torch.ones(5))
    optimizer = FusedLion([param], lr=0.5)
    param.grad = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-45])
    optimizer.step()
    assert param.tolist() == [1.0, 1.0, 0.5, 1.5, 1.0] or param.tolist() == [1.0, 1.0, 0.5, 1.5, 0.5]


def test_arguments_of_old_steps_are_refused():
    with pytest.raises(OptimizerError, match="takes no output_params"):
        FusedLion(fresh_params()).step(output_params=[])
