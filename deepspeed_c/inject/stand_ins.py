"""A small copy of a model for the trial of a cut. It computes in one process.

See [Note: trial] in ``trial.py``.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from deepspeed_c.inject.linear import is_transposed, product_of
from deepspeed_c.inject.parts import RankParts
from deepspeed_c.inject.plan import Planned

if TYPE_CHECKING:
    from deepspeed_c.inject.trial_runs import TrialRank

__all__ = ["RAISED", "Skeleton", "SmallModel", "TrialTooLong", "shared_handles", "shared_parts", "tensors_of"]

_THIN = 7  # inner dimension of the product of two factors that stands for a weight
_TABLE_ROWS = 61
_BIG = 2**20  # a parameter with more elements, outside linear layers, consists of one repeated row
_TOKENS = (2, 7)
# Errors that a model's own code raises where shapes do not fit, or where inputs are not as the code expects.
RAISED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
_CALL_ELEMS = 10_000  # the computation of so many elements takes about as long as the overhead of one call of torch


class TrialTooLong(Exception):
    """One forward of the small copy takes more than a trial may."""


class _Effort(TorchFunctionMode):
    """Counts a forward's calls of torch, and stops the forward beyond ``most`` calls.

    A clock would differ between the ranks of a job, and all ranks must come to the same result.
    """

    def __init__(self, most: float) -> None:
        super().__init__()
        self.most, self.calls = most, 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.calls += 1.0
        if isinstance(output, torch.Tensor):
            self.calls += output.numel() / _CALL_ELEMS
        if self.calls > self.most:
            raise TrialTooLong
        return output


class Skeleton:
    """A copy of a model on the meta device. In lists of layers it has one layer of each kind."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str], *, shortens: bool) -> None:
        """names: the modules with a rule."""
        self._moved: list[tuple[str, str]] = []  # (prefix of a layer, prefix in the copy of the layer of its kind)
        memo: dict[int, Any] = {}
        for param in model.parameters():
            memo[id(param)] = torch.nn.Parameter(
                torch.empty(param.shape, dtype=torch.float32, device="meta"), requires_grad=param.is_floating_point()
            )
        for buffer in model.buffers():
            memo[id(buffer)] = buffer.detach()
        memo |= shared_handles(model)
        if shortens:
            for name, layers in _layer_lists(model, names):
                kept: dict[Any, int] = {}
                chosen: list[torch.nn.Module] = []
                for number, layer in layers.named_children():
                    kind = _kind(layer)
                    if kind not in kept:
                        kept[kind] = len(chosen)
                        chosen.append(layer)
                    self._moved.append((f"{name}.{number}.", f"{name}.{kept[kind]}."))
                memo[id(layers)] = torch.nn.ModuleList(copy.deepcopy(layer, memo) for layer in chosen)
        self.model = copy.deepcopy(model, memo).eval()

    def small_name(self, name: str) -> str:
        """The name of the copy's module or parameter of the same kind."""
        for prefix, other in self._moved:
            if name.startswith(prefix):
                return other + name[len(prefix) :]
        return name

    def real_name(self, name: str) -> str:
        """The model's first name for the copy's ``name``."""
        for prefix, other in self._moved:
            if name.startswith(other):
                return prefix + name[len(other) :]
        return name


def shared_handles(model: torch.nn.Module) -> dict[int, Any]:
    """A memo for ``copy.deepcopy`` with which copies share the handles of hooks. Copying a copied handle can fail.

    Empty ordered dictionaries are in it too, with their copies: a module has eight for hooks, and ``deepcopy`` takes
    longer to find out how they are copied than for all the rest of the module.
    """
    found: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            kind = type(value)
            if kind is OrderedDict and not value:
                found[id(value)] = OrderedDict()
            elif kind in (list, tuple):
                found.update((id(item), item) for item in value if isinstance(item, RemovableHandle))
            elif isinstance(value, RemovableHandle):
                found[id(value)] = value
    return found


def shared_parts(model: torch.nn.Module) -> dict[int, Any]:
    """A memo as in ``shared_handles`` with which copies also share buffers."""
    return {id(buffer): buffer for buffer in model.buffers()} | shared_handles(model)


def _layer_lists(model: torch.nn.Module, names: Sequence[str]) -> Iterator[tuple[str, torch.nn.ModuleList]]:
    """The outermost lists of layers that contain modules with a rule, with their names."""
    outer: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList) or any(name.startswith(f"{other}.") for other in outer):
            continue
        if len(module) > 1 and any(step.startswith(f"{name}.") for step in names):
            outer.append(name)
            yield name, module


