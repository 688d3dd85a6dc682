"""Cross-entropy over cut sequences, or in tiles, compared with torch's cross-entropy over whole logits in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from deepspeed_c.errors import ModelError, RankMismatchError
from deepspeed_c.sequence.loss import row_losses, tiled_cross_entropy, vocab_sequence_parallel_cross_entropy
from deepspeed_c.sequence.plans import SequenceCut
from tests.ranks import run_ranks

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def case(n_tokens: int, batch: int, words: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n_tokens)
    logits = (4 * torch.randn(n_tokens, batch, words, generator=generator, dtype=torch.float64)).to(dtype)
    target = torch.randint(words, (n_tokens, batch), generator=generator)
    target[::3] = -100
    return logits, target


def whole_losses(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)


def sequence_losses(rank, world, n_tokens, n_vocab, dtype):
    """The losses with ``world / n_vocab`` parts of the sequence and ``n_vocab`` parts of the vocabulary."""
    batch, words = 3, 11
    logits, target = case(n_tokens, batch, words, dtype)
    meshes = torch.arange(world).view(-1, n_vocab)
    groups = [dist.new_group(ranks) for ranks in meshes.t().tolist()]
    vocab_groups = [dist.new_group(ranks) for ranks in meshes.tolist()]
    sp_rank, vocab_rank = divmod(rank, n_vocab)
    cut = SequenceCut(n_tokens, world // n_vocab, "contiguous")
    mine = cut.take(logits, sp_rank, 0)
    begin, end = words * vocab_rank // n_vocab, words * (vocab_rank + 1) // n_vocab
    mine = mine[..., begin:end].clone().requires_grad_()
    before = mine.detach().clone()
    losses = vocab_sequence_parallel_cross_entropy(
        vocab_parallel_logits=mine,
        target=cut.take(target, sp_rank, 0),
        sp_group=groups[vocab_rank],
        vocab_group=vocab_groups[sp_rank] if n_vocab > 1 else None,
    )
    weigh = torch.linspace(-1, 2, losses.numel(), dtype=losses.dtype).view(losses.shape)
    (first,) = torch.autograd.grad((losses * weigh).sum(), mine, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad((losses * weigh).sum(), mine)
    assert torch.equal(mine, before) and torch.equal(first, kept) and torch.equal(first, second)

    exact = logits.double().requires_grad_()
    expected = whole_losses(exact, target)
    (grad,) = torch.autograd.grad((expected * weigh.double()).sum(), exact)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(losses.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        first.double(), cut.take(grad, sp_rank, 0)[..., begin:end], rtol=tolerance, atol=tolerance
    )
    return True


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("world", "n_tokens"), [(1, 5), (2, 8), (2, 7), (4, 13), (4, 2)])
def test_a_cut_sequence(world, n_tokens, dtype):
    assert all(run_ranks(world, sequence_losses, n_tokens, 1, dtype))


@pytest.mark.parametrize("world", [2, 4])
def test_a_vocabulary_that_is_cut_as_well(world):
    assert all(run_ranks(world, sequence_losses, 7, 2, torch.float32))
    assert all(run_ranks(world, sequence_losses, 7, 2, torch.float64))


def refused(rank, world, kind):
    logits, target = case(4, 2, 5, torch.float32)
    if kind == "batch" and rank == 1:
        logits, target = logits[:, :1], target[:, :1]
    if kind == "word" and rank == 1:
        target = target.clone()
        target[1, 1] = 5
    if kind == "shape" and rank == 0:
        target = target[:3]
    try:
        vocab_sequence_parallel_cross_entropy(logits, target, None)
    except (RankMismatchError, ModelError, IndexError) as error:
        return type(error).__name__, str(error)
    return None


def test_what_does_not_fit_is_an_error_of_all_ranks():
    for name, text in run_ranks(2, refused, "batch"):
        assert name == RankMismatchError.__name__ and "[2, 1]" in text
    (first, text), (second, own) = run_ranks(2, refused, "word")
    assert (first, second) == (RankMismatchError.__name__, "IndexError")
    assert "rank 1 of 2" in text and "target 5 is not in the vocabulary of 5" in own
    (first, own), (second, text) = run_ranks(2, refused, "shape")
    assert (first, second) == (ModelError.__name__, RankMismatchError.__name__) and "(3, 2)" in own


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_losses_of_rows(dtype, smoothing):
    logits, target = case(9, 1, 13, dtype)
    logits, target = logits[:, 0].requires_grad_(), target[:, 0]
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact, target, reduction="none", label_smoothing=smoothing)
    found = row_losses(logits, target, label_smoothing=smoothing)
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    weigh = torch.linspace(1, 2, 9, dtype=torch.float64)
    (grad,) = torch.autograd.grad((found * weigh).sum(), logits)
    (exact_grad,) = torch.autograd.grad((expected * weigh).sum(), exact)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


class Capped(nn.Linear):
    """A head whose backward reads its output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x)) * 5


@pytest.mark.parametrize("head_of", [nn.Linear, Capped])
@pytest.mark.parametrize("n_tiles", [1, 2, 5, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_loss_in_tiles(dtype, n_tiles, head_of):
    torch.manual_seed(4)
    head, hidden = head_of(6, 11, dtype=dtype), torch.randn(2, 7, 6, dtype=dtype).requires_grad_()
    target = torch.randint(11, (2, 7))
    target[0, 3:] = -100
    of = [hidden, *head.parameters()]
    for n_counted, smoothing in ((None, 0.0), (20, 0.0), (torch.tensor(20), 0.1)):
        found = tiled_cross_entropy(
            head, hidden, target, n_tiles, weights=[head.weight], n_counted=n_counted, label_smoothing=smoothing
        )
        expected = F.cross_entropy(
            head(hidden).flatten(0, 1), target.flatten(), label_smoothing=smoothing,
            reduction="mean" if n_counted is None else "sum",
        ) / (1 if n_counted is None else n_counted)  # fmt: skip
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found * 3, of), torch.autograd.grad(expected * 3, of))


def test_a_loss_in_tiles_of_padding_alone_and_of_wrong_targets():
    head, hidden = nn.Linear(6, 11), torch.randn(2, 7, 6).requires_grad_()
    loss = tiled_cross_entropy(head, hidden, torch.full((2, 7), -100), 3)
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any() and not head.weight.grad.any()
    with pytest.raises(IndexError, match="target 11 is not in the vocabulary of 11"):
        tiled_cross_entropy(head, hidden, torch.full((2, 7), 11), 3)
    with pytest.raises(ModelError, match=r"\(2, 6\) targets for the shape \(2, 7, 6\)"):
        tiled_cross_entropy(head, hidden, torch.zeros(2, 6, dtype=torch.int64), 3)
