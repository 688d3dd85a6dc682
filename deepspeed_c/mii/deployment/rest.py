"""The HTTP server of a deployment: MII's REST gateway, in the deployment's own process.

    POST /mii/NAME   {"prompts": one string or a list, ...fields}  ->  a list of responses
    GET /healthz     "ok"
    GET /terminate   ends the deployment

The event loop of the deployment accepts connections; a thread serves each, as a client of the deployment's socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socketserver
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import unquote

from deepspeed_c.errors import CommError, ConfigError, DeepSpeedCError, FeatureError, LaunchError
from deepspeed_c.listening import is_loopback, listening_socket
from deepspeed_c.logging import write_line
from deepspeed_c.mii.deployment import failures, frames
from deepspeed_c.mii.deployment.client import ask

__all__ = ["RestServer"]

IDLE_SECONDS = 60.0
"""Limit of a pause within a request. A longer pause ends the connection, because a slow client holds a thread."""
DISCARDED_BYTES = 100_000_000
"""Part of a body above the limit that is read, so that its sender sees the answer."""


class RestServer(ThreadingHTTPServer):
    """Listens from the start; serves between ``start`` and ``stop``."""

    daemon_threads = True

    def __init__(self, name: str, host: str, port: int, n_handlers: int, on_terminate: Callable[[], object]) -> None:
        """name: the deployment. n_handlers: most requests at one time; others wait to be accepted. on_terminate: called
        in the event loop.

        Raises LaunchError if the port cannot be had.
        """
        # A name has several addresses; the IPv4 one is the gateway's of MII.
        host = "127.0.0.1" if host == "localhost" else host
        try:
            listening = listening_socket(host, port)
        except OSError as error:
            raise LaunchError(
                f"cannot listen at {host}, port {port}: {error.strerror or error}",
                where="restful_api_port",
                fix="give another restful_api_port or restful_api_host",
            ) from None
        socketserver.BaseServer.__init__(self, listening.getsockname(), _RestHandler)  # HTTPServer would look up names
        listening.setblocking(False)
        self.socket, self.name, self.on_terminate = listening, name, on_terminate
        self.loop: asyncio.AbstractEventLoop | None = None
        self.is_open = False
        self.n_handlers = self.n_free = n_handlers
        self.answered = asyncio.Event()
        if not is_loopback(host):
            write_line(f"the REST server listens at {host}: anyone who reaches it may use and end it", sys.stderr)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to serve. loop: the running event loop, which also calls ``stop``."""
        self.loop, self.is_open = loop, True
        loop.add_reader(self.socket, self.handle_request)

    async def stop(self, limit_s: float) -> None:
        """Accepts no more connections, and waits until the running requests have their answers."""
        if self.loop is not None and self.is_open:
            self.loop.remove_reader(self.socket)
        self.is_open = False
        self.socket.close()
        self.answered.clear()
        if self.n_free < self.n_handlers:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.answered.wait(), limit_s)

    def terminate(self) -> None:
        """Ends the deployment, from any thread."""
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.on_terminate)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.n_free -= 1
        if self.n_free == 0 and self.loop is not None:
            self.loop.remove_reader(self.socket)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # there is no thread to be had
            self._end_request()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            if self.loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self.loop.call_soon_threadsafe(self._end_request)

    def _end_request(self) -> None:
        self.n_free += 1
        if self.n_free == self.n_handlers:
            self.answered.set()
        if self.n_free == 1 and self.is_open and self.loop is not None:
            self.loop.add_reader(self.socket, self.handle_request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, (ConnectionError, TimeoutError)):  # a client that has gone needs no traceback
            super().handle_error(request, client_address)


class _Refused(Exception):
    """A request that gets an answer without the deployment's help."""

    def __init__(self, status: HTTPStatus, error: DeepSpeedCError) -> None:
        super().__init__(str(error))
        self.status, self.error = status, error


