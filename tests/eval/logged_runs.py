"""Folders as lm-eval's --log_samples leaves them, with answers made to measure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DATE = "2026-01-02T03-04-05.678901"


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sample(number: int, **values: Any) -> dict[str, Any]:
    """One row; `values` are metrics, keys of the row may be overridden afterwards."""
    doc = {"question": f"question {number}", "doc": f"contract {number // 2}"}
    return {
        "doc_id": number,
        "doc": doc,
        "target": f"right {number}",
        "arguments": {"gen_args_0": {"arg_0": f"Q {number}", "arg_1": {"until": ["\n"]}}},
        "resps": [["said"]],
        "filtered_resps": [f"said {sorted(values.items())}"],
        "filter": "none",
        "metrics": list(values),
        "doc_hash": sha(json.dumps(doc)),
        "prompt_hash": sha(f"Q {number}"),
        "target_hash": sha(f"right {number}"),
        **values,
    }


def write_run(
    folder: Path,
    rows: Sequence[dict[str, Any]],
    task: str = "intent",
    date: str = DATE,
    **results: Any,
) -> Path:
    """Add a task's samples to a run's folder; with `results` its results file too."""
    place = folder / "model"
    place.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (place / f"samples_{task}_{date}.jsonl").write_text(text)
    if results:
        (place / f"results_{date}.json").write_text(json.dumps(results))
    return folder


def outcomes(n: int, lost: int, gained: int, wrong: int = 0) -> tuple[list[int], list[int]]:
    """Pass-or-fail values of A and B: `wrong` items that both get wrong, `gained` only A does."""
    base = [1] * (n - wrong - gained) + [0] * (wrong + gained)
    candidate = [0] * lost + [1] * (n - wrong - gained - lost) + [0] * wrong + [1] * gained
    return base, candidate
