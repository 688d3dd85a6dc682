"""Weights of torchao that are wrapper tensors: objects of several inner tensors, such as codes and scales.

Units, gathers, checkpoints and casts work on plain memory. An edit therefore replaces each wrapper by frozen parameters
of bytes, one for each inner tensor. The module's attribute makes the wrapper again whenever it is read. A cut of bytes
may lie anywhere, because bytes are whole again before a wrapper is made. No cast touches bytes, and the name of such a
parameter contains the wrapper's class, so a checkpoint of one class cannot be loaded into another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from deepspeed_c.errors import CheckpointError, FeatureError, MissingPackageError, ModelError
from deepspeed_c.inject.swap import swap_class
from deepspeed_c.zero.weights.param import state_of

__all__ = ["KINDS", "WrapperKind", "byte_sizes", "check_wrappers", "refuse_bytes_in_file", "unwrap_weights"]

OLDEST = (0, 18)  # of torchao: the version that the tests run


@dataclass(frozen=True)
class WrapperKind:
    """A row of the table. The class of torchao is ``name``."""

    name: str
    can_cast: bool
    """Whether the wrapper computes in another dtype after ``to(dtype)``."""


KINDS: tuple[WrapperKind, ...] = (
    WrapperKind("Int8Tensor", can_cast=True),
    WrapperKind("IntxUnpackedToInt8Tensor", can_cast=True),
    WrapperKind("Float8Tensor", can_cast=False),
    WrapperKind("Int4Tensor", can_cast=False),
    WrapperKind("NF4Tensor", can_cast=False),
)
"""The inner tensors of all kinds are plain, and ``__tensor_flatten__`` names them. FSDP's methods of a class
(``fsdp_pre_all_gather``) are not called: bytes of inner tensors travel without them."""

_CONVERTERS = ("torchao", "bitsandbytes", "deepspeed_c")


def _package_of(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def _is_wrapper(value: object) -> bool:
    return hasattr(type(value), "__tensor_flatten__")


def _wrappers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    """(full name, module, name in the module, wrapper), also of a wrapper that several modules share."""
    for path, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is not None and _is_wrapper(param):
                yield f"{path}.{name}".lstrip("."), module, name, param


def _kind_of(wrapper: torch.Tensor) -> WrapperKind | None:
    if _package_of(wrapper) != "torchao":
        return None
    return next((kind for kind in KINDS if kind.name == type(wrapper).__name__), None)


def check_wrappers(
    model: torch.nn.Module, dtype: torch.dtype | None, *, scales_loss: bool = False, why_plain: str = ""
) -> None:
    """Refuses what cannot be run, before anything has moved.

    dtype: the dtype that weights are cast to; None if they stay as they are. scales_loss: whether gradients are scaled.
    why_plain: the setting that cuts or copies layers, which needs plain weights.
    """
    for path, module in model.named_modules():
        if _package_of(module) == "torchao":
            _check_version(path)
            if scales_loss and type(module).__name__ == "Float8Linear":
                raise ModelError(
                    "Float8Linear has a scale of its own for each gradient, and fp16 has a loss scale beside it",
                    where=path,
                    fix='train in bf16 ("bf16": {"enabled": true}) or fp32, or leave this layer unconverted',
                )
        _check_converters(path, module)
    for name, _, _, wrapper in _wrappers(model):
        class_name = type(wrapper).__name__
        kind = _kind_of(wrapper)
        if kind is None:
            raise ModelError(
                f"the weight is a wrapper tensor of the class {type(wrapper).__module__}.{class_name}, which is unknown here",
                where=name,
                fix=f"leave this layer unconverted, or use one of torchao's {', '.join(kind.name for kind in KINDS)}",
            )
        _check_version(name)
        if wrapper.requires_grad:
            raise ModelError(
                f"the weight is a {class_name}, and codes have no gradient",
                where=name,
                fix="call requires_grad_(False) on it and train adapters beside it, or train with torchao's QATConfig",
            )
        if dtype not in (None, wrapper.dtype) and not (kind.can_cast and dtype.is_floating_point):
            raise ModelError(
                f"the weight is a {class_name} of {wrapper.dtype}, which cannot be cast to {dtype}",
                where=name,
                fix=f"call model.to({dtype}) before quantize_"
                if dtype.is_floating_point
                else "ask for no other format",
            )
        if why_plain:
            raise FeatureError(
                f"the weight is a {class_name}, and {why_plain} needs plain weights",
                where=name,
                fix=f"leave this layer unconverted, or train without {why_plain}",
            )


def _check_version(where: str) -> None:
    version = getattr(sys.modules.get("torchao"), "__version__", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if len(numbers) == 2 and numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise MissingPackageError(
            f"the layer is of torchao {version}; the oldest tested version is {oldest}",
            where=where,
            fix=f"pip install 'torchao>={oldest}', and convert the model again",
            package="torchao",
        )


def _check_converters(path: str, module: torch.nn.Module) -> None:
    """Raises ModelError if a layer was converted twice. Only torchao wraps the weight of a plain layer."""
    of_layer = _package_of(module)
    if of_layer not in _CONVERTERS:
        return
    for name, param in module._parameters.items():
        of_weight = _package_of(param)
        if of_weight == "torchao" or (of_weight, of_layer) == ("bitsandbytes", "torchao"):
            raise ModelError(
                f"the layer was converted twice: to {of_layer}'s {type(module).__name__}, and its weight to"
                f" {of_weight}'s {type(param).__name__}",
                where=f"{path}.{name}".lstrip("."),
                fix="convert each layer once: exclude it by the filter function of one of the conversions",
            )


@dataclass(frozen=True)
class _Inner:
    """An inner tensor: its parameter of bytes, and its form."""

    name: str
    param: torch.nn.Parameter
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def value(self) -> torch.Tensor:
        data = self.param.data
        if state_of(self.param) is not None or data.storage_offset() % self.dtype.itemsize:
            # Gathered memory is given up after the layer's forward, and autograd may keep inner tensors until backward.
            data = data.clone()
        return data.view(self.dtype).as_strided(self.shape, self.stride)


class _Flat:
    """A wrapper as its inner tensors."""

    def __init__(self, wrapper: torch.Tensor) -> None:
        self.kind, self._shape, self._stride = type(wrapper), wrapper.shape, wrapper.stride()
        names, self._context = wrapper.__tensor_flatten__()
        self.inner: list[_Inner] = []
        for name in names:
            # A clone is dense, so its bytes in the order of its storage are all that it has.
            tensor = getattr(wrapper, name).detach().clone()
            data = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
            param = torch.nn.Parameter(data, requires_grad=False)
            self.inner.append(_Inner(name, param, tensor.dtype, tensor.shape, tensor.stride()))

    @property
    def is_sharded(self) -> bool:
        return any(state_of(inner.param) is not None for inner in self.inner)

    def wrapper(self) -> torch.nn.Parameter:
        values = {inner.name: inner.value() for inner in self.inner}
        made = self.kind.__tensor_unflatten__(values, self._context, self._shape, self._stride)
        return torch.nn.Parameter(made, requires_grad=False)


def _name_of_bytes(name: str, kind: type, inner: str) -> str:
    return f"{name}_{kind.__name__}_{inner}"


def byte_sizes(name: str, param: torch.Tensor) -> dict[str, int]:
    """The bytes of each parameter in the place of the wrapper ``param``, by its name. Empty for other parameters."""
    if not _is_wrapper(param):
        return {}
    names, _ = param.__tensor_flatten__()
    return {_name_of_bytes(name, type(param), inner): getattr(param, inner).nbytes for inner in names}


_FLAT = "_dsc_wrapper_weights"


def _read(name: str, module: torch.nn.Module) -> torch.nn.Parameter:
    return module.__dict__[_FLAT][name].wrapper()


def unwrap_weights(model: torch.nn.Module, dtype: torch.dtype | None) -> Callable[[], None] | None:
    """Replaces each wrapper by parameters of bytes. ``dtype``: as of ``check_wrappers``.

    Returns the function that puts wrappers back, or None for a model without wrappers. If bytes are sharded at that
    time, all stay as they are, because a rank may not have memory for the whole.
    """
    flat_of: dict[int, _Flat] = {}
    places: list[tuple[torch.nn.Module, str, _Flat]] = []
    found = list(_wrappers(model))  # keeps the wrappers alive, so that each id means one of them
    for _, module, name, wrapper in found:
        if id(wrapper) not in flat_of:
            data = wrapper.data
            flat_of[id(wrapper)] = _Flat(data if dtype in (None, data.dtype) else data.to(dtype))
        places.append((module, name, flat_of[id(wrapper)]))
        _unwrap(*places[-1])
    return partial(_put_back, places) if places else None


def _unwrap(module: torch.nn.Module, name: str, flat: _Flat) -> None:
    del module._parameters[name]
    for inner in flat.inner:
        module.register_parameter(_name_of_bytes(name, flat.kind, inner.name), inner.param)
    module.__dict__.setdefault(_FLAT, {})[name] = flat
    # A property belongs to a class, so the module gets a class of its own, as torch's parametrizations do it.
    kind = type(module)
    namespace: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    swap_class(module, type(kind.__name__, (kind,), {**namespace, name: property(partial(_read, name))}))


def _put_back(places: list[tuple[torch.nn.Module, str, _Flat]]) -> None:
    if any(flat.is_sharded for _, _, flat in places):
        return
    wrapper_of = {id(flat): flat.wrapper() for _, _, flat in places}
    for module, name, flat in places:
        for inner in flat.inner:
            del module._parameters[_name_of_bytes(name, flat.kind, inner.name)]
        del module.__dict__[_FLAT][name]
        swap_class(module, type(module).__base__)
        module.register_parameter(name, wrapper_of[id(flat)])


def refuse_bytes_in_file(model: torch.nn.Module, where: str) -> None:
    """Raises CheckpointError for a model with parameters of bytes: no other library reads them in a file of weights."""
    for path, module in model.named_modules():
        for name, flat in module.__dict__.get(_FLAT, {}).items():
            raise CheckpointError(
                f"{path}.{name} is torchao's {flat.kind.__name__}, which a file of plain weights cannot hold",
                where=where,
                fix="pass exclude_frozen_parameters=True and save adapters alone, or call save_checkpoint",
            )
