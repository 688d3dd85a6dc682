"""Attention, MLP and loss in chunks, compared with the same in one piece in one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepspeed_c.errors import ConfigError, ModelError, RankMismatchError
from deepspeed_c.sequence.fpdt import FPDT_FFN, FPDT_Attention, FPDT_InputConstruct, FPDT_LogitsLoss
from deepspeed_c.sequence.fpdt_shelf import Shelf
from tests.ranks import run_ranks

HIDDEN, WIDTH, BATCH = 10, 6, 2


def make_weights(n_heads: int, n_keys: int, dtype: torch.dtype, *, with_bias: bool = True) -> list:
    torch.manual_seed(7)
    rows = (n_heads + 2 * n_keys) * WIDTH
    shapes = [(rows, HIDDEN), (rows,), (HIDDEN, n_heads * WIDTH), (HIDDEN,)]
    made = [nn.Parameter(torch.randn(shape, dtype=torch.float64).mul_(0.4).to(dtype)) for shape in shapes]
    return made if with_bias else [made[0], None, made[2], None]


def make_input(n_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """x [tokens, batch, hidden], the weights of a loss, and rotary tables for a part of the head's width."""
    torch.manual_seed(8)
    x = torch.randn(n_tokens, BATCH, HIDDEN, dtype=torch.float64)
    weigh = torch.randn(n_tokens, BATCH, HIDDEN, dtype=torch.float64)
    angles = torch.outer(torch.arange(n_tokens, dtype=torch.float64), torch.tensor([1.0, 0.3], dtype=torch.float64))
    angles = torch.cat([angles, angles], 1).view(n_tokens, 1, 1, 4)
    return x.to(dtype), weigh.to(dtype), (angles.cos().to(dtype), angles.sin().to(dtype))


