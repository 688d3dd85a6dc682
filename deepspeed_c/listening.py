"""Where a store of the ranks listens: at the one address that the ranks are told, not at every address of the host.
Knows no torch.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

__all__ = ["is_loopback", "listening_socket"]


def listening_socket(host: str, port: int) -> socket.socket:
    """A TCP socket that listens at the first address of ``host``, a name or an address, that is this machine's; port 0
    takes a free one.

    It is for ``master_listen_fd`` of torch's ``TCPStore``, which by itself listens at all addresses. Raises
    ``OSError``: ``EADDRNOTAVAIL`` where no address of ``host`` is this machine's, ``EADDRINUSE``, or
    ``socket.gaierror`` for a name that is not known.
    """
    problem: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        bound = socket.socket(family, kind, protocol)
        try:
            # As torch's own: connections of an earlier run that linger are no reason to refuse a port.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(socket.SOMAXCONN)
            return bound
        except OSError as error:
            bound.close()
            # A name may have addresses of other families or hosts; a taken port at an address of this host says more.
            if problem is None or problem.errno == errno.EADDRNOTAVAIL:
                problem = error
    raise problem or OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))


def is_loopback(address: str) -> bool:
    """Whether ``address`` means this machine to everyone who reads it: a loopback address, or "localhost"."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False  # another name
