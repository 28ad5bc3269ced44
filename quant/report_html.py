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

from pydantic import TypeAdapter, ValidationError

from quant.artifact.jsonio import parse_object, validation_message
from quant.errors import PipelineError
from quant.plan_table import duration, size
from quant.report import REPORT_VERSION, RunReport, write_reports
from quant.report_facts import facts_of
from quant.report_plots import pictures, sqnr, unique_ids

HTML_NAME, JSON_NAME = "report.html", "report.json"
_NEEDED = ("jinja2", "matplotlib")


def missing_libraries() -> tuple[str, ...]:
    """What must be installed before the page can be made."""
    return tuple(name for name in _NEEDED if importlib.util.find_spec(name) is None)


def how_to_install(names: tuple[str, ...]) -> str:
    return (
        f"no {HTML_NAME}: it needs {' and '.join(names)} (pip install 'weighbridge[quant]'); "
        "`quantize report ART` makes it then"
    )


def html_files(report: RunReport) -> dict[str, str]:
    """The page under its name; nothing on an install that lacks what it is made with."""
    if missing_libraries():
        return {}
    return {HTML_NAME: report_html(_plain(report))}


def rerender(artifact: Path) -> Path:
    """Make report.html of an artifact anew from its report.json; PipelineError if that fails."""
    if missing := missing_libraries():
        raise PipelineError(how_to_install(missing))
    write_reports({HTML_NAME: report_html(read_report(artifact / JSON_NAME))}, artifact)
    return artifact / HTML_NAME


def read_report(path: Path) -> dict[str, Any]:
    """The data of a report.json of this major version, with defaults for what older ones lack.

    PipelineError or ArtifactError names the file and what is wrong in it.
    """
    data = parse_object(path)
    found = data.get("report_version")
    if found is None and "gates" in data:
        raise PipelineError(
            f"{path} is what `evaluate` wrote; its pages are made anew by `evaluate report DIR`"
        )
    if not isinstance(found, str) or found.split(".")[0] != REPORT_VERSION.split(".")[0]:
        raise PipelineError(
            f"{path}: report_version: found {found!r}, expected {REPORT_VERSION.split('.')[0]}.x "
            "as `quantize` writes it"
        )
    try:
        report = TypeAdapter(RunReport).validate_python(data)
    except ValidationError as error:
        raise PipelineError(f"{path}: {validation_message(error)}") from None
    return {**_plain(report), "warnings": list(report.warnings)}


def report_html(data: Mapping[str, Any]) -> str:
    """The page. data: what report.json holds, as `read_report` gives it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        loader=FileSystemLoader(Path(__file__).parent),
    )  # fmt: skip
    environment.filters |= {
        "size": size, "duration": duration, "percent": partial(_format, "{:.2%}"),
        "number": partial(_format, "{:,}"), "one": partial(_format, "{:.1f}"), "db": _decibel,
        "significant": partial(_format, "{:.3g}"),
    }  # fmt: skip
    full = _printable(_without_paths(data))
    page = environment.get_template("report.html.j2")
    return page.render(**full, pictures=unique_ids(pictures(full)), **facts_of(full))


def _plain(report: RunReport) -> dict[str, Any]:
    """What report.json holds of it: every key, with tuples as lists."""
    data: dict[str, Any] = json.loads(json.dumps(report.to_json()))
    return data


def _without_paths(data: Mapping[str, Any]) -> dict[str, Any]:
    named = {key: Path(data[key]) for key in ("model", "artifact")}
    return {**data, **{key: path.name for key, path in named.items() if path.is_absolute()}}


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
