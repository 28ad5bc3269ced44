"""A limit on what one check may compute: a regular expression can take longer than anyone waits."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_AGAIN_S, _AT_ONCE_S = 0.5, 1e-3


class TooSlowError(Exception):
    """The work took more processor time than it was given."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """TooSlowError inside once this process has computed for `seconds` in here.

    Within another limit both hold. `re` looks for signals while it backtracks. Only the main thread
    of a POSIX system gets any; elsewhere there is no limit.
    """
    if not hasattr(signal, "SIGVTALRM") or (
        threading.current_thread() is not threading.main_thread()
    ):
        yield
        return

    def give_up(_: int, __: FrameType | None) -> None:
        raise TooSlowError

    before, started = signal.signal(signal.SIGVTALRM, give_up), time.process_time()
    # Again and again: what is raised within a finalizer goes no further than that.
    outer, again = signal.getitimer(signal.ITIMER_VIRTUAL)
    signal.setitimer(signal.ITIMER_VIRTUAL, min(seconds, outer or seconds), _AGAIN_S)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:  # also when the time was up within the other one
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        if outer:
            left = outer - (time.process_time() - started)
            signal.setitimer(signal.ITIMER_VIRTUAL, max(left, _AT_ONCE_S), again)
