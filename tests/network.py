"""Check whether an address answers over TCP, and find this host's own address."""

from __future__ import annotations

import socket


def answers(address: str, port: int) -> bool:
    """Whether a program accepts connections at the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.settimeout(5)
        return probe.connect_ex((address, port)) == 0


def own_address() -> str | None:
    """An address of this host other than the loopback, or None if there is none. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))
        except OSError:
            return None
        return probe.getsockname()[0]
