"""Every case of the shared list's sections A and B has a test here, by its number."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = HERE.parents[2].parent / "shared" / "cases.md"


def numbers_tested() -> set[str]:
    """Numbers of the cases that a test function of this folder names."""
    functions = (
        node.name
        for file in HERE.glob("test_cases_*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
    )
    found = (re.match(r"test_([ab]\d\d)_", name) for name in functions)
    return {match[1].upper() for match in found if match}


def test_every_case_has_a_test() -> None:
    if not CASES.is_file():
        pytest.skip("no ../shared/cases.md beside the checkout")
    listed = re.findall(r"^\*\*([AB]\d\d) ", CASES.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) > 20
    assert set(listed) == numbers_tested()
