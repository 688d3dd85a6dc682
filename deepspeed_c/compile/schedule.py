"""Which passes edit the compiled graphs from which step on: passes by name, and the check of a whole schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from deepspeed_c.compile.passes.contract import CAP_Z3_GATHER_RELEASE, PassContract, PassContractError
from deepspeed_c.config.nearest import nearest
from deepspeed_c.errors import ConfigError

__all__ = ["CompilePass", "Schedule", "register_compile_pass"]

_SCHEDULE = "engine.compile(schedule=...)"


class CompilePass(NamedTuple):
    """A pass under its name. ``edit`` is None for the passes of ZeRO, which the backend has itself."""

    name: str
    edit: Callable[..., Any] | None
    contract: PassContract


def _of_stage(stage: int, provides: frozenset[str] = frozenset()) -> CompilePass:
    return CompilePass(f"zero{stage}_compile", None, PassContract(provides=provides))


ZERO_PASSES = {1: _of_stage(1), 2: _of_stage(2), 3: _of_stage(3, frozenset({CAP_Z3_GATHER_RELEASE}))}
"""By stage of ZeRO: the pass that puts its gathers and reductions into a graph."""
_passes = {pass_.name: pass_ for pass_ in ZERO_PASSES.values()}


def register_compile_pass(name: str, opt_pass_fn: Callable[..., Any], contract: PassContract | None = None) -> None:
    """Makes a pass known to all engines of the process, so that a schedule can name it. A pass of the same name is
    replaced, with its contract. docs/adding/compile-pass.md has the arguments of ``opt_pass_fn``.

    Raises ConfigError if it cannot be called, or if the name is that of a pass of ZeRO.
    """
    if any(name == pass_.name for pass_ in ZERO_PASSES.values()):
        raise ConfigError(
            f"{name!r} is the name of a pass of ZeRO", where="register_compile_pass", fix="choose another name"
        )
    if not isinstance(name, str) or not callable(opt_pass_fn):
        raise ConfigError(
            f"a pass is a name and a function, not {name!r} and {opt_pass_fn!r}",
            where="register_compile_pass",
            fix='call register_compile_pass("name", function, contract)',
        )
    _passes[name] = CompilePass(name, opt_pass_fn, contract or PassContract())


class Schedule:
    """The passes that edit graphs, from step to step.

    schedule: pairs of a step of the optimizer and a list of passes, each by its name or as a function; None for the
    stage's own pass from the beginning. From a step on, its passes edit the traced graphs anew. Before the first step
    of a schedule the stage's own pass runs.

    Raises ConfigError for a malformed schedule, an unknown pass and a pass of another stage, and PassContractError for
    a step that breaks a contract.
    """

    def __init__(self, schedule: Sequence[tuple[int, Sequence[Any]]] | None, stage: int) -> None:
        entries = [] if schedule is None else _entries(schedule)
        own = ZERO_PASSES[stage]
        self._steps: list[tuple[int, tuple[CompilePass, ...]]] = []
        for step, names in entries:
            passes = tuple(map(_find, names))
            _check(step, passes, own)
            self._steps.append((step, passes))
        if not self._steps or self._steps[0][0] > 0:
            self._steps.insert(0, (0, (own,)))

    def at(self, step: int) -> tuple[CompilePass, ...]:
        """The passes of ``step``: the same object until the schedule changes them."""
        return next(passes for first, passes in reversed(self._steps) if first <= step)


def _entries(schedule: Any) -> list[tuple[int, Sequence[Any]]]:
    fix = 'pass a list like [(0, ["zero3_compile"]), (5, ["zero3_compile", "mine"])]'
    if not isinstance(schedule, (list, tuple)):
        raise ConfigError(f"a schedule is a list, not {schedule!r}", where=_SCHEDULE, fix=fix)
    last = -1
    for entry in schedule:
        is_pair = isinstance(entry, (list, tuple)) and len(entry) == 2 and isinstance(entry[1], (list, tuple))
        if not is_pair or type(entry[0]) is not int:
            raise ConfigError(f"{entry!r} is not a step and a list of passes", where=_SCHEDULE, fix=fix)
        if entry[0] <= last:
            what = f"step {entry[0]} comes after step {last}" if last >= 0 else f"step {entry[0]} is negative"
            raise ConfigError(what, where=_SCHEDULE, fix="let the steps rise from 0 on")
        last = entry[0]
    return list(schedule)


def _find(asked: Any) -> CompilePass:
    if isinstance(asked, str):
        if asked not in _passes:
            close = nearest(asked, _passes)
            raise ConfigError(
                f"no pass {asked!r} is registered",
                where=_SCHEDULE,
                fix=f"did you mean {' or '.join(map(repr, close))}?"
                if close
                else "call engine.register_compile_pass first",
            )
        return _passes[asked]
    if not callable(asked):
        raise ConfigError(f"{asked!r} is not a pass", where=_SCHEDULE, fix="name a registered pass, or give a function")
    found = [pass_ for pass_ in _passes.values() if pass_.edit is asked]
    if len(found) > 1:
        names = ", ".join(sorted(pass_.name for pass_ in found))
        raise PassContractError(
            f"a function is registered under several names: {names}", where=_SCHEDULE, fix="name the pass that is meant"
        )
    return found[0] if found else CompilePass(getattr(asked, "__name__", repr(asked)), asked, PassContract())


def _check(step: int, passes: Sequence[CompilePass], own: CompilePass) -> None:
    """Raises unless the passes of a step fit the stage and one another."""
    where = f"{_SCHEDULE}, step {step}"
    provided: set[str] = set()
    before: list[CompilePass] = []
    for pass_ in passes:
        if pass_ in ZERO_PASSES.values() and pass_ is not own:
            raise ConfigError(
                f"the pass {pass_.name!r} is of another stage of ZeRO",
                where=where,
                fix=f"schedule {own.name!r} instead",
            )
        missing = sorted(pass_.contract.requires - provided)
        if missing:
            raise PassContractError(
                f"the pass {pass_.name!r} requires {', '.join(missing)}, which no pass before it provides",
                where=where,
                fix="schedule a pass that provides it first",
            )
        for other in before:
            if other.name in pass_.contract.conflicts_with or pass_.name in other.contract.conflicts_with:
                raise PassContractError(
                    f"the passes {other.name!r} and {pass_.name!r} conflict", where=where, fix="schedule one of them"
                )
        if pass_ in before:
            raise ConfigError(f"the pass {pass_.name!r} is there twice", where=where, fix="schedule it once")
        provided |= pass_.contract.provides
        before.append(pass_)
    if own is ZERO_PASSES[3] and own not in before:
        raise PassContractError(
            f"without {own.name!r} the graphs would read weights that are not gathered",
            where=where,
            fix=f"add {own.name!r}",
        )
