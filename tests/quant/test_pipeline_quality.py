"""The quality benchmark on a tiny model and made-up windows: rows, and figures that make sense."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.quality import main

TEXT = "This agreement is made between the supplier and the customer for the term. " * 40


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "cuad-contracts" / "part").mkdir(parents=True)
    (folder / "wikitext-2").mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / "cuad-contracts" / "part" / name).write_text(name + TEXT)
    (folder / "wikitext-2" / "test.txt").write_text("The parcel arrives on Monday. " * 60)
    split = {
        "window_tokens": 64,
        "calibration": {"max_windows": 6, "num_windows": 5, "files": ["a.txt"]},
        "heldout": {"max_windows": 4, "num_windows": 3, "files": ["b.txt"]},
        "wikitext": {"file": "wikitext-2/test.txt", "num_windows": 3},
    }
    (folder / "split.json").write_text(json.dumps(split))
    return folder


def rows(model: Path, data: Path, out: Path, schemes: str, *more: str) -> list[dict[str, object]]:
    main(["--model", str(model), "--data", str(data), "--schemes", schemes, "--out", str(out),
          "--commit", "abc", *more])  # fmt: skip
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_rows(tiny_model: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    found = rows(tiny_model(), data, tmp_path / "r.jsonl", "w8a16,gptq-w4-sym-g64")
    key = {(r["scheme"], r["metric"], r["extra"].get("dataset")): r for r in found}
    for scheme in ("w8a16", "w4-sym-g64"):
        assert (scheme, "seconds", None) in key
        for dataset in ("contracts", "wikitext"):
            for metric in ("kl_mean", "kl_p99", "ppl_ratio", "top1"):
                row = key[scheme, metric, dataset]
                assert row["suite"] == "quality"
                assert row["extra"]["windows"] == 3
                assert row["extra"]["calibration_windows"] == 5
                assert row["repeats"] == [row["value"]]
            fine, coarse = (key[s, "kl_mean", dataset]["value"] for s in ("w8a16", "w4-sym-g64"))
            assert 0 < fine < coarse
            assert key["w8a16", "top1", dataset]["value"] > 0.9


def test_settings_reach_the_recipe(
    tiny_model: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    found = rows(
        tiny_model(), data, tmp_path / "r.jsonl", "rtn-w4-sym-g64",
        "--set", "group_size=32", "--limit-windows", "1",
    )  # fmt: skip
    assert found[0]["extra"]["overrides"] == {"group_size": 32}
    assert found[0]["extra"]["is_limited"] is True
    assert found[-1]["extra"]["windows"] == 1


def test_unknown_scheme(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        rows(tmp_path, data, tmp_path / "r.jsonl", "w5a5")
    assert "unknown schemes w5a5; known: rtn-w4-sym-g64" in capsys.readouterr().err
