"""Addresses of this host as other hosts reach it. Nothing is sent to find them."""

from __future__ import annotations

import contextlib
import socket
import struct

__all__ = ["interface_of", "own_address"]

SIOCGIFADDR = 0x8915  # linux/sockios.h
DISCARD_PORT = 9


def own_address(other: str) -> str:
    """The address of this host from which it would send to ``other`` (a name or an address).

    If ``other`` is not known, or is this host, the address from which this host would send to the world; 127.0.0.1
    without a network.
    """
    for target in (other, "192.0.2.1", "2001:db8::1"):  # the last two: of documentation, so they are nobody's
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(target, DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # a datagram socket: chooses the route, and sends nothing
                found = probe.getsockname()[0]
        except (OSError, UnicodeError):
            continue
        if not (found.startswith("127.") or found == "::1"):
            return found
    return "127.0.0.1"


def interface_of(address: str) -> str:
    """The name of the network interface with this IPv4 address; "" if there is none."""
    with contextlib.suppress(OSError, ImportError):
        import fcntl  # absent on Windows

        wanted = socket.inet_aton(address)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # without an IPv4 address
                    request = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                    if request[20:24] == wanted:
                        return name
    return ""
