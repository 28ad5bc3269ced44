"""Samples, packs and raters that know the key: what the tests of layer 3 are made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eval.review.commands import Packed, make_pack
from eval.review.pack import Key, KeyEntry, Pack, key_path, open_key, open_pack
from eval.review.ratings import Rating, append


def sample_row(n: int, **changes: Any) -> dict[str, Any]:
    """Row n of an evaluation: every fifth answered alike, one in three Chinese."""
    base = f"The party is Acme {n} Ltd. It pays {n * 10} EUR by the end of the month, in cash."
    row = {
        "id": f"row-{n:04d}",
        "doc": f"doc-{n:04d}",
        "source": ("contracts", "service")[n % 2],
        "lang": ("en", "en", "zh")[n % 3],
        "checks": ["json_valid"],
        "messages": [
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": f"Who pays in contract {n}?" + " Say more." * (n % 7)},
        ],
        "base": {"text": base, "finish": "stop"},
        "candidate": {"text": base if n % 5 == 0 else base.replace("EUR", "USD")},
        "scores": {"json_valid": 1},
    }
    return {**row, **changes}


def write_samples(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "samples.jsonl").write_text(text, encoding="utf-8")
    return folder


def packed(tmp_path: Path, count: int = 40, rows: int = 120, **changes: Any) -> Packed:
    """A pack of `count` requests drawn from `rows`."""
    made: dict[str, Any] = {"count": count, "seed": 1, "redact": False, **changes}
    folder = write_samples(tmp_path / "evaluation", [sample_row(n) for n in range(rows)])
    return make_pack(folder, tmp_path / "blind", **made)


def opened(packed: Packed) -> tuple[Pack, Key]:
    return opened_at(packed.path)


def opened_at(path: Path) -> tuple[Pack, Key]:
    pack = open_pack(path)
    return pack, open_key(key_path(path), pack)


def sound(entry: KeyEntry) -> Rating:
    """A careful rater to whom both models are alike."""
    if entry.kind != "planted":
        return Rating(choice="tie")
    assert entry.sound is not None
    return Rating(choice=entry.sound, critical=["b" if entry.sound == "a" else "a"])


def rate_all(
    pack: Pack, key: Key, rater: str, say: Callable[[KeyEntry], Rating | None] = sound
) -> None:
    """Rate every item as `say` says; None leaves it out."""
    for entry in key.entries:
        rating = say(entry)
        if rating is not None:
            append(pack, rater, entry.id, rating)


def prefer(entry: KeyEntry, who: str, *, fault: str | None = None) -> Rating:
    """A rating of a request in terms of models: who is "candidate", "base" or "tie"."""
    assert entry.candidate is not None
    sides = {"candidate": entry.candidate, "base": "b" if entry.candidate == "a" else "a"}
    return Rating.model_validate(
        {
            "choice": "tie" if who == "tie" else sides[who],
            "critical": [] if fault is None else [sides[fault]],
        }
    )
