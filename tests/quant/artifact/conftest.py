"""The golden artifact's maker, and fresh copies of what it makes, for tests to damage."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

GOLDEN_FOLDER = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="session")
def golden() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_golden", GOLDEN_FOLDER / "make_golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """The committed artifact; read only."""
    return GOLDEN_FOLDER / "artifact"


@pytest.fixture
def artifact_dir(golden_dir: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(golden_dir, tmp_path / "copy"))
