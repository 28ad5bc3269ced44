"""What an FP8 KV cache costs: KL added to dense and to 4-bit weights, by where its scales are from.

    python -m benchmarks.kv_quality --model M.gguf --data ../shared/data \
        --device cuda --out results.jsonl

Of each model and base an artifact is made per kind of KV cache, calibrated as in
`benchmarks.quality`, and judged on the same held-out windows three times: with keys and values as
they are, rounded to e4m3 at a scale of 1, and rounded with the artifact's scales. What the rounding
adds to the divergence from the float32 model (`extra.kl_added`) is a difference on the same weights
and tokens; beside 4-bit weights it is mostly noise, since their error and the rounding's add up or
cancel token by token. `extra.kl_alone` is the rounding's own: the divergence from the same weights
without it. Each comes with its standard error over windows, and so does what the artifact's scales
cost beyond scales of 1 (`..._over_one`, negative where they are better).

With --keep-worst N a further artifact keeps the caches of the N layers that lose most on
calibration windows in the model's type (`kv_skip_layers`).

Beside the model itself stand two that compute the same function but have outlier keys: a power of
two is taken from the queries and given to the keys, of one pair of rotated channels
("outlier-channel") or of a whole KV head ("outlier-head"), in every layer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.quality import (
    Candidate,
    Windows,
    load_reference,
    load_windows,
    make_candidate,
    progress,
    quantize,
    row_common,
)
from quant.artifact.artifact import Artifact, open_artifact
from quant.checkpoint import Source
from quant.kv_scales import fake_quantize_kv, fake_quantize_kv_to_int8
from quant.modelling import ATTENTION, KVTap
from quant.source import open_source

OUTLIER = 64.0
MODELS = ("plain", "outlier-channel", "outlier-head")
BASES = {
    "dense": "scheme: dense\nmethod: none",
    "w4-sym-g64": "scheme: w4a16\ngroup_size: 64\nmethod: gptq",
}
KV_KINDS = ("fp8", "fp8-head", "int8")
UNIT_SCALES = "1.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One artifact to make and judge: which model, which base weights, which kind of KV cache."""

    model: str
    base: str
    kv: str
    skip: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.model} {self.base} {self.kv}" + (f" but {self.skip}" if self.skip else "")

    @property
    def candidate(self) -> Candidate:
        recipe = f"{BASES[self.base]}\nkv_cache: {self.kv}"
        if self.skip:
            recipe += f"\nkv_skip_layers: {list(self.skip)}"
        return Candidate(scheme="fp8-kv", method=self.base, recipe=recipe)


def write_outlier_model(source: Source, kind: str, keys: Sequence[Tensor], out: Path) -> None:
    """A checkpoint of the same function as `source` whose keys have outliers, in every layer.

    The channels of a rotated pair turn into each other, so they are scaled together: keys by
    OUTLIER, the queries of their group by its inverse. Only for families that rotate whole heads
    and norm neither queries nor keys. `keys` are `largest_keys` of the model.
    """
    assert source.config["model_type"] == "llama", "outliers are planted in Llama's attention"
    tensors = {name: source.tensor(name).clone() for name in source.names}  # they may be mapped
    for layer, absmax in enumerate(keys):
        prefix = f"{source.layer_prefix(layer)}self_attn."
        first_head = absmax[: source.skeleton.head_dim]
        channels = outlier_channels(kind, first_head)
        plant(tensors[f"{prefix}q_proj.weight"], tensors[f"{prefix}k_proj.weight"],
              channels, len(first_head))  # fmt: skip
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for name, content in source.files().items():
        (out / name).write_bytes(content)
    (out / "config.json").write_text(json.dumps(source.config, indent=2), encoding="utf-8")


@torch.inference_mode()
def largest_keys(model: nn.Module, window: Sequence[int]) -> list[Tensor]:
    """Largest |k| before rope of every channel on one window: per layer [kv heads * D]."""
    found: list[Tensor] = []
    handles = [
        layer.self_attn.k_proj.register_forward_hook(
            lambda _, args, output: found.append(output.abs().amax((0, 1)).cpu())
        )
        for layer in model.model.layers  # type: ignore[union-attr]
    ]
    ids = torch.tensor([list(window)], device=next(model.parameters()).device)
    model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def outlier_channels(kind: str, absmax_D: Tensor) -> Tensor:
    """All channels of a head, or the rotated pair that is the largest already."""
    if kind == "outlier-head":
        return torch.arange(len(absmax_D))
    half = len(absmax_D) // 2
    first = int(torch.maximum(absmax_D[:half], absmax_D[half:]).argmax())
    return torch.tensor([first, first + half])


