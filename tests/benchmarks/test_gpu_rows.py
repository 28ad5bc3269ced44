"""Rows of GPU results and the table made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_memcheck
from benchmarks.gpu_bars import BARS, BEGIN, END, Bar, figures, render, standing
from benchmarks.gpu_rows import (
    REPO,
    BadRow,
    Origin,
    Subject,
    append,
    key,
    newest,
    problems,
    read,
    row,
)

H200 = Origin(hardware="NVIDIA H200", versions={"torch": "2.11.0"}, commit="abc123")
SUBJECT = Subject(
    suite="engine", shape="llama-3.1-8b", scheme="w4a16", kv_dtype="bf16", batch=1,
    extra={"group": 128, "lm_head": "bf16", "input": 1024, "output": 256},
)  # fmt: skip
FIRST = BARS[0]


def dated(found: dict[str, Any], when: str) -> dict[str, Any]:
    return {**found, "date": when}


def measured(**extra: Any) -> dict[str, Any]:
    subject = replace(SUBJECT, extra={**SUBJECT.extra, **extra})
    return row(subject, "decode_tok_s", [410.0, 420.123456, 430.0], H200)


def figure_of(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    return next(found for bar, found in figures(rows) if bar is FIRST)


def test_a_row_is_the_median_of_its_repeats() -> None:
    found = measured()
    assert problems(found) == []
    assert (found["value"], found["repeats"], found["unit"]) == (
        420.12, [410.0, 420.12, 430.0], "tok/s",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"value": float("nan")}, "value"),
        ({"value": True}, "value"),
        ({"repeats": []}, "value"),
        ({"suite": "moon"}, "suite"),
        ({"unit": "s"}, "metric"),
        ({"date": "2026-11-29T12:00:00"}, "time zone"),
        ({"extras": {}}, "unknown field"),
        ({"extra": []}, "extra []"),
    ],
)
def test_a_bad_row_is_told(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    bad = {**measured(), **change}
    assert complaint in "; ".join(problems(bad))
    append(tmp_path / "rows.jsonl", [measured(), bad])
    with pytest.raises(BadRow, match="line 2"):
        read(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("action", ["table", "bars"])
@pytest.mark.parametrize("text", ["{", "[]", "7", '"x"', "", '{"suite": 1}', "null"])
def test_a_line_that_is_no_row_is_told_by_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str, text: str
) -> None:
    append(tmp_path / "rows.jsonl", [measured()])
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(f"{text}\n")
    assert gpu.main([action, "--out", str(tmp_path / "rows.jsonl")]) == 2
    assert "error: rows.jsonl, line 2: no " in capsys.readouterr().err


@pytest.mark.parametrize("action", ["table", "bars"])
def test_results_that_cannot_be_read_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    """A mistyped path is no table of figures that nobody measured, and leaves the page alone."""
    page, results = tmp_path / "README.md", tmp_path / "rows.jsonl"
    page.write_text(f"{BEGIN}kept{END}")
    ask = [action, "--out", str(results), "--into", str(page)]
    assert gpu.main(ask) == 2
    assert "rows.jsonl" in capsys.readouterr().err
    results.write_bytes(b"\xff\n")
    assert gpu.main(ask) == 2
    assert "error: rows.jsonl, line 1: no row" in capsys.readouterr().err
    assert page.read_text() == f"{BEGIN}kept{END}"
    append(tmp_path / "good.jsonl", [measured()])
    absent = tmp_path / "absent.md"
    code = gpu.main([action, "--out", str(tmp_path / "good.jsonl"), "--into", str(absent)])
    assert (code, absent.exists()) == (2 if action == "table" else 1, False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_memcheck_says_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_memcheck.main([]) == 2
    assert "error: no CUDA device" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu_memcheck.main(["--parts", "w4,nope"])
    assert "'nope' is none of w4, " in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_nothing_is_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--out", str(tmp_path / "rows.jsonl"), "--artifacts", str(tmp_path)]) == 2
    assert "error: --device cuda: not usable here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_newest_row_of_a_key_counts() -> None:
    """Times are compared, not their text; a later line wins a tie."""
    old = dated(measured(), "2026-11-29T23:30:00+00:00")
    new = dated(measured(), "2026-11-29T23:31:00+00:00")
    east = dated(measured(), "2026-11-30T00:15:00+02:00")  # 22:15 UTC
    assert newest([new, old, east]) == [new]
    tied = {**new, "value": 1.0}
    assert newest([new, tied]) == [tied]
    assert len({key(measured()), key(measured(group=64)), key(measured(lm_head="w8a16"))}) == 3


@pytest.mark.parametrize(
    "extra", [{"lm_head": "w8a16"}, {"input": 128}, {"layers": 2}, {"group": 64},
              {"deterministic": True}],
)  # fmt: skip
def test_other_work_does_not_count(extra: dict[str, Any]) -> None:
    assert figure_of([measured()]) is not None
    assert figure_of([measured(**extra)]) is None


def test_other_cards_and_shapes_do_not_count() -> None:
    assert figure_of([{**measured(), "hardware": "NVIDIA A100"}]) is None
    assert figure_of([{**measured(), "shape": "qwen3-14b"}]) is None


def test_a_bar_is_met_on_its_own_side() -> None:
    decode = FIRST
    ttft = next(bar for bar in BARS if bar.metric == "ttft_ms")
    idle = next(bar for bar in BARS if bar.metric == "gpu_idle_pct")
    assert decode.is_met(400, decode.must)
    assert not decode.is_met(399.9, decode.must)
    assert ttft.is_met(49, ttft.must)
    assert not ttft.is_met(49.1, ttft.must)
    assert not idle.is_met(3.0, idle.must)


def test_the_table_has_a_line_per_bar() -> None:
    text = render([measured()])
    lines = text.splitlines()
    assert (lines[0], lines[-1]) == (BEGIN, END)
    assert len(lines) == len(BARS) + 4
    assert "| 400 | 500 | 262 | **420** |" in lines[3]
    assert "abc123" in lines[3]
    assert text.count("not measured") == len(BARS) - 1


def test_standing_tells_what_is_below_or_missing() -> None:
    text, all_met = standing([measured()])
    lines = text.splitlines()
    assert lines[0].startswith(
        "must     decode, W4A16, batch 1, tok/s: 420, +5.0 % of must 400, -1"
    )
    assert sum(line.startswith("missing") for line in lines) == len(BARS) - 1
    assert not all_met
    best = [
        row(
            replace(SUBJECT, scheme=bar.scheme, kv_dtype=bar.kv_dtype, batch=bar.batch,
                    extra={"lm_head": "bf16", "cache": bar.cache, **lengths(bar)}),
            bar.metric, [bar.goal * (0.99 if bar.is_lower_better else 1)], H200,
        )
        for bar in BARS
    ]  # fmt: skip
    text, all_met = standing(best)
    assert all_met
    assert all(line.startswith("goal") for line in text.splitlines())


def lengths(bar: Bar) -> dict[str, int]:
    prompt = {"prefill_tok_s": (2048, 1), "ttft_ms": (2048, 1)}.get(bar.metric, (1024, 256))
    return {"input": prompt[0], "output": prompt[1]}


def test_the_table_goes_between_its_markers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, results = tmp_path / "page.md", tmp_path / "rows.jsonl"
    append(results, [measured()])
    page.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    assert gpu.main(["table", "--out", str(results), "--into", str(page)]) == 0
    assert page.read_text() == f"before\n\n{render(read(results))}\nafter\n"
    assert gpu.main(["table", "--out", str(results)]) == 0
    assert capsys.readouterr().out == render(read(results))
    page.write_text("no markers")
    with pytest.raises(SystemExit, match="markers|does not have"):
        gpu.main(["table", "--out", str(results), "--into", str(page)])


def test_committed_results_are_good_and_readme_shows_them() -> None:
    rows = read(gpu.RESULTS)
    page = (REPO / "README.md").read_text(encoding="utf-8")
    assert render(rows) in page, "run: python -m benchmarks.gpu table --into README.md"


@pytest.mark.parametrize(
    "flags",
    ["--layers 0", "--repeats 0", "--batches 1,0", "--tokens 8", "--prefill 2/x", "--group -1",
     "--lm-head int4", "--starts two"],
)  # fmt: skip
def test_nonsense_flags_are_refused_by_name(capsys: pytest.CaptureFixture[str], flags: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu.main(flags.split())
    flag, _ = flags.split()
    assert f"argument {flag}: " in capsys.readouterr().err


def test_a_shape_without_kernels_to_measure_is_a_failed_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    flags = ["--device", "cpu", "--shape", "moon", "--commit", "test", "--out", str(out)]
    assert gpu.main([*flags, "--only", "gemm,attention"]) == 1
    told = capsys.readouterr().err
    assert "ValueError: no GEMMs of shape 'moon'; known: llama-3.1-8b" in told
    assert "ValueError: no attention of shape 'moon'; known: llama-3.1-8b" in told
    assert not out.exists()
