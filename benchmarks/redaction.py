"""What redacting personal data in the calibration set costs in quality: KL of W4A16 made by GPTQ.

    python -m benchmarks.redaction --model M.gguf --data ../shared/data --out rows.jsonl

Three artifacts are made alike and judged on the held-out contracts of split.json: calibrated on
rows that hold personal data as they are, on the same rows with placeholders, and, as a scale for
the difference, on as many other rows of the same file. Each window begins shortly before its row's
first finding, so this is the worst case: in most logs few windows hold any.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality import (
    CANDIDATES,
    UNITS,
    Windows,
    judge,
    load_reference,
    load_windows,
    make_candidate,
    progress,
    quantize,
    row_common,
)
from quant.artifact.artifact import open_artifact
from quant.artifact.redact import findings, redact
from quant.source import open_source

BEFORE = 600  # characters of a window before the first finding
SCHEME = "gptq-w4-sym-g64"


def texts_with_findings(path: Path) -> Iterator[str]:
    """The texts of a calibration file from shortly before their first finding on."""
    for line in path.read_text(encoding="utf-8").splitlines():
        text = str(json.loads(line).get("text", ""))
        if found := findings(text):
            yield text[max(0, found[0][0] - BEFORE) :]


def variants(
    texts: Sequence[str], tokenizer: Any, count: int, width: int
) -> dict[str, list[list[int]]]:
    """Calibration windows by variant: the same rows as they are and redacted, and other rows."""
    if len(texts) < 2 * count:
        raise SystemExit(f"error: {2 * count} rows with personal data are needed, not {len(texts)}")

    def cut(chosen: Sequence[str]) -> list[list[int]]:
        return [tokenizer(text, verbose=False)["input_ids"][:width] for text in chosen]

    first, other = texts[:count], texts[count : 2 * count]
    clean = [str(redact({"text": text})[0]["text"]) for text in first]
    return {"as they are": cut(first), "redacted": cut(clean), "other rows": cut(other)}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="model directory or GGUF file")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds split.json")
    parser.add_argument("--calib", type=Path, default=Path("calib_data/contracts.jsonl"))
    parser.add_argument("--windows", type=int, default=24, help="calibration windows")
    parser.add_argument("--tokens", type=int, default=384, help="tokens of each")
    parser.add_argument("--limit-windows", type=int, default=8, help="held-out windows to judge on")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default="smollm2-135m", help="the model's name in the rows")
    parser.add_argument("--commit", help="commit to record (default: asked of git)")
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines file to append to")
    args = parser.parse_args(argv)
    args.batch, args.changes = 1, {}
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark; a row is appended after every figure."""
    args = parse_arguments(argv)
    source = open_source(args.model)
    tokenizer = source.tokenizer()
    heldout = load_windows(args.data, tokenizer, args.limit_windows).heldout
    reference = load_reference(source, args.device)
    texts = list(texts_with_findings(args.calib))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for name, calibration in variants(texts, tokenizer, args.windows, args.tokens).items():
        windows = Windows(calibration=calibration, heldout=heldout)
        with tempfile.TemporaryDirectory() as folder:
            report = quantize(source, CANDIDATES[SCHEME], windows, Path(folder) / "art", args)
            model = make_candidate(reference, open_artifact(Path(folder) / "art"))
        common = row_common(CANDIDATES[SCHEME], windows, report, args)
        for dataset, ids in heldout.items():
            for metric, value in judge(reference, model, ids, args.batch).items():
                extra = {"calibration": name, "dataset": dataset, "windows": len(ids)}
                row = {
                    **common, "metric": metric, "value": value, "unit": UNITS[metric],
                    "extra": {**common["extra"], **extra},
                }  # fmt: skip
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row, sort_keys=True) + "\n")
                progress(f"{name}: {dataset} {metric} {value:.4f}")


if __name__ == "__main__":
    main()