def turned(x: torch.Tensor, tables: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Rotary embeddings as complex numbers. x: [tokens, batch, heads, width]."""
    cos, sin = (table[..., :2] for table in tables)
    pairs = torch.complex(x[..., :2], x[..., 2:4]) * torch.complex(cos, sin)
    return torch.cat([pairs.real, pairs.imag, x[..., 4:]], -1)


def plain(x, weights, n_heads, n_keys, tables):
    qkv = F.linear(x, weights[0], weights[1]).unflatten(2, (-1, WIDTH))
    q, k, v = qkv.split([n_heads, n_keys, n_keys], 2)
    if tables is not None:
        q, k = turned(q, tables), turned(k, tables)
    k, v = (each.repeat_interleave(n_heads // n_keys, 2) for each in (k, v))
    scores = torch.einsum("ibhd,jbhd->bhij", q, k) / WIDTH**0.5
    scores = scores + torch.full(scores.shape[-2:], -torch.inf, dtype=scores.dtype).triu(1)
    out = torch.einsum("bhij,jbhd->ibhd", scores.softmax(-1), v)
    return F.linear(out.flatten(2), weights[2], weights[3])


def places(n_tokens: int, chunk: int, rank: int, world: int) -> torch.Tensor:
    """The positions of the tokens of ``rank``, by brute force."""
    found = []
    for begin in range(0, n_tokens, chunk):
        size = min(chunk, n_tokens - begin)
        shares = [size // world + (r < size % world) for r in range(world)]
        first = begin + sum(shares[:rank])
        found += range(first, first + shares[rank])
    return torch.tensor(found, dtype=torch.int64)


def attention(rank, world, n_tokens, chunk, n_heads, n_keys, dtype, rotary=True, bias=True, nvme=None):
    weights = make_weights(n_heads, n_keys, dtype, with_bias=bias)
    config = SimpleNamespace(
        hidden_size=HIDDEN, kv_channels=WIDTH, num_attention_heads=n_heads, num_key_value_heads=n_keys,
        attention_dropout=0.0,
    )  # fmt: skip
    x, weigh, tables = make_input(n_tokens, dtype)
    tables = tables if rotary else None
    own = places(n_tokens, chunk, rank, world)
    layer = FPDT_Attention(config, *weights, None, return_bias=False, chunk_size=chunk, nvme_path=nvme)
    mine = x[own].requires_grad_()
    output, left = layer(mine, None, None, tables)
    assert left is None
    of = [mine, *(w for w in weights if w is not None)]
    loss = (output * weigh[own]).sum()
    grads = torch.autograd.grad(loss, of, retain_graph=True)
    again = torch.autograd.grad(loss, of)
    assert all(torch.equal(a, b) for a, b in zip(grads, again))
    with torch.no_grad():
        torch.testing.assert_close(layer(mine, None, None, tables)[0], output)
    return output.detach(), *grads


def check_attention(world, n_tokens, chunk, n_heads, n_keys, dtype, *more):
    found = run_ranks(world, attention, n_tokens, chunk, n_heads, n_keys, dtype, *more)
    bias = more[1] if len(more) > 1 else True
    weights = make_weights(n_heads, n_keys, torch.float64, with_bias=bias)
    x, weigh, tables = make_input(n_tokens, dtype)
    x, weigh, tables = x.double().requires_grad_(), weigh.double(), tuple(t.double() for t in tables)
    for w, given in zip(weights, make_weights(n_heads, n_keys, dtype, with_bias=bias)):
        if w is not None:
            w.data = given.data.double()
    output = plain(x, weights, n_heads, n_keys, tables if not more or more[0] else None)
    expected = torch.autograd.grad((output * weigh).sum(), [x, *(w for w in weights if w is not None)])
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 0.3}[dtype]
    for rank, (out, grad_x, *_) in enumerate(found):
        own = places(n_tokens, chunk, rank, world)
        torch.testing.assert_close(out.double(), output[own].detach(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(grad_x.double(), expected[0][own], rtol=tolerance, atol=tolerance)
    for parts, whole in zip(zip(*(each[2:] for each in found)), expected[1:]):
        torch.testing.assert_close(sum(p.double() for p in parts), whole, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("world", "n_tokens", "chunk"),
    [(1, 12, 4), (1, 13, 5), (1, 3, 100), (2, 16, 4), (2, 13, 5), (2, 3, 3), (3, 20, 7), (4, 24, 8), (4, 13, 3)],
)
def test_chunks_and_ranks(world, n_tokens, chunk, dtype):
    check_attention(world, n_tokens, chunk, 4, 2, dtype)


@pytest.mark.parametrize(("world", "n_heads", "n_keys"), [(2, 3, 3), (2, 3, 1), (4, 4, 1), (4, 6, 2), (3, 4, 4)])
def test_heads_that_ranks_do_not_divide(world, n_heads, n_keys):
    check_attention(world, 11, 4, n_heads, n_keys, torch.float64)


def test_bf16_and_what_may_be_left_out(tmp_path):
    check_attention(2, 13, 5, 4, 2, torch.bfloat16)
    check_attention(2, 13, 5, 4, 2, torch.float64, False, False)
    check_attention(2, 13, 5, 4, 2, torch.float64, True, True, str(tmp_path))


def autocast_attention(rank, world):
    with torch.autocast("cpu", torch.bfloat16):
        return attention(rank, world, 13, 5, 4, 2, torch.float32)


def test_autocast_computes_as_torch_does():
    """fp32 weights under autocast, compared with the plain layer in fp64. The results have autocast's dtype."""
    found = run_ranks(2, autocast_attention)
    weights = [w.detach().double().requires_grad_() for w in make_weights(4, 2, torch.float32)]
    x, weigh, tables = make_input(13, torch.float32)
    x, weigh, tables = x.double().requires_grad_(), weigh.double(), tuple(t.double() for t in tables)
    output = plain(x, weights, 4, 2, tables)
    expected = torch.autograd.grad((output * weigh).sum(), [x, *weights])
    for rank, (out, grad_x, *_) in enumerate(found):
        own = places(13, 5, rank, 2)
        assert out.dtype == torch.bfloat16 and grad_x.dtype == torch.float32
        assert (out - output[own]).norm() < 0.03 * output[own].norm()
        assert (grad_x - expected[0][own]).norm() < 0.03 * expected[0][own].norm()
    for parts, whole in zip(zip(*(each[2:] for each in found)), expected[1:]):
        assert (sum(parts) - whole).norm() < 0.03 * whole.norm(), f"{sum(parts).norm()} and {whole.norm()}"


def refused(rank, world, kind):
    config = SimpleNamespace(
        hidden_size=HIDDEN, kv_channels=WIDTH, num_attention_heads=2, num_key_value_heads=2, attention_dropout=0.1
    )
    weights = make_weights(2, 2, torch.float32)
    x, _, tables = make_input(8, torch.float32)
    more = {"chunk_size": 4}
    if kind == "shape":
        weights[0] = weights[2]
    if kind == "order":
        more["gather_idx"] = 1
    if kind == "size":
        more["chunk_size"] = 0
    if kind == "heads":
        config.num_attention_heads = config.num_key_value_heads = 1
        weights = make_weights(1, 1, torch.float32)
    try:
        layer = FPDT_Attention(config, *weights, None, **more).train(kind == "dropout")
        if kind == "rotary":
            tables = tuple(t[:7] for t in tables)
        layer(x[:4], torch.ones(1) if kind == "mask" else None, None, tables)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("shape", r"shapes (10, 12) and (10, 12); 2 heads and 2 key heads of 6 make it (36, 10) and (10, 12)"),
        ("order", "gather_idx is 1"),
        ("size", "chunk_size is 0"),
        ("heads", "1"),
        ("rotary", "7 positions for 8 tokens"),
        ("mask", "attention_mask is a Tensor"),
        ("dropout", "attention_dropout is 0.1"),
    ],
)
def test_what_attention_refuses(kind, text):
    for found in run_ranks(2, refused, kind):
        assert text in found


