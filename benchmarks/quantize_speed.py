"""What quantizing takes: seconds, and peak memory of the GPU and of the host.

    python -m benchmarks.quantize_speed --shape llama-3.1-8b --device cuda --out results.jsonl
    python -m benchmarks.quantize_speed --shape smollm2-135m --model M.gguf --data ../shared/data
    python -m benchmarks.quantize_speed --memory-proof --out results.jsonl

GPTQ, W4A16. Shapes stand for random weights (`synth:`): speed and memory do not depend on what a
model has learnt. With --model and --data it is that model on the windows that split.json names.
--layers N quantizes a part and says what the whole would take: such rows are named
`seconds_extrapolated` and carry the layers measured. --memory-proof writes two layers of the 8B
shape to disk first and quantizes them from there on the CPU, in a fresh process. The host's figure
is anonymous memory (RssAnon): pages of mapped files can be dropped at any time. One JSON line per
figure is appended to --out. Exit code 1 when the proof goes beyond its bar.

A run in several commands, because one may not last that long or is killed:

    python -m benchmarks.quantize_speed --shape qwen3-32b --device cuda --state S \
        --seconds-at-most 540 --out results.jsonl     # exit code 3: run it again

Seconds are then the sum over all commands. Drawing random weights is no part of `seconds`
(extra.wall_s has it, extra.drawing_s is it).
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality import git_commit, hardware, load_windows, progress
from benchmarks.quantize_parts import (
    LimitedProgress,
    OutOfTime,
    Part,
    Recorder,
    parts_in,
    timed_drawing,
)
from quant.artifact.durable import write_file, write_safetensors
from quant.calibration import windows_from_token_lists
from quant.checkpoint import Source
from quant.estimate import estimate
from quant.machine import anonymous_bytes, device_speed, is_gpu, speed_of
from quant.peak_memory import PROCESS_BYTES, Workload
from quant.pipeline import run
from quant.plan import Plan, make_plan
from quant.random_model import SHAPES, RandomModel
from quant.recipe import Recipe
from quant.report import RunReport
from quant.run_start import tokens_at_once
from quant.source import open_source

# Windows x tokens: the split's for the fixture, llm-compressor's usual sizes for the others.
WINDOWS = {"smollm2-135m": (144, 1024), "llama-3.1-8b": (256, 2048), "qwen3-32b": (256, 2048)}
GROUP_SIZES = {"smollm2-135m": 64}
STOPPED = 3
PROOF_SHAPE, PROOF_LAYERS, PROOF_WINDOWS, PROOF_GB = "llama-3.1-8b", 2, (2, 512), 6.0


def random_windows(vocab: int, count: int, tokens: int) -> list[list[int]]:
    """Windows of ids that any tokenizer of that size has; the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    ids: list[list[int]] = torch.randint(0, vocab, (count, tokens), generator=generator).tolist()
    return ids


def write_checkpoint(model: str, folder: Path) -> None:
    """A random model as a directory on disk: a file per tensor, so that none is held longer."""
    random = RandomModel(model)
    files = {name: f"{i:05d}.safetensors" for i, name in enumerate(random.shapes)}
    for name, file in files.items():
        write_safetensors(folder / file, {name: random.draw(name)})
    size = sum(2 * math.prod(shape) for shape in random.shapes.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    write_file(folder / "model.safetensors.index.json", json.dumps(index).encode())
    write_file(folder / "config.json", json.dumps(random.config).encode())
    for name, data in random.files.items():
        write_file(folder / name, data)


@contextmanager
def source_of(args: argparse.Namespace) -> Iterator[Source]:
    """The model to quantize; for the proof a checkpoint that is removed afterwards."""
    if args.model:
        yield open_source(args.model)
        return
    layers = f"&layers={args.layers}" if args.layers else ""
    kind = "cuda" if args.device.startswith("cuda") else "cpu"
    yield open_source(f"synth:{args.shape}?seed=0&device={kind}{layers}")


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of one run. OutOfTime when it was stopped before its end."""
    count, tokens = args.windows
    opening = time.perf_counter()
    with source_of(args) as source, state_of(args) as state:
        opening = time.perf_counter() - opening
        if args.data:
            windows = load_windows(args.data, source.tokenizer(), None).calibration
            windows = [window[:tokens] for window in windows[:count]]
        else:
            windows = random_windows(int(source.config["vocab_size"]), count, tokens)
        expected = predicted(
            source, windows, Recipe.parse(recipe_text(args), "quantize_speed"), args.device
        )
        with Recorder(state, args.device) as recorder, timed_drawing(source, recorder.part):
            report = quantize(source, windows, state / "artifact", args, recorder)
        parts = parts_in(state)
        common = row_common(source, windows, report, args)
        common["extra"] |= expected | {
            "opening_s": opening,
            "parts": [asdict(part) for part in parts],
        }
    yield from figures(Part.whole(parts), report, common, source.num_layers, args)


def figures(
    whole: Part,
    report: RunReport,
    common: dict[str, Any],
    layers: int,
    args: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """A row per figure. Drawing random weights does not count as quantizing."""
    seconds = whole.seconds - whole.drawing_s
    common["extra"] |= {"wall_s": whole.seconds, "drawing_s": whole.drawing_s}
    yield {**common, "metric": "seconds", "value": seconds, "unit": "s"}
    all_layers = int(SHAPES[args.shape]["num_hidden_layers"]) if args.shape in SHAPES else 0
    if layers < all_layers:
        in_layers = report.seconds["layers"] - whole.drawing_s
        more = (all_layers - layers) * in_layers / layers
        row = {**common, "metric": "seconds_extrapolated", "value": seconds + more, "unit": "s"}
        yield row
    yield {**common, "metric": "host_peak_gb", "value": whole.host_peak_bytes / 1e9, "unit": "GB"}
    if args.device.startswith("cuda"):
        common["extra"] |= {"gpu_reserved_gb": whole.gpu_reserved_bytes / 1e9}
        peak = whole.gpu_peak_bytes / 1e9
        yield {**common, "metric": "gpu_peak_gb", "value": peak, "unit": "GB"}


@contextmanager
def state_of(args: argparse.Namespace) -> Iterator[Path]:
    """Where the artifact is made and parts are recorded: kept only if it was asked for."""
    if args.state is None:
        with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
            yield Path(folder)
        return
    args.state.mkdir(parents=True, exist_ok=True)
    if (args.state / "artifact").exists():
        raise SystemExit(f"error: {args.state} holds a finished run; name another --state")
    yield args.state


def recipe_text(args: argparse.Namespace) -> str:
    """GPTQ, W4A16, symmetric."""
    group_size = GROUP_SIZES.get(args.shape, 128)
    return f"scheme: w4a16\ngroup_size: {group_size}\nmethod: gptq\nsmoothing: none\n"


def quantize(
    source: Source,
    windows: list[list[int]],
    out: Path,
    args: argparse.Namespace,
    recorder: Recorder,
) -> RunReport:
    """Make the artifact at `out`, or go on with it."""
    recipe = Recipe.parse(recipe_text(args), "quantize_speed")
    plan = plan_of(source, recipe)
    calibration = windows_from_token_lists(windows)
    progress = LimitedProgress(recorder, args.seconds_at_most)
    return run(source, plan, recipe, calibration, out, device=args.device, progress=progress)


def plan_of(source: Source, recipe: Recipe) -> Plan:
    """`recipe` applied to the model."""
    return make_plan(
        recipe, source.module_shapes, source.num_layers, source.config,
        source_dtype=str(source.dtype).removeprefix("torch."), is_tied=source.skeleton.is_tied,
    )  # fmt: skip


def predicted(
    source: Source, windows: list[list[int]], recipe: Recipe, device: str
) -> dict[str, Any]:
    """What `plan` says such a run takes, before it, and the device's speed that it took."""
    plan, found = plan_of(source, recipe), device_speed(device)
    work = Workload(
        tokens=sum(map(len, windows)), window_tokens=max(map(len, windows)),
        batch_tokens=tokens_at_once(recipe, plan, device), is_gpu=is_gpu(device),
        process_bytes=max(PROCESS_BYTES, anonymous_bytes()),
    )  # fmt: skip
    cost = estimate(plan, work, speed_of(found))
    assert cost.seconds is not None
    return {
        "predicted_s": cost.seconds,
        "predicted_host_gb": cost.host_bytes / 1e9,
        "predicted_gpu_gb": cost.gpu_bytes / 1e9,
        "predicted_disk_gb": cost.disk_bytes / 1e9,
        "device_speed": asdict(found),
    }


def row_common(
    source: Source, windows: list[list[int]], report: RunReport, args: argparse.Namespace
) -> dict[str, Any]:
    """What every row says."""
    return {
        "suite": "quantize",
        "shape": args.shape,
        "scheme": f"w4-sym-g{GROUP_SIZES.get(args.shape, 128)}",
        "kv_dtype": "none",
        "batch": len(windows),
        "extra": {
            "method": "gptq",
            "recipe": recipe_text(args),
            "weights": "checkpoint" if args.model else "random",
            "calibration_windows": len(windows),
            "window_tokens": len(windows[0]),
            "layers": source.num_layers,
            "stages": dict(report.seconds),
            "host_memory": "RssAnon",
            "is_proof": args.is_proof,
        },
        "hardware": hardware(args.device),
        "versions": dict(report.tools),
        "commit": args.commit or git_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def prove(args: argparse.Namespace) -> int:
    """Quantize a checkpoint on disk in a process of its own; 1 when it took more than the bar."""
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        checkpoint = Path(folder) / "checkpoint"
        checkpoint.mkdir()
        write_checkpoint(f"synth:{args.shape}?layers={args.layers}", checkpoint)
        rows = Path(folder) / "rows.jsonl"
        command = [
            sys.executable, "-m", "benchmarks.quantize_speed", "--shape", args.shape,
            "--model", str(checkpoint), "--windows", "x".join(map(str, args.windows)),
            "--out", str(rows), "--scratch", folder, "--in-proof",
        ]  # fmt: skip
        subprocess.run(command, check=True)
        found = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    for row in found:
        record(row, args.out)
    peak = next(row["value"] for row in found if row["metric"] == "host_peak_gb")
    verdict = "within" if peak <= args.bar_gb else "beyond"
    progress(f"{peak:.2f} GB of anonymous memory at most, {verdict} {args.bar_gb:g} GB")
    return int(peak > args.bar_gb)


def record(row: dict[str, Any], out: Path) -> None:
    """One line more in the results."""
    names = {"seconds": "s", "host_peak_gb": "host_gb", "gpu_peak_gb": "gpu_gb"}
    before = row["extra"].get(f"predicted_{names.get(row['metric'])}")
    said = "" if before is None else f" (predicted {before:.5g})"
    progress(f"  {row['shape']} {row['metric']} {row['value']:.5g}{said}")
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**row, "repeats": [row["value"]]}) + "\n")


