"""Refusals and failures of a server, as clients of OpenAI's API read them.

The body of an answer with an error is ``{"error": {"message", "type", "param", "code"}}``, and the client chooses the
class of its exception by the status.
"""

from __future__ import annotations

from typing import Any

from deepspeed_c.errors import DeepSpeedCError

__all__ = ["RequestRefused", "error_object"]

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}


class RequestRefused(DeepSpeedCError, ValueError):
    """A request gets no answer but an error.

    Args:
        what: the event, with the value and the limit that it breaks.
        param: the field of the body: ``messages[2].role``; "" for the request itself.
        fix: the way out for the client.
        status: of HTTP. 400: the request is wrong; 401: its key; 404: the model or the path; 413: its size; 429: it
            came too soon; 503: the server takes no requests.
        code: a word that programs compare: "model_not_found"; "" if there is none.
        retry_after_s: with 429 and 503, the time after which the client may ask again.
    """

    def __init__(
        self,
        what: str,
        *,
        param: str = "",
        fix: str = "",
        status: int = 400,
        code: str = "",
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(what, where=param, fix=fix)
        self.param, self.status, self.code, self.retry_after_s = param, status, code, retry_after_s

    def __reduce__(self) -> Any:
        fields = {"param": self.param, "fix": self.fix, "status": self.status, "code": self.code}
        return _rebuild, (self.what, {**fields, "retry_after_s": self.retry_after_s})


def _rebuild(what: str, fields: dict[str, Any]) -> RequestRefused:
    return RequestRefused(what, **fields)


def error_object(message: str, status: int, param: str = "", code: str = "") -> dict[str, Any]:
    """The body of an answer with an error, and the event at the end of a stream that fails."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param or None, "code": code or None}}
