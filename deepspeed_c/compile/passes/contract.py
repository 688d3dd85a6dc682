"""Contracts: what a pass over compiled graphs expects of the passes before it, and what it provides for later ones."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_c.errors import ConfigError

__all__ = ["CAP_OPT_STATES_EVICTED", "CAP_Z3_GATHER_RELEASE", "PassContract", "PassContractError"]

CAP_Z3_GATHER_RELEASE = "z3_gather_release"
"""Provided by ``zero3_compile``: each read of a sharded weight lies between its gather and its release."""
CAP_OPT_STATES_EVICTED = "opt_states_evicted"
"""A pass has moved optimizer state off the device, so later passes plan without its memory."""


@dataclass(frozen=True)
class PassContract:
    """provides: names of what holds after the pass. requires: names that earlier passes of the same step have to
    provide. conflicts_with: names of passes that the same step may not have. phase: which graphs the pass edits,
    "forward", "backward" or "both"; it is only told to readers.
    """

    provides: frozenset[str] = frozenset()
    requires: frozenset[str] = frozenset()
    conflicts_with: frozenset[str] = frozenset()
    phase: str = "both"


class PassContractError(ConfigError):
    """A schedule of passes breaks the contract of one of them."""
