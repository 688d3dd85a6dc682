"""The one place that uses names of torch's compiler which torch does not document. Nothing of torch is replaced, and no
setting of torch is changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch._functorch.config as functorch_config
import torch.compiler.config as compiler_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.compiled_autograd import _enable
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.trace_rules import add as add_untraced
from torch._dynamo.utils import get_compilation_metrics, graph_break_reasons
from torch._functorch.partitioners import default_partition
from torch._guards import CompileContext, TracingContext, detect_fake_mode, tracing

__all__ = [
    "BACKENDS",
    "Compilation",
    "CompilerError",
    "GraphBreak",
    "add_small_tensor",
    "compiled_frame",
    "compiling_backward",
    "gradient_of",
    "has_compiler",
    "input_index",
    "is_saved",
    "leave_alone",
    "leave_modules_alone",
    "new_notes",
    "size_hint",
    "traced_inputs",
    "tracing_again",
]

CompilerError = TorchDynamoException
"""What ``torch.compile`` raises about a model that it does not compile, as with ``fullgraph=True``."""

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


def leave_modules_alone(*names: str) -> None:
    """From now on ``torch.compile`` traces no code of these modules. A call of it ends a graph."""
    for name in names:
        add_untraced(name)


def traced_inputs(traced: torch.fx.GraphModule) -> list[Any]:
    """What stands for the inputs of a traced frame: of any size that the frame takes, and without memory."""
    return [node.meta["example_value"] for node in traced.graph.find_nodes(op="placeholder")]


@contextmanager
def tracing_again(values: Sequence[Any]) -> Iterator[None]:
    """Within it, a frame may be compiled again from its ``traced_inputs``, for all sizes that it takes."""
    with tracing(TracingContext(detect_fake_mode(values))):
        yield


class GraphBreak(NamedTuple):
    """A line between two graphs, with torch's reason, which has several lines."""

    reason: str
    function: str
    file: str
    line: int


class Compilation(NamedTuple):
    """One attempt to compile a frame. id: the number of the code and of the attempt, as "0/1". function, file, line: of
    the code; None where torch has given up before it looked at it. failure: why it runs eagerly. guard: the check that
    the graph of an earlier attempt, whose id it begins with, did not pass."""

    id: str
    function: str | None
    file: str | None
    line: int | None
    has_graph: bool
    failure: str | None
    failed_at: tuple[str, int] | None
    guard: str | None


def compiled_frame() -> str:
    """The ``Compilation.id`` of the frame that is being compiled."""
    return str(CompileContext.current_compile_id())


_TORCH = os.path.dirname(torch.__file__) + os.sep


class _Notes:
    """What Dynamo notes about all frames of the process. It keeps the notes in two lists and drops the oldest of the
    second, so the place of the last look is remembered."""

    def __init__(self) -> None:
        self._n_breaks = 0
        self._last: Any = None

    def new(self) -> tuple[list[GraphBreak], list[Compilation]]:
        breaks = graph_break_reasons[min(self._n_breaks, len(graph_break_reasons)) :]
        self._n_breaks = len(graph_break_reasons)
        noted = get_compilation_metrics()
        old = next((i for i in reversed(range(len(noted))) if noted[i] is self._last), -1)
        self._last = noted[-1] if noted else None
        # Graphs of a backward, which is compiled when it first runs, have notes too.
        frames = [note for note in noted[old + 1 :] if note.is_forward is not False]
        return [_break_of(each) for each in breaks], [_compilation_of(each) for each in frames]


def _break_of(note: Any) -> GraphBreak:
    if not note.user_stack:
        return GraphBreak(note.reason, "a frame", "", 0)
    # A break within a hook or a call of a module is in the user's line that has led there.
    users = [place for place in note.user_stack if not place.filename.startswith(_TORCH)]
    place = (users or note.user_stack)[-1]
    return GraphBreak(note.reason, place.name, place.filename, place.lineno)


def _compilation_of(note: Any) -> Compilation:
    failure = note.fail_reason or note.fail_type
    failed_at = (note.fail_user_frame_filename, note.fail_user_frame_lineno)
    return Compilation(
        str(note.compile_id),
        note.co_name,
        note.co_filename,
        note.co_firstlineno,
        bool(note.has_guarded_code),
        failure,
        failed_at if None not in failed_at else None,
        note.recompile_reason,
    )


new_notes = _Notes().new
"""() -> the graph breaks and the compiled frames of the process since the last call."""


def add_small_tensor(graph: torch.fx.Graph) -> torch.fx.Node:
    """Adds to the beginning of ``graph`` a new tensor of one byte. (A compiler would fold a constant.)"""
    fake = detect_fake_mode([node.meta.get("val") for node in graph.find_nodes(op="placeholder")])
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        node = graph.call_function(torch.ops.aten.empty.memory_format, ([1],), {"dtype": torch.uint8, "device": "cpu"})
    with fake:
        node.meta["val"] = torch.empty([1], dtype=torch.uint8, device="cpu")
    return node


def _keep_saved() -> None:
    """The backward about to be compiled overwrites nothing that its forward has saved. Torch lets no other run twice
    (``retain_graph``).
    """
    TracingContext.get().fw_metadata.bw_donated_idxs.clear()


def _compile_with_inductor(traced: torch.fx.GraphModule, inputs: Sequence[Any], edit: Edit, **options: Any) -> Any:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(graph: torch.fx.GraphModule, given: Sequence[Any], **kwargs: Any) -> Any:
        is_backward = bool(kwargs.get("is_backward"))
        if is_backward:
            _keep_saved()
        edited = edit(graph, is_backward)
        placeholders = edited.graph.find_nodes(op="placeholder")
        inputs = [n.meta["val"] if n.meta.get("is_swapped") else value for n, value in zip(placeholders, given)]
        # Torch keeps kernels on disk under a key that does not know which inputs they may overwrite.
        tag = f"{compiler_config.cache_key_tag} saved values are kept"
        with compiler_config.patch(cache_key_tag=tag):
            return compile_fx_inner(edited, inputs, **kwargs)

    # Torch keeps compiled frames on disk under a key that does not know of our edits.
    with functorch_config.patch(enable_autograd_cache=False):
        return compile_fx(traced, inputs, inner_compile=inner, config_patches=options or None)


def _run_operators(traced: torch.fx.GraphModule, inputs: Sequence[Any], edit: Edit, **_: Any) -> Any:
    def compiler(is_backward: bool) -> Callable[..., Any]:
        def compile_graph(graph: torch.fx.GraphModule, given: Sequence[Any]) -> Any:
            if is_backward:
                _keep_saved()
            # Boxed: the graph takes its inputs out of a list, so a saved activation is freed after its last use.
            return boxed_nop(edit(graph, is_backward), given)

        return compile_graph

    compile_ = aot_autograd(fw_compiler=compiler(False), bw_compiler=compiler(True), partition_fn=default_partition)
    return compile_(traced, inputs)


BACKENDS: dict[str, Callable[..., Any]] = {
    "inductor": _compile_with_inductor,
    "aot_eager": _run_operators,
    "eager": _run_operators,
}
"""How the graph of a frame is split into a forward and a backward, edited and compiled: by the name of the backend.
With "eager" each operator of the graph runs as it is, in its order."""
