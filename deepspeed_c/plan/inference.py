"""The memory of generation, by rank: weights, cache and workspace, from a model's configuration alone.

Weights are counted parameter by parameter, cut by the rules of the engine. Keys and values in blocks are counted by the
tables of ``generate`` (``blocks.py``). The cache of any other model is read off the model: its forward runs on the meta
device with the tokens that are asked for, and the tensors in its cache are counted. So sliding windows, shared key
heads and latent attention are in the figure.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.errors import ConfigError, ModelError
from deepspeed_c.inference.int8 import int8_weights
from deepspeed_c.inject.cutting import preview_cut
from deepspeed_c.inject.folder import model_on_meta
from deepspeed_c.inject.linear import is_transposed, product_of
from deepspeed_c.inject.plan import Attention, RankPlace, find_attentions
from deepspeed_c.inject.report import CutReport
from deepspeed_c.inject.rules import rule_sets
from deepspeed_c.kv.group import NeedsOwnCache
from deepspeed_c.ops.kv import BLOCK_TOKENS
from deepspeed_c.plan.activations import MODELS_OWN
from deepspeed_c.plan.blocks import CallShape, GroupBlocks, groups_of, layers_in_blocks, reads_prompts_once
from deepspeed_c.quantity import as_binary
from deepspeed_c.zero.weights.fp32_buffers import names_in_fp32

__all__ = ["CACHES", "InferencePlan", "RankBytes", "layers_of_cache", "plan_inference", "positions_of"]

# Names of caches in the output of a forward of transformers.
CACHES = ("past_key_values", "cache_params")

_WHERE = "deepspeed_c plan --inference"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
_DEFAULT_TOKENS = 2048
# Torch's grouped products of experts know this dtype alone on the meta device.
_TRIAL_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank."""

    rank: int
    weights: int
    buffers: int
    cache: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.buffers + self.cache + self.workspace


@dataclass(frozen=True)
class InferencePlan:
    """The bytes of all tensor-parallel ranks."""

    model: str
    n_params: int
    dtype: str
    n_samples: int
    n_tokens: int
    n_prompt: int | None
    n_ways: int
    ranks: list[RankBytes]
    blocks: list[GroupBlocks]
    """Blocks of keys and values on each rank; empty where a model keeps its own cache."""
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        ranks = [{**asdict(rank), "total": rank.total} for rank in self.ranks]
        return {**asdict(self), "ranks": ranks, "blocks": [group._asdict() for group in self.blocks]}

    def __str__(self) -> str:
        names = ("weights", "buffers", "cache", "workspace", "total")
        cells = [["rank", *names]]
        cells += [[str(rank.rank), *(as_binary(getattr(rank, name)) for name in names)] for rank in self.ranks]
        widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        head = (
            f"{self.model}: {self.n_params} parameters in {self.dtype}, {len(self.ranks)} tensor-parallel rank(s),"
            f" {self.n_samples * self.n_ways} sequence(s) of {self.n_tokens} tokens"
        )
        if self.n_ways > 1:
            head += f", {self.n_ways} of each prompt"
        return "\n".join([head, "", *lines, "", *(f"note: {note}" for note in self.notes)]).rstrip()


