"""`quantize inspect` for the terminal: the artifact's summary as a few lines and a table."""

from __future__ import annotations

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from quant.artifact.stamp import judged_by
from quant.artifact.summary import InspectSummary
from quant.plan_table import size


def render_inspection(summary: InspectSummary) -> Group:
    """Everything `inspect` knows; fits 100 columns."""
    return Group(_facts(summary), Text(), _schemes(summary))


def _facts(summary: InspectSummary) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in _lines(summary):
        grid.add_row(name, Text(text))
    return grid


def _lines(summary: InspectSummary) -> list[tuple[str, str]]:
    calibration = f"; calibration {summary.calibration}"
    return [
        ("artifact", f"{summary.name}, format {summary.format_version}"),
        (
            "model",
            f"{summary.architecture} from {summary.source}, stored as {summary.source_dtype}",
        ),
        ("recipe", f"{summary.recipe_name}, {_methods(summary)}{calibration}"),
        ("size", f"{size(summary.total_bytes)}, {summary.bits_per_weight:.2f} bits per weight"),
        ("KV cache", summary.kv_cache),
        ("probe", summary.probe),
        ("verdict", _verdict(summary)),
        ("digest", summary.digest),
        ("made with", ", ".join(f"{name} {value}" for name, value in summary.tools)),
    ]


def _methods(summary: InspectSummary) -> str:
    """`gptq` where one method made all codes, `gptq 180 + rtn 30 modules` where several did."""
    made = [(name, count) for name, count in summary.modules_by_method if name != "none"]
    if len(made) < 2:
        return made[0][0] if made else "none"
    return " + ".join(f"{name} {count}" for name, count in made) + " modules"


def _verdict(summary: InspectSummary) -> str:
    if summary.stamp is None:
        return "none yet: run `evaluate` on it"
    stamp = summary.stamp
    by = f"{stamp.verdict} on {stamp.judged_at:.10} by {judged_by(stamp)} against {stamp.base}"
    return f"{by}; {stamp.summary}" if stamp.summary else by


def _schemes(summary: InspectSummary) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("scheme")
    for name in ("modules", "weights", "size", "bits per weight"):
        table.add_column(name, justify="right")
    for scheme in summary.schemes:
        table.add_row(
            scheme.label,
            str(scheme.num_modules),
            f"{scheme.num_weights:,}",
            size(scheme.num_bytes),
            f"{scheme.bits_per_weight:.2f}",
        )
    table.add_row("embeddings, norms, biases", "", "", size(summary.other_bytes), "", style="dim")
    return table
