"""The record of ``same_bits`` in a checkpoint: grain, threads and the checksum of a probe.

A run that resumes with others would go on with other bits, unnoticed.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch

from deepspeed_c.engine.probe import Probe
from deepspeed_c.errors import CheckpointError, ConfigError
from deepspeed_c.logging import log_dist

__all__ = ["KeptBits"]

_VERSION = 1
"""Raised whenever the same run gets other bits than in an earlier release: another tree, sum or hash of seeds."""

_KEYS = {"version": int, "grain": int, "threads": int, "probe": int, "machine": str}


class KeptBits(NamedTuple):
    """The record of an engine with ``same_bits``."""

    grain: int
    probe: Probe

    def record(self) -> dict[str, Any]:
        """The entry ``same_bits`` of a checkpoint."""
        return {
            "version": _VERSION,
            "grain": self.grain,
            "threads": torch.get_num_threads(),
            "probe": self.probe.checksum,
            "machine": self.probe.machine,
        }

    def check(self, kept: Any, where: str) -> None:
        """Compares with the entry ``kept`` of the checkpoint ``where``; None if it was saved without the mode. Call it
        before anything is loaded.

        Raises ConfigError for another grain or number of threads, and CheckpointError for an entry of another form. A
        warning says that the run does not go on with the bits of the run before: after a save without the mode, on
        other arithmetic, or in another release.
        """
        mine = self.record()
        if kept is None:
            _warn(f"{where} was saved without same_bits: its bits depend on the number of ranks before")
            return
        if not isinstance(kept, dict) or any(type(kept.get(key)) is not kind for key, kind in _KEYS.items()):
            raise CheckpointError("its record of same_bits is none", where=where, fix="load another tag")
        for key in ("grain", "threads"):
            if mine[key] != kept[key]:
                raise ConfigError(
                    f"is {mine[key]}, and {kept[key]} in the run that saved {where}, so bits would not go on",
                    where=f"same_bits.{key}",
                    fix=f"set it to {kept[key]}; or set same_bits.enabled to false, or load by load_checkpoint with"
                    " load_optimizer_states=False, to go on with other bits",
                )
        if mine["version"] != kept["version"]:
            _warn(
                f"{where} has version {kept['version']} of same_bits, whose bits differ from version {mine['version']}"
            )
        elif mine["probe"] != kept["probe"]:
            _warn(f"{where} was saved on arithmetic with other bits ({kept['machine']}; here {mine['machine']})")


def _warn(what: str) -> None:
    log_dist(f"{what}. The run goes on, with bits that no other run has", ranks=[0], level=logging.WARNING)
