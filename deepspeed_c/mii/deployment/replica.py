"""``python -m deepspeed_c.mii.deployment.replica``: the process, or the ranks, of one replica of a deployment.

The main thread makes the service and runs its engine. A second thread reads requests from the supervisor, a third one
writes events, so that the engine waits for nobody. A replica lives as long as its connection to the supervisor.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import os
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from deepspeed_c.background import BackgroundThread
from deepspeed_c.env import read_env
from deepspeed_c.errors import CommError, ConfigError, DeepSpeedCError
from deepspeed_c.mii.config import ModelConfig
from deepspeed_c.mii.deployment import failures, frames, registry

__all__ = ["Service", "main"]

UNSENT_BYTES = 64 * 1024 * 1024
"""Limit of events that wait for the supervisor. A request that goes beyond it ends with an error."""
END_SECONDS = 3.0
"""Time between the order to end and the end by force: a step of the engine, and the exit of the interpreter."""
EXIT_FAILED = 1


class Service(Protocol):
    """A model that answers requests: the work of a replica. A factory makes it from a ``ModelConfig``."""

    def submit(
        self, prompts: list[str], fields: dict[str, Any], emit: Callable[[dict[str, Any]], None]
    ) -> Callable[[], None]:
        """Begins a request, from any thread, and returns a function that cancels it. That one may be called from any
        thread too, also within ``emit``, and after the request's end.

        emit is called from the engine's thread, and returns at once. It gets events of two kinds:

        - {"index": i, "generated_text", "prompt_length", "generated_length", "finish_reason"}, once for each prompt;
          with fields["stream"] any number of pieces with the reason "none" come before;
        - {"error": {"kind", "what", "where", "fix"}}, which ends the request.

        Raises DeepSpeedCError for bad fields, before anything has begun.
        """

    def run(self) -> None:
        """Runs the engine's steps in the calling thread, until ``close``. On ranks above 0, follows rank 0."""

    def close(self) -> None:
        """Makes ``run`` return, from any thread. Running requests end with an error."""


class _RunningRequest:
    """A request of the supervisor, and its number of open answers."""

    def __init__(self, n_prompts: int) -> None:
        self.n_left = n_prompts
        self.cancel: Callable[[], None] | None = None


