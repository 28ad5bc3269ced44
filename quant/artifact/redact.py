"""Personal data and secrets in a row: found by shape and checksum, replaced by [KIND_n].

Within a row one value always becomes the same placeholder, so what refers to what stays readable.
E-mail, telephone (international, Chinese, US), Chinese resident and US social security numbers,
payment cards (Luhn), IBAN (ISO 13616, mod 97), IP addresses, URL credentials, API keys, private
keys. What has no shape of its own (national telephone numbers, passports, bank accounts) is found
where the text names it: `Tel.`, `Passport No.`, `Account:`, and so in Chinese. Names and postal
addresses are not found: that takes a model.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_SECRETS = ("PRIVATE_KEY", "SECRET")
# Digits as Chinese keyboards may write them; the same length, so offsets stay.
_ASCII = str.maketrans(
    "\uff10\uff11\uff12\uff13\uff14\uff15\uff16\uff17\uff18\uff19\uff20\uff0b\uff0d\uff08\uff09\uff1a",
    "0123456789@+-():",
)


def luhn(number: str) -> bool:
    """ISO/IEC 7812-1 check digit."""
    digits = [int(c) for c in reversed(re.sub(r"\D", "", number))]
    return sum(d if i % 2 == 0 else sum(divmod(2 * d, 10)) for i, d in enumerate(digits)) % 10 == 0


def resident_id(number: str) -> bool:
    """GB 11643 check character of an 18-character Chinese resident identity number."""
    weights = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
    total = sum(w * int(c) for w, c in zip(weights, number, strict=False))
    return number[17].upper() == "10X98765432"[total % 11]


def iban(number: str) -> bool:
    """ISO 7064 mod 97-10."""
    compact = number.replace(" ", "")
    turned = compact[4:] + compact[:4]
    return len(compact) >= 15 and int("".join(str(int(c, 36)) for c in turned)) % 97 == 1


def _card(number: str) -> bool:
    digits = re.sub(r"\D", "", number)
    length = {"3": (14, 15, 16), "4": (13, 16, 19), "5": (16,), "6": (16, 17, 18, 19)}
    return len(digits) in length.get(digits[0], ()) and len(set(digits)) > 1 and luhn(digits)


def _address(text: str) -> bool:
    """An IP address, but not a loopback one, nor what may be a clause number (10.2.1.3)."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv4Address) and max(address.packed) < 32:
        return False
    return not (address.is_loopback or address.is_unspecified)


def _international(text: str) -> bool:
    """At most 15 digits (E.164); behind 00 enough of them to be no file number (001-38402)."""
    digits = re.sub(r"\D", "", text)
    return (8 if text.startswith("+") else 11) <= len(digits) <= 17 - 2 * text.startswith("+")


def _mobile(text: str) -> bool:
    """Not a round amount (15500000000)."""
    return not text.endswith("000000")


def _national(text: str) -> bool:
    """Seven digits at least, and no date."""
    is_date = re.fullmatch(r"\d{1,4}([./-])\d{1,2}\1\d{1,4}", text)
    return 7 <= len(re.sub(r"\D", "", text)) <= 15 and not is_date


def _account(text: str) -> bool:
    return len(re.sub(r"\D", "", text)) >= 6


def _key_like(text: str) -> bool:
    return bool(re.search(r"\d", text) and re.search(r"[A-Za-z]", text))


def _always(text: str) -> bool:
    return True


