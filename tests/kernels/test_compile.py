"""Every kernel compiles for every card it is meant for, and does not spill on the reference card.

No GPU: a subprocess (`compile_worker.py`) compiles the `COMPILE_CASES` of every op.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from compile_case import ALL_TARGETS, CompileCase

HERE = Path(__file__).parent
REPO = HERE.parents[1]
KERNELS = REPO / "runtime" / "kernels"
# With xdist other tests run beside this one.
PROCESSES = 1 if "PYTEST_XDIST_WORKER" in os.environ else len(os.sched_getaffinity(0))

# Shared memory that one program may have, in bytes (CUDA C++ Programming Guide, table of compute
# capabilities; CDNA3: 64 KiB). What is over it compiles and cannot be launched.
SHARED_BYTES = {"sm80": 163 * 1024, "sm90": 227 * 1024, "sm100": 227 * 1024, "gfx942": 64 * 1024}

MODULES = sorted(path.stem for path in HERE.glob("cases_*.py"))
CASES: list[tuple[str, CompileCase]] = [
    (module, case) for module in MODULES for case in importlib.import_module(module).COMPILE_CASES
]
Results = Mapping[tuple[str, str], dict[str, Any]]


def compile_modules(modules: Sequence[str], out: Path, folder: Path = HERE) -> dict[str, Results]:
    """By module: (case, target) -> what came of it. What a crash has left out is not there."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (folder, HERE, REPO)))
    environment["TRITON_CACHE_DIR"] = str(REPO / ".cache" / "triton-compile")
    command = [sys.executable, str(HERE / "compile_worker.py"), str(out), str(PROCESSES), *modules]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Results] = {}
    for module in modules:
        file = out / f"{module}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        found[module] = {(row["name"], row["target"]): row for row in rows}
    sys.stderr.write(done.stderr)
    return found


@pytest.fixture(scope="module")
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Results]:
    """Results of the modules whose tests were picked, the ones with most cases first."""
    pytest.importorskip("triton")
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    picked = Counter(
        item.callspec.params["module"]
        for item in items
        if item.path == request.path and "compiled" in item.fixturenames
    )
    modules = [module for module, _ in picked.most_common()]
    return compile_modules(modules, tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize(
    ("module", "case"),
    CASES,
    ids=[f"{module.removeprefix('cases_')}-{case.name}" for module, case in CASES],
)
def test_compiles(module: str, case: CompileCase, compiled: dict[str, Results]) -> None:
    for target in case.targets:
        result = compiled[module].get((case.name, target))
        assert result is not None, f"{target}: the compiler crashed in this case or before it"
        assert result["error"] is None, f"{target}: {result['error']}"
        assert not result["missing"], f"{target}: the assembly lacks {result['missing']}"
        assert result["shared_bytes"] <= SHARED_BYTES[target], f"{target}: too much shared memory"
        assert result["spill_bytes"] <= case.max_spill_bytes, (
            f"{target}: {result['spill_bytes']} bytes per thread spilled, "
            f"{case.max_spill_bytes} allowed; take a smaller tile or more warps"
        )


def test_names_are_unique() -> None:
    names = [(module, case.name) for module, case in CASES]
    assert len(names) == len(set(names))


def test_targets_are_known() -> None:
    for _, case in CASES:
        assert set(case.targets) <= set(ALL_TARGETS), case.name
        assert set(case.overrides) | set(case.target_options) <= set(ALL_TARGETS), case.name
        assert set(case.expects) <= set(case.targets), case.name


def ops_with_kernels() -> list[str]:
    return sorted(path.parent.name for path in KERNELS.glob("*/*kernel*.py"))


@pytest.mark.parametrize("op", dict.fromkeys(ops_with_kernels()))
def test_every_kernel_is_tested(op: str) -> None:
    """An op with a Triton kernel has a reference, an interpreter test and compile cases."""
    assert (KERNELS / op / "reference.py").is_file(), f"runtime/kernels/{op} has no reference.py"
    interpreter = f"test_{op}_interpreter.py"
    assert (HERE / interpreter).is_file(), f"{op} has no tests/kernels/{interpreter}"
    used = {case.kernel.partition(":")[0] for _, case in CASES}
    folder = f"runtime.kernels.{op}."
    assert any(name.startswith(folder) for name in used), f"no compile case names {folder}*"


BROKEN = """
import triton
import triton.language as tl


@triton.jit
def copy(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at))


@triton.jit
def spill(x_ptr, out_ptr, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    at = rows[:, None] * BLOCK + rows[None, :]
    first = tl.load(x_ptr + at)
    second = tl.load(x_ptr + BLOCK * BLOCK + at)
    total = tl.sum(first, 0) + tl.sum(second, 0)
    tl.store(out_ptr + at, first * total + second)


@triton.jit
def wrong(x_ptr, out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + tl.arange(0, 3)))
"""
BROKEN_CASES = """
from compile_case import CompileCase

TYPES = {"x_ptr": "*fp32", "out_ptr": "*fp32"}


def case(name, kernel, block, **rest):
    return CompileCase(name=name, kernel=f"broken_kernel:{kernel}", signature=TYPES,
                       constexprs={"BLOCK": block}, num_warps=1, **rest)


COMPILE_CASES = [
    case("good", "copy", 128, expects={"sm90": ("ld.global", "no such text")}),
    case("spills", "spill", 64, targets=("sm90",)),
    case("wrong", "wrong", 128, targets=("sm90",)),
]
"""


def test_the_worker_sees_what_is_wrong(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "broken_kernel.py").write_text(BROKEN)
    (tmp_path / "broken_cases.py").write_text(BROKEN_CASES)
    results = compile_modules(["broken_cases"], tmp_path, tmp_path)["broken_cases"]
    assert [results["good", target]["error"] for target in ALL_TARGETS] == [None] * 4
    assert results["good", "sm90"]["missing"] == ["no such text"]
    assert results["good", "sm90"]["spill_bytes"] == 0
    assert results["spills", "sm90"]["spill_bytes"] > 0
    assert "arange" in results["wrong", "sm90"]["error"]


def test_a_crash_takes_one_module_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    (tmp_path / "broken_kernel.py").write_text(BROKEN)
    (tmp_path / "crashing_cases.py").write_text("import os\nos.abort()\n")
    one = BROKEN_CASES.replace("COMPILE_CASES = [", "COMPILE_CASES = []\nREST = [")
    (tmp_path / "no_cases.py").write_text(one)
    (tmp_path / "good_cases.py").write_text(one + "COMPILE_CASES = REST[:1]\n")
    modules = ["crashing_cases", "no_cases", "good_cases"]
    found = compile_modules(modules, tmp_path, tmp_path)
    assert {name: len(results) for name, results in found.items()} == {
        "crashing_cases": 0, "no_cases": 0, "good_cases": 4,
    }  # fmt: skip
    assert "crashing_cases: its process ended" in capsys.readouterr().err
