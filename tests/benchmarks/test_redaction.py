"""What the redaction benchmark compares: the same rows, with and without what is personal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.redaction import texts_with_findings, variants


def characters(text: str, **_: Any) -> dict[str, list[int]]:
    return {"input_ids": [ord(letter) for letter in text]}


def test_the_variants_differ_in_what_is_personal_alone(tmp_path: Path) -> None:
    rows = [{"text": f"{'x' * 900} {n} write to a{n}@example.com."} for n in range(4)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [*rows, {"text": "nothing"}]))
    texts = list(texts_with_findings(path))
    assert len(texts) == 4
    assert all(600 < len(text) < 650 for text in texts)
    found = variants(texts, characters, 2, 640)
    for plain, clean in zip(found["as they are"], found["redacted"], strict=True):
        assert "@" in "".join(map(chr, plain))
        assert "".join(map(chr, clean)).endswith("write to [EMAIL_1].")
    assert len(found["other rows"]) == 2
    assert found["other rows"] != found["as they are"]
    with pytest.raises(SystemExit, match="6 rows with personal data are needed"):
        variants(texts, characters, 3, 640)
