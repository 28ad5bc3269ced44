"""A signal ends the command as a signal does, whatever a library makes of the exception."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import pytest

import quant.cli
from quant.artifact.signals import raised_signals
from quant.errors import SourceError


def translating() -> None:
    """As an import or a validator of a library that was interrupted."""
    try:
        signal.pause()
    except BaseException as error:
        raise RecursionError("maximum depth exceeded") from error


def accusing() -> None:
    try:
        signal.pause()
    except BaseException as error:
        raise SourceError("the checkpoint is damaged") from error


@pytest.fixture(autouse=True)
def started_in_the_foreground() -> Iterator[None]:
    """A shell has what it starts in the background ignore SIGINT, these tests too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
@pytest.mark.parametrize("work", [signal.pause, translating, accusing])
def test_the_signal_counts_and_not_what_became_of_it(
    work: Callable[[], None],
    number: int,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def app(**_: object) -> int:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), number))
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        work()
        return 0

    monkeypatch.setattr(quant.cli, "app", app)
    monkeypatch.setattr(signal, "pause", lambda: [signal.sigtimedwait([], 2), None][1])
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(SystemExit) as end:
        quant.cli.main([])
    assert end.value.code == code
    assert "the same command goes on from there" in capsys.readouterr().err
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_work_that_was_done_when_the_signal_came_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app(**_: object) -> int:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.sigtimedwait([], 2)
        return 0

    monkeypatch.setattr(quant.cli, "app", app)
    with pytest.raises(SystemExit) as end:
        quant.cli.main([])
    assert end.value.code == 0
    assert capsys.readouterr().err == ""


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with raised_signals() as ending:
            os.kill(os.getpid(), signal.SIGINT)
        assert ending.code is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