def plan_inference(
    folder: Path,
    *,
    n_ranks: int = 1,
    n_samples: int = 1,
    n_tokens: int | None = None,
    dtype: str | None = None,
    n_prompt: int | None = None,
    n_ways: int = 1,
) -> InferencePlan:
    """Plan generation by the model of ``folder``.

    n_samples: prompts. n_tokens: prompt and new tokens of a sequence; None: the model's positions, at most 2048. dtype:
    fp32, bf16, fp16 or int8 (products are in bf16); None: as the configuration says, or fp32. n_prompt: tokens of a
    prompt, where windows or several ways make a difference. n_ways: samples of each prompt.

    Raises ConfigError for a folder without a model, for more tokens than the model has positions and for a prompt that
    leaves no new token, ModelError for a model that cannot be built or cut, or whose forward does not run without data.
    """
    model = model_on_meta(folder, _WHERE).eval()
    config: Any = model.config
    notes: list[str] = []
    positions = positions_of(config)
    if n_tokens is None:
        n_tokens = min(positions or _DEFAULT_TOKENS, _DEFAULT_TOKENS)
    elif positions is not None and n_tokens > positions:
        raise ConfigError(
            f"{n_tokens} tokens are more than the {positions} positions of the model",
            where="--seq",
            fix=f"ask for {positions} or fewer",
        )
    if n_prompt is not None:
        _check_prompt(config, n_prompt, n_tokens)
    if dtype is None:
        name = {value: key for key, value in _DTYPES.items()}.get(config.dtype)
        dtype = name or "fp32"
    wide = torch.bfloat16 if dtype == "int8" else _DTYPES[dtype]
    kept = names_in_fp32(model, wide)
    quantized = int8_weights(model) if dtype == "int8" else {}
    shape = CallShape(n_samples, n_ways, n_tokens, n_prompt)
    inputs, n_longest = _inputs_of(model, shape.n_rows, n_tokens, notes)
    caches, blocks = _caches_of(model, inputs, shape, notes)
    n_read = n_samples if blocks and reads_prompts_once(model, shape) else shape.n_rows
    ranks = []
    for rank in range(n_ranks):
        report = preview_cut(model, TensorParallel(), rank, n_ranks) if n_ranks > 1 else None
        shapes = _shapes(model, report)
        attentions = _attentions(model, rank, n_ranks)
        ranks.append(
            RankBytes(
                rank=rank,
                weights=sum(_weight_bytes(name, shape, wide, kept, quantized) for name, shape in shapes.items()),
                buffers=sum(_buffer_bytes(model, wide, kept)),
                cache=sum(
                    _own_elems(each.layer, each.shape, attentions) * _dtype_of(each, wide).itemsize for each in caches
                ),
                workspace=_workspace(model, shapes, n_read * (n_prompt or n_longest), shape.n_rows, wide),
            )
        )
    n_params = sum(param.numel() for param in model.parameters())
    notes.append("workspace: the widest block's inputs and outputs over the whole prompt, or the last token's logits")
    name = type(model).__name__
    return InferencePlan(name, n_params, dtype, n_samples, n_tokens, n_prompt, n_ways, ranks, blocks, notes)


def positions_of(config: Any) -> int | None:
    """The most tokens of a sequence that the decoder of a model of transformers has positions for; None: any number."""
    text = config.get_text_config(decoder=True)
    return getattr(text, "max_position_embeddings", None) or getattr(text, "max_target_positions", None)


def _check_prompt(config: Any, n_prompt: int, n_tokens: int) -> None:
    if config.is_encoder_decoder:
        raise ConfigError(
            "the encoder reads the prompt, and the decoder begins with one token",
            where="--prompt",
            fix="leave it out for a model with an encoder",
        )
    if n_prompt >= n_tokens:
        raise ConfigError(
            f"a prompt of {n_prompt} tokens leaves no new one of the {n_tokens} tokens of a sequence",
            where="--prompt",
            fix=f"give {n_tokens - 1} or fewer, or a greater --seq",
        )


def _shapes(model: torch.nn.Module, report: CutReport | None) -> dict[str, torch.Size]:
    """The shape of each parameter on the rank."""
    if report is None:
        return {name: param.shape for name, param in model.named_parameters()}
    return {row.name: row.local_shape for row in report.rows}


def _weight_bytes(name: str, shape: torch.Size, wide: torch.dtype, kept: set[str], quantized: dict[str, bool]) -> int:
    if name in quantized:
        n_rows = shape[1 if quantized[name] else 0]
        return math.prod(shape) + n_rows * torch.float32.itemsize
    return math.prod(shape) * (torch.float32 if name in kept else wide).itemsize


