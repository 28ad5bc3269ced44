"""What report.html shows besides pictures: figures, remarks and tables that follow from the record.

Takes the data of report.json, returns plain values for the template. Knows no HTML, draws nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quant.module_names import join_layers
from quant.plan_table import duration, size
from quant.report import chosen_candidate, next_steps
from quant.report_plots import Data, smoothing_ratio, split_name, sqnr

_WORST = 12
_NO_SMOOTHING = "none:"


def facts_of(data: Data) -> dict[str, Any]:
    """Every value that the page names and report.json does not hold itself."""
    modules, name = data["modules"], Path(data["artifact"]).name
    quantized = [module for module in modules if module["scheme"] != "dense"]
    is_converted = bool(quantized) and all(module["method"] == "none" for module in quantized)
    by_error = sorted(
        (module for module in quantized if module["rel_error"] is not None),
        key=lambda module: -module["rel_error"],
    )
    by_input = sorted(
        (module for module in quantized if module["input_outliers"]),
        key=lambda module: -module["input_outliers"][0][1],
    )
    return {
        "artifact_name": name,
        "before": data["unpacked_bytes"] or data["source_bytes"],
        "next_steps": next_steps(
            name,
            runtime_serves=data["runtime_serves"],
            is_dense=not quantized,
            is_converted=is_converted,
            adapter=data["adapter"],
        ),
        "cards": list(_cards(data, quantized)),
        "quantized": quantized,
        "bits": _bits(quantized),
        "worst": by_error[:_WORST],
        "worst_inputs": by_input[:_WORST],
        "remarks": _remarks(modules),
        "kinds": _groups(quantized, _kind_scheme_method),
        "outliers": _groups(quantized, lambda module: (split_name(module["module"])[1],)),
        "rows": _groups(modules, lambda module: (join_experts(module["module"]),)),
        "smoothed": _smoothed(quantized),
        "choices": _choices([module for module in quantized if module["candidates"]]),
        "schemes_compared": _schemes(data["sensitivity"]),
        "total_seconds": sum(data["seconds"].values()),
    }


def join_experts(module: str) -> str:
    """The module's name, without the number of its expert."""
    layer, leaf = split_name(module)
    return module if layer is None else f"model.layers.{layer}.{leaf}"


def _bits(quantized: Sequence[Data]) -> float:
    weights = sum(module["shape"][0] * module["shape"][1] for module in quantized)
    return 8 * sum(module["bytes"] for module in quantized) / weights if weights else 0.0


def _cards(data: Data, quantized: Sequence[Data]) -> Iterator[tuple[str, str, str]]:
    """(name, figure, what it means) of the page's head."""
    before, after = data["unpacked_bytes"] or data["source_bytes"], data["artifact_bytes"]
    times = f", {before / after:.2f}x smaller" if 0 < after < before else ""
    yield "Size", size(after), f"from {size(before)}{times}"
    if quantized:
        count = f"in {len(quantized):,} of {len(data['modules']):,} linear modules"
        yield "Bits per weight", f"{_bits(quantized):.2f}", count
    errors = [module["rel_error"] for module in quantized if module["rel_error"] is not None]
    if errors:
        mean = sum(map(sqnr, errors)) / len(errors)
        yield "Signal to error", f"{mean:.1f} dB", f"mean; the worst module {sqnr(max(errors)):.1f}"
    plan = next((plan for plan in data["plans"] if plan["chosen"]), None)
    if plan is not None and plan["kl"] is not None:
        yield "Loss", f"{plan['kl']:.3g}", "nats of KL per token, measured on held-out windows"
    elif data["sensitivity"]:
        chosen = sum(row["loss"] for row in data["sensitivity"] if row["chosen"])
        yield "Predicted loss", f"{chosen:.3g}", "nats per token, in the schemes chosen"
    if coverage := data["coverage"]:
        yield "Calibration", f"{coverage['tokens']:,}", f"tokens in {coverage['samples']:,} samples"
    yield "Time", duration(sum(data["seconds"].values())), f"on {data['device']}"
    yield "Memory", size(data["peak_memory_bytes"]), "at the peak, of the process"


def _choices(judged: Sequence[Data]) -> list[Data]:
    """What `method: auto` found, by kind of module and candidate: mean error, times chosen."""
    kinds: dict[str, list[Data]] = {}
    for module in judged:
        kinds.setdefault(split_name(module["module"])[1], []).append(module)
    return [
        {"name": name, "candidate": candidate, "count": len(modules),
         "mean": sum(dict(m["candidates"])[candidate] for m in modules) / len(modules),
         "chosen": sum(chosen_candidate(m["candidates"]) == candidate for m in modules)}
        for name, modules in kinds.items()
        for candidate in dict(modules[0]["candidates"])
    ]  # fmt: skip


