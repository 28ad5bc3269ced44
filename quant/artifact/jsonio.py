"""The one way our JSON files are written, parsed, and told to be of a readable version."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from quant.artifact.errors import FormatVersionError, ManifestError, StorageError


def canonical_json(data: Any) -> bytes:
    """The same bytes for the same data: sorted keys, ASCII, one-space indent, no NaN."""
    text = json.dumps(data, indent=1, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return text.encode("ascii") + b"\n"


def parse_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ManifestError when it is absent, garbled or something else."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ManifestError(f"{path} is missing") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ManifestError(f"{path} holds a JSON {type(data).__name__}, expected an object")
    return data


def check_version(
    path: Path, data: dict[str, Any], readable: str, *, again: str = "quantize again"
) -> None:
    """FormatVersionError unless `data`'s format_version has the major version of `readable`.

    again: how this build makes the file anew, for the message.
    """
    found = data.get("format_version")
    if not isinstance(found, str) or not re.fullmatch(r"[0-9]{1,9}\.[0-9]{1,9}", found):
        raise ManifestError(f'{path}: format_version is {found!r}, expected "{readable}"')
    major = readable.split(".")[0]
    if found.split(".")[0] != major:
        raise FormatVersionError(
            f"{path} has format version {found}; this build reads {major}.x: "
            f"install a matching weighbridge or {again}"
        )


def is_newer_minor(found: str, readable: str) -> bool:
    """Whether `found` has a higher minor version than `readable` (same major)."""
    return int(found.split(".")[1]) > int(readable.split(".")[1])


def validation_message(error: ValidationError) -> str:
    """The first complaint of pydantic as `path.to.field: what is wrong (found ...)`."""
    first = error.errors()[0]
    more = f", and {error.error_count() - 1} more" if error.error_count() > 1 else ""
    if not first["loc"] and first["type"] == "value_error":  # a rule over all fields says it all
        return f"{first['ctx']['error']}{more}"
    where = ".".join(str(part) for part in first["loc"]) or "top level"
    found = "" if first["type"] == "missing" else f" (found {first['input']!r:.80})"
    return f"{where}: {first['msg']}{found}{more}"
