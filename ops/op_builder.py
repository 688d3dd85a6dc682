"""DeepSpeed's builder classes by their names.

All operators of this package are compiled at its installation. The method ``load`` of a builder returns the operator's
module.

There are also builders for operators that are not part of this package, so that programs can check: ``is_compatible()``
returns False, and ``load()`` raises BuildError.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import _utils

from deepspeed_c.errors import BuildError
from deepspeed_c.ops import aio
from deepspeed_c.ops.build_questions import BuildQuestions

_LATER = "comes with a later version"


class OpBuilder(BuildQuestions):
    """The builder of one operator of DeepSpeed. ``NAME`` is its key in ``ops.__compatible_ops__``."""

    NAME: ClassVar[str] = ""
    module: ClassVar[str | None] = None
    """The module of this package that has the operator; None if it is not part of this package."""
    instead: ClassVar[str] = _LATER
    """The advice for BuildError if the operator is not part of this package."""

    def __init__(self, name: str | None = None) -> None:
        self.name = self.NAME if name is None else name

    def absolute_name(self) -> str:
        """The module that has the operator, or the name of the builder if there is none."""
        return self.module or f"deepspeed_c.ops.op_builder.{type(self).__name__}"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the operator is part of this package. Its module says on which devices it runs."""
        return self.module is not None

    def load(self, verbose: bool = True) -> Any:
        """The module that has the operator. Raises BuildError if the operator is not part of this package."""
        if self.module is None:
            raise BuildError(
                f"the operator {self.name} is not part of this version of deepspeed_c",
                where=type(self).__name__,
                fix=self.instead,
            )
        return importlib.import_module(self.module)

    jit_load = load

    def builder(self) -> Any:
        """Raises BuildError: there is no extension to compile."""
        raise BuildError(
            f"{self.name}: operators are compiled when the package is installed",
            where=type(self).__name__,
            fix="call load(), and drop the extension from the setup script",
        )

    def sources(self) -> list[str]:
        """No files: nothing is compiled here."""
        return []

    def include_paths(self) -> list[str]:
        """No folders: nothing is compiled here."""
        return []


class CUDAOpBuilder(OpBuilder):
    """The base of DeepSpeed's builders for CUDA."""


class TorchCPUOpBuilder(CUDAOpBuilder):
    """The base of DeepSpeed's builders for the host."""


def _builder(
    class_name: str, name: str, module: str | None = None, instead: str = _LATER, base: type[OpBuilder] = CUDAOpBuilder
) -> type[OpBuilder]:
    doc = f"Stands for DeepSpeed's builder of the operator {name}."
    body = {"__doc__": doc, "__module__": __name__, "NAME": name}
    return type(class_name, (base,), {**body, "module": module, "instead": instead})


_HOST = TorchCPUOpBuilder
_INFERENCE = "the inference engine comes with a later version"
_LAYERS = "use the model's own layers, or torch.nn.TransformerEncoderLayer"
_COMPILE = "use torch.compile by way of engine.compile()"

AsyncIOBuilder = aio.AsyncIOBuilder
CPUAdagradBuilder = _builder("CPUAdagradBuilder", "cpu_adagrad", "deepspeed_c.ops.adagrad", base=_HOST)
CPUAdamBuilder = _builder("CPUAdamBuilder", "cpu_adam", "deepspeed_c.ops.adam", base=_HOST)
CPULionBuilder = _builder("CPULionBuilder", "cpu_lion", "deepspeed_c.ops.lion", base=_HOST)
FusedAdamBuilder = _builder("FusedAdamBuilder", "fused_adam", "deepspeed_c.ops.adam")
FusedLambBuilder = _builder("FusedLambBuilder", "fused_lamb", "deepspeed_c.ops.lamb")
FusedLionBuilder = _builder("FusedLionBuilder", "fused_lion", "deepspeed_c.ops.lion")

