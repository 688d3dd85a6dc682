"""Keys with signatures in the ranks' store: a value that was written without the secret of the run is not read.

[Note: signed keys] A store of ``torch.distributed`` authenticates nobody: all processes that connect can read, write
and delete every key. So a value is written together with a code (HMAC-SHA256) over key and value. The code is made with
a secret that the launcher put into the environment of all ranks (``DSC_RUN_TOKEN``). The secret itself never goes
through the store. A value that is copied to another key is not valid there. Counters cannot be signed, so nothing may
be concluded from a counter alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

__all__ = ["SignedStore"]


class SignedStore:
    """``store`` as used by ranks with the same ``secret``. The secret "" protects against accidents only; it is used
    where no launcher set a secret.
    """

    def __init__(self, store: dist.Store, secret: str) -> None:
        self._store = store
        self._secret = secret.encode()
        self.n_forged = 0
        """Number of values that were read and had no signature of this run."""

    def write(self, key: str, value: str) -> None:
        """Sets ``key``, even if it has a value already."""
        self._store.set(key, self._signed(key, value))

    def claim(self, key: str, value: str) -> bool:
        """Sets ``key`` if it has no value. Returns whether ``value`` is its value now."""
        mine = self._signed(key, value)
        return self._store.compare_set(key, "", mine) == mine.encode()

    def read(self, key: str) -> str | None:
        """The value of ``key``. None where there is no value, or where the value was not written by a rank of this run."""
        if not self._store.check([key]):
            return None
        code, _, value = self._store.get(key).partition(b" ")
        if hmac.compare_digest(code, self._code(key, value)):
            return value.decode()
        self.n_forged += 1
        return None

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Waits until all ``keys`` have values, ``seconds`` at most. Returns whether all of them have values of this
        run.
        """
        with contextlib.suppress(RuntimeError):  # the time is over; a lost store raises again below
            self._store.wait(list(keys), timedelta(seconds=seconds))
        return all(self.read(key) is not None for key in keys)

    def _signed(self, key: str, value: str) -> str:
        return f"{self._code(key, value.encode()).decode()} {value}"

    def _code(self, key: str, value: bytes) -> bytes:
        # A key holds no NUL, so that no other pair of key and value gives the same bytes.
        return hmac.new(self._secret, key.encode() + b"\0" + value, hashlib.sha256).hexdigest().encode()
