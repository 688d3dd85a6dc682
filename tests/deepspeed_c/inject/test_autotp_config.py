"""DeepSpeed's objects for rules of AutoTP: they are read from sections and written to sections, and the predefined ones
cut models by whole heads."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_c import tp_model_init
from deepspeed_c.config import load_config
from deepspeed_c.errors import ConfigError
from deepspeed_c.inject.autotp_config import (
    AutoTPConfig,
    AutoTPPresets,
    PartitionType,
    TPLayerSpec,
    merge_autotp_configs,
)
from tests.deepspeed_c.inject.families import feed, make
from tests.ranks import run_ranks

PRELOAD = "tests.deepspeed_c.inject.preload"
PRESETS = {
    "llama": "llama",
    "llama_tied_shared": "llama",
    "qwen2": "qwen2",
    "phi3": "phi3",
    "bloom": "bloom",
    "mixtral": "mixtral",
    "deepseek_v3": "deepseek_v2",
}


def follow(rank: int, world: int, family: str, preset: str) -> dict[str, Any]:
    whole, cut = make(family).train(), make(family).train()
    rules = AutoTPPresets.get_preset(preset)
    cut = tp_model_init(cut, world, None, {"partition_config": rules})
    batch = feed(family)
    expected, got = whole(**batch), cut(**batch)
    error = (got.logits - expected.logits).abs().max().item()
    expected.loss.backward()
    cut(**batch).loss.backward()
    grads = dict(whole.named_parameters())
    n_cut = 0
    for name, param in cut.named_parameters():
        grad = grads[name].grad
        if hasattr(param, "tp_cut"):
            n_cut += 1
            grad = param.tp_cut.take(grad)
        if grad.numel():
            error = max(error, (param.grad - grad).abs().max().item())
    specs = [spec for name in grads if (spec := rules.find_matching_spec(name, preset)) is not None]
    return {"error": error, "n_cut": n_cut, "n_named": len(specs)}


@pytest.mark.parametrize(("world", "family"), [(2 + i % 2, family) for i, family in enumerate(PRESETS)])
def test_models_cut_by_a_preset_are_the_whole_ones(world: int, family: str) -> None:
    for result in run_ranks(world, follow, family, PRESETS[family], preload=PRELOAD):
        assert result["error"] < 1e-5 and result["n_cut"] > 5 and result["n_named"] > 3, result


def test_sections_and_objects_are_the_same() -> None:
    section = {
        "tp_size": 2,
        "strict_mode": True,
        "layer_specs": [
            {
                "patterns": [r".*\.qkv\.weight"],
                "partition_type": "column",
                "shape": [[8, 4, 4], -1],
                "partition_dim": 0,
            },
            {"patterns": [r".*\.out\.weight"], "partition_type": "row", "model_types": ["Mine"]},
            {"patterns": [r".*norm\.weight"], "partition_type": "skip", "grad_allreduce": True},
        ],
    }
    made = AutoTPConfig.from_dict(section)
    qkv, out, norm = made.layer_specs
    assert qkv == TPLayerSpec([r".*\.qkv\.weight"], PartitionType.COLUMN, ((8, 4, 4), -1), 0)
    assert qkv.get_sub_param_sizes() == (8, 4, 4) and qkv.get_num_sub_params() == 3 and qkv.has_unequal_sub_params()
    thirds = TPLayerSpec(["a"], "COLUMN", [3, -1])
    assert thirds.get_num_sub_params() == 3 and thirds.get_sub_param_sizes() is None
    assert out.get_partition_dim() == 1 and out.get_num_sub_params() is None and norm.grad_allreduce
    assert made.find_matching_spec("layers.0.out.weight", "mine") is out
    assert made.find_matching_spec("layers.0.out.weight", "other") is None
    assert made.find_matching_spec("layers.0.out.weights", "mine") is None
    # A configuration reads the section that the object has written.
    written = {"train_batch_size": 1, "tensor_parallel": {"autotp_size": 2, "partition_config": made.as_dict()}}
    read = load_config(written, world_size=1).tensor_parallel.partition_config
    assert [spec.partition_type for spec in read.layer_specs] == ["column", "row", "skip"]
    assert read.layer_specs[0].shape[0] == (8, 4, 4) and read.strict_mode and read.tp_size == 2
    assert AutoTPConfig.from_dict(made.as_dict()) == made


def test_two_configurations_become_one() -> None:
    base = AutoTPConfig(tp_size=4, layer_specs=[TPLayerSpec(["a"])], lm_head_patterns=["head"])
    over = AutoTPConfig(layer_specs=[TPLayerSpec(["b"])], lm_head_patterns=[], use_default_specs=False)
    both = merge_autotp_configs(base, over)
    assert both.tp_size == 4 and [spec.patterns for spec in both.layer_specs] == [["b"], ["a"]]
    assert both.lm_head_patterns == ["head"] and not both.use_default_specs


def test_presets_by_name() -> None:
    assert AutoTPPresets.get_preset("nothing") is None
    for name in ("LLAMA", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"):
        assert AutoTPPresets.get_preset(name).layer_specs
    qkv = AutoTPPresets.llama_gqa(8, 2, 16).find_matching_spec("model.layers.0.self_attn.qkv_proj.weight")
    assert qkv.get_sub_param_sizes() == (128, 32, 32)


@pytest.mark.parametrize(
    ("make_it", "text"),
    [
        (lambda: TPLayerSpec(["a"], "diagonal"), "partition_type is 'diagonal'"),
        (lambda: TPLayerSpec(["a"], shape=(3, (1, 2))), "parts in dimension 1, and dimension 0 is cut"),
        (lambda: TPLayerSpec(["a"], shape=((), -1)), "entry 0 of shape is ()"),
        (lambda: TPLayerSpec(["a"], shape=(0, -1)), "entry 0 of shape is 0"),
        (lambda: TPLayerSpec(["a"], shape=(3,), partition_dim=2), "partition_dim is 2, shape has 1 entries"),
        (lambda: AutoTPConfig.from_dict({"tp": 2}), "'tp' is no key"),
        (lambda: AutoTPConfig.from_dict({"layer_specs": [{"pattern": "a"}]}), "'pattern' is no key"),
    ],
)
def test_what_makes_no_rule_is_refused(make_it, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_it()
    assert text in str(caught.value) and "Fix: " in str(caught.value)
