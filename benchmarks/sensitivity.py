"""How much each part of a model would lose at few bits, and the picture of it in docs/.

    python -m benchmarks.sensitivity measure --model M.gguf --data ../shared/data --device cuda \
        --out benchmarks/results/sensitivity.json
    python -m benchmarks.sensitivity draw benchmarks/results/sensitivity.json docs/sensitivity.svg

measure: what `quantize --budget` measures before it solves, on the calibration windows that
split.json names: KL in nats per token of each group of modules, by plain rounding, in each scheme.
draw: one scheme by layer and group, from the JSON alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.quality import apply_recipe, git_commit, hardware, load_windows, progress

RECIPE = "scheme: w4a16\nmethod: rtn\ndtype: float16\nbudget: 5bpw\n"
SHOWN = "w4a16-g64"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Scores of every group in every scheme, and what they are of."""
    from quant.mixed_build import survey_source
    from quant.mixed_scores import ScoreSettings, measure_scores
    from quant.recipe import Recipe
    from quant.run_start import DTYPES
    from quant.source import open_source

    source, recipe = open_source(args.model), Recipe.parse(RECIPE)
    found = load_windows(args.data, source.tokenizer(), None).calibration
    every = max(1, len(found) // args.windows)
    windows = [window[: args.tokens] for window in found[::every][: args.windows]]
    space = survey_source(source, recipe, partial(apply_recipe, source))
    settings = ScoreSettings(
        dtype=DTYPES["float16"], device=args.device, draws=args.draws, seed=0,
        batch_tokens=args.batch_tokens,
    )  # fmt: skip
    began = time.perf_counter()
    scores = measure_scores(source, space, windows, settings, args.cache, progress)
    return {
        "model": args.shape,
        "windows": len(windows),
        "window_tokens": args.tokens,
        "draws": args.draws,
        "seconds": time.perf_counter() - began,
        "hardware": hardware(args.device),
        "commit": args.commit or git_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": [
            {
                "layer": group.layer,
                "group": group.name.rpartition(".")[2],
                "scheme": group.shown(option),
                "bits": 8 * group.num_bytes[option] / group.num_weights,
                "kl": kl,
            }
            for group in space.groups
            for option, kl in enumerate(scores[group.name])
        ],
    }


def draw(data: Mapping[str, Any], out: Path, scheme: str = SHOWN) -> None:
    """A map of KL in one scheme, by group (rows) and layer (columns), as an SVG of its own."""
    import matplotlib
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    rows = [row for row in data["rows"] if row["scheme"] == scheme]
    if not rows:
        known = ", ".join(dict.fromkeys(row["scheme"] for row in data["rows"]))
        raise SystemExit(f"error: no row of scheme {scheme!r}; the file has {known}")
    groups = list(dict.fromkeys(row["group"] for row in rows))
    cells = _cells(rows, groups)
    settings: Any = {"svg.hashsalt": "weighbridge", "font.size": 9, "svg.fonttype": "path"}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(8.4, 1.1 + 0.42 * len(groups)), layout="constrained")
        axes = figure.add_subplot()
        values = [value for line in cells for value in line if value > 0]
        norm = LogNorm(min(values), max(values))
        mesh = axes.pcolormesh(cells, cmap="viridis", norm=norm, edgecolors="white", linewidth=0.6)
        axes.set_yticks([i + 0.5 for i in range(len(groups))], [_named(g) for g in groups])
        step = max(1, len(cells[0]) // 15)
        axes.set_xticks(
            [i + 0.5 for i in range(0, len(cells[0]), step)],
            [str(i) for i in range(0, len(cells[0]), step)],
        )
        axes.tick_params(length=0)
        axes.invert_yaxis()
        axes.set_xlabel("layer")
        total = sum(row["kl"] for row in rows)
        axes.set_title(
            f"{data['model']}: all groups in {scheme} add up to {total:.3f} nats per token"
        )
        figure.colorbar(mesh, ax=axes, label="KL, nats per token", pad=0.02)
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(
            out, format="svg", facecolor="white", metadata={"Date": None, "Creator": None}
        )


def _cells(rows: Sequence[Mapping[str, Any]], groups: Sequence[str]) -> list[list[float]]:
    """KL by group and layer, 0 where a layer has no such group."""
    layers = 1 + max(row["layer"] for row in rows)
    cells = [[0.0] * layers for _ in groups]
    for row in rows:
        cells[groups.index(row["group"])][row["layer"]] = row["kl"]
    return cells


def _named(group: str) -> str:
    """`q|k|v`, `gate|up`, `o`, `down`."""
    return "|".join(leaf.removesuffix("_proj") for leaf in group.split("|"))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    first = verbs.add_parser("measure", help="measure and write the JSON")
    first.add_argument("--model", required=True, help="model directory or GGUF file")
    first.add_argument("--data", type=Path, required=True, help="folder that holds split.json")
    first.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    first.add_argument("--windows", type=int, default=64)
    first.add_argument("--tokens", type=int, default=256, help="of each window")
    first.add_argument("--draws", type=int, default=4)
    first.add_argument("--batch-tokens", type=int, default=4096)
    first.add_argument("--shape", default="smollm2-135m", help="the model's name in the picture")
    first.add_argument("--commit", help="commit to record (default: asked of git)")
    first.add_argument("--cache", type=Path, default=Path("sensitivity-scores.json"),
                       help="where finished parts are kept")  # fmt: skip
    first.add_argument("--out", type=Path, required=True, help="JSON file to write")
    second = verbs.add_parser("draw", help="make the picture of the JSON")
    second.add_argument("json", type=Path)
    second.add_argument("svg", type=Path)
    second.add_argument("--scheme", default=SHOWN)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of the two."""
    args = parse_arguments(argv)
    if args.verb == "draw":
        draw(json.loads(args.json.read_text(encoding="utf-8")), args.svg, args.scheme)
        return
    data = measure(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
