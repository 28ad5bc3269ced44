"""report.html: one self-contained page made from report.json, for the people who decide.

Everything is in the file: style and pictures, no script, nothing fetched. Made anew from
report.json by `quantize report`. Knows no tensors and measures nothing.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from quant.errors import PipelineError
from quant.plan import join_layers
from quant.plan_table import duration, size
from quant.report import REPORT_VERSION, RunReport, next_steps, write_reports
from quant.report_plots import pictures, split_name, sqnr, unique_ids

HTML_NAME, JSON_NAME = "report.html", "report.json"
_NEEDED = ("jinja2", "matplotlib")
_WORST = 12
# Keys that reports of version 1.0 lack.
_SINCE_1_1: dict[str, Any] = {
    "recipe_text": "", "overrides": {}, "source_digest": "", "calibration_digest": "",
    "sensitivity": [], "runtime_serves": True,
}  # fmt: skip
_MODULE_SINCE_1_1: dict[str, Any] = {
    "weight_outliers": None, "input_outliers": [],
}  # fmt: skip


def missing_libraries() -> tuple[str, ...]:
    """What must be installed before the page can be made."""
    return tuple(name for name in _NEEDED if importlib.util.find_spec(name) is None)


def how_to_install(names: tuple[str, ...]) -> str:
    return f"no {HTML_NAME}: it needs {' and '.join(names)} (pip install 'weighbridge[quant]')"


def html_files(report: RunReport) -> dict[str, str]:
    """The page under its name; nothing on an install that lacks what it is made with."""
    if missing_libraries():
        return {}
    return {HTML_NAME: report_html(json.loads(json.dumps(report.to_json())))}


def rerender(artifact: Path) -> Path:
    """Make report.html of an artifact anew from its report.json; PipelineError if that fails."""
    if missing := missing_libraries():
        raise PipelineError(how_to_install(missing))
    write_reports({HTML_NAME: report_html(read_report(artifact / JSON_NAME))}, artifact)
    return artifact / HTML_NAME


def read_report(path: Path) -> dict[str, Any]:
    """The data of a report.json of this major version, with defaults for what older ones lack."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PipelineError(f"{path}: cannot read the report: {error.strerror}") from error
    except ValueError as error:
        raise PipelineError(f"{path}: no JSON text ({error})") from error
    found = data.get("report_version") if isinstance(data, dict) else None
    if (
        not isinstance(data, dict)
        or not isinstance(found, str)
        or found.split(".")[0] != REPORT_VERSION.split(".")[0]
    ):
        raise PipelineError(
            f"{path}: report_version: found {found!r}, expected {REPORT_VERSION.split('.')[0]}.x "
            "as `quantize` writes it"
        )
    return data


def report_html(data: Mapping[str, Any]) -> str:
    """The page. data: what report.json holds; PipelineError names a key that is missing."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, UndefinedError

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        loader=FileSystemLoader(Path(__file__).parent),
    )  # fmt: skip
    environment.filters |= {
        "size": size, "duration": duration, "percent": partial(_format, "{:.2%}"),
        "number": partial(_format, "{:,}"), "one": partial(_format, "{:.1f}"), "db": _decibel,
    }  # fmt: skip
    full = _printable(_completed(data))
    try:
        drawn = unique_ids(pictures(full))
        page = environment.get_template("report.html.j2")
        return page.render(**full, pictures=drawn, **_derived(full))
    except (KeyError, TypeError, UndefinedError) as error:
        raise PipelineError(f"report.json is not complete: {error}") from error


def _completed(data: Mapping[str, Any]) -> dict[str, Any]:
    modules = [{**_MODULE_SINCE_1_1, **module} for module in data.get("modules", [])]
    full = {**_SINCE_1_1, **data, "modules": modules}
    for key in ("model", "artifact"):
        full[key] = Path(full[key]).name if Path(full[key]).is_absolute() else full[key]
    return full


def _printable(value: Any) -> Any:
    """The data without control characters, which no page may hold."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in value)
    if isinstance(value, Mapping):
        return {_printable(key): _printable(part) for key, part in value.items()}
    return [_printable(part) for part in value] if isinstance(value, list) else value


def _format(pattern: str, value: float | None) -> str:
    return "-" if value is None else pattern.format(value)


def _decibel(rel_error: float | None) -> str:
    return "-" if rel_error is None else f"{sqnr(rel_error):.1f}"


def _derived(data: Mapping[str, Any]) -> dict[str, Any]:
    """Figures that follow from the record."""
    modules, name = data["modules"], Path(data["artifact"]).name
    quantized = [module for module in modules if module["scheme"] != "dense"]
    weights = sum(module["shape"][0] * module["shape"][1] for module in quantized)
    stored = sum(module["bytes"] for module in quantized)
    by_error = sorted(quantized, key=lambda module: -(module["rel_error"] or 0.0))
    by_input = sorted(
        (module for module in quantized if module["input_outliers"]),
        key=lambda module: -module["input_outliers"][0][1],
    )
    return {
        "artifact_name": name,
        "next_steps": next_steps(
            name, runtime_serves=data["runtime_serves"],
            is_converted=bool(quantized) and all(m["method"] == "none" for m in quantized),
        ),
        "before": data["unpacked_bytes"] or data["source_bytes"],
        "quantized": quantized,
        "bits": 8 * stored / weights if weights else 0.0,
        "worst": [module for module in by_error[:_WORST] if module["rel_error"] is not None],
        "worst_inputs": by_input[:_WORST],
        "remarks": _remarks(modules),
        "kinds": _kinds(quantized),
        "total_seconds": sum(data["seconds"].values()),
    }  # fmt: skip


def _remarks(modules: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(modules joined over layers, what happened to them in plain words)."""
    found: dict[str, list[str]] = {}
    lowest = min((m["damping"] for m in modules if m["damping"]), default=0.0)
    for module in modules:
        for text in _module_remarks(module, lowest):
            found.setdefault(text, []).append(module["module"])
    return [(", ".join(join_layers(names)), text) for text, names in found.items()]


def _module_remarks(module: Mapping[str, Any], usual_damping: float) -> list[str]:
    texts = []
    if module["fallback"]:
        texts.append(f"fell back to {module['method']}: {module['fallback']}")
    if module["damping"] and module["damping"] > usual_damping:
        texts.append(
            f"damping raised to {module['damping']:g} because the Hessian was not positive definite"
        )
    if module["dead_columns"]:
        texts.append(
            f"{module['dead_columns']} inputs were always 0 in calibration and were rounded to "
            "nearest"
        )
    if module.get("smoothing"):
        texts.append(f"smoothing: {module['smoothing']}")
    if module.get("is_starved"):
        texts.append(
            f"only {module['tokens_seen']} calibration tokens were routed to it; the statistics of "
            "its layer were mixed in"
        )
    return texts


def _kinds(modules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for module in modules:
        groups.setdefault((split_name(module["module"])[1], module["scheme"]), []).append(module)
    return [_kind(name, scheme, group) for (name, scheme), group in groups.items()]


def _kind(name: str, scheme: str, group: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [module["rel_error"] for module in group if module["rel_error"] is not None]
    peaks = [module["weight_outliers"] for module in group if module["weight_outliers"]]
    return {
        "name": name,
        "scheme": scheme,
        "methods": " + ".join(sorted({module["method"] for module in group})),
        "count": len(group),
        "bytes": sum(module["bytes"] for module in group),
        "mean": sum(errors) / len(errors) if errors else None,
        "max": max(errors, default=None),
        "peaks": [max(peak[i] for peak in peaks) for i in range(3)] if peaks else [None] * 3,
    }
