"""Packed layers (deepspeed_c/compression/packed.py): their bits by hand, their outputs against fp64, and their files in
plain transformers."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_c.compression.compress import init_compression, redundancy_clean
from deepspeed_c.compression.packed import CodedLinear, PackedLinear
from deepspeed_c.errors import ConfigError, DeepSpeedCError, ModelError, StateError, UnsupportedConfigError
from tests import fresh
from tests.toys import llama


def config_of(bits: int, n_groups: int, modules: Any = ("*",), **shared: Any) -> dict[str, Any]:
    parameters = {"enabled": True, "quantize_weight_in_forward": True, "quantize_groups": n_groups, **shared}
    group = {"params": {"target_bits": bits}, "modules": list(modules)}
    technique = {"shared_parameters": parameters, "different_groups": {"all": group}}
    return {"compression_training": {"weight_quantization": technique}}


def both(model: nn.Module, config: dict[str, Any], pack: Any = True) -> tuple[nn.Module, nn.Module]:
    """The model cleaned, and the model packed."""
    init_compression(model.eval(), config)
    packed = redundancy_clean(copy.deepcopy(model), config, pack=pack)
    return redundancy_clean(model, config), packed


def codes_of(words: list[list[int]], bits: int, n_columns: int) -> torch.Tensor:
    """The codes in fp64, from the bits of each word."""
    in_word = 32 // bits
    return torch.tensor(
        [
            [(row[c // in_word] >> c % in_word * bits & 2**bits - 1) - 2 ** (bits - 1) for c in range(n_columns)]
            for row in words
        ]
    ).double()


def unpacked(layer: PackedLinear) -> torch.Tensor:
    """The weight in fp64."""
    n_rows, n_columns = layer.weight_shape.tolist()
    codes, scales = codes_of(layer.weight_packed.tolist(), layer.bits, n_columns), layer.weight_scale.double()
    group = n_columns // scales.shape[1]
    if layer.weight_zero_point is not None:
        zeros = codes_of(layer.weight_zero_point.T.tolist(), layer.bits, n_rows).T
        codes = codes - zeros.repeat_interleave(group, 1)
    return codes * scales.repeat_interleave(group, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("n_out", "n_in", "n_groups"), [(6, 24, 6), (6, 24, 18), (6, 24, 2), (5, 13, 5), (5, 13, 1), (1, 1, 1)]
)
@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_words_hold_the_cleaned_weights(
    kind: str, n_out: int, n_in: int, n_groups: int, bits: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(n_in, n_out)).to(dtype)
    cleaned, packed = both(model, config_of(bits, n_groups, quantization_type=kind))
    layer = packed[0]
    assert isinstance(layer, PackedLinear) and layer.weight_packed.shape == (n_out, math.ceil(n_in * bits / 32))
    assert not any(name == "weight" for name, _ in packed[0].named_parameters())
    found = unpacked(layer).to(dtype)
    assert torch.equal(found, cleaned[0].weight), (found - cleaned[0].weight).abs().max()
    x = torch.randn(3, n_in).to(dtype)
    weight = unpacked(layer) if kind == "symmetric" else found.double()  # asymmetric ones are rounded first
    y, x64, bias = packed(x).double(), x.double(), layer.bias.double()
    wanted, magnitude = x64 @ weight.T + bias, x64.abs() @ weight.abs().T + bias.abs()
    # A term passes fewer than 16 roundings to float32, and the sum one rounding to the dtype.
    allowed = magnitude * 2**-20 + wanted.abs() * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).smallest_normal
    assert ((y - wanted).abs() <= allowed).all(), ((y - wanted).abs().max(), y, wanted)


def decoded(layer: CodedLinear) -> torch.Tensor:
    """The weight in fp64."""
    codes, group = layer.codes.double(), layer.in_features // layer.weight_scale.shape[1]
    if layer.weight_zero_point is not None:
        codes = codes - layer.weight_zero_point.double().repeat_interleave(group, 1)
    return codes * layer.weight_scale.double().repeat_interleave(group, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n_out", "n_in", "n_groups"), [(6, 24, 6), (6, 24, 18), (6, 24, 2), (5, 13, 5), (1, 1, 1)])
@pytest.mark.parametrize(
    ("pack", "bits", "kind"),
    [
        ("int", 8, "symmetric"),
        ("int", 8, "asymmetric"),
        ("int", 4, "symmetric"),
        ("int", 4, "asymmetric"),
        ("float", 8, "symmetric"),
    ],
)
def test_codes_of_a_byte_hold_the_weights(
    pack: str, bits: int, kind: str, n_out: int, n_in: int, n_groups: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(n_in, n_out)).to(dtype)
    trained = model[0].weight.detach().double().clone()
    cleaned, packed = both(model, config_of(bits, n_groups, quantization_type=kind), f"{pack}-quantized")
    layer = packed[0]
    assert isinstance(layer, CodedLinear) and not any(name == "weight" for name, _ in layer.named_parameters())
    assert layer.codes.dtype == (torch.int8 if pack == "int" else torch.float8_e4m3fn)
    assert (layer.weight_zero_point is None) == (kind == "symmetric")
    weight = decoded(layer)
    if pack == "int":
        assert torch.equal(weight.to(dtype), cleaned[0].weight), (weight - cleaned[0].weight).abs().max()
    else:
        group = n_in // layer.weight_scale.shape[1]
        largest = trained.view(n_groups, -1).abs().amax(1).repeat_interleave(n_out * n_in // n_groups).view(n_out, n_in)
        scales = layer.weight_scale.double().repeat_interleave(group, 1)
        info = torch.finfo(dtype)
        allowed = info.eps * (largest / 448).clamp(min=info.smallest_normal)
        assert (scales - largest / 448).abs().le(allowed).all(), (scales, largest / 448)
        numbers = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).double()
        numbers = numbers[numbers.isfinite()]
        least = (numbers * scales[..., None] - trained[..., None]).abs().amin(2)
        error = (weight - trained).abs()
        assert (error <= least * (1 + 1e-5)).all(), (error, least)
    x = torch.randn(3, n_in).to(dtype)
    y, x64, rounded, bias = packed(x).double(), x.double(), weight.to(dtype).double(), layer.bias.double()
    wanted, magnitude = x64 @ rounded.T + bias, x64.abs() @ rounded.abs().T + bias.abs()
    allowed = magnitude * 2**-20 + wanted.abs() * torch.finfo(dtype).eps + torch.finfo(dtype).smallest_normal
    assert ((y - wanted).abs() <= allowed).all(), ((y - wanted).abs().max(), y, wanted)
    assert torch.equal(decoded(packed.to(torch.bfloat16).to(dtype)[0]).sign(), weight.sign())
    assert packed[0].codes.dtype in (torch.int8, torch.float8_e4m3fn), packed[0].codes.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n_out", "n_in", "n_groups"), [(6, 24, 18), (5, 13, 5), (5, 13, 1), (1, 1, 1)])
@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
@pytest.mark.parametrize(("pack", "bits"), [("pack", 8), ("pack", 4), ("int", 4)])
def test_weight_answers_as_the_cleaned_layers(
    pack: str, bits: int, kind: str, n_out: int, n_in: int, n_groups: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(n_in, n_out)).to(dtype)
    cleaned, packed = both(model, config_of(bits, n_groups, quantization_type=kind), f"{pack}-quantized")
    weight, wanted = packed[0].weight, cleaned[0].weight.detach()
    before = {name: tensor.clone() for name, tensor in packed.state_dict().items()}
    assert isinstance(weight, torch.Tensor) and not weight.requires_grad
    assert (weight.dtype, weight.shape, weight.device) == (dtype, wanted.shape, wanted.device), weight.dtype
    assert torch.equal(weight, wanted) and torch.equal(weight.T.double(), wanted.T.double()), (weight, wanted)
    assert torch.equal(weight.detach().clone(), wanted) and weight.data.dtype == dtype and weight.abs().sum().item() > 0
    assert torch.equal(torch.zeros(n_out, n_in).copy_(weight).to(dtype), wanted)
    x = torch.randn(2, n_in).to(dtype)
    assert torch.equal(nn.functional.linear(x, weight), nn.functional.linear(x, wanted))
    for write in (weight.zero_, lambda: weight.data.normal_(), lambda: torch.add(wanted, 1, out=weight)):
        with pytest.raises(StateError, match="holds codes"):
            write()
    after = packed.state_dict()
    assert all(torch.equal(after[name].float(), tensor.float()) for name, tensor in before.items()), (before, after)
    with torch.inference_mode():
        assert torch.equal(packed[0].weight.t(), wanted.t())
    half = packed.to(torch.bfloat16)[0].weight
    assert half.dtype == torch.bfloat16, half.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pack", ["pack", "int", "float"])
def test_a_model_computes_that_looks_at_weights(pack: str, dtype: torch.dtype) -> None:
    """T5's feed-forward reads wo.weight.dtype, and casts its hidden states to that."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).to(dtype)
    exact = copy.deepcopy(model)
    config = config_of(8, 32, ["DenseReluDense", "SelfAttention"])
    cleaned, packed = both(model, config, f"{pack}-quantized")
    kind = PackedLinear if pack == "pack" else CodedLinear
    assert isinstance(packed.encoder.block[1].layer[-1].DenseReluDense.wo, kind)
    ids = torch.randint(0, 50, (3, 7))
    with torch.no_grad():
        wanted, found, trained = (
            each(input_ids=ids, decoder_input_ids=ids).logits.double() for each in (cleaned, packed, exact.eval())
        )
    difference, own = (found - wanted).abs().max().item(), (trained - wanted).abs().max().item()
    allowed = 1e-5 if dtype == torch.float32 and pack != "float" else 4 * own
    assert found.isfinite().all() and 0 < own and difference <= allowed, (difference, allowed, own)