# (kind, pattern, check); a group, where there is one, is what gets replaced. Earlier kinds win.
# Word boundaries are spelt out in ASCII: Chinese characters may touch a number.
_L, _R = r"(?<![A-Za-z0-9_.+-])", r"(?![A-Za-z0-9_]|[.-]\d)"
_WORD = "A-Za-z0-9\u00c0-\u024f"  # Latin letters, accents too; Chinese ones may touch an address
# After a word like `Tel`: `No.`, `number`, colons, quotes; and the same with a mark that says that
# a number follows.
_NUMBER = r"(?:\.?\s{0,2}(?:nos?|n\u00b0|nr|num(?:ber)?|\u53f7\u7801|\u53f7)(?![A-Za-z]))?"
_GAP = _NUMBER + r"[\s:#.,\"'\u201c\u201d(-]{0,6}"
_MARKED_GAP = (
    r"(?:\s{0,2}[#:]|\.?\s{0,2}(?:nos?|nr|num(?:ber)?|\u53f7\u7801|\u53f7)(?![A-Za-z]))"
    r"[\s:#.\"'\u201c\u201d(]{0,6}"
)
_PHONE_WORDS = (
    r"(?i)(?<![A-Za-z])(?:tele?phone|phone|tel|t\u00e9l(?:\u00e9phone)?|telefon[oe]?|"
    r"tel\u00e9fono|telefax|facsimile|fax|mobile|mob|cell(?:ular)?|whatsapp|"
    r"\u7535\u8bdd|\u5ea7\u673a|\u624b\u673a|\u4f20\u771f|\u8054\u7cfb\u65b9\u5f0f)(?![A-Za-z])"
)
_BANK_WORDS = (
    rf"(?i)(?:(?<![A-Za-z])(?:account|acct|a/c|routing|aba|\u8d26\u6237){_MARKED_GAP}|"
    r"(?:\u8d26\u53f7|\u5e10\u53f7|\u5361\u53f7)[\s:]{0,3})"
)
_RULES: tuple[tuple[str, re.Pattern[str], Callable[[str], bool]], ...] = tuple(
    (kind, re.compile(pattern), check)
    for kind, pattern, check in (
        ("PRIVATE_KEY", r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[^-]{1,10000}"
         r"(?:-----END [A-Z ]{0,30}PRIVATE KEY-----)?", _always),
        ("CREDENTIALS", r"[a-z][a-z0-9+.-]{1,20}://([^\s/:@\[\]]{1,128}:[^\s/@\[\]]{1,128})@",
         _always),
        ("SECRET", r"(?<![A-Za-z0-9])(?:sk-[\w-]{20,}|gh[pousr]_\w{30,}|github_pat_\w{30,}|"
         r"(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{35}|xox[abprs]-[\w-]{10,}|hf_[A-Za-z0-9]{30,}|"
         r"eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})", _always),
        ("SECRET", r"(?i)\bbearer\s+([\w.~+/-]{20,}=*)", _key_like),
        ("SECRET", r"(?i)(?:passw(?:or)?d|secret|api[_-]?key|access[_-]?token)[\"']?\s{0,3}[:=]"
         r"\s{0,3}[\"']?([^\s\"'\[\]]{8,200})", _key_like),
        ("EMAIL", rf"(?<![{_WORD}._%+-])[{_WORD}._%+-]{{1,64}}@(?:[{_WORD}-]{{1,63}}\.){{1,8}}"
         r"[A-Za-z]{2,24}", _always),
        ("EMAIL", r"(?i)(?<![a-z0-9._%+-])[a-z0-9._%+-]{1,64} ?[\[(]at[\])] ?"
         r"(?:[a-z0-9-]{1,63}(?:\.| ?[\[(]dot[\])] ?)){1,8}[a-z]{2,24}(?![a-z])", _always),
        ("IBAN", _L + r"[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?" + _R, iban),
        ("ID", _L + r"[1-9]\d{5}(?:19|20)\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])\d{3}[\dXx]"
         + _R, resident_id),
        ("ID", r"\u8eab\u4efd\u8bc1(?:\u53f7\u7801|\u53f7)?[\s:]{0,3}"
         r"([1-9]\d{7}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])\d{3})(?!\d)", _always),
        ("PASSPORT", r"(?i)(?:passport|passeport|reisepass|pasaporte|\u62a4\u7167)" + _GAP +
         r"([a-z]{0,2}\d[a-z0-9]{5,8})(?![A-Za-z0-9])", _always),
        ("CARD", _L + r"[3-6]\d{3}(?:[ -]?\d{4,6}){2}(?:[ -]?\d{1,5}){0,2}" + _R, _card),
        ("SSN", _L + r"(?!000|666|9)\d{3}-(?!00)\d{2}-(?!0000)\d{4}" + _R, _always),
        ("SSN", r"(?i)(?<![a-z])(?:ssn|social security)" + _GAP + r"(\d{3}[ -]?\d{2}[ -]?\d{4})"
         r"(?!\d)", _always),
        ("ACCOUNT", _BANK_WORDS + r"(\d{2,24}(?:[ -]\d{2,8}){0,8})(?!\d)", _account),
        (
            "PHONE",
            r"(?<![\w+])(?:\+[1-9]\d{0,3}|(?<!\d[ -])00[1-9]\d{0,2}[ -])"
            r"(?:[ ./-]{0,2}\(?\d{1,5}\)?){2,6}" + _R,
            _international,
        ),
        ("PHONE", _L + r"(?<![$\u00a5\uffe5\u20ac\u00a3])(?:86[ -]?)?1[3-9]\d[ -]?\d{4}[ -]?\d{4}"
         + _R + r"(?!\s?(?:\u5143|\u4e07|\u4ebf))", _mobile),
        ("PHONE", _L + r"(?:\(0(?:10|2\d|[3-9]\d{2})\)[ -]?|0(?:10|2\d|[3-9]\d{2})[ -])"
         r"\d{3,4}[ -]?\d{4}(?:(?:-|\u8f6c)\d{1,6})?" + _R, _always),
        ("PHONE", _L + r"(?:1[ .-])?(?:(?:\([2-9]\d{2}\) ?|[2-9]\d{2}-)[2-9]\d{2}-\d{4}|"
         r"[2-9]\d{2}\.[2-9]\d{2}\.\d{4})(?: ?(?:ext|x)\.? ?\d{1,6})?" + _R,
         _always),
        ("PHONE", _PHONE_WORDS + _GAP + r"(\+?\d(?:[ ./()-]{0,3}\d){6,14})(?![A-Za-z0-9])",
         _national),
        ("IP", r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)", _address),
        ("IP", r"(?<![\w:.])(?:[0-9A-Fa-f]{1,4}:){2,7}(?::?[0-9A-Fa-f]{1,4})"
         r"(?::[0-9A-Fa-f]{1,4}){0,6}(?![\w:])", _address),
    )
)  # fmt: skip


