"""DistributedAttention and its gradients, compared with plain attention over whole sequences in one process. The batch
or the tokens come first, heads are uneven, key heads are grouped or single, and inputs may have 3 dimensions."""

from __future__ import annotations

import pytest
import torch

import deepspeed_c
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import ConfigError
from deepspeed_c.sequence import SequenceCut, ring_attention
from deepspeed_c.sequence.layer import DistributedAttention, _SeqAllToAll
from tests.ranks import on_ranks, run_ranks

TOKENS, BATCH, WIDTH = 6, 2, 5  # tokens of a rank


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch_dim: int) -> torch.Tensor:
    """Causal attention over [.., .., heads, width], in fp64 by the formula."""
    if batch_dim == 1:
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
    q, k, v = (t.transpose(1, 2).double() for t in (query, key, value))
    n_group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(n_group, 1), v.repeat_interleave(n_group, 1)
    scores = q @ k.transpose(-1, -2) / WIDTH**0.5
    later = torch.ones(scores.shape[-2:]).triu(1).bool()
    out = (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(1, 2).to(value.dtype)
    return out.transpose(0, 1) if batch_dim == 1 else out


def whole_inputs(world: int, n_heads: int, n_keys: int, batch_dim: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, TOKENS * world) if batch_dim == 0 else (TOKENS * world, BATCH)
    widths = (WIDTH, WIDTH, WIDTH + 1)
    heads = (n_heads, n_keys, n_keys)
    return [torch.randn(*shape, n, w, generator=generator) for n, w in zip(heads, widths)]


def layer_body(rank: int, world: int, cells: list[tuple[int, int, int]]) -> list[list[torch.Tensor]]:
    found = []
    for n_heads, n_keys, batch_dim in cells:
        token_dim = 1 - batch_dim
        wholes = whole_inputs(world, n_heads, n_keys, batch_dim)
        mine = [t.narrow(token_dim, rank * TOKENS, TOKENS).clone().requires_grad_() for t in wholes]
        layer = DistributedAttention(attend, None, 2, token_dim)
        out = layer(*mine, batch_dim, None, batch_dim)
        generator = torch.Generator().manual_seed(9)
        seed = torch.randn(*wholes[0].shape[:2], n_heads, WIDTH + 1, generator=generator)
        out.backward(seed.narrow(token_dim, rank * TOKENS, TOKENS))
        found.append([out.detach(), *(t.grad for t in mine)])
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_as_one_process(world: int) -> None:
    heads = [(4, 4), (8, 4), (12, 2), (5, 1), (7, 7), (6, 3)]
    cells = [(n, k, dim) for n, k in heads for dim in (0, 1)]
    everyone = run_ranks(world, layer_body, cells)
    for i, (n_heads, n_keys, batch_dim) in enumerate(cells):
        wholes = [t.requires_grad_() for t in whole_inputs(world, n_heads, n_keys, batch_dim)]
        out = attend(*wholes, batch_dim)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(9)))
        for j, whole in enumerate((out.detach(), *(t.grad for t in wholes))):
            parts = torch.cat([of_rank[i][j] for of_rank in everyone], 1 - batch_dim)
            torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6, msg=lambda m: f"{cells[i]} {j} {m}")  # noqa: B023


def autocast_inputs() -> list[torch.Tensor]:
    """Queries and keys in fp32 and values in bf16, [batch, tokens, heads, width]: so a rotary model leaves them."""
    generator = torch.Generator().manual_seed(3)
    dtypes = torch.float32, torch.float32, torch.bfloat16
    return [torch.randn(BATCH, 2 * TOKENS, 4, 8, generator=generator).to(dtype) for dtype in dtypes]


def attend_as_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def autocast_body(rank: int, world: int, kind: str) -> list[torch.Tensor]:
    mine = [t.chunk(world, 1)[rank].clone().requires_grad_() for t in autocast_inputs()]
    with torch.autocast("cpu", torch.bfloat16):
        if kind == "ulysses":
            out = DistributedAttention(attend_as_torch, None, 2, 1)(*mine, 0)
        else:
            cut = SequenceCut(world * TOKENS, world, "contiguous")
            out = ring_attention(*(t.transpose(1, 2) for t in mine), Collectives(), cut).transpose(1, 2)
    (out.float() ** 2).sum().backward()
    return [out.detach(), *(t.grad for t in mine)]


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_autocast_casts_as_for_torchs_attention(kind: str) -> None:
    everyone = run_ranks(2, autocast_body, kind)
    wholes = [t.requires_grad_() for t in autocast_inputs()]
    with torch.autocast("cpu", torch.bfloat16):
        out = attend_as_torch(*wholes)
    (out.float() ** 2).sum().backward()
    for j, whole in enumerate((out.detach(), *(t.grad for t in wholes))):
        parts = torch.cat([of_rank[j] for of_rank in everyone], 1)
        assert parts.dtype == whole.dtype, f"tensor {j}: {parts.dtype}, torch has {whole.dtype}"
        torch.testing.assert_close(parts, whole, rtol=4e-2, atol=4e-2, msg=lambda m: f"tensor {j} {m}")  # noqa: B023


