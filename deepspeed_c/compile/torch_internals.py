"""The one place that uses names of torch's compiler which torch does not document. Nothing of torch is replaced, and no
setting of torch is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.compiled_autograd import _enable
from torch._dynamo.eval_frame import skip_code
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext, detect_fake_mode

__all__ = ["BACKENDS", "add_small_tensor", "compiling_backward", "gradient_of", "has_compiler", "input_index", "is_saved", "leave_alone", "size_hint"]

Edit = Callable[[torch.fx.GraphModule, bool], torch.fx.GraphModule]
"""(graph, whether it is a backward) -> the graph to compile."""


def input_index(placeholder: torch.fx.Node) -> int | None:
    """The number of the traced graph's input that ``placeholder`` is; None for a value that a forward has saved."""
    index = getattr(placeholder.meta.get("desc"), "idx", None)
    return index if type(placeholder.meta.get("desc")).__name__ == "PlainAOTInput" else None


def is_saved(graph: torch.fx.Graph) -> list[bool]:
    """For each output of a forward graph, whether it is saved for the backward."""
    descriptions = graph.output_node().meta.get("desc", ())
    return [type(description).__name__ == "SavedForBackwardsAOTOutput" for description in descriptions]


def gradient_of(graph: torch.fx.Graph) -> list[int | None]:
    """For each output of a backward graph, the number of the traced graph's input whose gradient it is."""
    descriptions = graph.output_node().meta.get("desc", ())
    return [getattr(getattr(d, "grad_of", None), "idx", None) for d in descriptions]


def size_hint(size: int | torch.SymInt) -> int:
    """A size for the inputs that a graph is compiled for. (``int(size)`` would bind the graph to this size.)"""
    return size if isinstance(size, int) else int(size.node.hint or 0)


def compiling_backward(compiler: Callable[..., Any]) -> AbstractContextManager[None]:
    """Within it, ``compiler`` gets the graph of each backward pass as it runs."""
    return _enable(compiler)


def has_compiler(backend: Any) -> bool:
    """Whether the compiler of C++ that ``backend`` runs is there. Only Inductor runs one."""
    if backend != "inductor":
        return True
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def leave_alone(code: CodeType) -> None:
    """From now on ``torch.compile`` compiles no frame of ``code``. It still traces calls of it within other frames."""
    skip_code(code)


def add_small_tensor(graph: torch.fx.Graph) -> torch.fx.Node:
    """Adds to the beginning of ``graph`` a new tensor of one byte. (A compiler would fold a constant.)"""
    fake = detect_fake_mode([node.meta.get("val") for node in graph.find_nodes(op="placeholder")])
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        node = graph.call_function(torch.ops.aten.empty.memory_format, ([1],), {"dtype": torch.uint8, "device": "cpu"})
    with fake:
        node.meta["val"] = torch.empty([1], dtype=torch.uint8, device="cpu")
    return node


def _compile_with_inductor(traced: torch.fx.GraphModule, inputs: Sequence[Any], edit: Edit, **options: Any) -> Any:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(graph: torch.fx.GraphModule, given: Sequence[Any], **kwargs: Any) -> Any:
        edited = edit(graph, bool(kwargs.get("is_backward")))
        placeholders = edited.graph.find_nodes(op="placeholder")
        inputs = [n.meta["val"] if n.meta.get("is_swapped") else value for n, value in zip(placeholders, given)]
        return compile_fx_inner(edited, inputs, **kwargs)

    # Torch keeps compiled frames on disk under a key that does not know of our edits.
    with functorch_config.patch(enable_autograd_cache=False):
        return compile_fx(traced, inputs, inner_compile=inner, config_patches=options or None)


def _run_operators(traced: torch.fx.GraphModule, inputs: Sequence[Any], edit: Edit, **_: Any) -> Any:
    def compiler(is_backward: bool) -> Callable[..., Any]:
        def compile_graph(graph: torch.fx.GraphModule, given: Sequence[Any]) -> Any:
            if is_backward:
                # Torch refuses a second backward (``retain_graph``) of a graph that may overwrite what its forward has
                # saved. Operators that run as they are never do.
                TracingContext.get().fw_metadata.bw_donated_idxs.clear()
            # Boxed: the graph takes its inputs out of a list, so a saved activation is freed after its last use.
            return boxed_nop(edit(graph, is_backward), given)

        return compile_graph

    compile_ = aot_autograd(
        fw_compiler=compiler(False), bw_compiler=compiler(True), partition_fn=default_partition
    )
    return compile_(traced, inputs)


BACKENDS: dict[str, Callable[..., Any]] = {
    "inductor": _compile_with_inductor,
    "aot_eager": _run_operators,
    "eager": _run_operators,
}
"""How the graph of a frame is split into a forward and a backward, edited and compiled: by the name of the backend.
With "eager" each operator of the graph runs as it is, in its order."""
