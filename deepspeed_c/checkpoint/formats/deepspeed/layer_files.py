"""DeepSpeed's files of a pipeline's layers.

[Note: files of layers] DeepSpeed saves a ``PipelineModule`` as a file for each layer, ``layer_NN-model_states.pt``, or
``layer_NN-model_MM-model_states.pt`` for tensor-parallel rank MM. The file holds the layer's own state dict ("weight",
not "3.weight"), and ``module`` of the model file is None (``PipelineModule.save_state_dict``). A layer that is a plain
function has no file, and neither has a tied layer with a ``forward_fn``, which is a function to DeepSpeed. All other
layers of a key have equal files. If each layer of a key has a ``forward_fn``, DeepSpeed saves the key's weights
nowhere; here they are in the file of the first, which DeepSpeed does not look for.

DeepSpeed runs pipelines at stages 0 and 1 only. The files of stages 2 and 3 are those of a model without a pipeline. So
are those of a model with experts, whose names have a form of their own. The layers' files have no account of ties: the
model file's ``universal_checkpoint_info`` has it, as "pipeline_layers". Without it, as in files of DeepSpeed itself,
ties are found by the names in ``param_shapes``.

Names and contents are those of DeepSpeed 0.19.6 as documented. No test here runs DeepSpeed's pipeline engine on them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from deepspeed_c.errors import CheckpointError

__all__ = ["LAYER_FILE", "PIPELINE_INFO", "TIED", "Layers", "layer_file"]

# Ranks along further axes of a hand-made topology are in the name too. Such files are not read.
LAYER_FILE = re.compile(r"layer_(?P<layer>\d+)-((?P<axes>.+)-)?model_states\.pt")
TIED = "tied_modules"
PIPELINE_INFO = "pipeline_layers"
_NUMBERED = re.compile(r"(?P<layer>\d+)\.(?P<key>.+)")
_OF_TIED = re.compile(rf"{TIED}\.(?P<tie>[^.]+)\.(?P<key>.+)")


def layer_file(layer: int, tensor_rank: int, n_tensor_ranks: int) -> str:
    """The name of a layer's file."""
    of_tensor = f"-model_{tensor_rank:02d}" if n_tensor_ranks > 1 else ""
    return f"layer_{layer:02d}{of_tensor}-model_states.pt"


class Layers(NamedTuple):
    """The layers of a ``PipelineModule`` that share their weights."""

    tied: Mapping[str, tuple[int, ...]]
    """The layers of each key that have a file."""

    @classmethod
    def of_state(cls, saved: Any, where: str) -> Layers | None:
        """From ``Source.state["pipeline"]``; None if it was no pipeline. Raises CheckpointError for other contents."""
        if saved is None:
            return None
        tied = saved.get("tied") if isinstance(saved, Mapping) else None
        if not isinstance(tied, Mapping) or not all(
            type(key) is str and isinstance(layers, (list, tuple)) and layers and all(map(_is_number, layers))
            for key, layers in tied.items()
        ):
            raise CheckpointError(
                "does not say which layers of its pipeline are tied",
                where=where,
                fix="take another checkpoint; this one was changed after it was written",
            )
        return cls({key: tuple(layers) for key, layers in tied.items()})

    def as_state(self) -> dict[str, Any]:
        """As in ``Source.state["pipeline"]``."""
        return {"tied": {key: list(layers) for key, layers in self.tied.items()}}

    def places(self, name: str) -> Iterator[tuple[int, str]]:
        """The (layer, key in its file) of a tensor of the model; none if it belongs to no layer."""
        if found := _NUMBERED.fullmatch(name):
            yield int(found["layer"]), found["key"]
        elif found := _OF_TIED.fullmatch(name):
            for layer in self.tied.get(found["tie"], ()):
                yield layer, found["key"]

    def name(self, layer: int, key: str) -> str:
        """The model's name of a tensor in a layer's file."""
        tie = next((tie for tie, layers in self.tied.items() if layer in layers), None)
        return f"{layer}.{key}" if tie is None else f"{TIED}.{tie}.{key}"

    def contents(self, names: Iterable[str], where: str) -> dict[int, dict[str, str]]:
        """For every layer with a file, key in the file -> name in the model.

        Raises CheckpointError for a name that belongs to no layer.
        """
        of_layers: dict[int, dict[str, str]] = {}
        for name in names:
            places = list(self.places(name))
            if not places:
                raise CheckpointError(
                    "belongs to no layer of its pipeline, and DeepSpeed's files of layers have no place for it",
                    where=f"{where}, {name}",
                    fix="make it a part of a layer, or write the universal format",
                )
            for layer, key in places:
                of_layers.setdefault(layer, {})[key] = name
        return dict(sorted(of_layers.items()))


def find_ties(shapes: Mapping[str, tuple[int, ...]], found: Mapping[int, Mapping[str, tuple[int, ...]]]) -> Layers:
    """Ties in files without an account of them. A layer belongs to the key whose trained parameters it has in name and
    shape, if none of its own are named.

    shapes: of the trained parameters. found: of each file's tensors. Raises CheckpointError (without a place) where a
    key has no layer, or a layer could have several keys.
    """
    keys: dict[str, dict[str, tuple[int, ...]]] = {}
    named: set[int] = set()
    for name, shape in shapes.items():
        if split := _OF_TIED.fullmatch(name):
            keys.setdefault(split["tie"], {})[split["key"]] = shape
        elif split := _NUMBERED.fullmatch(name):
            named.add(int(split["layer"]))
    tied: dict[str, list[int]] = {}
    for layer, tensors in found.items():
        fits = [tie for tie, own in keys.items() if layer not in named and own.items() <= tensors.items() and tensors]
        if len(fits) > 1:
            raise CheckpointError(f"does not say whether layer {layer} is tied by {' or '.join(map(repr, fits))}")
        if fits:
            tied.setdefault(fits[0], []).append(layer)
    if lost := sorted(keys.keys() - tied.keys()):
        raise CheckpointError(f"has no file of a layer with the tied weights {lost}")
    return Layers({key: tuple(layers) for key, layers in tied.items()})


def _is_number(value: Any) -> bool:
    return type(value) is int and value >= 0