def uneven(rank, world):
    weights = make_weights(2, 2, torch.float32)
    config = SimpleNamespace(
        hidden_size=HIDDEN, kv_channels=WIDTH, num_attention_heads=2, num_key_value_heads=2, attention_dropout=0.0
    )
    x, _, _ = make_input(8, torch.float32)
    with pytest.raises(ConfigError, match=r"ranks have \[3, 4\] tokens; 7 in chunks of 4 make it \[4, 3\]"):
        FPDT_Attention(config, *weights, None, chunk_size=4)(x[: 3 + rank], None, None, None)
    return True


def test_tokens_that_chunks_do_not_give():
    assert all(run_ranks(2, uneven))


# Input


@pytest.mark.parametrize(("world", "n_tokens", "chunk"), [(1, 7, 3), (2, 16, 8), (3, 20, 7), (4, 3, 2)])
def test_input_is_dealt_out_chunk_by_chunk(world, n_tokens, chunk):
    tokens = torch.arange(2 * n_tokens).view(2, n_tokens)
    args = SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=chunk)
    everywhere = torch.cat([places(n_tokens, chunk, rank, world) for rank in range(world)])
    for rank in range(world):
        made = FPDT_InputConstruct(tokens, tokens + 100, tokens + 200, None, tokens + 300, args, world, rank)
        found, labels, mask, attention_mask, positions = made.generate()
        own = places(n_tokens, chunk, rank, world)
        assert torch.equal(found, tokens[:, own]) and torch.equal(labels, tokens[:, own] + 100)
        assert torch.equal(mask, tokens[:, everywhere] + 200) and torch.equal(positions, tokens[:, own] + 300)
        assert attention_mask is None
    assert FPDT_InputConstruct(tokens, None, None, None, None, args, world, 0).generate()[1:] == (None,) * 4
    with pytest.raises(ConfigError, match=f"rank {world} of {world}"):
        FPDT_InputConstruct(tokens, None, None, None, None, args, world, world)


# MLP and loss


@pytest.mark.parametrize("add_bias", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 4, 5, 13, 100])
def test_an_mlp_in_chunks(chunk_size, add_bias):
    torch.manual_seed(9)
    x = torch.randn(13, 2, 6, dtype=torch.float64).requires_grad_()
    w1, b1, w2, b2 = (nn.Parameter(torch.randn(s, dtype=torch.float64)) for s in [(9, 6), (9,), (6, 9), (6,)])
    before = x.detach().clone()
    output, left = FPDT_FFN.apply(x, w1, b1, w2, b2, add_bias, chunk_size)
    assert (left is None) == add_bias
    found = output if add_bias else output + left
    expected = F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2, b2)
    torch.testing.assert_close(found, expected)
    weigh = torch.randn_like(found)
    of = [x, w1, b1, w2, b2]
    grads = torch.autograd.grad((found * weigh).sum(), of, retain_graph=True)
    torch.testing.assert_close(grads, torch.autograd.grad((expected * weigh).sum(), of))
    torch.testing.assert_close(grads, torch.autograd.grad((found * weigh).sum(), of))
    assert torch.equal(x, before)
    # Weights may be tensors that are not parameters, like copies that autocast makes.
    of = [x, w1, b1]
    output, _ = FPDT_FFN.apply(x, w1 * 2, b1, w2, None, True, chunk_size)
    expected = F.linear(F.gelu(F.linear(x, w1 * 2, b1), approximate="tanh"), w2)
    torch.testing.assert_close(torch.autograd.grad(output.sum(), of), torch.autograd.grad(expected.sum(), of))


