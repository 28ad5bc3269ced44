"""Plans for the terminal: modules that share everything but their layer on one line, then totals.

Only words and columns; what they say is decided in `quant.plan` and `quant.estimate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quant.estimate import Estimate, row_bytes
from quant.plan import Plan, PlanRow, general_name, layer_ranges


def render_plan(plan: Plan, cost: Estimate, *, tokens: int, every_module: bool = False) -> Group:
    """The plan as a table (one line per kind of module, or per module) with its cost below."""
    return Group(_table(plan, every_module), Text(), _totals(plan, cost, tokens), *_notes(plan))


def size(num_bytes: float) -> str:
    """`1.23 GB`: three figures, decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def duration(seconds: float) -> str:
    """`under 1 s`, `43 s`, `6 min`, `2 h 05 min`."""
    if seconds < 1:
        return "under 1 s"
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def _table(plan: Plan, every_module: bool) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("module", overflow="fold", min_width=16)
    table.add_column("layers", justify="right")
    table.add_column("out x in", justify="right", no_wrap=True)
    table.add_column("scheme", no_wrap=True)
    table.add_column("method", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for rows in [[row] for row in plan.rows] if every_module else _kinds(plan.rows):
        table.add_row(*_cells(rows, plan, every_module))
    return table


def _kinds(rows: Sequence[PlanRow]) -> list[list[PlanRow]]:
    """Rows that differ in nothing but their layer, together."""
    kinds: dict[tuple[object, ...], list[PlanRow]] = {}
    for row in rows:
        key = (general_name(row.module), row.shape, row.scheme, row.method, row.note)
        kinds.setdefault(key, []).append(row)
    order = {name: i for i, name in enumerate(dict.fromkeys(general_name(r.module) for r in rows))}
    return sorted(kinds.values(), key=lambda kind: order[general_name(kind[0].module)])


def _cells(rows: Sequence[PlanRow], plan: Plan, every_module: bool) -> Iterator[str | Text]:
    row = rows[0]
    layers = [r.layer for r in rows if r.layer is not None]
    style = "dim" if row.scheme.is_dense else ""
    yield Text(row.module if every_module else _short(row.module), style=style)
    yield Text(layer_ranges(layers), style=style)
    yield Text(f"{row.shape[0]} x {row.shape[1]}", style=style)
    yield Text(row.scheme.label, style=style)
    yield Text("-" if row.method == "none" else row.method, style=style)
    shared = plan.is_tied and row.module == "lm_head"
    total = 0 if shared else sum(row_bytes(r, plan.dtype) for r in rows)
    yield Text(size(total) if total else "-", style=style)
    yield Text(row.note, style="yellow" if "divide" in row.note else style)


def _short(module: str) -> str:
    """The name inside its layer: `self_attn.q_proj`; the whole name outside the layers."""
    general = general_name(module)
    return general.rpartition("layers.*.")[2]


def _totals(plan: Plan, cost: Estimate, tokens: int) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    grid.add_row("weights", _weights_line(plan, cost))
    grid.add_row("size", _size_line(plan, cost))
    if tokens:
        grid.add_row("calibration", f"at most {tokens:,} tokens")
    memory = f"about {size(cost.peak_memory_bytes)} at the peak, one layer at a time"
    grid.add_row("memory", memory)
    grid.add_row("disk", f"{size(cost.artifact_bytes)} for the artifact, written as layers finish")
    if cost.seconds is not None:
        about = "" if cost.seconds < 1 else "about "
        grid.add_row("time", f"{about}{duration(cost.seconds)} on this machine")
    return grid


def _weights_line(plan: Plan, cost: Estimate) -> str:
    share = cost.num_quantized / cost.num_weights
    bits = f"{cost.quantized_bits:.2f} bits each" if cost.num_quantized else "nothing quantized"
    return (
        f"{_count(cost.num_weights)} in {plan.num_layers} layers; "
        f"{share:.0%} quantized, {bits}; {cost.total_bits:.2f} bits over the whole model"
    )


def _count(weights: int) -> str:
    """`135 M`, `7.24 B`, `81.2 k`."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if weights >= factor:
            return f"{weights / factor:.3g} {unit}"
    return str(weights)


def _size_line(plan: Plan, cost: Estimate) -> str:
    ratio = cost.source_bytes / cost.artifact_bytes
    change = f" ({ratio:.2f}x smaller)" if ratio > 1 else ""
    before, after = size(cost.source_bytes), size(cost.artifact_bytes)
    return f"{before} in {plan.source_dtype} -> {after}{change}; dense parts in {plan.dtype}"


def _notes(plan: Plan) -> Iterator[RenderableType]:
    for number, pattern in enumerate(plan.overrides, start=1):
        yield Text(f"override {number} takes {pattern}", style="dim")
    for warning in plan.warnings:
        yield Text(f"warning: {warning}", style="yellow")
