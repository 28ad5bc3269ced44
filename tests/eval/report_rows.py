"""report.json's values of a small evaluation that lost much, for tests of the pages."""

from __future__ import annotations

from typing import Any

HOSTILE = '<script>alert("1")</script> & "Foo GmbH"'


def answer(text: str, *, is_right: bool, problem: str = "") -> dict[str, Any]:
    return {
        "text": text, "finish": "stop", "num_tokens": 9, "truncated": False,
        "failed": False, "problem": problem,
        "values": {"schema_valid": float(is_right), "json_valid": float(is_right),
                   "field_accuracy": [float(is_right), 1.0]},
        "details": {"wrong_fields": [] if is_right else ["party", "lines[2]"],
                    "calls": [] if is_right else [HOSTILE]},
    }  # fmt: skip


def item(name: str, base: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": name, "source": "contracts", "lang": "en", "gold": {"party": "Foo GmbH"},
        "messages": [{"role": "user", "content": "Foo GmbH signs"}], "base": base,
        "candidate": ours, "first_divergence": None if base == ours else 2, "checks": ["fields"],
        "num_prompt_tokens": 40, "follows": None,
    }  # fmt: skip


def measurement(unit: str, estimate: float, lower: float | None, upper: float | None) -> Any:
    return {
        "label": unit.title(), "unit": unit, "base": None, "candidate": None,
        "estimate": estimate, "lower": lower, "upper": upper, "num_tokens": 100,
        "num_clusters": 9, "num_nonfinite": 0,
    }  # fmt: skip


def finding(metric: str, label: str, outcome: str, limit: dict[str, Any], **more: Any) -> Any:
    return {
        "metric": metric, "label": label, "outcome": outcome, "required": True, "limit": limit,
        "reason": f"{label}: as measured", "stratum": "", "num_needed": None,
        "regression_suspected": False,
        **more,
    }  # fmt: skip


def interval(estimate: float) -> dict[str, float]:
    return {"estimate": estimate, "lower": estimate * 0.9, "upper": estimate * 1.1}


def layer1() -> dict[str, Any]:
    """Two domains, three positions, two lengths."""
    ladder = ("Median KLD", "90.0% KLD", "95.0% KLD", "99.0% KLD", "99.9% KLD", "Maximum KLD")

    def domain(factor: float) -> dict[str, Any]:
        points = {name: factor * 10.0 ** (n - 3) for n, name in enumerate(ladder)}
        return {"num_tokens": 3060, "num_documents": 9, "Mean KLD": interval(factor / 10), **points}

    def place(label: str, kld: float) -> dict[str, Any]:
        return {"label": label, "num_tokens": 600, "Mean KLD": interval(kld),
                "Mean ln(PPL(Q)/PPL(base))": interval(kld / 5)}  # fmt: skip

    return {
        "domains": {"all": domain(1.0), "source:contracts": domain(2.0)},
        "positions": [place(f"{10 * n}-{10 * n + 10} %", 0.1 + 0.02 * n) for n in range(10)],
        "lengths": [place("0-64 tokens", 0.1), place("64-256 tokens", 0.2)],
        "kld_slope": interval(0.2),
    }


def review_data(verdict: str = "accepted", **changes: Any) -> dict[str, Any]:
    """review.json of the evaluation of `report_data`."""
    outcome = {"accepted": "pass", "rejected": "fail"}.get(verdict, "inconclusive")
    return {
        "format_version": "1.0", "verdict": verdict, "summary": "150 pairs, 2 raters",
        "could_show": "Little.", "artifact_digest": "ab" * 32, "samples_sha256": "aa" * 32,
        "rules": {"margin": 0.15, "max_critical": 0.03, "confidence": 0.95},
        "pack": {"sha256": "bb" * 32}, "num_rated": 150, "num_packed": 150, "num_differing": 180,
        "num_requests": 200,
        "raters": [{"rater": "Ann", "standing": "passed"}, {"rater": "Bob", "standing": "passed"},
                   {"rater": "Cy", "standing": "failed"}],
        "preference": {"net": {"estimate": -0.02, "lower": -0.08, "upper": 0.04}},
        "faults": {"new": {"estimate": 0.0, "lower": 0.0, "upper": 0.018}},
        "answers": [
            {"name": "preference", "outcome": "pass", "reason": "the base in 2 %",
             "num_needed": None},
            {"name": "critical_faults", "outcome": outcome, "reason": "3 of 150 do harm",
             "num_needed": 400 if outcome == "inconclusive" else None},
        ],
        "items": [{"votes": [{"rater": "Ann", "note": "Foo GmbH is missing"}]}],
        "ratings": {"ann-01234567.jsonl": "ee" * 32, "bob-01234567.jsonl": "ff" * 32},
        "agreement": {"num_items": 9, "pairs": [{"raters": ["Ann", "Bob"], "num_items": 9}]},
        **changes,
    }  # fmt: skip


