"""Compile every case of some `cases_*` modules; a JSON line per case and target.

    python compile_worker.py OUT 2 cases_w4a16 cases_norm     (tests/kernels and the repository on
                                                              PYTHONPATH; 2 at a time)

Runs in its own process, because a process that chose Triton's interpreter cannot compile. Each
module is compiled in a fork of it, which writes OUT/MODULE.jsonl: imports are paid for once, and a
compiler that crashes takes one module with it. Needs no GPU: triton brings ptxas, and LLVM for AMD.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from pathlib import Path
from typing import Any

import torch  # noqa: F401 - which every kernel's module imports: here once, not in each fork
import triton
from compile_case import CompileCase
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def source_of(case: CompileCase, target: str) -> ASTSource:
    """The kernel with the case's types, constants and alignment, as the launcher would pass it."""
    module, _, function = case.kernel.partition(":")
    kernel = getattr(importlib.import_module(module), function)
    constants = case.constants_for(target)
    types = {**case.signature, **dict.fromkeys(constants, "constexpr")}
    wrong = set(kernel.arg_names) ^ set(types)
    if wrong:
        raise ValueError(f"{case.kernel} and the case differ in arguments: {sorted(wrong)}")
    aligned = [
        index
        for index, name in enumerate(kernel.arg_names)
        if name in case.aligned or (types[name].startswith("*") and name not in case.unaligned)
    ]
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    return kind(
        fn=kernel,
        signature={name: types[name] for name in kernel.arg_names},
        constexprs=constants,
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )


def compile_case(case: CompileCase, target: str) -> dict[str, Any]:
    """{"error"} or shared memory in bytes, missing text and, on sm90, bytes spilled."""
    try:
        source = source_of(case, target)
        compiled = triton.compile(source, target=TARGETS[target], options=case.options_for(target))
    except Exception:
        return {"error": traceback.format_exc(limit=-6)[-4000:]}
    text = compiled.asm["amdgcn" if target == "gfx942" else "ptx"]
    return {
        "error": None,
        "shared_bytes": compiled.metadata.shared,
        "missing": [part for part in case.expects.get(target, ()) if part not in text],
        "spill_bytes": spilled(compiled.asm["cubin"]) if target == "sm90" else 0,
    }


def spilled(cubin: bytes) -> int:
    """Bytes of local memory per thread: spilled registers, or an array that found none."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.findall(r"STACK:(\d+) .*LOCAL:(\d+)", done.stdout)
    assert found, done.stdout + done.stderr
    return sum(int(stack) + int(local) for stack, local in found)


def compile_module(module: str, out: Path) -> None:
    """Every case of a module, a line each as soon as it is done."""
    with (out / f"{module}.jsonl").open("w", encoding="utf-8") as file:
        for case in importlib.import_module(module).COMPILE_CASES:
            for target in case.targets:
                began = time.perf_counter()
                result = {"name": case.name, "target": target, **compile_case(case, target)}
                result["seconds"] = round(time.perf_counter() - began, 2)
                file.write(json.dumps(result) + "\n")
                file.flush()


def fork_module(module: str, out: Path) -> int:
    """The id of a process that compiles `module` and ends with code 1 if that raises."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        compile_module(module, out)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    out, limit, modules = Path(sys.argv[1]), int(sys.argv[2]), deque(sys.argv[3:])
    running: dict[int, str] = {}
    while modules or running:
        while modules and len(running) < limit:
            module = modules.popleft()
            running[fork_module(module, out)] = module
        pid, status = os.wait()
        module = running.pop(pid)
        if status:
            sys.stderr.write(f"{module}: its process ended with status {status}\n")


if __name__ == "__main__":
    main()
