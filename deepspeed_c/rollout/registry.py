"""The rollout engines by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from deepspeed_c.config.nearest import nearest
from deepspeed_c.errors import ConfigError
from deepspeed_c.rollout.base import RolloutEngine
from deepspeed_c.rollout.hybrid import HybridEngineRollout
from deepspeed_c.rollout.openai import OpenAIRollout

__all__ = ["build_rollout", "register_rollout"]

Maker = TypeVar("Maker", bound=Callable[..., RolloutEngine])


def _make_hybrid(cfg: Any, engine: Any, tokenizer: Any, **kwargs: Any) -> RolloutEngine:
    missing = [name for name, given in (("student_engine", engine), ("tokenizer", tokenizer)) if given is None]
    if missing:
        raise ConfigError(
            f"the hybrid engine needs {' and '.join(missing)}", where="build_rollout", fix="pass both as keywords"
        )
    return HybridEngineRollout(engine, tokenizer, cfg, **kwargs)


_makers: dict[str, Callable[..., RolloutEngine]] = {"hybrid_engine": _make_hybrid, "openai": OpenAIRollout.of_student}


def register_rollout(name: str) -> Callable[[Maker], Maker]:
    """Decorator of a class or function that makes a rollout engine: it is called with (rollout_cfg, student_engine,
    tokenizer, **kwargs of ``build_rollout``). Raises ConfigError for a name that is taken."""
    if name in _makers:
        raise ConfigError(f"{name!r} is taken", where="register_rollout", fix="choose another name")

    def register(make: Maker) -> Maker:
        _makers[name] = make
        return make

    return register


def build_rollout(rollout_cfg: Any, student_engine: Any = None, tokenizer: Any = None, **kwargs: Any) -> RolloutEngine:
    """Makes the rollout engine that ``rollout_cfg.engine`` names.

    Args:
        rollout_cfg: a ``RolloutConfig``, or an object with the fields of the engine's own configuration and ``engine``.
        student_engine: the engine of ``initialize`` whose model writes, or whose weights a server gets.
        tokenizer: has ``eos_token_id`` and ``pad_token_id``.
        kwargs: further arguments of the engine.

    Raises ConfigError for an unknown name, with the nearest one, and for missing arguments.
    """
    make = _makers.get(rollout_cfg.engine)
    if make is None:
        near = nearest(str(rollout_cfg.engine), _makers)
        raise ConfigError(
            f"{rollout_cfg.engine!r} is no rollout engine",
            where="RolloutConfig.engine",
            fix=f"write {' or '.join(map(repr, near or sorted(_makers)))}, or register_rollout({rollout_cfg.engine!r})",
        )
    return make(rollout_cfg, student_engine, tokenizer, **kwargs)
