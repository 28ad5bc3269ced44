"""Predictions against what runs took: disk and memory of one made here, the records of one H200."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quantize_speed import plan_of
from quant.estimate import Estimate, estimate
from quant.machine import Measured, speed_of
from quant.peak_memory import PROCESS_BYTES, Workload, peak_memory
from quant.plan import Plan, make_plan
from quant.recipe import Recipe
from quant.run_start import tokens_at_once
from quant.run_time import H200
from quant.source import open_source

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-5, "head_dim": 64,
    "hidden_size": 512, "intermediate_size": 1536, "max_position_embeddings": 2048,
    "num_attention_heads": 8, "num_hidden_layers": 1, "num_key_value_heads": 4,
    "rope_theta": 1e4, "tie_word_embeddings": False, "vocab_size": 2000,
}  # fmt: skip
RECIPE = "scheme: w4a16\ngroup_size: 64\nmethod: gptq\nsmoothing: none\n"
WINDOWS, TOKENS = 8, 512
# In a process of its own: an earlier test's memory is used again, and would not be seen to grow.
RUN = f"""
import sys, torch
from pathlib import Path
from benchmarks.quantize_parts import Recorder
from benchmarks.quantize_speed import plan_of
from quant.calibration import windows_from_token_lists
from quant.machine import anonymous_bytes
from quant.pipeline import run
from quant.recipe import Recipe
from quant.source import open_source
folder, recipe = Path(sys.argv[1]), Recipe.parse({RECIPE!r}, "r.yaml")
source = open_source(f"synth:{{folder / 'config.json'}}")
windows = windows_from_token_lists(torch.randint(3, 2000, ({WINDOWS}, {TOKENS})).tolist())
plan, before = plan_of(source, recipe), anonymous_bytes()
with Recorder(folder, "cpu") as recorder:
    run(source, plan, recipe, windows, folder / "artifact")
print(recorder.part.host_peak_bytes - before)
"""


def small(folder: Path) -> tuple[Plan, Recipe]:
    (folder / "config.json").write_text(json.dumps(SMALL))
    recipe = Recipe.parse(RECIPE, "r.yaml")
    return plan_of(open_source(f"synth:{folder / 'config.json'}"), recipe), recipe


def grown_in_a_run(folder: Path) -> int:
    """Bytes of anonymous memory that a run adds at its peak, as sampled."""
    shutil.rmtree(folder / "artifact", ignore_errors=True)
    command = [sys.executable, "-c", RUN, str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is Linux's")
def test_memory_and_disk_of_a_run_are_within_a_fifth(tmp_path: Path) -> None:
    plan, recipe = small(tmp_path)
    work = Workload(
        tokens=WINDOWS * TOKENS, window_tokens=TOKENS, batch_tokens=recipe.calibration.batch_tokens
    )
    nothing = Workload(tokens=0, window_tokens=0, batch_tokens=0)
    cost = estimate(plan, work)
    predicted = cost.host_bytes - PROCESS_BYTES
    grown = grown_in_a_run(tmp_path)
    written = sum(file.stat().st_size for file in (tmp_path / "artifact").glob("*.safetensors"))
    assert cost.disk_bytes == pytest.approx(written, rel=0.2)
    # Samples miss a short peak where other work holds the processor, and never exceed it.
    for _ in range(4):
        if predicted > 1.2 * grown:
            grown = max(grown, grown_in_a_run(tmp_path))
    assert predicted == pytest.approx(grown, rel=0.2)
    assert estimate(plan, nothing).host_bytes < cost.host_bytes


def recorded() -> dict[str, dict[str, dict[str, Any]]]:
    """Rows by metric of each shape's latest runs on one H200: the time of a whole one, memory of
    any, as one layer stands for all."""
    runs: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for path in sorted(RESULTS.glob("quantize*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["suite"] == "quantize" and row["hardware"] == "NVIDIA H200":
                runs.setdefault((row["date"], row["shape"]), {})[row["metric"]] = row
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for (_, shape), rows in sorted(runs.items()):
        is_part = "seconds_extrapolated" in rows
        latest = {name: row for name, row in rows.items() if not is_part or name != "seconds"}
        found.setdefault(shape, {}).update(latest)
    return found


def predicted(row: dict[str, Any]) -> Estimate:
    """What the estimate says of a recorded run, from shapes alone."""
    extra, recipe = row["extra"], Recipe.parse(row["extra"]["recipe"], "r.yaml")
    if row["shape"] == "smollm2-135m":
        synthetic = open_source("synth:smollm2-135m")
        plan = make_plan(
            recipe, synthetic.module_shapes, extra["layers"], synthetic.config,
            source_dtype="float32", is_tied=True,  # a GGUF's
        )  # fmt: skip
    else:
        plan = plan_of(open_source(f"synth:{row['shape']}?layers={extra['layers']}"), recipe)
    work = Workload(
        tokens=extra["calibration_windows"] * extra["window_tokens"],
        window_tokens=extra["window_tokens"],
        batch_tokens=tokens_at_once(recipe, plan, "cuda"), is_gpu=True,
    )  # fmt: skip
    found = extra.get("device_speed")
    return estimate(plan, work, speed_of(Measured(**found)) if found else H200)


@pytest.mark.parametrize("shape", sorted(recorded()))
def test_time_and_memory_recorded_on_a_gpu_are_within_a_fifth(shape: str) -> None:
    rows = recorded()[shape]
    assert predicted(rows["seconds"]).seconds == pytest.approx(rows["seconds"]["value"], rel=0.2)
    gpu, host = rows["gpu_peak_gb"], rows["host_peak_gb"]
    assert predicted(gpu).gpu_bytes == pytest.approx(1e9 * gpu["value"], rel=0.2)
    assert predicted(host).host_bytes == pytest.approx(1e9 * host["value"], rel=0.2)


def test_hidden_states_are_counted_where_they_are_put(tmp_path: Path) -> None:
    plan, _ = small(tmp_path)
    states = 4 * 10**6 * SMALL["hidden_size"]

    def peak(gpu: int, host: int) -> tuple[int, int, int]:
        found = peak_memory(
            plan,
            Workload(
                tokens=10**6, window_tokens=1024, batch_tokens=4096, is_gpu=True,
                free_gpu_bytes=gpu, free_host_bytes=host,
            ),
        )  # fmt: skip
        return found.gpu_bytes, found.host_bytes, found.spilled_bytes

    gpu, host, disk = peak(0, 0)
    assert disk == states
    assert peak(3 * states, 0) == (gpu + states, host, 0)
    assert peak(3 * states - 1, 3 * states) == (gpu, host + states, 0)
