"""Parts of models that run in tiles, compared with the same parts run whole by torch: outputs, and every gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepspeed_c.checkpointing import checkpoint
from deepspeed_c.errors import ConfigError, ModelError, RecomputeError
from deepspeed_c.sequence.tiles import TiledFusedLogitsLoss, TiledMLP, sequence_tiled_compute, tile_lengths

TILES = [1, 2, 3, 7, 13, 40]


class Gated(nn.Module):
    """A gated MLP like Llama's, with a bias."""

    def __init__(self, width: int = 6, inner: int = 10, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.gate = nn.Linear(width, inner, dtype=dtype)
        self.up = nn.Linear(width, inner, bias=False, dtype=dtype)
        self.down = nn.Linear(inner, width, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def whole(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return Gated.forward(self, x)


def gradients(output: torch.Tensor, of: list[torch.Tensor], seed: int = 5) -> list[torch.Tensor | None]:
    """The gradients of a loss in which each output has another weight."""
    torch.manual_seed(seed)
    return list(torch.autograd.grad((output * torch.randn_like(output)).sum(), of, allow_unused=True))


def assert_same(found: list[torch.Tensor | None], expected: list[torch.Tensor | None], rtol: float = 1e-10) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


def rows_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(shape, dtype=dtype).requires_grad_()


def test_tiles_are_equal_but_for_a_shorter_last_one():
    for n_rows in range(30):
        for n_tiles in range(1, 34):
            lengths = tile_lengths(n_rows, n_tiles)
            assert sum(lengths) == n_rows and len(lengths) <= n_tiles
            assert n_rows == 0 or min(lengths) > 0
            assert len(set(lengths[:-1])) <= 1 and lengths[-1] <= lengths[0]
    for wrong in (0, -1, 2.0, True, None):
        with pytest.raises(ConfigError, match=r"tiles for 9 rows.*\n?.*at least 1"):
            tile_lengths(9, wrong)


@pytest.mark.parametrize("shape", [(13, 6), (1, 13, 6), (3, 13, 6), (2, 3, 13, 6), (2, 1, 6), (2, 0, 6)])
@pytest.mark.parametrize("n_tiles", TILES)
def test_an_mlp_in_tiles_is_the_whole_one(shape, n_tiles):
    mlp, x = Gated(), rows_of(shape)
    of = [x, *mlp.parameters()]
    output = TiledMLP.apply(whole, mlp, x, n_tiles, None)
    expected = mlp(x)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    assert_same(gradients(output, of), gradients(expected, of))


def test_inputs_that_do_not_lie_in_one_piece():
    mlp, base = Gated(), rows_of((6, 13, 3))
    x = base.permute(2, 1, 0)
    of = [base, *mlp.parameters()]
    assert_same(gradients(TiledMLP.apply(whole, mlp, x, 4, None), of), gradients(mlp(x), of))


def test_hooks_of_weights_see_the_sum_once():
    mlp, x = Gated(), rows_of((2, 13, 6))
    seen, after = [], []
    mlp.up.weight.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)
    mlp.up.weight.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    TiledMLP.apply(whole, mlp, x, 5, list(mlp.parameters())).square().sum().backward()
    (expected,) = torch.autograd.grad(Gated()(x).square().sum(), x, retain_graph=False)
    torch.testing.assert_close(x.grad, expected)
    assert len(seen) == len(after) == 1
    torch.testing.assert_close(after[0], seen[0] * 2)


def test_gradients_are_scaled_with_the_loss_and_added_to_those_before():
    mlp, x = Gated(), rows_of((2, 13, 6))
    for p in mlp.parameters():
        p.grad = torch.ones_like(p)
    (TiledMLP.apply(whole, mlp, x, 5, None).sum() / 8).backward()
    other = Gated()
    (other(x.detach()).sum() / 8).backward()
    for p, q in zip(mlp.parameters(), other.parameters()):
        torch.testing.assert_close(p.grad, q.grad + 1)


def test_a_graph_can_be_gone_through_twice():
    mlp, x = Gated(), rows_of((2, 13, 6))
    of = [x, *mlp.parameters()]
    loss = TiledMLP.apply(whole, mlp, x, 5, None).sum()
    first = torch.autograd.grad(loss, of, retain_graph=True)
    kept = [g.clone() for g in first]
    assert_same(list(torch.autograd.grad(loss, of)), kept)


def test_frozen_weights_and_frozen_inputs():
    mlp = Gated()
    mlp.gate.requires_grad_(False)
    x = rows_of((2, 13, 6))
    trained = [p for p in mlp.parameters() if p.requires_grad]
    assert_same(gradients(TiledMLP.apply(whole, mlp, x, 4, None), [x, *trained]), gradients(mlp(x), [x, *trained]))
    x = x.detach()
    assert_same(gradients(TiledMLP.apply(whole, mlp, x, 4, None), trained), gradients(mlp(x), trained))
    mlp.requires_grad_(False)
    assert not TiledMLP.apply(whole, mlp, x, 4, None).requires_grad
    with torch.no_grad():
        torch.testing.assert_close(TiledMLP.apply(whole, mlp, x, 4, None), mlp(x))


def test_weights_that_nobody_named_are_found():
    mlp, x = Gated(), rows_of((2, 13, 6))
    of = [x, *mlp.parameters()]
    output = TiledMLP.apply(whole, mlp, x, 4, [mlp.up.weight])
    assert_same(gradients(output, of), gradients(mlp(x), of))
    output = sequence_tiled_compute(lambda x: mlp(x), 13, 4, {"x": x}, {}, "x", None, 1, None)
    assert_same(gradients(output, of), gradients(mlp(x), of))


def test_a_weight_that_only_a_later_tile_reads():
    first, later = nn.Linear(6, 6, dtype=torch.float64), nn.Linear(6, 6, dtype=torch.float64)
    both = nn.ModuleList([first, later])
    x = rows_of((1, 8, 6))
    with torch.no_grad():
        x[0, 4:] = 9

    def routed(self, x):
        return self[1 if x.mean() > 5 else 0](x)

    output = TiledMLP.apply(routed, both, x, 2, None)
    expected = torch.cat([first(x[:, :4]), later(x[:, 4:])], 1)
    assert_same(gradients(output, [x, *both.parameters()]), gradients(expected, [x, *both.parameters()]))
    output = TiledMLP.apply(routed, both, x, 2, list(first.parameters()))
    with pytest.raises(RecomputeError, match=r"weight of shape .* is read by a later tile"):
        output.sum().backward()


def test_a_tensor_of_the_graph_must_be_an_argument():
    mlp, x = Gated(), rows_of((1, 8, 6))
    scale = x.mean() * 2
    with pytest.raises(ModelError, match="reads a tensor of the model's graph"):
        TiledMLP.apply(lambda self, x: self(x) * scale, mlp, x, 2, None)
    output = sequence_tiled_compute(lambda x, s: mlp(x) * s, 8, 3, {"x": x}, {"s": scale}, "x", None, 1, None)
    assert_same(gradients(output, [x, *mlp.parameters()]), gradients(mlp(x) * (x.mean() * 2), [x, *mlp.parameters()]))


def test_dropout_draws_the_same_numbers_again():
    mlp, x = Gated(), rows_of((2, 13, 6))

    def dropped(self, x):
        return F.dropout(self(x), 0.5)

    def loop(x):
        return torch.cat([dropped(mlp, part) for part in x.split(4, 1)], 1)

    torch.manual_seed(11)
    output = TiledMLP.apply(dropped, mlp, x, 4, None)
    after = torch.rand(3)
    torch.manual_seed(11)
    expected = loop(x)
    assert torch.equal(after, torch.rand(3))
    torch.testing.assert_close(output, expected)
    of = [x, *mlp.parameters()]
    assert_same(gradients(output, of), gradients(expected, of))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_16_bits_round_once(dtype):
    mlp, x = Gated(16, 32, torch.float32).to(dtype), rows_of((1, 512, 16), dtype)
    exact, wide = Gated(16, 32), x.detach().double().requires_grad_()
    exact.load_state_dict({k: v.double() for k, v in mlp.state_dict().items()})
    TiledMLP.apply(whole, mlp, x, 128, None).sum().backward()
    exact(wide).sum().backward()
    grads, expected = mlp.down.bias.grad, exact.down.bias.grad
    assert grads.dtype is dtype
    torch.testing.assert_close(grads.double(), expected, rtol=1e-3, atol=0)


def test_under_autocast():
    mlp, x = Gated(dtype=torch.float32), rows_of((2, 13, 6), torch.float32)
    of = [x, *mlp.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        output, expected = TiledMLP.apply(whole, mlp, x, 4, None), mlp(x)
        # Outside of tiles the same weight still gets its gradient.
        once_more = mlp.up(x)
    assert output.dtype is expected.dtype is torch.bfloat16
    assert_same(gradients(output, of), gradients(expected, of), rtol=0.05)
    assert gradients(once_more, [mlp.up.weight])[0] is not None
    with torch.autocast("cpu", torch.bfloat16):
        TiledMLP.apply(whole, mlp, x, 4, None)
        later = mlp.up(x)
    assert torch.autograd.grad(later.sum(), mlp.up.weight, allow_unused=True)[0] is not None


@pytest.mark.parametrize("is_ours", [False, True])
def test_within_a_checkpointed_layer(is_ours):
    mlp, x = Gated(), rows_of((2, 13, 6))
    of = [x, *mlp.parameters()]

    def layer(x):
        return x + TiledMLP.apply(whole, mlp, x.sin(), 4, None)

    run = checkpoint if is_ours else lambda f, x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)
    output = run(layer, run(layer, x))
    expected = x + mlp(x.sin())
    expected = expected + mlp(expected.sin())
    assert_same(gradients(output, of), gradients(expected, of))


def test_a_checkpoint_within_tiles():
    mlp, x = Gated(), rows_of((2, 13, 6))
    of = [x, *mlp.parameters()]
    output = TiledMLP.apply(lambda self, x: checkpoint(self, x), mlp, x, 4, None)
    assert_same(gradients(output, of), gradients(mlp(x), of))


def test_weights_that_change_before_the_backward():
    mlp, x = Gated(), rows_of((2, 13, 6))
    output = TiledMLP.apply(whole, mlp, x, 4, None)
    with torch.no_grad():
        mlp.up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_what_an_mlp_in_tiles_refuses():
    mlp, x = Gated(), rows_of((2, 13, 6))
    with pytest.raises(ConfigError, match="0 tiles for 13 rows"):
        TiledMLP.apply(whole, mlp, x, 0, None)
    with pytest.raises(ModelError, match=r"shape \(6,\)"):
        TiledMLP.apply(whole, mlp, x[0, 0], 2, None)
    with pytest.raises(ModelError, match=r"gave shape \(2, 1, 6\) for a tile of 7 of 13 tokens"):
        TiledMLP.apply(lambda self, x: self(x).sum(1, keepdim=True), mlp, x, 2, None)
    with pytest.raises(ModelError, match="gave a tuple for one tile"):
        TiledMLP.apply(lambda self, x: (self(x), x), mlp, x, 2, None)


# Any function of tokens


@pytest.mark.parametrize("n_tiles", TILES)
@pytest.mark.parametrize("reduction", [None, "mean", "sum"])
def test_any_function_with_several_inputs(n_tiles, reduction):
    mlp, x, y = Gated(), rows_of((2, 13, 6)), rows_of((2, 13, 1)).detach().requires_grad_()
    table = nn.Parameter(torch.rand(6, dtype=torch.float64))
    of = [x, y, table, *mlp.parameters()]

    def f(x, y, skipped, table, power):
        assert skipped is None
        return (mlp(x) * y * table) ** power

    output = sequence_tiled_compute(
        f, 13, n_tiles, {"x": x, "y": y, "skipped": None}, {"table": table, "power": 2}, "x", None, 1, reduction
    )
    expected = f(x, y, None, table, 2)
    expected = expected if reduction is None else getattr(expected, reduction)()
    assert_same(gradients(output, of), gradients(expected, of))
    torch.testing.assert_close(output, expected)


def losses_of(head: nn.Linear, x: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
    return F.cross_entropy(head(x).flatten(0, -2), labels.flatten(), reduction=reduction)


def labels_of(shape: tuple[int, ...], vocab_size: int = 11) -> torch.Tensor:
    """Labels of which half of the first half, and all of the second half, are padding."""
    torch.manual_seed(2)
    labels = torch.randint(vocab_size, shape)
    labels[torch.rand(shape) < 0.5] = -100
    labels[:, shape[1] // 2 :] = -100
    labels[0, 0] = 1
    return labels


@pytest.mark.parametrize("n_tiles", TILES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_numbers_of_tiles_are_weighed_by_their_targets(n_tiles, reduction):
    head, x, labels = nn.Linear(6, 11, dtype=torch.float64), rows_of((2, 13, 6)), labels_of((2, 13))
    of = [x, *head.parameters()]
    loss = sequence_tiled_compute(
        lambda x, shift_labels: losses_of(head, x, shift_labels, reduction),
        13, n_tiles, {"x": x, "shift_labels": labels}, {}, "x", [head.weight], 0, reduction,
    )  # fmt: skip
    expected = losses_of(head, x, labels, reduction)
    torch.testing.assert_close(loss, expected)
    assert_same(list(torch.autograd.grad(loss * 3, of)), list(torch.autograd.grad(expected * 3, of)))


def test_what_any_function_in_tiles_refuses():
    x = rows_of((2, 13, 6))
    with pytest.raises(ConfigError, match=r"x is \(2, 13, 6\), and is to be cut into tiles of 12 tokens"):
        sequence_tiled_compute(torch.sin, 12, 2, {"x": x}, {}, "x")
    with pytest.raises(ConfigError, match="'z' requires a gradient"):
        sequence_tiled_compute(torch.sin, 13, 2, {"x": x}, {}, "z")
    with pytest.raises(ConfigError, match="output_reduction is 'max'"):
        sequence_tiled_compute(torch.sin, 13, 2, {"x": x}, {}, "x", output_reduction="max")


# Losses


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("n_tiles", TILES)
def test_a_loss_in_tiles_is_the_whole_one(n_tiles, reduction, with_mask):
    head, x, labels = nn.Linear(6, 11, dtype=torch.float64), rows_of((2, 13, 6)), labels_of((2, 13))
    mask = (torch.arange(26).view(2, 13) % 3 != 1) if with_mask else None
    of = [x, *head.parameters()]

    def masked(self, x, y, mask=None):
        y = y if mask is None else y.masked_fill(~mask, -100)
        return losses_of(self, x, y, reduction)

    loss = TiledFusedLogitsLoss.apply(masked, head, x, labels, mask, n_tiles, list(head.parameters()), reduction)
    expected = masked(head, x, labels, mask)
    torch.testing.assert_close(loss, expected)
    assert_same(list(torch.autograd.grad(loss / 4, of)), list(torch.autograd.grad(expected / 4, of)))


def test_a_loss_of_nothing_but_padding_is_zero():
    head, x = nn.Linear(6, 11), rows_of((2, 5, 6), torch.float32)
    labels = torch.full((2, 5), -100)
    loss = TiledFusedLogitsLoss.apply(
        lambda self, x, y: losses_of(self, x, y, "mean"), head, x, labels, None, 3, None, "mean"
    )
    loss.backward()
    assert loss.item() == 0 and not x.grad.any()


def test_a_loss_in_tiles_can_be_gone_through_twice_and_without_gradients():
    head, x, labels = nn.Linear(6, 11), rows_of((2, 13, 6), torch.float32), labels_of((2, 13))
    arguments = (lambda self, x, y: losses_of(self, x, y, "mean"), head, x, labels, None, 4, None, "mean")
    loss = TiledFusedLogitsLoss.apply(*arguments)
    loss.backward(retain_graph=True)
    once = head.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(head.weight.grad, 2 * once)
    with torch.no_grad():
        torch.testing.assert_close(TiledFusedLogitsLoss.apply(*arguments), loss)
    head.requires_grad_(False)
    (grad,) = torch.autograd.grad(TiledFusedLogitsLoss.apply(*arguments), x)
    torch.testing.assert_close(2 * grad, x.grad)


def test_gradients_of_16_bits_are_scaled_once():
    head, labels = nn.Linear(64, 50, dtype=torch.float16), torch.randint(50, (1, 4096))
    x = (rows_of((1, 4096, 64), torch.float32) * 1e-3).half().detach().requires_grad_()
    loss = TiledFusedLogitsLoss.apply(
        lambda self, x, y: F.cross_entropy(self(x).float(), y), head, x, labels, None, 8, None, "mean"
    )
    (loss * 4096).backward()
    exact, wide = nn.Linear(64, 50, dtype=torch.float64), x.detach().double().requires_grad_()
    exact.load_state_dict(head.state_dict())
    (F.cross_entropy(exact(wide)[0], labels[0]) * 4096).backward()
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=5e-3, atol=1e-4)
    torch.testing.assert_close(head.weight.grad.double(), exact.weight.grad, rtol=5e-3, atol=1e-2)


def test_what_a_loss_in_tiles_refuses():
    head, x, labels = nn.Linear(6, 11), rows_of((2, 13, 6), torch.float32), labels_of((2, 13))

    def apply(fn=lambda self, x, y: losses_of(self, x, y, "mean"), x=x, y=labels, mask=None, reduction="mean"):
        return TiledFusedLogitsLoss.apply(fn, head, x, y, mask, 2, None, reduction)

    with pytest.raises(ConfigError, match="output_reduction is 'none'"):
        apply(reduction="none")
    with pytest.raises(ModelError, match=r"\(2, 13, 6\), \(2, 12\)"):
        apply(y=labels[:, 1:])
    with pytest.raises(ModelError, match=r"x, y, mask have the shapes"):
        apply(mask=torch.ones(2, 13, 1))
    with pytest.raises(ModelError, match=r"gave \(13, 11\) for one tile"):
        apply(fn=lambda self, x, y: self(x))
