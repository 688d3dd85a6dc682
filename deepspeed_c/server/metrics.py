"""Numbers of a server for Prometheus, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from deepspeed_c.server.model import ServedModel

__all__ = ["Metrics"]

_PREFIX = "deepspeed_c_"
_TIMES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_CURRENT = (
    ("requests_running", "answers whose tokens are computed"),
    ("requests_waiting", "answers that wait for memory"),
    ("free_blocks", "blocks of keys and values that no sequence has, of 16 tokens each"),
)
_SUMS = (
    ("put_back", "answers that gave their blocks back, to be computed again"),
    ("prompt_tokens", "tokens of prompts"),
    ("found_tokens", "tokens of prompts that were in the memory already"),
    ("generated_tokens", "tokens of answers"),
)


class Metrics:
    """The counters and histograms of one server. Numbers of the engine are read when they are asked for."""

    def __init__(self, model: ServedModel) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Engine(model))
        self.refused = Counter(
            f"{_PREFIX}refused", "requests that got an error, by status", ["status"], registry=registry
        )
        self.cancelled = Counter(f"{_PREFIX}cancelled", "requests whose client went before the end", registry=registry)
        self.queue = self._times("queue_seconds", "from the request to its first step")
        self.first_token = self._times("first_token_seconds", "from the request to its first token")
        self.token = self._times("token_seconds", "from one token of an answer to the next")
        self.request = self._times("request_seconds", "from the request to the end of its answers")

    def text(self) -> bytes:
        """All numbers in Prometheus' text format 0.0.4."""
        return generate_latest(self._registry)

    def _times(self, name: str, text: str) -> Histogram:
        return Histogram(f"{_PREFIX}{name}", text, buckets=_TIMES, registry=self._registry)


class _Engine:
    """The numbers of the engine, for a registry of prometheus_client."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def collect(self) -> Iterator[Any]:
        counts = self._model.counts
        current = (counts.running, counts.waiting, counts.free_blocks)
        for (name, text), value in zip(_CURRENT, current):
            yield GaugeMetricFamily(f"{_PREFIX}{name}", text, value)
        sums = (counts.put_back, counts.prompt_tokens, counts.found_tokens, counts.new_tokens)
        for (name, text), value in zip(_SUMS, sums):
            yield CounterMetricFamily(f"{_PREFIX}{name}", text, value)

    def describe(self) -> Iterator[Any]:
        """None, so that registering asks the engine for nothing."""
        return iter(())
