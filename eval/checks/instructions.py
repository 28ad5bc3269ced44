"""Verifiable instructions under IFEval's names (arXiv 2311.07911): each a predicate of the text.

All of IFEval's types that need no language detector; sentences are split by their punctuation.
`response_language` is told by script and so knows only languages their script gives away.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from eval.checks.language import SCRIPTS, is_written_in

Predicate = Callable[[str, Mapping[str, Any]], bool]

_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
_SENTENCE_END = re.compile(r"[.!?]+(?=[\s\"')\]]|$)|[\u3002\uff01\uff1f]+")
_BULLET = re.compile(r"^\s*(?:\*[^*].*|[-+]\s.*)$", re.MULTILINE)
_HIGHLIGHT = re.compile(r"(?<!\*)\*\*?[^\n*]+\*\*?(?!\*)")
_RELATIONS = {"at least": lambda n, k: n >= k, "less than": lambda n, k: n < k}


def _related(count: int, wanted: int, relation: str | None) -> bool:
    return bool(_RELATIONS[relation or "at least"](count, wanted))


def _count(text: str, phrase: str) -> int:
    return len(re.findall(re.escape(phrase), text, re.IGNORECASE))


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def _paragraphs(text: str) -> list[str]:
    return [part for part in re.split(r"\s?\*\*\*\s?", text) if part.strip()]


def _blank_line_paragraphs(text: str) -> list[str]:
    return [part for part in re.split(r"\n\s*\n", text) if part.strip()]


def num_words(text: str) -> int:
    """Words as a reader counts them."""
    return len(_WORD.findall(text))


def num_sentences(text: str) -> int:
    """Sentence ends; a last line without one counts as a sentence."""
    ends = len(_SENTENCE_END.findall(text))
    tail = _SENTENCE_END.split(text)[-1]
    return ends + bool(_WORD.search(tail))


def _keywords(text: str, k: Mapping[str, Any]) -> bool:
    return all(_count(text, word) for word in k["keywords"])


def _forbidden(text: str, k: Mapping[str, Any]) -> bool:
    return not any(_has_word(text, word) for word in k["forbidden_words"])


def _frequency(text: str, k: Mapping[str, Any]) -> bool:
    return _related(_count(text, k["keyword"]), k["frequency"], k.get("relation"))


def _letters(text: str, k: Mapping[str, Any]) -> bool:
    count = text.lower().count(k["letter"].lower())
    return _related(count, k["let_frequency"], k.get("let_relation"))


def _words(text: str, k: Mapping[str, Any]) -> bool:
    return _related(num_words(text), k["num_words"], k.get("relation"))


def _sentences(text: str, k: Mapping[str, Any]) -> bool:
    return _related(num_sentences(text), k["num_sentences"], k.get("relation"))


def _num_paragraphs(text: str, k: Mapping[str, Any]) -> bool:
    return bool(len(_paragraphs(text)) == k["num_paragraphs"])


def _nth_paragraph(text: str, k: Mapping[str, Any]) -> bool:
    parts = _blank_line_paragraphs(text)
    nth = k["nth_paragraph"]
    if len(parts) != k["num_paragraphs"] or not 1 <= nth <= len(parts):
        return False
    first = _WORD.search(parts[nth - 1])
    return first is not None and bool(first.group().lower() == k["first_word"].lower())


def _bullets(text: str, k: Mapping[str, Any]) -> bool:
    return bool(len(_BULLET.findall(text)) == k["num_bullets"])


def _highlights(text: str, k: Mapping[str, Any]) -> bool:
    return bool(len(_HIGHLIGHT.findall(text)) >= k["num_highlights"])


def _sections(text: str, k: Mapping[str, Any]) -> bool:
    heads = re.findall(rf"{re.escape(k['section_spliter'])}\s*\d+", text)
    return bool(len(heads) >= k["num_sections"])


def _placeholders(text: str, k: Mapping[str, Any]) -> bool:
    return bool(len(re.findall(r"\[[^\[\]\n]+\]", text)) >= k["num_placeholders"])


def _postscript(text: str, k: Mapping[str, Any]) -> bool:
    bare = re.escape(k["postscript_marker"]).replace(r"\.", r"\.\s?")
    return re.search(rf"^\s*{bare}", text, re.IGNORECASE | re.MULTILINE) is not None


def _options(text: str, k: Mapping[str, Any]) -> bool:
    allowed = k.get("options", ("My answer is yes.", "My answer is no.", "My answer is maybe."))
    return any(option in text for option in allowed)


def _title(text: str, k: Mapping[str, Any]) -> bool:
    return any(found.strip() for found in re.findall(r"<<([^\n]+?)>>", text))


def _json_format(text: str, k: Mapping[str, Any]) -> bool:
    fence = re.fullmatch(r"```(?:json)?\s*(.*?)```", text.strip(), re.DOTALL | re.IGNORECASE)
    try:
        json.loads(fence.group(1) if fence else text.strip())
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(text: str, k: Mapping[str, Any]) -> bool:
    parts = [part.strip() for part in text.split("******")]
    filled = [part for part in parts if part]
    return len(parts) == 2 and len(filled) == 2 and filled[0] != filled[1]


def _repeat(text: str, k: Mapping[str, Any]) -> bool:
    return text.strip().lower().startswith(k["prompt_to_repeat"].strip().lower())


def _ends(text: str, k: Mapping[str, Any]) -> bool:
    return text.strip().strip('"').lower().endswith(k["end_phrase"].strip().lower())


def _quoted(text: str, k: Mapping[str, Any]) -> bool:
    bare = text.strip()
    return len(bare) > 1 and bare[0] == bare[-1] == '"'


def _capital_words(text: str, k: Mapping[str, Any]) -> bool:
    count = sum(word.isupper() for word in _WORD.findall(text))
    return _related(count, k["capital_frequency"], k.get("capital_relation"))


def _upper(text: str, k: Mapping[str, Any]) -> bool:
    return text.isupper()


def _lower(text: str, k: Mapping[str, Any]) -> bool:
    return text.islower()


def _no_comma(text: str, k: Mapping[str, Any]) -> bool:
    return "," not in text


def _language(text: str, k: Mapping[str, Any]) -> bool:
    return is_written_in(SCRIPTS[k["language"]], text)


# IFEval's id to (predicate, names of the arguments it must have with their types).
INSTRUCTIONS: dict[str, tuple[Predicate, dict[str, type]]] = {
    "keywords:existence": (_keywords, {"keywords": list}),
    "keywords:forbidden_words": (_forbidden, {"forbidden_words": list}),
    "keywords:frequency": (_frequency, {"keyword": str, "frequency": int}),
    "keywords:letter_frequency": (_letters, {"letter": str, "let_frequency": int}),
    "length_constraints:number_words": (_words, {"num_words": int}),
    "length_constraints:number_sentences": (_sentences, {"num_sentences": int}),
    "length_constraints:number_paragraphs": (_num_paragraphs, {"num_paragraphs": int}),
    "length_constraints:nth_paragraph_first_word": (
        _nth_paragraph, {"num_paragraphs": int, "nth_paragraph": int, "first_word": str}
    ),
    "detectable_format:number_bullet_lists": (_bullets, {"num_bullets": int}),
    "detectable_format:number_highlighted_sections": (_highlights, {"num_highlights": int}),
    "detectable_format:multiple_sections": (
        _sections, {"section_spliter": str, "num_sections": int}
    ),
    "detectable_format:constrained_response": (_options, {}),
    "detectable_format:title": (_title, {}),
    "detectable_format:json_format": (_json_format, {}),
    "detectable_content:number_placeholders": (_placeholders, {"num_placeholders": int}),
    "detectable_content:postscript": (_postscript, {"postscript_marker": str}),
    "combination:two_responses": (_two_responses, {}),
    "combination:repeat_prompt": (_repeat, {"prompt_to_repeat": str}),
    "startend:end_checker": (_ends, {"end_phrase": str}),
    "startend:quotation": (_quoted, {}),
    "change_case:capital_word_frequency": (_capital_words, {"capital_frequency": int}),
    "change_case:english_capital": (_upper, {}),
    "change_case:english_lowercase": (_lower, {}),
    "punctuation:no_comma": (_no_comma, {}),
    "language:response_language": (_language, {"language": str}),
}  # fmt: skip
# What may be said besides.
OPTIONAL: dict[str, dict[str, type]] = {
    "keywords:frequency": {"relation": str},
    "keywords:letter_frequency": {"let_relation": str},
    "length_constraints:number_words": {"relation": str},
    "length_constraints:number_sentences": {"relation": str},
    "change_case:capital_word_frequency": {"capital_relation": str},
    "detectable_format:constrained_response": {"options": list},
}
RELATION_KEYS = ("relation", "let_relation", "capital_relation")
RELATIONS = tuple(_RELATIONS)
