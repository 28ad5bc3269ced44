"""Inputs are found where given, then among what is shipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from quant.artifact.shipped import resolve_input, shipped_dir


def test_given_wins_over_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = resolve_input("w4a16.yaml", "recipes")
    assert shipped == shipped_dir("recipes") / "w4a16.yaml"
    (tmp_path / "w4a16.yaml").write_text("scheme: w8a8\n")
    assert resolve_input("w4a16.yaml", "recipes").resolve() == tmp_path / "w4a16.yaml"
    assert resolve_input(str(tmp_path / "w4a16.yaml"), "recipes") == tmp_path / "w4a16.yaml"


def test_not_found_names_both_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as caught:
        resolve_input("w4a61.yaml", "recipes")
    for part in (str(tmp_path / "w4a61.yaml"), str(shipped_dir("recipes")), "w4a16.yaml"):
        assert part in str(caught.value)
    with pytest.raises(FileNotFoundError, match="is a folder"):
        resolve_input(str(tmp_path), "recipes")
