"""Quantization by groups: the C core against torch's own float8 types, an fp64 formula, and the formulas in PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deepspeed_c.ops import quant
from deepspeed_c.ops.quantizer import ds_quantizer
from tests.ops.data import DTYPES, normal

SCALE_TYPES = ("float32", "bfloat16", "float16", "e8m0")
SPAN = {"int8": 127.5, "int4": 7.5, "int8_over_256": 128.0, "int4_over_16": 8.0, "e4m3": 448.0, "e5m2": 57344.0}
# Bits of the mantissa, and the exponent of the smallest normal number.
FLOATS = {"e4m3": (3, -6), "e5m2": (2, -14)}


def ways() -> list[Any]:
    return list(_ways())


def _ways() -> Iterator[Any]:
    for format_name, symmetric, scale_type in itertools.product(quant.FORMATS, (True, False), SCALE_TYPES):
        if symmetric or (format_name.startswith("int") and scale_type != "e8m0"):
            yield pytest.param(format_name, symmetric, scale_type, id=f"{format_name}-{symmetric}-{scale_type}")


def values(dtype: torch.dtype) -> torch.Tensor:
    """Rows of different magnitudes; one is zeros, one has a NaN, one an inf."""
    x = normal(3 * 7 * 70, 1).view(3, 7, 70) * torch.logspace(-3, 1, 7).view(7, 1)
    x[0, 0] = 0
    x[1, 2, 5], x[2, 3, 69] = torch.nan, torch.inf
    return x.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, NaN where the other has NaN."""
    a, b = a.float(), b.float()
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format_name, symmetric, scale_type", ways())
def test_kernels_and_formulas_agree(format_name, symmetric, scale_type, dtype) -> None:
    x, at = values(dtype), SCALE_TYPES.index(scale_type)
    for group, seed in itertools.product((0, 1, 16, 33), (None, 5)):
        how = {"group": group, "symmetric": symmetric, "scale_type": scale_type, "seed": seed, "offset": 3}
        fake, quantized = quant.fake_quantize(x, format_name, **how), quant.quantize(x, format_name, **how)
        assert same(quant.dequantize(quantized, dtype), fake), (group, seed)
        formula = (x, format_name, group, symmetric, at, seed, 3)
        assert same(quant._formula_fake(*formula), fake), (group, seed)
        codes, scales, zeros = quant._formula_quantize(*formula)
        assert torch.equal(codes, quantized.codes.view(torch.uint8)) and same(scales, quantized.scales)
        assert symmetric or torch.equal(zeros, quantized.zero_points)
        given = (quantized.scales, quantized.zero_points, format_name)
        if seed is None:
            assert same(quant.fake_quantize_with(x, *given, group=group), fake)
            assert same(quant._formula_fake_with(x, *given, group), fake)
        out = torch.empty_like(x)
        quant._formula_dequantize(codes, *given, group, out)
        assert same(out, fake)


