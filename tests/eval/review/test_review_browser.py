"""The rating page in a real browser, by keyboard: rate, reload, kill the server, go on.

Needs Debian's `chromium` and the Python package playwright (extra dev); nothing is downloaded.
REVIEW_IMAGES=FOLDER keeps screenshots; those in docs/images/ are scripts/screenshots.py's.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from review_rows import opened, sample_row, write_samples

from eval.review.commands import make_pack
from eval.review.pack import Pack
from eval.review.ratings import read_all, read_history
from eval.review.web import serving

pytestmark = pytest.mark.e2e

HOSTILE = (
    "<script>document.title = 'taken over'</script><img src=x onerror=\"document.title='no'\">"
    "</div></main><style>body{display:none}</style>&lt;b&gt; \u202eright to left"
)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """16 items, one hostile and very long. Each test has raters of its own."""
    rows = [sample_row(n) for n in range(60)]
    rows[1]["candidate"] = {"text": HOSTILE}
    rows[1]["messages"][1]["content"] = HOSTILE * 40
    folder = tmp_path_factory.mktemp("browser")
    write_samples(folder / "evaluation", rows)
    made = make_pack(folder / "evaluation", folder / "blind", count=12, seed=0, redact=True)
    return opened(made)[0]


@pytest.fixture(scope="module")
def address(pack: Pack) -> Iterator[str]:
    with serving(pack) as address:
        yield address


@contextmanager
def started(pack: Pack, port: int = 0) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`evaluate review serve` as a process of its own; its address and the process."""
    command = [sys.executable, "-m", "eval.cli", "review", "serve", str(pack.path)]
    process = subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert found, line
        yield found.group(), process
    finally:
        process.terminate()
        process.wait(timeout=120)
        process.stdout.close()


