"""Makes a model's layers compressed layers, and makes the quantized values permanent."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from deepspeed_c.compression.basic_layer import (
    CompressedLayer,
    LinearLayer_Compress,
    Quantization,
    check_finite,
    compressed_layers,
    quantize_weight,
)
from deepspeed_c.compression.packed import PackFormat, check_format, check_packable, pack_layers
from deepspeed_c.compression.pruning import Kind, Pruner, PruneRule
from deepspeed_c.compression.shrink import check_shrinkable, shrink, shrinkings, warn_of_siblings
from deepspeed_c.compression.steps import AppliedSteps
from deepspeed_c.compression.student import initialize_student
from deepspeed_c.compression.targets import activation_rules, find, layer_class, prune_rules, weight_rules
from deepspeed_c.config import load_config
from deepspeed_c.config.compression import Compression
from deepspeed_c.config.source import read_source
from deepspeed_c.errors import ConfigError, ModelError, StateError, UnsupportedConfigError
from deepspeed_c.pipe.module import PipelineModule
from deepspeed_c.zero.weights.gather_unit import PlacedShard, WholeShard
from deepspeed_c.zero.weights.gathered import GatheredParameters
from deepspeed_c.zero.weights.param import state_of

__all__ = [
    "check_deepspeed_config",
    "get_compress_methods",
    "get_module_name",
    "init_compression",
    "redundancy_clean",
    "student_initialization",
]


_FIX = "load a checkpoint from before they came up"


def check_deepspeed_config(config: Any) -> dict[str, Any]:
    """The configuration as a dict: ``config`` itself, or the JSON in the file of this path.

    Raises ConfigError, which is a ValueError, if it is neither, or if a key occurs twice.
    """
    if isinstance(config, dict):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(
            f"a {type(config).__name__} is not a configuration",
            where="deepspeed_config",
            fix="pass a dict, or the path of a JSON file",
        )
    return read_source(config).keys


def get_module_name(
    group_name: str,
    model: nn.Module,
    key_word: str,
    exist_module_name: set[str],
    mpu: Any = None,
    verbose: bool = True,
) -> tuple[list[str], set[str]]:
    """(names of the compressible modules in whose names the regular expression ``key_word`` is found,
    ``exist_module_name`` with them). Names that are in the set already are left out.

    verbose: raise ConfigError, which is a ValueError, for a module that is in the set already.
    """
    found = []
    for name in find(model, key_word, group_name, mpu):
        if name not in exist_module_name:
            exist_module_name.add(name)
            found.append(name)
        elif verbose:
            raise ConfigError(
                f"{name} is already added to compression", where=group_name, fix="let one pattern match each module"
            )
    return found, exist_module_name


def get_compress_methods(model: nn.Module, compress_methods: Mapping[str, Any], mpu: Any = None) -> list[list[Any]]:
    """[names for each pattern, names of related modules, {technique: its numbers}] of each group of each technique.

    compress_methods: the section compression_training with the defaults.
    """
    methods: list[list[Any]] = []
    for method, content in compress_methods.items():
        if method == "layer_reduction":
            continue
        taken: set[str] = set()
        for group_name, group in content["different_groups"].items():
            names = [get_module_name(group_name, model, word, taken, mpu)[0] for word in group["modules"]]
            related = [
                [get_module_name(group_name, model, word, set(), mpu)[0] for word in words]
                for words in group.get("related_modules") or ()
            ]
            if names:
                methods.append([names, related, {method: {**group["params"], **content["shared_parameters"]}}])
    return methods


def _module_of(model: nn.Module) -> nn.Module:
    """The user's model in a wrapper (an engine, ``DistributedDataParallel``)."""
    inner = model.__dict__.get("_modules", {}).get("module")
    return model if inner is None else inner


def _section_of(deepspeed_config: Any) -> Compression:
    """Raises ConfigError for a configuration that is wrong or asks for a technique that is not built."""
    return load_config(check_deepspeed_config(deepspeed_config), world_size=1, batch="skip").compression_training


