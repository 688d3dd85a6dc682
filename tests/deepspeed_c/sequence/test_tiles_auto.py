"""The modules that are recognised as MLPs, their number of tiles, and the effect of the keys of the configuration."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepspeed_c.config import load_config
from deepspeed_c.config.checkpoint import ActivationCheckpointing, ActivationOffload
from deepspeed_c.errors import ConfigError, ModelError
from deepspeed_c.recompute.recomputer import parked
from deepspeed_c.sequence import tiles_auto
from deepspeed_c.sequence.tiles_auto import tile_model, tiles_of_loss, tiles_of_mlp
from tests.ranks import run_ranks
from tests.toys import Mlp
from tests.training import config, engine_of, update


def test_numbers_of_tiles():
    assert [tiles_of_mlp(n, 64) for n in (0, 1, 64, 65, 640, 641)] == [1, 1, 1, 2, 10, 11]
    assert tiles_of_mlp(7, 0) == 7
    elems = tiles_auto.LOGITS_ELEMS
    assert [tiles_of_loss(n, elems // 8) for n in (0, 1, 8, 9, 4096)] == [1, 1, 1, 2, 512]


class SmallMLP(Mlp):
    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__(4, 8, nn.GELU() if between is None else between)


class Mixing(nn.Module):
    """Has weights and mixes tokens, so it must not run in tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x.cumsum(-2) * self.weight


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, 8)

    def forward(self, x):
        return self.rnn(x)[0]


@pytest.mark.parametrize("between", [nn.SiLU(), nn.Dropout(0.1), nn.LayerNorm(8), nn.Identity(), nn.ReLU()])
def test_mlps_are_known_by_their_layers(between):
    tiled = tile_model(nn.Sequential(SmallMLP(between), SmallMLP()))
    assert tiled.n_mlps == 2 and not tiled.has_loss
    tiled.close()


@pytest.mark.parametrize("between", [Mixing(), Recurrent(), nn.BatchNorm1d(8), nn.Conv1d(8, 8, 3)])
def test_what_mixes_tokens_is_no_mlp(between):
    with pytest.raises(ModelError, match="SmallMLP has no MLP"):
        tile_model(SmallMLP(between))


def test_forwards_are_replaced_and_given_back():
    model = nn.Sequential(nn.Linear(4, 4), SmallMLP())
    x = torch.randn(1, 19, 4).requires_grad_()
    of = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x).square().sum(), of)
    seen = []
    model[1].up.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[1]))
    tiled = tile_model(model)
    torch.testing.assert_close(torch.autograd.grad(model(x).square().sum(), of), expected)
    # There are 5 tiles in forward and again in backward.
    assert seen == [4, 4, 4, 4, 3] * 2
    seen.clear()
    model(x[:, :3])  # a tile would not be smaller
    assert seen == [3]
    tiled.close()
    tiled.close()
    assert "forward" not in model[1].__dict__
    seen.clear()
    model(x)
    assert seen == [19]


def train(rank, world, tiles):
    torch.manual_seed(3)
    model = nn.Sequential(SmallMLP(), nn.Linear(4, 4))
    engine = engine_of(model, config(2, lr=0.3, sequence_parallel={"tiles": tiles}))
    losses = []
    for step in range(3):
        x = torch.randn(1, 30, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        losses.append(update(engine, F.mse_loss(engine(x), x.flip(-1))))
    assert ("forward" in model[0].__dict__) == (tiles == "auto")
    engine.close()
    assert "forward" not in model[0].__dict__
    return losses


def test_the_key_tiles():
    for found, expected in zip(run_ranks(2, train, "auto"), run_ranks(2, train, "off")):
        assert found == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ConfigError, match="sequence_parallel.tiles"):
        load_config({"train_batch_size": 1, "sequence_parallel": {"tiles": "some"}}, world_size=1)


def test_the_key_offload_activations():
    plain = ActivationCheckpointing(layers="auto")
    assert parked(plain, wanted=False) is plain
    found = parked(plain, wanted=True)
    assert found.offload.device == "cpu" and found.layers == "auto" and plain.offload.device == "none"
    named = ActivationCheckpointing(offload=ActivationOffload(device="nvme", nvme_path="/there"))
    assert parked(named, wanted=True) is named
