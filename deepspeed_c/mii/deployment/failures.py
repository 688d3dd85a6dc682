"""Errors as messages: a typed error of the server is raised again in the client, with the same class and texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed_c.errors
import deepspeed_c.mii.errors
from deepspeed_c.errors import DeepSpeedCError

__all__ = ["error_of", "message_of"]


def message_of(error: DeepSpeedCError) -> dict[str, str]:
    """{"kind": the class, "what", "where", "fix"}, as ``error_of`` takes it."""
    return {"kind": type(error).__name__, "what": error.what, "where": error.where, "fix": error.fix}


def error_of(message: Mapping[str, Any]) -> DeepSpeedCError:
    """The error that ``message_of`` described. A class that this package does not have becomes a DeepSpeedCError, whose
    text names the class."""
    kind, what = str(message.get("kind", "")), str(message.get("what", ""))
    where, fix = str(message.get("where", "")), str(message.get("fix", ""))
    for module in (deepspeed_c.errors, deepspeed_c.mii.errors):
        found = getattr(module, kind, None)
        if isinstance(found, type) and issubclass(found, DeepSpeedCError):
            return found(what, where=where, fix=fix)
    return DeepSpeedCError(f"{kind}: {what}", where=where, fix=fix)
