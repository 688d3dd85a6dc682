"""``injection_policy={Block: ("attn.out", "mlp.down")}``: models without a policy are cut by the names of their row
layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepspeed_c import tp_model_init
from deepspeed_c.errors import ConfigError, ModelError
from deepspeed_c.inject.blocks import block_rules
from deepspeed_c.inject.replace import replace_transformer_layer
from tests.deepspeed_c.inject.families import feed, make
from tests.deepspeed_c.inject.test_families import logits_of
from tests.ranks import run_ranks

PRELOAD = "tests.deepspeed_c.inject.preload"
HEADS, KEYS, WIDTH = 6, 3, 4


class Attention(nn.Module):
    """Attention with grouped heads. Its forward uses the numbers of heads that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.embed_dim = HEADS, KEYS, HEADS * WIDTH
        self.query, self.out = nn.Linear(10, HEADS * WIDTH), nn.Linear(HEADS * WIDTH, 10)
        self.key, self.value = nn.Linear(10, KEYS * WIDTH), nn.Linear(10, KEYS * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q = self.query(x).view(batch, tokens, self.num_heads, WIDTH).transpose(1, 2)
        k, v = (f(x).view(batch, tokens, self.num_kv_heads, WIDTH).transpose(1, 2) for f in (self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, self.embed_dim))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm, self.mlp = Attention(), nn.LayerNorm(10), nn.Module()
        self.mlp.up, self.mlp.down = nn.Linear(10, 17), nn.Linear(17, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp.down(F.gelu(self.mlp.up(x)))


class Own(nn.Module):
    """A model of no known family: two blocks, and layers outside of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList([Block(), Block()]), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def own_model() -> Own:
    torch.manual_seed(2)
    return Own()


def compare(whole: nn.Module, cut: nn.Module, error: float) -> dict[str, Any]:
    grads = dict(whole.named_parameters())
    for name, param in cut.named_parameters():
        grad = grads[name].grad
        grad = param.tp_cut.take(grad) if hasattr(param, "tp_cut") else grad
        if grad.numel():
            error = max(error, (param.grad - grad).abs().max().item())
    return {
        "error": error,
        "cut": sorted({name.rpartition(".")[0] for name, p in cut.named_parameters() if hasattr(p, "tp_cut")}),
    }


def cut_own(rank: int, world: int) -> dict[str, Any]:
    whole = own_model()
    cut = tp_model_init(own_model(), world, None, injection_policy={Block: ("attn.out", "mlp.down")})
    x = torch.randn(2, 5, 10, generator=torch.Generator().manual_seed(1))
    expected, got = whole(x), cut(x)
    expected.square().sum().backward()
    got.square().sum().backward()
    return {**compare(whole, cut, (got - expected).abs().max().item()), "heads": cut.blocks[0].attn.num_heads}


@pytest.mark.parametrize("world", [2, 3])
def test_a_model_of_nobodys(world: int) -> None:
    results = run_ranks(world, cut_own)
    assert sum(result["heads"] for result in results) == HEADS
    for result in results:
        assert result["error"] < 1e-4 and len(result["cut"]) == 12 and "last" not in result["cut"], result


def cut_bert(rank: int, world: int) -> dict[str, Any]:
    from transformers.models.bert.modeling_bert import BertLayer

    whole, cut, batch = make("bert"), make("bert"), feed("bert")
    cut.config.model_type = "unheard of"  # only the structure can tell the family
    config = SimpleNamespace(
        tensor_parallel=SimpleNamespace(tp_size=world, tp_group=None), injection_policy_tuple=("output.dense",)
    )
    replace_transformer_layer(BertLayer, cut, None, config, cut.config)
    expected, got = whole(**batch), cut(**batch)
    expected.loss.backward()
    got.loss.backward()
    return compare(whole, cut, (logits_of(got) - logits_of(expected)).abs().max().item())


def test_bert_by_its_row_layers_alone() -> None:
    for result in run_ranks(2, cut_bert, preload=PRELOAD):
        assert result["error"] < 1e-5 and sum("encoder" in name for name in result["cut"]) == 12, result


def test_what_structure_does_not_say_is_refused() -> None:
    model = own_model()
    model.blocks[1].attn.query = nn.Linear(10, 3 * HEADS * WIDTH)
    for blocks, kind, text in (
        ({nn.Conv1d: ("a",)}, ConfigError, "the model has no Conv1d"),
        (
            {Block: ("attn.out", "mlp.dwon")},
            ConfigError,
            r"'mlp.dwon' is no linear layer of Block \(attn.query, attn.out",
        ),
        ({Block: ("mlp.down",)}, ModelError, "the row layer of its attention takes 0"),
        ({Block: ("attn.out", "mlp.down")}, ModelError, r"blocks.1.attn.query: makes 72 columns.* takes 24"),
    ):
        with pytest.raises(kind, match=text) as caught:
            block_rules(model, blocks)
        assert "Fix: " in str(caught.value)
