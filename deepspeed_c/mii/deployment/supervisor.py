"""The process of a deployment: ``python -m deepspeed_c.mii.deployment.supervisor``.

It starts the replicas, accepts clients, and passes requests and events on. It imports no torch, never looks into
prompts and answers, and waits for nothing but sockets and processes. Connections:

    client:  {"generate": true} and the request  ->  events, until the client closes the connection
             {"terminate": true}                 ->  the connection ends with this process
    replica: {"replica": index}; then {"ready": true} or {"failed": error}; then pairs {"id", "is_last"} and the event
             <- pairs {"id"} and the request; {"cancel": id}; {"close": true}

The end of a connection shows each side that the other one has died.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed_c.errors import CommError, DeepSpeedCError, LaunchError
from deepspeed_c.logging import write_line
from deepspeed_c.mii.deployment import failures, frames, registry
from deepspeed_c.mii.deployment.logs import tail
from deepspeed_c.mii.deployment.rest import RestServer

__all__ = ["main"]

UNSENT_BYTES = 64 * 1024 * 1024
"""A client that leaves more unread is cut off, so that it does not fill the memory of all."""
END_SECONDS = 5.0
"""Time for replicas to end by themselves at the end of the deployment."""
ANSWER_SECONDS = 1.0
"""Time for the last answers to be written."""
DEATH_SECONDS = 0.3
"""Time to wait for the exit code of a replica whose connection has ended, before its clients are told."""


class _ClientRequest:
    """A request that a replica works on."""

    def __init__(self, number: int, replica: _Replica, client: asyncio.StreamWriter) -> None:
        self.number, self.replica, self.client = number, replica, client


class _Replica:
    """A replica's process and connection, and the requests that it works on."""

    def __init__(self, index: int, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        """environment: variables of this replica; the others are inherited from this process."""
        self.index, self.command, self.environment, self.log = index, command, environment, log
        self.process: asyncio.subprocess.Process | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.turn = asyncio.Lock()
        self.requests: dict[int, _ClientRequest] = {}
        self.is_ready = False
        self.failure: DeepSpeedCError | None = None

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                start_new_session=True,  # a group of its own, so that all of it can be killed
            )

    def send(self, *bodies: bytes) -> None:
        if self.writer is not None:
            self.writer.write(b"".join(map(frames.pack, bodies)))

    def kill(self) -> None:
        """End the process and its group. The launcher's ranks have groups of their own, and end with the launcher."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def end_of_process(self) -> str:
        code = None if self.process is None else self.process.returncode
        if code is None:
            return "closed its connection"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class Supervisor:
    """A deployment. ``run`` returns at its end."""

    def __init__(self, folder: Path, fd: int, ready: socket.socket, factory: str) -> None:
        """folder: reserved in the registry, and open as ``fd``. ready: where the starting process waits. factory:
        "module:function" that makes a replica's ``Service``."""
        self.folder, self.fd, self.ready = folder, fd, ready
        self.name, self.config = registry.read_description(folder)
        self.replicas = [
            _Replica(i, self._command(i, place, factory), place["environment"], folder / f"replica-{i}.log")
            for i, place in enumerate(self.config["places"])
        ]
        self.numbers = itertools.count()
        self.clients: set[asyncio.StreamWriter] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.ended = asyncio.Event()
        self.failure: DeepSpeedCError | None = None
        self.is_ready = False
        self.rest: RestServer | None = None

    def _command(self, index: int, place: dict[str, Any], factory: str) -> list[str]:
        module = "deepspeed_c.mii.deployment.replica"
        arguments = ["--folder", str(self.folder), "--index", str(index), "--factory", factory]
        n_ranks = int(self.config["tensor_parallel"])
        if n_ranks == 1:
            return [sys.executable, "-m", module, *arguments]
        launcher = [sys.executable, "-m", "deepspeed_c", "--num_gpus", str(n_ranks), "--no_local_rank"]
        if place["master_port"] is not None:
            launcher += ["--master_port", str(place["master_port"])]
        return [*launcher, "--module", module, *arguments]

    async def run(self) -> None:
        """Starts everything, serves until the end, and leaves nothing behind."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.end)
        try:
            try:
                await self._start()
            except DeepSpeedCError as error:
                self.end(error)
            await self.ended.wait()
        finally:
            await self._stop()

    def end(self, failure: DeepSpeedCError | None = None) -> None:
        """Makes ``run`` end. failure: the reason, if it is none that somebody has asked for."""
        if not self.ended.is_set():
            self.failure = failure
            self.ended.set()

    async def _start(self) -> None:
        listening = registry.listening_socket(self.fd)
        self.server = await asyncio.start_unix_server(self._accept, sock=listening)
        rest = self.config["rest"]
        if rest is not None:
            self.rest = RestServer(self.name, **rest, on_terminate=self.end)
        self._watch(self._creator())
        for replica in self.replicas:
            await replica.start()
            self._watch(self._process(replica))

    def _watch(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _creator(self) -> None:
        """The process that starts the deployment may die before the deployment is ready."""
        loop = asyncio.get_running_loop()
        self.ready.setblocking(False)
        with contextlib.suppress(ConnectionError):
            await loop.sock_recv(self.ready, 1)
        if not self.is_ready:
            self.end(CommError("the process that starts it has ended", where=f"deployment {self.name!r}"))

    async def _process(self, replica: _Replica) -> None:
        """A replica's process ends, maybe before it has connected."""
        assert replica.process is not None
        await replica.process.wait()
        if replica.writer is None:
            self._lose(replica)

    def _become_ready(self) -> None:
        if self.ended.is_set() or self.is_ready or not all(replica.is_ready for replica in self.replicas):
            return
        self.is_ready = True
        if self.rest is not None:
            self.rest.start(asyncio.get_running_loop())
        with contextlib.suppress(OSError):
            self.ready.sendall(frames.pack(frames.dump({"ready": True})))
        write_line(f"deployment {self.name!r} is ready", sys.stderr)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, to its end."""
        self.clients.add(writer)
        try:
            head = await frames.read(reader, frames.HEADER_BYTES)
            if head is None:
                return
            match frames.parse(head):
                case {"replica": int(index)} if 0 <= index < len(self.replicas):
                    await self._replica(self.replicas[index], reader, writer)
                case {"generate": True}:
                    await self._client(reader, writer)
                case {"terminate": True}:
                    self.end()
                    await reader.read(1)  # the connection ends with this process
                case message:
                    raise CommError(f"is unknown: {message}", where="a message of a deployment")
        except CommError as error:
            self._answer(writer, error)
        except ConnectionError:
            pass
        finally:
            self.clients.discard(writer)
            writer.close()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = await frames.read(reader, frames.REQUEST_BYTES)
        if body is None:
            return
        usable = [replica for replica in self.replicas if replica.is_ready]
        if self.ended.is_set() or not usable:
            raise self._ending()
        replica = min(usable, key=lambda each: len(each.requests))
        request = _ClientRequest(next(self.numbers), replica, writer)
        replica.requests[request.number] = request
        try:
            async with replica.turn:
                if replica.writer is not None:
                    replica.send(frames.dump({"id": request.number}), body)
                    del body
                    await replica.writer.drain()
            await reader.read(1)  # a client sends no more, and closes the connection when it has its answers
        finally:
            if replica.requests.pop(request.number, None) is not None:
                replica.send(frames.dump({"cancel": request.number}))

    async def _replica(self, replica: _Replica, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if replica.writer is not None:
            raise CommError("is connected already", where=f"replica {replica.index}")
        replica.writer = writer
        try:
            while (head := await frames.read(reader, frames.HEADER_BYTES)) is not None:
                match frames.parse(head):
                    case {"id": int(number), "is_last": bool(is_last)}:
                        event = await frames.read(reader)
                        if event is not None:
                            self._pass_on(replica, number, event, is_last)
                    case {"ready": True}:
                        replica.is_ready = True
                        self._become_ready()
                    case {"failed": dict(error)}:
                        replica.failure = failures.error_of(error)
        except (CommError, ConnectionError) as error:
            write_line(f"replica {replica.index}: {error}", sys.stderr)
        finally:
            replica.is_ready = False
            if replica.process is not None and replica.process.returncode is None:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(replica.process.wait(), DEATH_SECONDS)
            self._lose(replica)

    def _pass_on(self, replica: _Replica, number: int, event: bytes, is_last: bool) -> None:
        request = replica.requests.get(number)
        if request is None:
            return  # the client has gone
        transport = request.client.transport
        if transport.get_write_buffer_size() > UNSENT_BYTES:
            write_line("a client that does not read its answers is cut off", sys.stderr)
            transport.abort()
            return
        request.client.write(frames.pack(event))
        if is_last:
            del replica.requests[number]

    def _lose(self, replica: _Replica) -> None:
        """A replica has ended, or its connection has."""
        replica.is_ready = False
        replica.kill()
        error = self._ending() if self.ended.is_set() else self._lost(replica)
        for request in replica.requests.values():
            self._answer(request.client, error)
        replica.requests.clear()
        if self.ended.is_set():
            return
        write_line(str(error), sys.stderr)
        # A deployment starts with all replicas, and ends with the last of them.
        if not self.is_ready or not any(each.is_ready for each in self.replicas):
            self.end(error)

    def _lost(self, replica: _Replica) -> DeepSpeedCError:
        where = f"replica {replica.index} of deployment {self.name!r}"
        if self.is_ready:
            return CommError(f"it {replica.end_of_process()}\n{tail(replica.log)}", where=where)
        if replica.failure is not None:
            return replica.failure
        return LaunchError(f"it {replica.end_of_process()} before it was ready\n{tail(replica.log)}", where=where)

    def _ending(self) -> DeepSpeedCError:
        if self.failure is not None:
            return self.failure
        what = "it is ending" if self.ended.is_set() else "it is not ready yet"
        return CommError(what, where=f"deployment {self.name!r}")

    def _answer(self, client: asyncio.StreamWriter, error: DeepSpeedCError) -> None:
        client.write(frames.pack(frames.dump({"error": failures.message_of(error)})))

    async def _stop(self) -> None:
        for replica in self.replicas:
            if replica.process is None:
                continue
            if replica.writer is None:
                replica.kill()  # it has not begun to listen for an end
            replica.send(frames.dump({"close": True}))
        ends = [asyncio.ensure_future(replica.process.wait()) for replica in self.replicas if replica.process]
        if ends:
            await asyncio.wait(ends, timeout=END_SECONDS)
        for replica in self.replicas:
            replica.kill()
        if ends:
            await asyncio.wait(ends)
        for replica in self.replicas:
            self._lose(replica)
        for client in list(self.clients):  # write the last answers
            with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
                await asyncio.wait_for(client.drain(), ANSWER_SECONDS)
        if self.rest is not None:
            await self.rest.stop(ANSWER_SECONDS)
        if self.failure is not None and not self.is_ready:
            self.ready.setblocking(True)
            with contextlib.suppress(OSError):
                self.ready.sendall(frames.pack(frames.dump({"error": failures.message_of(self.failure)})))
        registry.remove(self.folder, self.fd)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the deployment whose folder is reserved. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deepspeed_c.mii.deployment.supervisor")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the deployment")
    parser.add_argument("--fd", type=int, required=True, help="the same folder, open and locked")
    parser.add_argument("--ready-fd", type=int, required=True, help="socket of the process that waits for the start")
    parser.add_argument("--factory", required=True, help="module:function that makes a replica's service")
    options = parser.parse_args(argv)
    os.set_inheritable(options.fd, False)
    os.set_inheritable(options.ready_fd, False)
    if os.fork():  # the creator need not wait for the deployment, and no terminal can become its own
        os._exit(0)
    with socket.socket(fileno=options.ready_fd) as ready:
        asyncio.run(_run(options.folder, options.fd, ready, options.factory))
    return 0


async def _run(folder: Path, fd: int, ready: socket.socket, factory: str) -> None:
    await Supervisor(folder, fd, ready, factory).run()


if __name__ == "__main__":
    sys.exit(main())
