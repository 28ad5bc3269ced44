"""The verdict for machines and for a pull request: junit.xml and summary.md, from report.json."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from eval import figures
from eval.charts import measurement_of
from eval.report_page import badges, worst
from eval.review.verdict import PENDING, is_demanded, review_of, state

_MOST_LINES = 40


def to_junit(data: Mapping[str, Any]) -> str:
    """A test case for each metric, for each of its domains, and for each question to people: a
    broken limit is a failure, an open question a failure of the type `inconclusive` or `pending`.
    """
    name = Path(data["artifact"]["path"]).name
    suite = ET.Element(
        "testsuite", name=f"evaluate {name}", timestamp=data["judged_at"].partition("+")[0],
        time=f"{data['seconds']:.1f}",
    )  # fmt: skip
    cases = list(_cases(data))
    suite.extend(cases)
    failures = sum(case.find("failure") is not None for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    for key, number in (
        ("tests", len(cases)), ("failures", failures), ("errors", 0), ("skipped", skipped),
    ):  # fmt: skip
        suite.set(key, str(number))
    root = ET.Element("testsuites", tests=str(len(cases)), failures=str(failures), errors="0")
    root.append(suite)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _cases(data: Mapping[str, Any]) -> Iterator[ET.Element]:
    for finding in data["findings"]:
        stratum = finding.get("stratum")
        named = f"{finding['metric']}[{stratum}]" if stratum else finding["metric"]
        case = ET.Element("testcase", classname="evaluate", name=named)
        if finding["outcome"] == "fail":
            ET.SubElement(case, "failure", type="rejected", message=finding["reason"])
        elif finding["outcome"] == "inconclusive":
            kind = "failure" if finding["required"] else "skipped"
            ET.SubElement(case, kind, type="inconclusive", message=finding["reason"])
        ET.SubElement(case, "system-out").text = finding["reason"]
        yield case
    yield from _people(data)
    for metric, m in data["measurements"].items():
        judged = {f["stratum"] for f in data["findings"] if f["metric"] == metric}
        yield from _domains(metric, m, judged)


def _people(data: Mapping[str, Any]) -> Iterator[ET.Element]:
    """Layer 3, where it is demanded or was given: a case for each question, one while it is open.

    A question that is open is a failure where the gates demand an answer.
    """
    found, review = state(data), data.get("review")
    if found == "none":
        return
    asked = list(review["answers"]) if review is not None else []
    if not asked:
        words = (review_of(data) or {"summary": PENDING})["summary"]
        outcome = "fail" if found == "fail" else "pending"
        asked = [{"name": "review", "outcome": outcome, "reason": words}]
    for answer in asked:
        case = ET.Element("testcase", classname="evaluate.review", name=answer["name"])
        reason, outcome = answer["reason"], answer["outcome"]
        if outcome == "fail":
            ET.SubElement(case, "failure", type="rejected", message=reason)
        elif outcome != "pass":
            kind = "failure" if is_demanded(data) else "skipped"
            ET.SubElement(case, kind, type=outcome, message=reason)
        ET.SubElement(case, "system-out").text = reason
        yield case


def _domains(metric: str, m: Mapping[str, Any], judged: Set[str]) -> Iterator[ET.Element]:
    """What was found in each domain that no limit asks about."""
    for domain, part in m.get("domains", {}).items():
        if domain in judged:
            continue
        case = ET.Element("testcase", classname="evaluate.domains", name=f"{metric}[{domain}]")
        ET.SubElement(case, "system-out").text = figures.of_measurement(part)
        yield case


# Control characters, which XML cannot hold and which drive a terminal, and those that turn the
# direction of all text that follows.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def shown(page: str) -> str:
    """A page without characters that nobody sees: each becomes U+FFFD."""
    return _UNSEEN.sub("\ufffd", page)


def to_summary(data: Mapping[str, Any]) -> str:
    """At most 40 lines of Markdown, for a comment on a pull request."""
    mark = {"pass": "pass", "fail": "**FAIL**", "inconclusive": "undecided"}
    lines = [
        f"### {data['verdict'].upper()}: {Path(data['artifact']['path']).name}",
        "",
        data["summary"],
        "",
        "; ".join(f"{badge.name}: {badge.word}" for badge in badges(data)) + ".",
        "",
        "| metric | difference [interval] | verdict |",
        "| --- | --- | --- |",
    ]
    for finding in data["findings"][:20]:
        m = measurement_of(finding, data["measurements"])
        lines.append(
            f"| {finding['label']} | {figures.of_measurement(m)} | {mark[finding['outcome']]} |"
        )
    broken = worst(data)
    if broken:
        lines += ["", "Worst:", *(f"- {line}" for line in broken)]
    lines += ["", data["method"]["detectable"], f"Artifact digest `{data['artifact']['digest']}`."]
    return "\n".join(lines[:_MOST_LINES]) + "\n"
