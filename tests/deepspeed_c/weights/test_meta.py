"""Buffers that are in no file, on the meta device: computed, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import deepspeed_c
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.errors import ModelError
from deepspeed_c.inference.load import load_checkpoint
from deepspeed_c.weights.meta import compute_buffers
from tests.ranks import run_ranks


class Scaled(torch.nn.Module):
    """A layer with weights, a saved buffer, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("scale", torch.empty(3), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.linear.reset_parameters()
        self.count.zero_()
        self.scale.copy_(torch.arange(3) + 0.5)


class Forgotten(Scaled):
    def reset_parameters(self) -> None:
        self.linear.reset_parameters()


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(3, 5, num_layers=2)
        self.norm = torch.nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.lstm(x)[0])


def on_meta(kind: type[torch.nn.Module]) -> torch.nn.Module:
    with deepspeed_c.OnDevice(dtype=torch.float32, device="meta"):
        return kind().eval()


def test_a_buffer_is_computed_and_weights_beside_it_are_not_touched() -> None:
    model = on_meta(Scaled)
    weight = torch.full((3, 3), 5.0)
    model.linear._parameters["weight"] = torch.nn.Parameter(weight)
    compute_buffers(model, torch.device("cpu"))
    assert model.scale.tolist() == [0.5, 1.5, 2.5], model.scale
    assert model.linear.weight.tolist() == [[5.0] * 3] * 3, model.linear.weight
    assert model.count.is_meta and model.linear.bias.is_meta
    assert set(model.state_dict()) == {"linear.weight", "linear.bias", "count"}


def test_a_buffer_that_nothing_computes_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="1 buffers on the meta device.*: scale"):
        compute_buffers(on_meta(Forgotten), torch.device("cpu"))


class Idle(Forgotten):
    """A model whose method for first values leaves the buffer as it is."""

    def _init_weights(self, module: torch.nn.Module) -> None:
        pass


def load_unmade(rank: int, world: int, path: str) -> list[str]:
    found = []
    for kind in (Idle, Forgotten):
        model = on_meta(kind)
        try:
            load_checkpoint(model, path, mesh=Mesh(Collectives()), dtype=None)
        except ModelError as error:
            found.append(error.what)
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return found


def test_a_load_into_a_model_with_such_a_buffer_makes_nothing(tmp_path: Path) -> None:
    torch.save(Scaled().state_dict(), tmp_path / "weights.pt")
    for found in run_ranks(2, load_unmade, str(tmp_path / "weights.pt")):
        assert len(found) == 2 and all("no method computes them: scale" in text for text in found), found


def load_recurrent(rank: int, world: int, path: str) -> tuple[torch.Tensor, torch.Tensor]:
    plain = torch.load(path + ".whole", weights_only=False)
    model = on_meta(Recurrent)
    mesh = Mesh(Collectives())
    load_checkpoint(model, path, mesh=mesh, dtype=None)
    x = torch.randn(4, 5, 3)[:, 0]
    assert model.norm.num_batches_tracked.item() == 1
    scaled = on_meta(Scaled)
    load_checkpoint(scaled, path + ".scaled", mesh=mesh, dtype=None)
    assert scaled.count.item() == 7 and scaled.scale.tolist() == [0.5, 1.5, 2.5], (scaled.count, scaled.scale)
    with torch.no_grad():
        return model(x), plain(x)


def test_lists_of_weights_and_saved_buffers(tmp_path: Path) -> None:
    plain = Recurrent()
    plain(torch.randn(4, 3))
    plain.eval()
    path = str(tmp_path / "weights.pt")
    torch.save(plain.state_dict(), path)
    torch.save(plain, path + ".whole")
    torch.save({**Scaled().state_dict(), "count": torch.tensor(7)}, path + ".scaled")
    for got, wanted in run_ranks(2, load_recurrent, path):
        assert torch.equal(got, wanted), f"{got} {wanted}"
