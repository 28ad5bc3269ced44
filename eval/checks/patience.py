"""A limit on what one check may compute: a regular expression can take longer than anyone waits."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TooSlowError(Exception):
    """The work took more processor time than it was given."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """TooSlowError inside once this process has computed for `seconds` in here.

    `re` looks for signals while it backtracks. Only the main thread of a POSIX system gets any;
    elsewhere there is no limit.
    """
    if not hasattr(signal, "SIGVTALRM") or (
        threading.current_thread() is not threading.main_thread()
    ):
        yield
        return

    def give_up(_: int, __: FrameType | None) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
