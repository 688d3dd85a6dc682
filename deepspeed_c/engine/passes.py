"""Find from within a running backward pass the tensors whose gradients it computes. This tells ``autograd.grad`` from
``backward``, since both go through the same graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from deepspeed_c.engine.boundary import is_boundary_node
from deepspeed_c.zero.weights.param import gradient_edge

__all__ = ["accumulates_into", "leads_here", "nodes_between", "nodes_of", "will_run"]

# Name of the node that stands for a whole graph of torch.compile. Parameters are inputs of the node, so it hides no
# parameter.
_COMPILED = "CompiledFunctionBackward"


def _node_of(tensor: torch.Tensor) -> Any:
    """The graph node that receives the gradient of ``tensor``; for a leaf, the node that adds to its ``.grad``."""
    return gradient_edge(tensor).node if tensor.grad_fn is None else tensor.grad_fn


def nodes_of(values: Iterable[Any]) -> frozenset[Any]:
    """The graph nodes that receive gradients of the tensors in ``values`` that require gradients. Leaves that are not
    strided are left out."""
    wanted = [v for v in values if torch.is_tensor(v) and v.requires_grad]
    return frozenset(_node_of(v) for v in wanted if v.grad_fn is not None or v.layout == torch.strided)


def nodes_between(starts: Iterable[Any], ends: Collection[Any] = ()) -> Iterator[Any]:
    """All nodes that gradients reach from ``starts``, without ``ends`` and the nodes that are reached only through
    ``ends``."""
    todo, seen = list(starts), {None, *ends}
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            todo += [follower for follower, _ in node.next_functions]


def will_run(nodes: Iterable[Any]) -> bool:
    """Whether the running pass, which adds to gradients, will run any of ``nodes``."""
    return any(map(torch._C._will_engine_execute_node, nodes))


def leads_here(nodes: Iterable[Any]) -> bool:
    """Whether gradients from any of ``nodes`` reach the running node."""
    return torch._C._current_autograd_node() in nodes_between(nodes)


def accumulates_into(params: Iterable[torch.nn.Parameter], inputs: Collection[Any]) -> bool:
    """Whether the running pass adds to ``.grad`` of any of ``params``. Call it when the pass reaches an output of their
    module.

    inputs: ``nodes_of`` the module's inputs. If none of ``params`` is in the pass's graph, a node between the output
    and the inputs may still start a pass of its own, as reentrant checkpointing does. The nodes of that pass are in no
    graph yet, so the answer is True then.
    """
    for param in params:
        if param.requires_grad:
            try:
                if torch._C._will_engine_execute_node(_node_of(param)):
                    return True
            except RuntimeError:  # autograd.grad returns this gradient and adds to no other
                return False
    return _may_hide_a_pass(inputs)


def _may_hide_a_pass(inputs: Collection[Any]) -> bool:
    if not torch.autograd._is_checkpoint_valid():
        return False  # autograd.grad or backward(inputs=...), which reentrant checkpointing refuses
    for node in nodes_between([torch._C._current_autograd_node()], inputs):
        is_opaque = isinstance(node, BackwardCFunction) and type(node).__name__ != _COMPILED
        if is_opaque and not is_boundary_node(node) and torch._C._will_engine_execute_node(node):
            return True
    return False