def _kind(layer: torch.nn.Module) -> tuple:
    """A key that is equal for layers with the same computation: classes, shapes, and settings except the layer's
    number.
    """
    found = []
    for name, module in layer.named_modules():
        settings = tuple(
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, (bool, int, float, str))
            and not key.startswith("_")
            and "idx" not in key
            and "layer_id" not in key
        )
        shapes = tuple((key, tuple(param.shape)) for key, param in module.named_parameters(recurse=False))
        found.append((name, type(module), settings, shapes))
    return tuple(found)


class SmallModel:
    """A small copy of the model that runs in one process."""

    def __init__(self, skeleton: torch.nn.Module, parts: RankParts) -> None:
        self.weights = torch.Generator().manual_seed(5)
        self.model = copy.deepcopy(skeleton, shared_parts(skeleton))
        by_name = {step.name: step for step in parts.listed.planned}
        stands: dict[int, torch.nn.Module] = {}
        for name, module in list(self.model.named_modules()):
            stand = self._stand_in(module, by_name.get(name))
            if stand is not None:
                stands[id(module)] = stand
        for module in list(self.model.modules()):
            for key, child in list(module._modules.items()):
                if id(child) in stands:
                    module._modules[key] = stands[id(child)]
        self._fill()
        if getattr(self.model.config, "_attn_implementation", "eager") not in ("eager", "sdpa"):
            self.model.set_attn_implementation("eager")  # other implementations may need a device

    def _stand_in(self, module: torch.nn.Module, step: Planned | None) -> torch.nn.Module | None:
        own = dict(module.named_parameters(recurse=False))
        is_spread = any(hasattr(param, "expert_cut") for param in own.values())
        if is_spread or (step is not None and step.rule.style == "experts"):
            return _TrialExperts(module)
        if product_of(module) is not None and "weight" in own:
            return _ThinLinear(module, self.weights, is_row=step is not None and step.rule.style == "row")
        if type(module) is torch.nn.Embedding and module.num_embeddings > _TABLE_ROWS and (step is None):
            return _ShortTable(module)
        return None

    def _fill(self) -> None:
        """Give every parameter and buffer values."""
        for module in self.model.modules():
            for name, param in module.named_parameters(recurse=False):
                if not param.is_meta:
                    continue
                if param.numel() > _BIG:
                    values = self._random(torch.Size((1, *param.shape[1:]))).expand(param.shape)
                else:
                    values = self._random(param.shape)
                fresh = torch.nn.Parameter(values, requires_grad=param.requires_grad and param.numel() <= _BIG)
                module.register_parameter(name, fresh)
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = self._buffer(buffer)

    def _random(self, shape: torch.Size) -> torch.Tensor:
        values = torch.randn(shape, generator=self.weights)
        # Scales and biases of norms get values near 1, and rows of matrices a length of about 1.
        return 0.8 + 0.3 * values if len(shape) < 2 else values / max(shape[-1], 1) ** 0.5

    def _buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        if not buffer.is_meta:
            values = buffer.detach().cpu()
            return values.float() if values.is_floating_point() else values
        if buffer.is_floating_point():
            return torch.rand(buffer.shape, generator=self.weights)
        return (
            torch.ones(buffer.shape, dtype=buffer.dtype)
            if buffer.dtype == torch.bool
            else torch.zeros(buffer.shape, dtype=buffer.dtype)
        )

    def find_inputs(self, most_calls: float) -> dict[str, Any]:
        """The first of several inputs with which the model runs. If no input works, raises the error of the last.

        Raises TrialTooLong if one forward takes more than ``most_calls`` calls of torch."""
        takes = inspect.signature(self.model.forward).parameters
        config = self.model.config
        inputs: list[dict[str, Any]] = []
        ids = torch.randint(3, _vocabulary(config), _TOKENS, generator=self.weights)
        text: dict[str, Any] = {"input_ids": ids} if "input_ids" in takes else {}
        if "decoder_input_ids" in takes and getattr(config, "is_encoder_decoder", False):
            text["decoder_input_ids"] = ids.flip(1)
        vision = getattr(config, "vision_config", config)
        size, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", 3)
        image: dict[str, Any] = {}
        if "pixel_values" in takes and isinstance(size, int):
            image["pixel_values"] = torch.randn(_TOKENS[0], channels, size, size, generator=self.weights)
        n_bands, n_positions = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
        sound: dict[str, Any] = {}
        if "input_features" in takes and isinstance(n_bands, int) and isinstance(n_positions, int):
            # Whisper's encoder halves the number of frames, and wants one for each of its positions.
            sound["input_features"] = torch.randn(_TOKENS[0], n_bands, 2 * n_positions, generator=self.weights)
        inputs += [found for found in (text, {**text, **image}, image, {**text, **sound}) if found]
        if not inputs:
            raise ValueError("its forward takes none of input_ids, pixel_values and input_features")
        failure: Exception | None = None
        for found in inputs:
            found = {**found, **({"use_cache": False} if "use_cache" in takes else {})}
            try:
                with torch.no_grad(), _Effort(most_calls):
                    values = list(tensors_of(self.model(**found)))
                if not values or not all(value.isfinite().all() for value in values):
                    raise ValueError("its outputs are no finite numbers")
                return found
            except RAISED as error:
                failure = error
        raise failure or ValueError("it has no inputs")


