"""Languages by script: no detector, no word list. Code, quotes and links do not count.

language_kept compares the answer's main script with the base's; language_right, with the one a row
asks for; no_stray_characters looks for characters that no language has.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eval.checks.base import Outcome, Reply, only

# The script a language is written in; only languages that their script can tell from English.
SCRIPTS = {
    "en": "LATIN", "zh": "CJK", "ja": "KANA", "ko": "HANGUL", "ru": "CYRILLIC", "uk": "CYRILLIC",
    "ar": "ARABIC", "he": "HEBREW", "el": "GREEK", "hi": "DEVANAGARI", "th": "THAI",
}  # fmt: skip
# A foreign script may stand for names and terms; from this share on the language has switched.
MOST_FOREIGN = 0.5
_LEFT_OUT = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\"[^\"\n]*\"|\u201c[^\u201d]*\u201d|\u300c[^\u300d]*\u300d"
    r"|https?://\S+",
    re.DOTALL,
)
_KANA = {"HIRAGANA", "KATAKANA"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The script asked for."""

    script: str


def read(row: Mapping[str, Any]) -> Options:
    """`expect`: a language of SCRIPTS."""
    only(row, "expect")
    expect = row.get("expect")
    if not isinstance(expect, str) or expect not in SCRIPTS:
        raise ValueError(f"expected 'expect' to be one of {sorted(SCRIPTS)}, found {expect!r}")
    return Options(script=SCRIPTS[expect])


def score(reply: Reply, options: Options) -> Outcome:
    """language_right: most letters outside code and quotes are of the script asked for."""
    is_right = is_written_in(options.script, reply.text)
    problem = "" if is_right else f"written in {main_script(reply.text) or 'no letters'}"
    return Outcome(values={"language_right": float(is_right)}, problem=problem)


def is_written_in(script: str, text: str) -> bool:
    """Whether most letters of a text are of a script of SCRIPTS."""
    shares = script_shares(text)
    share = shares.get(script, 0.0)
    if script == "KANA":  # Japanese text is mostly Han characters with some kana
        share = share and share + shares.get("CJK", 0.0)
    return share > 1 - MOST_FOREIGN


def score_kept(reply: Reply, options: None) -> Outcome:
    """The signal of language_kept: the main script, None without letters."""
    return Outcome(signals={"language_kept": main_script(reply.text)})


def score_stray(reply: Reply, options: None) -> Outcome:
    """no_stray_characters: no replacement character, lone surrogate or private-use character.

    A cut-off answer may end within a character, so its very end is not looked at.
    """
    text = reply.text.rstrip("\ufffd") if reply.is_truncated else reply.text
    stray = [c for c in text if c == "\ufffd" or unicodedata.category(c) in {"Cs", "Co"}]
    problem = f"{len(stray)} stray characters" if stray else ""
    return Outcome(values={"no_stray_characters": float(not stray)}, problem=problem)


def main_script(text: str) -> str | None:
    """The script of most letters, None where there are none."""
    shares = script_shares(text)
    return max(shares, key=lambda script: (shares[script], script)) if shares else None


def script_shares(text: str) -> dict[str, float]:
    """Share of each script among the letters outside code, quotes and links.

    Where nothing else holds a letter (JSON is all quotes), the whole text counts.
    """
    outside = _letters(_LEFT_OUT.sub(" ", text))
    counts = outside or _letters(text)
    total = sum(counts.values())
    return {script: count / total for script, count in counts.items()}


def _letters(text: str) -> Counter[str]:
    return Counter(_script(char) for char in text if char.isalpha())


def _script(char: str) -> str:
    if char.isascii():
        return "LATIN"
    first = unicodedata.name(char, "UNKNOWN").split(" ")[0].split("-")[0]
    return "KANA" if first in _KANA else first
