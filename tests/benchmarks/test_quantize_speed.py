"""The speed benchmark of quantizing: rows, extrapolation marked as such, the memory proof."""

from __future__ import annotations

import json
import mmap
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import quantize_speed
from benchmarks.quantize_parts import Recorder, parts_in
from benchmarks.quantize_speed import main, parse_arguments
from quant.machine import anonymous_bytes

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-5, "head_dim": 32,
    "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 512,
    "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2,
    "rope_theta": 1e4, "tie_word_embeddings": False, "vocab_size": 512,
}  # fmt: skip


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quantize_speed.SHAPES, "tiny", TINY)
    monkeypatch.setitem(quantize_speed.WINDOWS, "tiny", (2, 24))


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["metric"]: row for row in rows}


def test_a_part_is_measured_and_the_whole_extrapolated(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert main(["--shape", "tiny", "--layers", "1", "--commit", "c", "--out", str(out)]) == 0
    rows = rows_of(out)
    assert set(rows) == {"seconds", "seconds_extrapolated", "host_peak_gb"}
    extra = rows["seconds"]["extra"]
    assert extra["layers"] == 1
    more = rows["seconds_extrapolated"]["value"] - rows["seconds"]["value"]
    assert more == pytest.approx(3 * (extra["stages"]["layers"] - extra["drawing_s"]))
    assert {row["suite"] for row in rows.values()} == {"quantize"}


def test_the_whole_is_not_extrapolated(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert main(["--shape", "tiny", "--commit", "c", "--out", str(out)]) == 0
    assert set(rows_of(out)) == {"seconds", "host_peak_gb"}


def test_a_run_in_parts_sums_their_seconds(tmp_path: Path) -> None:
    out, state = tmp_path / "rows.jsonl", tmp_path / "state"
    words = ["--shape", "tiny", "--commit", "c", "--out", str(out), "--state", str(state)]
    assert main([*words, "--seconds-at-most", "0.000001"]) == quantize_speed.STOPPED
    assert not out.exists()
    part = parts_in(state)[0]
    assert main(words) == 0
    rows = rows_of(out)
    first, second = rows["seconds"]["extra"]["parts"]
    assert first["seconds"] == part.seconds
    drawing = first["drawing_s"] + second["drawing_s"]
    total = first["seconds"] + second["seconds"]
    assert rows["seconds"]["value"] == pytest.approx(total - drawing)
    assert rows["seconds"]["extra"]["wall_s"] == pytest.approx(total)
    with pytest.raises(SystemExit, match="holds a finished run"):
        main(words)


def test_the_peak_is_seen_after_it_is_gone(tmp_path: Path) -> None:
    size = 128 << 20
    with Recorder(tmp_path, "cpu") as memory:
        before = anonymous_bytes()
        # Not a tensor: the allocator may have that much left over from earlier tests.
        with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
            held.write(b"\1" * size)
            deadline = time.monotonic() + 30
            while memory.part.host_peak_bytes - before <= 100 << 20 and time.monotonic() < deadline:
                time.sleep(0.005)
        assert anonymous_bytes() - before < 100 << 20
    assert memory.part.host_peak_bytes - before > 100 << 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--shape is needed"),
        (["--shape", "tiny", "--data", "D"], "--data needs --model"),
        (["--shape", "tiny", "--model", "M", "--layers", "2"], "quantized whole"),
        (["--shape", "tiny", "--seconds-at-most", "9"], "needs --state"),
        (["--shape", "tiny", "--windows", "64"], "expected WINDOWSxTOKENS"),
    ],
)
def test_arguments_that_make_no_sense(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([*arguments, "--out", "O"])
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_layers_of_an_8b_from_disk_stay_under_six_gigabytes(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert main(["--memory-proof", "--scratch", str(tmp_path), "--out", str(out)]) == 0
    assert rows_of(out)["host_peak_gb"]["value"] <= quantize_speed.PROOF_GB
