"""What a pass of the user is told about the graphs of all frames, and about the parameters that they read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Graph

from deepspeed_c.compile.torch_internals import size_hint

__all__ = ["GraphParameters", "GraphProfile"]


@dataclass
class GraphProfile:
    """The graphs of one frame, and the bytes of each value in them as (name of the node, bytes). Sizes of shapes that
    are not known before a graph runs are those of the inputs that it was compiled for.
    """

    fwd_graph: Graph | None = None
    bwd_graph: Graph | None = None
    needs_backward: bool = False
    fwd_tensor_sizes: list[tuple[str, int]] = field(default_factory=list)
    bwd_tensor_sizes: list[tuple[str, int]] = field(default_factory=list)

    def look(self, graph: Graph, is_backward: bool) -> None:
        """Takes down ``graph`` as it is now."""
        sizes = [
            (node.name, size_hint(value.numel()) * value.element_size())
            for node in graph.nodes
            if isinstance(value := node.meta.get("val"), torch.Tensor)
        ]
        if is_backward:
            self.bwd_graph, self.bwd_tensor_sizes, self.needs_backward = graph, sizes, True
        else:
            self.fwd_graph, self.fwd_tensor_sizes = graph, sizes


class GraphParameters:
    """The parameters that a graph reads, by the name of the node that stands for each."""

    def __init__(self, params: Mapping[str, torch.nn.Parameter]) -> None:
        self.params = dict(params)

    @property
    def param_names(self) -> list[str]:
        return list(self.params)

    @property
    def ds_ids(self) -> dict[str, int]:
        """The number of each sharded parameter, as its attribute ``ds_id`` gives it."""
        return {name: param.ds_id for name, param in self.params.items() if hasattr(param, "ds_id")}