def _vocabulary(config: Any) -> int:
    """A number of token ids that are safe to look up."""
    text = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config
    vocab_size = getattr(text, "vocab_size", None)
    return min(vocab_size, 40) if isinstance(vocab_size, int) and vocab_size > 4 else 40


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors of an output, in order."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)


class _ThinLinear(torch.nn.Module):
    """A linear layer whose weight is a product of two thin matrices: the whole weight, or one rank's part of it."""

    def __init__(self, module: torch.nn.Module, weights: torch.Generator, *, is_row: bool) -> None:
        super().__init__()
        shape = tuple(module.weight.shape)
        self.out_features, self.in_features = reversed(shape) if is_transposed(module) else shape
        self._is_transposed = is_transposed(module)
        self.first = torch.nn.Parameter(
            torch.randn(self.in_features, _THIN, generator=weights) / max(self.in_features, 1) ** 0.5
        )
        self.second = torch.nn.Parameter(torch.randn(_THIN, self.out_features, generator=weights) / _THIN**0.5)
        bias = getattr(module, "bias", None)
        self.bias = None if bias is None else torch.nn.Parameter(0.3 * torch.randn(bias.shape, generator=weights))
        self.is_row = is_row
        self._rank: TrialRank | None = None
        self._style, self._label, self._gathers = "", "", False
        self._index: torch.Tensor | None = None
        self._run: tuple[int, int] | None = None

    @property
    def weight(self) -> torch.Tensor:
        first, second = self._factors()
        whole = first @ second
        return whole if self._is_transposed else whole.t()

    def cut(self, rank: TrialRank, step: Planned, index: torch.Tensor | None, run: tuple[int, int] | None) -> None:
        self._rank, self._style, self._label, self._gathers = rank, step.rule.style, step.name, step.rule.gathers
        self._index, self._run = index, run

    def _factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._index is None:
            return self.first, self.second
        if self._style == "column":
            return self.first, self.second.index_select(1, self._index)
        return self.first.index_select(0, self._index), self.second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rank, bias = self._rank, self.bias
        first, second = self._factors()
        if rank is None:
            y = x @ first @ second
            return y if bias is None else y + bias
        if self._style == "column":
            y = rank.enter(x, self._label) @ first @ second
            if bias is not None:
                y = y + (bias if self._index is None else bias.index_select(0, self._index))
            return rank.gather(y, self._label) if self._gathers else y
        if self._gathers and self._run is not None:
            x = rank.enter(x, self._label).narrow(-1, *self._run)
        y = rank.leave(x @ first @ second, self._label)
        return y if bias is None else y + bias


class _TrialExperts(torch.nn.Module):
    """Stand-in for experts, the same on all ranks. The cut of experts follows their layout, not the model's code."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        for name, value in vars(experts).items():
            if isinstance(value, (bool, int, float, str)) and name not in vars(self):
                self.__dict__[name] = value

    def forward(self, hidden: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:
        output = 0.7 * hidden
        for value in (*others, *more.values()):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                output = output * (1 + value.mean())
        return output


class _ShortTable(torch.nn.Module):
    """An embedding table with few rows. Several tokens share a row."""

    def __init__(self, module: torch.nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.padding_idx = module.num_embeddings, module.embedding_dim, None
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False
        self.weight = torch.nn.Parameter(torch.empty(_TABLE_ROWS, module.embedding_dim, device="meta"))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(ids % _TABLE_ROWS, self.weight)
