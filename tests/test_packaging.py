"""What leaves the house: the wheel works away from the clone, and a serving host stays lean."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    subprocess.run([*command, str(REPO)], check=True, capture_output=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def run_away_from_the_clone(installed: Path, cwd: Path, code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith("METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    return metadata.get_all("Requires-Dist") or []


def test_recipes_and_data_are_found_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; import quant.artifact.shipped as s;"
        "print(s.__file__); print(s.resolve_input('w4a16.yaml', 'recipes'));"
        "print(s.resolve_input('contracts.jsonl', 'calib_data'));"
        "print(s.shipped_dir('recipes') / 'gates' / 'default.yaml');"
        "print(s.resolve_adapter('business') / 'adapter_model.safetensors')"
    )
    for line in run_away_from_the_clone(installed, tmp_path, code).splitlines():
        assert Path(line).is_relative_to(installed), line
        assert Path(line).is_file(), line


def test_every_tile_table_is_found_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    tables = sorted((REPO / "runtime" / "kernels" / "tiles").glob("*.json"))
    assert tables
    for table in tables:
        (op, problems), *_ = json.loads(table.read_text()).items()
        (problem, by_rows), *_ = problems.items()
        rows = min(by_rows, key=int)
        code = (
            "import runtime.kernels.tiles as t; print(t.__file__);"
            f"print(t.lookup('NVIDIA {table.stem.upper()}', {op!r}, {problem!r}, {rows}))"
        )
        file, found = run_away_from_the_clone(installed, tmp_path, code).splitlines()
        assert Path(file).is_relative_to(installed)
        assert found == str(by_rows[rows])


def test_the_wheel_holds_the_packages_and_no_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert names >= {"eval/review/page/page.js", "eval/review/review.html.j2"}
    tops = {name.split("/")[0] for name in names}
    assert {"quant", "runtime", "eval"} <= tops
    assert not tops & {"tests", "benchmarks", "scripts", "docs"}


def test_a_serving_host_stays_lean(wheel: Path) -> None:
    serving = [line for line in requirements(wheel) if "extra" not in line or "'serve'" in line]
    names = {line.split(";")[0].split(">")[0].split("[")[0].strip() for line in serving}
    assert not names & {"datasets", "lm-eval", "lm_eval", "gguf", "jsonschema", "accelerate"}
    triton = [line for line in serving if line.startswith("triton")]
    assert triton, "the kernels need triton on GPU hosts"
    assert all("Linux" in line for line in triton)


@pytest.mark.parametrize("command", ["quantize", "evaluate", "runtime"])
def test_help_is_quick_and_loads_nothing_heavy(command: str, tmp_path: Path) -> None:
    module = {"quantize": "quant.cli", "evaluate": "eval.cli", "runtime": "runtime.cli"}[command]
    code = (
        f"import sys, time; t = time.process_time(); sys.argv = ['{command}', '--help']\n"
        f"from {module} import main\n"
        "try: main()\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'triton'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "print(time.process_time() - t, file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout
    assert float(result.stderr.split()[-1]) < 1.0


INTERRUPTED_AT_AN_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
sys.meta_path.insert(0, Interrupt())
sys.argv = ["command", "--version"]
from {package}.start import main
main()
"""


@pytest.mark.parametrize("package", ["quant", "eval", "runtime"])
def test_ctrl_c_during_the_imports_is_no_traceback(package: str) -> None:
    code = INTERRUPTED_AT_AN_IMPORT.format(package=package)
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
