"""``engine.compile`` and what belongs to it: a part of every engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from deepspeed_c.comm.groups import get_rank
from deepspeed_c.compile.schedule import Schedule, register_compile_pass
from deepspeed_c.config import Config
from deepspeed_c.config.nearest import nearest
from deepspeed_c.errors import ConfigError, FeatureError
from deepspeed_c.inject.swap import swap_forward
from deepspeed_c.logging import logger
from deepspeed_c.moe.auto import RoutedExperts
from deepspeed_c.zero.gradients.reducer import GradientReducer
from deepspeed_c.zero.weights.fetch import Fetcher

if TYPE_CHECKING:
    from deepspeed_c.compile.backend import GraphBackend
    from deepspeed_c.compile.passes.contract import PassContract
    from deepspeed_c.compile.report import CompileReport
    from deepspeed_c.engine.backward import BackwardPass
    from deepspeed_c.engine.compiled import CompiledBackward, CompiledModel

__all__ = ["Compiling"]

# Collectives are written down before they run, and ``inject.ranks`` finds an input that it has seen by its identity.
# ``inject.draws`` sets the states of generators, which a graph does not.
_UNTRACED = ("deepspeed_c.comm", "deepspeed_c.inject.ranks", "deepspeed_c.inject.draws", "deepspeed_c.inject.overlap")


class Compiling:
    """Compiles the module of an engine, and its backward passes."""

    _config: Config
    _fetcher: Fetcher | None
    module: torch.nn.Module

    def __init__(self) -> None:
        super().__init__()
        self._is_compiled = False
        self._compiled: CompiledModel | None = None
        self._compiled_backward: CompiledBackward | None = None
        self._eager_experts: list[Callable[[], None]] = []

    def compile(
        self,
        backend: str = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compiles the module in place with ``torch.compile``.

        With ``"compile": {"deepcompile": true}`` at stages 1 to 3, gathers of weights and reductions of gradients
        become operators inside the compiled graphs. backend: "inductor", or "aot_eager" and "eager", which run each
        operator of a graph as it is. compile_kwargs: further arguments of ``torch.compile``.

        schedule: which passes edit the graphs from which step on, as ``[(0, ["zero3_compile"]), (5, [...])]``; None for
        the stage's own pass. Without deepcompile it is not used. A second call changes nothing.

        compiled_autograd_enabled: whether the passes of ``engine.backward`` are traced and compiled as they run, at
        stages 0 to 2. With deepcompile it is not used: the backward is compiled already.

        Raises ConfigError for a backend that is not known or cannot take edited graphs, for a C++ compiler that is
        missing, for arguments that ``torch.compile`` does not have and for a malformed schedule; PassContractError for
        a schedule that breaks the contract of a pass; FeatureError for compiled autograd at stage 3 without
        deepcompile, and for tensor parallelism with ``tp_overlap_comm`` or ``sequence_parallel_norms``. Nothing is
        changed then.
        """
        if self._is_compiled:
            logger.info("engine.compile: the module is compiled already, and stays as it is")
            return
        options = _checked_options(compile_kwargs or {})
        is_deep = self._config.compile.deepcompile and self._config.zero.sharding.optimizer
        passes = self._backward_passes(is_deep) if compiled_autograd_enabled else None
        if is_deep:
            self.get_deepcompile_backend(backend, options, schedule)
            options.pop("options", None)
            try:
                self._compiled.compile(**options)
            except BaseException:
                self._uncompile()
                raise
        else:
            if schedule:
                logger.warning(
                    'schedule is not used: it needs "compile": {"deepcompile": true} and ZeRO from stage 1 on'
                )
            _check_backend(backend, torch.compiler.list_backends(exclude_tags=()))
            self._prepare_compiler()
            self.module.compile(backend=backend, **options)
        if passes is not None:
            self._compiled_backward = _compiled().CompiledBackward(
                self._graph_reducer(), passes, backend=backend, **options
            )
        self._is_compiled = True

    def _prepare_compiler(self) -> None:
        """Raises FeatureError for settings with which graphs would be wrong."""
        section = self._config.tensor_parallel
        for key in ("tp_overlap_comm", "sequence_parallel_norms"):
            if max(section.autotp_size, section.tp.tp_size) > 1 and getattr(section, key):
                raise FeatureError(
                    "layers that are cut this way hand on what they have begun by the identity of tensors, which a"
                    " compiler does not keep",
                    where=f"engine.compile with tensor_parallel.{key}",
                    fix=f"set tensor_parallel.{key} to false, or do not compile",
                )
        _leave_collectives_alone()
        if self._config.compile.autoep_non_moe and not self._eager_experts:
            self._eager_experts = [
                swap_forward(module, torch.compiler.disable(module.forward, reason="compile.autoep_non_moe"))
                for module in self.module.modules()
                if isinstance(module, RoutedExperts)
            ]
            if not self._eager_experts:
                logger.warning("compile.autoep_non_moe has no effect: expert_parallel has spread no experts")

    def _backward_passes(self, is_deep: bool) -> BackwardPass | None:
        """The passes to compile. None if compiled autograd has nothing to do, which is logged. Raises FeatureError."""
        if is_deep:
            logger.warning("compiled_autograd_enabled is not used: with deepcompile the backward is compiled already")
        elif self._config.zero.sharding.parameters:
            raise FeatureError(
                "compiled autograd does not work at stage 3: hooks gather weights within a backward pass",
                where="engine.compile(compiled_autograd_enabled=True)",
                fix='set "compile": {"deepcompile": true}, which compiles the backward with its gathers',
            )
        elif (passes := self._graph_passes()) is None:
            logger.warning("compiled_autograd_enabled is not used: the model is not trained")
        else:
            return passes
        return None

    def get_deepcompile_backend(
        self, backend: str = "inductor", compile_kwargs: dict[str, Any] | None = None, schedule: Any = None
    ) -> GraphBackend | None:
        """The backend by which ``torch.compile`` makes graphs with this engine's gathers and reductions in them; None
        at stage 0. The arguments and errors are those of ``compile``. From the first call on the engine's hooks expect
        such graphs, and further calls return the same backend.
        """
        if not self._config.zero.sharding.optimizer:
            logger.info("deepcompile begins at stage 1 of ZeRO: the model is compiled as it is")
            return None
        if self._compiled is None:
            _check_backend(
                backend, _torch_internals().BACKENDS, "cannot take graphs with gathers and reductions in them"
            )
            self._prepare_compiler()
            log = Path(f"compiled_graphs/rank{get_rank()}") if self._config.compile.debug_log else None
            self._compiled = _compiled().CompiledModel(
                self.module,
                self._fetcher,
                self._graph_reducer(),
                self._graph_step,
                self._config.compile,
                backend,
                (compile_kwargs or {}).get("options"),
                Schedule(schedule, self._config.zero.stage),
                log,
            )
        return self._compiled.backend

    def get_deepspeed_compile_backend(
        self, backend: str = "inductor", compile_kwargs: dict[str, Any] | None = None, schedule: Any = None
    ) -> tuple[GraphBackend | None, Any]:
        """(``get_deepcompile_backend``, the schedule)"""
        return self.get_deepcompile_backend(backend, compile_kwargs, schedule), schedule

    def register_compile_pass(
        self, pass_name: str, pass_fn: Callable[..., Any], contract: PassContract | None = None
    ) -> None:
        """Makes a pass known by a name, for the schedule of ``compile``. See docs/adding/compile-pass.md.

        Raises ConfigError if ``pass_fn`` cannot be called, or if the name is that of a pass of ZeRO.
        """
        register_compile_pass(pass_name, pass_fn, contract)

    def get_compile_time(self) -> list[tuple[str, int, int, float]]:
        """The time of the passes over compiled graphs so far: ("fwd" or "bwd", number among all edited graphs, number
        of the frame, seconds). Empty without deepcompile.
        """
        return [] if self._compiled is None else self._compiled.backend.times

    def get_compile_report(self) -> CompileReport | None:
        """What became of the compiled model so far, on this rank: its frames, what each pass has changed in their
        graphs, what stays eager and why, and what was compiled again. As text, it is what ``deepspeed_c compile show``
        prints. None without deepcompile.
        """
        return None if self._compiled is None else self._compiled.backend.report

    def _begin_graphs(self) -> None:
        """Called before the module runs forward."""
        if self._compiled is not None:
            self._compiled.begin_forward()

    @property
    def is_compiled(self) -> bool:
        return self._is_compiled

    def _graph_step(self) -> int:
        """The step by which the schedule of passes goes; always 0 for a model that is not trained."""
        return 0

    def _graph_reducer(self) -> GradientReducer | None:
        """The reducer that takes gradients from compiled graphs; None for a model that is not trained."""
        return None

    def _graph_passes(self) -> BackwardPass | None:
        """The backward passes that may be compiled; None for a model that is not trained."""
        return None

    def _uncompile(self) -> None:
        """Gives the module its own forward back, before its edits are undone."""
        for compiled in (self._compiled_backward, self._compiled):
            if compiled is not None:
                compiled.close()
                self._is_compiled = False
        while self._eager_experts:
            self._eager_experts.pop()()
        self._compiled = self._compiled_backward = None


