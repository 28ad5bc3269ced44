"""json_valid: the whole trimmed answer is JSON.

Judged on the strict reading. The lenient one (a code fence or prose around an object taken away)
stands beside it, because it hides exactly the regressions that break a program downstream.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from eval.checks.base import Outcome, Reply
from eval.metrics.normalise import flatten

# What JSON allows around a value; Python's own idea of white space is wider.
_SPACE = " \t\n\r"
_FENCE = re.compile(r"```[a-zA-Z]*\s*\n?(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A JSON value, or why there is none. duplicate_keys: names an object held twice."""

    value: Any
    problem: str
    duplicate_keys: tuple[str, ...] = ()


def score(reply: Reply, options: None) -> Outcome:
    """json_valid (strict), json_extractable (lenient), json_unique_keys."""
    parsed = parse_strict(reply.text)
    is_valid = not parsed.problem
    return Outcome(
        values={
            "json_valid": float(is_valid),
            "json_extractable": float(is_valid or _is_extractable(reply.text)),
            "json_unique_keys": float(not parsed.duplicate_keys),
        },
        problem=parsed.problem,
        details={"duplicate_keys": list(parsed.duplicate_keys)} if parsed.duplicate_keys else {},
    )


def parse_strict(text: str) -> Parsed:
    """The whole trimmed text as JSON; NaN and Infinity are refused, duplicate keys are flagged."""
    duplicates: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        times = Counter(name for name, _ in pairs)
        duplicates.extend(sorted(name for name, n in times.items() if n > 1))
        return dict(pairs)

    try:
        bare = text.strip(_SPACE)
        value = json.loads(bare, object_pairs_hook=unique, parse_constant=_refuse_constant)
        flatten(value)
    except ValueError as error:
        return Parsed(value=None, problem=f"not JSON: {error}")
    except RecursionError:
        return Parsed(value=None, problem="not JSON: nested too deeply")
    return Parsed(value=value, problem="", duplicate_keys=tuple(dict.fromkeys(duplicates)))


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _is_extractable(text: str) -> bool:
    """Whether an object parses once a code fence or surrounding prose is taken away."""
    fenced = _FENCE.search(text)
    body = fenced.group(1) if fenced else text
    start = body.find("{")
    if start < 0:
        return False
    try:
        json.JSONDecoder(parse_constant=_refuse_constant).raw_decode(body, start)
    except (ValueError, RecursionError):
        return False
    return True
