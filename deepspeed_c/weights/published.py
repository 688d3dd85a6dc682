"""The tensors of a model under the names of its files: adapters merged or apart, and tensors that transformers joins.

A *piece* is made of some tensors of the module's state dict, and gives tensors of a file. Most pieces give one tensor
as it is. Others give the sum of a weight and its adapter, or the experts that a model of transformers holds stacked and
its files have one by one.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from deepspeed_c.errors import ConfigError, FeatureError
from deepspeed_c.zero.weights.kinds import code_layers, names_beside

__all__ = ["ADAPTERS", "Named", "PublishedPiece", "TensorFacts", "pieces_of"]

ADAPTERS = ("merged", "apart", "only")
Named = Mapping[str, torch.Tensor]


class TensorFacts(NamedTuple):
    """Facts of a tensor of the state dict that need no gather. ``shape`` is the shape of the whole tensor."""

    shape: torch.Size
    dtype: torch.dtype
    is_trained: bool


class PublishedPiece(NamedTuple):
    """Tensors of a file, and the tensors of the state dict that they are made of."""

    inputs: list[str]
    """Names in the module's state dict."""
    outputs: dict[str, tuple[torch.Size, torch.dtype]]
    """Shape and dtype by name in the file."""
    is_frozen: bool
    """Whether no input is trained."""
    is_adapter: bool
    make: Callable[[Named], Named]
    """Makes the outputs of the whole inputs. An output may be an input itself."""
    ties: Mapping[str, str] = MappingProxyType({})
    """Further names in the file for outputs: name -> name in ``outputs``."""


def pieces_of(
    module: torch.nn.Module, tensors: Mapping[str, TensorFacts], aliases: Mapping[str, str], adapters: str
) -> list[PublishedPiece]:
    """The pieces of a model, in the order of its state dict.

    tensors: the module's tensors by name, each under its first name. aliases: other names -> first names. adapters: one
    of ``ADAPTERS``: peft's active adapters added to the weights below them, beside the weights, or without them.

    Raises ConfigError for other values of ``adapters``, FeatureError for an adapter that cannot be merged.
    """
    if adapters not in ADAPTERS:
        raise ConfigError(f"is {adapters!r}", where="adapters", fix=f"pass one of {', '.join(ADAPTERS)}")
    found = [_with_ties(module, piece, aliases) for piece in _base_pieces(module, tensors, adapters)]
    return found if adapters == "only" else _converted(module, found)


def _with_ties(module: torch.nn.Module, piece: PublishedPiece, aliases: Mapping[str, str]) -> PublishedPiece:
    others = [other for other, first in aliases.items() if first in piece.inputs]
    if not others or len(piece.outputs) != 1:
        return piece
    (out,) = piece.outputs
    return piece._replace(ties={plain_name(module, other): out for other in others})


def _as_is(name: str, out: str, tensor: TensorFacts, *, is_adapter: bool = False) -> PublishedPiece:
    """The tensor ``name`` as ``out``."""
    outputs = {out: (tensor.shape, tensor.dtype)}
    return PublishedPiece([name], outputs, not tensor.is_trained, is_adapter, lambda whole: {out: whole[name]})


def _base_pieces(
    module: torch.nn.Module, tensors: Mapping[str, TensorFacts], adapters: str
) -> Iterator[PublishedPiece]:
    layers = _tuner_layers(module)
    beside = set(names_beside(module, tensors))
    codes = {layer.named("weight"): layer for layer in code_layers(module)}
    owner = {name: path for name in tensors if (path := _innermost(name, layers)) is not None}
    adapter_names = _adapter_names(module, tensors, owner) if layers and adapters != "merged" else {}
    inputs_of: dict[str, list[str]] = {}
    for name, path in owner.items():
        if name not in beside:
            inputs_of.setdefault(path, []).append(name)
    done: set[str] = set()
    for name, tensor in tensors.items():
        if name in beside or name in done:
            continue
        path = owner.get(name)
        if path is None:
            if adapters != "only":
                yield _whole(name, plain_name(module, name), tensor, codes)
        elif adapters == "merged":
            inputs = inputs_of[path]
            done.update(inputs)
            if any(other in codes for other in inputs):
                raise FeatureError(
                    "an adapter is not added to codes",
                    where=path,
                    fix='pass adapters="apart" or "only": the receiver gets the codes\' weights and the adapter',
                )
            yield from _merged(module, path, layers[path], inputs, tensors)
        elif name in adapter_names:
            yield _as_is(name, adapter_names[name], tensor, is_adapter=True)
        elif adapters == "apart" and (base := _base_name(path, name)) is not None:
            yield _whole(name, plain_name(module, base), tensor, codes)


