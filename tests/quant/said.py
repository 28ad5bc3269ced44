"""What the `quantize` command said when a test ran it in its own process."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple


class Said(NamedTuple):
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that tells what was wrong."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return self.err[self.err.index("error: ") :]

    @property
    def text(self) -> str:
        """All of it, on one line."""
        return re.sub(r"\s+", " ", self.out + " " + self.err)


Quantize = Callable[..., Said]
