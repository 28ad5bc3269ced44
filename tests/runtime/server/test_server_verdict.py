"""What a stamp is worth to the server: verdicts, other numerics, --require-accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quant.artifact.stamp import MetricRecord, Numerics, Stamp, Verdict
from runtime.config import ConfigError, EngineConfig
from runtime.server.serve import ServerConfig, serve
from runtime.server.verdict import judge, open_for_serving, refuse_unless_accepted

HERE = {
    "device_class": "cpu", "compute_dtype": "float32", "kv_cache_dtype": "float32",
    "lm_head_scheme": "dense",
}  # fmt: skip


def stamp(verdict: Verdict = "accepted", digest: str = "d" * 64, **numerics: str) -> Stamp:
    judged = Numerics(**{**HERE, "chat_template_sha256": "t", **numerics})
    return Stamp(
        artifact_digest=digest, verdict=verdict, judged_at="2026-01-01T00:00:00Z", base="base",
        gates_sha256="g", numerics=judged,
    )  # fmt: skip


def test_accepted_under_the_same_numerics_needs_no_warning() -> None:
    assert judge(stamp(), HERE, "t") == ("accepted", None)


@pytest.mark.parametrize(
    ("name", "value"), [("compute_dtype", "bfloat16"), ("kv_cache_dtype", "fp8")]
)
def test_other_numerics_are_named(name: str, value: str) -> None:
    verdict, warning = judge(stamp(**{name: value}), HERE, "t")
    assert verdict == "accepted"
    assert warning is not None
    assert f"{name} {value} (here float32)" in warning


def test_another_chat_template_is_named() -> None:
    assert "chat_template_sha256 t (here u)" in (judge(stamp(), HERE, "u")[1] or "")


@pytest.mark.parametrize("verdict", ["rejected", "inconclusive"])
def test_anything_but_accepted_warns_and_can_be_refused(verdict: Verdict) -> None:
    metrics = (
        MetricRecord(name="perplexity_ratio", value=1.09, threshold=1.03, verdict=verdict),
        MetricRecord(name="kl_mean", value=0.01, threshold=0.05, verdict="accepted"),
    )
    judged = stamp(verdict).model_copy(update={"metrics": metrics})
    shown, warning = judge(judged, HERE, "t")
    assert shown == verdict
    assert warning == "decided by perplexity_ratio 1.09 (limit 1.03)"
    with pytest.raises(ConfigError, match=f"is {verdict}: decided by perplexity.*run: evaluate m"):
        refuse_unless_accepted(judged, Path("m"))


def test_the_stamps_own_summary_explains_the_verdict() -> None:
    judged = stamp("rejected").model_copy(update={"summary": "kl_mean is 0.3."})
    assert judge(judged, HERE, "t") == ("rejected", "kl_mean is 0.3.")


def test_no_stamp_is_not_judged() -> None:
    assert judge(None, HERE, "t")[0] == "not judged"
    with pytest.raises(ConfigError, match="not judged; run: evaluate some/art"):
        refuse_unless_accepted(None, Path("some/art"))


def test_require_accepted_compares_what_really_runs(
    dense_artifact: Callable[..., Path], tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    art = dense_artifact(tiny_model("llama"))
    opened = open_for_serving(art)
    monkeypatch.setattr(type(opened), "stamp", stamp(compute_dtype="bfloat16"))
    config = ServerConfig(port=0, require_accepted=True)
    with pytest.raises(ConfigError, match="judged by other numerics: compute_dtype bfloat16"):
        serve(art, EngineConfig(), config, lambda model, url: None)


def test_require_accepted_hashes_the_bytes_it_was_accepted_for(tmp_path: Path) -> None:
    config = ServerConfig(port=0, require_accepted=True)
    with pytest.raises(ConfigError, match="verify fast does not hash"):
        serve(tmp_path, EngineConfig(verify="fast"), config, lambda model, url: None)
