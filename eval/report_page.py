"""report.html: the evaluation on one self-contained page, made from report.json.

Style and pictures lie in the file, there is no script (filters are style too), and nothing is
fetched. `evaluate report` makes it anew. Knows no model and measures nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eval import charts, figures, report_layer1, report_tasks
from eval.charts_lines import Curve, Ladder, Point, curves, ladders
from eval.checks.catalogue import TASK_METRICS
from eval.marking import marked
from eval.measurement import format_distance
from eval.provenance import provenance
from eval.review.verdict import State, review_of, state

# Items shown with both answers: the rest is in report.json.
MOST_ITEMS = 60
WORST = 5
_LAYER_1 = frozenset(
    {"perplexity_ratio", "kl_mean", "kl_p99", "top1_agreement", "kl_drift", "nll_drift"}
)
_LOAD = ("load_text_agreement", "load_check_agreement")
_BADGE_WORDS: dict[State, str] = {
    "none": "not asked", "pending": "pending", "pass": "passed", "fail": "FAILED",
    "inconclusive": "undecided",
}  # fmt: skip
_PLAIN = {
    "perplexity_ratio": "Unseen text is predicted worse",
    "kl_mean": "Token probabilities moved",
    "kl_p99": "At the worst 1 % of tokens they moved far",
    "kl_drift": "The error grows along a text",
    "nll_drift": "Late in a text more is lost than early",
    "top1_agreement": "The likeliest next token often changed",
}
_RUNGS = ("Median KLD", "90.0% KLD", "95.0% KLD", "99.0% KLD", "99.9% KLD", "Maximum KLD")


@dataclass(frozen=True, slots=True, kw_only=True)
class Badge:
    """One of the three layers: its name, what it found (a CSS class, a word), and a few words."""

    name: str
    state: State
    words: str

    @property
    def word(self) -> str:
        """The state for who does not see its colour."""
        return _BADGE_WORDS[self.state]


def to_html(data: Mapping[str, Any]) -> str:
    """The page. data: report.json's values."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("report.html.j2").render(
        data=data,
        name=Path(data["artifact"]["path"]).name,
        badges=badges(data),
        worst=worst(data),
        sizes=_sizes(data.get("sizes")),
        speed=_speed(data.get("speed")),
        forest=Markup(charts.forest(charts.bars(data["findings"], data["measurements"]))),
        rows=[_row(finding, data["measurements"]) for finding in data["findings"]],
        domains=_domains(data),
        load=[_loaded(data["measurements"][m]) for m in _LOAD if m in data["measurements"]],
        provenance=provenance(data),
        **_layer1(data),
        **_tasks(data),
        **_answers(data["items"]),
    )


def badges(data: Mapping[str, Any]) -> tuple[Badge, Badge, Badge]:
    """Divergence, tasks, people."""
    first = [f for f in data["findings"] if f["metric"] in _LAYER_1]
    second = [f for f in data["findings"] if f["metric"] not in _LAYER_1]
    return _badge("1 Divergence", first), _badge("2 Tasks and format", second), _people(data)


def _badge(name: str, findings: Sequence[Mapping[str, Any]]) -> Badge:
    if not findings:
        return Badge(name=name, state="none", words="no limit asks about it")
    count = Counter(f["outcome"] for f in findings)
    open_ = sum(f["outcome"] == "inconclusive" and f["required"] for f in findings)
    words = f"{count['pass']} of {len(findings)} limits kept"
    if count["fail"]:
        words += f", {count['fail']} broken"
    if count["inconclusive"]:
        words += f", {count['inconclusive']} undecided"
    return Badge(
        name=name, state="fail" if count["fail"] else "inconclusive" if open_ else "pass",
        words=words,
    )  # fmt: skip


def _people(data: Mapping[str, Any]) -> Badge:
    found, review = state(data), review_of(data)
    words = {
        "none": "the gates do not demand a review (evaluate review pack)",
        "pending": "nobody compared the answers yet (evaluate review pack)",
    }.get(found, "")
    if review is not None:
        words = str(review["summary"])
    elif not data["answers"]["num_differing"]:
        words = "all answers are the base's: nothing to compare"
    return Badge(name="3 People", state=found, words=words)


