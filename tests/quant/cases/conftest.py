"""What the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from survival import Nursery, nursery


@pytest.fixture(scope="session")
def forks() -> Iterator[Nursery]:
    """Starts the command without the seconds of its imports."""
    with nursery() as started:
        yield started


@pytest.fixture
def columns() -> int:
    """Wide enough for any line."""
    return 200
