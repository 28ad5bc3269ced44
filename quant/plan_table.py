"""Plans for the terminal: modules that share everything but their layer on one line, then totals.

Only words and columns; what they say is decided in `quant.plan` and `quant.estimate`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quant.estimate import Estimate
from quant.module_names import general_name, layer_ranges
from quant.plan import Plan
from quant.plan_rows import PlanRow
from quant.stored_size import row_bytes

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def render_plan(
    plan: Plan,
    cost: Estimate,
    *,
    tokens: int,
    every_module: bool = False,
    gguf_bytes: int | None = None,
) -> Group:
    """The plan as a table (one line per kind of module, or per module) with its cost below.

    gguf_bytes: size of the source's file when it is a GGUF. Fits 80 columns: what a row has to
    say is a number in the table and a line below it, once for all rows that share it.
    """
    rows = [[row] for row in plan.rows] if every_module else _kinds(plan.rows)
    remarks = _remarks(plan, rows)
    parts = [_table(plan, rows, list(remarks), every_module), Text()]
    if remarks:
        what = "modules" if every_module else "kinds of module"
        parts += [_remark_lines(remarks, what), Text()]
    return Group(*parts, _totals(plan, cost, tokens, gguf_bytes), *_warnings(plan))


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
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def _table(
    plan: Plan, rows: Sequence[Sequence[PlanRow]], remarks: Sequence[str], every_module: bool
) -> RenderableType:
    gap = 0 if every_module else 1  # beside the box's own space; whole names need the room
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True,
        padding=(0, gap),
    )  # fmt: skip
    if every_module:
        table.add_column("module", overflow="fold", min_width=16)
    else:  # only layers give way: rich crops what a least width leaves too wide, the notes first
        table.add_column("module", no_wrap=True)
        table.add_column("layers", justify="right", overflow="fold")
    table.add_column("out x in", justify="right", no_wrap=True)
    table.add_column("scheme", no_wrap=True)
    table.add_column("method", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    if remarks:
        table.add_column("note", no_wrap=True)
    for kind in rows:
        table.add_row(*_cells(kind, plan, remarks, every_module))
    return table


def _kinds(rows: Sequence[PlanRow]) -> list[list[PlanRow]]:
    """Rows that differ in nothing but their layer, together."""
    kinds: dict[tuple[object, ...], list[PlanRow]] = {}
    for row in rows:
        key = (general_name(row.module), row.shape, row.scheme, row.method, row.note)
        kinds.setdefault(key, []).append(row)
    order = {name: i for i, name in enumerate(dict.fromkeys(general_name(r.module) for r in rows))}
    return sorted(kinds.values(), key=lambda kind: order[general_name(kind[0].module)])


def _cells(
    rows: Sequence[PlanRow], plan: Plan, remarks: Sequence[str], every_module: bool
) -> Iterator[str | Text]:
    row = rows[0]
    layers = [r.layer for r in rows if r.layer is not None]
    style = "dim" if row.scheme.is_dense else ""
    yield Text(row.module if every_module else _short(rows), style=style)
    if not every_module:
        yield Text(layer_ranges(layers), style=style)
    yield Text(f"{row.shape[0]} x {row.shape[1]}", style=style)
    yield Text(row.scheme.label, style=style)
    yield Text("-" if row.method == "none" else row.method, style=style)
    shared = plan.is_tied and row.module == "lm_head"
    total = 0 if shared else sum(row_bytes(r, plan.dtype) for r in rows)
    yield Text(size(total) if total else "-", style=style)
    if remarks:
        numbers = (str(remarks.index(text) + 1) for text in _remarks_of(row, plan))
        yield Text(", ".join(numbers), style=style)


def _remarks(plan: Plan, kinds: Sequence[Sequence[PlanRow]]) -> dict[str, int]:
    """What there is to say of the rows, in order, and of how many rows it is said."""
    found: dict[str, int] = {}
    for rows in kinds:
        for text in _remarks_of(rows[0], plan):
            found[text] = found.get(text, 0) + 1
    return found


def _remarks_of(row: PlanRow, plan: Plan) -> Iterator[str]:
    """The parts of a row's note: why it is treated otherwise, and why its group size differs."""
    if row.note.startswith("skip: "):  # a pattern follows, which may hold anything
        yield row.note
        return
    for part in filter(None, row.note.split("; ")):
        if "divide" in part and row.scheme.weights is not None:
            yield f"{part}: {row.scheme.weights.group_size or 'one scale per channel'} used"
        elif part.startswith("override "):
            yield f"{part} takes {plan.overrides[int(part.split()[1]) - 1]}"
        else:
            yield part


