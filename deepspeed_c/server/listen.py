"""The process of a server: a socket, signals, and an end that lets running requests end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
from collections.abc import Iterator
from typing import Any, NamedTuple

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from deepspeed_c.errors import ConfigError
from deepspeed_c.logging import logger
from deepspeed_c.server.app import make_app
from deepspeed_c.server.limits import ServerSettings
from deepspeed_c.server.model import ServedModel

__all__ = ["HttpServer", "Listening", "bind", "check_tls"]

# Open connections get this time to send what they have, after all requests have ended.
_LAST_BYTES_S = 5
# Longer than clients keep a connection (httpx: 5 s), so that none is closed while its client sends the next request.
_KEEP_ALIVE_S = 75
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Listening(NamedTuple):
    """Where a server listens, and how it ends."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    drain_s: float = 30.0
    """Running requests get so much time after the first signal."""
    keyfile: str | None = None
    """Of TLS, with ``certfile``."""
    certfile: str | None = None


def bind(listening: Listening) -> socket.socket:
    """A socket at the address, which takes no connections yet. Raises ConfigError for an address that cannot be had."""
    host, port = listening.host, listening.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
        except BaseException:
            found.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen there: {error}", where=f"--host {host} --port {port}", fix="name an address that is free"
        ) from error
    return found


def check_tls(listening: Listening) -> None:
    """Raises ConfigError for files of TLS that uvicorn would refuse when the model has been loaded, or whose password
    it would ask a terminal for."""
    if listening.certfile is None:
        return
    where = f"--ssl-keyfile {listening.keyfile} --ssl-certfile {listening.certfile}"

    def no_password() -> str:
        raise ConfigError("the key has a password", where=where, fix="write the key without one: openssl pkey")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(listening.certfile, listening.keyfile, no_password)
    except OSError as error:  # ssl.SSLError too
        raise ConfigError(
            f"the files of TLS cannot be used: {error}",
            where=where,
            fix="name a key and its certificate, both in PEM",
        ) from error


class _Protocol(H11Protocol):
    """Gives requests the transport of their connection, so that a reader that is stuck can be cut off."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.app_state = {**self.app_state, "transport": transport}


class HttpServer(uvicorn.Server):
    """Serves a model that has been started.

    The first SIGTERM or SIGINT turns ``/ready`` to 503 and refuses new requests. When the running ones have ended, or
    after ``drain_s``, the server ends. A second signal ends it at once.
    """

    def __init__(self, model: ServedModel, settings: ServerSettings, listening: Listening) -> None:
        app = make_app(model, settings)
        self._model, self._gate, self._listening = model, app.state.gate, listening
        self._draining: asyncio.Task[None] | None = None
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            ssl_keyfile=listening.keyfile,
            ssl_certfile=listening.certfile,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LAST_BYTES_S,
        )
        super().__init__(config)

    def drain(self) -> None:
        """Begins the end; called in the event loop. A second call ends the server at once."""
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())
        else:
            self._draining.cancel()
            self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to take connections, and says where."""
        await super().startup(sockets)
        for sock in sockets or ():
            host, port = sock.getsockname()[:2]
            scheme = "https" if self._listening.certfile else "http"
            where = f"[{host}]" if ":" in host else host
            logger.info("%s is served at %s://%s:%d/v1", self._model.name, scheme, where, port)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own would end the process with the signal, after its end."""
        loop = asyncio.get_running_loop()
        try:
            for each in _SIGNALS:
                loop.add_signal_handler(each, self.drain)
        except (RuntimeError, ValueError):  # not the main thread, where signals do not come
            yield
            return
        try:
            yield
        finally:
            for each in _SIGNALS:
                loop.remove_signal_handler(each)

    async def _drain(self) -> None:
        gate = self._gate
        gate.close()
        logger.info("the server ends: %d request(s) run, and have %g s", gate.n_requests, self._listening.drain_s)
        if not await gate.drained(self._listening.drain_s):
            logger.warning("%d request(s) had not ended, and get an error", gate.n_requests)
            await asyncio.to_thread(self._model.close)
            await gate.drained(_LAST_BYTES_S)
        self.should_exit = True