def flat_body(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs have 3 dimensions, and within the layer each rank has a run of the last dimension."""
    whole = torch.arange(2 * TOKENS * world * 8.0).view(2, TOKENS * world, 8)
    mine = whole[:, rank * TOKENS : (rank + 1) * TOKENS].clone().requires_grad_()
    layer = DistributedAttention(lambda q, k, v: q.cumsum(1) + k * v, None, 2, 1)
    out = layer(mine, mine, mine, 0)
    out.sum().backward()
    return out.detach(), mine.grad


def test_three_dimensions() -> None:
    whole = torch.arange(2 * TOKENS * 2 * 8.0).view(2, TOKENS * 2, 8).requires_grad_()
    out = whole.cumsum(1) + whole * whole
    out.sum().backward()
    everyone = run_ranks(2, flat_body)
    assert torch.equal(torch.cat([got for got, _ in everyone], 1), out.detach())
    assert torch.equal(torch.cat([grad for _, grad in everyone], 1), whole.grad)


def single_body(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.arange(2.0 * TOKENS * world * 5 * 3).view(2, TOKENS * world, 5, 3)
    mine = whole[:, rank * TOKENS : (rank + 1) * TOKENS].clone().requires_grad_()
    heads = _SeqAllToAll.apply(None, mine, 2, 1, 0)
    back = _SeqAllToAll.apply(None, heads, 1, 2, 0)
    assert torch.equal(back, mine)
    (heads * (rank + 1)).sum().backward()
    return heads.detach(), mine.grad


def test_seq_all_to_all_of_five_heads_on_three_ranks() -> None:
    whole = torch.arange(2.0 * TOKENS * 3 * 5 * 3).view(2, TOKENS * 3, 5, 3)
    everyone = run_ranks(3, single_body)
    for part, (heads, grad) in zip(whole.tensor_split(3, 2), everyone):
        assert torch.equal(heads, part)
        assert grad[0, 0, :, 0].tolist() == [1, 1, 2, 2, 3]


def rotary_body(rank: int, world: int) -> torch.Tensor:
    whole = whole_inputs(world, 2, 2, 0)[0][..., :4]
    angles = torch.arange(TOKENS * world)[None, :, None, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
    mine = whole[:, rank * TOKENS : (rank + 1) * TOKENS]
    layer = DistributedAttention(lambda q, k, v: q, None, 2, 1)
    return layer(mine, mine, mine, 0, (angles.cos(), angles.sin()))


def test_rotary_embedding_of_whole_sequences() -> None:
    whole = whole_inputs(2, 2, 2, 0)[0][..., :4]
    pairs = torch.complex(whole[..., :2], whole[..., 2:])
    angles = torch.arange(TOKENS * 2)[None, :, None, None] * torch.tensor([1.0, 0.1])
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat([turned.real, turned.imag], -1)
    torch.testing.assert_close(torch.cat(run_ranks(2, rotary_body), 1), expected)


@on_ranks(2)
def test_what_does_not_fit_is_refused_before_anything_is_sent(rank: int, world: int) -> None:
    comm = deepspeed_c.comm.get_world_group()
    with pytest.raises(ConfigError, match="heads are dimension 1"):
        DistributedAttention(attend, comm, 1)
    layer = DistributedAttention(attend, comm, 2, 1)
    one = torch.zeros(1, 4, 1, 4)
    with pytest.raises(ConfigError, match="head"):
        layer(one, one, one)
    with pytest.raises(ConfigError, match="query, key and value are"):
        layer(torch.zeros(1, 4, 4, 4), torch.zeros(1, 3, 4, 4), torch.zeros(1, 4, 4, 4))
    with pytest.raises(ConfigError, match="cannot be cut over 2 ranks"):
        layer(torch.zeros(1, 4, 3), torch.zeros(1, 4, 3), torch.zeros(1, 4, 3))
    with pytest.raises(ConfigError, match="attention gave"):
        DistributedAttention(lambda q, k, v: q[:, :1], comm, 2, 1)(*[torch.zeros(1, 4, 4, 4)] * 3)