@contextmanager
def opened_page(browser: Any, **options: Any) -> Iterator[Any]:
    """A page of a browser profile of its own; any script error or refused resource fails."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **options})
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
    page.on("request", lambda r: wrong.append(r.url) if "127.0.0.1" not in r.url else None)
    try:
        yield page
    finally:
        context.close()
    assert not [text for text in wrong if "ERR_CONNECTION" not in text], wrong


def begin(page: Any, address: str, rater: str) -> None:
    page.goto(address)
    page.locator("#rater").fill(rater)
    page.keyboard.press("Enter")
    page.locator("#count", has_text="rated").wait_for()


def press(page: Any, *keys: str) -> None:
    """Press keys one after another, each when the page has done what the one before asked."""
    for key in keys:
        page.keyboard.press(key)
        page.locator("#review[aria-busy=false]").wait_for()


def keep(page: Any, name: str) -> None:
    if folder := os.environ.get("REVIEW_IMAGES"):
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def pressed(page: Any) -> list[str]:
    found: list[str] = page.locator("[aria-pressed=true]").evaluate_all(
        "all => all.map(b => b.dataset.choice ?? 'fault ' + b.dataset.fault)"
    )
    return found


def test_rate_reload_kill_and_go_on(browser: Any, pack: Pack) -> None:
    with opened_page(browser) as page:
        with started(pack) as (address, process):
            begin(page, address, "Ann")
            press(page, "1")
            press(page, "Shift+B")
            page.keyboard.press("n")
            page.keyboard.type("3 x wrong")
            page.keyboard.press("Escape")
            press(page, "1", "2", "3")
            assert page.locator("#count").inner_text() == "4 of 16 rated"
            said = [r.model_dump(exclude={"seconds"}) for r in
                    read_history(pack, "Ann").current.values()]  # fmt: skip
            assert [r["choice"] for r in said] == ["a", "a", "tie", "b"]
            assert said[1] == {"choice": "a", "critical": ["b"], "note": "3 x wrong"}

            page.reload()
            page.locator("#count", has_text="4 of 16 rated").wait_for()
            assert page.locator("#place").inner_text() == "5 of 16"
            press(page, "ArrowLeft", "ArrowLeft", "ArrowLeft")
            assert pressed(page) == ["fault b", "a"]
            assert page.locator("#note").input_value() == "3 x wrong"
            press(page, "f")
            assert page.locator("#place").inner_text() == "5 of 16"
            press(page, "u")
            assert page.locator("#count").inner_text() == "3 of 16 rated"
            assert page.locator("#place").inner_text() == "4 of 16"

            process.send_signal(signal.SIGKILL)
            process.wait(timeout=120)
            page.keyboard.press("2")
            page.locator("#notice", has_text="does not answer").wait_for()
            assert page.locator("#count").inner_text() == "3 of 16 rated"
        port = int(address.rsplit(":", 1)[1].strip("/"))
        with started(pack, port):
            press(page, "2")
            assert page.locator("#count").inner_text() == "4 of 16 rated"
            page.locator("#notice").wait_for(state="hidden")
    assert len(read_history(pack, "Ann").current) == 4


def test_two_raters_at_once_to_the_end(browser: Any, pack: Pack) -> None:
    with started(pack) as (address, _), opened_page(browser) as ann, opened_page(browser) as bob:
        begin(ann, address, "Bea")
        begin(bob, address, "\u674e\u96f7")
        for _ in range(6):
            press(ann, "1")
            press(bob, "3")
        assert ann.locator("#count").inner_text() == "6 of 16 rated"
        assert bob.locator("#count").inner_text() == "6 of 16 rated"
        for _ in range(10):
            press(ann, "2")
        assert ann.locator("#count").inner_text() == "All rated. Thank you!"
        assert ann.locator("#unrated").is_disabled()
    found = {
        h.rater: [r.choice for r in h.current.values()]
        for h in read_all(pack)
        if h.rater in ("Bea", "\u674e\u96f7")
    }
    assert found == {"Bea": ["a"] * 6 + ["tie"] * 10, "\u674e\u96f7": ["b"] * 6}


def test_marks_wait_for_the_choice_and_raters_can_change(
    browser: Any, pack: Pack, address: str
) -> None:
    with opened_page(browser) as page:
        begin(page, address, "Eva")
        press(page, "Shift+A")
        page.locator("#note").fill("look again")
        page.keyboard.press("Escape")
        press(page, "ArrowRight")
        assert pressed(page) == []
        press(page, "ArrowLeft")
        assert pressed(page) == ["fault a"]
        assert page.locator("#note").input_value() == "look again"
        assert not read_history(pack, "Eva").current
        press(page, "3")
        (said,) = read_history(pack, "Eva").current.values()
        assert (said.choice, said.critical, said.note) == ("b", ["a"], "look again")
        press(page, "u")
        assert pressed(page) == []
        assert page.locator("#note").input_value() == ""
        page.get_by_role("button", name="Rater Eva: change").click()
        page.locator("#rater").wait_for()
        begin(page, address, "Flo")
        assert page.locator("#count").inner_text() == "0 of 16 rated"


def test_hostile_and_long_texts(browser: Any, pack: Pack, address: str) -> None:
    by_text = {i.id: i for i in pack.items.values() if HOSTILE[:30] in i.a + i.b}
    (hostile,) = by_text.values()
    side = "a" if HOSTILE[:30] in hostile.a else "b"
    with opened_page(browser) as page:
        begin(page, address, "Dee")
        for _ in range(16):
            if page.locator("#text-a").get_attribute("data-item") == hostile.id:
                break
            press(page, "ArrowRight")
        assert page.locator(f"#text-{side}").text_content() == HOSTILE
        assert page.locator("#item img, #item script, #item style").count() == 0
        assert page.title() == "Blind review: Dee"
        more = page.locator("#last-message .more")
        assert more.get_attribute("aria-expanded") == "false"
        low = page.locator("#last-message").bounding_box()["height"]
        page.keyboard.press("e")
        assert more.get_attribute("aria-expanded") == "true"
        assert page.locator("#last-message").bounding_box()["height"] > 2 * low
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_keys_can_be_turned_off_and_every_control_has_a_name(
    browser: Any, pack: Pack, address: str
) -> None:
    with opened_page(browser) as page:
        begin(page, address, "Cid")
        page.keyboard.press("?")
        page.get_by_role("checkbox", name="Keys are on").uncheck()
        keep(page, "review-keys-1280")
        page.keyboard.press("Escape")
        page.keyboard.press("1")
        page.wait_for_timeout(100)
        assert not read_history(pack, "Cid").current
        for name in ("A is better", "Equally good", "B is better", "Undo", "Next unrated"):
            assert page.get_by_role("button", name=name).count() == 1
        assert page.get_by_role("textbox", name="Note").count() == 1
        assert page.get_by_role("progressbar", name="Rated so far").count() == 1
        page.get_by_role("button", name="B is better").focus()
        page.keyboard.press("Enter")
        page.locator("#count", has_text="1 of 16 rated").wait_for()


def _channels(colour: str) -> float:
    red, green, blue = (int(part) for part in re.findall(r"\d+", colour)[:3])
    return (red + green + blue) / 3


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_light_dark_wide_and_narrow(browser: Any, address: str, scheme: str, width: int) -> None:
    size = {"width": width, "height": 860}
    with opened_page(browser, color_scheme=scheme, viewport=size) as page:
        page.goto(address)
        page.locator("#rater").wait_for()
        keep(page, f"review-welcome-{scheme}-{width}")
        begin(page, address, f"{scheme} {width}")
        press(page, "1", "2", "3", "Shift+A", "1", "ArrowLeft")
        keep(page, f"review-{scheme}-{width}")
        style = "e => [getComputedStyle(e).backgroundColor, getComputedStyle(e).color]"
        paper, ink = map(_channels, page.locator("body").evaluate(style))
        assert (paper > 200 and ink < 60) if scheme == "light" else (paper < 60 and ink > 200)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for side in ("a", "tie", "b"):
            box = page.locator(f"[data-choice={side}]").bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width
            assert box["height"] >= 44