def worst(data: Mapping[str, Any]) -> list[str]:
    """At most five sentences: what broke its limit, the furthest beyond it first, then people's
    reasons, then what is suspected."""
    measured = data["measurements"]

    def beyond(finding: Mapping[str, Any]) -> float:
        m = charts.measurement_of(finding, measured)
        share = None
        if m["estimate"] is not None:
            share = charts.share_of_limit(m["estimate"], m["unit"], finding["limit"])
        return -1e9 if share is None else -share

    broken = sorted((f for f in data["findings"] if f["outcome"] == "fail"), key=beyond)
    kept = sorted((f for f in data["findings"] if _got_worse(f, measured)), key=beyond)
    people = [
        f"People: {answer['reason']}"
        for answer in (data.get("review") or {}).get("answers", ())
        if answer["outcome"] == "fail"
    ]
    if data.get("review") is None and data.get("rejected_before") is not None:
        people = [f"People: {data['rejected_before']['summary']}"]
    said = [[_in_words(f, charts.measurement_of(f, measured)) for f in fs] for fs in (broken, kept)]
    return [*people, *said[0], *said[1]][:WORST]


def _got_worse(finding: Mapping[str, Any], measured: Mapping[str, Any]) -> bool:
    """Within its limit, or undecided, but worse than the base."""
    m = charts.measurement_of(finding, measured)
    if finding["outcome"] == "fail" or m["estimate"] is None:
        return False
    share = charts.share_of_limit(m["estimate"], m["unit"], finding["limit"])
    return share is not None and share > 0


def _in_words(finding: Mapping[str, Any], m: Mapping[str, Any]) -> str:
    """`Schema valid: 98.0% -> 82.0%, 64 lost and 0 gained of 400; ...`"""
    mark = "" if finding["outcome"] == "fail" else f" ({_said(finding)})"
    if m["unit"] != "drop" or m["base"] is None or m["candidate"] is None:
        plain = _PLAIN.get(finding["metric"])
        return (f"{plain}. " if plain else "") + str(finding["reason"]) + mark
    change = f"{m['base']:.1%} → {m['candidate']:.1%}"
    return f"{finding['label']}: {change}; {finding['reason'].partition(': ')[2]}{mark}"


def _said(finding: Mapping[str, Any]) -> str:
    return {"pass": "within its limit"}.get(finding["outcome"], "undecided")


def _row(finding: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, str]:
    m = charts.measurement_of(finding, measured)
    noise = finding.get("noise_floor")
    return {
        "label": finding["label"],
        "base": figures.value(m["base"], m["unit"]),
        "candidate": figures.value(m["candidate"], m["unit"]),
        "difference": figures.of_measurement(m),
        "limit": figures.limit_of(finding),
        "noise": "" if noise is None else format_distance(noise, m["unit"]).removesuffix(" nats"),
        "outcome": finding["outcome"],
        "word": figures.outcome(finding["outcome"], required=finding["required"]),
        "reason": finding["reason"],
        "alarm": "regression suspected" if finding["regression_suspected"] else "",
    }


def _domains(data: Mapping[str, Any]) -> dict[str, Any]:
    """Judged metrics (rows) by domain (columns), the cells as text."""
    judged = {finding["metric"] for finding in data["findings"]}
    measured = {name: m for name, m in data["measurements"].items() if name in judged}
    names = sorted({domain for m in measured.values() for domain in m.get("domains", {})})
    return {
        "names": names,
        "rows": [
            (
                m["label"],
                [
                    figures.of_measurement(m["domains"][n]) if n in m["domains"] else ""
                    for n in names
                ],
            )
            for m in measured.values()
            if m.get("domains")
        ],
    }


def _loaded(m: Mapping[str, Any]) -> tuple[str, str, str]:
    return m["label"], figures.of_measurement(m), f"{m['num_items']:,}"


def _layer1(data: Mapping[str, Any]) -> dict[str, Any]:
    """The ladder of each domain, every statistic, and the error along a text."""
    layer1 = data["layer1"]
    rows = [
        Ladder(
            label=f"{domain} ({part['num_tokens']:,})",
            steps={name: part[name] or 0.0 for name in _RUNGS}
            | {"Mean KLD": part["Mean KLD"]["estimate"] or 0.0},
        )
        for domain, part in layer1["domains"].items()
    ]
    has_any = any(nats > 0 for row in rows for nats in row.steps.values())
    return {
        "ladders": Markup(ladders(rows)) if has_any else "",
        "statistics": [
            (name, [report_layer1.said(part[name]) for part in layer1["domains"].values()])
            for name in report_layer1.names(layer1["domains"])
        ],
        "places": [
            chart
            for where, axis in (
                ("positions", "place in the window"), ("lengths", "tokens read before")
            )
            for chart in _along(layer1[where], axis)
        ],
        "place_rows": [_place_row(p) for p in (*layer1["positions"], *layer1["lengths"])],
        "slope": report_layer1.slope(layer1),
    }  # fmt: skip