class _EventSender:
    """Sends events in order: at once where the socket takes them, otherwise from a thread of its own.

    To wake that thread for each event would cost milliseconds while the engine's thread holds the interpreter.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.frames: deque[bytes] = deque()
        self.n_bytes = 0
        self.is_sending = self.is_ended = False
        self.changed = threading.Condition()
        self.thread = BackgroundThread(self._run, name="events of a replica", end=self.end, limit_s=1.0)

    def put(self, *bodies: bytes, is_small: bool = False) -> bool:
        """Queue a message. False: there is no space for it. A small message (``is_small``) always finds space."""
        packed = b"".join(map(frames.pack, bodies))
        with self.changed:
            if not is_small and self.n_bytes + len(packed) > UNSENT_BYTES:
                return False
            if not self.frames and not self.is_sending:
                try:
                    packed = packed[self.connection.send(packed, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    pass
                except OSError:
                    return True  # the supervisor has died, and the reading thread ends this process
            if not packed:
                return True
            self.frames.append(packed)
            self.n_bytes += len(packed)
            self.changed.notify()
            return True

    def end(self) -> None:
        """Ends the thread after the messages so far."""
        with self.changed:
            self.is_ended = True
            self.changed.notify()

    def _run(self) -> None:
        while True:
            with self.changed:
                while not self.frames and not self.is_ended:
                    self.changed.wait()
                if not self.frames:
                    return
                packed = b"".join(self.frames)
                self.frames.clear()
                self.is_sending = True
            try:
                self.connection.sendall(packed)
            except OSError:
                return  # as in put
            with self.changed:
                self.n_bytes -= len(packed)
                self.is_sending = False


class _SupervisorLink:
    """A replica's side of the connection to the supervisor."""

    def __init__(self, folder: Path, connection: socket.socket, index: int) -> None:
        self.folder, self.connection = folder, connection
        self.writer = _EventSender(connection)
        self.lock = threading.Lock()
        self.requests: dict[int, _RunningRequest] = {}
        self.service: Service | None = None
        self.hangs_up = False
        self.is_ended_by_order = False
        self.tell({"replica": index})
        self.reader = BackgroundThread(self._read, name="requests of a replica", end=self._hang_up, limit_s=1.0)

    def start(self) -> None:
        self.writer.thread.start()
        self.reader.start()

    def tell(self, message: dict[str, Any]) -> None:
        self.writer.put(frames.dump(message), is_small=True)

    def set_service(self, service: Service) -> None:
        with self.lock:
            self.service = service
        self.tell({"ready": True})

    def _hang_up(self) -> None:
        """Called while the interpreter ends: the process is about to go, and the last messages are to be written."""
        self.hangs_up = True
        try:
            self.connection.shutdown(socket.SHUT_RD)
        except OSError:
            return  # the other side has closed it

    def _read(self) -> None:
        try:
            while (head := frames.receive(self.connection, frames.HEADER_BYTES)) is not None:
                match frames.parse(head):
                    case {"id": int(number)}:
                        body = frames.receive(self.connection, frames.REQUEST_BYTES)
                        if body is None:
                            break
                        self._begin(number, body)
                    case {"cancel": int(number)}:
                        self._cancel(number)
                    case {"close": True}:
                        self.is_ended_by_order = True
                        break
        except (OSError, CommError):
            traceback.print_exc()
        finally:
            if not self.hangs_up:
                self._end()

    def _end(self) -> None:
        """The deployment is over. It may be over before the model has been loaded."""
        # This limit needs no lock of the interpreter, which a stuck call may hold.
        faulthandler.dump_traceback_later(END_SECONDS, exit=True)
        with contextlib.suppress(OSError, DeepSpeedCError):
            registry.remove(self.folder)  # of a supervisor that was killed; one that lives removes it by itself
        with self.lock:
            service = self.service
            if service is None:
                os._exit(EXIT_FAILED)
        service.close()

    def _begin(self, number: int, body: bytes) -> None:
        try:
            prompts, fields = _request(body)
            running = _RunningRequest(len(prompts))
            with self.lock:
                self.requests[number] = running
            if self.service is None:
                raise CommError("it is not ready yet", where="a replica")
            cancel = self.service.submit(prompts, fields, lambda event: self._emit(number, event))
        except DeepSpeedCError as error:
            self._fail(number, error)
        except Exception as error:  # noqa: BLE001 - any error of a request ends this request alone
            traceback.print_exc()
            self._fail(number, DeepSpeedCError(f"{type(error).__name__}: {error}", where="a request"))
        else:
            with self.lock:
                is_wanted = number in self.requests
                running.cancel = cancel
            if not is_wanted and running.n_left:
                cancel()

    def _fail(self, number: int, error: DeepSpeedCError) -> None:
        with self.lock:
            self.requests.pop(number, None)
        event = frames.dump({"error": failures.message_of(error)})
        self.writer.put(frames.dump({"id": number, "is_last": True}), event, is_small=True)

    def _cancel(self, number: int) -> None:
        with self.lock:
            running = self.requests.pop(number, None)
        if running is not None and running.cancel is not None:
            running.cancel()

    def _emit(self, number: int, event: dict[str, Any]) -> None:
        """Called by the engine's thread."""
        body = frames.dump(event)
        with self.lock:
            running = self.requests.get(number)
            if running is None:
                return  # cancelled, or ended
            if "error" in event:
                running.n_left = 0
            elif event["finish_reason"] != "none":
                running.n_left -= 1
            is_last = running.n_left == 0
            if is_last:
                del self.requests[number]
        is_small = "error" in event
        if len(body) > frames.FRAME_BYTES:
            problem = f"an answer has {len(body)} bytes; the limit is {frames.FRAME_BYTES}"
        elif not self.writer.put(frames.dump({"id": number, "is_last": is_last}), body, is_small=is_small):
            problem = f"{UNSENT_BYTES} bytes of answers wait, and the deployment's process does not read them"
        else:
            return
        self._fail(number, CommError(problem, where="a replica", fix="ask for shorter answers"))
        if running.cancel is not None:
            running.cancel()


def _request(body: bytes) -> tuple[list[str], dict[str, Any]]:
    message = frames.parse(body)
    prompts, fields = message.get("prompts"), message.get("fields")
    if not isinstance(prompts, list) or not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise ConfigError("is no list of strings with at least one", where="prompts", fix="give one string or more")
    if not isinstance(fields, dict):
        raise ConfigError(f"is a {type(fields).__name__}", where="fields", fix="give an object")
    return prompts, fields


def _factory(name: str) -> Callable[[ModelConfig], Service]:
    module, _, function = name.partition(":")
    found: Callable[[ModelConfig], Service] = getattr(importlib.import_module(module), function)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank of a replica until the deployment ends. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deepspeed_c.mii.deployment.replica")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the deployment")
    parser.add_argument("--index", type=int, required=True, help="number of the replica")
    parser.add_argument("--factory", required=True, help="module:function that makes the service")
    options = parser.parse_args(argv)
    name, config = registry.read_description(options.folder)
    link = None
    if read_env().rank == 0:
        # Connected before the model is loaded, so that this process ends with the deployment from now on.
        link = _SupervisorLink(options.folder, registry.connect(name), options.index)
        link.start()
    try:
        service = _factory(options.factory)(ModelConfig(**config["model"]))
    except DeepSpeedCError as error:
        traceback.print_exc()
        if link is not None:
            link.tell({"failed": failures.message_of(error)})
        return EXIT_FAILED
    if link is not None:
        link.set_service(service)
    service.run()
    # After a failure the launcher ends the other ranks too, even if they wait for something else than rank 0.
    return 0 if link is None or link.is_ended_by_order else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
