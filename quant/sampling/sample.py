"""`quantize sample`: logs -> a calibration set. Two passes, so that millions of rows fit in memory.

The first pass keeps a signature, a length and a place of every row, not its text. Then near
duplicates go, each stratum gets its quota, and rows are drawn by a hash of seed and content: their
order, and that of files, does not matter. The second pass reads the drawn rows (and a reserve),
drops what the gate holds and what is alike after all, redacts, and writes at once or not at all.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from quant.artifact.durable import write_file
from quant.artifact.redact import redact, secrets
from quant.artifact.text_runs import normalised
from quant.calibration_rows import OF_LOGS
from quant.errors import CalibrationError
from quant.sampling.alike import (
    PERMUTATIONS,
    jaccard,
    near_duplicates,
    shingles,
    signature,
)
from quant.sampling.leakage import find_leaks, read_gate
from quant.sampling.readers import TEXT_SUFFIXES, find_files, read_items, stem
from quant.sampling.records import calibration_row, strings, system_text
from quant.sampling.report import SampleReport, StratumReport
from quant.sampling.strata import BUCKETS, Balance, Stratum, allot, bucket

BAD_SHARE = 0.01
_FIRST_ROWS = 200
_SHOWN_FAULTS = 5
_PREFIX = 400
_COMMON_PREFIX = 0.05
_EVERY = 500
_UNSPACED_FROM = 0x2E80
Pii = Literal["on", "report", "off"]
Length = Callable[[Mapping[str, Any]], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSettings:
    """What to draw. tokens, when given, decides instead of samples. similarity 1 drops only rows
    that are equal; pii: replace findings, only count them, or do not look."""

    samples: int = 256
    tokens: int | None = None
    seed: int = 0
    similarity: float = 0.8
    long_share: float = 0.25
    balance: Balance = "traffic"
    pii: Pii = "on"
    text_field: str | None = None
    source_field: str | None = None
    split_text: bool = False
    skip_bad: bool = False
    drop_leaks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    key: bytes
    file: int
    number: int
    stratum: Stratum
    tokens: int
    prefix: bytes
    prefix_tokens: int


@dataclass(slots=True)
class _Scan:
    """What the first pass keeps: one place and one signature per distinct content."""

    places: list[_Place] = field(default_factory=list)
    signatures: bytearray = field(default_factory=bytearray)
    seen: dict[bytes, int] = field(default_factory=dict)
    rows: int = 0
    blank: int = 0
    bad: int = 0
    equal: int = 0
    faults: list[str] = field(default_factory=list)
    lost: list[tuple[Path, CalibrationError]] = field(default_factory=list)  # nothing usable in it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    place: _Place
    row: dict[str, Any]
    where: str


def draw_sample(
    paths: Sequence[Path],
    out: Path,
    settings: SampleSettings,
    *,
    against: Sequence[Path] = (),
    length: Length | None = None,
    progress: Callable[[str, int], None] = lambda step, rows: None,
) -> SampleReport:
    """Write `out` (JSONL) and `out` with the suffix .report.json; return that report.

    length: tokens of a row; None estimates them. Raises CalibrationError (nothing is written) for
    unreadable or too many malformed rows, no usable row, and rows that the gate holds too.
    """
    files = find_files(paths)
    if any(path.resolve() == out.resolve() for path in files):
        raise CalibrationError(f"{out}: is one of the inputs; name another --out")
    if out.is_dir():
        raise CalibrationError(f"{out}: is a folder; name a file for --out")
    if out.suffix.lower() in OF_LOGS:
        raise CalibrationError(f"{out}: what is written is JSONL; end --out in .jsonl")
    gate = read_gate(against) if against else []
    scan = _scan(files, settings, length or estimated_tokens, progress)
    _check_faults(scan, files, settings)
    distinct = _without_near(scan, settings)
    drawn, quota, leaks = _draw(files, distinct, gate, settings, progress)
    kept = _pick(drawn, quota, settings)
    rows, counts, flagged = _redacted(kept, settings)
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    if out.suffix == ".gz":  # what is called so is unpacked where it is read
        data = gzip.compress(data, mtime=0)
    report = _report(files, scan, distinct, kept, settings, leaks, counts, flagged, data)
    write_file(report_path(out), report.to_json().encode())
    write_file(out, data)
    return report


def report_path(out: Path) -> Path:
    """calib.jsonl -> calib.report.json."""
    return out.with_suffix(".report.json")


def estimated_tokens(row: Mapping[str, Any]) -> int:
    """A character of Chinese or the like counts 0.7 tokens, any other 0.25; 4 for each message."""
    total = 4.0 * len(row.get("messages", ()))
    for text in (*strings(row), system_text(row)):
        total += _text_tokens(text)
    return max(1, round(total))


def _text_tokens(text: str) -> float:
    wide = 0 if text.isascii() else sum(ord(c) >= _UNSPACED_FROM for c in text)
    return 0.25 * (len(text) - wide) + 0.7 * wide


def _rows(
    path: Path, settings: SampleSettings
) -> Iterator[tuple[str, dict[str, Any] | CalibrationError | None]]:
    for where, item in read_items(path, split_text=settings.split_text):
        if item is None or isinstance(item, CalibrationError):
            yield where, item
            continue
        try:
            yield (
                where,
                calibration_row(
                    item,
                    where,
                    stem(path),
                    text_field=None if path.suffix in TEXT_SUFFIXES else settings.text_field,
                    source_field=settings.source_field,
                ),
            )
        except CalibrationError as error:
            yield where, error


def _scan(
    files: Sequence[Path],
    settings: SampleSettings,
    length: Length,
    progress: Callable[[str, int], None],
) -> _Scan:
    scan = _Scan()
    for index, path in enumerate(files):
        usable, first = scan.rows - scan.bad, None
        for number, (_, row) in enumerate(_rows(path, settings)):
            scan.rows += 1
            if scan.rows % _EVERY == 0:
                progress("reading", scan.rows)
            if row is None:
                scan.blank += 1
            elif isinstance(row, CalibrationError):
                first = first or row
                _note_fault(scan, row, settings)
            else:
                _keep(scan, row, index, number, settings.seed, length)
        if first is not None and scan.rows - scan.bad == usable:
            scan.lost.append((path, first))
    return scan


def _note_fault(scan: _Scan, fault: CalibrationError, settings: SampleSettings) -> None:
    scan.bad += 1
    if len(scan.faults) < _SHOWN_FAULTS:
        scan.faults.append(str(fault))
    if not settings.skip_bad and scan.bad == scan.rows >= _FIRST_ROWS:
        raise CalibrationError(f"{scan.faults[0]} (and so are all of the first {scan.bad} rows)")


def _keep(
    scan: _Scan, row: dict[str, Any], file: int, number: int, seed: int, length: Length
) -> None:
    text = normalised("\n".join(strings(row)))
    content = hashlib.blake2b(text.encode(), digest_size=16).digest()
    key = _key(row, seed)
    known = scan.seen.get(content)
    if known is not None:
        scan.equal += 1
        if scan.places[known].key <= key:
            return
    tokens = length(row)
    system = system_text(row)
    prefix = system or "\n".join(strings(row))[:_PREFIX]
    place = _Place(
        key=key,
        file=file,
        number=number,
        stratum=(row["source"], bucket(tokens)),
        tokens=tokens,
        prefix=hashlib.blake2b(prefix.encode(), digest_size=8).digest(),
        prefix_tokens=min(tokens, round(_text_tokens(prefix))),
    )
    if known is not None:
        scan.places[known] = place
        return
    scan.seen[content] = len(scan.places)
    scan.places.append(place)
    scan.signatures += signature(shingles(text)).tobytes()


def _key(row: Mapping[str, Any], seed: int) -> bytes:
    data = json.dumps(row, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(f"{seed}\0{data}".encode(), digest_size=16).digest()


def _check_faults(scan: _Scan, files: Sequence[Path], settings: SampleSettings) -> None:
    if not scan.places:
        names = ", ".join(map(str, files))
        first = f"; the first: {scan.faults[0]}" if scan.faults else ""
        raise CalibrationError(
            f"{names}: no usable row: of {scan.rows} rows {scan.blank} are blank and {scan.bad} "
            f"malformed{first}"
        )
    if scan.lost and not settings.skip_bad:
        more = f" (and {len(scan.lost) - 1} more such files)" if len(scan.lost) > 1 else ""
        raise CalibrationError(
            f"{scan.lost[0][0]}: no row of it can be used{more}; the first: {scan.lost[0][1]}. "
            "Leave it out of --from, or give --skip-bad"
        )
    if scan.bad > BAD_SHARE * scan.rows and not settings.skip_bad:
        raise CalibrationError(
            f"{scan.bad} of {scan.rows} rows are malformed (more than {BAD_SHARE:.0%}); the first: "
            f"{scan.faults[0]}. Mend them, or give --skip-bad to leave them out"
        )


def _without_near(scan: _Scan, settings: SampleSettings) -> list[_Place]:
    """Distinct places by key, near duplicates of earlier ones left out."""
    order = sorted(range(len(scan.places)), key=lambda i: scan.places[i].key)
    ranked = [scan.places[i] for i in order]
    if settings.similarity >= 1:
        return ranked
    matrix = np.frombuffer(scan.signatures, np.uint16).reshape(-1, PERMUTATIONS)[order]
    gone = near_duplicates(matrix, settings.similarity)
    return [place for place, is_gone in zip(ranked, gone, strict=True) if not is_gone]


def _quota(places: Sequence[_Place], settings: SampleSettings) -> dict[Stratum, int]:
    counts = Counter(place.stratum for place in places)

    def allotted(total: int) -> dict[Stratum, int]:
        return allot(counts, total, long_share=settings.long_share, balance=settings.balance)

    if settings.tokens is None:
        return allotted(settings.samples)
    sums = {s: np.cumsum([p.tokens for p in places if p.stratum == s]) for s in counts}

    def used(rows: int) -> int:
        return sum(int(sums[s][n - 1]) for s, n in allotted(rows).items() if n)

    low, high = 1, len(places)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if used(middle) <= settings.tokens else (low, middle - 1)
    if used(low) > settings.tokens:
        raise CalibrationError(
            f"--tokens {settings.tokens:,} does not hold the first row of this draw, which has "
            f"{used(low):,}; give more, or --long-share 0 if short rows will do"
        )
    return allotted(low)


def _with_reserve(places: Sequence[_Place], quota: Mapping[Stratum, int]) -> list[_Place]:
    """The first of each stratum, and some more for those that fall out when their text is read."""
    taken: Counter[Stratum] = Counter()
    drawn = []
    for place in places:
        wanted = quota[place.stratum]
        if wanted and taken[place.stratum] < wanted + max(8, wanted // 2):
            taken[place.stratum] += 1
            drawn.append(place)
    return drawn


def _read(
    files: Sequence[Path],
    places: Sequence[_Place],
    settings: SampleSettings,
    progress: Callable[[str, int], None],
) -> list[_Drawn]:
    """The texts of `places`, in their order."""
    wanted: dict[int, dict[int, _Place]] = defaultdict(dict)
    for place in places:
        wanted[place.file][place.number] = place
    found: dict[bytes, _Drawn] = {}
    for index, numbers in sorted(wanted.items()):
        for number, (where, row) in enumerate(_rows(files[index], settings)):
            if number % _EVERY == 0:
                progress("drawing", number)
            if number not in numbers:
                continue
            place = numbers[number]
            if not isinstance(row, dict) or _key(row, settings.seed) != place.key:
                raise CalibrationError(f"{where}: the file changed while it was being read")
            found[place.key] = _Drawn(place=place, row=row, where=where)
            if len(found) == len(places):
                break
    return [found[place.key] for place in places]


def _draw(
    files: Sequence[Path],
    distinct: Sequence[_Place],
    gate: Sequence[Any],
    settings: SampleSettings,
    progress: Callable[[str, int], None],
) -> tuple[list[_Drawn], dict[Stratum, int], int]:
    """Rows to pick from, the quota of each stratum, and how many the gate holds and fell out.

    Where more of them do than the reserve makes up for, others are read in their place.
    """
    left, leaks = list(distinct), 0
    while left:
        quota = _quota(left, settings)
        drawn = _read(files, _with_reserve(left, quota), settings, progress)
        drawn, gone = _without_leaks(drawn, gate, settings)
        leaks += len(gone)
        if not gone or len(drawn) >= sum(quota.values()):
            return drawn, quota, leaks
        left = [place for place in left if place.key not in gone]
    raise CalibrationError(f"nothing is left to draw: the gate holds all {leaks} distinct rows too")


def _without_leaks(
    drawn: list[_Drawn], gate: Sequence[Any], settings: SampleSettings
) -> tuple[list[_Drawn], set[bytes]]:
    """The rows that the gate does not hold, and the keys of the others."""
    if not gate:
        return drawn, set()
    texts = ["\n".join((system_text(d.row), *strings(d.row))) for d in drawn]
    leaks = find_leaks([d.row for d in drawn], texts, gate)
    if leaks and not settings.drop_leaks:
        shown = "; ".join(
            f"{drawn[leak.row].where} and {leak.gate} ({leak.sign})" for leak in leaks[:3]
        )
        raise CalibrationError(
            f"{len(leaks)} of {len(drawn)} rows repeat the gate set: {shown}. What calibrates must "
            "not judge: take these rows out of one of the two, or give --drop-leaks"
        )
    gone = {drawn[leak.row].place.key for leak in leaks}
    return [d for d in drawn if d.place.key not in gone], gone


def _pick(
    drawn: Sequence[_Drawn], quota: Mapping[Stratum, int], settings: SampleSettings
) -> list[_Drawn]:
    """The quota of each stratum, no two alike by exact Jaccard; gaps go to other strata."""
    unlike = list(drawn) if settings.similarity >= 1 else _unlike(drawn, settings.similarity)
    left = dict(quota)
    chosen: list[_Drawn] = []
    spare: list[_Drawn] = []
    for d in unlike:
        left[d.place.stratum] -= 1
        (chosen if left[d.place.stratum] >= 0 else spare).append(d)
    if settings.tokens is None:
        chosen += spare[: sum(quota.values()) - len(chosen)]
    ranked = sorted(chosen, key=lambda d: d.place.key)
    return ranked if settings.tokens is None else list(_that_fit(ranked, settings.tokens))


def _that_fit(drawn: Sequence[_Drawn], tokens: int) -> Iterator[_Drawn]:
    """All that fit into `tokens`: what took the place of a row that fell out may be longer."""
    for d in drawn:
        if d.place.tokens <= tokens:
            tokens -= d.place.tokens
            yield d


def _unlike(drawn: Sequence[_Drawn], threshold: float) -> list[_Drawn]:
    """Those that are alike to none before; signatures say where an exact figure is needed."""
    kept: list[_Drawn] = []
    sets: list[Any] = []
    signatures = np.zeros((len(drawn), PERMUTATIONS), np.uint16)
    for d in drawn:
        own = shingles(normalised("\n".join(strings(d.row))))
        mark = signature(own)
        estimates = (signatures[: len(kept)] == mark).mean(axis=1)
        # Five standard deviations of an estimate by 128 draws are at most 0.22.
        near = np.flatnonzero(estimates >= threshold - 0.22)
        if not any(jaccard(own, sets[i]) >= threshold for i in near):
            signatures[len(kept)] = mark
            kept.append(d)
            sets.append(own)
    return kept


def _redacted(
    kept: Sequence[_Drawn], settings: SampleSettings
) -> tuple[list[dict[str, Any]], Counter[str], int]:
    """Rows as written, findings by kind, and rows that still hold a key or a password."""
    total: Counter[str] = Counter()
    rows = []
    flagged = 0
    for d in kept:
        clean, counts = redact(d.row)
        flagged += settings.pii != "on" and secrets(counts) > 0
        rows.append(clean if settings.pii == "on" else d.row)
        if settings.pii != "off":
            total += counts
    return rows, total, flagged


def _report(
    files: Sequence[Path],
    scan: _Scan,
    distinct: Sequence[_Place],
    kept: Sequence[_Drawn],
    settings: SampleSettings,
    leaks: int,
    counts: Counter[str],
    flagged: int,
    data: bytes,
) -> SampleReport:
    places = [d.place for d in kept]
    available, drawn = Counter(p.stratum for p in distinct), Counter(p.stratum for p in places)
    strata = tuple(
        StratumReport(
            source=source,
            up_to=BUCKETS[index] if index < len(BUCKETS) else None,
            rows=available[source, index],
            drawn=drawn[source, index],
            tokens=sum(p.tokens for p in places if p.stratum == (source, index)),
        )
        for source, index in sorted(available)
    )
    return SampleReport(
        inputs=dict(sorted((path.name, _sha256(path)) for path in files)),
        seed=settings.seed,
        pii=settings.pii,
        rows=scan.rows,
        blank=scan.blank,
        malformed=scan.bad,
        faults=tuple(scan.faults),
        duplicates=scan.equal,
        near_duplicates=len(scan.places) - len(distinct),
        leaks_dropped=leaks,
        asked=settings.samples if settings.tokens is None else 0,
        kept=len(kept),
        tokens=sum(p.tokens for p in places),
        template_share=_template_share(places),
        strata=strata,
        redacted=dict(sorted(counts.items())),
        rows_with_secrets=flagged,
        sha256=hashlib.sha256(data).hexdigest(),
    )


def _template_share(places: Sequence[_Place]) -> float:
    """Part of the tokens that stands in beginnings which many of the rows share."""
    common = Counter(place.prefix for place in places)
    least = max(2, _COMMON_PREFIX * len(places))
    shared = sum(p.prefix_tokens for p in places if common[p.prefix] >= least)
    return shared / max(1, sum(p.tokens for p in places))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
