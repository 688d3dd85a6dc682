"""The listening socket of a store: it listens only at the address that the ranks connect to, not at every address of
the host. This module needs no torch.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

__all__ = ["is_loopback", "listening_socket"]


def listening_socket(host: str, port: int) -> socket.socket:
    """A TCP socket that listens at an address of ``host`` (a name or an address): the first that belongs to this
    machine. Port 0 means any free port.

    The socket is for ``master_listen_fd`` of torch's ``TCPStore``, which by default listens at all addresses. Raises
    ``OSError``: ``EADDRNOTAVAIL`` if no address of ``host`` belongs to this machine, ``EADDRINUSE``, or
    ``socket.gaierror`` for an unknown name.
    """
    problem: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        bound = socket.socket(family, kind, protocol)
        try:
            # As in torch: lingering connections of an earlier run are no reason to refuse a port.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(socket.SOMAXCONN)
            return bound
        except OSError as error:
            bound.close()
            # A name may have addresses of other families or hosts. A port in use at an address of this host is the more
            # useful error.
            if problem is None or problem.errno == errno.EADDRNOTAVAIL:
                problem = error
    raise problem or OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))


def is_loopback(address: str) -> bool:
    """Whether ``address`` means the own machine on every host: a loopback address, or "localhost"."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False  # any other name
