"""What a stamp is worth to the server: verdicts, other numerics, --require-accepted."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from quant.artifact.artifact import open_artifact
from quant.artifact.errors import ArtifactError
from quant.artifact.stamp import (
    MetricRecord,
    Numerics,
    Stamp,
    Verdict,
    read_stamp,
    write_stamp,
)
from runtime.config import ConfigError, EngineConfig
from runtime.engine.build import build
from runtime.server.app import ServedModel
from runtime.server.engine_client import EngineStartError
from runtime.server.serve import ServerConfig, serve
from runtime.server.verdict import (
    judge,
    judged_with,
    open_for_serving,
    refuse_unless_accepted,
    why_not_judged,
)
from runtime.text import TextProcessor

HERE = {
    "device_class": "cpu", "compute_dtype": "float32", "kv_cache_dtype": "float32",
    "lm_head_scheme": "dense",
}  # fmt: skip


def stamp(verdict: Verdict = "accepted", digest: str = "d" * 64, **numerics: str) -> Stamp:
    judged = Numerics(**{**HERE, "chat_template_sha256": "t", **numerics})
    return Stamp(
        artifact_digest=digest, verdict=verdict, judged_at="2026-01-01T00:00:00Z", base="base",
        gates_sha256="g", numerics=judged,
        metrics=(MetricRecord(name="kl_mean", verdict=verdict),),
    )  # fmt: skip


def test_accepted_under_the_same_numerics_needs_no_warning() -> None:
    assert judge(stamp(), HERE, "t") == ("accepted", None)


@pytest.mark.parametrize(
    ("name", "value"),
    [("compute_dtype", "bfloat16"), ("kv_cache_dtype", "fp8"), ("device_class", "cuda"),
     ("lm_head_scheme", "w8a16-channel")],
)  # fmt: skip
def test_other_numerics_are_named(name: str, value: str) -> None:
    verdict, warning = judge(stamp(**{name: value}), HERE, "t")
    assert verdict == "accepted"
    assert warning is not None
    assert f"{name} {value} (here {HERE[name]})" in warning


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


def test_another_engine_build_is_a_remark_and_no_reason_to_refuse() -> None:
    here = build()
    assert {"weighbridge", "code", "torch"} <= here.keys()
    assert len(here["code"]) == 16
    judged = stamp().model_copy(update={"engine": here})
    assert judged_with(judged, here) is None
    assert judged_with(stamp(), here) is None  # stamps of version 1.0 do not say
    other = judged.model_copy(update={"engine": {**here, "code": "0" * 16}})
    assert judged_with(other, here) == (
        f"judged with another engine build: code {'0' * 16} (here {here['code']})"
    )
    assert judge(other, HERE, "t") == ("accepted", None)


@pytest.fixture
def accepted(
    dense_artifact: Callable[..., Path], tiny_model: Callable[..., Path], tmp_path: Path
) -> Path:
    """A copy of an artifact with a stamp that accepts its very bytes."""
    copy = shutil.copytree(dense_artifact(tiny_model("llama")), tmp_path / "art")
    write_stamp(copy, stamp(digest=open_artifact(copy).digest))
    assert open_artifact(copy).stamp is not None
    return copy


def change_byte(path: Path, at: int = -5) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["config.json", "recipe.yaml", "tokenizer.json"])
def test_a_changed_byte_stops_the_start(accepted: Path, name: str) -> None:
    change_byte(accepted / name)
    config = ServerConfig(port=0, require_accepted=True)
    with pytest.raises(ArtifactError, match=name):
        serve(accepted, EngineConfig(), config, lambda model, url: None)


def test_a_changed_weight_stops_the_start(accepted: Path) -> None:
    """One bit of one weight: sizes and headers are right, only the hash is not."""
    change_byte(next(accepted.glob("*.safetensors")))
    config = ServerConfig(port=0, require_accepted=True)
    with pytest.raises((ArtifactError, ConfigError, EngineStartError), match="safetensors"):
        serve(accepted, EngineConfig(), config, lambda model, url: None)


def test_another_artifact_in_its_place_is_not_judged(accepted: Path) -> None:
    """Sealed again after a change, as a second `quantize` does: sound, and no longer accepted."""
    manifest = json.loads((accepted / "artifact.json").read_text())
    manifest["created_by"] = "somebody else"
    (accepted / "artifact.json").write_text(json.dumps(manifest))
    opened = open_artifact(accepted)
    assert opened.stamp is None
    assert why_not_judged(opened) == (
        "its gate.json was given on other bytes than these; run: evaluate ART"
    )
    config = ServerConfig(port=0, require_accepted=True)
    with pytest.raises(ConfigError, match=r"not judged \(its gate.json was given on other bytes"):
        serve(accepted, EngineConfig(), config, lambda model, url: None)
    (accepted / "gate.json").unlink()
    assert why_not_judged(opened).startswith("nobody measured")


def test_a_link_that_is_turned_while_the_server_starts_stops_it(
    accepted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deployment turns `current` after the stamp was read and before the engine loads."""
    other = shutil.copytree(accepted, tmp_path / "other")
    manifest = json.loads((other / "artifact.json").read_text())
    (other / "artifact.json").write_text(json.dumps({**manifest, "created_by": "somebody else"}))
    current = tmp_path / "current"
    current.symlink_to(accepted)

    def end(model: ServedModel, url: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def turn(path: Path) -> TextProcessor:
        current.unlink()
        current.symlink_to(other)
        return load_text(path)

    load_text = TextProcessor.load
    monkeypatch.setattr(TextProcessor, "load", turn)
    with pytest.raises(ConfigError, match="was replaced by another artifact"):
        serve(current, EngineConfig(), ServerConfig(port=0), end)


def test_stamps_of_other_minor_versions_are_read(accepted: Path) -> None:
    path = accepted / "gate.json"
    newest = json.loads(path.read_text())
    old = {k: v for k, v in newest.items() if k not in ("suites", "seeds", "engine")}
    for content in ({**old, "format_version": "1.0"},
                    {**newest, "format_version": "1.9", "what_comes": 1}):  # fmt: skip
        path.write_text(json.dumps(content))
        found = read_stamp(accepted)
        assert found is not None
        assert found.verdict == "accepted"
    path.write_text(json.dumps({**newest, "what_comes": 1}))
    with pytest.raises(ArtifactError, match="what_comes"):
        read_stamp(accepted)


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
