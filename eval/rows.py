"""One line of a JSONL file as a JSON object. What a row means is its reader's affair."""

from __future__ import annotations

import json
import math
from typing import Any


def object_of(line: str, *, constants: bool = True) -> dict[str, Any]:
    """The object in a line; ValueError says why there is none.

    constants: let through NaN and Infinity, which Python reads and JSON does not know.
    """
    try:
        value = (
            json.loads(line)
            if constants
            else json.loads(line, parse_constant=_refuse, parse_float=_finite)
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {line.strip()[:40]!r}")
    return value


def _finite(text: str) -> float:
    """Python reads 1e999 as infinity, which no JSON file of ours could hold again."""
    if math.isinf(number := float(text)):
        raise ValueError(f"the number {text[:40]} is out of range")
    return number


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
