"""Ends that come from outside: signals as exceptions, so that a run closes what it has open.

Libraries make exceptions of their own out of one that comes out of nowhere: pydantic a
PydanticSerializationError, an import of transformers a ModuleNotFoundError. What ended the command
is therefore not what reaches its top but whether a signal came: `Ending`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143


class Terminated(BaseException):
    """SIGTERM came. No Exception, as KeyboardInterrupt is none: it must not pass for a fault."""


_RAISED: dict[int, type[BaseException]] = {
    signal.SIGINT: KeyboardInterrupt,
    signal.SIGTERM: Terminated,
}


@dataclass(slots=True)
class Ending:
    """The exit code of the signal that came; None as long as none did."""

    code: int | None = None


@contextmanager
def raised_signals() -> Iterator[Ending]:
    """Within it the first SIGINT raises KeyboardInterrupt, the first SIGTERM Terminated; another
    one ends the process at once. A signal that the process was started to ignore stays ignored."""
    ending = Ending()
    if threading.current_thread() is not threading.main_thread():
        yield ending  # signals are the main thread's
        return
    heard = [number for number in _RAISED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _raiser(ending, heard)) for number in heard}
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def silent_end() -> Iterator[None]:
    """Within it Ctrl-C ends the process at once, without Python's traceback: for the imports that
    come before anything is there to be told of it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else it is ignored here, as under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _raiser(ending: Ending, heard: Sequence[int]) -> Callable[[int, FrameType | None], Any]:
    def answer(number: int, frame: FrameType | None) -> None:
        for each in heard:
            signal.signal(each, signal.SIG_DFL)
        ending.code = 128 + number
        raise _RAISED[number]

    return answer
