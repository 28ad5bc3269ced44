"""Normalising field values before they are compared: the same rules for gold and for answers.

Two values are equal if their normal forms are. What is undone: Unicode compatibility forms, case,
runs of white space, quotes and a final full stop around a string, thousands separators, and the
ways to write a date. The rules are versioned because a change of them changes scores.
"""

from __future__ import annotations

import json
import re
import unicodedata
from datetime import date, datetime
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal, InvalidOperation
from typing import Any

NORMALISATION_VERSION = 2

_PLAIN_KEY = re.compile(r'[^.\[\]"]+')
_SPACE = re.compile(r"\s+")
# What begins with a zero too many is an account, a telephone or an article number: text.
_NUMBER = re.compile(r"[-+]?(?!0[\d,])(\d{1,3}(,\d{3})+|\d+)(\.\d+)?")
_ORDINAL = re.compile(r"(?<=\d)(st|nd|rd|th)\b")
_CHINESE_DATE = re.compile(r"(\d{4})\s*\u5e74\s*(\d{1,2})\s*\u6708\s*(\d{1,2})\s*\u65e5")
_DATE_FORMATS = (
    "%Y-%m-%d",
    "%Y/%m/%d",
    "%Y.%m.%d",
    "%B %d, %Y",
    "%B %d %Y",
    "%b %d, %Y",
    "%d %B %Y",
    "%d %b %Y",
)
# The usual one rounds to 28 digits: account and invoice numbers are longer.
_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)
_QUOTES = "\"'`\u201c\u201d\u2018\u2019\u300c\u300d"

Normal = str | Decimal | bool | None


def normalise(value: Any) -> Normal:
    """The normal form of a JSON scalar. Numbers and strings that spell one become Decimals."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return Decimal(str(value)).normalize(_EXACT)
    return _normalise_text(str(value))


def _normalise_text(value: str) -> Normal:
    text = _SPACE.sub(" ", unicodedata.normalize("NFKC", value)).strip()
    text = text.strip(_QUOTES).removesuffix(".").strip().casefold()
    if _NUMBER.fullmatch(text):
        return _number(text)
    found = _as_date(text)
    return found.isoformat() if found else text


def _number(text: str) -> Decimal | str:
    try:
        return Decimal(text.replace(",", "")).normalize(_EXACT)
    except InvalidOperation:
        return text


def _as_date(text: str) -> date | None:
    if match := _CHINESE_DATE.fullmatch(text):
        text = "-".join(match.groups())
    text = _ORDINAL.sub("", text)
    for pattern in _DATE_FORMATS:
        try:
            return datetime.strptime(text, pattern).date()
        except ValueError:
            continue
    return None


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Leaves of a JSON value by path: {"a": {"b": [1]}} gives {"a.b[0]": 1}."""
    if isinstance(value, dict):
        parts = (
            (f"{path}.{step(key)}" if path else step(key), child) for key, child in value.items()
        )
    elif isinstance(value, list):
        parts = ((f"{path}[{index}]", child) for index, child in enumerate(value))
    else:
        return {path: value}
    return {leaf: item for name, child in parts for leaf, item in flatten(child, name).items()}


def step(key: str) -> str:
    """A key as it stands in paths: in quotes where it could be taken for several steps."""
    return key if _PLAIN_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False)
