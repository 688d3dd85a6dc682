"""Deployments of the fake service for tests, and looks at their processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from deepspeed_c.errors import CommError
from deepspeed_c.mii.config import MIIConfig, ModelConfig
from deepspeed_c.mii.deployment import MIIClient, registry
from deepspeed_c.mii.deployment.start import start
from tests import waits

FAKE = "tests.deepspeed_c.mii.fake_service"


def config_of(name: str, n_replicas: int = 1, n_ranks: int = 1, **keys: object) -> MIIConfig:
    model = ModelConfig(model_name_or_path="model", replica_num=n_replicas, tensor_parallel=n_ranks)
    return MIIConfig(deployment_name=name, model_config=model, **keys)


@contextlib.contextmanager
def deployed(
    name: str = "fake", n_replicas: int = 1, factory: str = "build", n_ranks: int = 1, **keys: object
) -> Iterator[MIIClient]:
    """A deployment of ``factory`` of the fake service. Nothing of it is left afterwards."""
    client = start(config_of(name, n_replicas, n_ranks, **keys), f"{FAKE}:{factory}")
    pids = tree_of(supervisor_of(name))
    try:
        yield client
    finally:
        with contextlib.suppress(CommError):
            client.terminate_server()
        for pid in pids:
            gone(pid)


def supervisor_of(name: str) -> int:
    """The process that listens for the clients of a deployment."""
    with contextlib.closing(registry.connect(name)) as connection:
        pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid)


def tree_of(pid: int) -> list[int]:
    """The process and all that it has started."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += tree_of(int(child))
    return found


def gone(pid: int, limit: float = waits.LIMIT_SECONDS) -> None:
    """The process has ended; at the limit it is killed."""
    try:
        until(lambda: not is_alive(pid), f"process {pid} has ended", limit)
    except AssertionError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        raise


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(holds: Callable[[], object], what: str, limit: float = waits.LIMIT_SECONDS) -> None:
    deadline = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit:g} s: {what}"
        time.sleep(waits.LOOK_SECONDS)
