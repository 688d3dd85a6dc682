"""Sparse upcycling: the model of equal experts computes what the dense model does."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from torch import nn

from deepspeed_c.checkpoint.open import open_checkpoint
from deepspeed_c.checkpoint.source import PARAM, Read
from deepspeed_c.checkpoint.tools.cli import main
from deepspeed_c.checkpoint.tools.upcycle import UpcycledSource
from deepspeed_c.errors import CheckpointError
from deepspeed_c.moe.layer import MoE
from tests.deepspeed_c.checkpoint.memory_source import MemorySource, adam_checkpoint
from tests.toys import Mlp

HIDDEN, N_LAYERS = 6, 2


class Block(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(HIDDEN), mlp

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        out = self.mlp(self.norm(x))
        return x + (out[0] if isinstance(out, tuple) else out * scale)


class Model(nn.Module):
    def __init__(self, n_experts: int = 0, k: int = 1) -> None:
        super().__init__()
        mlps = [
            MoE(HIDDEN, mlp, num_experts=n_experts, k=k, drop_tokens=False) if n_experts else mlp
            for mlp in (Mlp(HIDDEN, 11, bias=False) for _ in range(N_LAYERS))
        ]
        self.layers = nn.ModuleList(map(Block, mlps))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, scale)
        return x


@pytest.mark.parametrize("n_experts, k, std", [(4, 2, 0.02), (3, 3, 1.0), (5, 1, 0.0), (1, 1, 0.02)])
def test_the_upcycled_model_computes_what_the_dense_one_does(tmp_path, capsys, n_experts, k, std):
    torch.manual_seed(3)
    dense = Model()
    safetensors.torch.save_file(dense.state_dict(), tmp_path / "dense.safetensors")
    words = [
        "--upcycle", n_experts, "--modules", "layers.*.mlp", "--router-std", std, "--new-tag", "t", "--hidden-size",
        HIDDEN,
    ]  # fmt: skip
    words = ["convert", tmp_path / "dense.safetensors", tmp_path / "out", "--to", "deepspeed_c", *words]
    assert main([str(word) for word in words]) == 0
    out = capsys.readouterr().out
    assert f"2 MLPs became {n_experts} equal experts" in out and "optimizer states are left out" in out, out
    sparse = Model(n_experts, k).eval()
    with open_checkpoint(tmp_path / "out") as source:
        state = {name: torch.empty(t.shape) for (_, name), t in source.tensors.items()}
        source.read([Read(t, 0, state[name].view(-1)) for (_, name), t in source.tensors.items()])
    sparse.load_state_dict(state)
    routers = [layer.mlp.deepspeed_moe.gate.wg.weight for layer in sparse.layers]
    assert (std > 0) == bool(routers[0].abs().sum()) and (std == 0 or not torch.equal(*routers)), routers
    x = torch.randn(9, HIDDEN)
    # With one expert for each token its probability scales the output: 1 / n_experts for a router of zeros.
    got, want = sparse(x), dense(x, 1.0 / n_experts if k == 1 else 1.0)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-6), (got, want)


def source_of(low: torch.dtype) -> MemorySource:
    source = adam_checkpoint(low)
    for (kind, name), value in list(source.values.items()):
        if name.startswith("layer."):
            source.values[kind, f"h.0.mlp.{name}"] = value
    return MemorySource(source.values, aliases=source.aliases, state={"lr_scheduler": {}, "config": {"a": 1}})


def test_masters_stay_and_moments_go():
    source = source_of(torch.bfloat16)
    made = UpcycledSource(source, 2, ["h.*.mlp"], hidden_size=7)
    assert {kind for kind, _ in made.tensors} == {"param", "master", "buffer"} and made.groups == []
    assert made.state == {"config": {"a": 1}}, made.state
    prefix = "h.0.mlp.deepspeed_moe"
    names = [name for kind, name in made.tensors if kind == PARAM and name.startswith(prefix)]
    want = [f"{prefix}.gate.wg.weight"]
    want += [f"{prefix}.experts.deepspeed_experts.{i}.layer.{part}" for i in (0, 1) for part in ("weight", "bias")]
    assert names == want, names
    assert made.tensors["master", want[0]].dtype == torch.float32
    assert made.tensors[PARAM, want[0]].dtype == torch.bfloat16 and made.tensors[PARAM, want[0]].shape == (2, 7)


@pytest.mark.parametrize(
    "said, n, modules, more",
    [
        ("no module is called 'h.*.ffn'", 2, ["h.*.mlp", "h.*.ffn"], {}),
        ("no module is called 'mlp'; there are h.0.mlp", 2, ["mlp"], {}),
        ("no module is called", 2, [], {}),
        ("0 experts", 0, ["h.*.mlp"], {}),
        ("deviation nan", 2, ["h.*.mlp"], {"router_std": float("nan")}),
        ("the width of the MLP's input is said to be 9", 2, ["h.*.mlp"], {"hidden_size": 9}),
        ("is tied to other weights", 2, ["embed"], {}),
    ],
)
def test_what_does_not_fit_is_refused(said, n, modules, more):
    with pytest.raises(CheckpointError) as caught:
        UpcycledSource(source_of(torch.float32), n, modules, **{"hidden_size": 7, **more})
    assert said in str(caught.value) and "Fix: " in str(caught.value), str(caught.value)


def test_a_mixture_is_not_upcycled_again():
    source = UpcycledSource(source_of(torch.float32), 2, ["h.*.mlp"], hidden_size=7)
    with pytest.raises(CheckpointError, match="a mixture of experts already"):
        UpcycledSource(source, 2, ["h.*.mlp"], hidden_size=7)
