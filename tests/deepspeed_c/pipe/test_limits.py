"""The schedule "auto", and limits of the bytes of activations that a rank holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.errors import ConfigError
from deepspeed_c.pipe import LayerSpec, PipelineModule
from deepspeed_c.pipe.schedule import Cost, fitting, make_table
from tests.deepspeed_c.pipe.models import micro_batches, module_of
from tests.deepspeed_c.pipe.test_engine import STEPS, check, config_of, plain_run
from tests.ranks import run_ranks

N = 6


def test_fitting():
    costs = [Cost(kept_bytes=100, weight_bytes=150)] * 4
    assert fitting("gpipe", 4, N, costs, None, is_v=False) == "gpipe"
    assert fitting("gpipe", 4, N, costs, 100 * N, is_v=False) == "gpipe"
    assert fitting("auto", 4, N, costs, None, is_v=False) == "zb_h1"
    assert fitting("auto", 4, N, costs, 400, is_v=False) == "1f1b"
    with pytest.raises(
        ConfigError, match=rf"is 599, and 'gpipe' holds {100 * N} bytes[^\n]*\n.*\"schedule\": \"1f1b\""
    ):
        fitting("gpipe", 4, N, costs, 599, is_v=False)
    with pytest.raises(
        ConfigError, match="is 399, and '1f1b' holds 400 bytes of activations on pipeline rank 0.*\n.*least, 400"
    ):
        fitting("1f1b", 4, N, costs, 399, is_v=False)
    with pytest.raises(ConfigError, match="at most 1 bytes"):
        fitting("auto", 4, N, costs, 1, is_v=False)
    assert fitting("auto", 4, N, costs * 2, None, is_v=False) == "interleaved"
    assert fitting("auto", 4, N, costs * 2, None, is_v=True) == "zb_v"


def engine_of(net: PipelineModule, **pipeline: Any) -> Any:
    return deepspeed_c.initialize(
        model=net, model_parameters=list(net.parameters()), config=config_of(N, pipeline=pipeline)
    )[0]


def weigh_body(rank: int, world: int) -> Any:
    """Linear layers save their inputs, tanh its output, the loss the outputs and labels. A message has a head of 64
    bytes."""
    specs = [LayerSpec(nn.Linear, 8, 8, bias=False), nn.Tanh(), LayerSpec(nn.Linear, 8, 16, bias=False), nn.Dropout(0.0),
             LayerSpec(nn.Linear, 16, 16), LayerSpec(nn.BatchNorm1d, 16), LayerSpec(nn.Linear, 16, 8)]  # fmt: skip
    data = [(torch.randn(2, 8), torch.randn(2, 8))] * N
    found = []
    for schedule, limit in ("1f1b", 10**6), ("zb_h1", 10**6), ("1f1b", None):
        net = PipelineModule(specs, num_stages=2, loss_fn=nn.MSELoss(), partition_method=[0, 4, 7], schedule=schedule)
        torch.manual_seed(3)
        engine = engine_of(net, activation_bytes_limit=limit)
        with engine:
            engine.train_batch(iter(data))
        n_tracked = [int(buffer) for name, buffer in net.named_buffers() if "num_batches" in name]
        found.append((engine._costs, n_tracked, torch.rand(3).tolist()))
    return found


def test_activations_are_weighed_and_nothing_else_changes():
    outcome = run_ranks(2, weigh_body)
    for rank, ((plain, n_tracked, drawn), (split, _, _), (_, n_free, drawn_free)) in enumerate(outcome):
        # Inputs of both linear layers: 64 each. (The first is given by the user, the second is the output of tanh.)
        assert plain[0] == split[0] == Cost(kept_bytes=128, weight_bytes=128), plain[0]
        assert n_tracked == n_free == ([N] if rank == 1 else []), n_tracked
        assert drawn == drawn_free
        assert plain[1] == split[1] and plain[1].kept_bytes < plain[1].weight_bytes
        # The message (64 and 2 x 16 floats), the outputs of the norm and of both linear layers, and the labels, beside
        # the statistics of the norm.
        least = 64 + 128 + 128 + 128 + 64 + 64
        assert least <= plain[1].kept_bytes <= least + 256, plain[1]


def limits_body(rank: int, world: int) -> Any:
    texts, used = [], []
    for limit in (1, 40_000):
        with engine_of(module_of(world, schedule="gpipe"), activation_bytes_limit=limit) as engine:
            before = [p.detach().clone() for p in engine.module.parameters()]
            with pytest.raises(ConfigError) as caught:
                engine.train_batch(iter(micro_batches(0, 0, N)))
            texts.append(str(caught.value))
            assert all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
    for limit in (None, 10**9, 40_000):
        net = module_of(world)
        with engine_of(net, schedule="auto", activation_bytes_limit=limit) as engine:
            losses = [float(engine.train_batch(iter(micro_batches(s, 0, N)))) for s in range(STEPS)]
            norm = engine.get_global_grad_norm()
            used.append(engine._table(N, trains=True).actions(rank))
        weights = {n.replace("tied_modules.embed", "0"): p.detach().float() for n, p in net.named_parameters()}
    section = {"layers": "auto", "budget": 1000}
    config = config_of(N, pipeline={"activation_bytes_limit": 5}, activation_checkpointing=section)
    with pytest.raises(ConfigError, match="both limit"):
        deepspeed_c.initialize(model=module_of(world), config=config)
    return texts, used, (losses, norm, weights)


def test_a_schedule_that_does_not_fit_is_refused_and_auto_fits():
    outcome = run_ranks(2, limits_body)
    for rank, (texts, used, _) in enumerate(outcome):
        assert texts == outcome[0][0]
        assert "is 1, and 'gpipe' holds" in texts[0] and "holds least" in texts[0], texts[0]
        assert "is 40000, and 'gpipe' holds" in texts[1] and '"schedule": "1f1b"' in texts[1], texts[1]
        names = [
            [name for name in ("1f1b", "zb_h1") if make_table(name, 2, 1, N, "").actions(rank) == actions]
            for actions in used
        ]
        assert names == [["zb_h1"], ["zb_h1"], ["1f1b"]], names
    check([trained for _, _, trained in outcome], plain_run(1, N), 2e-6)
