"""Inputs are found where given, then among what is shipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from quant.artifact.shipped import resolve_adapter, resolve_input, shipped_dir


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


@pytest.mark.parametrize(
    ("name", "meant"),
    [("w4a16", "w4a16.yaml"), ("w4a61.yaml", "w4a16.yaml"), ("mine", "mine.yaml"), ("zzz", None)],
)
def test_a_near_miss_is_told_what_was_meant(
    name: str, meant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("scheme: w8a8\n")
    with pytest.raises(FileNotFoundError) as caught:
        resolve_input(name, "recipes")
    if meant is None:
        assert "did you mean" not in str(caught.value)
    else:
        assert str(caught.value).endswith(f"; did you mean {meant}?")


def test_what_lies_in_a_sub_folder_is_listed_and_found_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    default = shipped_dir("recipes") / "gates" / "default.yaml"
    for name in ("gates/default.yaml", "default.yaml"):
        assert resolve_input(name, "recipes", within="gates") == default
    with pytest.raises(FileNotFoundError) as caught:
        resolve_input("nope.yaml", "recipes", within="gates")
    assert "(shipped: default.yaml, full.yaml)" in str(caught.value)
    assert "w4a16.yaml" not in str(caught.value)


def test_adapters_are_found_where_given_then_among_the_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_adapter("business") == shipped_dir("recipes") / "adapters" / "business"
    with pytest.raises(FileNotFoundError, match=r"no such directory.*shipped: business"):
        resolve_adapter("busines")
    (tmp_path / "business").mkdir()
    assert resolve_adapter("business").resolve() == tmp_path / "business"
