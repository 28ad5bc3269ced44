"""`evaluate review` on the command line: what it says and how it ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from review_rows import opened_at, prefer, rate_all, sample_row, sound, write_samples

from eval import cli


def call(*arguments: str | Path) -> int:
    """Exit code of `evaluate review ARGUMENTS` in this process."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["review", *map(str, arguments)])
    code = ended.value.code
    assert isinstance(code, int)
    return code


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    return write_samples(tmp_path / "evaluation", [sample_row(n) for n in range(400)])


def test_serving_loads_no_model_code() -> None:
    command = [sys.executable, "-X", "importtime", "-c",
               "import eval.cli, eval.review.web, eval.review.commands"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert not re.findall(r"\| +(torch|transformers|triton|datasets)$", done.stderr, re.MULTILINE)


def test_pack_rate_score(
    evaluation: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = tmp_path / "blind"
    assert call("pack", evaluation, "--out", pack, "--n", "120", "--seed", "7") == 0
    said = capsys.readouterr().out
    assert "120 requests of the 320 (of 400) that the models answered differently" in said
    assert f"keep {pack}.key.json from them" in said.replace("\n", " ")
    assert call("score", pack) == 3
    assert "PENDING: 120 of 120 requests have no rating that counts" in capsys.readouterr().out

    opened_pack, key = opened_at(pack)
    rate_all(opened_pack, key, "Ann")
    assert call("score", pack, "--out", tmp_path / "found") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "ACCEPTED: 120 requests, 1 rater: net preference +0.0% [-2.0%, +2.0%]" in said
    assert "0 new critical faults (at most" in said
    assert "No evaluation knows of it yet: --evaluation DIR" in said
    assert "What this review could have shown: among 0 decisive pairs" in said
    assert sorted(p.name for p in (tmp_path / "found").iterdir()) == [
        "review.html", "review.json", "review.md"
    ]  # fmt: skip


def test_exit_codes_of_a_rejection_and_of_tampering(
    evaluation: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = tmp_path / "blind"
    assert call("pack", evaluation, "--out", pack, "--n", "60") == 0
    opened_pack, key = opened_at(pack)
    rate_all(
        opened_pack, key, "Ann", lambda e: prefer(e, "base") if e.kind == "request" else sound(e)
    )
    assert call("score", pack) == 1
    assert "Preference (FAIL): on balance people prefer the base" in capsys.readouterr().out
    items = pack / "items.jsonl"
    items.write_text(items.read_text().replace("EUR", "XXX", 1))
    assert call("score", pack) == 4
    assert "was changed after the pack was made" in " ".join(capsys.readouterr().err.split())
    assert call("serve", pack) == 4


def test_serving_ends_by_ctrl_c_and_the_key_is_found_from_within(
    evaluation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = tmp_path / "blind"
    assert call("pack", evaluation, "--out", pack, "--n", "20") == 0
    command = [sys.executable, "-m", "eval.cli", "review", "serve", str(pack), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        address = re.search(rb"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert address
        assert httpx.get(address.group().decode(), timeout=300).status_code == 200
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, b"")
    assert f"evaluate review score {pack} --evaluation EVALUATION_DIR" in out.decode()
    monkeypatch.chdir(pack)
    assert call("score", ".") == 3
    assert (tmp_path / "blind-review" / "review.json").exists()


def test_without_a_verb_the_help_is_all_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 2
    said = capsys.readouterr()
    assert "Draw requests" in said.out + said.err
    assert "error:" not in said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rewiev", "pack"], "'rewiev' is no artifact and no command; did you mean 'review'?"),
        (["review", "pack"], "(evaluate review pack --help shows every option)"),
        (["plan", "--itmes", "4"], "(evaluate plan --help shows every option)"),
        (["x", "--itmes", "4"], "(evaluate --help shows every option)"),
    ],
)
def test_wrong_usage_names_the_command_that_was_meant(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    (("pack", "{e}"), "Missing option '--out'"),
    (("pack", "{e}", "--out", "{t}/x", "--n", "5"), "Invalid value for '--n'"),
    (("pack", "{e}", "--out", "{t}/x", "--margin", "1.5"), "Invalid value for '--margin'"),
    (("pack", "{t}/none", "--out", "{t}/x"), "no samples.jsonl in"),
    (("pack", "{e}", "--out", "{e}"), "exists already"),
    (("serve", "{e}"), "is not a review pack"),
    (("serve", "{e}", "--port", "70000"), "Invalid value for '--port'"),
    (("score", "{t}/none"), "is not a review pack"),
    (("frobnicate",), "No such command 'frobnicate'"),
])  # fmt: skip
def test_wrong_usage_is_one_line_and_exit_code_2(
    evaluation: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    filled = [a.format(e=evaluation, t=tmp_path) for a in arguments]
    assert call(*filled) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x").exists()
    assert not list(tmp_path.glob("*.key.json"))
