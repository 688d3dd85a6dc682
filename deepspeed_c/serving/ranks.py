"""Steps that rank 0 plans, and that all tensor-parallel ranks run.

A message has the numbers of a step as JSON: at first so many bytes as fit beside the length, then the rest where a
prompt is long. So a step of single tokens costs one broadcast.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.watchdog import watch

__all__ = ["SILENCE_S", "RanksOfSteps", "StepOfRanks"]

# RanksOfSteps compare their positions after so many seconds without a step.
_SILENCE_LIMIT_S = 30.0
# An idle rank 0 sends a step without work as often.
SILENCE_S = 10.0

_USUAL_BYTES = 4096
_LENGTH_BYTES = 8


class StepOfRanks(NamedTuple):
    """The work of a rank in a step, in the order of the fields. Uids are the engine's."""

    flushed: list[int]
    """Sequences that end before the forward."""
    uids: list[int]
    """Sequences of the forward; none: there is no forward."""
    tokens: list[list[int]]
    """New tokens of each."""
    salts: dict[int, str]
    """Of new sequences."""
    is_last: bool = False
    """Whether the ranks part after it."""


class RanksOfSteps:
    """The way of steps from rank 0 to the others."""

    def __init__(self) -> None:
        self._collectives = Collectives()
        watch(self._collectives, _SILENCE_LIMIT_S)
        self.rank, self.world_size = self._collectives.rank, self._collectives.world_size

    def send(self, step: StepOfRanks) -> None:
        """Rank 0 tells the others."""
        if self.world_size > 1:
            self._share(json.dumps(step).encode())

    def receive(self) -> StepOfRanks:
        """The next step of rank 0. Waits for it."""
        flushed, uids, tokens, salts, is_last = json.loads(self._share(b""))
        return StepOfRanks(flushed, uids, tokens, {int(uid): salt for uid, salt in salts.items()}, is_last)

    def share_text(self, text: str) -> str:
        """The text of rank 0, on all ranks."""
        return self._share(text.encode()).decode() if self.world_size > 1 else text

    def _share(self, message: bytes) -> bytes:
        head = torch.zeros(_LENGTH_BYTES + _USUAL_BYTES, dtype=torch.uint8)
        if self.rank == 0:
            begin = len(message).to_bytes(_LENGTH_BYTES, "little") + message[:_USUAL_BYTES]
            head[: len(begin)] = torch.frombuffer(bytearray(begin), dtype=torch.uint8)
        self._collectives.broadcast(head, 0, label="serving: step")
        received = head.numpy().tobytes()
        n_bytes = int.from_bytes(received[:_LENGTH_BYTES], "little")
        if n_bytes <= _USUAL_BYTES:
            return received[_LENGTH_BYTES : _LENGTH_BYTES + n_bytes]
        rest = torch.zeros(n_bytes - _USUAL_BYTES, dtype=torch.uint8)
        if self.rank == 0:
            rest[:] = torch.frombuffer(bytearray(message[_USUAL_BYTES:]), dtype=torch.uint8)
        self._collectives.broadcast(rest, 0, label="serving: the rest of a step")
        return received[_LENGTH_BYTES:] + rest.numpy().tobytes()
