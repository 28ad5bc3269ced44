"""Artifacts of random weights of real shapes, in seconds: what speed and memory are measured on.

    python -m benchmarks.synth --shape llama-3.1-8b --recipe w4a16 --out DIR [--layers N]

The weights are those of `quant.synthetic`, rounded to nearest by the recipe's schemes and written
by the project's own writer, so the result is a complete, sealed artifact with a tokenizer, which
`runtime serve` takes. It has no probe (nothing was computed) and says in artifact.json where its
weights come from. Codes and scales are random on purpose: hardware runs faster on zeros. Tensors
are drawn on `--device` (a GPU where there is one), whose kind is part of what they are.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import torch
from torch import Tensor

from quant.api import load_recipe
from quant.artifact.artifact import Artifact, open_artifact
from quant.artifact.errors import ArtifactError
from quant.artifact.layout import to_tensors
from quant.artifact.writer import ArtifactWriter
from quant.errors import QuantError
from quant.kv_scales import scale_for, scale_names
from quant.methods.rtn import rtn
from quant.plan import Plan, PlanRow, make_plan
from quant.provenance import finish, job_identity
from quant.recipe import Recipe
from quant.report import ModuleResult
from quant.synthetic import SHAPES, SyntheticSource

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Keys and values are sums of `hidden` products with a spread of one.
_KV_ABSMAX = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One artifact to write: weights, and what becomes of each module."""

    source: SyntheticSource
    recipe: Recipe
    plan: Plan
    device: str


