"""A GGUF file's metadata, parsed once and quickly, for us and for transformers.

A tokenizer is hundreds of thousands of strings there. gguf's reader makes a `numpy.memmap` of each,
at seven times the cost of a plain array, and transformers parses the file anew for each
configuration, tokenizer and model it makes. It knows nothing of what the fields mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np


class QuickReader(gguf.GGUFReader):
    """gguf's own reader over a plain view of the mapped file. Raises what that raises: OSError,
    ValueError, IndexError, KeyError."""

    @property  # type: ignore[override]
    def data(self) -> np.ndarray:
        """The file, uint8 [bytes]."""
        return self._plain

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._plain = mapped.view(np.ndarray)


@contextmanager
def parsed_for_transformers(path: Path, reader: QuickReader | None = None) -> Iterator[None]:
    """Within, transformers gets `reader` (or one made here) for `path` instead of parsing it.

    transformers takes no reader; it looks `gguf.GGUFReader` up at every call. Not for two threads.
    """
    gguf_own = gguf.GGUFReader
    found = reader if reader is not None else QuickReader(path)

    def parsed(asked: Any, *rest: Any, **named: Any) -> gguf.GGUFReader:
        return found if Path(asked) == path else gguf_own(asked, *rest, **named)

    with mock.patch.object(gguf, "GGUFReader", parsed):
        yield
