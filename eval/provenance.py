"""Provenance: what was judged, against what, by whom and how, from report.json's values.

All that gate.json binds the verdict to stands in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def provenance(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, value) rows, the artifact first."""
    artifact, base, method = data["artifact"], data["base"], data["method"]
    numerics = data["numerics"]
    return [
        ("artifact", f"{artifact['path']}, digest {artifact['digest']}"),
        ("recipe, schemes", f"{artifact['recipe']}: {_counted(artifact['schemes'])}"),
        ("made with", _pairs(artifact["tools"])),
        ("base", f"{base['name']}, digest {base['digest']}"),
        ("base computed by", base["description"]),
        ("candidate computed by", numerics["description"]),
        ("verdict holds for", _numerics(numerics)),
        *((("engine build", _pairs(data["engine"])),) if data.get("engine") else ()),
        ("gates", f"{data['gates']['path']}, sha256 {data['gates']['sha256']}"),
        ("suite", str(data["suite"]["directory"])),
        *((name, f"sha256 {digest}") for name, digest in data["suite"]["sha256"].items()),
        ("scored", method.get("scope", "")),
        ("perplexity", method["unit"]),
        ("intervals", _intervals(method)),
        ("answers", f"{method.get('decoding', 'greedy')}; {_items(method)}"),
        *_reviewed(data.get("review")),
        ("judged", f"{data['judged_at']}, {data['seconds']:.0f} s"),
    ]


def _pairs(named: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in named.items())


def _counted(schemes: Mapping[str, int]) -> str:
    return ", ".join(f"{label} x {count}" for label, count in schemes.items())


def _numerics(numerics: Mapping[str, Any]) -> str:
    names = ("device_class", "compute_dtype", "kv_cache_dtype", "lm_head_scheme", "num_threads")
    said = [f"{name.replace('_', ' ')} {numerics[name]}" for name in names if name in numerics]
    return ", ".join([*said, f"chat template {numerics['chat_template_sha256']}"])


def _intervals(method: Mapping[str, Any]) -> str:
    return (
        f"one-sided {method['confidence']:.0%} bounds; score test (paired proportions), bootstrap "
        f"over documents and items, {method['draws']:,} draws, seed {method['seed']}"
    )


def _items(method: Mapping[str, Any]) -> str:
    version = method.get("normalisation_version", "?")
    return f"values normalised by version {version}, seed {method['seed']}"


def _reviewed(review: Mapping[str, Any] | None) -> tuple[tuple[str, str], ...]:
    if review is None:
        return ()
    pack = (review.get("pack") or {}).get("sha256")
    text = f"pack sha256 {pack}, answers sha256 {review.get('samples_sha256')}"
    return (("review", text),)
