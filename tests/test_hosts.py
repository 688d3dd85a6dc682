"""tests/hosts.py: addresses, names, counters and processes of hosts.

Nothing is left, however the process that made the hosts ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts import DEVICE, Hosts, why_no_hosts
from tests.waits import ended, first_line, output_of

ROOT = Path(__file__).resolve().parent.parent
# A client that connects, sends, and prints the answer.
TALK = """
import socket, sys
with socket.create_connection((sys.argv[1], 4711), timeout=300) as s:
    s.sendall(b"x" * 100_000)
    s.shutdown(socket.SHUT_WR)
    print(s.recv(100).decode())
"""
LISTEN = """
import socket
with socket.create_server(("", 4711)) as server:
    print("listens", flush=True)
    s = server.accept()[0]
    n = 0
    while data := s.recv(1 << 16):
        n += len(data)
    s.sendall(f"{n} at {socket.gethostname()}".encode())
    s.close()
"""
HOLD = """
import sys, time
from tests.hosts import Hosts
hosts = Hosts(2, processes=sys.argv[1] == "True")
print(hosts[0].pid, hosts[1].pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _hosts():
    if why_no_hosts():
        pytest.skip(why_no_hosts())


def test_hosts_reach_one_another_by_their_addresses_and_bytes_are_counted():
    with Hosts(2, rate="1gbit") as hosts:
        assert len(hosts) == 2
        server = hosts[1].start([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE, text=True)
        assert first_line(server) == "listens\n"
        before = hosts[0].n_bytes_sent()
        assert hosts[0].run([sys.executable, "-c", TALK, hosts[1].address]) == "100000 at host-1\n"
        assert 100_000 <= hosts[0].n_bytes_sent() - before <= 120_000
        assert ended(server) == 0
        assert "tbf" in hosts[0].run(["tc", "qdisc", "show", "dev", DEVICE])
        hosts[1].unplug()
        with pytest.raises(OSError, match="Network is unreachable"):
            hosts[1].run([sys.executable, "-c", TALK, hosts[0].address])


def test_a_host_with_a_process_space_of_its_own_is_killed_whole():
    with Hosts(1, processes=True) as hosts:
        sleeper = hosts[0].start(["sh", "-c", "sleep 600 & wait"])
        assert hosts[0].run(["sh", "-c", "ls -d /proc/[0-9]* | head -1"]) == "/proc/1\n"
        hosts[0].kill()
        assert ended(sleeper) != 0


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("processes", [False, True])
def test_nothing_is_left_when_the_maker_is_killed(processes):
    maker = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(processes)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    pids = [int(pid) for pid in first_line(maker).split()]
    assert all(map(is_there, pids)) and len(pids) == 2
    maker.send_signal(signal.SIGKILL)
    output_of(maker)
    deadline = time.monotonic() + 300
    while any(map(is_there, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)