def _whole(name: str, out: str, tensor: TensorFacts, codes: Mapping[str, Any]) -> PublishedPiece:
    """One tensor as it is; codes as the matrix that they stand for."""
    if name in codes:
        layer = codes[name]
        outputs = {out: (torch.Size(layer.shape), layer.dtype)}
        return PublishedPiece(
            [name], outputs, not tensor.is_trained, False, lambda whole: {out: layer.dense(whole[name])}
        )
    return _as_is(name, out, tensor)


def _innermost(name: str, layers: Mapping[str, Any]) -> str | None:
    """The innermost of ``layers``, by path, that a tensor lies in."""
    path = name
    while "." in path:
        path = path.rpartition(".")[0]
        if path in layers:
            return path
    return None


def _tuner_layers(module: torch.nn.Module) -> dict[str, Any]:
    """The adapted layers by their paths: layers with an adapter, and modules that are trained in place of the model's
    (``modules_to_save``). Empty while peft is not imported."""
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return {
        name: each
        for name, each in module.named_modules()
        if isinstance(each, BaseTunerLayer | AuxiliaryTrainingWrapper)
    }


def plain_name(module: torch.nn.Module, name: str) -> str:
    """The name that a tensor has without peft's wrapper around the model."""
    prefix = "base_model.model."
    return name.removeprefix(prefix) if _has_adapters(module) else name


def _has_adapters(module: torch.nn.Module) -> bool:
    """Whether the model itself knows its adapters: a model of peft, or one of transformers with ``add_adapter``."""
    return hasattr(module, "peft_config") and hasattr(module, "base_model")


def _base_name(path: str, name: str) -> str | None:
    """The name that a weight below an adapter has without the adapter; None for a tensor of the adapter."""
    rest = name.removeprefix(f"{path}.")
    for below in ("base_layer.", "original_module."):
        if rest.startswith(below):
            return f"{path}.{rest.removeprefix(below)}"
    return None


def _adapter_names(module: torch.nn.Module, tensors: Iterable[str], owner: Mapping[str, str]) -> dict[str, str]:
    """The names in peft's file of the adapter, by the names in the state dict. owner: tensors of adapted layers, and
    the path of each one's layer."""
    import peft

    active = getattr(module, "active_adapters", None)
    active = active() if callable(active) else active
    chosen = [active] if isinstance(active, str) else list(active or ["default"])
    if len(chosen) != 1:
        raise FeatureError(
            f"{len(chosen)} adapters are active, and their tensors have the same names in files of peft",
            where="adapters",
            fix='activate one of them (set_adapter) before each call, or pass adapters="merged"',
        )
    if _has_adapters(module):
        marks = {name: torch.empty(0, device="meta") for name in tensors}
        of_mark = {id(mark): name for name, mark in marks.items()}
        saved = peft.get_peft_model_state_dict(module, marks, chosen[0], save_embedding_layers=False)
        return {of_mark[id(mark)]: name for name, mark in saved.items() if id(mark) in of_mark}
    ending = f".{chosen[0]}"
    return {
        name: name.replace(f"{ending}.", ".").removesuffix(ending)
        for name, path in owner.items()
        if _base_name(path, name) is None
    }


