"""Processes that live through a benchmark and measure on request, so that contenders with separate environments or
ranks can take turns.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Served", "ServedRanks", "say"]

_HEAD = "answer "


class Served:
    """One such process. It prints an answer when it is ready, and an answer to each line of its standard input."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, question: str = "") -> None:
        """Send one line. ``answer`` returns the answer to it."""
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the next answer. If the process ends without an answer, end the benchmark."""
        for line in self._process.stdout:
            if line.startswith(_HEAD):
                return json.loads(line.removeprefix(_HEAD))
        raise SystemExit(f"{' '.join(self._process.args)}: exit code {self._process.wait()}, no answer")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


class ServedRanks:
    """Such processes as the ranks of one group. All are asked the same question.

    port: of the group's store, on this machine.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], n_ranks: int, port: int) -> None:
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        group |= {"WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks)}
        self._ranks = [
            Served(command, {**environment, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(n_ranks)
        ]

    def ask(self, question: str = "") -> list[dict[str, Any]]:
        """Return the answers of all ranks."""
        for rank in self._ranks:
            rank.ask(question)
        return self.answers()

    def answers(self) -> list[dict[str, Any]]:
        return [rank.answer() for rank in self._ranks]

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


def say(values: Mapping[str, Any]) -> None:
    """Print an answer, in the process that measures."""
    print(_HEAD + json.dumps(values), flush=True)
