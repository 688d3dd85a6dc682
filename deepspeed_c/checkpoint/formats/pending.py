"""A value of a pickle whose state has not been read yet."""

from __future__ import annotations

from typing import Any

__all__ = ["Pending"]


class Pending:
    """Placeholder for a value until its state has been read; the state has its content.

    ``places``: numbers that the pickle can refer to it by.
    """

    __slots__ = ("places",)

    def __init__(self) -> None:
        self.places: list[int] = []

    def finish(self, state: Any) -> Any:
        """The value. Raises UnpicklingError for a state that it cannot have."""
        raise NotImplementedError
