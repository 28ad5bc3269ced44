"""Progress: how a long run tells someone where it is; the terminal draws it, tests stay silent."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told of one stage after another."""

    def stage(self, text: str, total: int) -> None:
        """A stage of `total` units begins; the one before is over."""

    def advance(self, count: int) -> None:
        """`count` more units of the current stage are done."""


class Silent:
    """Says nothing."""

    def stage(self, text: str, total: int) -> None:
        """Nothing."""

    def advance(self, count: int) -> None:
        """Nothing."""