def _buffer_bytes(model: torch.nn.Module, wide: torch.dtype, kept: set[str]) -> Iterator[int]:
    """Persistent buffers have the weights' dtype; other buffers keep their own."""
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        is_cast = name in saved and buffer.is_floating_point() and name not in kept
        yield buffer.numel() * (wide if is_cast else buffer.dtype).itemsize


class _Cached(NamedTuple):
    """A tensor of a cache, of the whole model."""

    layer: int
    shape: torch.Size
    dtype: torch.dtype


def _dtype_of(cached: _Cached, wide: torch.dtype) -> torch.dtype:
    """Keys and values have the dtype of the weights. Recurrent states may be in fp32 always."""
    return wide if cached.dtype == _TRIAL_DTYPE else cached.dtype


def _caches_of(
    model: Any, inputs: dict[str, Any], shape: CallShape, notes: list[str]
) -> tuple[list[_Cached], list[GroupBlocks]]:
    """(tensors of the cache, groups of blocks). A tensor in blocks is as large as the blocks that hold tokens."""
    trial = model.to(_TRIAL_DTYPE)
    if not model.can_generate():
        return list(_own_cache_of(trial, inputs, notes)), []
    try:
        layers = layers_in_blocks(trial, shape)
    except NeedsOwnCache as error:
        reason = error.what
    except MODELS_OWN as error:
        reason = f"its forward in blocks does not run without data: {error}"
    else:
        groups = groups_of(layers, shape, is_shared=reads_prompts_once(model, shape))
        notes.extend(_words_of(groups, shape))
        n_blocks = {group.window: group.n_blocks for group in groups}
        tensors = [(layer, each) for layer in layers for each in layer.tensors]
        return [
            _Cached(layer.index, torch.Size((n_blocks[layer.group.window], *each.shape[1:])), each.dtype)
            for layer, each in tensors
        ], groups
    caches = list(_own_cache_of(trial, inputs, notes))
    if caches:
        notes.append(f"cache: the model's own, not in blocks: {reason}")
    return caches, []


def _words_of(groups: list[GroupBlocks], shape: CallShape) -> Iterator[str]:
    for window, n_layers, n_blocks in groups:
        seen = "full attention" if window is None else f"a window of {window} tokens"
        yield f"cache: {n_blocks} blocks of {BLOCK_TOKENS} tokens in each of {n_layers} layer(s) with {seen}"
    if shape.n_prompt is None and any((group.window or shape.n_tokens) < shape.n_tokens for group in groups):
        yield "a prompt longer than the window is written whole: --prompt N counts its blocks"


def _own_cache_of(trial: torch.nn.Module, inputs: dict[str, Any], notes: list[str]) -> Iterator[_Cached]:
    """The tensors in the model's own cache after a forward of ``inputs``."""
    inputs = dict(inputs)
    if "use_cache" in inspect.signature(trial.forward).parameters:
        inputs["use_cache"] = True
    try:
        with torch.no_grad():
            output = trial(**inputs)
    except Exception as error:  # the model's own code may raise anything
        raise ModelError(
            f"{type(trial).__name__}'s forward of token ids does not run without data: {error}",
            where=_WHERE,
            fix="plan a model that generates text from token ids",
        ) from error
    cache = next((found for name in CACHES if (found := getattr(output, name, None)) is not None), None)
    if cache is None:
        notes.append("the model keeps no cache")
        return
    for index, layer in layers_of_cache(cache):
        yield from _tensors(index, layer)


def layers_of_cache(cache: Any) -> Iterator[tuple[int, Any]]:
    """(index, layer) of the layers of a cache of transformers; those of both caches of a model with an encoder; nothing
    for None."""
    names = ("self_attention_cache", "cross_attention_cache")
    for part in [getattr(cache, name) for name in names] if hasattr(cache, names[0]) else [cache]:
        yield from enumerate(getattr(part, "layers", ()))