def plant(query: Tensor, key: Tensor, channels: Tensor, head_dim: int) -> None:
    """Scale `channels` of KV head 0 of `key` [kv heads * D, in], in place, and of its queries."""
    group = len(query) // len(key)
    key[channels] *= OUTLIER
    query.view(-1, head_dim, query.shape[1])[:group, channels] /= OUTLIER


def taps_of(artifact: Artifact, device: str) -> dict[str, list[KVTap | None]]:
    """By the scales' name, what every layer's keys and values go through."""
    layers = range(artifact.config["num_hidden_layers"])
    one = torch.ones(1, device=device)
    return {
        "none": [None for _ in layers],
        UNIT_SCALES: [fake_quantize_kv(one, one) for _ in layers],
        "own": [_own_tap(artifact, i, device) for i in layers],
    }


def _own_tap(artifact: Artifact, layer: int, device: str) -> KVTap | None:
    if layer in artifact.kv_kept_layers:
        return None
    if artifact.kv_cache_dtype == "int8":
        return fake_quantize_kv_to_int8()
    key, value = torch.as_tensor(artifact.kv_scales(layer), dtype=torch.float32, device=device)
    return fake_quantize_kv(key.view(-1, 1, 1), value.view(-1, 1, 1))


def install_taps(model: nn.Module, taps: Sequence[KVTap | None]) -> None:
    """Let attention of layer i read what `taps[i]` makes of keys and values (None: as they are)."""
    for layer, tap in zip(model.model.layers, taps, strict=True):  # type: ignore[union-attr,arg-type]
        layer.self_attn.kv_tap = tap


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Per window, [windows] float64: divergence from the float32 model, and from the same weights
    with keys and values as they are."""

    total: Tensor
    alone: Tensor


@torch.inference_mode()
def judge_taps(
    reference: nn.Module,
    model: nn.Module,
    taps: Mapping[str, Sequence[KVTap | None]],
    windows: Sequence[Sequence[int]],
    batch: int,
) -> dict[str, Losses]:
    """What each kind of rounding loses, by its name."""
    device = next(reference.parameters()).device
    found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in taps}
    for start in range(0, len(windows), batch):
        ids = torch.tensor([list(w) for w in windows[start : start + batch]], device=device)
        expected = reference(input_ids=ids, use_cache=False).logits
        install_taps(model, [None for _ in model.model.layers])  # type: ignore[union-attr]
        exact = model(input_ids=ids, use_cache=False).logits
        for name, layers in taps.items():
            install_taps(model, layers)
            logits = model(input_ids=ids, use_cache=False).logits
            found[name] += [
                (_mean_kl(a, c), _mean_kl(b, c))
                for a, b, c in zip(expected, exact, logits, strict=True)
            ]
    losses = {}
    for name, pairs in found.items():
        total, alone = (torch.stack(part).cpu() for part in zip(*pairs, strict=True))
        losses[name] = Losses(total=total, alone=alone)
    return losses


def worst_layers(
    model: nn.Module,
    own: Sequence[KVTap | None],
    windows: Sequence[Sequence[int]],
    batch: int,
    count: int,
) -> tuple[int, ...]:
    """The layers that lose most when they alone are rounded."""
    alone = {
        str(i): [tap if j == i else None for j, tap in enumerate(own)] for i in range(len(own))
    }
    losses = judge_taps(model, model, alone, windows, batch)
    means = {int(name): float(found.alone.mean()) for name, found in losses.items()}
    ranked = sorted(means, key=lambda i: -means[i])
    progress("  by layer: " + ", ".join(f"{i} {means[i]:.2e}" for i in ranked))
    return tuple(sorted(ranked[:count]))


def _mean_kl(expected: Tensor, found: Tensor) -> Tensor:
    """Over the predictions inside a window, from logits [T, V]."""
    ref, cand = (logits[:-1].float().log_softmax(-1) for logits in (expected, found))
    return (ref.exp() * (ref - cand)).sum(-1).double().mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A case's artifact as a model, what keys and values go through, and how its rows begin."""

    model: nn.Module
    taps: Mapping[str, Sequence[KVTap | None]]
    common: dict[str, Any]