def _remark_lines(remarks: Mapping[str, int], what: str) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    for number, (text, rows) in enumerate(remarks.items(), start=1):
        many = f" ({rows} {what})" if rows > 1 else ""
        style = "yellow" if "divide" in text else ""
        grid.add_row(Text(str(number), style=style), Text(text + many, style=style))
    return grid


def _short(rows: Sequence[PlanRow]) -> str:
    """The name inside its layer: `self_attn.q_proj`; the whole name outside the layers."""
    general = general_name(rows[0].module).rpartition("layers.*.")[2]
    experts = layer_ranges(int(n) for row in rows for n in _EXPERT.findall(row.module))
    return general.replace(".experts.*.", f".experts.{experts}.")


def _totals(plan: Plan, cost: Estimate, tokens: int, gguf_bytes: int | None) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("weights", _weights_line(plan, cost))
    grid.add_row("size", _size_line(plan, cost, gguf_bytes))
    if tokens:
        grid.add_row("calibration", f"at most {tokens:,} tokens")
    grid.add_row("memory", f"about {size(cost.host_bytes)} at the peak, one layer at a time")
    if cost.gpu_bytes:
        grid.add_row("GPU memory", f"about {size(cost.gpu_bytes)} at the peak")
    grid.add_row("disk", _disk_line(cost))
    if cost.seconds is not None:
        about = "" if cost.seconds < 1 else "about "
        where = "GPU" if cost.gpu_bytes else "CPU"
        grid.add_row("time", f"{about}{duration(cost.seconds)} on this machine's {where}")
    return grid


def _disk_line(cost: Estimate) -> str:
    spilled = f" and {size(cost.spilled_bytes)} for hidden states until the end"
    said = f"{size(cost.artifact_bytes)} for the artifact, written as layers finish"
    return said + (spilled if cost.spilled_bytes else "")


def _weights_line(plan: Plan, cost: Estimate) -> str:
    share = cost.num_quantized / cost.num_weights
    bits = f"{share:.0%} quantized, {cost.quantized_bits:.2f} bits each"
    return (
        f"{_count(cost.num_weights)} in {plan.num_layers} layers; "
        f"{bits if cost.num_quantized else 'nothing quantized'}; "
        f"{cost.total_bits:.2f} bits over the whole model"
    )


def _count(weights: int) -> str:
    """`135 M`, `7.24 B`, `81.2 k`."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if weights >= factor:
            return f"{weights / factor:.3g} {unit}"
    return str(weights)


def _size_line(plan: Plan, cost: Estimate, gguf_bytes: int | None) -> str:
    ratio = cost.source_bytes / cost.artifact_bytes
    change = f" ({ratio:.2f}x smaller)" if ratio > 1 else ""
    before, after = size(cost.source_bytes), size(cost.artifact_bytes)
    packed = "" if gguf_bytes is None else f"; the GGUF has {size(gguf_bytes)}"
    dense = f"; dense parts in {plan.dtype}"
    return f"{before} in {plan.source_dtype} -> {after}{change}{packed}{dense}"


def _warnings(plan: Plan) -> Iterator[RenderableType]:
    for warning in plan.warnings:
        yield Text(f"warning: {warning}", style="yellow")
