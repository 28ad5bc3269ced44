"""The noise floor: a base that answers the same way alone and in a batch, and one that does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.amounts import Amounts
from eval.api import make_job
from eval.cache import Cache
from eval.progress import Silent
from eval.runner import weighed
from eval.targets.base import Answer
from eval.targets.checkpoint import locate
from eval.targets.reference import ReferenceTarget
from runtime.config import EngineConfig

ABILITY = {"num_windows": 8, "window_tokens": 40, "num_items": 40}


@pytest.fixture
def job(
    taught_model: Path, dense_artifact: Callable[[Path], Path], suite_dir: Path, cache_dir: Path
) -> Callable[..., Any]:
    def make(**amounts: Any) -> Any:
        return make_job(
            dense_artifact(taught_model), None, None, suite=suite_dir, cache=cache_dir,
            amounts=Amounts(**{**ABILITY, **amounts}), engine=EngineConfig(),
        )  # fmt: skip

    return make


def test_windows_in_one_batch_are_the_same_up_to_rounding(taught_model: Path) -> None:
    reference = ReferenceTarget(locate(str(taught_model)), device="cpu", cache=Cache(None))
    windows = [[1, 5, 9, 200, 31, 7, 8, 90], [4, 4, 17], [11, 12, 13, 14, 15]]
    apart = list(reference.logprobs(windows))
    for one, other in zip(apart, reference.logprobs_together(windows), strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, atol=1e-4)


def test_a_base_whose_answers_depend_on_the_batch(
    job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone it answers nothing: no margin of 5 points can then tell damage from noise."""
    generate = ReferenceTarget.generate

    def fickle(self: Any, prompts: Sequence[Any], *rest: Any, together: bool = True) -> Any:
        if not together:
            return [Answer(token_ids=(), finish="stop") for _ in prompts]
        return generate(self, prompts, *rest)

    monkeypatch.setattr(ReferenceTarget, "generate", fickle)
    with weighed(job(num_noise_items=30), Silent()) as found:
        pass
    schema = next(f for f in found.verdict.findings if f.name == "schema_valid")
    assert schema.outcome == "inconclusive"
    assert "the base differs from itself by" in schema.reason
    assert schema.noise == pytest.approx(0.5, abs=0.1)
    assert "30 of 30 answers differ" in found.notes[-1]
    assert found.verdict.exit_code == 3


def test_the_noise_floor_can_be_left_out(job: Callable[..., Any]) -> None:
    with weighed(job(num_noise_items=0), Silent()) as found:
        pass
    assert "not measured" in found.notes[-1]
    assert all(f.noise is None for f in found.verdict.findings)
