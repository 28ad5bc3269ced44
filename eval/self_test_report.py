"""A self-test said in words (self-test.md) and in values (self-test.json, versioned)."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval.places import write_files
from eval.self_test import SelfTest
from eval.self_test_rows import Row

VERSION = "1.0"
JSON_NAME, MARKDOWN_NAME = "self-test.json", "self-test.md"


def write(made: SelfTest, out: Path) -> None:
    """Write both files into `out`, both or none; UsageError when the disk refuses."""
    data = json.dumps(to_json(made), indent=2, ensure_ascii=False) + "\n"
    write_files({MARKDOWN_NAME: to_markdown(made), JSON_NAME: data}, out)


def to_json(made: SelfTest) -> dict[str, Any]:
    """Every value."""
    return {
        "format_version": VERSION,
        "passed": made.exit_code == 0,
        "exit_code": made.exit_code,
        "summary": summary(made),
        "base": asdict(made.base),
        "candidate": made.candidate,
        "suite": {"path": str(made.suite.directory), "sha256": made.suite.digests},
        "gates": {"path": str(made.gates.path), "sha256": made.gates.sha256},
        "amounts": asdict(made.amounts),
        "rows": [asdict(row) for row in made.rows],
        "judged_at": made.judged_at.isoformat(timespec="seconds"),
        "seconds": round(made.seconds, 1),
    }


def summary(made: SelfTest) -> str:
    """One sentence or two: may this gate be trusted?"""
    sound, defects = made.rows[0], [r for r in made.rows[1:] if r.outcome != "not applicable"]
    missed = [row for row in defects if not row.as_expected]
    caught = f"{len(defects) - len(missed)} of {len(defects)} planted defects were caught"
    if not sound.as_expected:
        return f"The gate does not accept the base against itself; {caught}."
    if missed:
        return f"The gate missed {', '.join(row.title for row in missed)}; {caught}."
    if sound.outcome == "inconclusive":
        return f"{_capital(caught)}, but this suite is too small to accept even the base."
    return f"The gate accepts the base against itself, and {caught}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def lines(row: Row) -> list[str]:
    """What a reader should know of a row beyond the table, the advice first."""
    found = []
    if row.advice:
        found.append(_capital(row.advice) + ".")
    if row.beside and row.beside.split()[0] != "rejected":
        found.append(
            f"Refused because the prompts differ from the base's. Its answers alone: {row.beside}; "
            "if the base had the same fault, or a server rendered prompts its own way, these would "
            "not show it."
        )
    if not row.as_expected or row.outcome == "not applicable":
        found.append(f"The gate's reason: {row.reason}.")
    return found


def to_markdown(made: SelfTest) -> str:
    """The self-test to be read."""
    head = "PASSED" if made.exit_code == 0 else "FAILED"
    text = [
        f"# Self-test {head}",
        "",
        summary(made),
        "",
        "| candidate | what was planted | verdict | who spoke first | as it should be | seconds |",
        "| --- | --- | --- | --- | --- | ---: |",
        *(_table_row(row) for row in made.rows),
        "",
    ]
    for row in made.rows:
        text += [f"- **{row.title}**: {_cell(line)}" for line in lines(row)]
    a = made.amounts
    text += [
        "",
        "## Reasons",
        "",
        *(f"- {row.title}: {_cell(row.reason)}" + _beside(row) for row in made.rows),
        "",
        f"Base {made.base.name} ({made.base.description}; sha256 {made.base.digest}). Candidates: "
        f"{made.candidate}. Suite {made.suite.directory}, gates {made.gates.path}; up to "
        f"{a.num_items} items of each file, {a.num_windows} windows of {a.window_tokens} tokens, "
        f"seed {a.seed}. {made.seconds:.0f} s, {made.judged_at.isoformat(timespec='seconds')}.",
    ]
    return "\n".join(text) + "\n"


def _beside(row: Row) -> str:
    return f" (its answers alone: {row.beside})" if row.beside else ""


def _table_row(row: Row) -> str:
    right = "yes" if row.as_expected else "**NO**"
    right = "-" if row.outcome == "not applicable" else right
    cells = (row.title, row.planted, row.outcome, row.spoke or "-", right, f"{row.seconds:.1f}")
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
