"""Artifacts of random weights of real shapes, in seconds: what speed and memory are measured on.

    python -m benchmarks.synth --shape llama-3.1-8b --recipe w4a16 --out DIR [--layers N]

The weights are those of `quant.random_model`, rounded to nearest by the recipe's schemes. They pass
through the project's own writer, so the result is a complete, sealed artifact with a tokenizer,
which `runtime serve` takes. It has no probe (nothing was computed) and says in artifact.json where
its weights come from. Codes and scales are random on purpose: hardware runs faster on zeros.
Tensors are drawn on `--device` (a GPU where there is one), whose kind is part of what they are.
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

from quant.artifact.artifact import Artifact
from quant.artifact.errors import ArtifactError
from quant.artifact.layout import to_tensors
from quant.artifact.manifest import (
    Manifest,
    ModuleRecord,
    RecipeRecord,
    SourceRecord,
    scheme_tables,
)
from quant.artifact.scheme import KV_SCHEMES
from quant.artifact.shipped import resolve_input
from quant.artifact.writer import ArtifactWriter
from quant.errors import QuantError, RecipeError
from quant.methods.rtn import rtn
from quant.plan import Plan, make_plan
from quant.plan_rows import PlanRow
from quant.provenance import kv_record
from quant.random_model import EMBEDDING, PREFIX, SHAPES, RandomModel
from quant.recipe import Recipe

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Keys and values of such a model have a spread of about one: far inside what e4m3 holds.
_KV_SCALE = 0.0625


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One artifact to write: weights, and what becomes of each module."""

    model: RandomModel
    recipe: Recipe
    plan: Plan


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
    shards = range(job.plan.num_layers + 1)
    with ArtifactWriter(
        out, num_shards=len(shards), job=_identity(job), overwrite=overwrite
    ) as writer, ThreadPoolExecutor(workers or _num_workers(job.model.device)) as pool:  # fmt: skip
        todo = [index for index in shards if index not in writer.committed]
        list(pool.map(lambda index: writer.write_shard(index, shard_tensors(job, index)), todo))
        for name, data in job.model.files.items():
            writer.write_file(name, data)
        writer.write_file("recipe.yaml", job.recipe.text.encode())
        return writer.seal(_manifest(job), {**job.model.config, "dtype": job.plan.dtype})


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
    model = RandomModel(f"{PREFIX}{shape}?{urlencode(given)}")
    loaded = _load_recipe(recipe).with_overrides(changes)
    if loaded.method == "gptq":
        loaded = loaded.with_overrides({"method": "rtn"})
    plan = make_plan(
        loaded, model.module_shapes, model.num_layers, model.config,
        source_dtype="bfloat16", is_tied=model.is_tied,
    )  # fmt: skip
    return Job(model=model, recipe=loaded, plan=plan)


def _load_recipe(name: str) -> Recipe:
    file = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
    try:
        return Recipe.load(resolve_input(file, "recipes"))
    except FileNotFoundError as error:
        raise RecipeError(str(error)) from error


def _identity(job: Job) -> dict[str, Any]:
    """What an interrupted run must have in common with this one to be taken up again."""
    return {
        "model": job.model.digest,
        "recipe": job.recipe.sha256,
        "overrides": job.recipe.cli_overrides,
        "torch": torch.__version__,
    }


def _manifest(job: Job) -> Manifest:
    plan, recipe = job.plan, job.recipe
    attention = tuple(f"model.layers.{i}.self_attn" for i in plan.kv_layers)
    return Manifest(
        created_by="weighbridge benchmarks.synth",
        architecture=plan.architecture,
        dtype=plan.dtype,
        schemes=scheme_tables(plan.schemes()),
        modules={row.module: _record(row, plan) for row in plan.rows},
        kv_cache=kv_record(plan.kv_cache, attention),
        source=SourceRecord(
            path=job.model.name, kind="hf", digest=job.model.digest, dtype="bfloat16"
        ),
        recipe=RecipeRecord(
            text=recipe.text,
            sha256=recipe.sha256,
            name=recipe.name,
            overrides=recipe.cli_overrides,
        ),
        tools={"torch": torch.__version__, "device": torch.device(job.model.device).type},
    )


def _record(row: PlanRow, plan: Plan) -> ModuleRecord:
    is_tied = row.module == "lm_head" and plan.is_tied
    return ModuleRecord(
        scheme=row.scheme.label,
        shape=row.shape,
        method=row.method,
        reason=row.note,
        tied_to=EMBEDDING if is_tied else None,
    )


def _num_workers(device: str) -> int:
    """On a CPU each worker holds a whole module in float32 several times over."""
    return min(8 if torch.device(device).type == "cuda" else 2, os.cpu_count() or 1)


def shard_tensors(job: Job, index: int) -> dict[str, Tensor]:
    """What shard `index` holds: 0 all that is outside the layers, i the layer i - 1."""
    rows = {row.module: row for row in job.plan.layer_rows(index - 1 if index else None)}
    prefix = f"model.layers.{index - 1}."
    stored: dict[str, Tensor] = {}
    for name in job.model.shapes:
        if name.startswith(prefix if index else "model.layers.") == bool(index):
            stored |= _stored(job, name, rows.get(name.removesuffix(".weight")))
    if index - 1 in job.plan.kv_layers and KV_SCHEMES[job.plan.kv_cache].has_stored_scales:
        scale = torch.tensor([_KV_SCALE], dtype=DTYPES[job.plan.dtype])
        if job.plan.kv_cache == "fp8-head":
            scale = scale.repeat(job.model.config["num_key_value_heads"])[:, None, None]
        stored |= {f"{prefix}self_attn.{leaf}": scale for leaf in ("k_scale", "v_scale")}
    return stored


@torch.inference_mode()
def _stored(job: Job, name: str, row: PlanRow | None) -> dict[str, Tensor]:
    weight, dtype = job.model.draw(name), DTYPES[job.plan.dtype]
    if row is None or row.scheme.is_dense:
        return {name: weight.to(dtype).cpu()}
    tensors = to_tensors(rtn(weight, row.scheme, dtype))
    return {f"{row.module}.{leaf}": tensor.cpu() for leaf, tensor in tensors.items()}


def changes_of(args: argparse.Namespace) -> dict[str, Any]:
    """The recipe keys that the command line replaces."""
    size: str | None = args.group_size
    return {
        "group_size": int(size) if size is not None and size.isdecimal() else size,
        "symmetric": False if args.asymmetric else None,
        "lm_head": args.lm_head,
        "kv_cache": args.kv_cache,
        "dtype": args.dtype,
    }


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


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
    parser.add_argument("--lm-head", choices=["dense", "w8a16"], help="the output head")
    parser.add_argument("--kv-cache", choices=["none", *KV_SCHEMES], help="fp8 stores scales")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="of scales and dense tensors")
    parser.add_argument("--workers", type=_count, help="shards written at a time")
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