def init_compression(
    model: nn.Module, deepspeed_config: Any, teacher_model: nn.Module | None = None, mpu: Any = None
) -> nn.Module:
    """Make the modules that the section compression_training names compressed layers, in place. Returns ``model``.

    Call it before ``initialize``, and after ``tp_model_init``. Parameters stay the same objects. A technique starts
    after ``schedule_offset`` applied steps. Layers that share a weight quantize it in the same way. Pruning with method
    topk adds parameters, the scores.

    Args:
        deepspeed_config: a dict, or the path of a JSON file.
        teacher_model: for layer reduction, which makes ``student_initialization`` the first step.
        mpu: Megatron's; its linear layers are refused if a pattern matches them.

    Raises ConfigError for a wrong key or pattern, groups that do not divide a weight, or a technique that is not built;
    ModelError for a module of another class, or a weight with NaN or inf; StateError for a model that is compressed
    already or belongs to an engine. Pruning also refuses numbers of heads that do not divide a weight, related modules
    of another number or size, and layers that share a weight or are cut. The model is then unchanged.
    """
    section, root = _section_of(deepspeed_config), _module_of(model)
    _check_new(root, "init_compression")
    weights, activations = weight_rules(root, section, mpu), activation_rules(root, section, mpu)
    pruned = prune_rules(root, section, mpu)
    warn_of_siblings(root, shrinkings(root, section, mpu))  # before training, and not after it
    names = [name for name, _ in root.named_modules() if name in weights or name in activations or name in pruned]
    modules = {name: root.get_submodule(name) for name in names}
    classes = {name: layer_class(module, name) for name, module in modules.items()}
    for name in {**weights, **pruned}:
        weight = modules[name].weight
        if not weight.is_meta and state_of(weight) is None:  # a sharded weight is not gathered for this
            check_finite(weight, name, "load weights without NaN or inf")
    if section.layer_reduction.enabled:
        _initialize(root, teacher_model, section)
    steps = AppliedSteps()
    for name, module in modules.items():
        rules = Quantization(
            name=name,
            plain_class=type(module),
            steps=steps,
            weight=weights.get(name),
            activations=activations.get(name),
            pruners=tuple(Pruner(rule) for rule in pruned.get(name, ())),
        )
        classes[name].take_over(module, rules)
    return model


def student_initialization(student_model: nn.Module, teacher_model: nn.Module, deepspeed_config: Any) -> nn.Module:
    """Copy parameters and buffers of the teacher into the student, as the section layer_reduction says: layer
    ``teacher_layer[i]`` of ``module_name_prefix`` into layer i, and the modules of ``other_module_name``. Returns
    ``student_model``. Collective if parameters are sharded.

    Raises ConfigError for a key that is missing or names no module, ModelError for modules of other sizes, StateError
    for a student that is compressed or belongs to an engine. The student is then unchanged.
    """
    root = _module_of(student_model)
    _check_new(root, "student_initialization")
    _initialize(root, teacher_model, _section_of(deepspeed_config))
    return student_model


def _initialize(root: nn.Module, teacher_model: nn.Module | None, section: Compression) -> None:
    if not isinstance(teacher_model, nn.Module):
        raise ConfigError(
            f"the teacher is {type(teacher_model).__name__}, no torch.nn.Module",
            where="compression_training.layer_reduction",
            fix="pass teacher_model, or set enabled to false",
        )
    initialize_student(root, _module_of(teacher_model), section.layer_reduction)


def _check_new(root: nn.Module, where: str) -> None:
    if isinstance(root, PipelineModule):
        raise ModelError(
            "the layers of a PipelineModule cannot be compressed in this version",
            where=where,
            fix="train the layers as a plain module, with ZeRO",
        )
    if compressed_layers(root):
        raise StateError(
            "the model is compressed already",
            where=where,
            fix="call init_compression once, before initialize, and nothing else after it",
        )
    for name, param in root.named_parameters():
        if isinstance(state_of(param), (PlacedShard, WholeShard)):
            raise StateError(
                f"the parameter {name} belongs to an engine",
                where=where,
                fix=f"call {where} before deepspeed_c.initialize",
            )