def _merged(
    module: torch.nn.Module, path: str, layer: Any, inputs: Sequence[str], tensors: Mapping[str, TensorFacts]
) -> Iterator[PublishedPiece]:
    """The weights of an adapted layer with its active adapters."""
    if not hasattr(layer, "base_layer"):
        # Modules that are trained in place of others.
        chosen = next(
            (a for a in getattr(layer, "active_adapters", ()) if f"{path}.modules_to_save.{a}." in " ".join(inputs)),
            None,
        )
        begin = f"{path}.original_module." if chosen is None else f"{path}.modules_to_save.{chosen}."
        for name in inputs:
            if name.startswith(begin):
                yield _as_is(name, plain_name(module, f"{path}.{name.removeprefix(begin)}"), tensors[name])
        return
    names = {name: base for name in inputs if (base := _base_name(path, name)) is not None}
    outs = {name: plain_name(module, base) for name, base in names.items()}
    outputs = {out: (tensors[name].shape, tensors[name].dtype) for name, out in outs.items()}

    def make(whole: Named) -> Named:
        shell = _shell(layer, path, whole, set(names))
        if not getattr(layer, "merged", False):
            with torch.no_grad():
                shell.merge(safe_merge=False)
        found = dict(shell.get_base_layer().named_parameters()) | dict(shell.get_base_layer().named_buffers())
        return {out: found[name.removeprefix(f"{path}.base_layer.")].detach() for name, out in outs.items()}

    is_frozen = not any(tensors[name].is_trained for name in inputs)
    yield PublishedPiece(list(inputs), outputs, is_frozen, False, make)


def _shell(module: Any, path: str, whole: Named, copied: set[str]) -> Any:
    """A copy of ``module`` that has the tensors of ``whole`` for parameters. The module itself stays as it is. copied:
    names of tensors that the shell may change."""
    shell = object.__new__(type(module))
    # Lists and dicts note what is merged and active.
    shell.__dict__.update(
        {key: copy.copy(value) if type(value) in (list, dict, set) else value for key, value in vars(module).items()}
    )

    def own(tensor: torch.Tensor | None, name: str) -> torch.Tensor | None:
        found = whole.get(f"{path}.{name}")
        if found is None:
            return tensor
        return found.detach().clone() if f"{path}.{name}" in copied else found.detach()

    shell.__dict__["_parameters"] = {
        name: None if param is None else torch.nn.Parameter(own(param, name), requires_grad=False)
        for name, param in module._parameters.items()
    }
    shell.__dict__["_buffers"] = {name: own(buffer, name) for name, buffer in module._buffers.items()}
    shell.__dict__["_modules"] = {
        name: None if child is None else _shell(child, f"{path}.{name}", whole, copied)
        for name, child in module._modules.items()
    }
    return shell


def _converted(module: torch.nn.Module, pieces: Sequence[PublishedPiece]) -> list[PublishedPiece]:
    """The pieces under the names of transformers' files. Pieces whose tensors a file has together become one."""
    inner = module
    if hasattr(module, "get_base_model") and hasattr(module, "peft_config"):
        inner = module.get_base_model()
    loading = sys.modules.get("transformers.core_model_loading")
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    if loading is None or base is None or not isinstance(inner, base):
        return list(pieces)

    def revert(tensors: Named) -> Named:
        return loading.revert_weight_conversion(inner, dict(tensors))

    def metas(of: Iterable[PublishedPiece]) -> dict[str, torch.Tensor]:
        return {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for piece in of
            for name, (shape, dtype) in piece.outputs.items()
        }

    every = metas(piece for piece in pieces if not piece.is_adapter)
    if revert(every).keys() == every.keys():
        return list(pieces)
    groups: list[list[PublishedPiece]] = []
    group_of: dict[str, list[PublishedPiece]] = {}
    for piece in pieces:
        if piece.is_adapter:
            groups.append([piece])
            continue
        names = list(revert(metas([piece])))
        known = next((group_of[name] for name in names if name in group_of), None)
        if known is None:
            known = []
            groups.append(known)
        known.append(piece)
        group_of.update(dict.fromkeys(names, known))
    return [_joined(group, revert, metas) for group in groups]


def _joined(
    group: Sequence[PublishedPiece],
    revert: Callable[[Named], Named],
    metas: Callable[[Iterable[PublishedPiece]], dict[str, torch.Tensor]],
) -> PublishedPiece:
    before = metas(group)
    after = before if group[0].is_adapter else revert(before)
    if len(group) == 1 and list(before) == list(after):
        return group[0]
    ties: dict[str, str] = {}
    for other, out in ((other, out) for piece in group for other, out in piece.ties.items()):
        names, others = (revert({name: before[out]}) for name in (out, other))
        ties.update(zip(others, names, strict=True))

    def make(whole: Named) -> Named:
        return revert({name: value for piece in group for name, value in piece.make(whole).items()})

    return PublishedPiece(
        [name for piece in group for name in piece.inputs],
        {name: (value.shape, value.dtype) for name, value in after.items()},
        all(piece.is_frozen for piece in group),
        False,
        make,
        ties,
    )
