"""Finds the tensors of a file under a model's own names: a prefix that the file has or lacks, names of older versions
of transformers, and tensors that a model holds joined and a file apart (experts)."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed_c.checkpoint.formats.ranges import fill
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, LogicalTensor, Read, Source
from deepspeed_c.errors import CheckpointError

__all__ = ["NamedSource", "named_as_in_model"]

PARTS_SHOWN = 3
# Formats that keep the names of the saved model's state dict.
_OF_ENGINES = ("deepspeed_c", "deepspeed", "deepspeed-universal", "torch-dcp")


class _Joint:
    """Tensors of a model that transformers computes from tensors of a file."""

    def __init__(self, first: str, converter: Any, model: Any) -> None:
        self.first, self.converter, self.model = first, converter, model
        self.parts: list[tuple[str, LogicalTensor]] = []
        """(pattern of the converter that the name matches, tensor of the file)."""

    def convert(self, tensors: Sequence[torch.Tensor], where: str) -> dict[str, torch.Tensor]:
        """The model's tensors by name. ``tensors`` has the values of ``parts``, in their order.

        Raises CheckpointError where they do not fit together: one is missing, or has another shape.
        """
        converter = copy.deepcopy(self.converter)
        for (pattern, part), tensor in zip(self.parts, tensors, strict=True):
            converter.add_tensor(self.first, part.name, pattern, tensor)
        try:
            found = converter.convert(self.first, model=self.model, config=self.model.config)
        except (RuntimeError, ValueError, LookupError) as error:
            shapes = ", ".join(f"{part.name} {list(part.shape)}" for _, part in self.parts[:PARTS_SHOWN])
            raise CheckpointError(
                f"{self.first} cannot be made of {len(self.parts)} tensors ({shapes}, ...): {error}",
                where=where,
                fix="get the files anew; all tensors that transformers joins must be there, with the same shapes",
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


class NamedSource(Source):
    """A source under the names of a model.

    Memory: a joint tensor, or several that are made together, and the tensors of the file that they are made of.
    """

    def __init__(
        self,
        source: Source,
        direct: Mapping[str, str],
        joints: Sequence[_Joint],
        ignored: Sequence[re.Pattern[str]],
    ) -> None:
        """direct: name in the file -> name in the model. ignored: patterns of names that the model does not want."""
        self.where, self.format, self.topology = source.where, source.format, source.topology
        self.params, self.groups, self.state = {}, [], source.state
        self.aliases = {direct.get(a, a): direct.get(name, name) for a, name in source.aliases.items()}
        self.tensors: dict[tuple[str, str], LogicalTensor] = {}
        self._source, self._stored, self._joints = source, {}, {}
        self._last: tuple[_Joint, dict[str, torch.Tensor]] | None = None
        apart = {part.name for joint in joints for _, part in joint.parts}
        for (kind, name), tensor in source.tensors.items():
            if name in apart or (name not in direct and any(pattern.search(name) for pattern in ignored)):
                continue
            key = kind, direct.get(name, name)
            self._stored[key] = tensor
            self.tensors[key] = LogicalTensor(name=key[1], kind=kind, shape=tensor.shape, dtype=tensor.dtype)
        for joint in joints:
            empty = [torch.empty(part.shape, dtype=part.dtype, device="meta") for _, part in joint.parts]
            shapes = joint.convert(empty, self.where)
            for name, made in shapes.items():
                key = PARAM, name
                self._joints[key] = joint
                self.tensors[key] = LogicalTensor(name=name, kind=PARAM, shape=tuple(made.shape), dtype=made.dtype)

    def read(self, reads: Sequence[Read]) -> None:
        for read in reads:
            key = read.tensor.key
            if key in self._joints:
                self._read_joint(read)
            elif key in self._stored:
                self._source.read([read._replace(tensor=self._stored[key])])
            else:
                raise CheckpointError(
                    f"holds no {read.tensor.kind} named {read.tensor.name!r}",
                    where=self.where,
                    fix="read what is listed",
                )

    def _read_joint(self, read: Read) -> None:
        joint = self._joints[read.tensor.key]
        if self._last is None or self._last[0] is not joint:
            self._last = None
            parts = [torch.empty(part.shape, dtype=part.dtype) for _, part in joint.parts]
            self._source.read([Read(part, 0, into.view(-1)) for (_, part), into in zip(joint.parts, parts)])
            made = joint.convert(parts, self.where)
            self._last = joint, {name: value.contiguous().view(-1) for name, value in made.items()}
        values = self._last[1][read.tensor.name]

        def fetch(first: int, into: torch.Tensor) -> None:
            into.copy_(values[first : first + into.numel()])

        fill(read, fetch, self.where)

    def close(self) -> None:
        self._last = None
        self._source.close()


def named_as_in_model(source: Source, model: torch.nn.Module, names: Sequence[str]) -> Source:
    """``source`` under the names of ``model``, whose state dict has ``names``.

    transformers' own rules are used for a model of transformers. Names that no rule changes stay as they are.
    """
    library = sys.modules.get("transformers.modeling_utils")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return source
    wanted = dict.fromkeys(names, True)
    prefix = model.base_model_prefix
    renamings, converters = ([], []) if source.format in _OF_ENGINES else _rules_of(model)
    direct: dict[str, str] = {}
    joints: dict[str, _Joint] = {}
    stored = {name: tensor for (kind, name), tensor in source.tensors.items() if kind in (PARAM, MASTER, BUFFER)}
    stored |= {name: tensor for (kind, name), tensor in source.tensors.items() if kind == PARAM}
    # A tied weight may be known to the model by the name that the file lists as an alias.
    stored |= {alias: stored[first] for alias, first in source.aliases.items() if first in stored}
    for name in sorted(stored, key=_natural):
        known, pattern = _rename(name, renamings, converters, prefix, wanted)
        if known not in wanted:
            known, pattern = _rename(name, [], [], prefix, wanted)
        if known not in wanted:
            continue
        if pattern is None:
            direct[name] = known
            continue
        if known not in joints:
            converter = next(each for each in converters if pattern in each.source_patterns)
            joints[known] = _Joint(known, converter, model)
        joints[known].parts.append((pattern, stored[name]))
    ignored = [re.compile(text) for text in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    if any(name.endswith("rotary_emb.inv_freq") for name, _ in model.named_buffers()):
        ignored.append(re.compile(r"rotary_emb\.inv_freq"))  # older versions of transformers saved them
    return NamedSource(source, direct, list(joints.values()), ignored)


def _rules_of(model: Any) -> tuple[list[Any], list[Any]]:
    """transformers' rules for the names of a model's files: (new names, conversions of tensors)."""
    core = sys.modules.get("transformers.core_model_loading")
    mapping = sys.modules.get("transformers.conversion_mapping")
    if core is None or mapping is None:
        return [], []  # before version 5 there were no such rules
    rules = mapping.get_model_conversion_mapping(model)
    return (
        [rule for rule in rules if isinstance(rule, core.WeightRenaming)],
        [rule for rule in rules if isinstance(rule, core.WeightConverter)],
    )


def _rename(
    name: str, renamings: Sequence[Any], converters: Sequence[Any], prefix: str, wanted: Mapping[str, bool]
) -> tuple[str, str | None]:
    """(the model's name of a tensor, the converter's pattern that it matches), with the model's prefix added or taken
    off."""
    pattern = None
    for rule in renamings:
        name, _ = rule.rename_source_key(name)
    for rule in converters:
        name, pattern = rule.rename_source_key(name)
        if pattern is not None:
            break
    if prefix and name not in wanted:
        bare = name.removeprefix(f"{prefix}.")
        if bare != name and bare in wanted:
            name = bare
        elif f"{prefix}.{name}" in wanted:
            name = f"{prefix}.{name}"
    return name, pattern


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts numbers in names by value: experts are joined in this order."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]
