"""What became of every row of `quantize sample`: the sidecar file and the table. Holds no text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True, kw_only=True)
class StratumReport:
    """One source and length bucket: distinct rows, rows drawn and their tokens. up_to: the longest
    row in tokens, None beyond all buckets."""

    source: str
    up_to: int | None
    rows: int
    drawn: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleReport:
    """rows = blank + malformed + duplicates + near_duplicates + distinct rows (of the strata).

    inputs: sha256 by file name. redacted: findings by kind in the drawn rows (replaced with pii
    `on`, only counted with `report`). template_share: part of the drawn tokens in beginnings that
    5 % of the rows share. sha256: of the written rows.
    """

    inputs: Mapping[str, str]
    seed: int
    pii: str
    rows: int
    blank: int
    malformed: int
    faults: tuple[str, ...]
    duplicates: int
    near_duplicates: int
    leaks_dropped: int
    asked: int
    kept: int
    tokens: int
    template_share: float
    strata: tuple[StratumReport, ...]
    redacted: Mapping[str, int]
    rows_with_secrets: int
    sha256: str

    def to_json(self) -> str:
        data = asdict(self)
        del data["faults"]  # they quote what was found, which may be private
        return json.dumps(data | {"warnings": list(self.warnings())}, indent=2) + "\n"

    def warnings(self) -> Iterator[str]:
        """Advice, one sentence each."""
        if self.kept < self.asked:
            yield f"{self.asked} samples were asked for, and {self.kept} distinct ones are there"
        if self.template_share > 0.3:
            yield (
                f"{self.template_share:.0%} of the tokens are beginnings that many rows share, "
                "such as a system prompt; they weigh accordingly in the statistics"
            )
        if self.rows_with_secrets:
            yield (
                f"{self.rows_with_secrets} rows hold keys or passwords, and they are written as "
                "they are; use --pii on, and change the keys"
            )
        secret = sum(self.redacted.get(k, 0) for k in ("SECRET", "PRIVATE_KEY", "CREDENTIALS"))
        if self.pii == "on" and secret:
            yield f"{secret} keys or passwords were replaced; the log holds them still: change them"


def render(report: SampleReport) -> Group:
    """The account for a terminal of 100 columns."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("source", "length", "distinct rows", "drawn", "tokens"):
        table.add_column(name, justify="left" if name in ("source", "length") else "right")
    for s in report.strata:
        length = f"up to {s.up_to:,}" if s.up_to else "longer"
        numbers = (f"{n:,}" for n in (s.rows, s.drawn, s.tokens))
        table.add_row(Text(s.source), length, *numbers)
    lines = [
        f"read      {report.rows:,} rows: {report.blank:,} blank, {report.malformed:,} malformed, "
        f"{report.duplicates:,} equal, {report.near_duplicates:,} nearly equal",
        f"drawn     {report.kept:,} rows, {report.tokens:,} tokens, "
        f"{report.template_share:.0%} of them in shared beginnings",
        f"personal  {_findings(report)}",
    ]
    if report.leaks_dropped:
        lines.append(f"leaks     {report.leaks_dropped:,} rows that the gate holds too, left out")
    faults = [Text(f"skipped: {fault}", style="yellow") for fault in report.faults]
    warnings = [Text(f"warning: {warning}", style="yellow") for warning in report.warnings()]
    return Group(table, *map(Text, lines), *faults, *warnings)


def _findings(report: SampleReport) -> str:
    if report.pii == "off":
        return "not looked for (--pii off)"
    found = ", ".join(f"{count:,} {kind}" for kind, count in report.redacted.items()) or "nothing"
    return f"{found} {'replaced' if report.pii == 'on' else 'found, left as it is'}"
