"""A launch on several hosts without a runner (``--no_ssh``): the same command runs on each host."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

from deepspeed_c.background import BackgroundThread
from deepspeed_c.env import read_env
from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher.agent import run_host
from deepspeed_c.launcher.chair import Chair, RoundPolicy
from deepspeed_c.launcher.job import Job
from deepspeed_c.launcher.meeting import COME_SECONDS
from deepspeed_c.launcher.options import Options, check_rounds
from deepspeed_c.launcher.plan import LOOPBACK
from deepspeed_c.launcher.presiding import tell
from deepspeed_c.launcher.run import explain, open_store
from deepspeed_c.scheduled import DEFAULT_PORT

__all__ = ["launch_without_runner"]

FAREWELL_STEPS = 5
END_SECONDS = 10  # for the thread that presides, at the end of the interpreter


def launch_without_runner(options: Options, hosts: Mapping[str, list[int]]) -> int:
    """Start the ranks of this host, as number --node_rank of ``hosts``; the same command runs on each host. An elastic
    launch on one host comes here, too.

    The host of number 0 holds the agents' store, and says how the launch ended. Returns the exit code, the same on all
    hosts. Raises LaunchError for a number that is too large, or an address that is missing or of another host.
    """
    index = options.node_rank or 0
    check_rounds(options, len(hosts))
    if index >= len(hosts):
        raise LaunchError(
            f"is {index}, and there are {len(hosts)} hosts", where="--node_rank", fix="hosts are numbered from 0"
        )
    is_alone = len(hosts) == 1 and not options.no_ssh  # an elastic launch on this host
    address = options.master_addr or (LOOPBACK if is_alone else next(iter(hosts)))
    if options.master_addr is None and options.hostfile is None and len(hosts) > 1:
        raise LaunchError("is missing", where="--master_addr", fix="give an address of host 0 that all hosts reach")
    port = options.master_port or (None if is_alone else DEFAULT_PORT)
    if index == 0:
        _wait_for_name(address)
        store = open_store(address, port)
        port = store.port
    job = Job(
        # The ranks' store takes another port.
        options=replace(options, master_addr=address if index == 0 else None, master_port=None, gather_logs=False),
        hosts=dict(hosts),
        environment={},
        folder=os.getcwd(),
        token=read_env().run_token or "",
        store=(address, port),
    )
    if index:
        return run_host(job, index)
    rounds = RoundPolicy.of(options, len(hosts))
    chair = Chair(store, job.token, list(hosts), lambda _: "", rounds=rounds, tell=tell, own=0)
    left = threading.Event()
    thread = BackgroundThread(_preside_alone, chair, left, name="dsc_chair", end=left.set, limit_s=END_SECONDS)
    thread.start()
    code = run_host(job, 0)
    thread.join()
    if chair.failure is not None:
        explain(chair.failure, job.n_ranks(chair.members) if chair.has_begun else 0)
    return code


def _wait_for_name(address: str) -> None:
    """Wait until the name of this host is known: a new pod's name may take a while."""
    end = time.monotonic() + COME_SECONDS
    while time.monotonic() < end:
        try:
            socket.getaddrinfo(address, None)
        except OSError:
            time.sleep(1)
            continue
        return


def _preside_alone(chair: Chair, left: threading.Event) -> None:
    """Preside until the launch is over, or this process is about to end."""
    n_steps = 0
    while n_steps < FAREWELL_STEPS and not left.wait(chair.period):
        n_steps += chair.is_over  # until the other agents have read the exit code
        chair.step()
