"""Ends that come from outside: SIGTERM as an exception, so that a run closes what it has open."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_TERMINATED = 143


class Terminated(BaseException):
    """SIGTERM came. No Exception, as KeyboardInterrupt is none: it must not pass for a fault."""


@contextmanager
def raised_sigterm() -> Iterator[None]:
    """Within it the first SIGTERM raises Terminated; a second one ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated
