"""Serving on a CPU: our server with many clients against transformers.generate one by one.

    python -m benchmarks.cpu_serving --model M.gguf --dense ART --w4 ART --out results.jsonl

The same prompts, the same number of new tokens (end-of-text ignored), greedy, in one run: first
transformers in float32, a request at a time, then for each artifact `runtime serve` as a process
with `--clients` concurrent clients over HTTP. Rounds of the three alternate, so that a machine that
slows down slows all of them. One JSON line per figure is appended to --out; `extra.ratio` is ours
over transformers' (medians of the rounds). Exit code 1 when a ratio is below --bar.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from quant.artifact.artifact import open_artifact
from runtime.bench import Load, run_load, summarize

REPO = Path(__file__).resolve().parents[1]
TOPICS = (
    "the duties of a supplier", "late payment of an invoice", "the return of damaged goods",
    "a lease of office space", "the confidentiality of price lists", "liability for delay",
    "the notice period of an employee", "warranty for used machines", "a change of control",
    "the governing law of a sales contract", "subcontracting", "data protection",
    "an option to renew", "force majeure", "the audit of accounts", "the transfer of claims",
)  # fmt: skip


class Transformers:
    """The baseline: the source model in float32, one request after another."""

    def __init__(self, model: Path) -> None:
        options: dict[str, Any] = {}
        if model.is_file():
            options = {"gguf_file": model.name}
            model = model.parent
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(model, **options)
        if options:
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, **options
        ).eval()

    def tok_s(self, prompts: Sequence[str], max_tokens: int) -> float:
        """New tokens per second over all prompts."""
        started = time.perf_counter()
        for prompt in prompts:
            self._generate(prompt, max_tokens)
        return len(prompts) * max_tokens / (time.perf_counter() - started)

    @torch.inference_mode()
    def _generate(self, prompt: str, max_tokens: int) -> None:
        inputs = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        out = self._model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            pad_token_id=self._tokenizer.eos_token_id,
        )
        assert out.shape[1] - inputs["input_ids"].shape[1] == max_tokens


@contextmanager
def serving(artifact: Path, clients: int) -> Iterator[str]:
    """`runtime serve` as its own process; yields the URL, stops it cleanly afterwards."""
    command = [
        sys.executable, "-c", "from runtime.cli import main; main()", "serve", str(artifact),
        "--port", "0", "--max-model-len", "1024", "--max-num-seqs", str(clients),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(REPO), "COLUMNS": "120"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("serving "):
                yield line.split(" at ")[1].strip().removesuffix("/v1")
                break
        else:
            raise SystemExit(f"runtime serve {artifact} did not start")
    finally:
        process.terminate()
        process.communicate()


def served_tok_s(url: str, prompts: Sequence[str], max_tokens: int, clients: int) -> float:
    """New tokens per second with `clients` requests in flight; every request must succeed."""
    load = Load(
        url=url, num_requests=len(prompts), concurrency=clients, prompts=tuple(prompts),
        max_tokens=max_tokens, timeout_s=1800, extra={"ignore_eos": True},
    )  # fmt: skip
    summary = summarize(run_load(load), load)
    if summary.ok != len(prompts):
        raise SystemExit(f"requests failed: {summary.failures}")
    return summary.output_tok_s


def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens per second by contestant, one figure per round. Each is warmed up first."""
    prompts = [f"Explain {topic} in plain words." for topic in TOPICS][: arguments.requests]
    rest = arguments.max_tokens, arguments.clients
    figures: dict[str, list[float]] = {"transformers": [], "dense": [], "w4": []}
    baseline = Transformers(arguments.model)
    baseline.tok_s(prompts[:1], 4)
    for number in range(arguments.rounds):
        figures["transformers"].append(baseline.tok_s(prompts, arguments.max_tokens))
        for name in ("dense", "w4"):
            with serving(getattr(arguments, name), arguments.clients) as url:
                served_tok_s(url, ["Hello."], 4, 1)
                figures[name].append(served_tok_s(url, prompts, *rest))
        shown = ", ".join(f"{name} {values[-1]:.1f}" for name, values in figures.items())
        print(f"round {number + 1}: tokens/s {shown}", flush=True)
    return figures


def rows(figures: dict[str, list[float]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One result row per contestant."""
    base = median(figures["transformers"])
    schemes = {"dense": "dense", "w4": scheme_label(arguments.w4), "transformers": "dense"}
    return [
        {
            "suite": "serving-cpu",
            "shape": arguments.shape,
            "scheme": schemes[name],
            "kv_dtype": "float32",
            "batch": 1 if name == "transformers" else arguments.clients,
            "metric": "output_tok_s",
            "value": round(median(values), 2),
            "unit": "tok/s",
            "repeats": [round(value, 2) for value in values],
            "extra": {
                "engine": "transformers" if name == "transformers" else "weighbridge",
                "ratio": round(median(values) / base, 3),
                "requests": arguments.requests,
                "max_tokens": arguments.max_tokens,
                "threads": torch.get_num_threads(),
                "command": "python -m benchmarks.cpu_serving " + " ".join(
                    f"--{key} {getattr(arguments, key)}"
                    for key in ("requests", "max_tokens", "clients", "rounds")
                ).replace("_", "-"),
            },
            "hardware": hardware(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__,
                         "python": platform.python_version()},
            "commit": commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        for name, values in figures.items()
    ]  # fmt: skip


def scheme_label(artifact: Path) -> str:
    """The commonest scheme of an artifact's quantized modules, as its label."""
    labels = [s.label for s in open_artifact(artifact).schemes().values() if not s.is_dense]
    return max(set(labels), key=labels.count)


def hardware() -> str:
    """CPU model and number of cores this process may use."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str:
    """Of the checkout this runs from, with a mark when it has changes."""
    command = ["git", "-C", str(REPO), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_serving",
                                     description=__doc__.split("\n\n")[0])  # fmt: skip
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or HF directory")
    parser.add_argument("--dense", type=Path, required=True, help="dense artifact of it")
    parser.add_argument("--w4", type=Path, required=True, help="W4A16 artifact of it")
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines, appended to")
    parser.add_argument("--shape", default="smollm2-135m", help="name of the model in the rows")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=len(TOPICS), choices=range(1, 17),
                        metavar="1..16")  # fmt: skip
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bar", type=float, default=4.0, help="least ratio of both artifacts")
    arguments = parser.parse_args()
    results = rows(measure(arguments), arguments)
    with arguments.out.open("a") as out:
        out.writelines(json.dumps(row, sort_keys=True) + "\n" for row in results)
    ratios = {row["scheme"]: row["extra"]["ratio"] for row in results if row["batch"] > 1}
    print(", ".join(f"{scheme}: {ratio}x transformers" for scheme, ratio in ratios.items()))
    return 0 if min(ratios.values()) >= arguments.bar else 1


if __name__ == "__main__":
    sys.exit(main())
