"""Calibration and gate must not share documents; where they do, no verdict is worth anything.

The suite's rows are held to the artifact's own sketch of what calibrated it, and to the calibration
file where one is given. Instructions and templates that many documents have in common are no leak.
Reads rows as data, so it does not depend on what a check means.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.errors import EvaluationError, UsageError
from eval.rows import object_of
from quant.artifact.artifact import Artifact
from quant.artifact.overlap import (
    Leak,
    Text,
    find_leaks,
    find_sketched_leaks,
    num_checkable,
    sketch_covers,
    text_of_row,
)

_SHOWN = 5
_COVERED = 0.99


class LeakageError(EvaluationError):
    """What calibrated the artifact also judges it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakageCheck:
    """How the suite was held to the calibration data; `note` says it in one sentence.

    by: "file" (every row read), "sketch" (the artifact's own), "none" (not calibrated), or
    "unknown" (calibrated, but by what is not known here).
    """

    by: str
    num_documents: int
    num_checked: int
    note: str


def check_leakage(artifact: Artifact, suite: Path, calib: Sequence[Path] = ()) -> LeakageCheck:
    """Hold every row of a suite directory to what calibrated the artifact.

    Raises:
        LeakageError: they share documents. UsageError: a file cannot be read, or is not what the
            artifact was calibrated with.
    """
    gate = [text for path in sorted(suite.glob("*.jsonl")) for text in read_texts(path)]
    record = artifact.manifest.calibration
    if calib:
        return _by_file(gate, calib, artifact)
    if record is None:
        return LeakageCheck(
            by="none", num_documents=len(gate), num_checked=len(gate),
            note="The artifact was made without calibration data.",
        )  # fmt: skip
    if record.sketch is None:
        return LeakageCheck(
            by="unknown", num_documents=len(gate), num_checked=0,
            note="The artifact does not say what calibrated it, so nobody checked that the gate "
            "is not part of it; pass --calib FILE.",
        )  # fmt: skip
    sketch = record.sketch.sketch()
    _refuse(find_sketched_leaks(gate, sketch), len(gate))
    checked = num_checkable(gate, sketch.keep)
    return LeakageCheck(
        by="sketch", num_documents=len(gate), num_checked=checked,
        note=f"None of the {len(gate)} gate rows stands in the calibration data, by the artifact's "
        f"sketch of it ({checked} rows are long enough for it to tell; --calib FILE reads all).",
    )  # fmt: skip


def _by_file(gate: Sequence[Text], calib: Sequence[Path], artifact: Artifact) -> LeakageCheck:
    rows = [text for path in calib for text in read_texts(path)]
    if not rows:
        raise UsageError(f"--calib {', '.join(map(str, calib))}: holds no row")
    _refuse(find_leaks(gate, rows), len(gate))
    record = artifact.manifest.calibration
    if record is not None and record.sketch is not None:
        share = sketch_covers(record.sketch.sketch(), rows)
        if share < _COVERED:
            raise UsageError(
                f"--calib {', '.join(map(str, calib))} is not what calibrated {artifact.path}: "
                f"only {share:.0%} of that stands in it"
            )
    return LeakageCheck(
        by="file", num_documents=len(gate), num_checked=len(gate),
        note=f"None of the {len(gate)} gate rows stands in the {len(rows)} calibration rows read.",
    )  # fmt: skip


def _refuse(leaks: Sequence[Leak], num_documents: int) -> None:
    if not leaks:
        return
    shown = "; ".join(f"{leak.gate} and {leak.row} ({leak.sign})" for leak in leaks[:_SHOWN])
    more = f"; and {len(leaks) - _SHOWN} more" if len(leaks) > _SHOWN else ""
    count = len({leak.gate for leak in leaks})
    raise LeakageError(
        f"{count} of {num_documents} gate rows stand in what calibrated the artifact: {shown}"
        f"{more}. What calibrates must not judge: take these rows out of one of the two "
        "(quantize sample --against SUITE --drop-leaks does it for the calibration file)"
    )


def read_texts(path: Path) -> Iterator[Text]:
    """The rows of a JSONL file, of a suite or of calibration data; UsageError names file, line."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield text_of_row(f"{path.name}:{number}", _row(line, f"{path}:{number}"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}") from error


def _row(line: str, where: str) -> Mapping[str, Any]:
    try:
        return object_of(line)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from error
