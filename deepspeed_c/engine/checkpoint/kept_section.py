"""The section ``elasticity`` between two starts of a run: the batch must not change unnoticed when a run resumes by
itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_c.config.elasticity import DECIDING, SECTION
from deepspeed_c.config.load import load_config
from deepspeed_c.config.tuning import Elasticity
from deepspeed_c.errors import ConfigError, ElasticityConfigError

__all__ = ["check_kept_section"]


def check_kept_section(config: Mapping[str, Any], kept: Mapping[str, Any], where: str) -> None:
    """Compares the sections ``elasticity`` of this run and of the run before, which saved a checkpoint. Only the keys
    that decide the batch count, and only if both sections are enabled.

    Args:
        config: the configuration of this run, as given.
        kept: the configuration in the checkpoint; empty if there is none.
        where: the checkpoint, for messages.

    Raises:
        ElasticityConfigError: a key differs, which the error names with both values; or the checkpoint's section is
            malformed.
    """
    now = _section(config)
    if not now.enabled:
        return
    try:
        before = _section(kept)
    except ConfigError as error:
        raise ElasticityConfigError(
            f"its section elasticity cannot be compared with this run's: {error.what}",
            where=where,
            fix="load it by load_checkpoint, without checkpoint.auto_resume",
        ) from error
    if not before.enabled:
        return
    for key in DECIDING:
        if getattr(now, key) != getattr(before, key):
            raise ElasticityConfigError(
                f"is {_shown(getattr(now, key))}, and {_shown(getattr(before, key))} in the run that saved {where}",
                where=f"{SECTION}.{key}",
                fix="start with the same section; or load by load_checkpoint, without checkpoint.auto_resume, to go on "
                "with another batch",
            )


def _section(config: Mapping[str, Any]) -> Elasticity:
    """The section with its defaults. Raises ConfigError if it is malformed."""
    given = {SECTION: config[SECTION]} if SECTION in config else {}
    return load_config(given, world_size=1, batch="skip").elasticity


def _shown(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
