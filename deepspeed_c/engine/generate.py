"""Generation with the weights of an engine in training: they are made whole once for all tokens.

A *lease* makes all sharded weights available while a model generates (``drivers/lease.py``). No forward gathers then,
so each rank ends when it has all of its tokens. A model that is too large for it is gathered for each token, in join
mode (``drivers/join.py``): a rank that has all of its tokens serves the others. Where experts lie on other ranks, the
ranks generate in step: a rank that has all of its tokens runs on until the others have theirs.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import update_wrapper
from types import MethodType
from typing import Any, NamedTuple

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.engine.cached_generation import KeptCache, generate_in_blocks
from deepspeed_c.engine.group_generation import GroupGeneration, generates
from deepspeed_c.engine.prompts import prompts_of
from deepspeed_c.errors import DeepSpeedCError, StateError
from deepspeed_c.zero.layout.experts import expert_ranks_of
from deepspeed_c.zero.weights.drivers.join import JoinMode
from deepspeed_c.zero.weights.drivers.lease import Lease
from deepspeed_c.zero.weights.fetch import Fetcher

__all__ = ["Generation", "GenerationCost"]

_REFUSED = -1


class GenerationCost(NamedTuple):
    """The time that calls of ``generate`` took on this rank. A call with an exception is not counted."""

    n_prompts: int = 0
    lease_s: float = 0.0
    """Seconds until weights were whole, as far as one gather made them so."""
    total_s: float = 0.0
    """Seconds of the calls, with ``lease_s``."""

    def plus(self, other: GenerationCost) -> GenerationCost:
        return GenerationCost(*map(sum, zip(self, other, strict=True)))

    def minus(self, other: GenerationCost) -> GenerationCost:
        return GenerationCost(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


class Generation:
    """Which threads generate with the model of one engine, and how long its weights stay whole.

    fetcher: returns the engine's fetcher, or None if no weights are sharded. require_ready: raises if the engine cannot
    run. check_prompts: raises if the model cannot go on from the arguments of a ``generate``. trains: returns whether
    the engine has an optimizer. group: returns the ranks that generate together; None if each rank generates alone.
    comm: all ranks of the engine.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        fetcher: Callable[[], Fetcher | None],
        require_ready: Callable[[], None],
        check_prompts: Callable[[tuple, dict[str, Any]], None],
        trains: Callable[[], bool],
        group: Callable[[], GroupGeneration | None],
        comm: Collectives,
    ) -> None:
        self._comm = comm
        self._module, self._fetcher, self._trains, self._group = module, fetcher, trains, group
        self._require_ready, self._check_prompts = require_ready, check_prompts
        self._threads: Counter[int] = Counter()  # calls that have not returned, by thread
        self.cost = GenerationCost()
        """The sum over all calls so far."""
        self.kept: KeptCache | None = None
        """The cache of an engine that only generates."""

    def keep_cache(self, most_tokens: int) -> None:
        """From now on calls use one cache, which the first of them makes for sequences of ``most_tokens`` tokens."""
        self.kept = KeptCache(most_tokens)

    def drop_cache(self) -> None:
        self.kept = None

    @property
    def group(self) -> GroupGeneration | None:
        """The ranks that generate together with this rank; None if it generates alone."""
        return self._group()

    @property
    def fetcher(self) -> Fetcher | None:
        """Of the engine's shards; None if no weights are sharded."""
        return self._fetcher()

    @property
    def is_in_step(self) -> bool:
        """Whether all ranks run the same number of forwards: each of them has experts for the tokens of others."""
        return any(expert_ranks_of(param) > 1 for param in self._module.parameters())

    @property
    def is_running(self) -> bool:
        return bool(self._threads)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of code that generates, with a lease or without."""
        thread = threading.get_ident()
        self._threads[thread] += 1
        try:
            yield
        finally:
            self._threads[thread] -= 1
            if not self._threads[thread]:
                del self._threads[thread]

    @contextmanager
    def run(self, args: tuple, kwargs: dict[str, Any], check: Callable[[], None] | None = None) -> Iterator[bool]:
        """Context of one call of ``generate`` with these arguments. Yields whether ranks may run different numbers of
        forwards within it. It may be nested; prompts are checked in the outermost call. check: raises for further
        reasons of the caller.

        Raises StateError in training mode with gradients enabled, and for prompts that the engine refuses, before a
        gather. Ranks that would wait for a rank that has raised get a StateError; in join mode it serves them first.
        Where ranks generate in step, a rank without prompts is a StateError on all of them.
        """
        is_outermost = threading.get_ident() not in self._threads
        fetcher, group = self._fetcher(), self._group()
        joins = group is None and fetcher is not None and not fetcher.drivers.of(Lease).can_begin
        in_step = is_outermost and self.is_in_step

        def check_prompts() -> None:
            if check is not None:
                check()
            self._check_prompts(args, kwargs)

        try:
            self._check(check_prompts if is_outermost and (in_step or not joins) else None)
        except DeepSpeedCError as error:
            if in_step:
                self._gather_prompts(_REFUSED)
            elif is_outermost:
                self._refuse(error, fetcher, group)
            raise
        if in_step:
            self._agree_to_step(args, kwargs)
        began = time.perf_counter()
        try:
            with self.running(), fetcher.drivers.of(JoinMode).running() if joins else nullcontext():
                if joins and is_outermost:
                    check_prompts()
                taken_s = 0.0 if group is None else group.taken_s
                may_differ = group is not None or fetcher is None or _gathers_nothing_alone(fetcher)
                lease_s = time.perf_counter() - began
                yield may_differ
                if group is not None:
                    lease_s = group.taken_s - taken_s
        except BaseException:
            with suppress(StateError):  # of written weights; the exception itself says more
                self._end_call(fetcher)
            raise
        self._end_call(fetcher)
        if is_outermost:
            prompts = prompts_of(args, kwargs)
            n_prompts = len(prompts) if torch.is_tensor(prompts) and prompts.ndim else 0
            self.cost = self.cost.plus(GenerationCost(n_prompts, lease_s, time.perf_counter() - began))

    def _gather_prompts(self, n_prompts: int) -> list[int]:
        """The number of prompts of each rank, or ``_REFUSED``. Collective over all ranks of the engine."""
        return [int(n) for n in self._comm.gather_numbers(n_prompts, label="prompts")]

    def _agree_to_step(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Raises StateError, on all ranks, if a rank runs no forward: the experts of the others would wait for it."""
        prompts = prompts_of(args, kwargs)
        n_prompts = len(prompts) if torch.is_tensor(prompts) and prompts.ndim else 1
        everyone = self._gather_prompts(n_prompts)
        for rank, n in zip(self._comm.global_ranks, everyone, strict=True):
            if n <= 0:
                raise StateError(
                    f"rank {rank} has {'refused its prompts' if n == _REFUSED else 'no prompts'}, and experts lie on all"
                    " ranks: each of them runs each forward",
                    where="generate",
                    fix="mend the call of that rank" if n == _REFUSED else "give each rank a prompt",
                )

    @staticmethod
    def _refuse(error: DeepSpeedCError, fetcher: Fetcher | None, group: GroupGeneration | None) -> None:
        """Tells the ranks that wait for this rank that it does not generate."""
        if group is not None:
            group.refuse(error, fetcher)
        elif fetcher is not None:
            fetcher.drivers.of(Lease).refuse()

    def _check(self, check_prompts: Callable[[], None] | None) -> None:
        self._require_ready()
        if self._module.training and torch.is_grad_enabled():
            raise StateError(
                "the model is in training mode, and gradients are enabled",
                where="generate",
                fix="call engine.eval() before and engine.train() afterwards; to generate with dropout: torch.no_grad()",
            )
        if check_prompts is not None:
            check_prompts()

    def _end_call(self, fetcher: Fetcher | None) -> None:
        """Ends the lease with the outermost call, or leaves it until training goes on.

        In joint memory a lease costs nothing, and as nobody sees it begin, other ranks may not know of it: it must be
        over before the next forward of all ranks. A lease that has gathered is known to all ranks, and it stays, also
        after an exception: otherwise a rank that catches its exception would be alone in the next gather.
        """
        if self.is_running:
            return
        if fetcher is None or not fetcher.is_collective or self._module.training or not self._trains():
            self._let_weights_go()

    def _let_weights_go(self) -> None:
        if (group := self._group()) is not None:
            group.drop()
        if (fetcher := self._fetcher()) is not None:
            fetcher.drivers.of(Lease).end()

    def end(self, what: str) -> None:
        """Ends the lease, if there is one, because weights are about to change. ``what``: the engine's method.

        Raises StateError if another thread generates, and on a rank that has written to leased weights.
        """
        if any(thread != threading.get_ident() for thread in list(self._threads)):
            raise StateError(
                "another thread generates with the engine's weights",
                where=f"engine.{what}",
                fix="wait until its generate has returned",
            )
        self._let_weights_go()

    def watch(self, model: torch.nn.Module) -> Callable[[], None]:
        """From now on each ``generate`` of a model of transformers, and of its wrappers, runs within ``run``. Returns
        the function that undoes it."""
        models = [module for module in model.modules() if generates(module)]
        before = [(vars(module), vars(module).get("generate")) for module in models]
        for module in models:
            vars(module)["generate"] = _LeasedGenerate(self, module, module.generate)

        def undo() -> None:
            for attributes, generate in before:
                if generate is None:
                    attributes.pop("generate", None)
                else:
                    attributes["generate"] = generate

        return undo