@pytest.mark.parametrize("format_name, dtype", [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_float8_codes_are_torchs(format_name: str, dtype: torch.dtype) -> None:
    x = torch.cat([normal(20_000, 2) * 10.0 ** torch.randint(-8, 5, (20_000,)), torch.tensor([0.0, -0.0, torch.nan])])
    largest = torch.finfo(dtype).max
    codes = torch.ops.deepspeed_c.quant_fake_with(x, torch.ones(1), None, format_name, 0)
    wanted = x.clamp(-largest, largest).to(dtype).float()
    assert same(codes, wanted), (codes[codes != wanted], wanted[codes != wanted])


@pytest.mark.parametrize("format_name, peer", [("e4m3", "float8_e4m3fn"), ("e5m2", "float8_e5m2")])
def test_float8_codes_are_those_of_ml_dtypes(format_name: str, peer: str) -> None:
    """Codes of values of all magnitudes, at the scale 1, and the values of all finite codes."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    peer_type, largest = getattr(ml_dtypes, peer), SPAN[format_name]
    x = normal(20_000, 7) * 10.0 ** torch.randint(-8, 5, (20_000,), generator=torch.Generator().manual_seed(7))
    x = torch.cat([x.clamp(-largest, largest), torch.tensor([0.0, -0.0, largest])])
    found = quant.quantize(x, format_name)
    codes, wanted = found.codes.view(torch.uint8), torch.from_numpy(x.numpy().astype(peer_type).view("uint8"))
    differ = codes != wanted
    assert found.scales.tolist() == [1.0] and not differ.any(), (x[differ], codes[differ], wanted[differ])

    every = torch.arange(256, dtype=torch.uint8)
    values = torch.from_numpy(every.numpy().view(peer_type).astype("float32"))
    finite = values.isfinite()
    read = quant.dequantize(found._replace(codes=every[finite], n_cols=int(finite.sum()), group=256))
    assert torch.equal(read, values[finite]), (read, values[finite])
    assert torch.equal(read.signbit(), values[finite].signbit())


@pytest.mark.parametrize("format_name", quant.FORMATS)
def test_e8m0_scales_are_numbers_of_ml_dtypes(format_name: str) -> None:
    """A scale's code is the exponent of the group's largest magnitude less that of the format's largest number."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    exponents = torch.arange(-80, 127)
    x = torch.ldexp(torch.tensor([1.0, -1.75, 0.3]).expand(len(exponents), 3), exponents.view(-1, 1))
    scales = quant.quantize(x, format_name, scale_type="e8m0").scales.view(-1)
    codes = scales.numpy().astype(ml_dtypes.float8_e8m0fnu)
    assert torch.equal(torch.from_numpy(codes.astype("float32")), scales), (codes, scales)
    of_largest = {"int8": 6, "int4": 2, "int8_over_256": 6, "int4_over_16": 2, "e4m3": 8, "e5m2": 15}[format_name]
    wanted = exponents + 127 - of_largest
    assert codes.view("uint8").tolist() == wanted.tolist(), (codes, wanted)


@pytest.mark.parametrize("format_name", quant.FORMATS)
def test_error_of_an_element(format_name: str) -> None:
    """In fp64: half a step of an integer, or the distance to the largest one; half a unit of a float's last place."""
    x = normal(64 * 50, 3).view(50, 64)
    y = quant.fake_quantize(x, format_name, group=64).double()
    scale = x.double().abs().amax(1, keepdim=True) / SPAN[format_name]
    if format_name.startswith("int"):
        # The largest element may be above the largest number; its quotient is rounded to fp32.
        numbers = x.double() / scale
        largest = 7 if format_name.startswith("int4") else 127
        bound = scale * (numbers - largest).clamp(min=0.5) * (1 + 2**-16)
    else:
        bits, least = FLOATS[format_name]
        exponents = (torch.frexp(x.double() / scale).exponent - 1).clamp(min=least)
        bound = scale * 2.0 ** (exponents - bits - 1)
    worst = ((y - x.double()).abs() / bound).max()
    assert worst <= 1 + 1e-5, worst


def test_int4_words_are_those_of_compressed_tensors() -> None:
    """Eight codes + 8 in an int32, the first in the lowest bits; a row is filled up with zeros."""
    x = torch.arange(-8, 3).float().expand(2, 11)
    found = torch.ops.deepspeed_c.quant_quantize(x * 7.5 / 8, "int4", 0, True, 0, None, 0)[0]
    words = [
        sum((q + 8) << 4 * i for i, q in enumerate(range(-8, 0))),
        sum((q + 8) << 4 * i for i, q in enumerate(range(3))),
    ]
    assert (found.view(torch.int32).long() & 0xFFFFFFFF).tolist() == [words] * 2


def test_rounding_at_random_depends_on_the_position_only() -> None:
    x = normal(6 * 96, 4).view(6, 96)
    whole = quant.fake_quantize(x, "int4", group=32, seed=9)
    parts = [quant.fake_quantize(x[i : i + 2], "int4", group=32, seed=9, offset=96 * i) for i in (0, 2, 4)]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(quant.fake_quantize(x, "int4", group=32, seed=10), whole)
    mean = torch.stack([quant.fake_quantize(x, "int4", group=32, seed=s) for s in range(400)]).mean(0)
    step = x.view(6, 3, 32).abs().amax(2).repeat_interleave(32, 1) / 7.5
    inside = (x / step).abs() < 6.9
    worst = ((mean - x) / step).abs()[inside].max()
    assert worst < 5 * 0.5 / 400**0.5, worst


@pytest.mark.parametrize("n_cols", [4096, 4100])
def test_large_results_have_the_bits_of_small_ones(n_cols: int) -> None:
    """Results of 32 MiB or more are stored past the caches, those that are aligned to a register at least."""
    x = normal(2050 * n_cols, 8).view(2050, n_cols)
    found = quant.fake_quantize(x, "int8", group=64)
    wanted = torch.cat([quant.fake_quantize(part, "int8", group=64) for part in x.split(1025)])
    assert torch.equal(found, wanted), (found != wanted).nonzero()


def test_gradients_go_straight_through() -> None:
    x = normal(3 * 40, 5).view(3, 40).requires_grad_()
    weight = normal(3 * 40, 6).view(3, 40)
    (quant.fake_quantize(x, "int4", group=8) * weight).sum().backward()
    assert torch.equal(x.grad, weight)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 4), (1,), (7,)])