class _RestHandler(BaseHTTPRequestHandler):
    server: RestServer
    timeout = IDLE_SECONDS
    server_version = "deepspeed_c"
    protocol_version = "HTTP/1.1"
    n_unread = 0
    pages: ClassVar[dict[str, str]] = {"/healthz": "ok", "/terminate": "Shutting down RESTful API gateway server"}

    def do_GET(self) -> None:
        try:
            self._refuse_other_sites()
            page = self.pages.get(self.path)
            if page is None:
                raise self._no_page(f"GET {' or '.join(self.pages)}")
        except _Refused as refusal:
            self._answer_error(refusal.status, refusal.error)
            return
        self._answer(HTTPStatus.OK, page.encode(), "text/plain; charset=utf-8")
        if self.path == "/terminate":
            self.server.terminate()

    def do_POST(self) -> None:
        try:
            self._refuse_other_sites()
            if unquote(self.path) != f"/mii/{self.server.name}":
                raise self._no_page(f"POST /mii/{self.server.name}")
            prompts, fields = self._request()
            answers = dict(ask(self.server.name, prompts, fields, asker=self.connection))
        except _Refused as refusal:
            self._answer_error(refusal.status, refusal.error)
        except DeepSpeedCError as error:
            is_of_client = isinstance(error, ValueError) and not isinstance(error, LaunchError)
            self._answer_error(HTTPStatus.BAD_REQUEST if is_of_client else HTTPStatus.INTERNAL_SERVER_ERROR, error)
        else:
            responses = [answers[i].to_msg_dict() for i in range(len(prompts))]
            self._answer(HTTPStatus.OK, json.dumps(responses).encode(), "application/json")

    def log_message(self, format: str, *args: Any) -> None:
        """Requests leave no lines in the log: it would grow without end."""

    def _refuse_other_sites(self) -> None:
        """A page of some website must not use or end the deployment by way of the user's browser."""
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            error = FeatureError("comes from a page of another site", where="the request")
            raise _Refused(HTTPStatus.FORBIDDEN, error)

    def _no_page(self, known: str) -> _Refused:
        return _Refused(
            HTTPStatus.NOT_FOUND, FeatureError("there is no such page", where=self.path, fix=f"use {known}")
        )

    def _request(self) -> tuple[list[str], dict[str, Any]]:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            error = ConfigError("is missing or no number", where="Content-Length", fix="send the body's length")
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, error)
        self.n_unread = int(length)
        if self.n_unread > frames.REQUEST_BYTES:
            raise _Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                ConfigError(
                    f"has {self.n_unread} bytes; the limit is {frames.REQUEST_BYTES}",
                    where="the body",
                    fix="send fewer or shorter prompts in one request",
                ),
            )
        try:
            body = self.rfile.read(self.n_unread)
            self.n_unread = 0
        except TimeoutError:
            error = CommError(f"has not come within {IDLE_SECONDS:g} s", where="the body")
            raise _Refused(HTTPStatus.REQUEST_TIMEOUT, error) from None
        try:
            message = frames.parse(body)
        except CommError as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, ConfigError(error.what, where="the body", fix="send JSON")) from None
        prompts = message.pop("prompts", None)
        texts = [prompts] if isinstance(prompts, str) else prompts
        if not isinstance(texts, list) or not texts:
            raise ConfigError("is no string and no list of strings", where="prompts", fix="give one prompt or more")
        if message.get("stream"):
            raise ConfigError("is true; the REST server sends whole answers", where="stream", fix="leave it out")
        return texts, message

    def _answer_error(self, status: HTTPStatus, error: DeepSpeedCError) -> None:
        self._answer(status, json.dumps({"error": failures.message_of(error)}).encode(), "application/json")
        # A client that still sends its body reads no answer before it has sent all of it.
        n_left = min(self.n_unread, DISCARDED_BYTES)
        while n_left > 0 and (discarded := self.rfile.read(min(n_left, 65536))):
            n_left -= len(discarded)

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")  # an idle connection would hold a thread
        self.end_headers()
        self.wfile.write(body)
