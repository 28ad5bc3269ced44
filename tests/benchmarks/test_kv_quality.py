"""The FP8 KV benchmark: outlier models compute the same function, and rounding is all it adds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import kv_quality
from benchmarks.quality import Windows, load_reference
from quant.source import open_source

ARGUMENTS = ["--model", "M", "--data", "D", "--out", "O"]


@pytest.mark.parametrize("kind", ["outlier-channel", "outlier-head"])
def test_an_outlier_model_has_the_same_logits_and_larger_keys(
    kind: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = open_source(str(tiny_model("llama")))
    reference = load_reference(source, "cpu")
    ids = list(range(5, 40))
    before = kv_quality.largest_keys(reference, ids)
    kv_quality.write_outlier_model(source, kind, before, tmp_path / "m")
    planted = load_reference(open_source(str(tmp_path / "m")), "cpu")
    after = kv_quality.largest_keys(planted, ids)
    factors = torch.stack(after) / torch.stack(before)
    head_dim = source.skeleton.head_dim
    assert (factors[:, head_dim:] == 1).all()
    expected = head_dim if kind == "outlier-head" else 2
    assert ((factors[:, :head_dim] == kv_quality.OUTLIER).sum(1) == expected).all()
    with torch.inference_mode():
        one, two = (m(input_ids=torch.tensor([ids])).logits for m in (reference, planted))
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_rows_say_what_rounding_adds_to_the_same_weights(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = Windows(
        calibration=[list(range(5, 45)), list(range(60, 100))],
        heldout={"wikitext": [list(range(105, 145)), list(range(150, 190))]},
    )
    monkeypatch.setattr(kv_quality, "load_windows", lambda *_: windows)
    monkeypatch.setattr(kv_quality, "OUTLIER", 4096.0)  # the tiny model's keys are small
    out = tmp_path / "rows.jsonl"
    kv_quality.main([
        "--model", str(tiny_model("llama")), "--data", "D", "--out", str(out),
        "--models", "plain,outlier-head", "--keep-worst", "1",
    ])  # fmt: skip
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(r["suite"], r["scheme"], r["metric"]) for r in rows} == {
        ("quality", "fp8-kv", "kl_mean")
    }
    added = {
        tuple(r["extra"][key] for key in ("base", "model", "kv_cache", "scales")): r["extra"][
            "kl_added"
        ]
        for r in rows
    }
    assert len(added) == 24
    assert len(rows) == 24 + 2 * 3
    last = [r["extra"] for r in rows if r["extra"]["kv_skip_layers"]]
    assert [len(extra["kv_skip_layers"]) for extra in last] == [1, 1]
    for extra in (r["extra"] for r in rows):
        if extra["base"] == "dense":  # nothing else is lost there
            assert extra["kl_alone"] == pytest.approx(extra["kl_added"], abs=1e-9)
        assert ("kl_alone_over_one" in extra) == (extra["scales"] not in ("none", "1.0"))
    assert all((value == 0) == (key[-1] == "none") for key, value in added.items())
    by_head = ("dense", "outlier-head", "fp8-head")
    assert added[*by_head, "fp8-head"] < added[*by_head, "1.0"]


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kv_quality.parse_arguments([*ARGUMENTS, "--bases", "w5"])
    assert "unknown w5; known: dense, w4-sym-g64" in capsys.readouterr().err
