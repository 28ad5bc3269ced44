"""One line of a JSONL file as a JSON object. What a row means is its reader's affair."""

from __future__ import annotations

import json
from typing import Any


def object_of(line: str, *, constants: bool = True) -> dict[str, Any]:
    """The object in a line; ValueError says why there is none.

    constants: let through NaN and Infinity, which Python reads and JSON does not know.
    """
    try:
        value = json.loads(line, parse_constant=None if constants else _refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {line.strip()[:40]!r}")
    return value


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
