"""report.html: the evaluation on one self-contained page, made from report.json.

Style and pictures lie in the file, there is no script, and nothing is fetched. `evaluate report`
makes it anew. Knows no model and measures nothing.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eval import charts
from eval.checks.catalogue import TASK_METRICS
from eval.measurement import format_interval

# Items shown with both answers, and fields named: the rest is in report.json.
MOST_ITEMS, MOST_FIELDS = 60, 10
WORST = 5
_LAYER_1 = frozenset({"perplexity_ratio", "kl_mean", "top1_agreement"})
_WORDS = {"pass": "pass", "fail": "FAIL", "inconclusive": "undecided"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Badge:
    """One of the three layers: its name, what it found (a CSS class), and a few words."""

    name: str
    state: str
    words: str


def to_html(data: Mapping[str, Any]) -> str:
    """The page. data: report.json's values."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    items = [_shown(item) for item in data["items"]]
    changed = sorted((i for i in items if i["change"] != "same"), key=_importance)
    page = environment.get_template("report.html.j2")
    return page.render(
        data=data,
        name=Path(data["artifact"]["path"]).name,
        badges=badges(data),
        worst=worst(data),
        sizes=_sizes(data.get("sizes")),
        forest=Markup(charts.forest(charts.bars(data["findings"], data["measurements"]))),
        ladder=Markup(charts.ladder(_steps(data["kld"]))),
        rows=[_row(finding, data["measurements"]) for finding in data["findings"]],
        domains=_domains(data["measurements"]),
        matrices=_matrices(data["measurements"]),
        fields=_fields(data["items"]),
        items=changed[:MOST_ITEMS],
        num_left_out=max(0, len(changed) - MOST_ITEMS),
        num_same=len(items) - len(changed),
        provenance=_provenance(data),
    )


def badges(data: Mapping[str, Any]) -> tuple[Badge, Badge, Badge]:
    """Divergence, tasks, people."""
    first = [f for f in data["findings"] if f["metric"] in _LAYER_1]
    second = [f for f in data["findings"] if f["metric"] not in _LAYER_1]
    return (
        _badge("1 Divergence", first),
        _badge("2 Tasks and format", second),
        _reviewed(data.get("review")),
    )


def _badge(name: str, findings: Sequence[Mapping[str, Any]]) -> Badge:
    if not findings:
        return Badge(name=name, state="none", words="not judged")
    count = Counter(f["outcome"] for f in findings)
    open_ = sum(f["outcome"] == "inconclusive" and f["required"] for f in findings)
    state = "fail" if count["fail"] else "inconclusive" if open_ else "pass"
    words = f"{count['pass']} of {len(findings)} within their limits"
    if count["fail"]:
        words += f", {count['fail']} beyond"
    return Badge(name=name, state=state, words=words)


def _reviewed(review: Mapping[str, Any] | None) -> Badge:
    name = "3 People"
    if review is None:
        return Badge(name=name, state="none", words="not reviewed (evaluate review pack)")
    state = {"accepted": "pass", "rejected": "fail"}.get(review["verdict"], "inconclusive")
    return Badge(name=name, state=state, words=str(review.get("summary", review["verdict"])))


def worst(data: Mapping[str, Any]) -> list[str]:
    """At most five sentences: what broke its limit, the furthest beyond it first."""
    measured = data["measurements"]

    def beyond(finding: Mapping[str, Any]) -> float:
        m = charts.measurement_of(finding, measured)
        share = None
        if m["estimate"] is not None:
            share = charts.share_of_limit(m["estimate"], m["unit"], finding["limit"])
        return -1e9 if share is None else -share

    broken = [f for f in data["findings"] if f["outcome"] == "fail"]
    ranked = sorted(broken, key=beyond)[:WORST]
    return [_in_words(f, charts.measurement_of(f, measured)) for f in ranked]


def _in_words(finding: Mapping[str, Any], m: Mapping[str, Any]) -> str:
    """`Schema valid: 98.0% -> 82.0%, 64 lost and 0 gained of 400; ...`"""
    if m["unit"] != "drop" or m["base"] is None or m["candidate"] is None:
        return str(finding["reason"])
    change = f"{m['base']:.1%} → {m['candidate']:.1%}"
    return f"{finding['label']}: {change}; {finding['reason'].partition(': ')[2]}"


def _row(finding: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, str]:
    m = charts.measurement_of(finding, measured)
    kind, limit = next(
        (k, v) for k, v in finding["limit"].items() if k in ("max", "min", "max_drop")
    )
    said = {"max": "<= {:g}", "min": ">= {:.0%}"}.get(kind, "> -{:g} pp")
    word = _WORDS[finding["outcome"]]
    return {
        "label": finding["label"],
        "base": _value(m["base"], m["unit"]),
        "candidate": _value(m["candidate"], m["unit"]),
        "difference": difference(m),
        "limit": said.format(limit * 100 if kind == "max_drop" else limit),
        "outcome": finding["outcome"],
        "word": word if finding["required"] else f"({word})",
        "reason": finding["reason"],
        "alarm": "regression suspected" if finding["regression_suspected"] else "",
    }


def _value(number: float | None, unit: str) -> str:
    if number is None:
        return ""
    return f"{number:.1%}" if unit == "drop" else f"{number:.3f}"


