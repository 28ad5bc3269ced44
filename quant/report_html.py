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
from quant.plan_table import duration, size
from quant.report import REPORT_VERSION, RunReport, write_reports
from quant.report_facts import facts_of
from quant.report_plots import pictures, sqnr, unique_ids

HTML_NAME, JSON_NAME = "report.html", "report.json"
_NEEDED = ("jinja2", "matplotlib")
# Keys that reports of version 1.0 lack.
_SINCE_1_1: dict[str, Any] = {
    "recipe_text": "", "overrides": {}, "source_digest": "", "calibration_digest": "",
    "sensitivity": [], "plans": [], "runtime_serves": True, "kv_layers": [],
}  # fmt: skip
_MODULE_SINCE_1_1: dict[str, Any] = {
    "weight_outliers": None, "input_outliers": [], "smoothing": "", "note": "",
    "tokens_seen": None, "is_starved": False, "candidates": [],
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
        "significant": partial(_format, "{:.3g}"),
    }  # fmt: skip
    full = _printable(_completed(data))
    try:
        drawn = unique_ids(pictures(full))
        page = environment.get_template("report.html.j2")
        return page.render(**full, pictures=drawn, **facts_of(full))
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
