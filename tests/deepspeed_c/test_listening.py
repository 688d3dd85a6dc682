"""listening.py: sockets that listen on one address, and refusals."""

from __future__ import annotations

import errno
import socket

import pytest

from deepspeed_c.listening import is_loopback, listening_socket
from tests.network import answers, own_address


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.3"])
def test_only_the_address_that_is_asked_for_answers(host):
    with listening_socket(host, 0) as bound:
        address, port = bound.getsockname()[:2]
        assert port > 0 and (address == host or host == "localhost")
        assert answers(address, port)
        others = {"127.0.0.1", "127.0.0.2", "::1", own_address()} - {address, None}
        assert [other for other in others if answers(other, port)] == []


def test_a_port_that_is_taken():
    with listening_socket("127.0.0.1", 0) as bound:
        with pytest.raises(OSError) as caught:
            listening_socket("127.0.0.1", bound.getsockname()[1])
        assert caught.value.errno == errno.EADDRINUSE
        listening_socket("127.0.0.2", bound.getsockname()[1]).close()  # another address is another socket


def test_a_port_is_free_again_when_its_connections_linger():
    with listening_socket("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            bound.accept()[0].close()  # this end closes first, so it stays in TIME_WAIT for stray packets
    listening_socket("127.0.0.1", port).close()


def test_an_address_of_another_host():
    with pytest.raises(OSError) as caught:
        listening_socket("203.0.113.7", 0)
    assert caught.value.errno == errno.EADDRNOTAVAIL
    with pytest.raises(socket.gaierror):
        listening_socket("no-such-host.invalid", 0)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("::1%lo", True)]
    + [("0.0.0.0", False), ("10.0.0.1", False), ("fe80::1%eth0", False), ("localhost.example.org", False), ("", False)],
)
def test_what_means_this_machine_to_everyone(address, expected):
    assert is_loopback(address) is expected
