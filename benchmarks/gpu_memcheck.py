"""Our kernels at awkward sizes, once each, for compute-sanitizer to watch.

    python -m benchmarks.gpu_memcheck                 run everything under memcheck; exit code 1 if
                                                      it finds an access outside of an allocation,
                                                      2 where there is no GPU or no such tool
    python -m benchmarks.gpu_memcheck --parts w4,attention

Kernels are compiled in a first run without the tool. Tensors are allocated one by one (no caching),
so that an access beyond one does not land in another. It looks for accesses, not for wrong numbers:
the tests do that.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.gpu_rows import REPO

SHAPES = ((576, 576), (192, 576), (576, 1536))
ROWS = (1, 3, 17, 65, 130, 600)


def linears(schemes: tuple[str, ...]) -> Iterator[str]:
    """Every scheme's linear over odd shapes and all ways of choosing a program by M."""
    from benchmarks.gpu_gemm import Bench
    from runtime.kernels.workspace import KernelOptions, Workspace

    device = torch.device("cuda")
    for scheme in schemes:
        for n, k in SHAPES:
            options = KernelOptions(workspace=Workspace(device), deterministic=False)
            bench = Bench(scheme, n, k, device, options, 64 if scheme == "w4a16" else None)
            for m in ROWS:
                next(bench.contenders(m))().calls[0]()
            yield f"{scheme} {n}x{k}"


def many_rows() -> Iterator[str]:
    """W4A16's kernels whose warps have roles, at row counts that fill no tile: alone, gating, and
    adding. Below 513 rows only shapes of the card's table get them."""
    from benchmarks.gpu_gemm import Bench
    from runtime.kernels.w4a16 import w4a16_add_, w4a16_can_add, w4a16_gate_up, w4a16_linear
    from runtime.kernels.workspace import KernelOptions, Workspace

    device = torch.device("cuda")
    for n, k in ((28672, 4096), (4096, 14336)):
        options = KernelOptions(workspace=Workspace(device), deterministic=False)
        weight = Bench("w4a16", n, k, device, options, 128).packed[0]
        for m in (7, 40, 100, 250, 601):
            x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
            w4a16_linear(x, weight)
            w4a16_gate_up(x, weight, "silu")
            if w4a16_can_add(x, weight):
                w4a16_add_(torch.randn(m, n, device=device, dtype=torch.bfloat16), x, weight)
        yield f"w4a16 {n}x{k}"


def attentions() -> Iterator[str]:
    """Decodes and prefills of lengths that fill no block, in every KV type."""
    from benchmarks.gpu_attention import Bench, Case

    cases = (
        Case(batch=3, context=37),
        Case(batch=1, context=1),
        Case(batch=5, context=1029),
        Case(batch=2, context=77, queries=77),
        Case(batch=1, context=301, queries=45),
    )
    for shape in ("smollm2-135m", "llama-3.1-8b"):
        for kv_dtype in ("bf16", "fp8", "int8"):
            for case in cases:
                Bench(shape, case, kv_dtype, torch.device("cuda")).calls()[0]()
            yield f"attention {shape} {kv_dtype}"


def steps(folder: Path) -> Iterator[str]:
    """Whole steps of a two-layer model without graphs: everything between the linears too."""
    from benchmarks.gpu_artifacts import Subject, artifact_of
    from runtime.config import EngineConfig
    from runtime.engine.engine import Engine
    from runtime.request import Request, SamplingParams

    path = artifact_of(Subject(shape="smollm2-135m", scheme="w4a16", layers=2), folder, "cuda")
    for kv_dtype in ("bfloat16", "fp8", "int8"):
        config = EngineConfig(
            device="cuda", kv_cache_dtype=kv_dtype, kv_cache_memory_bytes=16 * 2**20,
            max_num_batched_tokens=256, max_num_seqs=16, enforce_eager=True, verify="fast",
        )  # fmt: skip
        engine = Engine.from_artifact(path, config)
        sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=40, seed=1, max_tokens=5,
                                  repetition_penalty=1.1, logprobs=2)  # fmt: skip
        engine.generate([
            Request(id=str(i), prompt=tuple(range(3, 40 + 31 * i)), sampling=sampling)
            for i in range(5)
        ])  # fmt: skip
        yield f"engine, KV {kv_dtype}"


PARTS: dict[str, Callable[[Path], Iterator[str]]] = {
    "w4": lambda _: linears(("w4a16",)),
    "w4-many": lambda _: many_rows(),
    "w8": lambda _: linears(("w8a16", "w8a8", "fp8", "bf16")),
    "attention": lambda _: attentions(),
    "engine": steps,
}


def run_parts(names: list[str], folder: Path) -> None:
    for name in names:
        for what in PARTS[name](folder):
            torch.cuda.synchronize()
            print(f"ran {what}", flush=True)


def _lacking() -> str | None:
    """What this machine would need. Makes no context on the device."""
    if not torch.cuda.device_count():
        return "no CUDA device: memcheck watches kernels on the card"
    if shutil.which("compute-sanitizer") is None:
        return "compute-sanitizer is not on the PATH; it comes with the CUDA toolkit"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := [name for name in args.parts.split(",") if name not in PARTS]:
        parser.error(f"argument --parts: {unknown[0]!r} is none of {', '.join(PARTS)}")
    if args.inside is not None:
        run_parts(args.parts.split(","), args.inside)
        return 0
    if (lacking := _lacking()) is not None:
        print(f"error: {lacking}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.gpu_memcheck", "--parts", args.parts,
                   "--inside", folder]  # fmt: skip
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        began = time.perf_counter()
        if subprocess.run(command, cwd=REPO, env=environment, check=False).returncode:
            print("error: the kernels do not run without memcheck either", file=sys.stderr)
            return 1
        print(f"compiled and ran in {time.perf_counter() - began:.1f} s; again, watched")
        tool = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
        done = subprocess.run(tool + command, cwd=REPO, env=environment, check=False)
        print(f"memcheck: exit code {done.returncode}, {time.perf_counter() - began:.1f} s in all")
    return 1 if done.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
