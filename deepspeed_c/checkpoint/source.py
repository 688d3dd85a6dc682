"""A checkpoint of any format: logical tensors that can be read by range, and the state beside them.

Loading, export and conversion work on a ``Source`` and know no format. A *logical tensor* is one parameter, master
weight, optimizer state or buffer under its name in the module. The format hides how the tensor was cut when it was
saved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import torch
from typing_extensions import Self

__all__ = ["BUFFER", "MASTER", "PARAM", "Box", "LogicalTensor", "ParamInfo", "Read", "Source", "Topology"]

# Kinds of logical tensors. Any other kind is the name of an optimizer state ("exp_avg", "momentum_buffer", ...).
PARAM = "param"  # a weight, in the dtype that is trained in
MASTER = "master"  # its master copy; only where it differs from the weight
BUFFER = "buffer"


class Box(NamedTuple):
    """A rectangular part of a logical tensor, as a tensor-parallel rank holds it: [start[d], start[d] + size[d]) along
    each dimension d.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalTensor:
    """One whole tensor of a checkpoint."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.name


class Read(NamedTuple):
    """Elements [begin, begin + into.numel()) of a logical tensor, or of ``box`` of it, in row-major order, to be put
    into ``into``.

    ``into`` is flat and contiguous, on any device; elements are converted to its dtype.
    """

    tensor: LogicalTensor
    begin: int
    into: torch.Tensor
    box: Box | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamInfo:
    """Facts about a parameter besides its tensors."""

    group: int | None = None
    """Index of the optimizer group that trains it; None for a frozen parameter."""
    counts: Mapping[str, Any] = field(default_factory=dict)
    """Optimizer states that count for the parameter as a whole ("step"): numbers, or tensors of no dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The arrangement of ranks that saved it."""

    world_size: int = 1
    stage: int = 0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    axes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the mesh's axes of more than one rank, by name; empty where that is not known."""
    expert_parallel: int = 1
    """The largest number of ranks that experts of a layer were spread over."""


class Source(ABC):
    """A checkpoint that is open for reading. Use it as a context manager, from one thread.

    Attributes that a subclass sets before it is used:
        where: path, for messages.
        format: "deepspeed_c", "deepspeed", "deepspeed-universal", "huggingface" or "torch-dcp".
        tensors: (kind, name) -> logical tensor, in the module's order of registration where that is known. A parameter
            has PARAM, MASTER or both.
        aliases: further names of tied weights, name -> name that the tensor is listed by.
        params: name -> further facts about a parameter. Formats of weights alone leave it empty.
        groups: options ("lr", "betas", ...) of the optimizer's groups, without "params"; empty where there is no
            optimizer state.
        state: the rest, each entry only where it is known: "counters" {global_steps, global_samples, micro_steps,
            skipped_steps: int}, "lr_scheduler" (a state dict), "loss_scaler" ({"scale": float, "step": int,
            "last_overflow_step": int, "hysteresis_left": int}), "client_state" (dict), "config" (dict), "versions"
            (dict), "pipeline" (of a PipelineModule: {"tied": {key: numbers of the layers that DeepSpeed saves}}).
    """

    where: str
    format: str
    tensors: dict[tuple[str, str], LogicalTensor]
    aliases: dict[str, str]
    params: dict[str, ParamInfo]
    groups: list[dict[str, Any]]
    topology: Topology
    state: dict[str, Any]
    identity: str = ""
    """Changes when a save replaces the checkpoint of this name: two processes that opened the same name compare it. ""
    where that is not known.
    """
    problem: str = ""
    """The reason why some optimizer states of the checkpoint are not listed; "" if all are listed."""

    def put_first(self, names: Iterable[str]) -> None:
        """Moves these to the front of ``params``, in this order; unknown names are ignored."""
        known = [name for name in names if name in self.params]
        self.params = {name: self.params[name] for name in (*known, *self.params)}

    def regroup(self, groups: Sequence[dict[str, Any]], params: Mapping[str, ParamInfo]) -> None:
        """Replaces the optimizer's groups, and the facts that say which parameter is in which of them."""
        self.groups, self.params = list(groups), dict(params)

    @property
    def was_replaced(self) -> bool:
        """Whether the name under which the checkpoint was opened now belongs to another checkpoint or to none, so that
        opening it again makes sense.
        """
        return False

    @abstractmethod
    def read(self, reads: Sequence[Read]) -> None:
        """Fills every ``into``.

        Host memory in use meanwhile is bounded (64 MiB and the largest buffer of one conversion), however much is read.

        Raises CheckpointError, naming file and tensors, if data is missing, short or corrupt; tensors that had been
        filled by then stay filled.
        """

    def name_groups(self, names: Sequence[Sequence[str]]) -> None:
        """Says which parameters each group of the optimizer trains, in its order.

        A format that stores optimizer states by number lists them under these names and empties ``problem``; formats
        with names do nothing.

        Raises CheckpointError where names and states do not fit.
        """

    def rank_state(self, rank: int) -> dict[str, Any] | None:
        """Rank ``rank``'s own state (random number generators, position in the data); None where the checkpoint has
        none for it.
        """
        return None

    def close(self) -> None:
        """Closes files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