def test_awkward_shapes(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for format_name in quant.FORMATS:
        quantized = quant.quantize(x, format_name, group=2)
        assert quant.dequantize(quantized).shape == x.shape == quant.fake_quantize(x, format_name, group=2).shape


def test_refusals() -> None:
    x = torch.randn(2, 8)
    for text, call in {
        "there is no format": lambda: quant.fake_quantize(x, "int3"),
        "int8, int4, int8_over_256, int4_over_16, e4m3, e5m2": lambda: quant.quantize(x, "int3"),
        "no zero points": lambda: quant.fake_quantize(x, "e4m3", symmetric=False),
        "group is -1": lambda: quant.fake_quantize(x, group=-1),
        "type of scales 'fp8'": lambda: quant.fake_quantize(x, scale_type="fp8"),
        "float64": lambda: quant.fake_quantize(x.double()),
        "argument scales": lambda: quant.fake_quantize_with(x, torch.ones(3)),
        "argument packed has 3": lambda: quant.packed_linear(x, torch.ones(3, 1).int(), torch.ones(3, 1), bits=8),
        "argument bits is 5": lambda: quant.packed_linear(x, torch.ones(3, 1).int(), torch.ones(3, 1), bits=5),
    }.items():
        with pytest.raises(Exception, match=text):
            call()
    assert torch.equal(x, x.clone())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_products_with_packed_codes(bits: int, dtype: torch.dtype) -> None:
    """Against fp64, for few rows and for many; gradients of x and bias too."""
    n_cols, n_outputs, group = 75, 6, 32
    shape, generator = (n_outputs, -(-n_cols * bits // 32)), torch.Generator().manual_seed(bits)
    packed = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=generator)
    scales, bias = (normal(n_outputs * n, n).view(n_outputs, n).to(dtype) for n in (3, 1))
    words, n_codes = packed.long() & 0xFFFFFFFF, 32 // bits
    codes = torch.stack([words >> bits * i & 2**bits - 1 for i in range(n_codes)], 2).flatten(1)[:, :n_cols]
    weight = (codes - 2 ** (bits - 1)).double() * scales.double().repeat_interleave(group, 1)[:, :n_cols]
    for n_rows in (0, 1, quant.FEW_ROWS, quant.FEW_ROWS + 1):
        x, b = (
            normal(n_rows * n_cols, 3).view(n_rows, n_cols).to(dtype).requires_grad_(),
            bias[:, 0].clone().requires_grad_(),
        )
        y = quant.packed_linear(x.view(n_rows, 1, n_cols), packed, scales, b, bits=bits, group=group)
        dy = normal(n_rows * n_outputs, 4).view(n_rows, 1, n_outputs).to(dtype)
        found = (y, *torch.autograd.grad(y, (x, b), dy))
        x64, dy64 = x.detach().double(), dy[:, 0].double()
        wanted = ((x64 @ weight.T + b.detach().double())[:, None], dy64 @ weight, dy64.sum(0))
        for name, ours, theirs in zip(("y", "dx", "dbias"), found, wanted, strict=True):
            assert ours.dtype == dtype and ours.shape == theirs.shape
            worst = (ours - theirs).norm() / theirs.norm().clamp(min=1e-30)
            assert worst <= 2 * torch.finfo(dtype).eps, (n_rows, name, worst)
    with torch.autocast("cpu", torch.bfloat16):
        assert quant.packed_linear(x[:1], packed, scales, b, bits=bits, group=group).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
def test_ds_quantizer_writes_in_place(dtype: torch.dtype) -> None:
    x = normal(6 * 70, 8).view(6, 70).to(dtype)
    before = x.clone()
    assert ds_quantizer(x, groups=12, bit_num=4, asym=True) is x
    rows, found = before.double().view(12, 35), x.double().view(12, 35)
    step = (rows.amax(1).clamp(min=0) - rows.amin(1).clamp(max=0)).unsqueeze(1) / 15
    worst = ((found - rows).abs() / step).max()
    assert worst < 0.5 + 16 * torch.finfo(dtype).eps, worst
    assert all(len(row.unique()) <= 16 for row in found)
    torch.manual_seed(0)
    first, again = (ds_quantizer(before.clone(), 6, 8, sr=True) for _ in range(2))
    assert not torch.equal(first, again)
    for arguments, text in {(11, 8): "11 equal groups", (6, 3): "bit_num is 3"}.items():
        with pytest.raises(ValueError, match=text):
            ds_quantizer(x, *arguments)
    assert ds_quantizer(torch.zeros(2, 4)).eq(0).all()