# Importing torch's compiler takes seconds, so these modules are imported when a model is compiled.


def _compiled() -> ModuleType:
    from deepspeed_c.engine import compiled

    return compiled


def _torch_internals() -> ModuleType:
    from deepspeed_c.compile import torch_internals

    return torch_internals


@lru_cache(maxsize=1)
def _leave_collectives_alone() -> None:
    _torch_internals().leave_modules_alone(*_UNTRACED)


def _checked_options(compile_kwargs: dict[str, Any]) -> dict[str, Any]:
    """A copy of arguments for ``torch.compile``. Raises ConfigError for one that it does not have."""
    options = dict(compile_kwargs)
    if options.pop("backend", None) is not None:
        logger.warning("the backend in compile_kwargs is not used: pass engine.compile(backend=...)")
    known = set(inspect.signature(torch.compile).parameters) - {"model", "backend"}
    for name in options:
        if name not in known:
            close = nearest(str(name), known) or sorted(known)
            raise ConfigError(
                f"torch.compile has no argument {name!r}",
                where="engine.compile(compile_kwargs=...)",
                fix=f"did you mean {' or '.join(map(repr, close))}?",
            )
    return options


def _check_backend(backend: Any, known: Collection[str], otherwise: str = "is not known to torch") -> None:
    """Raises ConfigError for a name that is not in ``known``, and for Inductor without a C++ compiler."""
    if isinstance(backend, str) and backend not in known:
        raise ConfigError(
            f"the backend {backend!r} {otherwise}",
            where="engine.compile(backend=...)",
            fix=f"pass {' or '.join(map(repr, nearest(backend, known) or sorted(known)))}",
        )
    if not _torch_internals().has_compiler(backend):
        raise ConfigError(
            "Inductor finds no C++ compiler",
            where='engine.compile(backend="inductor")',
            fix='install one (Debian: g++), or name it in the environment variable CXX; or pass backend="aot_eager"',
        )
