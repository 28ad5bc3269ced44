"""Evaluation: everything one run found out, as a value. Reports and stamps are made from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from eval.amounts import Amounts
from eval.gate import Verdict
from eval.gate_spec import LoadedGates
from eval.measurement import Measurement
from eval.metrics.answers import PairedItem
from eval.metrics.divergence import Ladder
from eval.metrics.ladder import Layer1
from eval.stats import Sampling
from eval.suites import Suite
from eval.targets.base import Answer
from quant.artifact.stamp import ReviewRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactFacts:
    """The judged artifact. `schemes` maps a scheme's label to its number of modules. stored_bytes:
    its weights on disk; dense_bytes: what they would take in 16 bits."""

    path: Path
    digest: str
    recipe: str
    schemes: dict[str, int]
    tools: dict[str, str]
    stored_bytes: int = 0
    dense_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseFacts:
    """The base it was held against, and how it was computed.

    source_digest: of its files as artifacts record it.
    """

    name: str
    digest: str
    source_digest: str
    description: str
    chat_template_sha256: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """How the candidate computed; the verdict holds for these only."""

    description: str
    device_class: str
    compute_dtype: str
    kv_cache_dtype: str
    lm_head_scheme: str
    chat_template_sha256: str | None
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One item with both answers as text and their scores."""

    pair: PairedItem
    base_text: str
    candidate_text: str
    base_answer: Answer
    candidate_answer: Answer

    @property
    def divergence(self) -> int | None:
        """Index of the first differing answer token; None when the answers are identical."""
        base, candidate = self.base_answer.token_ids, self.candidate_answer.token_ids
        if base == candidate:
            return None
        pairs = enumerate(zip(base, candidate, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(base), len(candidate)))


def num_differing(exchanges: Sequence[Exchange]) -> int:
    """Answers that people could tell apart: white space around one is nothing."""
    return sum(x.base_text.strip() != x.candidate_text.strip() for x in exchanges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The whole run: inputs, numerics, measurements and the verdict.

    said: the options that differed from the defaults, to repeat the run with. rejected_before: the
    review in which people rejected these very answers, when they were judged an earlier time.
    """

    artifact: ArtifactFacts
    base: BaseFacts
    suite: Suite
    gates: LoadedGates
    amounts: Amounts
    sampling: Sampling
    numerics: Numerics
    num_windows: int
    num_documents: int
    measurements: tuple[Measurement, ...]
    ladder: Ladder
    layer1: Layer1
    exchanges: tuple[Exchange, ...]
    verdict: Verdict
    notes: tuple[str, ...]
    judged_at: datetime
    seconds: float
    said: dict[str, str]
    rejected_before: ReviewRecord | None = None