def logits_loss(rank, world, n_tokens, n_chunks, dtype):
    torch.manual_seed(10)
    hidden = torch.randn(n_tokens, 2, 6, dtype=torch.float64).to(dtype)
    labels = torch.randint(11, (2, n_tokens))
    labels[:, ::3] = -100
    weight = nn.Parameter(torch.randn(11, 6, dtype=torch.float64).to(dtype))
    own = places(n_tokens, n_tokens, rank, world)
    mine = hidden[own].requires_grad_()
    losses = FPDT_LogitsLoss.apply(mine, labels[:, own], weight, rank, world, None, n_chunks)
    weigh = torch.linspace(1, 2, losses.numel(), dtype=losses.dtype).view(losses.shape)
    grads = torch.autograd.grad((losses * weigh).sum(), [mine, weight])

    wide, exact = hidden.double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = F.linear(wide, exact)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="none").view(n_tokens, 2)
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(losses.double(), expected, rtol=tolerance, atol=tolerance)
    (of_hidden,) = torch.autograd.grad((expected * weigh.double()).sum(), wide, retain_graph=True)
    torch.testing.assert_close(grads[0].double(), of_hidden[own], rtol=tolerance, atol=tolerance)
    (of_weight,) = torch.autograd.grad((expected[own] * weigh[own].double()).sum(), exact)
    torch.testing.assert_close(grads[1].double(), of_weight, rtol=tolerance, atol=tolerance)
    return True


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("world", "n_tokens", "n_chunks"), [(1, 7, 3), (2, 8, 2), (2, 7, 4), (4, 13, 40)])
def test_a_loss_in_chunks(world, n_tokens, n_chunks, dtype):
    assert all(run_ranks(world, logits_loss, n_tokens, n_chunks, dtype))


def refused_loss(rank, world):
    hidden, weight = torch.randn(4, 2, 6), nn.Parameter(torch.randn(11, 6))
    labels = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ConfigError, match=f"rank {rank} of 2 in the group, and not {1 - rank} of 2"):
        FPDT_LogitsLoss.apply(hidden, labels, weight, 1 - rank, world, None, 2)
    labels[1, 2] = 11 if rank else 0
    with pytest.raises(IndexError if rank else RankMismatchError, match="label 11" if rank else "rank 1 of 2"):
        FPDT_LogitsLoss.apply(hidden, labels, weight, rank, world, None, 2)
    with pytest.raises(ModelError, match=r"\(4, 2\) for the shape \(4, 2, 6\)"):
        FPDT_LogitsLoss.apply(hidden, labels.t(), weight, rank, world, None, 2)
    return True


def test_what_a_loss_in_chunks_refuses():
    assert all(run_ranks(2, refused_loss))


# The shelf


class Copies:
    """Copies of a pretended device with memory of its own. Counts the copies to the host and the tensors on the
    device."""

    def __init__(self) -> None:
        self.n_here = self.most = self.n_down = 0

    def down(self, source, target):
        target.copy_(source)
        self.n_down += 1
        return self

    def synchronize(self):
        pass

    def up(self, source):
        self.n_here += 1
        self.most = max(self.most, self.n_here)
        return source.clone()

    def arrive(self, coming):
        return coming


def test_two_chunks_are_on_the_device():
    copies = Copies()
    shelf = Shelf(torch.device("cpu"), copies_of=lambda _: copies)
    values = [torch.randn(3, 5) for _ in range(7)]
    chunks = [shelf.put(value.clone()) for value in values]
    assert [chunk.here is None for chunk in chunks] == [True] * 6 + [False]  # the last is still being copied
    for _ in range(2):
        for found, value in zip(shelf.walk((chunk,) for chunk in chunks[:6]), values):
            assert torch.equal(found[0], value)
            copies.n_here -= 1
    assert copies.most == 2 and copies.n_down == 7


def test_chunks_in_a_file_give_their_places_back(tmp_path):
    shelf = Shelf(torch.device("cpu"), str(tmp_path))
    values = [torch.randn(1000, dtype=torch.bfloat16), torch.randn(3, 5), torch.randn(0, 4)]
    for _ in range(3):
        chunks = [shelf.put(value.clone()) for value in (*values, values[0])]
        for found, value in zip(shelf.walk((chunk,) for chunk in chunks), values):
            assert torch.equal(found[0], value)
        used = shelf._file.used_bytes
    assert used > 0
    del chunks, found
    shelf.put(torch.zeros(1))
    assert shelf._file.used_bytes <= 4096
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="nvme_path"):
        Shelf(torch.device("cpu"), str(tmp_path / "file"))
