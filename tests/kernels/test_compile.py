"""Every kernel compiles for every card it is meant for, and does not spill on the reference card.

No GPU: one subprocess per op (`compile_worker.py`) compiles all of its `COMPILE_CASES`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from compile_case import ALL_TARGETS, CompileCase

HERE = Path(__file__).parent
REPO = HERE.parents[1]
KERNELS = REPO / "runtime" / "kernels"
# With xdist each worker compiles beside the others.
PROCESSES = 1 if "PYTEST_XDIST_WORKER" in os.environ else max(1, (os.cpu_count() or 1) // 2)

# Shared memory that one program may have, in bytes (CUDA C++ Programming Guide, table of compute
# capabilities; CDNA3: 64 KiB). What is over it compiles and cannot be launched.
SHARED_BYTES = {"sm80": 163 * 1024, "sm90": 227 * 1024, "sm100": 227 * 1024, "gfx942": 64 * 1024}

MODULES = sorted(path.stem for path in HERE.glob("cases_*.py"))
CASES: list[tuple[str, CompileCase]] = [
    (module, case) for module in MODULES for case in importlib.import_module(module).COMPILE_CASES
]
Results = Mapping[tuple[str, str], dict[str, Any]]


def compile_module(module: str, folder: Path = HERE) -> Results:
    """(case, target) -> what came of it. A worker that dies tells why and leaves the rest out."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (folder, HERE, REPO)))
    environment["TRITON_CACHE_DIR"] = str(REPO / ".cache" / "triton-compile")
    command = [sys.executable, str(HERE / "compile_worker.py"), module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    results = {(row["name"], row["target"]): row for row in rows}
    if done.returncode:
        results["worker", ""] = {"error": done.stderr[-4000:]}
    return results


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[Mapping[str, Future[Results]]]:
    """Results by module, made in the background for the modules whose tests were picked."""
    pytest.importorskip("triton")
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    picked = dict.fromkeys(
        item.callspec.params["module"]
        for item in items
        if item.path == request.path and "case" in getattr(item, "fixturenames", ())
    )
    with ThreadPoolExecutor(PROCESSES) as pool:
        yield {module: pool.submit(compile_module, module) for module in picked}


@pytest.mark.parametrize(
    ("module", "case"),
    CASES,
    ids=[f"{module.removeprefix('cases_')}-{case.name}" for module, case in CASES],
)
def test_compiles(module: str, case: CompileCase, compiled: Mapping[str, Future[Results]]) -> None:
    results = compiled[module].result()
    for target in case.targets:
        result = results.get((case.name, target), results.get(("worker", "")))
        assert result is not None, f"{target}: {module} has this name twice, or the worker stopped"
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
        assert set(case.overrides) <= set(case.targets), case.name
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
    results = compile_module("broken_cases", tmp_path)
    assert [results["good", target]["error"] for target in ALL_TARGETS] == [None] * 4
    assert results["good", "sm90"]["missing"] == ["no such text"]
    assert results["good", "sm90"]["spill_bytes"] == 0
    assert results["spills", "sm90"]["spill_bytes"] > 0
    assert "arange" in results["wrong", "sm90"]["error"]
