"""The phases of a start add up to the time since the process began."""

from __future__ import annotations

import subprocess
import sys
from time import perf_counter

import pytest

from runtime.engine import startup
from runtime.engine.startup import Startup, StartupClock, process_age_s


def test_laps_add_up_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([3.0, 4.0, 9.0])
    monkeypatch.setattr(startup, "perf_counter", lambda: next(now))
    clock = StartupClock(since=1.0)
    for phase in ("open", "weights", "open"):
        clock.lap(phase)
    assert dict(clock.startup.seconds) == {"open": 7.0, "weights": 1.0}
    assert clock.startup.total_s == 8.0


def test_a_startup_keeps_what_it_was() -> None:
    clock = StartupClock(since=perf_counter())
    clock.lap("open")
    before: Startup = clock.startup
    clock.lap("pool")
    assert list(before.seconds) == ["open"]


def test_the_first_lap_counts_from_the_start_of_the_process() -> None:
    """In a process that sleeps first, and says how old it believes itself to be."""
    program = (
        "import time; time.sleep(0.3)\n"
        "from runtime.engine.startup import StartupClock\n"
        "clock = StartupClock(); clock.lap('imports'); print(clock.startup.total_s)\n"
    )
    began = perf_counter()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    age = float(done.stdout)
    assert 0.28 < age < perf_counter() - began + 0.05
    assert process_age_s() > 0.3
