"""`python -m benchmarks.gpu` from end to end on a CPU with a tiny shape: every suite gives rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_rows import read

COMMON = ["--shape", "tiny", "--device", "cpu", "--commit", "test"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu-benchmark")


def test_engine_and_start(folder: Path) -> None:
    out = folder / "engine.jsonl"
    arguments = [
        *COMMON, "--only", "engine,start", "--schemes", "w4a16", "--kv", "float32",
        "--batches", "1,3", "--tokens", "24/8", "--prefill", "2/40", "--repeats", "2",
        "--artifacts", str(folder), "--out", str(out),
    ]  # fmt: skip
    assert gpu.main(arguments) == 0
    rows = read(out)
    found = {(r["suite"], r["metric"], r["batch"], r["extra"].get("cache")): r for r in rows}
    assert set(found) == {
        ("engine", "kv_tokens", 1, None),
        ("engine", "prefill_tok_s", 2, None),
        ("engine", "ttft_ms", 1, None),
        ("engine", "decode_tok_s", 1, None),
        ("engine", "decode_tok_s", 3, None),
        ("start", "startup_s", 1, "cold"),
        ("start", "startup_s", 1, "warm"),
    }
    decode = found["engine", "decode_tok_s", 3, None]
    assert (decode["extra"]["input"], decode["extra"]["output"]) == (24, 8)
    assert decode["extra"]["group"] == 128
    assert decode["extra"]["steps"] == 6
    assert all(row["value"] > 0 for row in rows)
    assert {r["commit"] for r in rows} == {"test"}
    phases = list(found["start", "startup_s", 1, "cold"]["extra"]["phases"].values())
    assert phases == sorted(phases)


def test_kernels(folder: Path) -> None:
    out = folder / "kernels.jsonl"
    arguments = [
        *COMMON, "--only", "gemm,attention", "--schemes", "w4a16,w8a16,w8a8,fp8,bf16",
        "--batches", "1,17", "--kv", "float32,fp8,int8", "--out", str(out),
    ]  # fmt: skip
    assert gpu.main(arguments) == 0
    rows = read(out)
    assert sum(r["suite"] == "gemm" for r in rows) == 5 * 2 * 2
    assert sum(r["suite"] == "attention" for r in rows) == 3 * 2
    assert max(r["extra"]["relative_error"] for r in rows) < 1e-2


def test_a_run_without_time_says_what_it_left_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "none.jsonl"
    arguments = [*COMMON, "--only", "engine", "--time-limit", "-1", "--out", str(out)]
    assert gpu.main(arguments) == 1
    assert "no time is left" in capsys.readouterr().err
    assert not out.exists()


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--schemes", "w3a16"])
    assert "none of w4a16" in capsys.readouterr().err