def _place_row(part: Mapping[str, Any]) -> list[str]:
    found = (figures.bounds(part[name]) for name in report_layer1.PLACED)
    return [part["label"], f"{part['num_tokens']:,}", *found]


def _along(parts: Sequence[Mapping[str, Any]], axis: str) -> list[tuple[str, Markup]]:
    """Mean KLD and the difference in nats per token, by place; nothing of a single place."""
    if len(parts) < 2:
        return []
    labels = [part["label"].removesuffix(" tokens").removesuffix(" %") for part in parts]
    return [
        (f"{title}, by {axis}", Markup(curves(title, labels, [_placed(parts, name)], axis=axis)))
        for name, title in zip(report_layer1.PLACED, ("Mean KLD", "Loss in nats"), strict=True)
    ]


def _placed(parts: Sequence[Mapping[str, Any]], name: str) -> Curve:
    points = [None if p[name]["estimate"] is None else _point(p[name]) for p in parts]
    return Curve(label=name, points=points)


def _point(found: Mapping[str, Any]) -> Point:
    return Point(value=found["estimate"], lower=found["lower"], upper=found["upper"])


def _tasks(data: Mapping[str, Any]) -> dict[str, Any]:
    items, measured = data["items"], data["measurements"]
    lengths = report_tasks.by_length(items, measured)
    matrices = report_tasks.matrices(measured)
    return {
        "matrices": [m for m in matrices if m.lost or m.gained],
        "unchanged": [m for m in matrices if not m.lost and not m.gained],
        "heat": report_tasks.heat_map(items),
        "paths": report_tasks.paths(items),
        "by_length": [(c["label"], Markup(c["svg"])) for c in lengths],
        "parting": Markup(report_tasks.parting(items)),
    }


def _answers(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    shown = [_shown(item) for item in items]
    changed = sorted((i for i in shown if i["change"] != "same"), key=_importance)
    kept = changed[:MOST_ITEMS]
    return {
        "items": kept,
        "num_left_out": len(changed) - len(kept),
        "num_same": len(shown) - len(changed),
        "changes": Counter(item["change"] for item in kept),
        "sources": list(report_tasks.sources(kept).items()),
        "tasks": list(Counter(item["task"] for item in kept).items()),
    }


def _shown(item: Mapping[str, Any]) -> dict[str, Any]:
    base, ours = item["base"], item["candidate"]
    quality = [_quality(answer["values"]) for answer in (base, ours)]
    change = "same" if base["text"] == ours["text"] else "changed"
    if quality[0] != quality[1]:
        change = "lost" if quality[1] < quality[0] else "gained"
    before, after = marked(base["text"], ours["text"])
    return {
        **item, "change": change, "base_html": before, "candidate_html": after,
        "problem": ours["problem"], "gold_text": item.get("gold_text") or item.get("gold"),
        "messages": item.get("messages", []), "task": ", ".join(item.get("checks", ())) or "any",
    }  # fmt: skip


def _quality(values: Mapping[str, Any]) -> list[float]:
    """What an answer achieved, the most important metric first."""
    found = (values[name] for name in TASK_METRICS if name in values)
    return [value[0] if isinstance(value, list | tuple) else value for value in found]


def _importance(item: Mapping[str, Any]) -> tuple[int, str]:
    return (("lost", "gained", "changed").index(item["change"]), item["id"])


def _sizes(sizes: Mapping[str, int] | None) -> dict[str, str] | None:
    if not sizes or not sizes["artifact_bytes"]:
        return None
    ours, dense = sizes["artifact_bytes"], sizes["dense_bytes"]
    return {
        "artifact": figures.num_bytes(ours), "dense": figures.num_bytes(dense),
        "times": f"{dense / ours:.1f}",
    }  # fmt: skip


def _speed(speed: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Throughput and latencies as `runtime bench` measured them, and the gain over the base."""
    if not speed:
        return None
    ours, base = speed["candidate"], speed.get("base")
    times = ours["output_tok_s"] / base["output_tok_s"] if base else None
    sides = [("candidate", ours)] + ([("base", base)] if base else [])
    return {
        "candidate": f"{ours['output_tok_s']:,.1f}",
        "base": f"{base['output_tok_s']:,.1f}" if base else "",
        "times": "" if times is None else f"{times:.2f}",
        "concurrency": ours["concurrency"],
        "rows": [
            (
                who, f"{run['output_tok_s']:,.1f}",
                *(f"{run[key][p]:,.1f}" for key in ("ttft_ms", "tpot_ms") for p in ("p50", "p99")),
            )
            for who, run in sides
        ],
    }  # fmt: skip
