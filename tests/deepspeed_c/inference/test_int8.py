"""int8 weights: against the fp64 formula, in models of transformers, on ranks that hold a model together, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.errors import ConfigError, DeepSpeedCError, ModelError, StateError
from deepspeed_c.inference.int8 import Int8Linear, Int8Product, quantize_weights
from deepspeed_c.inject import cut_model
from deepspeed_c.inject.layers import TensorParallelLayer
from deepspeed_c.inject.linear import is_transposed
from tests.deepspeed_c.inject.families import feed, make
from tests.ranks import run_ranks

PRELOAD = "tests.deepspeed_c.inject.preload"


def by_formula(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The int8 values, as fp64, and scales of ``weight`` [out, in], row by row in plain Python."""
    values, scales = [], []
    for row in weight.tolist():
        scale = torch.tensor(max((abs(x) for x in row), default=0.0), dtype=torch.float32) / 127
        scales.append(scale)
        values.append([0.0 if scale == 0 else float(round(float(torch.tensor(x) / scale))) for x in row])
    return torch.tensor(values, dtype=torch.float64).view(weight.shape), torch.tensor(scales)


def widened(module: torch.nn.Module) -> torch.Tensor:
    """The fp32 weight that the values and scales of a quantised layer stand for, in the shape of its weight."""
    scale = module.product.scale
    is_transposed = isinstance(module, TensorParallelLayer) and module.is_transposed
    return module.weight.float() * (scale if is_transposed else scale[:, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("n_rows", "n_in", "n_out"),
    [
        *((1, 1, 1), (1, 64, 1), (1, 1, 7), (3, 13, 31), (0, 64, 5), (0, 7, 5), (2, 0, 3), (2, 3, 0), (2, 64, 0)),
        *((1, 64, 67), (8, 128, 3), (32, 192, 33), (33, 192, 33), (5, 65, 64), (7, 63, 2), (31, 448, 129)),
    ],
)
def test_products_follow_the_formula(n_rows: int, n_in: int, n_out: int, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(n_rows + n_in + n_out)
    layer = torch.nn.Linear(n_in, n_out, bias=bias).to(dtype)
    with torch.no_grad():
        layer.weight[::3] = 0  # rows of zeros
        layer.weight[1::4] *= 1e-3
    whole, added = layer.weight.detach().clone(), layer.bias
    values, scales = by_formula(whole)
    model = torch.nn.Sequential(layer)
    quantize_weights(model, dtype=dtype)
    assert isinstance(model[0], Int8Linear) and model[0].weight.dtype is torch.int8
    assert torch.equal(model[0].weight.double(), values), (model[0].weight, values)
    assert torch.equal(model[0].product.scale, scales), (model[0].product.scale, scales)
    for shape in ((n_rows, n_in), (1, n_rows, n_in)):
        x = torch.randn(shape).to(dtype)
        y = model(x)
        sums = (x.double() @ values.t()) * scales.double()
        expected = sums + (0 if added is None else added.detach().double())
        # A sum is rounded once to the dtype and the result once; sums are in fp32, in any order.
        eps = torch.finfo(dtype).eps / 2
        rounding = (x.double().abs() @ values.abs().t()) * scales.double() * (n_in + 4) * 2**-24
        bound = eps * sums.abs() + eps * expected.abs() * (1 + eps) + 1.01 * rounding + 1e-37
        assert y.shape == expected.shape and y.dtype is dtype
        assert bool(((y.double() - expected).abs() <= bound).all()), (y, expected, bound)


def test_halves_round_to_even_and_weights_in_use_elsewhere_stay() -> None:
    weight = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0, 126.5]])
    layer = torch.nn.Linear(8, 1)
    layer.weight.data = weight
    before = weight.clone()
    model = torch.nn.Sequential(layer)
    quantize_weights(model)
    assert model[0].weight.tolist() == [[127, 0, 2, 2, 0, -2, -127, 126]], model[0].weight
    assert torch.equal(weight, before)  # the caller's tensor


def test_least_and_largest_numbers() -> None:
    least = 2.0**-149
    rows = [[least] * 4, [least * 127, -least, 0, least], [least * 178, 0, 0, 0], [3e38, -3e38, 1e38, 0]]
    layer = torch.nn.Linear(4, 4, bias=False)
    layer.weight.data = torch.tensor(rows)
    model = torch.nn.Sequential(layer)
    quantize_weights(model, dtype=torch.float32)
    error = (widened(model[0]).double() - torch.tensor(rows).double()).abs().amax(dim=1).tolist()
    assert error[:3] <= [least * 128] * 3 and error[3] <= 3e38 / 127, error