def _inputs_of(model: torch.nn.Module, n_samples: int, n_tokens: int, notes: list[str]) -> tuple[dict[str, Any], int]:
    """(inputs of a forward of ``n_tokens`` tokens, positions of the longest sequence in it): token ids, and the sounds
    or pictures that a model needs beside them."""
    config = model.config
    ids = torch.zeros(n_samples, n_tokens, dtype=torch.long, device="meta")
    if config.is_encoder_decoder and model.main_input_name == "input_features" and hasattr(config, "num_mel_bins"):
        # Whisper pads each sound to the length that its two convolutions shorten to the table of positions.
        encoder = model.get_encoder()
        n_frames = config.max_source_positions * encoder.conv1.stride[0] * encoder.conv2.stride[0]
        notes.append(f"the encoder hears {n_frames} frames, the decoder writes that many tokens")
        frames = torch.zeros(n_samples, config.num_mel_bins, n_frames, dtype=torch.bfloat16, device="meta")
        return {"input_features": frames, "decoder_input_ids": ids}, max(n_tokens, config.max_source_positions)
    if config.is_encoder_decoder:
        notes.append("the encoder's input and the decoder's output have that many tokens each")
        return {"input_ids": ids, "decoder_input_ids": ids}, n_tokens
    vision = getattr(config, "vision_config", None)
    if (
        vision is not None
        and not model.can_generate()
        and "pixel_values" in inspect.signature(model.forward).parameters
    ):
        # A model of two towers (CLIP) compares texts with pictures, and needs both.
        size = (n_samples, vision.num_channels, vision.image_size, vision.image_size)
        notes.append(f"with each text comes a picture of {vision.image_size} x {vision.image_size} pixels")
        pixels = torch.zeros(size, dtype=torch.bfloat16, device="meta")
        n_patches = (vision.image_size // vision.patch_size) ** 2 + 1
        return {"input_ids": ids, "pixel_values": pixels}, max(n_tokens, n_patches)
    return {"input_ids": ids}, n_tokens


def _tensors(index: int, layer: Any) -> Iterator[_Cached]:
    leaves = torch.utils._pytree.tree_leaves(list(vars(layer).values()))
    tensors = (each for each in leaves if isinstance(each, torch.Tensor) and each.dim() > 1)
    yield from (_Cached(index, each.shape, each.dtype) for each in tensors)


def _attentions(model: torch.nn.Module, rank: int, n_ranks: int) -> list[Attention]:
    if n_ranks == 1:
        return []
    found = rule_sets(model, TensorParallel(), None)
    return list(find_attentions(model, found.sets, RankPlace(rank, n_ranks)).values())


def _own_elems(layer: int, shape: torch.Size, attentions: list[Attention]) -> int:
    """Elements of a cache's tensor [batch, key heads, tokens, head size] that the rank holds."""
    for attention in attentions:
        index = getattr(attention.owner, "layer_idx", layer)
        n_heads = attention.n_key_heads * attention.heads.stripes
        if index == layer and len(shape) == 4 and shape[1] == n_heads and not attention.refusal:
            n_own = (attention.keys[1] - attention.keys[0]) * attention.heads.stripes
            return math.prod(shape) // n_heads * n_own
    return math.prod(shape)


def _workspace(
    model: torch.nn.Module, shapes: dict[str, torch.Size], n_read: int, n_rows: int, wide: torch.dtype
) -> int:
    """The largest of two moments: a block of linear layers over the ``n_read`` tokens of all prompts, or the last
    token's logits, which ``generate`` also holds in fp32.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    widths = [0]
    for name, module in model.named_modules():
        features = [
            shapes[f"{name}.{child_name}.weight" if name else f"{child_name}.weight"][
                :: -1 if is_transposed(child) else 1
            ]
            for child_name, child in module.named_children()
            if child is not head and product_of(child) is not None
        ]
        if features:
            widths.append(sum(n_out for n_out, _ in features) + max(n_in for _, n_in in features))
    prompt = n_read * max(widths) * wide.itemsize
    # Logits are gathered: each rank has all columns.
    n_words = 0 if head is None else head.weight.shape[0]
    return max(prompt, n_rows * n_words * (wide.itemsize + torch.float32.itemsize))
