"""A ``Service`` without a model, for the tests of deployments: it answers a prompt with its words, one a step.

A prompt may begin with a command of the test: "hang" is answered at a cancel only, "die" ends the process,
"big N" answers N letters, "break" fails in ``submit`` with an untyped error, "who" answers the number of the process,
"count" the numbers of threads, of open files and of running requests.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from deepspeed_c.errors import ConfigError, ModelError, StateError
from deepspeed_c.mii.config import ModelConfig

FIELDS = ("stream", "max_new_tokens", "temperature", "pause")


class _Row:
    def __init__(self, index: int, prompt: str, fields: dict[str, Any], emit: Callable[[dict[str, Any]], None]) -> None:
        self.index, self.prompt, self.emit = index, prompt, emit
        self.words = answer_to(prompt).split(" ")
        self.n_done, self.is_over = 0, False
        self.streams, self.pause = bool(fields.get("stream")), float(fields.get("pause", 0))


def answer_to(prompt: str) -> str:
    if prompt.startswith("big "):
        return "x" * int(prompt.split()[1])
    if prompt == "who":
        return str(os.getpid())
    return f"<{prompt}>"


class FakeService:
    """The engine is a loop over rows. Each step takes one word of each."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.rows: list[_Row] = []
        self.is_closed = False

    def submit(
        self, prompts: list[str], fields: dict[str, Any], emit: Callable[[dict[str, Any]], None]
    ) -> Callable[[], None]:
        for name in fields:
            if name not in FIELDS:
                raise ConfigError("is unknown", where=name, fix=f"give one of {', '.join(FIELDS)}")
        if not fields.get("temperature", 1.0) > 0:
            raise ConfigError(f"is {fields['temperature']}", where="temperature", fix="give a number above 0")
        if "break" in prompts:
            raise ZeroDivisionError("a defect")
        rows = [_Row(i, prompt, fields, emit) for i, prompt in enumerate(prompts)]
        with self.changed:
            self.rows += rows
            self.changed.notify()

        def cancel() -> None:
            with self.changed:
                for row in rows:
                    row.is_over = True
                self.changed.notify()

        return cancel

    def run(self) -> None:
        while True:
            with self.changed:
                while not self.is_closed and not any(row.prompt != "hang" or row.is_over for row in self.rows):
                    self.changed.wait(timeout=3600)
                self.rows = [row for row in self.rows if not row.is_over]
                if self.is_closed:
                    for row in self.rows:
                        error = StateError("the engine was closed", where="a request")
                        fields = {"what": error.what, "where": error.where, "fix": error.fix}
                        row.emit({"error": {"kind": "StateError", **fields}})
                    return
                rows = list(self.rows)
            for row in rows:
                self._step(row)

    def _step(self, row: _Row) -> None:
        if row.prompt == "hang":
            return
        if row.prompt == "die":
            print("the last words of a replica", flush=True)
            os._exit(9)
        if row.prompt == "count":
            row.words = [f"{threading.active_count()}/{len(os.listdir('/proc/self/fd'))}/{len(self.rows) - 1}"]
        time.sleep(row.pause)
        row.n_done += 1
        row.is_over = row.n_done == len(row.words)
        words = row.words[row.n_done - 1 : row.n_done] if row.streams else row.words
        if row.streams or row.is_over:
            text = " ".join(words) + (" " if row.streams and not row.is_over else "")
            lengths = {"prompt_length": len(row.prompt), "generated_length": row.n_done}
            reason = "stop" if row.is_over else "none"
            row.emit({"index": row.index, "generated_text": text, **lengths, "finish_reason": reason})

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify()


class _Stuck(FakeService):
    """An engine that does not end."""

    def close(self) -> None:
        time.sleep(1000)


def build(model_config: ModelConfig) -> FakeService:
    assert "torch" not in sys.modules
    return FakeService()


def build_stuck(model_config: ModelConfig) -> FakeService:
    return _Stuck()


def build_refused(model_config: ModelConfig) -> FakeService:
    raise ModelError("has no generation", where=model_config.model_name_or_path, fix="give another model")


def build_broken(model_config: ModelConfig) -> FakeService:
    raise ZeroDivisionError("a defect of the factory")


def build_slowly(model_config: ModelConfig) -> FakeService:
    time.sleep(1000)
    return FakeService()
