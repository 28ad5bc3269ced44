"""One artifact in one engine in one process: `python -m benchmarks.gpu_worker SPEC`, SPEC in JSON.

Rows go to standard output as they are known, one JSON line each; remarks to standard error. A
process of its own gives each engine the whole device, and lets its parent cut it short.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu_artifacts import Subject as Model
from benchmarks.gpu_artifacts import artifact_of
from benchmarks.gpu_rows import Subject, origin

# EngineConfig's names for what rows call by a short one.
KV_DTYPES = {"bf16": "bfloat16", "fp8": "fp8", "int8": "int8", "float32": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Everything the process is told. `tokens` are (input, output) lengths of decodes."""

    model: Model
    kv_dtype: str
    device: str
    folder: str
    commit: str | None
    batches: tuple[int, ...]
    tokens: tuple[int, int] = (1024, 256)
    prefill: tuple[int, int] | None = (16, 2048)
    repeats: int = 3
    repeat_below: int = 64
    profile_batches: tuple[int, ...] = (1,)
    profile_steps: int = 48
    deadline: float | None = None
    deterministic: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Spec:
        found = json.loads(text)
        pairs = {name: tuple(found[name]) for name in ("batches", "tokens", "profile_batches")}
        prefill = None if found["prefill"] is None else tuple(found["prefill"])
        return cls(**{**found, **pairs, "prefill": prefill, "model": Model(**found["model"])})


def main() -> None:
    from benchmarks.gpu_engine import Plan, measure
    from runtime.config import EngineConfig
    from runtime.engine.engine import Engine

    spec = Spec.from_json(sys.argv[1])
    began = time.perf_counter()
    path = artifact_of(spec.model, Path(spec.folder), spec.device)
    made = time.perf_counter()
    engine = Engine.from_artifact(
        path,
        EngineConfig(
            device=spec.device,
            kv_cache_dtype=KV_DTYPES[spec.kv_dtype],  # type: ignore[arg-type]
            enable_prefix_caching=False,
            gpu_memory_utilization=0.90,
            verify="fast",
            deterministic=spec.deterministic,
            kv_cache_memory_bytes=None if spec.device.startswith("cuda") else 64 * 2**20,
        ),
    )
    say(f"artifact {made - began:.1f} s, engine {time.perf_counter() - made:.1f} s")
    subject = Subject(
        suite="engine",
        shape=spec.model.shape,
        scheme=spec.model.scheme,
        kv_dtype=spec.kv_dtype,
        batch=1,
        extra={**spec.model.extra(), **({"deterministic": True} if spec.deterministic else {})},
    )
    plan = Plan(
        batches=spec.batches,
        input_len=spec.tokens[0],
        output_len=spec.tokens[1],
        prefill=spec.prefill,
        repeats=spec.repeats,
        repeat_below=spec.repeat_below,
        profile_batches=spec.profile_batches,
        profile_steps=spec.profile_steps,
        deadline=spec.deadline,
    )
    for row in measure(engine, subject, origin(spec.device, spec.commit), plan, say):
        print(json.dumps(row), flush=True)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
