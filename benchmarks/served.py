"""Processes that live through a benchmark and measure when they are asked, so that contenders with environments or
ranks of their own take turns."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Served", "say"]

_HEAD = "answer "


class Served:
    """One process. It prints an answer when it is ready, and one for each line of its standard input."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, question: str = "") -> None:
        """Send one line, whose answer ``answer`` returns."""
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the next answer. Ends the benchmark where the process ends without one."""
        for line in self._process.stdout:
            if line.startswith(_HEAD):
                return json.loads(line.removeprefix(_HEAD))
        raise SystemExit(f"{' '.join(self._process.args)}: exit code {self._process.wait()}, no answer")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def say(values: Mapping[str, Any]) -> None:
    """Answer, as the process that is asked."""
    print(_HEAD + json.dumps(values), flush=True)
