"""What quantizing costs: KL, perplexity and top-1 agreement against float32, on fixed windows.

    python -m benchmarks.quality --model M.gguf --data ../shared/data \
        --schemes rtn-w4-sym-g64,w4-sym-g64,w8a8 --device cuda --out results.jsonl

Calibrates on the windows that split.json names (144 x 1024 tokens of contracts) and judges on its
held-out contracts and on wikitext-2 (48 windows each). Both models are transformers models in
float32: the reference with the source's weights, the candidate with the artifact's dequantized
weights and, where the scheme says so, rounded activations. So it runs wherever torch does, and
judges the artifact rather than a kernel. One JSON line per figure is appended to --out.

With --peer, llm-compressor (where it is installed) makes its best of the same scheme from the same
windows first, and is judged by the same code: `extra.peer_kl` and the like.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks import peers
from quant.artifact.artifact import Artifact, open_artifact
from quant.artifact.layout import QuantizedWeight, dequantize, fake_quantize_activations
from quant.calibration import windows_from_token_lists
from quant.checkpoint import Source
from quant.mixed import choose_plan
from quant.mixed_build import MixedJob, survey_source
from quant.mixed_plan import Planner
from quant.pipeline import run
from quant.plan import Plan, make_plan
from quant.recipe import Recipe
from quant.report import RunReport
from quant.source import open_source


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A scheme to judge: its name in the results, the method, and the recipe that makes it."""

    scheme: str
    method: str
    recipe: str


def _w4(method: str, symmetric: bool) -> Candidate:
    kind = "sym" if symmetric else "asym"
    recipe = f"scheme: w4a16\ngroup_size: 64\nmethod: {method}\nsymmetric: {str(symmetric).lower()}"
    return Candidate(scheme=f"w4-{kind}-g64", method=method, recipe=recipe)


CANDIDATES = {
    "rtn-w4-sym-g64": _w4("rtn", True),
    "rtn-w4-asym-g64": _w4("rtn", False),
    "gptq-w4-sym-g64": _w4("gptq", True),
    "gptq-w4-asym-g64": _w4("gptq", False),
    "awq-w4-sym-g64": _w4("awq", True),
    "awq-w4-asym-g64": _w4("awq", False),
    "gradient-w4-sym-g64": _w4("gradient", True),
    "gradient-w4-asym-g64": _w4("gradient", False),
    "auto-w4-sym-g64": _w4("auto", True),
    "auto-w4-asym-g64": _w4("auto", False),
    "rtn-w8a8": Candidate(scheme="w8a8", method="rtn", recipe="scheme: w8a8\nmethod: rtn"),
    "gptq-w8a8": Candidate(scheme="w8a8", method="gptq", recipe="scheme: w8a8\nmethod: gptq"),
    "w8a16": Candidate(
        scheme="w8a16", method="rtn", recipe="scheme: w8a16\ngroup_size: channel\nmethod: rtn"
    ),
    "rtn-fp8": Candidate(scheme="fp8", method="rtn", recipe="scheme: fp8\nmethod: rtn"),
    "gptq-fp8": Candidate(scheme="fp8", method="gptq", recipe="scheme: fp8\nmethod: gptq"),
}
for _search in ("inputs", "outputs"):
    for _symmetric in (True, False):
        _plain = _w4("rtn", _symmetric)
        CANDIDATES[f"rtn-{_search}-{_plain.scheme}"] = Candidate(
            scheme=_plain.scheme,
            method=f"rtn, scales by {_search}",
            recipe=f"{_plain.recipe}\nrtn: {{scale_search: {_search}}}",
        )
CANDIDATES["mixed-5bpw"] = Candidate(
    scheme="mixed-5bpw",
    method="smooth+gptq-original",
    recipe="scheme: w4a16\nmethod: gptq\nbudget: 5bpw\ndtype: float16\nsmoothing: search\n"
    "gptq: {target: original}",
)
for _name in (
    "rtn-w8a8",
    "gptq-w8a8",
    "rtn-fp8",
    "gptq-fp8",
    "gptq-w4-sym-g64",
    "gptq-w4-asym-g64",
    "gradient-w4-sym-g64",
    "gradient-w4-asym-g64",
):
    _plain = CANDIDATES[_name]
    CANDIDATES[f"smooth-{_name}"] = Candidate(
        scheme=_plain.scheme,
        method=f"smooth+{_plain.method}",
        recipe=f"{_plain.recipe}\nsmoothing: search",
    )