def test_bytes_of_a_packed_layer() -> None:
    weight_bytes = 512 * 256 * 4
    for bits, n_groups, most in ((8, 512, 0.27), (4, 512 * 256 // 64, 0.16)):
        _, packed = both(nn.Sequential(nn.Linear(256, 512, bias=False)), config_of(bits, n_groups))
        ratio = sum(tensor.nbytes for tensor in packed.state_dict().values()) / weight_bytes
        assert ratio <= most, (bits, ratio)


LOAD = """
import sys, torch, transformers
how = {}
if sys.argv[3] == "dequantize":
    how["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], **how).eval()
assert "deepspeed_c" not in sys.modules
with torch.no_grad():
    torch.save(model(torch.arange(20).view(2, 10)).logits, sys.argv[2])
"""


def make_llama() -> Any:
    return llama(0, vocab_size=128, hidden_size=64, intermediate_size=128)


def mixed(config: dict[str, Any], bits: int, *modules: str) -> dict[str, Any]:
    """``config`` with another group of modules, of other bits."""
    groups = config["compression_training"]["weight_quantization"]["different_groups"]
    groups["other"] = {"params": {"target_bits": bits}, "modules": list(modules)}
    return config


WHOLE = ("self_attn", "mlp")
ASYMMETRIC = {"quantization_type": "asymmetric"}
LOADED = {
    "8 bits": (config_of(8, 32, WHOLE), "pack-quantized"),
    "4 bits": (config_of(4, 128, WHOLE), "pack-quantized"),
    "8 bits, asymmetric": (config_of(8, 32, WHOLE, **ASYMMETRIC), "pack-quantized"),
    "4 bits, asymmetric": (config_of(4, 256, ("mlp",), **ASYMMETRIC), "pack-quantized"),
    "8 and 4 bits": (mixed(config_of(4, 128, ("mlp",)), 8, "self_attn"), "pack-quantized"),
    "bytes, asymmetric": (mixed(config_of(4, 128, ("mlp",), **ASYMMETRIC), 8, "self_attn"), "int-quantized"),
    "float8": (config_of(8, 128, WHOLE), "float-quantized"),
}


@pytest.mark.parametrize(("config", "pack"), LOADED.values(), ids=LOADED.keys())
def test_plain_transformers_loads_the_folder(config: dict[str, Any], pack: str, tmp_path: Path) -> None:
    """compressed-tensors 0.20.0 expects unpacked zero points where it loads compressed layers, because its ``compress`` on
    the meta device returns before it packs them. So asymmetric weights are loaded dequantized, for which transformers
    wants all layers to be of one kind."""
    pytest.importorskip("compressed_tensors")
    cleaned, packed = both(make_llama(), config, pack)
    folder = tmp_path / "out"
    packed.save_pretrained(folder)
    groups = packed.config.quantization_config["config_groups"].values()
    is_refused = pack == "pack-quantized" and not all(group["weights"]["symmetric"] for group in groups)
    how = "dequantize" if is_refused else "as it is"
    fresh.run(["-c", LOAD, folder, tmp_path / "logits.pt", how], cwd=tmp_path, check=True, has_package=False)
    found = torch.load(tmp_path / "logits.pt")
    with torch.no_grad():
        wanted = (packed if pack == "float-quantized" else cleaned)(torch.arange(20).view(2, 10)).logits
    difference = (found - wanted).abs().max()
    assert difference <= 1e-3, difference


def test_the_configuration_of_a_packed_model_and_what_stays_whole(tmp_path: Path) -> None:
    """Layers are named one by one; the head, whose weight is the embedding's, stays as it is."""
    model = make_llama()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    _, packed = both(model, config_of(4, 256, ("mlp",)))
    section = packed.config.quantization_config
    assert section["format"] == "pack-quantized" and section["quant_method"] == "compressed-tensors"
    targets = {name: group["weights"] for group in section["config_groups"].values() for name in group["targets"]}
    packed_names = {name for name, module in packed.named_modules() if isinstance(module, PackedLinear)}
    assert targets.keys() == packed_names and len(packed_names) == 6
    assert all(scheme["num_bits"] == 4 and scheme["symmetric"] for scheme in targets.values())
    assert targets["model.layers.0.mlp.up_proj"]["group_size"] == 32
    assert "lm_head" in section["ignore"] and "model.layers.1.self_attn.q_proj" in section["ignore"]
    assert packed.lm_head.weight is packed.model.embed_tokens.weight


def test_each_kind_of_layer_is_a_group_of_the_configuration() -> None:
    cleaned, packed = both(make_llama(), mixed(config_of(4, 128, ("mlp",)), 8, "self_attn"))
    groups = packed.config.quantization_config["config_groups"]
    schemes = {name: group["weights"] for group in groups.values() for name in group["targets"]}
    assert len(schemes) == 14 and sum(len(group["targets"]) for group in groups.values()) == 14, groups
    for name, scheme in schemes.items():
        layer, bits = packed.get_submodule(name), 8 if "self_attn" in name else 4
        assert scheme["num_bits"] == layer.bits == bits, (name, scheme)
        assert torch.equal(unpacked(layer).float(), cleaned.get_submodule(name).weight), name


def refused(
    model: nn.Module, config: dict[str, Any], kind: type[DeepSpeedCError], *texts: str, pack: Any = True
) -> None:
    model = init_compression(model, config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(kind) as caught:
        redundancy_clean(model, config, pack=pack)
    assert all(text in str(caught.value) for text in texts), caught.value
    after = model.state_dict()
    same = {name: torch.equal(after[name].nan_to_num(), value.nan_to_num()) for name, value in before.items()}
    assert after.keys() == before.keys() and all(same.values()), same


def test_what_is_refused_changes_nothing() -> None:
    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))

    refused(layers(), config_of(8, 4, schedule_offset=3), StateError, "0: ", "step 3", "schedule_offset")
    dynamic = {
        "shared_parameters": {"enabled": True},
        "different_groups": {"all": {"params": {"bits": 8}, "modules": ["*"]}},
    }
    config = config_of(8, 4)
    config["compression_training"]["activation_quantization"] = dynamic
    refused(layers(), config, UnsupportedConfigError, "quantized activations")
    refused(layers(), config_of(8, 4), ConfigError, "'int3'", "float-quantized", pack="int3")
    refused(layers(), config_of(4, 4), UnsupportedConfigError, "8 bits", "target_bits", pack="float-quantized")
    refused(nn.Sequential(nn.Linear(6, 4)), config_of(8, 3), ConfigError, "quantize_groups", "write 4")
    model = init_compression(layers(), config_of(8, 4))
    model[1].weight.data[2, 1] = torch.nan
    with pytest.raises(ModelError, match=r"1\.weight"):
        redundancy_clean(model, config_of(8, 4), pack=True)
