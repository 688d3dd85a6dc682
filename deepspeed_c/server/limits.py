"""Who may ask, and for how much at one time."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deepspeed_c.ops.sample import Rules
from deepspeed_c.server.errors import RequestRefused

__all__ = ["ApiKeys", "Gate", "ServerSettings"]

_MEBIBYTE = 1 << 20
_NO_RULES = Rules()


@dataclass(frozen=True)
class ServerSettings:
    """The options of a server."""

    names: tuple[str, ...] = ()
    """Names of the model in requests; the first one is in answers. (): the name of the model itself."""
    keys: tuple[str, ...] = field(default=(), repr=False)
    """One of them has to be in each request. (): requests need none."""
    shares_prefixes: bool = False
    """Prompts find prefixes of requests with other keys in the memory, which tells by the time that they are there."""
    max_body_bytes: int = 4 * _MEBIBYTE
    max_requests: int = 1024
    """Answers that run or wait at one time, over all requests."""
    max_requests_per_key: int = 256
    """Requests of one key at one time."""
    max_n: int = 16
    """Answers of one request."""
    max_logprobs: int = 20
    """Most probable tokens beside each token."""
    stall_s: float = 60.0
    """Time after which a client that reads nothing of its stream is cut off."""
    chat_template: str | None = None
    """In place of the tokenizer's own."""
    response_role: str = "assistant"
    rules: Rules = _NO_RULES
    """Of requests that do not give their own."""
    logs_requests: bool = False
    """Whether prompts and fields are logged."""
    cors: tuple[tuple[str, tuple[str, ...] | bool], ...] = ()
    """Arguments of starlette's CORSMiddleware. (): pages of other origins cannot read answers."""


class ApiKeys:
    """The keys of clients. Their digests are kept, and compared in a time that does not depend on what is equal."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def owner(self, header: str | None) -> str:
        """A name for the key of an ``Authorization`` header, "" where no key is needed. It does not reveal the key.

        Raises RequestRefused with the status 401.
        """
        if not self._digests:
            return ""
        kind, _, key = (header or "").partition(" ")
        digest = _digest(key.strip())
        is_known = False
        for each in self._digests:
            is_known |= hmac.compare_digest(digest, each)
        if not is_known or kind.lower() != "bearer":
            raise RequestRefused(
                "there is no key in the request" if not key else "the key is none of this server's",
                param="Authorization",
                fix="send the header Authorization: Bearer KEY; api_key of the client does it",
                status=401,
                code="invalid_api_key",
            )
        return digest.hex()[:16]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


class Gate:
    """Counts requests that are inside, and lets no more in than the settings allow. Used from one event loop."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._requests: Counter[str] = Counter()
        self.n_answers = 0
        """Answers that run or wait."""
        self.is_draining = False
        """Whether nothing new is let in."""
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @property
    def n_requests(self) -> int:
        return sum(self._requests.values())

    def enter(self, owner: str, n: int) -> Callable[[], None]:
        """Lets a request of ``n`` answers in, and returns the function that lets it out, once.

        Raises RequestRefused with the status 429 at a limit, 503 while the server ends.
        """
        self.check_open()
        most, most_of_key = self._settings.max_requests, self._settings.max_requests_per_key
        if self.n_answers + n > most:
            raise _too_many(f"{self.n_answers} answers run or wait, {n} more are asked for, and {most} are the most")
        if self._requests[owner] >= most_of_key:
            raise _too_many(f"{self._requests[owner]} requests of this key run or wait, and {most_of_key} are the most")
        self.n_answers += n
        self._requests[owner] += 1
        self._is_empty.clear()
        left = [n]

        def leave() -> None:
            if not left:
                return
            self.n_answers -= left.pop()
            self._requests[owner] -= 1
            if not self._requests[owner]:
                del self._requests[owner]
            if not self._requests:
                self._is_empty.set()

        return leave

    def close(self) -> None:
        """Lets nothing new in."""
        self.is_draining = True

    def check_open(self) -> None:
        """Raises RequestRefused with the status 503 while the server ends."""
        if self.is_draining:
            raise RequestRefused(
                "the server ends, and takes no new requests", fix="ask another server", status=503, retry_after_s=5
            )

    async def drained(self, limit_s: float) -> bool:
        """Waits until all requests are out. False: some are still inside after ``limit_s`` seconds."""
        try:
            await asyncio.wait_for(self._is_empty.wait(), limit_s)
        except asyncio.TimeoutError:
            return False
        return True


def _too_many(what: str) -> RequestRefused:
    return RequestRefused(what, fix="ask again later", status=429, code="rate_limit_exceeded", retry_after_s=1)
