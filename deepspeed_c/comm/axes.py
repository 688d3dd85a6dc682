"""The axes of a mesh. Each row of the table describes how ranks along one axis differ; tuples of axes follow from the
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from deepspeed_c.errors import FeatureError

__all__ = [
    "AXES",
    "AXIS_ROWS",
    "COPIES",
    "DATA",
    "DP_REPLICATE",
    "DP_SHARD",
    "EP",
    "NEEDING_MODULE",
    "PP",
    "SAME_SAMPLES",
    "SHARDS",
    "SP",
    "TOKENS",
    "TP",
    "WITHIN_STAGE",
    "Axis",
    "Holds",
    "Sees",
    "refuse_axes_needing_module",
]

PP, DP_REPLICATE, DP_SHARD, EP, SP, TP = "pp", "dp_replicate", "dp_shard", "ep", "sp", "tp"


class Sees(Enum):
    """Tokens of the neighbours along an axis, compared with a rank's own."""

    SAME = "the same tokens"
    OTHER_TOKENS = "other tokens of the same samples"
    OTHER_SAMPLES = "other samples"


class Holds(Enum):
    """Parameters that the neighbours along an axis compute with, compared with a rank's own. Shards of ZeRO do not
    count: they are gathered before use."""

    SAME = "the same parameters"
    PARTS = "other parts of parameters"
    OTHER_LAYERS = "other layers"


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of the mesh: a row of the table."""

    name: str
    what: str
    """The kind of parallelism, in words."""
    sees: Sees
    holds: Holds
    shards_states: bool
    """Whether ZeRO cuts states, gradients and weights over the axis; otherwise each rank along it has a copy."""
    needs: str = ""
    """The class of module that is required for the axis; "" if every module can use it."""
    dim_names: tuple[str, ...] = ()
    """Further names of the axis as a dimension of a ``DeviceMesh``."""
    mpu_names: tuple[str, ...] = ()
    """Names in the methods of an mpu (``get_<name>_world_size()``, ...) of versions of Megatron and DeepSpeed. The most
    telling name stands first: "model parallel" is tensor parallel where there are no pipelines."""

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients of a parameter that is whole on each rank are summed over the axis.

        A gradient is a sum of terms, one a token. Ranks that see the same tokens have all of these terms already.
        """
        return self.sees is not Sees.SAME


# From the outermost to the innermost: ranks of the last axis are neighbours. dp_shard and dp_replicate together are
# data parallelism: shards of one copy lie along the first, copies along the second (MiCS, arXiv 2205.00119; HSDP of
# PyTorch, arXiv 2304.11277).
AXIS_ROWS = (
    Axis(
        name=PP,
        what="pipeline parallelism",
        sees=Sees.SAME,
        holds=Holds.OTHER_LAYERS,
        shards_states=False,
        needs="PipelineModule",
        dim_names=("pipe", "pipeline_parallel"),
        mpu_names=("pipeline_model_parallel", "pipe_parallel"),
    ),
    Axis(
        name=DP_REPLICATE,
        what="data parallelism over copies",
        sees=Sees.OTHER_SAMPLES,
        holds=Holds.SAME,
        shards_states=False,
        dim_names=("replicate", "ddp"),
    ),
    Axis(
        name=DP_SHARD,
        what="data parallelism over shards",
        sees=Sees.OTHER_SAMPLES,
        holds=Holds.SAME,
        shards_states=True,
        dim_names=("dp", "data", "data_parallel", "fsdp", "shard"),
        mpu_names=("data_parallel",),
    ),
    Axis(
        name=EP,
        what="expert parallelism",
        sees=Sees.OTHER_SAMPLES,
        holds=Holds.PARTS,
        shards_states=True,
        dim_names=("expert_parallel",),
        mpu_names=("expert_model_parallel", "expert_parallel"),
    ),
    Axis(
        name=SP,
        what="sequence parallelism",
        sees=Sees.OTHER_TOKENS,
        holds=Holds.SAME,
        shards_states=True,
        dim_names=("cp", "sequence_parallel", "context_parallel"),
        mpu_names=("sequence_parallel", "context_parallel"),
    ),
    Axis(
        name=TP,
        what="tensor parallelism",
        sees=Sees.SAME,
        holds=Holds.PARTS,
        shards_states=False,
        dim_names=("mp", "tensor_parallel", "model_parallel"),
        mpu_names=("tensor_model_parallel", "slice_parallel", "model_parallel"),
    ),
)


def _names(is_meant: Callable[[Axis], bool]) -> tuple[str, ...]:
    return tuple(axis.name for axis in AXIS_ROWS if is_meant(axis))


AXES = _names(lambda axis: True)
# Ranks that hold the same layers, or parts of the same layers, differ along these axes only.
WITHIN_STAGE = _names(lambda axis: axis.holds is not Holds.OTHER_LAYERS)
# Gradients are averaged over the ranks along these axes: a batch has one micro-batch for each of these ranks.
DATA = _names(lambda axis: axis.sees is Sees.OTHER_SAMPLES)
# Gradients are summed over the ranks along these: they train the same parameters on different tokens.
TOKENS = _names(lambda axis: axis.sums_gradients)
# By default ZeRO cuts over these axes. Ranks along the other axes of TOKENS hold copies of the same shards.
SHARDS = _names(lambda axis: axis.shards_states)
COPIES = tuple(name for name in TOKENS if name not in SHARDS)
# Ranks along these axes read the same samples: a saved run has one place in the data for all of them.
SAME_SAMPLES = _names(lambda axis: axis.sees is not Sees.OTHER_SAMPLES)
# Ranks of a plain module cannot lie along these.
NEEDING_MODULE = _names(lambda axis: bool(axis.needs))


def refuse_axes_needing_module(sizes: Mapping[str, int], where: str) -> None:
    """Raises FeatureError for an axis of ``NEEDING_MODULE`` with more than one rank, and names the axis."""
    for axis in AXIS_ROWS:
        if axis.name in NEEDING_MODULE and sizes.get(axis.name, 1) != 1:
            raise FeatureError(
                f"axis {axis.name!r} has {sizes[axis.name]} ranks: {axis.what} is for a {axis.needs}",
                where=where,
                fix=f"pass a {axis.needs}, or give all ranks to the other axes",
            )