def test_autocast_decides_the_dtype_of_a_product() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    x = torch.randn(3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(x)
    quantize_weights(model)
    with torch.autocast("cpu", torch.bfloat16):
        got = model(x)
    assert got.dtype == wanted.dtype == torch.bfloat16
    assert (got - wanted).abs().max() < 0.05, f"{got} and {wanted}"


def test_a_gradient_passes_to_the_input() -> None:
    """Prompts are trained through frozen layers; torch's kernel for few rows has no derivative."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 5))
    quantize_weights(model)
    x = torch.randn(2, 64, requires_grad=True)
    model(x).sum().backward()
    expected = widened(model[0]).sum(0).expand(2, 64)
    assert torch.allclose(x.grad, expected, atol=2e-2 * expected.abs().max().item()), (x.grad, expected)


@pytest.mark.parametrize("family", ["llama", "llama_tied_shared", "gpt2", "bert", "t5"])
def test_models_compute_with_the_weights_that_the_values_stand_for(family: str) -> None:
    whole, model, stands_for = (make(family).eval() for _ in range(3))
    report = quantize_weights(model, dtype=torch.float32)
    rounded = 0.0
    for name, module in model.named_modules():
        if isinstance(module, Int8Linear):
            is_turned = is_transposed(stands_for.get_submodule(name))
            param = stands_for.get_parameter(f"{name}.weight")
            weight = widened(module)
            difference = weight - (param.detach().t() if is_turned else param.detach())
            rounded = max(rounded, (difference.abs() / module.product.scale[:, None]).max().item())
            param.data = weight.t().contiguous() if is_turned else weight
    assert 0.4 < rounded <= 0.5001, rounded
    found, expected, before = (m(**feed(family)).logits.detach() for m in (model, stands_for, whole))
    error, moved = ((each - expected).abs().max().item() for each in (found, before))
    assert error < 2e-5 * expected.abs().max().item(), (error, expected)
    assert error < 0.1 * moved, (error, moved)  # the int8 model is another model than the whole one
    assert moved < 0.2 * expected.abs().max().item(), moved
    params = {name: param for name, param in model.named_parameters()}
    for name in report.quantized:
        assert params[name].dtype is torch.int8 and not params[name].requires_grad
    for name in report.kept:
        assert params[name].is_floating_point(), name
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    assert table.is_floating_point() and (head is None or head.weight.is_floating_point())
    n_bytes = sum(p.nbytes for p in model.parameters()) + sum(
        b.nbytes for n, b in model.named_buffers() if "product" in n
    )
    assert report.bytes_after == n_bytes < report.bytes_before == sum(p.nbytes for p in whole.parameters())


def test_what_stays_as_it_is() -> None:
    """Tied weights, output layers, layers whose weights other modules read, and layers in fp32."""
    tied = make("llama_tied_shared")
    assert "tied" in quantize_weights(tied).kept["model.embed_tokens.weight"]
    assert "output layer" in quantize_weights(make("llama")).kept["lm_head.weight"]
    t5 = quantize_weights(make("t5"))
    assert any("wo" in name and "fp32" in why for name, why in t5.kept.items()), t5.kept
    encoder = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(1, 3, 8)
    before = encoder(x)
    report = quantize_weights(encoder)
    assert report.quantized == [] and len(report.kept) == 4 and torch.equal(encoder(x), before), report
    spectral = torch.nn.Sequential(
        torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4)), torch.nn.Linear(4, 4)
    )
    assert quantize_weights(spectral).quantized == ["1.weight"]
    named = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "ab": torch.nn.Linear(4, 4)})
    assert quantize_weights(named, keep=["a"]).quantized == ["ab.weight"]
    hooked = torch.nn.Sequential(torch.nn.Linear(4, 4))
    seen: list[str] = []
    handle = hooked[0].register_forward_pre_hook(lambda module, args: seen.append(type(module).__name__))
    quantize_weights(hooked)
    hooked(torch.zeros(1, 4))
    handle.remove()
    hooked(torch.zeros(1, 4))
    assert seen == ["Int8Linear"]


def test_the_state_dict_fits_and_casts_spare_the_scales() -> None:
    first, second = make("gpt2").eval(), make("gpt2").eval()
    with torch.no_grad():
        for param in second.parameters():
            param.normal_()
    for model in (first, second):
        quantize_weights(model, dtype=torch.float32)
    second.load_state_dict(first.state_dict())
    found, expected = (m(**feed("gpt2")).logits for m in (second, first))
    assert torch.equal(found, expected), (found, expected)
    first.bfloat16()
    products = [module for module in first.modules() if isinstance(module, Int8Product)]
    for module, other in zip(products, [m for m in second.modules() if isinstance(m, Int8Product)], strict=True):
        assert torch.equal(module.scale, other.scale)
    llama = make("llama")
    quantize_weights(llama)
    with pytest.raises(RuntimeError, match="load weights before quantize_weights"):
        llama.load_state_dict(make("llama").state_dict(), strict=False)


def test_memory_is_a_byte_an_element_and_one_weight_at_a_time() -> None:
    layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(6)]
    model = torch.nn.Sequential(*layers)
    storages = [layer.weight.untyped_storage() for layer in layers]
    report = quantize_weights(model)
    assert report.bytes_before == 6 * 512 * 512 * 4 and report.bytes_after == 6 * (512 * 512 + 512 * 4), report
    held = {param.untyped_storage().data_ptr() for param in model.parameters()}
    assert not held & {storage.data_ptr() for storage in storages}
    largest = max(layer.weight.untyped_storage().nbytes() for layer in model)
    assert largest == 512 * 512, largest


def test_bad_input_is_refused_before_anything_is_changed() -> None:
    def model() -> torch.nn.Sequential:
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    for bad in (float("nan"), float("inf"), float("-inf")):
        broken = model()
        with torch.no_grad():
            broken[1].weight[2, 3] = bad
        with pytest.raises(ModelError, match=r"1\.weight: it has NaN or inf"):
            quantize_weights(broken)
        assert all(p.dtype is torch.float32 for p in broken.parameters())
    with pytest.raises(ModelError, match="meta"):
        quantize_weights(model().to("meta"))
    for dtype in (torch.float16, torch.int8):
        with pytest.raises(ConfigError, match="bfloat16 or torch.float32"):
            quantize_weights(model(), dtype=dtype)
    with pytest.raises(ConfigError, match="no module '2'"):
        quantize_weights(model(), keep=["2"])
    twice = model()
    quantize_weights(twice)
    with pytest.raises(StateError, match="int8 already"):
        quantize_weights(twice)
    with pytest.raises(StateError, match=r"keep=\['0'\]"):
        twice(torch.zeros(1, 4, dtype=torch.int8))


def parts(rank: int, world: int, family: str) -> tuple[dict[str, Any], float, float]:
    whole = make(family).eval()
    alone = make(family).eval()
    quantize_weights(alone, dtype=torch.float32)
    cut_model(whole, TensorParallel(), Collectives())
    cuts = {name: param.tp_cut for name, param in whole.named_parameters() if hasattr(param, "tp_cut")}
    report = quantize_weights(whole, dtype=torch.float32)
    wrong = ""
    for name in report.quantized:
        module, reference = (m.get_submodule(name.removesuffix(".weight")) for m in (whole, alone))
        if not isinstance(reference, Int8Linear) or not isinstance(module, TensorParallelLayer):
            continue
        values = reference.weight.t() if module.is_transposed else reference.weight
        part = cuts[name].take(values) if name in cuts else values
        assert getattr(module.weight, "tp_cut", None) is cuts.get(name), name
        if not torch.equal(part, module.weight):
            wrong += f" {name}"
    found, expected = (m(**feed(family)).logits.detach() for m in (whole, alone))
    return (
        {"wrong": wrong, "n": len(report.quantized)},
        (found - expected).abs().max().item(),
        expected.abs().max().item(),
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_bigcode", "phi3", "bert", "bloom"])
def test_a_cut_model_has_the_values_of_one_rank(family: str) -> None:
    for found, error, size in run_ranks(2, parts, family, preload=PRELOAD):
        assert found["wrong"] == "" and found["n"] >= 6, found
        assert error < 2e-5 * size, (error, size)


def bad_part(rank: int, world: int) -> str:
    model = make("llama").eval()
    cut_model(model, TensorParallel(), Collectives())
    if rank == 1:
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    try:
        quantize_weights(model)
    except DeepSpeedCError as error:
        assert all(param.is_floating_point() for param in model.parameters())
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_all_ranks_refuse_a_nan_on_one_rank() -> None:
    first, second = run_ranks(2, bad_part, preload=PRELOAD)
    assert first == second and "layers.1.mlp.down_proj.weight: it has NaN or inf on tensor-parallel rank 1" in first, (
        first
    )