def report_data() -> dict[str, Any]:
    """An evaluation that broke two limits of four, one question open, one of the guards."""
    schema = measurement("drop", 0.16, 0.124, 0.192) | {
        "label": "Schema valid", "base": 0.98, "candidate": 0.82, "num_items": 400, "lost": 64,
        "gained": 0, "mcnemar_p": 1e-9, 
        "domains": {"lang:zh": measurement("drop", 0.3, 0.2, 0.4),
                    "lang:en": measurement("drop", 0.1, 0.0, 0.2)},
    }  # fmt: skip
    return {
        "format_version": "1.3", "verdict": "rejected", "exit_code": 1, "summary": "It lost much.",
        "judged_at": "2026-11-30T11:24:29+00:00", "seconds": 81.2,
        "artifact": {"path": "out/contracts-w4", "digest": "ab" * 32, "recipe": "w4a16",
                     "schemes": {"w4a16-g64": 210}, "tools": {"torch": "2.13.0"}},
        "sizes": {"artifact_bytes": 98_000_000, "dense_bytes": 269_000_000},
        "base": {"name": "base", "digest": "cd" * 32, "description": "transformers, float32"},
        "numerics": {"description": "engine, float32", "device_class": "cpu", "compute_dtype":
                     "float32", "chat_template_sha256": None},
        "gates": {"path": "gates.yaml", "sha256": "ef" * 32, "review": None}, "review": None,
        "measured": {"verdict": "rejected", "summary": "It lost much."},
        "next": ["Next recipe up: w8a8.yaml"], "remarks": [], "regressions": [
            {"id": "worse", "why": "no longer fits the schema", "gold": "Foo GmbH"}
        ], "samples_sha256": "aa" * 32, "engine": {"weighbridge": "0.1", "code": "00ff"},
        "suite": {"directory": "gate", "sha256": {"text.jsonl": "01" * 32}},
        "method": {"confidence": 0.95, "seed": 0, "draws": 10000, "unit": "per token",
                   "detectable": "6.3 pp could have been seen."},
        "findings": [
            finding("perplexity_ratio", "PPL(Q)/PPL(base)", "pass", {"max": 1.05}),
            finding("kl_mean", "Mean KLD", "fail", {"max": 0.05}),
            finding("schema_valid", "Schema valid", "fail", {"max_drop": 0.02},
                    regression_suspected=True),
            finding("schema_valid", "Schema valid in lang:zh", "fail", {"max_drop": 0.05},
                    stratum="lang:zh"),
            finding("field_f1", "Field F1", "inconclusive", {"max_drop": 0.05}),
            finding("json_valid", "JSON valid", "inconclusive", {"max_drop": 0.05},
                    required=False),
        ],
        "measurements": {
            "perplexity_ratio": measurement("ratio", 1.02, 1.01, 1.03),
            "kl_mean": measurement("nats", 0.1, 0.08, 0.12),
            "schema_valid": schema,
            "load_check_agreement": measurement("share", 0.97, 0.95, 0.99) | {"num_items": 60},
            "field_f1": measurement("drop", 0.04, None, None),
            "json_valid": measurement("drop", 0.0, -0.1, 0.1),
        },
        "kld": {"num_tokens": 6120, "mean": 0.1, "p50": 0.05, "p99.9": 3.0, "max": 4.0,
                "share_above_0.1": 0.4},
        "layer1": layer1(),
        "answers": {"base": {"schema_valid": 0.98}, "candidate": {"schema_valid": 0.82},
                    "identical": 0.25, "num_differing": 2, "median_first_divergence": 2},
        "notes": ["The base is itself rounded."],
        "items": [
            item("same", answer("{}", is_right=True), answer("{}", is_right=True)),
            item("worse", answer("{}", is_right=True),
                 answer(HOSTILE, is_right=False, problem=f"not JSON: {HOSTILE}")),
            item("better", answer("x", is_right=False), answer("{}", is_right=True)),
        ],
    }  # fmt: skip