def redundancy_clean(
    model: nn.Module, deepspeed_config: Any, mpu: Any = None, *, pack: bool | PackFormat = False
) -> nn.Module:
    """Write zeros where weights are pruned, and the quantized values, into the weights that the configuration names,
    and give the modules their own classes back. Layers with ``related_modules`` get smaller. Returns ``model``.

    Collective if parameters are sharded. Layers whose input is quantized keep doing that. Values are rounded to the
    nearest, as evaluation does. An optimizer does not know the parameters of smaller layers, so train before.

    pack: a format of compressed-tensors; True: "pack-quantized". The linear layers become ``PackedLinear`` (codes in
    words) or ``CodedLinear`` (a byte for each code: "int-quantized", and "float-quantized", which rounds the trained
    floats to e4m3), and ``quantization_config`` is written into the model's ``config``, so that ``save_pretrained``
    writes a compressed-tensors folder. Embeddings, and layers that share a weight, are cleaned only.

    Raises ConfigError as ``init_compression`` does; StateError if a module is not compressed, before the
    ``schedule_offset`` of pruning, or for a sharded weight that has to get smaller; ModelError for a weight with NaN or
    inf. With pack: StateError before ``schedule_offset`` or for a sharded weight; ConfigError for groups that are not
    parts of rows; UnsupportedConfigError for what is not packed (quantized activations, layers cut over ranks,
    layers that get smaller, asymmetric groups on DeepSpeed's levels whose range does not include 0).
    """
    format_name = check_format(pack)
    section, root = _section_of(deepspeed_config), _module_of(model)
    layers = compressed_layers(root)
    wanted, pruned = weight_rules(root, section, mpu), prune_rules(root, section, mpu)
    plans = shrinkings(root, section, mpu)
    _check_compressed(layers, wanted, pruned)
    check_shrinkable(root, plans)
    packed = _packable(root, wanted, layers) if format_name else {}
    if packed and plans:
        raise UnsupportedConfigError(
            "layers that get smaller are not packed: the groups of their weights change",
            where=plans[0].where,
            fix="pass pack=False, or leave related_modules out",
        )
    check_packable(packed, format_name)
    kept = {name: layers[name].kept() for name in packed if name in pruned}
    masks = {
        name: _write_pruned(layers[name], rounds=name in wanted, writes_weight=name not in packed) for name in pruned
    }
    chosen = [layers[name] for name in wanted if name not in packed]
    _write({id(layers[name].weight): layers[name] for name in wanted if name not in {*packed, *pruned}}.values())
    for name in pruned:
        layers[name].keep_pruned()
    for layer in chosen:
        layer.keep_weight()
    pack_layers(root, packed, format_name, kept)
    shrink(root, plans, masks)
    return model


def _check_compressed(
    layers: Mapping[str, CompressedLayer], wanted: Iterable[str], pruned: Mapping[str, list[PruneRule]]
) -> None:
    """Raises StateError for a layer that does not have these rules, or whose pruning has not started."""
    fix = "call init_compression with the same configuration first"
    for name in wanted:
        if name not in layers or layers[name].quantization.weight is None:
            raise StateError("its weight is not compressed", where=name, fix=fix)
    for name, rules in pruned.items():
        pruners = layers[name].quantization.pruners if name in layers else ()
        if [pruner.rule for pruner in pruners] != rules:
            raise StateError("it is not pruned as the configuration says", where=name, fix=fix)
        step = layers[name].quantization.steps.count
        late = [rule for rule in rules if rule.first_step > step]
        if late:
            raise StateError(
                f"its {late[0].kind} pruning begins at step {late[0].first_step}, and this is step {step}",
                where=name,
                fix='train past schedule_offset before cleaning, or write "schedule_offset": 0 for weights that were trained',
            )


def _packable(
    root: nn.Module, wanted: Iterable[str], layers: Mapping[str, CompressedLayer]
) -> dict[str, CompressedLayer]:
    """The layers that are no embedding and do not share their weight."""
    holders = Counter(id(param) for _, param in root.named_parameters(remove_duplicate=False))
    return {
        name: layers[name]
        for name in wanted
        if not isinstance(layers[name], nn.Embedding) and holders[id(layers[name].weight)] == 1
    }


def _write_pruned(layer: LinearLayer_Compress, *, rounds: bool, writes_weight: bool) -> dict[Kind, torch.Tensor]:
    """Writes zeros, and returns the masks."""
    with GatheredParameters(layer.parameters(recurse=False), modifier_rank=_writer(layer)):
        layer.check_weight(_FIX)
        return layer.write_pruned(rounds=rounds, writes_weight=writes_weight)


def _writer(layer: CompressedLayer) -> int | None:
    """The rank whose edits of a sharded weight count."""
    state = state_of(layer.weight)
    return None if state is None else state.everyone.global_ranks[0]


@torch.no_grad()
def _write(layers: Iterable[CompressedLayer]) -> None:
    """Quantizes the weights, one after the other."""
    for layer in layers:
        weight, rules = layer.weight, layer.quantization
        with GatheredParameters([weight], modifier_rank=_writer(layer)):
            check_finite(weight, rules.name, _FIX)
            weight.copy_(quantize_weight(weight, rules.weight))
