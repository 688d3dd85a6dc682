"""Compressed layers that are cut over two tensor-parallel ranks, against the whole layers; engines with offload and in
fp16; requests that an engine refuses."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed_c
from deepspeed_c.compression.basic_layer import ColumnParallelLinear_Compress, RowParallelLinear_Compress
from deepspeed_c.compression.compress import init_compression, redundancy_clean
from deepspeed_c.errors import ConfigError, StateError
from deepspeed_c.inject.layers import LinearAllreduce, LinearLayer
from tests.deepspeed_c.compression.oracle import Model, batch, loss_of, section
from tests.ranks import run_ranks
from tests.training import engine_of, update


def whole() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))


def config_of(n_groups: int, rounding: str = "nearest") -> dict:
    made = section(bits=4, symmetric=True, offset=0, rounding=rounding)
    made["weight_quantization"]["shared_parameters"]["quantize_groups"] = n_groups
    return {"compression_training": made}


def cut_body(rank: int, world: int) -> list:
    group, x = dist.group.WORLD, torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    found = []
    for rounding in ("nearest", "stochastic"):
        one, other = whole(), whole()
        parts = nn.Sequential(LinearLayer(other[0], group), other[1], LinearAllreduce(other[2], group))
        config = config_of(16, rounding)
        init_compression(one, config)
        init_compression(parts, config)
        assert isinstance(parts[0], ColumnParallelLinear_Compress) and isinstance(parts[2], RowParallelLinear_Compress)
        # Random numbers of columns are those of the whole layer; rows have others.
        found.append((rounding, one[0](x).chunk(2, -1)[rank].tolist(), parts[0](x).tolist()))
        one.eval()
        parts.eval()
        y, z = one(x), parts(x)
        z.square().sum().backward()
        found.append((rounding, y.tolist(), z.tolist()))
        redundancy_clean(parts, config)
        assert type(parts[0]) is LinearLayer and type(parts[2]) is LinearAllreduce
        found.append((rounding, y.tolist(), parts(x).tolist()))
    other = whole()
    parts = nn.Sequential(LinearLayer(other[0], group), other[1], LinearAllreduce(other[2], group))
    with pytest.raises(ConfigError, match=r"groups of 12 elements of 2.weight .* lie on two .*\nFix: write 16,"):
        init_compression(parts, config_of(8))
    config = {"train_batch_size": 1, "tensor_parallel": {"autotp_size": 2}, "optimizer": {"type": "SGD"}}
    with pytest.raises(ConfigError, match="layers would be cut that are compressed already"):
        deepspeed_c.initialize(model=init_compression(Model(), config_of(4)), config=config)
    return found


def test_cut_layers_compute_as_whole_ones():
    for found in run_ranks(2, cut_body):
        for rounding, expected, actual in found:
            print(rounding, expected[0], actual[0])
            torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=0, atol=1e-5)


def engines_body(rank: int, world: int) -> dict:
    found = {}
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    for name, more in (
        ("plain", {}),
        ("offload", {"zero_optimization": offload}),
        ("fp16", {"fp16": {"enabled": True, "initial_scale_power": 40}}),
    ):
        config = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}, **more}
        config["compression_training"] = section(bits=8, symmetric=True, offset=2)
        engine = engine_of(init_compression(Model(), config), config)
        losses = []
        while engine.compression_scheduler.training_steps < 4 and engine.global_steps < 60:
            words = batch(engine.compression_scheduler.training_steps)
            losses.append(loss_of(engine(words), words))
            update(engine, losses[-1])
        found[name] = [loss.item() for loss in losses[engine.skipped_steps :]], engine.skipped_steps
        with pytest.raises(StateError):
            init_compression(engine, config)
        engine.destroy()
    return found


def test_offload_and_steps_that_are_skipped():
    (found,) = run_ranks(1, engines_body)
    print(found)
    (plain, _), (offloaded, _), (half, n_skipped) = found.values()
    assert offloaded == pytest.approx(plain, abs=1e-5) and half == pytest.approx(plain, abs=0.02) and n_skipped > 0
