"""Hooks that announce to a fetcher which module is about to run, and dictionaries that notice reads of parameters
without such an announcement."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from deepspeed_c.zero.layout.leaf import is_leaf, mark_parameters
from deepspeed_c.zero.weights.drivers.forwards import Forward
from deepspeed_c.zero.weights.drivers.graphs import Graphs
from deepspeed_c.zero.weights.drivers.recorded import RecordedPlan
from deepspeed_c.zero.weights.fetch import Fetcher
from deepspeed_c.zero.weights.gather_unit import GatherUnit, PlacedShard
from deepspeed_c.zero.weights.param import is_released, state_of

__all__ = ["OUTSIDE_OF_GRAPHS", "ModuleHooks", "ParamCoordinator", "external_parameters"]

_EXTERNAL = "_dsc_external_parameters"
_DS_EXTERNAL = "ds_external_parameters"

# Number of registrations of modules and parameters in modules that have an engine. When it has changed, the hooks look
# for new modules.
_n_registrations = 0


def _count_registration(module: torch.nn.Module, *_: Any) -> None:
    # Registrations elsewhere add nothing to a model yet. Models of transformers make them in each forward, which runs
    # through a slice of the list of layers: a slice is a new list, in which the layers are registered.
    global _n_registrations
    if _DS_EXTERNAL in module.__dict__:
        _n_registrations += 1


def external_parameters(module: torch.nn.Module) -> dict[int, torch.nn.Parameter]:
    """Parameters by id that ``module`` reads although they belong to another module (``register_external_parameter``)."""
    return module.__dict__.setdefault(_EXTERNAL, {})


def _named_external_parameters(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(state_of(param).name, param) for param in external_parameters(module).values() if state_of(param)]


def _outside_of_graphs(hook: Callable) -> Callable:
    """Keeps ``torch.compile`` from tracing into the hook, if it is in use."""
    dynamo = sys.modules.get("torch._dynamo")
    return hook if dynamo is None else dynamo.disable(hook)


def _only_outside_of_graphs(hook: Callable) -> Callable:
    """A hook that does nothing while ``torch.compile`` traces it: the graph gathers by itself."""
    hook = _outside_of_graphs(hook)

    def outside(*args: Any) -> None:
        if not torch.compiler.is_compiling():
            hook(*args)

    return outside


class _Parameters(dict):
    """Replaces a module's ``_parameters`` and gathers a released parameter when it is read while the engine runs. This
    serves reads that no hook announces: tied weights, a parent that uses its child's weight, a functional call.
    Iterating (``named_parameters``) gathers nothing."""

    def __init__(self, params: Mapping[str, Any], fetcher: Fetcher) -> None:
        super().__init__(params)
        self.fetcher = fetcher
        self.use = _outside_of_graphs(fetcher.use)

    def __getitem__(self, name: str) -> Any:
        param = dict.__getitem__(self, name)
        if is_released(param) or (self.fetcher.phase.hollows and not torch.compiler.is_compiling()):
            state = state_of(param)
            if type(state) is PlacedShard and self.fetcher.phase.is_active:
                self.use(state.group)
        return param

    def __reduce_ex__(self, protocol: int) -> Any:
        return dict, (dict(self),)


OUTSIDE_OF_GRAPHS = (_only_outside_of_graphs(print).__code__, _Parameters.__getitem__.__code__)
"""Code that ``torch.compile`` may trace as a part of a graph, and must not compile by itself: it would take itself for
a part of a graph then."""


class ParamCoordinator:
    """Access to the plans of gathers under DeepSpeed's names. trl uses it to invalidate the recorded order of use after
    generation."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._plan = fetcher.drivers.of(RecordedPlan)

    def is_invalid_trace(self) -> bool:
        """Whether no pass has been recorded yet, or no pass since ``_invalidate_trace``."""
        return not self._plan.has_learnt

    def _invalidate_trace(self) -> None:
        """Discards the recorded order of use; the next passes record it again. Call it on all ranks."""
        self._plan.learn_anew()


