"""Count the FLOPs of a running model by module: the forward, the backward, and the recomputation in the backward.

A ``TorchDispatchMode`` gets each operator below autograd, with its operands; ``flops_formulas.py`` has the formulas.
Nothing in torch is replaced, and nothing is added to modules, because torch's global module hooks report the module
that runs.

[Note: Modules of a backward]
Autograd numbers the nodes of a graph in the order of creation, and reports the node that runs in a backward. So the
counter records the next number whenever forward enters or leaves a module. It finds the modules of a backward operator
by the number of the operator's node. Modules that are entered within a backward belong to a recomputed forward.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from deepspeed_c.profile.flops_formulas import Formula, elementwise_formulas, mac_formulas

__all__ = ["Count", "FlopsCounter", "FlopsPhase", "ModuleCounts", "now", "running_counters"]


class FlopsPhase(IntEnum):
    """The part of a step in which an operator runs."""

    FORWARD = 0
    BACKWARD = 1
    RECOMPUTED = 2
    """A forward that is recomputed within the backward (activation checkpointing)."""


class Count(NamedTuple):
    """Floating-point operations, and the multiply-accumulates among them (a MAC is two FLOPs)."""

    flops: int = 0
    macs: int = 0


_NOTHING = Count()


class ModuleCounts:
    """The counts of one module, by phase."""

    __slots__ = ("_begin", "_depth", "all", "module", "own", "seconds")

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.own = [_NOTHING] * len(FlopsPhase)  # counts outside of its submodules
        self.all = [_NOTHING] * len(FlopsPhase)
        self.seconds = 0.0  # seconds in forward, with submodules
        self._depth, self._begin = 0, 0.0

    def enter(self, now: float) -> None:
        """Begins a call at time ``now``. In a recursive call the time counts once."""
        if not self._depth:
            self._begin = now
        self._depth += 1

    def leave(self, now: float) -> None:
        self._depth -= 1
        if not self._depth:
            self.seconds += now - self._begin


def _sum(a: Count, b: Count) -> Count:
    return Count(a.flops + b.flops, a.macs + b.macs)


_Path = tuple[ModuleCounts, ...]  # running modules, outermost first


class _Thread:
    """The running modules of one thread, and their history."""

    def __init__(self) -> None:
        self.path: list[tuple[ModuleCounts, bool]] = []  # (module, whether it was entered within a backward)
        self.recomputing: set[int] = set()  # backward passes in which this thread recomputes
        self._numbers: list[int] = []
        self._paths: list[_Path] = []

    def note(self, path: _Path, number: int | None = None) -> None:
        """Records that nodes from ``number`` on (default: the next number) are created in ``path``. See [Note: Modules
        of a backward]."""
        if self._paths and self._paths[-1] == path:
            return
        self._numbers.append(torch.autograd._get_sequence_nr() if number is None else number)
        self._paths.append(path)

    def path_of(self, node: Any) -> _Path:
        i = bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._paths[i] if i >= 0 else ()


def now() -> float:
    """Waits for the device, then returns the time in seconds."""
    if (device := torch.accelerator.current_accelerator(check_available=True)) is not None and device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def _task() -> int:
    """Autograd's number of the running backward pass; -1 outside of backward passes."""
    return torch._C._current_graph_task_id()


