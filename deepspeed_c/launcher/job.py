"""What the launching command tells the agent of each host: the user's options, the hosts, and the variables for ranks."""

from __future__ import annotations

import json
import secrets
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.options import Options

__all__ = ["SIGNALS", "HostPlace", "Job", "name_of", "new_token"]

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The signals that are passed on to ranks; torchelastic's default."""
TOKEN_BYTES = 32


def new_token() -> str:
    """A secret for one run (DSC_RUN_TOKEN)."""
    return secrets.token_hex(TOKEN_BYTES)


def name_of(host: str) -> str:
    """The name or address in ``HOST`` or ``USER@HOST``."""
    return host.rpartition("@")[2]


@dataclass(frozen=True, slots=True)
class HostPlace:
    """One host among the hosts of a launch."""

    name: str
    """As in the hostfile; "" if the launch has one host."""
    index: int
    slots: list[int]
    first_rank: int
    n_hosts: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A launch on several hosts. Nothing in it is run by a shell."""

    options: Options
    hosts: dict[str, list[int]]
    """Host -> its slots; ranks follow this order."""
    environment: dict[str, str]
    """Variables for every rank, besides those that its host has."""
    folder: str
    """Working directory of the ranks."""
    token: str
    """The secret of the run (DSC_RUN_TOKEN)."""
    store: tuple[str, int]
    """Address and port of the agents' store."""

    @property
    def world_size(self) -> int:
        return sum(map(len, self.hosts.values()))

    def place(self, index: int, members: Sequence[int]) -> HostPlace:
        """The place of the host with that number in a round of these hosts."""
        slots = list(self.hosts.values())
        n_ranks = [len(slots[i]) for i in members]
        at = members.index(index)
        return HostPlace(list(self.hosts)[index], at, slots[index], sum(n_ranks[:at]), len(members), sum(n_ranks))

    def n_ranks(self, members: Sequence[int]) -> int:
        """The ranks of these hosts together."""
        return sum(len(slots) for i, slots in enumerate(self.hosts.values()) if i in members)

    def without_environment(self) -> Job:
        """The job for runners that pass variables on themselves."""
        return replace(self, environment={})

    def to_json(self) -> str:
        """The job as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The job of that JSON. Raises LaunchError if it is none."""
        try:
            values = json.loads(text)
            options = values.pop("options")
            options["script_args"] = tuple(options["script_args"])
            address, port = values.pop("store")
            return cls(options=Options(**options), store=(address, port), **values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise LaunchError(
                f"the job that came is not that of this version: {error}",
                where="host agent",
                fix="install the same version of deepspeed_c on all hosts",
            ) from error