class ModuleHooks:
    """Hooks of one engine on its module, and on submodules that are called outside of the module's forward.

    roots: the module, followed by submodules that are called outside of its forward, such as the chunks of an
    interleaved pipeline. A forward of a root is a pass unless it runs within another root's forward. Each root has
    plans of its own. If any other submodule is called outside of a root's forward, its parameters are gathered without
    a plan.
    """

    def __init__(self, roots: Sequence[torch.nn.Module], fetcher: Fetcher, name_of_pass: Callable[[], str]) -> None:
        self._roots, self._fetcher, self._name_of_pass = list(roots), fetcher, name_of_pass
        self.module = self._roots[0]
        self.param_coordinator = ParamCoordinator(fetcher)
        # These have DeepSpeed's names and are lists, because callers use them to remove the hooks.
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self._watched: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._depth = 0
        self._saving: Any = None
        self._failing: BaseException | None = None
        self._counters: list[Any] = []
        self._is_compiled = False
        fetcher.connect_hooks(self)
        self.install()

    def install(self) -> None:
        """Installs hooks on the roots and on every module that reads a sharded parameter. It may be called again after
        ``remove``, or after callers have removed the hooks.

        Without sharded parameters (one rank, or only small parameters) no hooks are needed.
        """
        for module in self.module.modules():
            self._mark(module)
        if not self._fetcher.groups:
            return
        for counter in self._counters:
            counter.remove()
        self._watched.clear()
        self._depth = 0
        self._counters = [
            torch.nn.modules.module.register_module_module_registration_hook(_count_registration),
            torch.nn.modules.module.register_module_parameter_registration_hook(_count_registration),
        ]
        self._scan()
        # A root's own parameters are a part of its pass: the hook that begins it comes before those that ``_scan`` has
        # put on the root.
        for i, root in enumerate(self._roots):
            self._hook_root(i, root)

    @staticmethod
    def _mark(module: torch.nn.Module) -> None:
        """Marks a module of the engine with a function of DeepSpeed's name, for which trl looks."""
        module.__dict__[_DS_EXTERNAL] = partial(_named_external_parameters, module)

    _register_deepspeed_module = lambda self, module, *_: self.install() if not self.forward_hooks else self._scan()

    def _scan(self) -> None:
        """Calls ``watch`` for modules that were attached to the model since the last scan."""
        self._n_registrations = _n_registrations
        skipped: set[torch.nn.Module] = set()
        for module in self.module.modules():
            self._mark(module)
            if module in skipped:
                continue
            if is_leaf(module):
                skipped.update(m for m in module.modules() if m is not module)
                mark_parameters(module)
            if module not in self._watched:
                self.watch(module)

    def watch(self, module: torch.nn.Module) -> None:
        """Installs hooks on ``module`` if it reads sharded parameters: its own, external parameters or, for a leaf, the
        parameters of its subtree."""
        leaf = is_leaf(module)
        sources = [m for m in (module.modules() if leaf else [module])]
        groups: dict[int, GatherUnit] = {}
        for source in sources:
            found = False
            for param in (*source._parameters.values(), *external_parameters(source).values()):
                state = state_of(param)
                if type(state) is PlacedShard and state.fetcher is self._fetcher:
                    groups[state.group.index] = state.group
                    found = True
            if found and type(source._parameters) is not _Parameters:
                source._parameters = _Parameters(source._parameters, self._fetcher)
        if not groups:
            return
        self._watched.add(module)
        wanted = [groups[i] for i in sorted(groups)]
        # A unit must be held if other units may be used while the module runs, because the plan could otherwise release
        # the unit while the module still reads it.
        if leaf or len(wanted) > 1 or any(True for _ in module.children()):
            self._hook_holding(module, wanted, leaf)
        else:
            self._hook_using(module, wanted[0])

    def _hook_using(self, module: torch.nn.Module, group: GatherUnit) -> None:
        fetcher = self._fetcher
        use = _outside_of_graphs(lambda: fetcher.use(group))

        def enter(*_: Any) -> None:
            # Small modules often share a unit, and all but the first find it in use. A compiler that traces this hook
            # sees only the call of ``use`` and does not trace into it.
            if torch.compiler.is_dynamo_compiling() or not fetcher.is_in_use(group):
                use()

        if self._is_compiled:
            enter = _only_outside_of_graphs(enter)

        self.forward_hooks.append(module.register_forward_pre_hook(enter, prepend=True))

    def _hook_holding(self, module: torch.nn.Module, groups: Sequence[GatherUnit], leaf: bool) -> None:
        fetcher = self._fetcher

        def enter(*_: Any) -> None:
            for group in groups:
                fetcher.use(group)
                fetcher.hold(group)

        def leave(_: torch.nn.Module, args: Any, output: Any) -> None:
            for group in groups:
                fetcher.unhold(group)
            if leaf:
                fetcher.drivers.of(RecordedPlan).hold_in_backward(groups, _in_graph(args), _in_graph(output))

        keep_out = _only_outside_of_graphs if self._is_compiled else _outside_of_graphs
        self.forward_hooks += [
            module.register_forward_pre_hook(keep_out(enter), prepend=True),
            module.register_forward_hook(keep_out(leave), always_call=True),
        ]

    def _hook_root(self, i: int, root: torch.nn.Module) -> None:
        def enter(*_: Any) -> None:
            self._enter_root(i)

        self.forward_hooks += [
            root.register_forward_pre_hook(_outside_of_graphs(enter), prepend=True),
            root.register_forward_hook(_outside_of_graphs(self._leave_root), always_call=True),
        ]

    def _units_of(self, root: torch.nn.Module) -> list[int]:
        states = [state_of(param) for param in root.parameters()]
        return sorted({s.group.index for s in states if type(s) is PlacedShard and s.fetcher is self._fetcher})

    def _enter_root(self, i: int) -> None:
        self._depth += 1
        fetcher = self._fetcher
        if self._depth > 1 or fetcher.phase.is_in_backward:
            return
        if self._n_registrations != _n_registrations:
            self._scan()
        self._failing = sys.exc_info()[1]
        units = partial(self._units_of, self._roots[i]) if i else None
        forward = fetcher.driver.begin_forward(self._name_of_pass(), i, units)
        if torch.is_grad_enabled():
            self._saving = fetcher.saved.hooks_of(forward, Forward.enter)
            self._saving.__enter__()

    def _leave_root(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        if self._saving is not None:
            self._saving.__exit__(None, None, None)
            self._saving = None
        if self._fetcher.phase.is_in_backward:
            return
        # The hook is called even if forward has raised.
        if sys.exc_info()[1] is not self._failing:
            self._fetcher.driver.abort()
        elif self._fetcher.phase.is_active:  # not so in a forward within a lease
            self._fetcher.driver.end_forward(_in_graph(output))
        self._failing = None

    def compile(self, is_compiled: bool) -> None:
        """Sets whether graphs of ``torch.compile`` gather by themselves. Then hooks gather only for modules that run
        outside of a graph."""
        self.remove()
        self._is_compiled = is_compiled
        self._fetcher.drivers.of(Graphs).compile(is_compiled)
        self.install()

    def remove(self) -> None:
        """Removes all hooks and gives modules their ordinary dictionaries back."""
        for handle in (*self.forward_hooks, *self.backward_hooks, *self._counters):
            handle.remove()
        self.forward_hooks.clear()
        self.backward_hooks.clear()
        self._counters.clear()
        self._watched.clear()
        self._depth = 0
        for module in self.module.modules():
            module.__dict__.pop(_DS_EXTERNAL, None)
            if type(module._parameters) is _Parameters and module._parameters.fetcher is self._fetcher:
                module._parameters = dict(module._parameters)

    @contextmanager
    def removed(self) -> Iterator[None]:
        self.remove()
        try:
            yield
        finally:
            self.install()


def _in_graph(value: Any) -> list[torch.Tensor]:
    return [v for v in tree_flatten(value)[0] if torch.is_tensor(v) and v.requires_grad]