def _remarks(modules: Sequence[Data]) -> list[tuple[str, str]]:
    """(what happened in plain words, to which modules), modules joined over layers and numbers over
    modules."""
    found: dict[str, list[tuple[str, float | None]]] = {}
    lowest = min((m["damping"] for m in modules if m["damping"]), default=0.0)
    for module in modules:
        for text, number in _module_remarks(module, lowest):
            found.setdefault(text, []).append((module["module"], number))
    return [
        (text.replace("%", _range(number for _, number in rows)),
         ", ".join(join_layers(name for name, _ in rows)))
        for text, rows in found.items()
    ]  # fmt: skip


def _range(numbers: Iterable[float | None]) -> str:
    known = [number for number in numbers if number is not None]
    if not known:
        return "%"
    low, high = min(known), max(known)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _module_remarks(module: Data, usual_damping: float) -> Iterator[tuple[str, float | None]]:
    """(text with % for the number, number)."""
    if module["fallback"]:
        yield f"fell back to {module['method']}: {module['fallback']}", None
    if module["damping"] and module["damping"] > usual_damping:
        yield (
            "damping raised to % because the Hessian was not positive definite", module["damping"]
        )  # fmt: skip
    if module["dead_columns"]:
        yield (
            "% inputs were always 0 in calibration and were rounded to nearest",
            module["dead_columns"],
        )
    if module["smoothing"].startswith(_NO_SMOOTHING):
        reason = module["smoothing"].removeprefix(_NO_SMOOTHING).strip()
        words, by, number = reason.rpartition(" by ")
        try:
            yield f"not smoothed: {words} by %", float(number)
        except ValueError:
            yield f"not smoothed: {words}{by}{number}", None
    if module["is_starved"]:
        yield (
            "only % calibration tokens were routed to it; the statistics of its layer were mixed "
            "in", module["tokens_seen"],
        )  # fmt: skip


def _kind_scheme_method(module: Data) -> tuple[str, ...]:
    return split_name(module["module"])[1], module["scheme"], module["method"]


def _groups(
    modules: Sequence[Data], key_of: Callable[[Data], tuple[str, ...]]
) -> list[dict[str, Any]]:
    """The modules by key, whose first part is their name, with the worst of what was measured."""
    groups: dict[tuple[str, ...], list[Data]] = {}
    for module in modules:
        groups.setdefault(key_of(module), []).append(module)
    order = {key[0]: place for place, key in reversed(list(enumerate(groups)))}
    in_order = sorted(groups.items(), key=lambda item: order[item[0][0]])
    return [_group(key[0], found) for key, found in in_order]


def _group(name: str, group: Sequence[Data]) -> dict[str, Any]:
    errors = [module["rel_error"] for module in group if module["rel_error"] is not None]
    peaks = [module["weight_outliers"] for module in group if module["weight_outliers"]]
    inputs = [module["input_outliers"][0][1] for module in group if module["input_outliers"]]
    return {
        "name": name,
        "scheme": " + ".join(dict.fromkeys(module["scheme"] for module in group)),
        "method": " + ".join(dict.fromkeys(module["method"] for module in group)),
        "shape": group[0]["shape"],
        "count": len(group),
        "bytes": sum(module["bytes"] for module in group),
        "mean": sum(errors) / len(errors) if errors else None,
        "max": max(errors, default=None),
        "peaks": [max(peak[i] for peak in peaks) for i in range(3)] if peaks else [None] * 3,
        "input": max(inputs, default=None),
    }


def _smoothed(quantized: Sequence[Data]) -> list[tuple[str, int, float, float]]:
    """(kind, modules, mean and worst output error left of what there was) where scales moved."""
    kinds: dict[str, list[float]] = {}
    for module in quantized:
        ratio = smoothing_ratio(module)
        if ratio is not None:
            kinds.setdefault(split_name(module["module"])[1], []).append(ratio)
    return [(kind, len(r), sum(r) / len(r), max(r)) for kind, r in kinds.items()]


def _schemes(rows: Sequence[Data]) -> list[tuple[str, float, int, float]]:
    """(scheme, loss were every group in it, groups that got it, their loss), worst scheme first."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["scheme"], []).append(row)
    table = []
    for scheme, mine in found.items():
        chosen = [row["loss"] for row in mine if row["chosen"]]
        table.append((scheme, sum(row["loss"] for row in mine), len(chosen), sum(chosen)))
    return sorted(table, key=lambda row: -row[1])
