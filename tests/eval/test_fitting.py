"""Which precision the base is computed in, by what fits, and that everyone is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eval import cli
from eval.cache import Cache
from eval.errors import EvaluationError
from eval.fitting import Fit, choose, fit
from eval.targets.base import Prompt
from eval.targets.checkpoint import locate
from eval.targets.reference import ReferenceTarget

GIB = 1 << 30
BILLION = 10**9


@pytest.mark.parametrize(
    ("billions", "free", "expected"),
    [
        (8, 97, torch.float32),
        (14, 97, torch.float32),
        (32, 97, torch.bfloat16),
        (8, 30, torch.bfloat16),
    ],
)
def test_float32_where_it_fits_else_bfloat16(
    billions: int, free: int, expected: torch.dtype
) -> None:
    """Beside a candidate of 4.5 bits a weight, on cards of 139 and 43 GiB."""
    beside = billions * BILLION * 9 // 16 + 2 * GIB
    found = choose(billions * BILLION, beside, free * GIB, "cuda")
    assert found.dtype == expected
    assert ("float32 would take" in found.why) == (expected == torch.bfloat16)


def test_what_fits_in_no_way_is_refused_with_what_it_takes() -> None:
    with pytest.raises(EvaluationError, match=r"130.4 GiB in bfloat16 .* or pass --device cpu"):
        choose(70 * BILLION, 40 * GIB, 97 * GIB, "cuda")
    with pytest.raises(EvaluationError, match="13.0 GiB in bfloat16 and the candidate 26.1 GiB"):
        choose(7 * BILLION, 28 * BILLION, 12 * GIB, "cpu")


def test_a_card_keeps_room_for_the_bases_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 GiB, 90 are free and 70 are for both: 30 stay for the answers, 10 of them taken."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (90 * GIB, 100 * GIB))
    least = 2 * GIB
    assert fit(14 * GIB, 60 * GIB - 4 * 14 * GIB - least, "cuda").dtype == torch.float32
    assert fit(14 * GIB, 60 * GIB - 4 * 14 * GIB - least + 1, "cuda").dtype == torch.bfloat16


def test_both_precisions_answer_and_neither_takes_the_others_answers(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint, cache = locate(str(tiny_model("llama"))), Cache(tmp_path)
    narrow = Fit(dtype=torch.bfloat16, why="float32 would take 9 GiB")
    exact = ReferenceTarget(checkpoint, device="cpu", cache=cache)
    rounded = ReferenceTarget(checkpoint, device="cpu", cache=cache, fit=narrow)
    assert exact.description == "transformers, float32 on cpu"
    assert rounded.description == "transformers, bfloat16 on cpu (float32 would take 9 GiB)"
    window = [3, 5, 8, 13, 21, 34]
    (wide,), (close,) = (list(target.logprobs([window])) for target in (exact, rounded))
    assert close.dtype == torch.float32
    assert 0 < (wide - close).abs().max() < 0.5
    again = ReferenceTarget(checkpoint, device="cpu", cache=cache, fit=narrow)
    assert torch.equal(next(again.logprobs([window])), close)
    prompt = Prompt(token_ids=(3, 5, 8), max_tokens=4, choices=((3,), (5, 8)))
    chosen = [target.choose([prompt], lambda n: None)[0] for target in (exact, rounded)]
    assert chosen[0].choice_logprobs != chosen[1].choice_logprobs


def test_the_report_says_what_the_base_was_computed_in(
    tiny_model: Callable[..., Path],
    dense_artifact: Callable[[Path], Path],
    suite_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tiny_model("llama")
    art = dense_artifact(model)
    words = [str(art), "--base", str(model), "--suite", str(suite_dir), "--no-stamp"]
    words += ["--items", "4", "--windows", "2", "--noise-items", "0", "--out", str(tmp_path / "r")]
    stored = sum(file.stat().st_size for file in art.glob("*.safetensors"))
    for free, code in ((0, 4), (7 * stored // 4, 3)):
        monkeypatch.setattr("eval.fitting.available_host_bytes", lambda found=free: found)
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == code
    assert "free for both on cpu" in capsys.readouterr().err
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert "bfloat16 on cpu (float32 would take" in report["base"]["description"]