def make(
    case: Case, source: Source, reference: nn.Module, windows: Windows, args: argparse.Namespace
) -> Made:
    """Quantize, and load what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "artifact"
        report = quantize(source, case.candidate, windows, out, args)
        artifact = open_artifact(out)
        model = make_candidate(reference, artifact)
        taps = taps_of(artifact, args.device)
    model.config._attn_implementation = ATTENTION  # type: ignore[union-attr]
    common = row_common(case.candidate, windows, report, args)
    return Made(model=model, taps=taps, common=common)


def measure(
    case: Case, made: Made, reference: nn.Module, windows: Windows, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row for each data set and each kind of scales."""
    for dataset in args.datasets:
        texts = windows.heldout[dataset]
        losses = judge_taps(reference, made.model, made.taps, texts, args.batch)
        for scales, found in losses.items():
            extra = {
                "dataset": dataset, "windows": len(texts), "model": case.model, "base": case.base,
                "scales": case.kv if scales == "own" else scales, "kv_cache": case.kv,
                "kv_skip_layers": list(case.skip) if scales == "own" else [],
                **_summary("kl_added", found.total - losses["none"].total),
                **_summary("kl_alone", found.alone),
            }  # fmt: skip
            if scales == "own":
                one = losses[UNIT_SCALES]
                extra |= _summary("kl_added_over_one", found.total - one.total)
                extra |= _summary("kl_alone_over_one", found.alone - one.alone)
            yield {
                **made.common, "kv_dtype": _dtype(case, scales),
                "metric": "kl_mean", "value": float(found.total.mean()), "unit": "nats",
                "extra": {**made.common["extra"], **extra},
            }  # fmt: skip


def _dtype(case: Case, scales: str) -> str:
    if scales == "none":
        return "float32"
    return "int8" if scales == "own" and case.kv == "int8" else "fp8"


def _summary(name: str, values: Tensor) -> dict[str, float | None]:
    return {name: float(values.mean()), f"{name}_se": _standard_error(values)}


def _standard_error(values: Tensor) -> float | None:
    return float(values.std() / len(values) ** 0.5) if len(values) > 1 else None


def cases(args: argparse.Namespace) -> list[Case]:
    """All combinations that were asked for, the model itself first."""
    return [
        Case(model=model, base=base, kv=kv)
        for model in args.models
        for base in args.bases
        for kv in args.kv
    ]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="model directory or GGUF file (Llama)")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds split.json")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--batch", type=int, default=0, help="windows at once (0: by device)")
    parser.add_argument("--limit-windows", type=int, help="use only the first N windows of each")
    for name, known in (("models", MODELS), ("bases", tuple(BASES)), ("kv", KV_KINDS),
                        ("datasets", ("wikitext", "contracts"))):  # fmt: skip
        default = {"datasets": "wikitext", "kv": "fp8,fp8-head"}.get(name, ",".join(known))
        parser.add_argument(
            f"--{name}", type=_list_of(known), default=default,
            help=f"of {','.join(known)} (default: {default})",
        )  # fmt: skip
    parser.add_argument("--keep-worst", type=int, default=0, help="layers to keep, see above")
    parser.add_argument("--shape", default="smollm2-135m", help="the model's name in the rows")
    parser.add_argument("--commit", help="commit to record (default: asked of git)")
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines file to append to")
    args = parser.parse_args(argv)
    args.changes = {}
    args.batch = args.batch or (8 if args.device.startswith("cuda") else 1)
    return args


def _list_of(known: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown {', '.join(unknown)}; known: {', '.join(known)}"
            )
        return names

    return parse


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark; rows are written as soon as they are known."""
    args = parse_arguments(argv)
    original = open_source(args.model)
    windows = load_windows(args.data, original.tokenizer(), args.limit_windows)
    reference = load_reference(original, args.device)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    sources: dict[str, Source] = {"plain": original}
    keys = largest_keys(reference, windows.calibration[0])
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(args):
            if case.model not in sources:
                write_outlier_model(original, case.model, keys, Path(folder) / case.model)
                sources[case.model] = open_source(str(Path(folder) / case.model))
            work = (sources[case.model], reference, windows, args)
            made = run_case(case, *work)
            if args.keep_worst and case.model == "plain" and case.kv == args.kv[-1]:
                skip = worst_layers(
                    made.model, made.taps["own"], windows.calibration[:8], args.batch,
                    args.keep_worst,
                )  # fmt: skip
                run_case(replace(case, skip=skip), *work)


def run_case(
    case: Case, source: Source, reference: nn.Module, windows: Windows, args: argparse.Namespace
) -> Made:
    """Make a case's artifact, judge it, and write its rows."""
    progress(case.name)
    made = make(case, source, reference, windows, args)
    for row in measure(case, made, reference, windows, args):
        extra = row["extra"]
        progress(
            f"  {extra['dataset']} scales {extra['scales']}: KL {row['value']:.5f}, added "
            f"{extra['kl_added']:.5f}, alone {extra['kl_alone']:.5f}"
        )
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "repeats": [row["value"]]}) + "\n")
    return made


if __name__ == "__main__":
    main()
