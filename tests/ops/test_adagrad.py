"""DeepSpeedCPUAdagrad against torch.optim.Adagrad."""

from __future__ import annotations

import pytest
import torch

from deepspeed_c.errors import OptimizerError
from deepspeed_c.ops.adagrad import DeepSpeedCPUAdagrad
from tests.ops.interchange import check_interchange, check_parity, fresh_params


@pytest.mark.parametrize("options", [{"lr": 0.1}, {"lr": 0.05, "eps": 1e-6, "weight_decay": 0.1}], ids=str)
@pytest.mark.parametrize("check", [check_parity, check_interchange])
def test_as_torch(check, options):
    check(lambda p: DeepSpeedCPUAdagrad(p, **options), lambda p: torch.optim.Adagrad(p, **{"eps": 1e-10, **options}))


def test_learning_rate_decay_comes_with_the_group():
    check_parity(
        lambda p: DeepSpeedCPUAdagrad([{"params": p, "lr_decay": 0.3}], lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.3),
    )


def test_amsgrad_is_refused():
    with pytest.raises(OptimizerError, match="AMSGrad"):
        DeepSpeedCPUAdagrad(fresh_params(), amsgrad=True)