CCLCommBuilder = _builder("CCLCommBuilder", "deepspeed_ccl_comm", None, "use gloo or nccl", OpBuilder)
DeepCompileBuilder = _builder("DeepCompileBuilder", "dc", None, _COMPILE, _HOST)
EvoformerAttnBuilder = _builder(
    "EvoformerAttnBuilder", "evoformer_attn", None, "use torch.nn.functional.scaled_dot_product_attention with a bias"
)
FPQuantizerBuilder = _builder("FPQuantizerBuilder", "fp_quantizer")
GDSBuilder = _builder("GDSBuilder", "gds", None, "use AsyncIOBuilder, with host memory", OpBuilder)
InferenceBuilder = _builder("InferenceBuilder", "transformer_inference", None, _INFERENCE)
InferenceCoreBuilder = _builder("InferenceCoreBuilder", "inference_core_ops", None, _INFERENCE)
InferenceCutlassBuilder = _builder("InferenceCutlassBuilder", "cutlass_ops", None, _INFERENCE)
PinMemoryBuilder = _builder(
    "PinMemoryBuilder",
    "pin_memory",
    None,
    "use torch.Tensor.pin_memory, or new_cpu_locked_tensor of aio_handle",
    OpBuilder,
)
QuantizerBuilder = _builder(
    "QuantizerBuilder", "quantizer", None, "deepspeed_c.ops.q8 quantizes blocks of 256 to 8 bits, in host memory"
)
RaggedOpsBuilder = _builder("RaggedOpsBuilder", "ragged_device_ops", None, _INFERENCE)
RaggedUtilsBuilder = _builder("RaggedUtilsBuilder", "ragged_ops", None, _INFERENCE)
RandomLTDBuilder = _builder("RandomLTDBuilder", "random_ltd")
ShareMemCommBuilder = _builder("ShareMemCommBuilder", "deepspeed_shm_comm", None, "use gloo", OpBuilder)
SparseAttnBuilder = _builder(
    "SparseAttnBuilder", "sparse_attn", None, "use torch.nn.attention.flex_attention", OpBuilder
)
SpatialInferenceBuilder = _builder("SpatialInferenceBuilder", "spatial_inference", None, _INFERENCE)
TransformerBuilder = _builder("TransformerBuilder", "transformer", None, _LAYERS)
StochasticTransformerBuilder = _builder(
    "StochasticTransformerBuilder", "stochastic_transformer", None, _LAYERS, TransformerBuilder
)


class UtilsBuilder(OpBuilder):
    """Tensors of one dtype as one flat tensor, and back."""

    NAME, module = "utils", "torch._utils"

    def load(self, verbose: bool = True) -> SimpleNamespace:
        """A namespace with torch's ``flatten(tensors) -> tensor`` and ``unflatten(flat, tensors) -> tensors``."""
        return SimpleNamespace(
            flatten=_utils._flatten_dense_tensors, unflatten=_utils._unflatten_dense_tensors, __name__=self.module
        )


class NotImplementedBuilder(OpBuilder):
    """Replaces the builders that DeepSpeed's accelerator for CPUs does not have."""

    NAME, instead = "deepspeed_not_implemented", "call the operators of deepspeed_c.ops"


_BUILDERS = {
    name: value
    for name, value in list(globals().items())
    if isinstance(value, type)
    and name.endswith("Builder")
    and name not in ("OpBuilder", "CUDAOpBuilder", "TorchCPUOpBuilder")
}
__all__ = [  # noqa: PLE0604
    "ALL_OPS",
    "CUDAOpBuilder",
    "OpBuilder",
    "TorchCPUOpBuilder",
    "probe_is_compatible",
    *_BUILDERS,
]

ALL_OPS = {builder.NAME: builder() for builder in _BUILDERS.values()}
"""NAME of an operator -> its builder."""


def probe_is_compatible(builder: OpBuilder, verbose: bool = False) -> bool:
    """``builder.is_compatible(verbose)``."""
    return builder.is_compatible(verbose)


def compatible_ops() -> dict[str, bool]:
    """Whether each operator is part of this package, by NAME."""
    return {name: builder.is_compatible() for name, builder in ALL_OPS.items()}
