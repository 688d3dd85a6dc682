"""Second shards (hpZ): a host sends the bytes of the formula in a step, with them and without."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from deepspeed_c.comm.transports import two_levels
from tests import training
from tests.hosts import why_no_hosts
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

WIDTH, LAYERS = 32, 2
NUMEL = LAYERS * WIDTH * WIDTH  # no unit needs padding
N_STEPS = 2


def sent_bytes(gas: int, settings: dict[str, Any]) -> dict[torch.dtype, int]:
    """dtype -> bytes of the messages of this rank to the other host, in ``N_STEPS`` steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    sent: Counter[torch.dtype] = Counter()
    send = two_levels._Messages.send

    def counted(self: Any, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        sent[tensor.dtype] += tensor.nbytes
        return send(self, tensor, rank, tag)

    with training.engine_of(model, settings) as engine:
        # The backward of the first layer needs its weight too.
        x = torch.ones(1, WIDTH, dtype=next(model.parameters()).dtype, requires_grad=True)

        def step() -> None:
            for _ in range(gas):
                training.update(engine, engine(x).float().square().mean())

        step()  # the order of the units is known from the second step on
        with mock.patch.object(two_levels._Messages, "send", counted):
            for _ in range(N_STEPS):
                step()
    return dict(sent)


def body(rank: int, world: int, gas: int, settings: dict[str, Any]) -> list[dict[torch.dtype, int]]:
    zero = settings["zero_optimization"]
    return [sent_bytes(gas, {**settings, "zero_optimization": {**zero, "zero_hpz_partition_size": n}}) for n in (1, 2)]


@pytest.mark.parametrize("gas", [1, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bytes_that_leave_a_host_are_those_of_the_formula(dtype: str, gas: int) -> None:
    zero = {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_live_parameters": 0,
        "reduce_bucket_size": WIDTH * WIDTH,
    }
    precision = {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    settings = training.config(3, "Adam", accumulate=gas, zero=zero, **precision)
    found = run_ranks(4, body, gas, settings, hosts=(0, 0, 1, 1))
    size = 2 if dtype == "bf16" else 4
    # Of two hosts each sends half. Sums inside a host are sent in fp32.
    summed = gas * NUMEL * 4 // 2
    gathered = {"stage 3": gas * 2 * NUMEL * size // 2, "second shards": NUMEL * size // 2}
    for i, (name, of_weights) in enumerate(gathered.items()):
        for host in (0, 1):
            on_host = [found[2 * host + local][i] for local in (0, 1)]
            # Descriptions of calls are bytes, and numbers that all ranks decide by are of float64.
            got = sum(n for sent in on_host for kind, n in sent.items() if kind in (torch.float32, torch.bfloat16))
            want = N_STEPS * (of_weights + summed)
            assert got == want, f"{name}, host {host}: {got} bytes instead of {want}: {on_host}"
            if dtype == "bf16":
                of_each = [sum(sent.get(kind, 0) for sent in on_host) for kind in (torch.bfloat16, torch.float32)]
                assert of_each == [N_STEPS * of_weights, N_STEPS * summed], (name, host, of_each)