def _windows(text: str) -> tuple[int, int]:
    count, _, tokens = text.partition("x")
    if not (count.isdecimal() and tokens.isdecimal() and int(count) and int(tokens)):
        raise argparse.ArgumentTypeError(f"{text!r}; expected WINDOWSxTOKENS, such as 64x512")
    return int(count), int(tokens)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(WINDOWS), help="what the rows are of")
    parser.add_argument("--model", help="checkpoint to quantize instead of random weights")
    parser.add_argument("--data", type=Path, help="folder with split.json (default: random ids)")
    parser.add_argument("--windows", type=_windows, help="WINDOWSxTOKENS (default: by shape)")
    parser.add_argument("--layers", type=int, help="only so many layers; the rest extrapolated")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--memory-proof", action="store_true", help="two 8B layers from disk")
    parser.add_argument("--bar-gb", type=float, default=PROOF_GB, help="what the proof may take")
    parser.add_argument("--state", type=Path, help="folder to make the artifact in: goes on there")
    parser.add_argument("--seconds-at-most", type=float, help="stop at a layer, to be continued")
    parser.add_argument("--scratch", type=Path, help="folder for checkpoints and artifacts")
    parser.add_argument("--commit", help="commit to record (default: asked of git)")
    parser.add_argument("--in-proof", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines file to append to")
    args = parser.parse_args(argv)
    if args.memory_proof:
        args.shape, args.layers = args.shape or PROOF_SHAPE, args.layers or PROOF_LAYERS
        args.windows = args.windows or PROOF_WINDOWS
    if args.shape is None:
        parser.error("--shape is needed (or --memory-proof)")
    if args.data and not args.model:
        parser.error("--data needs --model: random weights have no tokenizer of the data's text")
    if args.seconds_at_most and not args.state:
        parser.error("--seconds-at-most needs --state: else nothing is left to go on with")
    if args.layers and args.model:
        parser.error("--layers is of random weights; a checkpoint is quantized whole")
    args.windows = args.windows or WINDOWS[args.shape]
    args.is_proof = args.in_proof
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    args = parse_arguments(argv)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.memory_proof:
        return prove(args)
    try:
        for row in measure(args):
            record(row, args.out)
    except OutOfTime as stopped:
        progress(f"{stopped}; run the same command again to go on")
        return STOPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
