"""Rows of GPU results: their schema, where they come from, which of them counts.

One JSON object per line, one line per figure. Of rows that say the same but for value and time
(equal `key`) the newest counts. Knows no kernels and no engine.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

REPO = Path(__file__).resolve().parents[1]
FIELDS = ("suite", "shape", "scheme", "kv_dtype", "batch", "metric", "value", "unit", "repeats",
          "extra", "hardware", "versions", "commit", "date")  # fmt: skip
SUITES = ("engine", "gemm", "attention", "start")
UNITS = {
    "decode_tok_s": "tok/s",
    "prefill_tok_s": "tok/s",
    "ttft_ms": "ms",
    "startup_s": "s",
    "kv_tokens": "tokens",
    "gpu_idle_pct": "%",
    "gemm_us": "us",
    "attention_us": "us",
}
# What tells rows of equal suite, shape, scheme, KV type, batch and metric apart.
KEY_EXTRAS = ("group", "lm_head", "input", "output", "cache", "layers", "n", "k", "kernel", "phase",
              "context", "deterministic")  # fmt: skip


class BadRow(ValueError):
    """A line of a file of results is no good row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where figures were taken: the card, versions of what computes, the project's commit."""

    hardware: str
    versions: dict[str, str]
    commit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What was measured. `extra` holds the rest of the key and anything worth knowing.

    batch: sequences at once; rows of the input for a GEMM.
    """

    suite: str
    shape: str
    scheme: str
    kv_dtype: str
    batch: int
    extra: dict[str, Any] = field(default_factory=dict)


def row(
    subject: Subject,
    metric: str,
    repeats: Sequence[float],
    origin: Origin,
    **extra: Any,
) -> dict[str, Any]:
    """One figure: the median of its repeats."""
    return {
        "suite": subject.suite,
        "shape": subject.shape,
        "scheme": subject.scheme,
        "kv_dtype": subject.kv_dtype,
        "batch": subject.batch,
        "metric": metric,
        "value": _rounded(median(repeats)),
        "unit": UNITS[metric],
        "repeats": [_rounded(value) for value in repeats],
        "extra": {**subject.extra, **extra},
        "hardware": origin.hardware,
        "versions": origin.versions,
        "commit": origin.commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def problems(found: Mapping[str, Any]) -> list[str]:
    """What is wrong with a row; empty for a good one."""
    wrong = [f"no {name}" for name in FIELDS if name not in found]
    wrong += [f"unknown field {name}" for name in found if name not in FIELDS]
    if wrong:
        return wrong
    if found["suite"] not in SUITES:
        wrong.append(f"suite {found['suite']!r}")
    if UNITS.get(found["metric"]) != found["unit"]:
        wrong.append(f"metric {found['metric']!r} in {found['unit']!r}")
    if not isinstance(found["extra"], dict):
        wrong.append(f"extra {found['extra']!r}")
    numbers = [found["value"], *found["repeats"]]
    if len(numbers) < 2 or not all(_is_figure(number) for number in numbers):
        wrong.append(f"value {found['value']!r} of {found['repeats']!r}")
    if datetime.fromisoformat(found["date"]).tzinfo is None:
        wrong.append("a date without a time zone")
    return wrong


def key(found: Mapping[str, Any]) -> str:
    """Equal for rows of which only the newest counts."""
    extra = {name: found["extra"].get(name) for name in KEY_EXTRAS}
    parts = [found[name] for name in ("suite", "shape", "scheme", "kv_dtype", "batch", "metric")]
    return json.dumps([*parts, found["hardware"], extra], sort_keys=True)


def newest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The row of each key with the latest time (of equal times the later line), by that time."""
    ordered = sorted(rows, key=lambda found: datetime.fromisoformat(found["date"]))
    latest = {key(found): found for found in ordered}
    return [found for found in ordered if latest[key(found)] is found]


def read(path: Path) -> list[dict[str, Any]]:
    """All rows of a JSON Lines file; BadRow names the line that is no good row."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found = json.loads(line)
            wrong = problems(found)
        except (ValueError, TypeError) as error:
            wrong = [f"no row ({error})"]
        if wrong:
            raise BadRow(f"{path.name}, line {number}: {'; '.join(wrong)}")
        rows.append(found)
    return rows


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(found) + "\n" for found in rows)


def origin(device: str, commit: str | None) -> Origin:
    """This machine and this checkout; `commit` where the checkout has no history with it."""
    return Origin(
        hardware=hardware(device), versions=versions(device), commit=commit or git_commit()
    )


def hardware(device: str) -> str:
    """The card's name, or the processor's architecture and cores."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {len(os.sched_getaffinity(0))} cores"


def versions(device: str) -> dict[str, str]:
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if device.startswith("cuda"):
        found["cuda"] = str(torch.version.cuda)
        found["driver"] = _driver()
    return found


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def git_commit() -> str:
    """The checkout's commit, `-dirty` when it has changes, or `unknown`."""
    command = ["git", "-C", str(REPO), "describe", "--always", "--dirty", "--abbrev=12",
               "--exclude=*"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _rounded(value: float) -> float:
    """Five significant digits: more than any repeat agrees in."""
    return value if isinstance(value, int) else float(f"{value:.5g}")


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
