"""Which test holds which case of the shared list's section E: every case has one, every test is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CASES = TESTS.parents[1] / "shared" / "cases.md"

EVAL, SERVER = "eval/test_eval_cases.py", "eval/test_server_target.py"
BENCH, BENCH_CASES = "runtime/test_bench.py", "runtime/test_bench_cases.py"

# Case -> the files whose tests carry its number, and what is right.
TABLE: dict[str, tuple[tuple[str, ...], str]] = {
    "E01": ((EVAL,), "the same ids in process, over chat and over completions; one BOS"),
    "E03": ((EVAL,), "each token but the first scored once; total NLL / count"),
    "E05": ((EVAL,), "unit, windows, BOS and data are said; the base by the same code"),
    "E07": ((EVAL,), "batch size and order change no score"),
    "E09": ((BENCH, BENCH_CASES), "TTFT is the first frame with something generated"),
    "E11": ((SERVER, BENCH, BENCH_CASES), "sent = ok + failed by kind; exit code; no retries"),
    "E13": ((SERVER, BENCH_CASES), "caps, true concurrency, lag and repeats are shown"),
}


def numbered(file: str) -> set[str]:
    """Numbers of the cases that a file's test functions carry."""
    body = ast.parse((TESTS / file).read_text(encoding="utf-8")).body
    names = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    return {m[1].upper() for name in names if (m := re.match(r"test_(e\d\d)_", name))}


@pytest.mark.parametrize("case", TABLE)
def test_each_file_of_the_table_tests_its_case(case: str) -> None:
    for file in TABLE[case][0]:
        assert case in numbered(file), f"{file} holds no test_{case.lower()}_..."


def test_no_numbered_test_is_missing_from_the_table() -> None:
    files = {file for held, _ in TABLE.values() for file in held}
    for file in files:
        assert numbered(file) <= {case for case, (held, _) in TABLE.items() if file in held}


def test_every_case_has_a_test() -> None:
    if not CASES.is_file():
        pytest.skip("no ../shared/cases.md beside the checkout")
    listed = re.findall(r"^\*\*(E\d\d) ", CASES.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) >= 7
    assert set(listed) == set(TABLE)
