"""Fused projections that are cut by hand, whole embedding tables, and the mode of AutoTP. Results equal those of plain
torch in one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_c.errors import ModelError
from deepspeed_c.inject.by_hand import EmbeddingLayer, fused_LinearLayer, is_autotp_training_mode, set_autotp_mode
from tests.deepspeed_c.inject.families import make
from tests.ranks import run_ranks

PRELOAD = "tests.deepspeed_c.inject.preload"
# Family -> the place of the fused projection of queries, keys and values in a layer, and its columns, sorted by (key
# head, part, head within the part).
FUSED = {
    "gpt2": ("transformer.h.0", "attn.c_attn"),
    "gpt_neox": ("gpt_neox.layers.0", "attention.query_key_value"),
    "bloom": ("transformer.h.0", "self_attention.query_key_value"),
    "falcon": ("transformer.h.0", "self_attention.query_key_value"),
    "falcon_7b": ("transformer.h.0", "self_attention.query_key_value"),
    "phi3": ("model.layers.0", "self_attn.qkv_proj"),
}
HEADS, WIDTH = 6, 8


def heads_of(family: str, rank: int, world: int) -> list[int]:
    """The query heads of a rank. Heads that share a key head stay together, except for Falcon-7B, where all share one.
    The first ranks get more."""
    n_together = 2 if family in ("falcon", "phi3") else 1
    sizes = [len(range(i, HEADS // n_together, world)) * n_together for i in range(world)]
    return list(range(sum(sizes[:rank]), sum(sizes[: rank + 1])))


def columns_of(family: str, rank: int, world: int) -> torch.Tensor:
    """The rank's columns of the whole projection, by brute force."""
    mine = heads_of(family, rank, world)
    if family == "falcon_7b":  # all query heads, then the single key and the single value
        heads = [*mine, HEADS, HEADS + 1]
    elif family == "falcon":  # 3 key heads, each with two query heads, a key and a value
        heads = [4 * (head // 2) + head % 2 + extra for head in mine if head % 2 == 0 for extra in range(4)]
    elif family == "phi3":
        keys = sorted({head // 2 for head in mine})
        heads = [*mine, *(HEADS + key for key in keys), *(HEADS + 3 + key for key in keys)]
    elif family == "gpt2":
        heads = [part * HEADS + head for part in range(3) for head in mine]
    else:
        heads = [3 * head + part for head in mine for part in range(3)]
    return torch.cat([torch.arange(head * WIDTH, (head + 1) * WIDTH) for head in heads])


def fuse(rank: int, world: int, family: str, takes_attention: bool) -> float:
    where, name = FUSED[family]
    layer = make(family).get_submodule(where)
    whole = copy.deepcopy(layer.get_submodule(name))
    inside = layer.get_submodule(name.partition(".")[0]) if takes_attention else layer
    linear = layer.get_submodule(name)
    cut = fused_LinearLayer(linear, dist.group.WORLD, fused_module=inside)
    assert cut.n_heads == len(heads_of(family, rank, world))
    columns = columns_of(family, rank, world)
    rng = torch.Generator().manual_seed(5)
    x = torch.randn(2, 3, 48, generator=rng)
    theirs, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
    wanted, got = whole(theirs), cut(mine)
    assert got.shape == (2, 3, len(columns)), (got.shape, len(columns))
    error = (got - wanted[..., columns]).abs().max().item()
    # Each rank uses its columns with slopes of its own. The loss of the whole model is the sum over all ranks.
    slopes = [torch.randn(2, 3, len(columns_of(family, i, world)), generator=rng) for i in range(world)]
    sum((wanted[..., columns_of(family, i, world)] * slopes[i]).sum() for i in range(world)).backward()
    (got * slopes[rank]).sum().backward()
    error = max(error, (mine.grad - theirs.grad).abs().max().item())
    for param, before in zip(cut.parameters(), whole.parameters(), strict=True):
        of = param.tp_cut.take if hasattr(param, "tp_cut") else torch.Tensor.clone
        assert torch.equal(param, of(before.detach()))
        error = max(error, (param.grad - of(before.grad)).abs().max().item())
    return error


@pytest.mark.parametrize("family", FUSED)
def test_a_fused_projection_is_cut_by_whole_heads(family: str) -> None:
    for world in (2, 3):
        for error in run_ranks(world, fuse, family, world == 3, preload=PRELOAD):
            assert error < 2e-4, (family, world, error)


def refuse(rank: int, world: int) -> list[str]:
    said = []
    block = make("gpt2").transformer.h[0]
    for linear, around in (
        (nn.Linear(4, 12), nn.Sequential(nn.Linear(4, 12))),
        (block.mlp.c_fc, block),
        (nn.Linear(48, 144), block),
    ):
        try:
            fused_LinearLayer(linear, dist.group.WORLD, fused_module=around, name="qkv")
        except ModelError as error:
            said.append(str(error))
        assert not hasattr(linear.weight, "tp_cut")
    return said


def test_what_no_policy_knows_is_refused() -> None:
    for said in run_ranks(2, refuse, preload=PRELOAD):
        assert len(said) == 3 and all(text.startswith("qkv: ") and "Fix: " in text for text in said), said
        assert "no policy says how Linear lies" in said[0] and "cuts no such layer" in said[1]


def test_a_whole_table_of_words() -> None:
    table = nn.Embedding(7, 3)
    layer, ids = EmbeddingLayer(weight=table.weight), torch.tensor([[0, 6], [3, 3]])
    assert layer.weight is table.weight and torch.equal(layer(ids), table(ids))
    layer(ids).sum().backward()
    assert table.weight.grad[3].tolist() == [2.0] * 3 and table.weight.grad[1].tolist() == [0.0] * 3
    made = EmbeddingLayer([5, 2])
    assert made.weight.shape == (5, 2) and made.weight.dtype is torch.half
    assert EmbeddingLayer((0, 2), torch.float32)(torch.empty(0, dtype=torch.long)).shape == (0, 2)
    for kwargs in ({}, {"weight_shape": (3,)}, {"weight": table.weight, "bias": torch.zeros(3)}):
        with pytest.raises(ValueError, match="EmbeddingLayer"):
            EmbeddingLayer(**kwargs)


def test_the_mode_is_kept() -> None:
    assert is_autotp_training_mode()
    try:
        set_autotp_mode()
        assert not is_autotp_training_mode()
        with pytest.raises(TypeError, match="True or False, not 'yes'"):
            set_autotp_mode("yes")
    finally:
        set_autotp_mode(training=True)
    assert is_autotp_training_mode()
