"""Inert stand-ins for the few classes of DeepSpeed that occur in pickles of its checkpoints. DeepSpeed need not be
installed, and none of its code is run.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

from deepspeed_c.checkpoint.formats.torch_file import TorchFile
from deepspeed_c.checkpoint.formats.unpickle import Global

__all__ = [
    "UPSTREAM",
    "DynamicLossScaler",
    "LossScaleConfig",
    "LossScaleProfile",
    "LossScaler",
    "fragment_address",
    "read_file",
]


class _Frozen(type):
    """Forbids setting attributes on these classes, because a pickle can set attributes on any class that it may name."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError(f"{cls.__name__} cannot be changed")


def _stand_in(path: str) -> type:
    module, _, name = path.rpartition(".")

    def __init__(self: Any, *args: Any) -> None:
        # A member of an enumeration is pickled as a call of the enumeration with the member's value.
        if args:
            self.value = args[0]

    def __reduce_ex__(self: Any, protocol: int) -> Any:
        if set(vars(self)) == {"value"}:
            return type(self), (self.value,)
        return object.__reduce_ex__(self, 2)

    def __repr__(self: Any) -> str:
        return f"<{path} {vars(self)}>"

    body = {
        "__module__": module,
        "__qualname__": name,
        "__init__": __init__,
        "__reduce_ex__": __reduce_ex__,
        "__repr__": __repr__,
        "__doc__": f"Holds the attributes of a pickled {path}, and does nothing.",
    }
    return _Frozen(name, (), body)


# Classes of DeepSpeed that its checkpoints hold, by the path that their pickles name. Each is a class with attributes
# and no behaviour.
UPSTREAM: dict[str, type] = {
    path: _stand_in(path)
    for path in (
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig",
        "deepspeed.runtime.fp16.loss_scaler.LossScaleProfile",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.utils.tensor_fragment.tensor_fragment",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum",
        "deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum",
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    )
}

LossScaler, DynamicLossScaler, LossScaleConfig, LossScaleProfile = (
    UPSTREAM[f"deepspeed.runtime.fp16.loss_scaler.{name}"]
    for name in ("LossScaler", "DynamicLossScaler", "LossScaleConfig", "LossScaleProfile")
)
fragment_address = UPSTREAM["deepspeed.utils.tensor_fragment.fragment_address"]


def _maker(kind: type) -> Any:
    def make(*arguments: Any) -> Any:
        if len(arguments) > 1:
            raise pickle.UnpicklingError(f"a {kind.__name__} that is made of {len(arguments)} values")
        return kind(*arguments)

    return make


_TABLE = {path: Global(call=_maker(kind), new=kind) for path, kind in UPSTREAM.items()}
_OBJECT = Global()


def _reconstruct(kind: Any, base: Any, state: Any) -> Any:
    # Protocols before 2 make an object by this call.
    if base is not _OBJECT or not any(kind is known for known in _TABLE.values()) or state is not None:
        raise pickle.UnpicklingError("an object that is made in an unknown way")
    return kind.new()


_NAMES: dict[str, Any] = {
    **_TABLE,
    "builtins.object": _OBJECT,
    "__builtin__.object": _OBJECT,
    "copyreg._reconstructor": Global(call=_reconstruct),
    "copy_reg._reconstructor": Global(call=_reconstruct),
}


def read_file(path: str | os.PathLike) -> TorchFile:
    """A file of DeepSpeed. Raises CheckpointError as ``TorchFile`` does."""
    return TorchFile(path, table=_NAMES, objects=UPSTREAM.values())
