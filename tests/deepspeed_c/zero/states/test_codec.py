"""The contract of every codec with ``Pieces``: plain states and 8-bit states give the same answers."""

from __future__ import annotations

import itertools

import pytest
import torch

from deepspeed_c.ops.adam import FusedAdam
from deepspeed_c.zero.states.codec import Codec, codec_of

# Below, at and above a block of 256 elements; a prime; one element.
SIZES = (1, 255, 256, 257, 1031)
DTYPES = {"plain": None, "8 bits": torch.int8}
# The error that two roundings to 8 bits may cause, relative to the largest value (1.5).
ERROR = {"plain": 0.0, "8 bits": 0.03}


def values(n: int, seed: int) -> torch.Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(seed)) + 0.5


def make(kind: str, n: int) -> tuple[FusedAdam, torch.nn.Parameter, Codec]:
    """An optimizer that has made its states. They are set to ``values(n, 1)`` and ``values(n, 2)``."""
    param = torch.nn.Parameter(torch.zeros(n))
    base = FusedAdam([param], state_dtype=DTYPES[kind])
    codec = codec_of(base)
    base.state[param]["step"] = torch.tensor(3.0)
    codec.make(0, param, {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}, {})
    for seed, key in ((1, "exp_avg"), (2, "exp_avg_sq")):
        whole = codec.whole(param, key)
        assert whole.shape == param.shape and not whole.any(), whole
        whole.copy_(values(n, seed))
        codec.put(param, key, whole)
    return base, param, codec


def assert_near(got: torch.Tensor, want: torch.Tensor, kind: str) -> None:
    assert got.dtype == torch.float32 and got.shape == want.shape
    error = (got - want).abs().max().item() if want.numel() else 0.0
    assert error <= ERROR[kind] * 1.5, f"{error}: {got} != {want}"


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", DTYPES)
def test_any_range_is_read_and_written(kind: str, n: int) -> None:
    base, param, codec = make(kind, n)
    names = [key for key, value in codec.named(base.state[param]) if torch.is_tensor(value) and value.dim()]
    assert sorted(names) == ["exp_avg", "exp_avg_sq"]
    assert {codec.dtype(base.state[param][key]) for key in names} == {torch.float32}
    tensors = codec.tensor_names(names)
    assert {key for key, value in base.state[param].items() if value.dim()} == set(tensors)
    for name in tensors:
        assert codec.piece_elems(name, 512) == (512 if name in names else 2)
    for begin, end in ((0, n), (n // 3, n), (0, n - n // 3), (n // 2, n // 2)):
        assert_near(codec.elements(param, "exp_avg", begin, end), values(n, 1)[begin:end], kind)
    begin, end = n // 3, n // 3 + (n + 1) // 2
    piece = codec.elements(param, "exp_avg", begin, end)
    piece.mul_(0.5)
    # A write to a view changes the state at once. A write to a copy changes it when ``keep`` is called.
    before = codec.elements(param, "exp_avg", begin, end)
    assert torch.equal(before, piece) == codec.gives_views
    codec.keep(param, "exp_avg", begin, piece)
    want = values(n, 1)
    want[begin:end] *= 0.5
    assert_near(codec.elements(param, "exp_avg", 0, n), want, kind)
    assert_near(codec.elements(param, "exp_avg_sq", 0, n), values(n, 2), kind)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", DTYPES)
def test_pieces_take_their_part_of_everything(kind: str, n: int) -> None:
    base, param, codec = make(kind, n)
    cuts = [0, n // 3, n // 3, n]  # the second piece is empty
    pieces = [torch.nn.Parameter(torch.zeros(high - low)) for low, high in itertools.pairwise(cuts)]
    codec.split(0, param, list(zip(pieces, cuts)))
    assert param not in base.state
    for piece, low in zip(pieces, cuts):
        assert base.state[piece]["step"].item() == 3.0
        for seed, key in ((1, "exp_avg"), (2, "exp_avg_sq")):
            got = codec.elements(piece, key, 0, piece.numel())
            assert_near(got, values(n, seed)[low : low + piece.numel()], kind)
    base.state[pieces[0]]["step"].add_(1)
    assert base.state[pieces[2]]["step"].item() == 3.0, "the pieces share a count"


@pytest.mark.parametrize("kind", DTYPES)
def test_what_has_no_state_gives_none(kind: str) -> None:
    param, piece = torch.nn.Parameter(torch.zeros(9)), torch.nn.Parameter(torch.zeros(9))
    base = FusedAdam([param], state_dtype=DTYPES[kind])
    codec_of(base).split(0, param, [(piece, 0)])
    assert not base.state, base.state
