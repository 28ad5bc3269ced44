"""report.html in a real browser: it asks for nothing, can be read in every light, and filters.

Needs Debian's `chromium` and the Python package playwright (extra dev), as the review's page does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from report_rows import HOSTILE, answer, item, report_data, review_data

from eval.joining import join
from eval.report import pages

pytestmark = pytest.mark.e2e

# WCAG 2.2, success criterion 1.4.3 (AA).
LEAST_CONTRAST = 4.5
# Of every element with text of its own that is shown: its contrast against what lies behind it.
CONTRASTS = """() => {
  const part = c => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const read = text => text.match(/[0-9.]+/g).map(Number);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const found = read(getComputedStyle(e).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return read(getComputedStyle(document.body).backgroundColor);
  };
  const shown = [...document.querySelectorAll('body *')].filter(e =>
    [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) &&
    !['STYLE', 'TITLE'].includes(e.tagName.toUpperCase()) && e.checkVisibility());
  return shown.map(e => {
    const style = getComputedStyle(e);
    const ink = e instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(read(ink)), light(behind(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    return [ratio, e.textContent.trim().slice(0, 40)];
  });
}"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything on it: every layer, load, speed, long and hostile texts."""
    data = join(report_data(), review_data("rejected"), "review.json")
    times = {"p50": 20.0, "p99": 40.0}
    run = {"output_tok_s": 100.0, "concurrency": 4, "ttft_ms": times, "tpot_ms": times}
    data["speed"] = {"candidate": run, "base": run}
    sound, wrong = answer("{}", is_right=True), answer(HOSTILE * 30, is_right=False, problem="x")
    more = [item(f"more-{n}", sound, wrong) | {"num_prompt_tokens": 9 * n} for n in range(12)]
    more += [item(f"service-{n}", wrong, sound) | {"source": "service"} for n in range(2)]
    data["items"] += more
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(pages(data)["report.html"], encoding="utf-8")
    return path


@contextmanager
def shown(browser: Any, report: Path, width: int = 1120, **options: Any) -> Iterator[Any]:
    """The page; whatever it asks for besides itself, and any complaint of the browser, fails."""
    context = browser.new_context(viewport={"width": width, "height": 900}, **options)
    page = context.new_page()
    asked: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(report.as_uri())
    try:
        yield page
    finally:
        context.close()
    assert asked == [report.as_uri()]
    assert wrong == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(browser: Any, report: Path, scheme: str) -> None:
    with shown(browser, report, color_scheme=scheme) as page:
        page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        found = page.evaluate(CONTRASTS)
        assert len(found) > 200
        assert [pair for pair in found if pair[0] < LEAST_CONTRAST] == []
        assert page.locator("header strong").inner_text() == "REJECTED"


def test_filters_leave_what_they_say(browser: Any, report: Path) -> None:
    with shown(browser, report) as page:
        items = page.locator("details.item")
        everything = items.count()

        def visible() -> list[str]:
            found: list[str] = items.evaluate_all(
                "all => all.filter(e => e.checkVisibility()).map(e => e.className)"
            )
            return found

        assert len(visible()) == everything > 12
        for change in ("lost", "gained", "changed"):
            label = page.locator(f"label:has(#change-{change})")
            label.click()
            left = visible()
            assert all(f" {change} " in name for name in left)
            assert label.inner_text().split()[-1] == str(len(left))
        page.locator("label:has(#change-gained)").click()
        page.locator("label:has(#source-2)").click()
        assert visible() == ["item gained source-2 task-1"] * 2
        page.locator("label", has_text="all").first.click()
        page.locator("details.item:visible > summary").first.click()
        assert page.locator("del:visible, ins:visible").count() > 0
        assert page.evaluate("document.querySelector('.item script')") is None


@pytest.mark.parametrize(("width", "media"), [(390, "screen"), (794, "print")])
def test_nothing_is_cut_off(browser: Any, report: Path, width: int, media: str) -> None:
    with shown(browser, report, width) as page:
        page.emulate_media(media=media)
        page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        outside = """all => all.filter(e => {
          const box = e.getBoundingClientRect(), whole = e.ownerSVGElement.getBoundingClientRect();
          return box.left < whole.left - 1 || box.right > whole.right + 1
            || box.bottom > whole.bottom + 1 || box.top < whole.top - 1;
        }).map(e => e.textContent)"""
        assert page.locator("svg text").evaluate_all(outside) == []
        if media == "print":
            assert page.pdf(format="A4").startswith(b"%PDF")
