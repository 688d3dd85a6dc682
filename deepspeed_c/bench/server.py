"""A server that ``deepspeed_c bench inference`` starts for its load, and ends after it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from deepspeed_c.bench.http_stream import Address, FailedRequest, exchange
from deepspeed_c.errors import LaunchError
from deepspeed_c.guarded import ended
from deepspeed_c.listening import listening_socket

__all__ = ["is_ready", "served"]

_HOST = "127.0.0.1"
# Large models take minutes to load.
_READY_LIMIT_S = 1800.0
_LOOK_S = 0.1
_LOOK_LIMIT_S = 5.0
# Time for the server to end after SIGTERM.
_STOP_S = 60.0
_SHOWN_LINES = 20


@contextmanager
def served(folder: str, words: Sequence[str]) -> Iterator[Address]:
    """Within this context ``deepspeed_c serve`` answers for the model of a folder, at a free local port. After it the
    process has ended, also if this process is killed. words: further options of the server.

    Raises LaunchError where the server ends before it is ready, or is not ready within half an hour.
    """
    with listening_socket(_HOST, 0) as free:
        port = free.getsockname()[1]
    address = Address(False, _HOST, port, "")
    command = [sys.executable, "-m", "deepspeed_c", "serve", folder, "--host", _HOST, "--port", str(port), *words]
    with tempfile.TemporaryFile() as log:
        # A process group of its own: Ctrl-C is for this process, which then ends the server.
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        with ended(server, _STOP_S):
            if not asyncio.run(is_ready(address, server, "/ready", _READY_LIMIT_S)):
                code = server.poll()
                how = f"is not ready after {_READY_LIMIT_S:g} s" if code is None else f"ended with exit code {code}"
                raise LaunchError(
                    "\n".join([f"the server {how}; its last lines:", *_last_lines(log)]),
                    where=f"deepspeed_c serve {folder}",
                    fix="--serve-options has options for it, or start it by hand and use --url",
                )
            yield address


async def is_ready(address: Address, server: subprocess.Popen[bytes], path: str, limit_s: float) -> bool:
    """Waits until GET ``path`` is answered with 200. False where the server has ended, or after ``limit_s``."""
    until = time.monotonic() + limit_s
    while server.poll() is None and time.monotonic() < until:
        with suppress(FailedRequest, asyncio.TimeoutError):
            if await asyncio.wait_for(_status(address, path), _LOOK_LIMIT_S) == 200:
                return True
        await asyncio.sleep(_LOOK_S)
    return False


async def _status(address: Address, path: str) -> int:
    async with exchange(address, "GET", path) as (head, _):
        return head.status


def _last_lines(log: IO[bytes]) -> list[str]:
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()
    return [line for line in lines if line.strip()][-_SHOWN_LINES:]
