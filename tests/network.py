"""Check whether an address answers over TCP, and find this host's own address."""

from __future__ import annotations

import socket


def answers(address: str, port: int) -> bool:
    """Whether somebody accepts connections there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.settimeout(5)
        return probe.connect_ex((address, port)) == 0


def own_address() -> str | None:
    """An address of this host that is not the loopback, as far as there is one. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))
        except OSError:
            return None
        return probe.getsockname()[0]
