"""Events to Weights & Biases: to its service, or to a folder that ``wandb sync`` sends later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed_c.errors import ConfigError

from .base import Event, Monitor, by_step
from .packages import load_package

__all__ = ["WandbMonitor"]


class WandbMonitor(Monitor):
    """Logs to the program's run if the program has called ``wandb.init``, else to a new run, which ``close`` finishes.

    W&B takes steps in ascending order and ignores values of earlier steps. A run that is resumed by ``id`` from an
    earlier checkpoint therefore shows no new values until it reaches the last step that it logged.
    """

    key = "wandb"
    on_failure = 'look into the log of wandb, or set wandb.mode to "offline"'

    def __init__(self, wandb_config: Any) -> None:
        super().__init__(wandb_config)
        self.group, self.team, self.project = wandb_config.group, wandb_config.team, wandb_config.project
        self.run: Any = None
        self._is_own = False
        if self.is_writing:
            self._open(load_package("wandb", key=self.key))

    def _open(self, wandb: Any) -> None:
        self._is_own = wandb.run is None
        if not self._is_own:
            self.run = wandb.run
            return
        section = self.monitor_config
        try:
            self.run = wandb.init(
                project=self.project,
                group=self.group,
                entity=self.team,
                name=section.name,
                mode=section.mode,
                id=section.id,
                resume=section.resume,
            )
        except (wandb.Error, OSError, ValueError) as error:
            raise ConfigError(
                f"Weights & Biases cannot start a run: {error}",
                where=self.key,
                fix='run wandb login, set "mode": "offline", or set wandb.enabled to false',
            ) from error

    def log(self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """Like ``wandb.log``, for the run of this monitor."""
        if self.run is not None:
            self.run.log(dict(data), step=step, commit=commit)

    def write_events(self, event_list: Sequence[Event]) -> None:
        for step, values in by_step(event_list).items():
            self.log(values, step=step)

    def write_config(self, config: Mapping[str, Any]) -> None:
        if self.run is not None:
            # A resumed run already has the values of its first start.
            self.run.config.update({"deepspeed_c": dict(config)}, allow_val_change=True)

    def close(self) -> None:
        if self.run is not None and self._is_own:
            self.run.finish()
