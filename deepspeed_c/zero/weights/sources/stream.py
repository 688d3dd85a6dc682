"""The stream of an accelerator for gathers, which run beside the computation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from deepspeed_c.accelerator import has_streams

__all__ = ["GatherStream"]


class GatherStream:
    """One stream for all gathers of a fetcher, made when it is first needed. On the host there are no streams, and
    nothing is done."""

    def __init__(self) -> None:
        self._stream: torch.Stream | None = None

    def open(self, device: torch.device) -> AbstractContextManager:
        """Context for issuing gathers. They run beside the computation, after earlier writes to the shards."""
        return self._open(device) if has_streams(device) else nullcontext()

    @contextmanager
    def _open(self, device: torch.device) -> Iterator[None]:
        if self._stream is None:
            self._stream = torch.Stream(device)
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        with self._stream:
            yield

    def hand_over(self, buffer: torch.Tensor) -> None:
        """Has the computation wait for the gathers so far, before it reads ``buffer``."""
        if has_streams(buffer.device):
            current = torch.accelerator.current_stream(buffer.device)
            current.wait_stream(self._stream)
            buffer.record_stream(current)