@dataclass(slots=True)
class Redactor:
    """Placeholders of one row; `counts` are occurrences by kind."""

    counts: Counter[str] = field(default_factory=Counter)
    names: dict[tuple[str, str], str] = field(default_factory=dict)

    def text(self, text: str) -> str:
        """`text` with every finding replaced; what a placeholder's edge lays bare, too."""
        while found := findings(text):
            pieces, done = [], 0
            for start, stop, kind in found:
                self.counts[kind] += 1
                pieces += [text[done:start], self._name(kind, text[start:stop])]
                done = stop
            text = "".join([*pieces, text[done:]])
        return text

    def _name(self, kind: str, value: str) -> str:
        key = (kind, re.sub(r"[\s().-]", "", value.translate(_ASCII)).casefold())
        number = 1 + sum(k == kind for k, _ in self.names)
        return self.names.setdefault(key, f"[{kind}_{number}]")

    def value(self, value: Any) -> Any:
        """Any JSON value with its strings redacted; keys stay."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {key: self.value(item) for key, item in value.items()}
        return value


def findings(text: str) -> list[tuple[int, int, str]]:
    """(start, stop, kind) of what is personal or secret, in order, not overlapping."""
    plain = text.translate(_ASCII)
    taken: list[tuple[int, int, str]] = []
    for kind, start, stop in _candidates(plain):
        if not any(
            start < other_stop and other_start < stop for other_start, other_stop, _ in taken
        ):
            taken.append((start, stop, kind))
    return sorted(taken)


def _candidates(text: str) -> Iterator[tuple[str, int, int]]:
    for kind, pattern, check in _RULES:
        for match in pattern.finditer(text):
            group = 1 if pattern.groups else 0
            if check(match.group(group)):
                yield kind, *match.span(group)


def redact(row: Mapping[str, Any]) -> tuple[dict[str, Any], Counter[str]]:
    """The row with placeholders in its texts, messages and tools, and the occurrences by kind."""
    redactor = Redactor()
    fields = ("text", "prompt", "completion", "messages", "tools")
    changed = {key: redactor.value(row[key]) for key in fields if key in row}
    return {**row, **changed}, redactor.counts


def secrets(counts: Mapping[str, int]) -> int:
    """How many of the findings are keys and passwords."""
    return sum(counts.get(kind, 0) for kind in (*_SECRETS, "CREDENTIALS"))
