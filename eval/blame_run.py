"""`evaluate blame` from end to end: open both models, measure, search, and say what would help."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from eval.blame import Blame, Culprit, find
from eval.blame_model import HOPELESS, SwappedModel, pattern_of, round_to_8_bits
from eval.cache import Cache
from eval.errors import EvaluationError
from eval.gate_spec import GateSpec
from eval.preflight import open_judgeable, source_of
from eval.progress import Progress
from eval.suites import Suite
from eval.targets.checkpoint import locate
from eval.targets.engine import EngineTarget
from eval.targets.reference import ReferenceTarget, load_tokenizer, quiet_transformers
from eval.windows import Window, pick_windows
from eval.workload import Workload, check_ids, check_same_reading
from quant.artifact.artifact import Artifact
from runtime.config import EngineConfig
from runtime.text import TextProcessor

# KV pool of the engine while the base is in memory beside it.
_POOL_BYTES = 1 << 28
# The engine's divergence may exceed that of the weights by this share (and least) of rounding.
_ENGINE_SHARE, _ENGINE_LEAST = 0.25, 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class BlameJob:
    """What to look into. target: KL in nats to reach; None takes the gates file's limit for
    kl_mean, or half of the loss where that is kept already. budget: measurements at most."""

    artifact: Path
    base: str | None
    suite: Suite
    gates: GateSpec
    engine: EngineConfig
    cache: Path | None
    num_windows: int = 12
    window_tokens: int = 128
    seed: int = 0
    target: float | None = None
    budget: int = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Blamed:
    """What was found. engine: KL of the engine, weights and all. with_8_bits: KL with the culprits
    rounded to 8 bits instead of put back. schemes: what the culprits are stored as. overrides: the
    recipe entries that mend it, as YAML."""

    blame: Blame
    engine: float
    with_8_bits: float | None
    schemes: dict[str, str]
    overrides: str
    num_tokens: int
    description: str

    @property
    def is_engine_worse(self) -> bool:
        """Whether the engine loses clearly more than its weights do."""
        allowed = self.blame.loss * (1 + _ENGINE_SHARE) + _ENGINE_LEAST
        return not self.engine <= allowed


def run(job: BlameJob, progress: Progress) -> Blamed:
    """Look for what carries the loss.

    Raises what `open_judgeable`, `locate` and the targets do; EvaluationError when nothing differs.
    """
    quiet_transformers()
    if job.engine.num_threads is not None:
        torch.set_num_threads(job.engine.num_threads)
    artifact = open_judgeable(job.artifact)
    checkpoint = locate(job.base or source_of(artifact))
    text = TextProcessor.load(job.artifact)
    windows = _windows(job, text, load_tokenizer(checkpoint))
    progress.stage("base and engine", 3)
    engine = EngineTarget(job.artifact, job.engine)
    device = engine.engine.resolved.device
    check_ids(windows, (), engine.engine.resolved.vocab_size)
    progress.advance(1)
    reference = ReferenceTarget(checkpoint, device=device, cache=Cache(job.cache))
    reference.require_vocabulary(engine.engine.resolved.vocab_size)
    logprobs = list(reference.logprobs([window.token_ids for window in windows]))
    progress.advance(1)
    engine_kl = _engine_divergence(engine, windows, logprobs)
    del engine
    progress.advance(1)
    model = SwappedModel(reference.model, artifact)
    if not model.units:
        raise EvaluationError(
            f"every weight of {job.artifact} is the base's own: there is nothing to put back"
        )
    return _search(job, artifact, model, windows, logprobs, engine_kl, reference, progress)


def _windows(job: BlameJob, text: TextProcessor, tokenizer: Any) -> list[Window]:
    """Held-out windows that both models read alike."""
    windows = pick_windows(
        job.suite.documents,
        text,
        count=job.num_windows,
        width=job.window_tokens,
        seed=job.seed,
    )
    if not windows:
        raise EvaluationError(f"zero tokens to score: no usable document in {job.suite.directory}")
    used = {window.document for window in windows}
    texts = tuple(d.text for d in job.suite.documents if d.id in used)
    workload = Workload(
        windows=tuple(windows), items=(), texts=(), prompts=(), document_texts=texts
    )
    check_same_reading(workload, text, tokenizer)
    return windows


def beside_the_base(said: EngineConfig) -> EngineConfig:
    """The engine as asked for, with room for the base beside it."""
    return replace(said, max_num_seqs=8, kv_cache_memory_bytes=_POOL_BYTES)


def _engine_divergence(
    engine: EngineTarget, windows: list[Window], logprobs: list[torch.Tensor]
) -> float:
    scores = engine.score([w.token_ids for w in windows], logprobs)
    kl = [k for w, s in zip(windows, scores, strict=True) for k in s.kl[w.num_context - 1 :]]
    mean = sum(kl) / len(kl)
    return mean if mean < HOPELESS else HOPELESS


def _search(
    job: BlameJob,
    artifact: Artifact,
    model: SwappedModel,
    windows: list[Window],
    logprobs: list[torch.Tensor],
    engine_kl: float,
    reference: ReferenceTarget,
    progress: Progress,
) -> Blamed:
    progress.stage("put back and measure", job.budget)

    def measure(names: frozenset[str]) -> float:
        model.put_back(names)
        progress.advance(1)
        return model.divergence(windows, logprobs)

    loss = measure(frozenset())
    target = _target(job, loss)
    blame = find(model.units, measure, target=target, budget=job.budget)
    with_8_bits = None
    if blame.culprits:
        named = frozenset[str]().union(*(c.unit.names for c in blame.culprits))
        model.put_back(named, round_to_8_bits)
        with_8_bits = model.divergence(windows, logprobs)
    schemes = {c.unit.name: _schemes(c, artifact) for c in blame.culprits}
    return Blamed(
        blame=blame,
        engine=engine_kl,
        with_8_bits=with_8_bits,
        schemes=schemes,
        overrides=recipe_overrides(blame, with_8_bits, set(schemes.values())),
        num_tokens=sum(window.num_scored for window in windows),
        description=f"{reference.description}, {len(windows)} windows of the held-out text",
    )


def _target(job: BlameJob, loss: float) -> float:
    if job.target is not None:
        return job.target
    rule = job.gates.metrics.get("kl_mean")
    limit = rule.max if rule is not None else None
    return limit if limit is not None and limit < loss else loss / 2


def _schemes(culprit: Culprit, artifact: Artifact) -> str:
    schemes = artifact.schemes()
    found = Counter(schemes[name].label for name in culprit.unit.names if name in schemes)
    return ", ".join(label for label, _ in found.most_common()) or "norm"


def recipe_overrides(blame: Blame, with_8_bits: float | None, schemes: set[str]) -> str:
    """The culprits at 8 bits where that is measured to do, else dense; layers of a kind together.

    The entries belong at the end of a recipe's `overrides`: the last one that matches wins.
    """
    is_8_bit_already = any(label.startswith(("w8", "fp8")) for label in schemes)
    enough = max(blame.target, blame.restored * 1.1)
    can_be_8 = with_8_bits is not None and with_8_bits <= enough and not is_8_bit_already
    scheme = "w8a16" if can_be_8 else "dense"
    layers: dict[str, list[int]] = {}
    head: dict[str, str] = {}
    for culprit in blame.culprits:
        match, layer = pattern_of(culprit.unit)
        if match == "lm_head":
            head["lm_head"] = scheme
        elif layer is not None:
            layers.setdefault(match, []).append(layer)
    entries = [
        {"match": match, "layers": sorted(some), "scheme": scheme} for match, some in layers.items()
    ]
    made: dict[str, Any] = {"overrides": entries} if entries else {}
    if not made and not head:
        return ""
    return yaml.safe_dump(head | made, sort_keys=False, default_flow_style=None)
