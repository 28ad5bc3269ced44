"""`evaluate compare`: pairing, the verdict over the test vectors, and what is refused."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from logged_runs import outcomes, sample, sha, write_run

from eval.cli import main
from eval.compare import Comparison, Limits, compare
from eval.compare_files import MismatchError, read_run
from eval.errors import EvaluationError, UsageError
from eval.stats import Sampling, drop_upper

Rows = list[dict[str, Any]]


def judged(tmp_path: Path, base: Rows, candidate: Rows, **options: Any) -> Comparison:
    results = options.pop("results", {})
    runs = [
        read_run(write_run(tmp_path / name, rows, **results))
        for name, rows in (("a", base), ("b", candidate))
    ]
    limits, sampling = options.pop("limits", Limits()), Sampling(draws=2000)
    return compare(runs[0], runs[1], limits=limits, sampling=sampling, **options)


def of_counts(n: int, lost: int, gained: int, wrong: int = 0) -> tuple[Rows, Rows]:
    base, candidate = outcomes(n, lost, gained, wrong)
    return (
        [sample(k, acc=value) for k, value in enumerate(base)],
        [sample(k, acc=value) for k, value in enumerate(candidate)],
    )


@pytest.mark.parametrize(
    ("n", "lost", "gained", "upper", "code"),
    [
        (100, 0, 0, 0.0263, 3), (150, 0, 0, 0.0177, 0), (200, 1, 1, 0.0176, 3),
        (200, 4, 0, 0.0438, 3), (400, 2, 2, 0.0106, 0), (400, 8, 0, 0.0351, 3),
        (1000, 10, 5, 0.0122, 0), (60, 10, 0, 0.2598, 1), (400, 64, 0, 0.1924, 1),
    ],
)  # fmt: skip
def test_the_vectors_of_the_paired_test(
    tmp_path: Path, n: int, lost: int, gained: int, upper: float, code: int
) -> None:
    made = judged(tmp_path, *of_counts(n, lost, gained))
    (metric,) = made.metrics
    assert metric.measurement.upper == pytest.approx(upper, abs=5e-5)
    assert (len(metric.lost), len(metric.gained)) == (lost, gained)
    flips = lost + gained
    tail = sum(math.comb(flips, k) for k in range(lost, flips + 1)) / 2**flips
    assert metric.p_value == pytest.approx(tail)
    assert made.exit_code == code
    if code == 3:
        assert metric.answer.num_needed is None or metric.answer.num_needed > n


def test_a_significant_loss_within_the_margin_raises_an_alarm(tmp_path: Path) -> None:
    one = judged(tmp_path / "one", *of_counts(1000, 20, 10))
    assert one.exit_code == 0
    assert one.metrics[0].alarm
    base, candidate = of_counts(1000, 20, 10)
    for row in (*base, *candidate):  # a second metric, without any loss: Holm doubles the p-value
        row |= {"metrics": ["acc", "exact_match"], "exact_match": 1}
    both = judged(tmp_path / "two", base, candidate)
    first = next(m for m in both.metrics if m.metric == "acc")
    assert first.holm_p == pytest.approx(2 * (first.p_value or 0))
    assert not first.alarm


def test_gains_do_not_hide_losses(tmp_path: Path) -> None:
    made = judged(tmp_path, *of_counts(160, 16, 21, wrong=19))
    assert made.metrics[0].measurement.estimate < 0
    assert made.exit_code == 1
    assert "whatever is gained elsewhere" in made.metrics[0].answer.reason


def test_pairs_are_found_in_any_order(tmp_path: Path) -> None:
    base, candidate = of_counts(60, 10, 0)
    plain = judged(tmp_path / "plain", base, candidate)
    random.Random(0).shuffle(candidate)
    mixed = judged(tmp_path / "mixed", base, candidate)
    assert mixed.metrics[0].measurement == plain.metrics[0].measurement
    assert sorted(p.base.doc_id for p in mixed.metrics[0].lost) == list(range(10))


def changed(rows: Rows, **keys: Any) -> Rows:
    return [rows[0] | keys, *rows[1:]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[:-1], "8 samples in A and 7 in B"),
        (lambda rows: changed(rows, doc_hash=sha("other")),
         r"1 documents \(doc_id 0\) of A are not in B: the data was changed"),
        (lambda rows: [row | {"prompt_hash": sha("x")} for row in rows],
         r"8 prompts \(doc_id 0, 1, 2, \.\.\.\) differ for the same documents: another chat"),
        (lambda rows: changed(rows, target_hash=sha("x")), "1 targets .* the task's answers"),
        (lambda rows: changed(rows, filter="strict"), "the filters none, strict in A or B are not"),
        (lambda rows: changed(rows, arguments={"gen_args_0": {"arg_0": "", "arg_1": {}}}),
         "1 generation settings .* they decide the answers"),
    ],
)  # fmt: skip
def test_runs_that_answer_other_questions_are_refused(
    tmp_path: Path, change: Callable[[Rows], Rows], message: str
) -> None:
    rows = of_counts(8, 0, 0)[0]
    with pytest.raises(MismatchError, match=message):
        judged(tmp_path, rows, change(rows))


def test_a_task_of_one_run_only_is_refused_by_name(tmp_path: Path) -> None:
    rows = of_counts(8, 0, 0)[0]
    write_run(tmp_path / "b", rows, task="more")
    with pytest.raises(MismatchError, match=r"more \(only in .*b/model\).*--tasks"):
        judged(tmp_path, rows, rows)


def test_a_document_that_stands_twice_is_one_piece_of_evidence(tmp_path: Path) -> None:
    base, candidate = of_counts(150, 0, 0)
    assert judged(tmp_path / "once", base, candidate).exit_code == 0
    half = [sample(k % 75, acc=1) | {"doc_id": k} for k in range(150)]
    twice = judged(tmp_path / "twice", half, half)
    assert twice.metrics[0].measurement.num_clusters == 75
    assert twice.exit_code == 3


def test_items_of_one_contract_count_together(tmp_path: Path) -> None:
    rows = of_counts(150, 0, 0)[0]
    assert judged(tmp_path / "alone", rows, rows).exit_code == 0
    assert judged(tmp_path / "by doc", rows, rows, cluster="doc").exit_code == 3
    with pytest.raises(UsageError, match="--cluster party: doc_id 0 has no such field"):
        judged(tmp_path / "none", rows, rows, cluster="party")


def test_scores_are_compared_by_their_mean(tmp_path: Path) -> None:
    draw = random.Random(1)
    base = [0.5 + 0.4 * draw.random() for _ in range(200)]
    rows = [sample(k, f1=value) for k, value in enumerate(base)]
    for drop, code in ((0.001, 0), (0.1, 1)):
        worse = [sample(k, f1=value - drop * (0.5 + draw.random())) for k, value in enumerate(base)]
        made = judged(tmp_path / str(drop), rows, worse)
        (metric,) = made.metrics
        assert metric.kind == "score"
        assert metric.scale == 1
        assert metric.measurement.estimate == pytest.approx(drop, rel=0.1)
        assert metric.measurement.lower < metric.measurement.estimate < metric.measurement.upper
        assert made.exit_code == code


@pytest.mark.parametrize(("n", "code"), [(8, 3), (100, 3), (150, 0)])
def test_unchanged_scores_prove_only_what_their_number_can(
    tmp_path: Path, n: int, code: int
) -> None:
    """Resampling what did not change has no width; a loss in one item of thirty may be unseen."""
    rows = [sample(k, f1=(0.5, 0.75)[k % 2]) for k in range(n)]
    made = judged(tmp_path, rows, rows)
    assert made.exit_code == code
    assert made.metrics[0].measurement.upper == pytest.approx(1 - 0.05 ** (1 / n))


def test_scores_beyond_one_are_measured_in_the_bases_mean(tmp_path: Path) -> None:
    base = [sample(k, bleu=40 + k % 3) for k in range(60)]
    worse = [sample(k, bleu=36 + k % 3) for k in range(60)]
    made = judged(tmp_path, base, worse)
    assert made.metrics[0].scale == pytest.approx(41)
    assert made.metrics[0].measurement.estimate == pytest.approx(4 / 41)
    assert made.exit_code == 1


def test_a_metric_where_less_is_better(tmp_path: Path) -> None:
    base = [sample(k, wer=0.1) for k in range(60)]
    worse = [sample(k, wer=0.3 + 0.001 * k) for k in range(60)]
    direction = {"results": {"higher_is_better": {"intent": {"wer": False}}}}
    assert judged(tmp_path / "worse", base, worse, **direction).exit_code == 1
    assert judged(tmp_path / "better", worse, base, **direction).exit_code == 0


def test_a_metric_of_unknown_direction_is_refused_not_guessed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # What lm-eval writes where a metric_list names a metric of the task's own and no direction.
    unknown = {"higher_is_better": {"intent": {"valid_json": None, "acc": None}}}
    a, b = tmp_path / "a", tmp_path / "b"
    for folder, value in ((a, 1), (b, 0)):
        write_run(folder, [sample(k, valid_json=value, acc=1) for k in range(200)], **unknown)
    code, _, err = run(capsys, a, b)
    assert code == 4
    assert "intent/valid_json: the runs do not say whether more of it is better" in err
    assert run(capsys, a, b, "--metrics", "acc")[0] == 0
    write_run(a, [], date="2027", higher_is_better={"intent": {"valid_json": True}})
    assert run(capsys, a, b, "--metrics", "valid_json")[0] == 1


@pytest.mark.parametrize(("shift", "code"), [(0.01, 0), (0.05, 1), (-0.05, 0)])
def test_likelihoods_give_the_ratio_of_perplexities(
    tmp_path: Path, shift: float, code: int
) -> None:
    base = [sample(k, word_perplexity=[-30.0 - k, 10 + k]) for k in range(40)]
    other = [sample(k, word_perplexity=[-30.0 - k - shift * (10 + k), 10 + k]) for k in range(40)]
    made = judged(tmp_path, base, other)
    (metric,) = made.metrics
    assert metric.measurement.estimate == pytest.approx(math.exp(shift))
    total = sum(30 + k for k in range(40)) / sum(10 + k for k in range(40))
    assert metric.measurement.base == pytest.approx(math.exp(total))
    assert made.exit_code == code


def test_metrics_over_whole_sets_are_compared_by_right_answers(tmp_path: Path) -> None:
    base = [sample(k, mcc=[k % 2, k % 2]) for k in range(200)]
    worse = [sample(k, mcc=[k % 2, 0]) for k in range(200)]
    made = judged(tmp_path, base, worse)
    assert made.metrics[0].kind == "pass or fail"
    assert len(made.metrics[0].lost) == 100
    assert made.exit_code == 1


def test_a_base_at_chance_cannot_show_a_loss(tmp_path: Path) -> None:
    base, candidate = of_counts(400, 0, 0, wrong=290)
    assert judged(tmp_path / "free", base, candidate).exit_code == 0
    for row in (*base, *candidate):
        row["filtered_resps"] = [[-1.0, False], [-2.0, False], [-3.0, False], [-4.0, False]]
    made = judged(tmp_path / "choice", base, candidate)
    assert "base too weak to judge" in made.metrics[0].answer.reason
    assert made.exit_code == 3


def test_missing_values_and_nan_are_never_a_pass(tmp_path: Path) -> None:
    rows = of_counts(200, 0, 0)[0]
    nan = changed(rows, acc=math.nan)
    assert judged(tmp_path / "nan", rows, nan).exit_code == 1
    with pytest.raises(EvaluationError, match="A itself gives NaN"):
        judged(tmp_path / "base", nan, rows)
    with pytest.raises(EvaluationError, match="acc is missing in B for doc_id 0"):
        judged(tmp_path / "none", rows, changed(rows, acc=None))
    words = [sample(k, said="x") for k in range(9)]
    with pytest.raises(EvaluationError, match="intent/said: its values per document are no num"):
        judged(tmp_path / "words", words, words)


def test_a_metric_that_the_first_sample_lacks_is_missing_not_left_out(tmp_path: Path) -> None:
    base, candidate = (
        [sample(k, acc=1) if k == 0 else sample(k, acc=1, f1=value) for k in range(200)]
        for value in (1.0, 0.0)
    )
    with pytest.raises(EvaluationError, match="f1 is missing in A for doc_id 0"):
        judged(tmp_path, base, candidate)


def test_the_newest_samples_of_a_task_count(tmp_path: Path) -> None:
    old, new = of_counts(60, 10, 0)
    write_run(tmp_path / "b", of_counts(60, 0, 0)[0], date="2025-01-01T00-00-00.1")
    made = judged(tmp_path, old, new)
    assert len(made.metrics[0].lost) == 10


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["compare", *map(str, arguments)])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_the_command_says_what_was_lost_and_writes_both_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, candidate = of_counts(400, 64, 1)
    a, b = write_run(tmp_path / "a", base), write_run(tmp_path / "b", candidate)
    code, out, _ = run(capsys, a, b, "--out", tmp_path / "cmp")
    assert code == 1
    assert out.startswith("# Rejected: model against model")
    assert "64 lost and 1 gained of 400 items" in out
    assert "Lost: 64 (doc_id 0, 1, 2" in out
    assert "right:  right 0" in out
    assert "asked:  ..." not in out
    assert (tmp_path / "cmp" / "compare.md").read_text().strip() == out.strip()

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    data = json.loads((tmp_path / "cmp" / "compare.json").read_text(), parse_constant=refuse)
    assert data["exit_code"] == 1
    assert data["metrics"][0]["lost"]["doc_ids"] == list(range(64))
    counts = data["metrics"][0]
    assert counts["upper"] == pytest.approx(
        drop_upper(judged(tmp_path, base, candidate).metrics[0].measurement.paired)  # type: ignore[arg-type]
    )
    code, out, _ = run(capsys, a, b, "--redact", "--json")
    assert code == 1
    assert "right 0" not in out
    assert json.loads(out)["metrics"][0]["lost"]["examples"] == []


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["A", "gone"], 2, "gone is not a folder"),
        (["A", "empty"], 2, "holds no samples_TASK_DATE.jsonl"),
        (["A", "A", "--tasks", "intent,nope"], 2, "--tasks: nope cannot be compared here"),
        (["A", "A", "--tasks", "nope"], 2, "no samples of the tasks asked for; there are intent"),
        (["A", "A", "--metrics", "f9"], 2, "no metric of that name was measured; there are acc"),
        (["A", "A", "--metrics", "acc,f9"], 2, "--metrics: f9 cannot be compared here"),
        (["A", "A", "--margin", "2"], 2, "--margin is 2"),
        (["A", "A", "--confidence", "0.4"], 2, "--confidence is 0.4"),
        (["A", "broken"], 2, "samples of lm-eval 0.4.3 or later"),
        (["A", "."], 2, "holds the samples of"),
        (["A", "A", "--margin", "0.1"], 3, ""),
    ],
)
def test_wrong_usage_and_broken_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    options: list[str], code: int, message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "A", of_counts(8, 0, 0)[0])
    write_run(tmp_path / "other", of_counts(8, 0, 0)[0], task="other")
    write_run(tmp_path / "broken", [{"doc_id": 0}])
    (tmp_path / "empty").mkdir()
    found, _, err = run(capsys, *options)
    assert message in err
    assert found == code
