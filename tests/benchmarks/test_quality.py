"""The quality benchmark beside a peer: how its figures are chosen and written, not the peer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import peers, quality
from benchmarks.quality import Windows, judge_peers, parse_arguments

ARGUMENTS = ["--model", "M", "--data", "D", "--schemes", "w8a8", "--out", "O"]


def test_a_peer_that_is_not_installed_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "is_installed", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        parse_arguments([*ARGUMENTS, "--peer"])
    assert stopped.value.code == 2
    assert "llmcompressor is not installed" in capsys.readouterr().err
    assert not parse_arguments(ARGUMENTS).peer


def test_the_best_setting_of_a_peer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {"coarse": 0.4, "fine": 0.1, "odd": 0.2}
    settings = tuple(peers.Peer(name=name, modifiers=list) for name in losses)
    monkeypatch.setattr(peers, "PEERS", {"w8a8": settings})
    monkeypatch.setattr(peers, "described", lambda: "peer 1.0")
    monkeypatch.setattr(
        peers, "run_peer",
        lambda peer, *_: peers.PeerRun(name=peer.name, model=peer.name, seconds=3.0),  # type: ignore[arg-type]
    )  # fmt: skip

    def judged(_: Any, model: Any, *rest: Any) -> dict[str, float]:
        return {"kl_mean": losses[model], "kl_p99": 1.0}

    monkeypatch.setattr(quality, "judge", judged)
    windows = Windows(calibration=[[1, 2]], heldout={"contracts": [[1, 2]], "wikitext": [[3, 4]]})
    source: Any = SimpleNamespace(tokenizer=lambda: None)
    args: Any = parse_arguments(ARGUMENTS)
    best = judge_peers("w8a8", source, source, windows, args)
    assert best is not None
    assert best.extra("wikitext", "kl_mean") == {
        "peer": "peer 1.0 fine", "peer_seconds": 3.0, "peer_kl": 0.1,
    }  # fmt: skip
    assert best.extra("contracts", "kl_p99")["peer_kl_p99"] == 1.0
    assert judge_peers("no-such-scheme", source, source, windows, args) is None


def test_every_peer_setting_is_of_a_scheme_that_is_judged() -> None:
    assert set(peers.PEERS) <= {candidate.scheme for candidate in quality.CANDIDATES.values()}
