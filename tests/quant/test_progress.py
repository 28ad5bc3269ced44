"""Progress says how long is left, however slow a layer is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from quant.progress import BarProgress, LineProgress, make_progress


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("layer_s", [0.5, 60, 600])
def test_a_bar_counts_down_from_the_first_layer_on(layer_s: float) -> None:
    clock, screen = Clock(), io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, _environ={})

    def shown() -> str:
        screen.truncate(0)
        console.print(bar._bar.get_renderable())
        return screen.getvalue()

    bar = BarProgress(console, clock)
    try:
        bar.start(30)
        bar.layer(0, "layer 1 of 30")
        assert "left" not in shown()
        clock.now += layer_s
        bar.layer(1, "layer 2 of 30")
        whole = {0.5: "0:14 left", 60: "29:00 left", 600: "4:50:00 left"}
        assert whole[layer_s] in shown()
        clock.now += layer_s
        half = {0.5: "0:14 left", 60: "28:00 left", 600: "4:40:00 left"}
        assert half[layer_s] in shown(), "counts down while a layer runs"
        clock.now += 100 * layer_s
        assert "0:00 left" in shown()
    finally:
        bar.stop()


def test_lines_say_the_same() -> None:
    clock, log = Clock(), io.StringIO()
    lines = make_progress(Console(file=log, width=100, force_terminal=False))
    assert isinstance(lines, LineProgress)
    lines = LineProgress(Console(file=log, width=100), clock)
    lines.start(30)
    lines.layer(0, "layer 1 of 30")
    clock.now += 5
    lines.layer(1, "layer 2 of 30")
    clock.now += 55
    lines.layer(2, "layer 3 of 30")
    assert log.getvalue().splitlines() == [
        "layer 1 of 30 (0:00 so far)",
        "layer 3 of 30 (1:00 so far, about 14 min left)",
    ]
