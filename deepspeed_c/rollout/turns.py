"""Several engines that take turns in memory, as actor, critic, reference and reward of a reinforcement learner do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, NamedTuple

from deepspeed_c.errors import ConfigError
from deepspeed_c.quantity import as_binary

__all__ = ["MemoryTurns", "TurnCost"]


class TurnCost(NamedTuple):
    """The bytes of one turn on this rank."""

    names: tuple[str, ...]
    resident: int
    """States and sharded weights in memory, of all engines."""
    lease: int
    """Memory for the whole weights of the engines of the turn: the most that a generation adds."""
    moved: int
    """Bytes that come back and go away when the turn begins."""

    @property
    def total(self) -> int:
        return self.resident + self.lease


class MemoryTurns:
    """Keeps the states of some engines in memory while they work, and those of the others away (``offload_states``).

    ```python
    turns = MemoryTurns({"actor": actor, "critic": critic, "reference": reference, "reward": reward})
    with turns.of("actor"):
        batch = rollout.generate(request, sampling)
    with turns.of("reference", "reward"):
        ...
    ```

    engines: by name. device: where states wait, "cpu" or "nvme", as in ``offload_states``. Weights that are whole on
    each rank (stages 0 to 2) stay in memory. A turn moves what it needs only: engines that are away already stay away,
    and the engines of the last turn stay in memory until another one begins. All ranks take the same turns.

    Raises ConfigError for one engine under two names.
    """

    def __init__(self, engines: Mapping[str, Any], *, device: str = "cpu") -> None:
        self._engines, self._device = dict(engines), device
        names: dict[int, str] = {}
        for name, engine in self._engines.items():
            other = names.setdefault(id(engine), name)
            if other != name:
                raise ConfigError(
                    f"{name} and {other} are one engine", where="MemoryTurns", fix="name each engine once"
                )

    @contextmanager
    def of(self, *names: str) -> Iterator[None]:
        """The context in which these engines can run, and the others cannot.

        Raises ConfigError for unknown names, and the errors of ``offload_states`` and ``reload_states``.
        """
        self._check(names)
        for name, engine in self._engines.items():
            if name not in names and not engine.kinds_away:
                engine.offload_states(device=self._device)
        for name in names:
            if self._engines[name].kinds_away:
                self._engines[name].reload_states()
        yield

    def all(self) -> None:
        """Brings the states of all engines back, as before a checkpoint or ``close``."""
        for engine in self._engines.values():
            if engine.kinds_away:
                engine.reload_states()

    def plan(self, turns: Sequence[Sequence[str]], *, limit_bytes: int | None = None) -> list[TurnCost]:
        """The bytes of each of ``turns``, which follow one another round after round. Nothing is moved.

        Raises ConfigError for unknown names, and for a turn that needs more than ``limit_bytes`` with the whole weights
        of its engines.
        """
        for names in turns:
            self._check(names)
        movable = {name: engine.movable_bytes(self._device) for name, engine in self._engines.items()}
        leases = {name: engine.lease_bytes for name, engine in self._engines.items()}
        costs = []
        for i, names in enumerate(turns):
            before = set(turns[i - 1]) if len(turns) > 1 else set(self._engines)
            moved = sum(movable[name] for name in before ^ set(names))
            resident = sum(movable[name] for name in set(names))
            cost = TurnCost(tuple(names), resident, sum(leases[name] for name in set(names)), moved)
            if limit_bytes is not None and cost.total > limit_bytes:
                raise ConfigError(
                    f"the turn of {', '.join(names)} needs {as_binary(cost.resident)} of states and"
                    f" {as_binary(cost.lease)} of whole weights, and the limit is {as_binary(limit_bytes)}",
                    where="MemoryTurns.plan",
                    fix="let fewer engines work together, or lower stage3_max_live_parameters",
                )
            costs.append(cost)
        return costs

    def _check(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._engines:
                near = get_close_matches(name, self._engines, 1)
                raise ConfigError(
                    f"there is no engine {name!r}",
                    where="MemoryTurns",
                    fix=f"name one of {near or list(self._engines)}",
                )
