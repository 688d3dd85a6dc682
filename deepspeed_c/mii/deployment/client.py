"""``MIIClient``: requests to a running deployment."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from deepspeed_c.errors import CommError, ConfigError, FeatureError
from deepspeed_c.mii.config import MIIConfig
from deepspeed_c.mii.data import Response
from deepspeed_c.mii.deployment import failures, frames, registry

__all__ = ["MIIClient", "ask"]


class MIIClient:
    """Sends requests to a deployment, from any number of threads at once; a request has a connection of its own."""

    def __init__(self, mii_config: MIIConfig, host: str = "localhost") -> None:
        """mii_config: of a deployment that runs; ``mii.client`` finds it by name.

        Raises FeatureError if ``host`` is another host: a deployment's socket is a file of its host.
        """
        if host not in ("localhost", "127.0.0.1", "::1"):
            raise FeatureError(
                f"is {host!r}; a client must run on the host of its deployment",
                where="host",
                fix="start the deployment with enable_restful_api=True, and send requests to its port",
            )
        self.mii_config = mii_config

    def __call__(self, *args: Any, **kwargs: Any) -> list[Response] | None:
        """The same as ``generate``."""
        return self.generate(*args, **kwargs)

    def generate(
        self,
        prompts: str | Sequence[str],
        streaming_fn: Callable[[list[Response]], object] | None = None,
        **generate_kwargs: Any,
    ) -> list[Response] | None:
        """Generates a text for each prompt, and returns the responses in the order of the prompts.

        Args:
            prompts: one prompt or several.
            streaming_fn: called with a list of one response for each piece of the text, as soon as it is there; its
                ``finish_reason`` is NONE except for the last piece. Nothing is returned then. For one prompt only.
            generate_kwargs: the fields of ``GenerateParamsConfig``.

        Raises:
            ConfigError: a field is unknown or has a value that does not work; the request is too long.
            CommError: the deployment does not run, or has ended before the answer was there.
            DeepSpeedCError: the request failed. The class is the one of the server's error.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        fields = dict(generate_kwargs)
        if streaming_fn is not None:
            if len(texts) != 1:
                raise ConfigError(
                    f"has {len(texts)} prompts; streaming_fn works with one",
                    where="prompts",
                    fix="call generate once for each prompt; several threads may do so at once",
                )
            fields["stream"] = True
        elif fields.get("stream"):
            raise ConfigError("is true, but nothing takes the pieces", where="stream", fix="give a streaming_fn")
        answers: dict[int, Response] = {}
        for index, response in ask(self.mii_config.deployment_name, texts, fields):
            if streaming_fn is not None:
                streaming_fn([response])
            else:
                answers[index] = response
        return None if streaming_fn is not None else [answers[i] for i in range(len(texts))]

    def terminate_server(self) -> None:
        """Ends the deployment, whichever process has started it. Running requests get an error. On return its processes
        have ended, and the name is free.

        Raises CommError if it does not run.
        """
        with contextlib.closing(registry.connect(self.mii_config.deployment_name)) as connection:
            connection.sendall(frames.pack(frames.dump({"terminate": True})))
            # Its end may come with unread data in the socket.
            with contextlib.suppress(ConnectionError):
                while connection.recv(4096):
                    pass

    async def terminate_async(self) -> None:
        """``terminate_server`` for coroutines."""
        await asyncio.get_running_loop().run_in_executor(None, self.terminate_server)


def ask(
    name: str, prompts: list[str], fields: dict[str, Any], asker: socket.socket | None = None
) -> Iterator[tuple[int, Response]]:
    """Sends a request to the deployment ``name`` and yields its answers, each with the index of its prompt. If the
    iterator is closed before its end, the request is cancelled.

    asker: the socket of the client behind this request. When that client closes it, the request ends with a CommError.
    """
    body = _body(prompts, fields)
    where = f"deployment {name!r}"
    with contextlib.closing(registry.connect(name)) as connection:
        try:
            connection.sendall(frames.pack(frames.dump({"generate": True})) + frames.pack(body))
            n_left = len(prompts)
            while n_left or not prompts:
                if asker is not None:
                    _wait(connection, asker)
                event = frames.receive(connection)
                if event is None:
                    raise CommError("it has ended, and the answer is not complete", where=where)
                message = frames.parse(event)
                if "error" in message:
                    raise failures.error_of(message["error"])
                index = message.pop("index")
                n_left -= message["finish_reason"] != "none"
                yield index, Response.from_msg_dict(message)
        except ConnectionError as error:
            raise CommError(f"it has ended: {error}", where=where, fix="start it again with mii.serve") from None


def _wait(connection: socket.socket, asker: socket.socket) -> None:
    """Until there is something to read from the deployment."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.register(asker, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if connection.fileno() in ready:
            return
        try:
            is_there = bool(asker.recv(1, socket.MSG_PEEK))
        except OSError:
            is_there = False
        if not is_there:
            raise CommError("has closed its connection", where="the client of a request")
        poll.unregister(asker)  # it has sent more than its request: its end cannot be seen behind that


def _body(prompts: list[str], fields: dict[str, Any]) -> bytes:
    try:
        body = frames.dump({"prompts": prompts, "fields": fields})
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"cannot be sent to a deployment: {error}",
            where=_unsendable({"prompts": prompts, **fields}),
            fix="give strings, numbers, and lists of them",
        ) from None
    if len(body) > frames.REQUEST_BYTES:
        raise ConfigError(
            f"the request takes {len(body)} bytes; the limit is {frames.REQUEST_BYTES}",
            where="prompts",
            fix="send fewer or shorter prompts in one request",
        )
    return body


def _unsendable(values: dict[str, Any]) -> str:
    """The name of the first value that JSON does not have."""
    for name, value in values.items():
        try:
            frames.dump({name: value})
        except (TypeError, ValueError, RecursionError):
            return name
    return "the request"