class FlopsCounter(TorchDispatchMode):
    """Counts from ``start`` to ``stop``, in the thread that starts it and in the threads of its backward passes.

    Operators outside of the model's modules, such as those of a loss function, are not counted. ``ignored``: types of
    modules whose operators are counted in the parent module.
    """

    supports_higher_order_operators = True

    def __init__(self, model: torch.nn.Module, ignored: Sequence[type] = ()) -> None:
        super().__init__()
        self.is_counting = False
        self.backward_begin: float | None = None
        """Time at which the gradient of the model's outputs arrived, by ``time.perf_counter``."""
        modules = [each for each in model.modules() if each is model or type(each) not in ignored]
        self._counts = {id(module): ModuleCounts(module) for module in modules}
        self.root = self._counts[id(model)]
        self._macs, self._elementwise = mac_formulas(), elementwise_formulas()
        # Formulas by the operator's id, because hashing an operator runs a Python function. The operator is kept, so
        # that its id stays valid.
        self._formulas: dict[int, tuple[Formula | None, Formula | None, Any]] = {}
        self._threads: dict[int, _Thread] = {}
        self._forward_thread = _Thread()
        self._with_create_graph: set[int] = set()
        self._handles: list[Any] = []
        self._stance: Any = None
        self._is_pushed = False
        self._n_suspended = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False. With True, torch would switch the compiler off and on around each operator, which takes longer
        than the count. ``start`` makes sure that nothing is compiled.
        """
        return False

    def counts(self) -> list[ModuleCounts]:
        """The counts of all modules of the model, without ignored modules."""
        return list(self._counts.values())

    def start(self) -> None:
        self.__enter__()
        self._is_pushed = True
        torch.ones(1).add(1)  # at the first operator under a mode, torch imports modules: do not count this time
        self._threads = {threading.get_ident(): self._forward_thread}
        self._forward_thread.note(())
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        if "torch._dynamo" in sys.modules:
            # A compiled graph runs kernels instead of operators, so the counted step runs the original code.
            self._stance = torch.compiler.set_stance("force_eager")
        self.is_counting = True

    def stop(self) -> None:
        """Ends the count; a second call does nothing.

        If another dispatch mode was entered after ``start``, this mode cannot be removed yet. It then stops counting,
        and a later call removes it.
        """
        if self.is_counting:
            self.is_counting = False
            for handle in self._handles:
                handle.remove()
            self._handles = []
            if self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None
        if self._is_pushed and _get_current_dispatch_mode_stack()[-1:] == [self]:
            self.__exit__(None, None, None)
            self._is_pushed = False

    def _thread(self) -> _Thread:
        ident = threading.get_ident()
        thread = self._threads.get(ident)
        if thread is None:
            thread = self._threads[ident] = _Thread()
        return thread

    def _formulas_of(self, func: Any) -> tuple[Formula | None, Formula | None, Any]:
        """The formulas of an operator's MACs and of its other FLOPs, None for a missing formula."""
        found = self._formulas.get(id(func))
        if found is None:
            operator = getattr(func, "_overloadpacket", func)
            found = self._formulas[id(func)] = (self._macs.get(operator), self._elementwise.get(operator), func)
        return found

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        counts = self._counts.get(id(module))
        if counts is None or not self.is_counting:
            return
        thread, task = self._thread(), _task()
        thread.path.append((counts, task != -1))
        thread.note(self._path(thread, task))
        if task != -1:
            thread.recomputing.add(task)
        else:
            counts.enter(now())

    def _leave(self, module: torch.nn.Module, _: Any, outputs: Any) -> None:
        counts = self._counts.get(id(module))
        thread = self._thread()
        if counts is None or not any(each is counts for each, _ in thread.path):
            return
        # Modules above it on the stack were left by an exception.
        while True:
            left, is_again = thread.path.pop()
            if not is_again:
                left.leave(now())
            if left is counts:
                break
        task = _task()
        thread.note(self._path(thread, task))
        if counts is self.root and task == -1 and torch.is_grad_enabled():
            self._watch(outputs)

    def _watch(self, outputs: Any) -> None:
        for tensor in tree_leaves(outputs):
            if torch.is_tensor(tensor) and tensor.requires_grad:
                self._handles.append(tensor.register_hook(self._begin_backward))

    def _begin_backward(self, _: torch.Tensor) -> None:
        if self.backward_begin is None:
            self.backward_begin = now()
        for thread in self._threads.values():
            thread.recomputing.clear()
        if torch.is_grad_enabled():
            self._with_create_graph.add(_task())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.is_counting or self._n_suspended:
            return func(*args, **kwargs)
        macs, elementwise, _ = self._formulas_of(func)
        if macs is None and elementwise is None:
            if torch.is_inference_mode_enabled() and isinstance(func, torch._ops.OpOverload):
                # In inference mode, composite operators such as `linear` are not decomposed.
                with self:
                    out = func.decompose(*args, **kwargs)
                if out is not NotImplemented:
                    return out
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        phase, path = self._place()
        if path:
            n_macs = 0 if macs is None else macs(*args, out=out, **kwargs)
            has_more = elementwise is not None and phase is not FlopsPhase.BACKWARD
            n_flops = 2 * n_macs + (elementwise(*args, out=out, **kwargs) if has_more else 0)
            self._add(phase, path, Count(n_flops, n_macs))
        return out

    def _path(self, thread: _Thread, task: int) -> _Path:
        """In forward, the running modules. In backward, the modules of the running node, followed by recomputed
        modules."""
        if task == -1:
            return tuple(counts for counts, _ in thread.path)
        node = torch._C._current_autograd_node()
        # A nested backward pass, in a thread of autograd, over a graph that this thread has made
        is_nested = bool(thread.recomputing) and task not in thread.recomputing
        made_by = thread if is_nested else self._forward_thread
        outer = () if node is None else made_by.path_of(node)
        again = tuple(counts for counts, is_again in thread.path if is_again)
        if not again:
            return outer
        at = next((i for i, counts in enumerate(outer) if counts is again[0]), len(outer))
        return outer[:at] + again

    def _place(self) -> tuple[FlopsPhase, _Path]:
        """The phase and the modules of the operator that runs."""
        thread, task = self._thread(), _task()
        path = self._path(thread, task)
        if task == -1:
            return FlopsPhase.FORWARD, path
        if any(is_again for _, is_again in thread.path):
            return FlopsPhase.RECOMPUTED, path
        # Autograd disables gradients in a backward, unless it makes a graph of the backward (create_graph). Enabled
        # gradients therefore indicate a recomputed function that is no module. A separate pass may run the function's
        # nodes.
        if torch.is_grad_enabled() and task not in self._with_create_graph:
            thread.recomputing.add(task)
            thread.note(path, torch.autograd._get_sequence_nr() - 1)  # the node of this operator exists already
            return FlopsPhase.RECOMPUTED, path
        return FlopsPhase.BACKWARD, path

    def _add(self, phase: FlopsPhase, path: _Path, count: Count) -> None:
        if count == _NOTHING:
            return
        path[-1].own[phase] = _sum(path[-1].own[phase], count)
        for counts in {*path, self.root}:
            counts.all[phase] = _sum(counts.all[phase], count)

    @contextlib.contextmanager
    def counted_as(self, count: Count) -> Iterator[None]:
        """Counts ``count`` instead of the operators within."""
        if self.is_counting and not self._n_suspended:
            phase, path = self._place()
            if path:
                self._add(phase, path, count)
        self._n_suspended += 1
        try:
            yield
        finally:
            self._n_suspended -= 1


def running_counters() -> list[FlopsCounter]:
    """The counters that this thread runs under."""
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, FlopsCounter)]
