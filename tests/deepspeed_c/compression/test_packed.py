"""Packed layers (deepspeed_c/compression/packed.py): their bits by hand, their outputs against fp64, and their files in
plain transformers."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_c.compression.compress import init_compression, redundancy_clean
from deepspeed_c.compression.packed import PackedLinear
from deepspeed_c.errors import ConfigError, DeepSpeedCError, ModelError, StateError, UnsupportedConfigError


def config_of(bits: int, n_groups: int, modules: Any = ("*",), **shared: Any) -> dict[str, Any]:
    parameters = {"enabled": True, "quantize_weight_in_forward": True, "quantize_groups": n_groups, **shared}
    group = {"params": {"target_bits": bits}, "modules": list(modules)}
    technique = {"shared_parameters": parameters, "different_groups": {"all": group}}
    return {"compression_training": {"weight_quantization": technique}}


def both(model: nn.Module, config: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """The model cleaned, and the model packed."""
    init_compression(model.eval(), config)
    packed = redundancy_clean(copy.deepcopy(model), config, pack=True)
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
@pytest.mark.parametrize(("n_out", "n_in", "n_groups"), [(6, 24, 6), (6, 24, 18), (6, 24, 2), (5, 13, 5), (5, 13, 1), (1, 1, 1)])
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


def llama() -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    )


def mixed(config: dict[str, Any], bits: int, *modules: str) -> dict[str, Any]:
    """``config`` with another group of modules, of other bits."""
    groups = config["compression_training"]["weight_quantization"]["different_groups"]
    groups["other"] = {"params": {"target_bits": bits}, "modules": list(modules)}
    return config


LOADED = {
    "8 bits": config_of(8, 32, ("self_attn", "mlp")),
    "4 bits": config_of(4, 128, ("self_attn", "mlp")),
    "8 bits, asymmetric": config_of(8, 32, ("self_attn", "mlp"), quantization_type="asymmetric"),
    "4 bits, asymmetric": config_of(4, 256, ("mlp",), quantization_type="asymmetric"),
    "8 and 4 bits": mixed(config_of(4, 128, ("mlp",)), 8, "self_attn"),
}


@pytest.mark.parametrize("config", LOADED.values(), ids=LOADED.keys())
def test_plain_transformers_loads_the_folder(config: dict[str, Any], tmp_path: Path) -> None:
    """compressed-tensors 0.20.0 expects unpacked zero points where it loads compressed layers, because its ``compress`` on
    the meta device returns before it packs them. So asymmetric weights are loaded dequantized, for which transformers
    wants all layers to be of one kind."""
    pytest.importorskip("compressed_tensors")
    cleaned, packed = both(llama(), config)
    folder = tmp_path / "out"
    packed.save_pretrained(folder)
    is_symmetric = all(group["weights"]["symmetric"] for group in packed.config.quantization_config["config_groups"].values())
    how = "as it is" if is_symmetric else "dequantize"
    command = [sys.executable, "-c", LOAD, str(folder), str(tmp_path / "logits.pt"), how]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=200)
    found = torch.load(tmp_path / "logits.pt")
    with torch.no_grad():
        wanted = cleaned(torch.arange(20).view(2, 10)).logits
    difference = (found - wanted).abs().max()
    assert difference <= 1e-3, difference


def test_the_configuration_of_a_packed_model_and_what_stays_whole(tmp_path: Path) -> None:
    """Layers are named one by one; the head, whose weight is the embedding's, stays as it is."""
    model = llama()
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
    cleaned, packed = both(llama(), mixed(config_of(4, 128, ("mlp",)), 8, "self_attn"))
    groups = packed.config.quantization_config["config_groups"]
    schemes = {name: group["weights"] for group in groups.values() for name in group["targets"]}
    assert len(schemes) == 14 and sum(len(group["targets"]) for group in groups.values()) == 14, groups
    for name, scheme in schemes.items():
        layer, bits = packed.get_submodule(name), 8 if "self_attn" in name else 4
        assert scheme["num_bits"] == layer.bits == bits, (name, scheme)
        assert torch.equal(unpacked(layer).float(), cleaned.get_submodule(name).weight), name


def refused(model: nn.Module, config: dict[str, Any], kind: type[DeepSpeedCError], *texts: str) -> None:
    model = init_compression(model, config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(kind) as caught:
        redundancy_clean(model, config, pack=True)
    assert all(text in str(caught.value) for text in texts), caught.value
    after = model.state_dict()
    same = {name: torch.equal(after[name].nan_to_num(), value.nan_to_num()) for name, value in before.items()}
    assert after.keys() == before.keys() and all(same.values()), same


def test_what_is_refused_changes_nothing() -> None:
    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))

    refused(layers(), config_of(8, 4, schedule_offset=3), StateError, "0: ", "step 3", "schedule_offset")
    dynamic = {"shared_parameters": {"enabled": True}, "different_groups": {"all": {"params": {"bits": 8}, "modules": ["*"]}}}
    config = config_of(8, 4)
    config["compression_training"]["activation_quantization"] = dynamic
    refused(layers(), config, UnsupportedConfigError, "quantized activations")
    refused(nn.Sequential(nn.Linear(6, 4)), config_of(8, 3), ConfigError, "quantize_groups", "write 4")
    model = init_compression(layers(), config_of(8, 4))
    model[1].weight.data[2, 1] = torch.nan
    with pytest.raises(ModelError, match=r"1\.weight"):
        redundancy_clean(model, config_of(8, 4), pack=True)