def difference(m: Mapping[str, Any]) -> str:
    """What is judged with its interval; a loss has a minus sign."""
    if m["estimate"] is None:
        return ""
    ends = [float("nan") if m[end] is None else m[end] for end in ("lower", "upper")]
    if m["unit"] == "drop":
        return format_interval(-m["estimate"], -ends[1], -ends[0], "drop")
    return format_interval(m["estimate"], ends[0], ends[1], m["unit"]).replace(" nats", "")


def _steps(kld: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The ladder by `llama-perplexity`'s names, the rarest first."""
    percents = sorted(
        (float(key[1:]) for key in kld if key[0] == "p" and key[1:2].isdigit()), reverse=True
    )
    named = [("Maximum KLD", kld["max"])]
    for percent in percents:
        label = "Median KLD" if percent == 50 else f"{percent:.1f}% KLD"
        named.append((label, kld[f"p{percent:g}"]))
    named.append(("Mean KLD", kld["mean"]))
    return [(label, nats) for label, nats in named if nats is not None]


def _domains(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics by domain, the cells as text."""
    names = sorted({domain for m in measured.values() for domain in m.get("domains", {})})
    return {
        "names": names,
        "rows": [
            (m["label"], [difference(m["domains"][n]) if n in m["domains"] else "" for n in names])
            for m in measured.values()
            if m.get("domains")
        ],
    }


def _matrices(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Both right, lost, gained, both wrong, of each metric of pass or fail."""
    found = []
    for m in measured.values():
        if "lost" not in m or m["base"] is None:
            continue
        total = int(m.get("num_items", 0))
        right = round(m["base"] * total)
        found.append(
            {
                "label": m["label"], "both": right - m["lost"], "lost": m["lost"],
                "gained": m["gained"], "neither": total - right - m["gained"],
            }
        )  # fmt: skip
    return found


def _fields(items: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, int]]:
    """(field, wrong in the base, wrong in the candidate), what got worse most first."""
    base: Counter[str] = Counter()
    ours: Counter[str] = Counter()
    for item in items:
        base.update({_top(name) for name in item["base"]["details"].get("wrong_fields", ())})
        ours.update({_top(name) for name in item["candidate"]["details"].get("wrong_fields", ())})
    names = sorted(base | ours, key=lambda name: (base[name] - ours[name], name))
    return [(name, base[name], ours[name]) for name in names[:MOST_FIELDS]]


def _top(field: str) -> str:
    """The field without its places in lists: `columns[2]` is `columns`."""
    return field.partition("[")[0]


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
        "messages": item.get("messages", []),
    }  # fmt: skip


def _quality(values: Mapping[str, Any]) -> list[float]:
    """What an answer achieved, the most important metric first."""
    found = (values[name] for name in TASK_METRICS if name in values)
    return [value[0] if isinstance(value, list | tuple) else value for value in found]


def _importance(item: Mapping[str, Any]) -> tuple[int, str]:
    return (("lost", "gained", "changed").index(item["change"]), item["id"])


def marked(before: str, after: str) -> tuple[Markup, Markup]:
    """Both texts with what differs marked, word by word."""
    first, second = _words(before), _words(after)
    old, new = [], []
    matcher = difflib.SequenceMatcher(a=first, b=second, autojunk=False)
    for kind, i, j, k, m in matcher.get_opcodes():
        gone, come = escape("".join(first[i:j])), escape("".join(second[k:m]))
        is_same = kind == "equal"
        old.append(gone if is_same or not gone else f"<del>{gone}</del>")
        new.append(come if is_same or not come else f"<ins>{come}</ins>")
    return Markup("".join(old)), Markup("".join(new))


def _words(text: str) -> list[str]:
    """Words and the signs between them, at most 2000."""
    words: list[str] = []
    for character in text:
        joins = words and character.isalnum() and words[-1][-1].isalnum()
        if joins and len(words) <= 2000 or len(words) > 2000:
            words[-1] += character
        else:
            words.append(character)
    return words


def _sizes(sizes: Mapping[str, int] | None) -> dict[str, str] | None:
    if not sizes or not sizes["artifact_bytes"]:
        return None
    ours, dense = sizes["artifact_bytes"], sizes["dense_bytes"]
    return {
        "artifact": _bytes(ours), "dense": _bytes(dense), "times": f"{dense / ours:.1f}",
    }  # fmt: skip


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 10**9 else f"{count / 1e6:.0f} MB"


def _provenance(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    artifact, base, method = data["artifact"], data["base"], data["method"]
    schemes = ", ".join(f"{label} x {count}" for label, count in artifact["schemes"].items())
    tools = ", ".join(f"{name} {version}" for name, version in artifact["tools"].items())
    return [
        ("artifact", f"{artifact['path']}, digest {artifact['digest']}"),
        ("recipe, schemes", f"{artifact['recipe']}: {schemes}"),
        ("made with", tools),
        ("base", f"{base['name']}, digest {base['digest']}; {base['description']}"),
        ("candidate", data["numerics"]["description"]),
        ("chat template", str(data["numerics"]["chat_template_sha256"])),
        ("gates", f"{data['gates']['path']}, sha256 {data['gates']['sha256']}"),
        *((name, f"sha256 {digest}") for name, digest in data["suite"]["sha256"].items()),
        ("seed, draws", f"{method['seed']}, {method['draws']:,}"),
        ("perplexity", method["unit"]),
        ("judged", f"{data['judged_at']}, {data['seconds']:.0f} s"),
    ]
