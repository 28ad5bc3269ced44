"""The pictures in docs/images, taken of a real evaluation in Debian's headless Chromium.

    evaluate smollm2-135m-business-w4a16 --items 24 --windows 8 --out report
    python scripts/screenshots.py report --out docs/images

Makes a review pack of the same evaluation in a temporary folder, serves it, rates a few requests
with the keyboard, and takes the review's result from raters that prefer neither side. Nothing but
this machine is asked for anything.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from eval.review import web
from eval.review.commands import make_pack, score_pack
from eval.review.pack import Pack, key_path, open_key, open_pack
from eval.review.ratings import Rating, append

CHROMIUM = "/usr/bin/chromium"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
MOST_BYTES = 150_000
WIDTH, HEIGHT = 1120, 900


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, help="the folder of an evaluation's reports")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--pdf", type=Path, help="also print report.html into this file")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as scratch:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        of_report(browser, asked.report / "report.html", asked.out, asked.pdf)
        of_review(browser, asked.report, Path(scratch), asked.out)
        browser.close()
    for path in sorted(asked.out.glob("*.png")):
        size = path.stat().st_size
        print(f"{path} {size // 1000} kB{' TOO LARGE' if size > MOST_BYTES else ''}")


def opened(browser: Browser, scheme: Any, width: int, height: int = HEIGHT) -> Page:
    return browser.new_page(color_scheme=scheme, viewport={"width": width, "height": height})


def of_report(browser: Browser, html: Path, out: Path, pdf: Path | None) -> None:
    """First screen, the pictures of both layers, dark, narrow."""
    page = opened(browser, "light", WIDTH)
    page.goto(html.resolve().as_uri())
    page.screenshot(path=out / "report-light.png")
    sections(page, out / "report-divergence.png", "Layer 1", "Layer 2")
    sections(page, out / "report-tasks.png", "Layer 2", "Layer 3")
    first = page.locator("details.item.lost, details.item").first
    first.locator("> summary").click()
    sections(page, out / "report-answers.png", "Answers that changed", "Provenance")
    if pdf is not None:
        margin: Any = dict.fromkeys(("top", "bottom"), "14mm")
        page.pdf(path=pdf, format="A4", margin=margin)
    dark = opened(browser, "dark", WIDTH)
    dark.goto(html.resolve().as_uri())
    dark.screenshot(path=out / "report-dark.png")


def sections(page: Page, path: Path, begin: str, end: str) -> None:
    """From one heading to the next, at most two screens of it."""
    tops = []
    for text in (begin, end):
        heading = page.locator("h2", has_text=text).first
        tops.append(heading.evaluate("e => e.getBoundingClientRect().top + window.scrollY"))
    height = min(tops[1] - tops[0], 2 * HEIGHT)
    clip: Any = {"x": 0, "y": tops[0], "width": WIDTH, "height": height}
    page.screenshot(path=path, full_page=True, clip=clip)


def of_review(browser: Browser, evaluation: Path, scratch: Path, out: Path) -> None:
    """The rating page light and wide, dark and narrow, and the result."""
    evaluation = english(evaluation, scratch / "english")
    with web.serving(packed(evaluation, scratch / "blind")) as address:
        for scheme, width in (("light", 1280), ("dark", 390)):
            page = opened(browser, scheme, width, 860)
            page.goto(address)
            page.locator("#rater").fill("Ann")
            page.keyboard.press("Enter")
            page.locator("#count", has_text="rated").wait_for()
            press(page, "1", "2", "3", "1", "2")
            turn_to_a_short_one(page)
            page.wait_for_timeout(500)  # colours fade in
            page.screenshot(path=out / f"review-{scheme}-{width}.png")
    _, folder = score_pack(
        rated(packed(evaluation, scratch / "rated")), key=None, out=scratch / "result"
    )
    page = opened(browser, "light", WIDTH)
    page.goto((folder / "review.html").resolve().as_uri())
    page.screenshot(path=out / "review-result.png")


def press(page: Page, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)
        page.locator("#review[aria-busy=false]").wait_for()


def turn_to_a_short_one(page: Page) -> None:
    """A request whose answers differ and that fits the screen."""
    fits = "document.documentElement.scrollHeight <= window.innerHeight + 150"
    for _ in range(20):
        press(page, "ArrowLeft")
        first, second = (page.locator(f"#text-{side}").text_content() for side in "ab")
        if first != second and page.evaluate(fits):
            return


def english(evaluation: Path, out: Path) -> Path:
    """The evaluation's English rows: Debian's Chromium has no Chinese font of its own."""
    out.mkdir()
    rows = (evaluation / "samples.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    kept = "".join(row for row in rows if json.loads(row)["lang"] == "en")
    (out / "samples.jsonl").write_text(kept, encoding="utf-8")
    shutil.copy(evaluation / "report.json", out)
    return out


def packed(evaluation: Path, out: Path) -> Pack:
    return open_pack(make_pack(evaluation, out, count=40, seed=0, redact=True).path)


def rated(pack: Pack) -> Path:
    """Two raters, to whom most answers are alike; both like the base better now and then."""
    key = open_key(key_path(pack.path), pack)
    for rater, every in (("Bea", 6), ("Cid", 3)):
        for n, entry in enumerate(key.entries):
            choice: Any = entry.sound if entry.kind == "planted" else "tie"
            if entry.kind == "request" and n % every == 0:
                choice = "b" if entry.candidate == "a" else "a"
            append(pack, rater, entry.id, Rating(choice=choice, seconds=20.0))
    return pack.path


if __name__ == "__main__":
    main()