# What we would ship of each scheme, by the scheme's own name: smoothing where codes are integers,
# then GPTQ towards the original model's outputs.
for _base in ("smooth-gptq-w4-sym-g64", "smooth-gptq-w4-asym-g64", "smooth-gptq-w8a8", "gptq-fp8"):
    _plain = CANDIDATES[_base]
    CANDIDATES[_plain.scheme] = Candidate(
        scheme=_plain.scheme,
        method=f"{_plain.method}-original",
        recipe=f"{_plain.recipe}\ngptq: {{target: original}}",
    )
UNITS = {"kl_mean": "nats", "kl_p99": "nats", "ppl_ratio": "ratio", "top1": "fraction"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Token windows by use; each window has the split's fixed number of tokens."""

    calibration: list[list[int]]
    heldout: dict[str, list[list[int]]]


def load_windows(data: Path, tokenizer: Any, limit: int | None) -> Windows:
    """The windows that `data`/split.json fixes; at most `limit` of each kind."""
    split = json.loads((data / "split.json").read_text(encoding="utf-8"))
    width = split["window_tokens"]

    def contracts(part: dict[str, Any]) -> list[list[int]]:
        found: list[list[int]] = []
        for name in part["files"]:
            text = _contract(data, name).read_text(encoding="utf-8", errors="replace")
            found += _cut(tokenizer, text, width)[: part["max_windows"]]
        return found[: part["num_windows"]][:limit]

    wikitext = split["wikitext"]
    text = (data / wikitext["file"]).read_text(encoding="utf-8")
    return Windows(
        calibration=contracts(split["calibration"]),
        heldout={
            "contracts": contracts(split["heldout"]),
            "wikitext": _cut(tokenizer, text, width)[: wikitext["num_windows"]][:limit],
        },
    )


def _contract(data: Path, name: str) -> Path:
    """A contract by file name, wherever below `cuad-contracts` it lies."""
    found = [path for path in (data / "cuad-contracts").rglob("*.txt") if path.name == name]
    if not found:
        raise SystemExit(f"error: {data / 'cuad-contracts'} has no file {name!r} (see split.json)")
    return found[0]


def _cut(tokenizer: Any, text: str, width: int) -> list[list[int]]:
    """Consecutive windows of `width` ids; the last partial one is dropped."""
    ids = tokenizer(text, verbose=False)["input_ids"]
    return [ids[i : i + width] for i in range(0, len(ids) - width + 1, width)]


def load_reference(source: Source, device: str) -> nn.Module:
    """The transformers model with the source's weights in float32."""
    config = CONFIG_MAPPING[source.config["model_type"]].from_dict(dict(source.config))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    dropped = set(source.dropped()) | set(source.extra_names())
    weights = {n: source.tensor(n).float() for n in source.names if n not in dropped}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    placed: nn.Module = model.eval().requires_grad_(False).to(device)
    return placed


def make_candidate(reference: nn.Module, artifact: Artifact) -> nn.Module:
    """A copy of the reference that computes with what the artifact stores."""
    model = copy.deepcopy(reference)
    for name, parameter in model.named_parameters():
        if name in artifact.manifest.tensors:
            parameter.data = artifact.reader.tensor(name).to(parameter.device, torch.float32)
    for name, scheme in artifact.schemes().items():
        linear, weight = model.get_submodule(name), artifact.weight(name)
        assert isinstance(linear, nn.Linear)
        if not isinstance(weight, QuantizedWeight):
            continue
        value = dequantize(weight).to(linear.weight.device, torch.float32)
        linear.weight = nn.Parameter(value, requires_grad=False)
        if scheme.activations is not None:
            linear.register_forward_pre_hook(
                lambda _, args, act=scheme.activations: (fake_quantize_activations(args[0], act),)
            )
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Per-token figures, on the CPU: KL(reference || candidate), both NLLs, top-1 agreement."""

    kl: Tensor
    nll_reference: Tensor
    nll_candidate: Tensor
    agrees: Tensor


@torch.inference_mode()
def compare(reference: nn.Module, candidate: nn.Module, ids: Tensor) -> Tally:
    """Figures of all next-token predictions inside windows `ids` [B, T], row by row of logits."""
    logits = [model(input_ids=ids, use_cache=False).logits for model in (reference, candidate)]
    rows = []
    for b in range(ids.shape[0]):
        ref, cand = (part[b, :-1].float().log_softmax(-1) for part in logits)
        target = ids[b, 1:, None]
        kl = (ref.exp() * (ref - cand)).sum(-1)
        nll = [-part.gather(1, target)[:, 0] for part in (ref, cand)]
        rows.append((kl, *nll, ref.argmax(-1) == cand.argmax(-1)))
    kl, first, second, agrees = (torch.cat(parts).cpu() for parts in zip(*rows, strict=True))
    return Tally(kl=kl, nll_reference=first, nll_candidate=second, agrees=agrees)


def judge(
    reference: nn.Module, candidate: nn.Module, windows: Sequence[Sequence[int]], batch: int
) -> dict[str, float]:
    """kl_mean, kl_p99, ppl_ratio and top1 over all predictions of `windows`."""
    device = next(reference.parameters()).device
    tallies = []
    for start in range(0, len(windows), batch):
        ids = torch.tensor([list(w) for w in windows[start : start + batch]], device=device)
        tallies.append(compare(reference, candidate, ids))
        progress(f"  judged {min(start + batch, len(windows))} of {len(windows)} windows")
    kl = torch.cat([t.kl for t in tallies]).double()
    gap = torch.cat([t.nll_candidate - t.nll_reference for t in tallies]).double()
    if not bool(torch.isfinite(kl).all()):
        raise SystemExit("error: the candidate's output is NaN or infinite")
    return {
        "kl_mean": float(kl.mean()),
        "kl_p99": float(kl.quantile(0.99)),
        "ppl_ratio": float(gap.mean().exp()),
        "top1": float(torch.cat([t.agrees for t in tallies]).double().mean()),
    }


class ShowProgress:
    """Layers on standard error."""

    def start(self, total_layers: int) -> None:
        self.started = time.perf_counter()

    def layer(self, index: int, text: str) -> None:
        progress(f"  {text}, {time.perf_counter() - self.started:.1f} s")

    def done(self) -> None:
        return


def progress(text: str) -> None:
    """One line on standard error, at once."""
    print(text, file=sys.stderr, flush=True)


def quantize(
    source: Source, candidate: Candidate, windows: Windows, out: Path, args: argparse.Namespace
) -> RunReport:
    """Make the candidate's artifact at `out`."""
    recipe = Recipe.parse(candidate.recipe, candidate.scheme).with_overrides(args.changes)
    planner = partial(apply_recipe, source)
    if recipe.is_mixed:
        return quantize_mixed(source, recipe, planner, windows, out, args.device)
    calibration = windows_from_token_lists(windows.calibration)
    return run(
        source, planner(recipe), recipe, calibration, out,
        device=args.device, progress=ShowProgress(),
    )  # fmt: skip


def apply_recipe(source: Source, recipe: Recipe) -> Plan:
    """The plan of a recipe for this model."""
    return make_plan(
        recipe,
        source.module_shapes,
        source.num_layers,
        source.config,
        source_dtype=str(source.dtype).removeprefix("torch."),
        is_tied=source.skeleton.is_tied,
    )


def quantize_mixed(
    source: Source, recipe: Recipe, planner: Planner, windows: Windows, out: Path, device: str
) -> RunReport:
    """Choose a plan under the recipe's budget: the last calibration windows judge, the others are
    scored and calibrated on."""
    count = min(recipe.mixed.heldout, len(windows.calibration) // 2)
    chosen = choose_plan(
        MixedJob(
            source=source, recipe=recipe, space=survey_source(source, recipe, planner),
            planner=planner, fit=windows_from_token_lists(windows.calibration[:-count]),
            heldout=windows.calibration[-count:], out=out.absolute(), device=device,
        ),
        ShowProgress(),
    )  # fmt: skip
    chosen.install()
    for plan in chosen.report.plans:
        progress(f"  {plan}")
    return chosen.report


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFigures:
    """How the best peer setting of a scheme did, by data set and metric."""

    name: str
    seconds: float
    figures: dict[str, dict[str, float]]

    def extra(self, dataset: str, metric: str) -> dict[str, Any]:
        """What a row of ours says of it."""
        return {
            "peer": self.name,
            "peer_seconds": self.seconds,
            f"peer_{metric.removesuffix('_mean')}": self.figures[dataset][metric],
        }


def judge_peers(
    scheme: str, source: Source, reference: nn.Module, windows: Windows, args: argparse.Namespace
) -> PeerFigures | None:
    """The peer setting of least mean KL on the first data set; None where the scheme has none."""
    found: list[PeerFigures] = []
    for peer in peers.PEERS.get(scheme, ()):
        progress(f"  {peers.described()} {peer.name}")
        run = peers.run_peer(peer, reference, source.tokenizer(), windows.calibration)
        figures = {
            dataset: judge(reference, run.model, texts, args.batch)
            for dataset, texts in windows.heldout.items()
        }
        name = f"{peers.described()} {run.name}"
        found.append(PeerFigures(name=name, seconds=run.seconds, figures=figures))
        progress(f"  {name}: {run.seconds:.1f} s, {figures}")
    first = next(iter(windows.heldout))
    return min(found, key=lambda f: f.figures[first]["kl_mean"], default=None)


def measure(
    name: str,
    source: Source,
    reference: nn.Module,
    windows: Windows,
    args: argparse.Namespace,
    peer: PeerFigures | None,
) -> Iterator[dict[str, Any]]:
    """All rows of one candidate, beside a peer's figures where there are any."""
    candidate = CANDIDATES[name]
    if args.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        report = quantize(source, candidate, windows, Path(folder) / name, args)
        seconds = time.perf_counter() - started
        model = make_candidate(reference, open_artifact(Path(folder) / name))
    common = row_common(candidate, windows, report, args)
    yield {**common, "suite": "quantize", "metric": "seconds", "value": seconds, "unit": "s"}
    peak = report.peak_memory_bytes / 1e9
    yield {**common, "suite": "quantize", "metric": "host_peak_gb", "value": peak, "unit": "GB"}
    if args.device.startswith("cuda"):
        peak = torch.cuda.max_memory_allocated() / 1e9
        yield {**common, "suite": "quantize", "metric": "gpu_peak_gb", "value": peak, "unit": "GB"}
    for dataset, texts in windows.heldout.items():
        extra = {**common["extra"], "dataset": dataset, "windows": len(texts)}
        for metric, value in judge(reference, model, texts, args.batch).items():
            beside = {} if peer is None else peer.extra(dataset, metric)
            yield {
                **common, "metric": metric, "value": value, "unit": UNITS[metric],
                "extra": {**extra, **beside},
            }  # fmt: skip


def row_common(
    candidate: Candidate, windows: Windows, report: RunReport, args: argparse.Namespace
) -> dict[str, Any]:
    """What every row of a candidate says."""
    return {
        "suite": "quality",
        "shape": args.shape,
        "scheme": candidate.scheme,
        "kv_dtype": "float32",
        "batch": args.batch,
        "extra": {
            "method": candidate.method,
            "recipe": candidate.recipe,
            "overrides": args.changes,
            "lm_head": "kept",
            "calibration_windows": len(windows.calibration),
            "window_tokens": len(windows.calibration[0]),
            "is_limited": args.limit_windows is not None,
            "bits_per_weight": report.bits_per_weight(),
            "artifact_digest": report.artifact_digest,
            **({"plans": [asdict(plan) for plan in report.plans]} if report.plans else {}),
        },
        "hardware": hardware(args.device),
        "versions": dict(report.tools),
        "commit": args.commit or git_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def hardware(device: str) -> str:
    """The accelerator's name, or the processor's and its number of cores."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or 'CPU'} ({os.cpu_count()} cores)"


def git_commit() -> str:
    """The checkout's commit, `-dirty` when it has changes, or `unknown`."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="model directory or GGUF file")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds split.json")
    parser.add_argument("--schemes", required=True, help=f"of {','.join(CANDIDATES)}")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--batch", type=int, default=0, help="windows at once (0: by device)")
    parser.add_argument("--limit-windows", type=int, help="use only the first N windows of each")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
        help="change a recipe key for all schemes, such as gptq.damping=0.1; may be repeated",
    )  # fmt: skip
    parser.add_argument("--peer", action="store_true", help="run llm-compressor beside ours")
    parser.add_argument("--shape", default="smollm2-135m", help="the model's name in the rows")
    parser.add_argument("--commit", help="commit to record (default: asked of git)")
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines file to append to")
    args = parser.parse_args(argv)
    args.names = [name.strip() for name in args.schemes.split(",")]
    unknown = [name for name in args.names if name not in CANDIDATES]
    if unknown:
        parser.error(f"unknown schemes {', '.join(unknown)}; known: {', '.join(CANDIDATES)}")
    if args.peer and not peers.is_installed():
        parser.error("--peer: llmcompressor is not installed (pip install llmcompressor)")
    args.changes = {
        key: yaml.safe_load(value)
        for key, _, value in (text.partition("=") for text in args.settings)
    }
    args.batch = args.batch or (8 if args.device.startswith("cuda") else 1)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    args = parse_arguments(argv)
    source = open_source(args.model)
    windows = load_windows(args.data, source.tokenizer(), args.limit_windows)
    progress(
        f"{len(windows.calibration)} calibration windows; held out: "
        + ", ".join(f"{len(texts)} {name}" for name, texts in windows.heldout.items())
    )
    reference = load_reference(source, args.device)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    beside: dict[str, PeerFigures | None] = {}
    for name in args.names:
        progress(name)
        scheme = CANDIDATES[name].scheme
        if args.peer and scheme not in beside:
            beside[scheme] = judge_peers(scheme, source, reference, windows, args)
        for row in measure(name, source, reference, windows, args, beside.get(scheme)):
            dataset = row["extra"].get("dataset", "")
            progress(f"  {name} {dataset} {row['metric']} {row['value']:.5g}")
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**row, "repeats": [row["value"]]}) + "\n")


if __name__ == "__main__":
    main()