def synthesize(
    shape: str,
    recipe: str,
    out: Path,
    *,
    layers: int | None = None,
    seed: int = 0,
    device: str | None = None,
    tokenizer: Path | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Artifact:
    """Write the artifact of `shape` (a name of `SHAPES`, or a config.json) at `out` and open it.

    recipe: a shipped one's name or a file; gptq becomes rtn. changes: recipe keys to replace
    (`group_size`, `symmetric`, `kv_cache`, `dtype`, `skip`, `overrides`, ...). device: where
    weights are drawn, None takes a GPU where there is one. Raises QuantError or ArtifactError.
    """
    job = plan_job(shape, recipe, layers, seed, device, tokenizer, changes or {})
    identity = job_identity(job.source, job.plan, job.recipe, None, job.device)
    shards = range(job.plan.num_layers + 1)
    with ArtifactWriter(
        out, num_shards=len(shards), job=identity, overwrite=overwrite
    ) as writer, ThreadPoolExecutor(workers or _num_workers(job.device)) as pool:  # fmt: skip
        began = time.perf_counter()
        todo = [index for index in shards if index not in writer.committed]
        list(pool.map(lambda index: writer.write_shard(index, shard_tensors(job, index)), todo))
        seconds = {"weights": time.perf_counter() - began}
        results = {row.module: _result(row) for row in job.plan.rows}
        finish(job.source, job.plan, job.recipe, None, writer, None, results,
               seconds=seconds, resumed=len(shards) - len(todo), device=job.device)  # fmt: skip
    return open_artifact(out)


def plan_job(
    shape: str,
    recipe: str,
    layers: int | None,
    seed: int,
    device: str | None,
    tokenizer: Path | None,
    changes: Mapping[str, Any],
) -> Job:
    """Everything that can be wrong, found before anything is written."""
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    query = {"seed": seed, "layers": layers, "tokenizer": tokenizer, "device": chosen}
    given = {key: value for key, value in query.items() if value is not None}
    source = SyntheticSource(f"synth:{shape}?{urlencode(given)}")
    named = recipe if recipe.endswith((".yaml", ".yml")) else f"{recipe}.yaml"
    loaded = load_recipe(named, changes)
    if loaded.method == "gptq":
        loaded = loaded.with_overrides({"method": "rtn"})
    plan = make_plan(
        loaded, source.module_shapes, source.num_layers, source.config,
        source_dtype="bfloat16", is_tied=source.skeleton.is_tied,
    )  # fmt: skip
    return Job(source=source, recipe=loaded, plan=plan, device=chosen)


def _num_workers(device: str) -> int:
    """On a CPU each worker holds a whole module in float32 several times over."""
    return min(8 if torch.device(device).type == "cuda" else 2, os.cpu_count() or 1)


def shard_tensors(job: Job, index: int) -> dict[str, Tensor]:
    """What shard `index` holds: 0 all that is outside the layers, i the layer i - 1."""
    skeleton, rows = job.source.skeleton, job.plan.layer_rows(index - 1 if index else None)
    names = skeleton.layer_names(index - 1) if index else skeleton.outer_names()
    quantized = {f"{row.module}.weight": row for row in rows if not row.scheme.is_dense}
    stored: dict[str, Tensor] = {}
    for name in names:
        stored |= _stored(job, name, quantized.get(name))
    if index and job.plan.kv_cache == "fp8":
        scale = torch.tensor([scale_for(_KV_ABSMAX)], dtype=DTYPES[job.plan.dtype])
        stored |= dict.fromkeys(scale_names(skeleton.layer_prefix(index - 1)), scale)
    return stored


@torch.inference_mode()
def _stored(job: Job, name: str, row: PlanRow | None) -> dict[str, Tensor]:
    weight, dtype = job.source.draw(name, job.device), DTYPES[job.plan.dtype]
    if row is None:
        return {name: weight.to(dtype).cpu()}
    tensors = to_tensors(rtn(weight, row.scheme, dtype))
    return {f"{row.module}.{leaf}": tensor.cpu() for leaf, tensor in tensors.items()}


def _result(row: PlanRow) -> ModuleResult:
    return ModuleResult(
        module=row.module, shape=row.shape, scheme=row.scheme.label, method=row.method, bytes=0,
        note=row.note,
    )  # fmt: skip


def changes_of(args: argparse.Namespace) -> dict[str, Any]:
    """The recipe keys that the command line replaces."""
    changes: dict[str, Any] = {
        "group_size": _group_size(args.group_size),
        "symmetric": False if args.asymmetric else None,
        "kv_cache": args.kv_cache,
        "dtype": args.dtype,
    }
    if args.lm_head is not None:
        rule = {"match": "lm_head", "scheme": args.lm_head}
        size = _group_size(args.lm_head_group_size)
        changes |= {
            "skip": [],
            "overrides": [rule if size is None else {**rule, "group_size": size}],
        }
    return changes


def _group_size(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isdecimal() else text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    shapes = ", ".join(SHAPES)
    parser.add_argument("--shape", required=True, help=f"{shapes}, or a config.json")
    parser.add_argument("--recipe", required=True, help="w4a16, mixed, none, ... or a recipe file")
    parser.add_argument("--out", required=True, type=Path, help="directory to make")
    parser.add_argument("--layers", type=int, help="only so many decoder layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", help="where weights are drawn: cpu, cuda; a GPU if there is one"
    )
    parser.add_argument("--tokenizer", type=Path, help="directory of tokenizer files to put in")
    parser.add_argument("--group-size", choices=["32", "64", "128", "channel"])
    parser.add_argument("--asymmetric", action="store_true", help="zero points")
    parser.add_argument("--lm-head", metavar="SCHEME", help="w4a16, w8a16, w8a8, fp8; else dense")
    parser.add_argument("--lm-head-group-size", choices=["32", "64", "128", "channel"])
    parser.add_argument("--kv-cache", choices=["none", "fp8"], help="fp8 stores scales")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="of scales and dense tensors")
    parser.add_argument("--workers", type=int, help="shards written at a time")
    parser.add_argument("--overwrite", action="store_true", help="replace an artifact at --out")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    began = time.perf_counter()
    try:
        artifact = synthesize(
            args.shape, args.recipe, args.out, layers=args.layers, seed=args.seed,
            device=args.device, tokenizer=args.tokenizer, overwrite=args.overwrite,
            workers=args.workers, changes=changes_of(args),
        )  # fmt: skip
    except (QuantError, ArtifactError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    seconds = time.perf_counter() - began
    num_bytes = sum(artifact.reader.stored(name).num_bytes for name in artifact.reader.names)
    print(f"{artifact.path}: {num_bytes / 1e9:.2f} GB in {seconds:.1f} s, digest {artifact.digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
