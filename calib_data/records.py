"""Invented business records: parties, dates, sums, order numbers.

Each half draws from its own names and its own numbers, so that no filled record can occur in
both: days of the month are even in the train half and odd in the gate half, sums are even or
odd in their tens, serial numbers by their last digit. It knows nothing of wording.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random

from calib_data.banks import Half, Lang, between, chance, choose, fill, pick, values

MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
)  # fmt: skip
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_CURRENCY_NAMES = {
    "EUR": "euros",
    "USD": "US dollars",
    "GBP": "pounds sterling",
    "CHF": "Swiss francs",
    "SGD": "Singapore dollars",
}
_CAPITALS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ONSETS = (
    "b", "c", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z",
    "br", "ch", "cl", "cr", "dr", "fl", "gr", "kl", "pl", "qu", "sc", "sh", "sl", "sp", "st", "str",
    "th", "tr", "vr", "wh", "y", "",
)  # fmt: skip
_VOWELS = ("a", "e", "i", "o", "u", "a", "e", "i", "o", "u", "ai", "ea", "ee", "ie", "oo", "ou")
_CODAS = (
    "", "", "", "", "", "l", "m", "n", "r", "s", "t", "x", "ck", "ld", "ll", "lm", "mp", "nd",
    "ng", "nk", "nt", "rd", "rk", "rn", "rt", "sk", "ss", "st", "th",
)  # fmt: skip
_HANZI = (
    "\u5b89\u767e\u5b9d\u5317\u535a\u957f\u6210\u8fbe\u5927\u4e1c\u5fb7\u6052\u98de"
    "\u4e30\u5bcc\u9ad8\u5149\u5e7f\u56fd\u6d77\u822a\u548c\u7ea2\u5b8f\u534e\u6c47"
    "\u5609\u5efa\u6c5f\u91d1\u9526\u4eac\u5eb7\u79d1\u84dd\u4e50\u529b\u8054\u9f99"
    "\u7f8e\u660e\u5b81\u5e73\u542f\u6b23\u745e\u4e09\u5c71\u6df1\u76db\u65f6\u987a"
    "\u6cf0\u5929\u901a\u4e07\u65b0\u4fe1\u661f\u5174\u96c4\u65ed\u4e9a\u9633\u4ebf"
    "\u76ca\u6c38\u8fdc\u4e91\u5fd7\u4e2d\u4f17\u6b63"
)
# Days and months of the gate's pools, in much wider ranges.
_PERIODS = {
    "days": (1, 120), "notice_days": (2, 200), "pay_days": (2, 130), "months": (1, 48),
    "term": (2, 130),
}  # fmt: skip
_SPELLED = ("days", "notice_days", "pay_days", "months")


def seeded(*parts: object) -> Random:
    """A generator that depends on the parts alone, so that rows do not depend on each other."""
    return Random("/".join(map(str, parts)))


def document_id(half: Half, source: str, seed: int, index: int) -> str:
    digest = sha256(f"{half}/{source}/{seed}/{index}".encode()).hexdigest()
    return f"{half[0]}-{source}-{digest[:10]}"


def in_words(number: int) -> str:
    """English words for 0 to 99."""
    if number < 20:
        return _ONES[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")


@dataclass(frozen=True, slots=True)
class Date:
    year: int
    month: int
    day: int

    @property
    def iso(self) -> str:
        return f"{self.year:04d}-{self.month:02d}-{self.day:02d}"

    def text(self, style: str) -> str:
        """Styles: iso, dmy (12 March 2027), mdy (March 12, 2027), zh."""
        if style == "dmy":
            return f"{self.day} {MONTHS[self.month - 1]} {self.year}"
        if style == "mdy":
            return f"{MONTHS[self.month - 1]} {self.day}, {self.year}"
        if style == "zh":
            return f"{self.year}\u5e74{self.month}\u6708{self.day}\u65e5"
        return self.iso


@dataclass(slots=True, kw_only=True)
class Record:
    """What fills one document. `said` holds fixed values; other names are drawn when met.

    Drawing is lazy on purpose: "{days}" in two clauses is two periods, "{A}" is one party.
    """

    rng: Random
    half: Half
    lang: Lang
    said: dict[str, str] = field(default_factory=dict)
    gold: dict[str, object] = field(default_factory=dict)
    spell_numbers: bool = False
    date_style: str = "iso"

    def render(self, text: str) -> str:
        filled = fill(choose(text, self.rng, self.half), self.value)
        return filled.replace("..", ".")  # "B.V." at the end of a sentence

    def value(self, name: str) -> str:
        text = self.said[name] if name in self.said else self._draw(name)
        if self.spell_numbers and name in _SPELLED and text.isdigit():
            return f"{in_words(int(text))} ({text})"
        return text

    def draw(self, pool: str) -> str:
        """A value of a pool of this language, else of a pool common to all."""
        found = values(f"{self.lang}.{pool}", self.half) or values(pool, self.half)
        if not found:
            raise KeyError(f"no value or pool is called {pool!r}")
        return pick(self.rng, found)

    def _draw(self, name: str) -> str:
        if name == "years" and self.lang == "zh":
            return self.draw("years_zh")
        makers = {"cap": self.large_sum, "deposit": self.small_sum, "phone": self.phone}
        return makers[name]() if name in makers else self.draw(name)

    def parity(self, number: int) -> int:
        """The nearest number at or above with this half's parity (train even, gate odd)."""
        return number + (number + (self.half == "gate")) % 2

    def serial(self, digits: int) -> str:
        low = 10 ** (digits - 1)
        return str(self.parity(between(self.rng, low, 10 * low - 2)))

    def date(self, first_year: int = 2024, last_year: int = 2028) -> Date:
        year, month = between(self.rng, first_year, last_year), between(self.rng, 1, 12)
        return Date(year, month, self.parity(between(self.rng, 1, 27)))

    def set_dates(self, date: Date) -> None:
        """Say `date`, and as `date2` a day of the following month."""
        year, month = (date.year, date.month + 1) if date.month < 12 else (date.year + 1, 1)
        later = Date(year, month, self.parity(between(self.rng, 1, 27)))
        self.gold["date"] = date.iso
        self.said |= {"date": date.text(self.date_style), "date2": later.text(self.date_style)}

    def amount(self, low: int, high: int) -> int:
        """A round sum whose tens are even or odd by half; below 100 steps of 10."""
        return self.parity(between(self.rng, low // 10, high // 10)) * 10

    def money(self, amount: int, currency: str) -> str:
        if self.lang == "zh":
            return f"\u4eba\u6c11\u5e01{amount:,}\u5143"
        return f"{currency} {amount:,}"

    def price(self) -> str:
        """A retail price with cents, for service dialogs."""
        whole, cents = self.parity(between(self.rng, 18, 480)), pick(self.rng, ("00", "50", "90"))
        currency = self.said.get("currency", "EUR")
        return f"{whole}.{cents}\u5143" if self.lang == "zh" else f"{currency} {whole}.{cents}"

    def large_sum(self) -> str:
        return self.money(self.amount(250_000, 4_000_000), self.said.get("currency", "EUR"))

    def small_sum(self) -> str:
        return self.money(self.amount(800, 30_000), self.said.get("currency", "EUR"))

    def phone(self) -> str:
        """From the range 555-0100 to 555-0199, which is reserved for fiction."""
        return f"+1-{between(self.rng, 2, 9)}00-555-01{self.parity(between(self.rng, 10, 98))}"

    def name(self) -> str:
        """An invented name without legal form: `Brimvale`."""
        if self.lang == "zh":
            return self.draw("start")
        return self.draw("start") + self.draw("end")

    def company(self) -> str:
        space = "" if self.lang == "zh" else " "
        return space.join((self.name(), self.draw("sector"), self.draw("suffix")))

    def person(self) -> str:
        if self.lang == "zh":
            return self.draw("family") + self.draw("given")
        return f"{self.draw('first')} {self.name()}"

    def address(self) -> str:
        number = self.parity(between(self.rng, 2, 196))
        if self.lang == "zh":
            return f"{self.draw('city')}{self.draw('street')}{number}\u53f7"
        return f"{number} {self.name()} {self.draw('street')}, {self.draw('city')}"

    def mail(self, user: str) -> str:
        name = self.name().lower() if self.lang == "en" else f"corp{self.serial(4)}"
        return f"{user}@{name}.example.com"

    def order(self) -> str:
        return f"{self.draw('order_prefix')}-{self.serial(6)}"


class WideRecord(Record):
    """What a model is tuned on: names and numbers of many more kinds than the train half has.

    A model that has only ever seen even days and names of 128 beginnings learns those instead of
    learning to copy. Nothing here can be drawn by the gate half: its pools are refused, and
    numbers avoid its parity wherever they could else have its length and year.
    """

    def draw(self, pool: str) -> str:
        if pool in _PERIODS:
            return self._outside(pool, lambda: str(_spread(self.rng, *_PERIODS[pool])))
        if pool == "order_prefix":
            return self._outside(pool, lambda: letters(self.rng, 1, 3, _CAPITALS))
        if pool == "product" and self.lang == "en" and chance(self.rng, 0.35):
            words = [pick(self.rng, values("en.product", "tune")) for _ in range(2)]
            return " ".join((words[0].split()[0], words[1].split()[-1]))
        if pool.startswith("py.") and chance(self.rng, 0.3):
            return self._outside(pool, lambda: syllables(self.rng, 1, 3))
        return Record.draw(self, pool)

    def _outside(self, pool: str, make: Callable[[], str]) -> str:
        """The first of `make` that the gate's pool does not hold."""
        taken = values(pool, "gate")
        return next(text for text in iter(make, None) if text not in taken)

    def serial(self, digits: int) -> str:
        length = digits + pick(self.rng, (-1, 0, 0, 0, 1, 2))
        number = between(self.rng, 10 ** (length - 1), 10**length - 2)
        return str(self.parity(number) if length == digits else number)

    def date(self, first_year: int = 2024, last_year: int = 2028) -> Date:
        """Any day of other years, even days of the years in which the gate has its odd ones."""
        if chance(self.rng, 0.2):
            return Record.date(self, first_year, last_year)
        year = pick(self.rng, (*range(1996, 2024), *range(2029, 2042)))
        return Date(year, between(self.rng, 1, 12), between(self.rng, 1, 28))

    def amount(self, low: int, high: int) -> int:
        """Any sum but the gate's, whose tens are odd and whose ones are zero."""
        number = _spread(self.rng, 200, 6_000_000)
        if chance(self.rng, 0.5):
            number -= number % pick(self.rng, (10, 100, 1000)) if number > 2000 else 0
        return number + 10 if number % 20 == 10 else number

    def price(self) -> str:
        whole, cents = between(self.rng, 2, 2999), between(self.rng, 1, 9)
        currency = self.said.get("currency", "EUR")
        text = f"{whole}.{between(self.rng, 0, 9)}{cents}"
        return f"{text}\u5143" if self.lang == "zh" else f"{currency} {text}"

    def name(self) -> str:
        if self.lang == "zh":
            count = between(self.rng, 2, 4)
            made = lambda: "".join(pick(self.rng, _HANZI) for _ in range(count))  # noqa: E731
            return self._outside("zh.start", made)
        kind = self.rng.random()
        if kind < 0.15:
            return Record.name(self)
        if kind < 0.25:
            return letters(self.rng, 2, 4, _CAPITALS)
        said = syllables(self.rng, 2, 4).title()
        if kind < 0.45:
            joint = pick(self.rng, (" ", "-", " & ", ""))
            said += joint + syllables(self.rng, 1, 3).title()
        return said

    def address(self) -> str:
        number = between(self.rng, 1, 2400)
        if self.lang == "zh":
            return f"{self.draw('city')}{self.draw('street')}{number}\u53f7"
        return f"{number} {self.name()} {self.draw('street')}, {self.draw('city')}"

    def person(self) -> str:
        if self.lang == "zh":
            return Record.person(self)
        first = syllables(self.rng, 2, 3).title() if chance(self.rng, 0.5) else self.draw("first")
        return f"{first} {self.name()}"

    def order(self) -> str:
        joint = pick(self.rng, ("-", "-", "-", "-", "", "/"))
        return f"{self.draw('order_prefix')}{joint}{self.serial(6)}"


def _spread(rng: Random, low: int, high: int) -> int:
    """A whole number whose logarithm is even between those of low and high."""
    return round(low * (high / low) ** rng.random())


def letters(rng: Random, fewest: int, most: int, alphabet: str) -> str:
    """A random word of `fewest` to `most` characters."""
    return "".join(pick(rng, alphabet) for _ in range(between(rng, fewest, most)))


def syllables(rng: Random, fewest: int, most: int) -> str:
    """A word that can be spoken: `tralmo`, `quen`."""
    parts = [
        pick(rng, _ONSETS) + pick(rng, _VOWELS) + pick(rng, _CODAS)
        for _ in range(between(rng, fewest, most))
    ]
    return "".join(parts)


def new_record(rng: Random, half: Half, lang: Lang) -> Record:
    """A record with what every kind of document needs."""
    kind = WideRecord if half == "tune" else Record
    record = kind(rng=rng, half=half, lang=lang)
    record.date_style = "zh" if lang == "zh" else pick(rng, ("iso", "dmy", "mdy"))
    record.spell_numbers = lang == "en" and chance(rng, 0.35) and half != "tune"
    currency = "CNY" if lang == "zh" else record.draw("currency")
    record.said |= {"currency": currency, "currency_name": _CURRENCY_NAMES.get(currency, currency)}
    record.set_dates(record.date(2024, 2027))
    record.said |= {"city": record.draw("city"), "city2": record.draw("city")}
    return record