def _gathers_nothing_alone(fetcher: Fetcher) -> bool:
    """Begins a lease if there can be one. Returns whether each rank may run its own number of forwards."""
    return fetcher.drivers.of(Lease).begin() or fetcher.drivers.of(JoinMode).is_running


class _LeasedGenerate:
    """``generate`` of one model, with a lease. A copy of the model gets the ``generate`` of its class."""

    def __init__(self, generation: Generation, model: torch.nn.Module, generate: Callable[..., Any]) -> None:
        update_wrapper(self, generate)
        self._generation, self._model, self._generate = generation, model, generate
        names = list(inspect.signature(generate).parameters)
        self._place_of_sync = names.index("synced_gpus") if "synced_gpus" in names else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._generation.run(args, kwargs) as may_differ:
            if (group := self._generation.group) is not None:
                return group.generate(self._model, args, kwargs, self._generation.fetcher)
            prompts = prompts_of(args, kwargs)
            if torch.is_tensor(prompts) and prompts.ndim and len(prompts) == 0:
                return prompts  # of a rank without prompts, with which models cannot run
            in_step = self._generation.is_in_step
            if (in_step or may_differ) and self._place_of_sync is not None:
                # Transformers has the ranks wait for one another at each token, or not.
                place = self._place_of_sync
                if place < len(args):
                    args = (*args[:place], in_step, *args[place + 1 :])
                else:
                    kwargs["synced_gpus"] = in_step
            if in_step:
                # A rank that has all of its tokens goes on writing keys, for which blocks would have no room.
                return self._generate(*args, **kwargs)
            return generate_in_blocks(self._model, self._generate, args, kwargs, self._generation.kept)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _own_generate(memo.get(id(self._model), self._model))

    def __reduce__(self) -> Any:
        return _own_generate, (self._model,)


def _own_generate(model: torch.nn.Module) -> Callable[..., Any]:
    return MethodType(type(model).generate, model)
