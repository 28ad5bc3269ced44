"""Opening: everything one evaluation needs, checked before any model is asked anything."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from eval.amounts import Amounts
from eval.answer_log import Generate, engine_build
from eval.cache import Cache
from eval.coverage import require_covered
from eval.errors import EvaluationError
from eval.evaluation import BaseFacts, Numerics
from eval.fitting import CARD_SHARE, fit
from eval.gate_spec import LoadedGates, load_gates
from eval.leakage import LeakageCheck, check_leakage
from eval.preflight import artifact_facts, open_judgeable, require_finite, source_of
from eval.progress import Progress
from eval.suites import Suite, load_suite
from eval.targets.checkpoint import Checkpoint, locate
from eval.targets.engine import EngineTarget
from eval.targets.reference import (
    ReferenceTarget,
    load_tokenizer,
    quiet_transformers,
    versions,
)
from eval.targets.server import ServerTarget, Service
from eval.workload import (
    Workload,
    check_ids,
    check_same_reading,
    prepare,
    reading_digest,
    template_sha256,
)
from quant.artifact.artifact import Artifact
from runtime.config import EngineConfig
from runtime.engine.resolve import device_of
from runtime.text import TextProcessor

_NAMED = 3  # of the golden items that were not asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to judge, against what, by which rules, how; `said` as in Evaluation.

    calib: the calibration files, where they are there to be held to the suite.
    against: a server that serves the artifact and gives the answers; None asks the engine in this
    process. concurrencies: how many requests it gets at once, one round each; the last is judged.
    """

    artifact: Path
    base: str | None
    gates: Path
    suite: Path
    amounts: Amounts
    engine: EngineConfig
    cache: Path | None
    said: dict[str, str]
    calib: tuple[Path, ...] = ()
    against: Service | None = None
    concurrencies: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Who answers for the candidate: the engine, or a server at one concurrency."""

    name: str
    generate: Generate
    choose: Generate


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Both models and what they will be asked.

    levels: who answers; the last is judged. log_key: all that decides what the candidate says.
    """

    gates: LoadedGates
    suite: Suite
    artifact: Artifact
    text: TextProcessor
    workload: Workload
    reference: ReferenceTarget
    candidate: EngineTarget
    server: ServerTarget | None
    levels: tuple[Level, ...]
    log_key: tuple[object, ...]
    base: BaseFacts
    leakage: LeakageCheck


def open_all(job: Job, progress: Progress) -> Opened:
    """Cheap checks first, models last.

    Raises:
        EvaluationError: the two do not belong together, or (UsageError) something given is wrong.
        ArtifactError, TextError, ConfigError: the artifact cannot be loaded as asked.
    """
    gates, suite = load_gates(job.gates), load_suite(job.suite)
    progress.stage("open artifact and base", 4)
    quiet_transformers()
    if job.engine.num_threads is not None:
        torch.set_num_threads(job.engine.num_threads)
    artifact = open_judgeable(job.artifact)
    leakage = check_leakage(artifact, job.suite, job.calib)
    require_finite(artifact)
    checkpoint = locate(job.base or source_of(artifact))
    text = TextProcessor.load(job.artifact)
    progress.advance(1)
    workload = prepare(suite, text, job.amounts)
    require_covered(gates.spec, workload.windows, workload.items)
    cache = Cache(job.cache)
    base_template = _read_alike(workload, text, checkpoint, cache)
    server = ServerTarget(job.against, text, artifact.digest) if job.against else None
    progress.advance(1)
    # The base first: the engine takes what is left of a card for its KV.
    reference = load_reference(checkpoint, artifact, job.engine, cache)
    progress.advance(1)
    candidate = EngineTarget(job.artifact, beside_reference(job.engine))
    _check_room(workload, candidate.max_tokens)
    vocabulary = candidate.engine.resolved.vocab_size
    check_ids(workload.windows, workload.prompts, vocabulary)
    reference.require_vocabulary(vocabulary)
    progress.advance(1)
    base = BaseFacts(
        name=checkpoint.name,
        digest=checkpoint.digest,
        source_digest=checkpoint.source_digest,
        description=reference.description,
        chat_template_sha256=base_template,
    )
    return Opened(
        gates=gates,
        suite=suite,
        artifact=artifact,
        text=text,
        workload=workload,
        reference=reference,
        candidate=candidate,
        server=server,
        levels=_levels(candidate, server, job.concurrencies),
        log_key=(
            artifact.digest,
            candidate.numerics(),
            engine_build(),
            server.description if server else "",
        ),
        base=base,
        leakage=leakage,
    )


def load_reference(
    checkpoint: Checkpoint, artifact: Artifact, engine: EngineConfig, cache: Cache
) -> ReferenceTarget:
    """The base, on the engine's device, in what fits beside the artifact there."""
    device = device_of(engine, torch.cuda.is_available(), {})
    facts = artifact_facts(artifact)
    chosen = fit(facts.dense_bytes // 2, facts.stored_bytes, device)
    return ReferenceTarget(checkpoint, device=device, cache=cache, fit=chosen)


def beside_reference(engine: EngineConfig) -> EngineConfig:
    """The engine with room for the base's answers beside it on a card."""
    return replace(engine, gpu_memory_utilization=CARD_SHARE)


def _levels(
    candidate: EngineTarget, server: ServerTarget | None, concurrencies: tuple[int, ...]
) -> tuple[Level, ...]:
    if server is None:
        return (Level(name="candidate", generate=candidate.generate, choose=candidate.choose),)
    found: list[Level] = []
    for place, n in enumerate(concurrencies):
        # A round's answers are kept by its name: the same number twice is two rounds.
        again = concurrencies[:place].count(n)
        name = f"server, {n} at once" + (f", round {again + 1}" if again else "")
        target = server.at(n)
        found.append(Level(name=name, generate=target.generate, choose=target.choose))
    return tuple(found)


def _read_alike(
    workload: Workload, text: TextProcessor, checkpoint: Checkpoint, cache: Cache
) -> str | None:
    """Check that the base reads every text as the artifact does; the sha256 of its chat template.

    Opening the tokenizer inside a GGUF file takes seconds, so a check that was passed is kept.
    """
    key = ["reading", checkpoint.digest, versions(), reading_digest(workload, text)]
    if (known := cache.json(key)) is not None:
        return str(known[0]) if known[0] else None
    tokenizer = load_tokenizer(checkpoint)
    check_same_reading(workload, text, tokenizer)
    found = template_sha256(tokenizer.chat_template)
    cache.put_json(key, [found])
    return found


def _check_room(workload: Workload, max_tokens: int) -> None:
    """Every window and every prompt with its answer must fit the model's context."""
    widest = max(len(window.token_ids) for window in workload.windows)
    if widest > max_tokens:
        raise EvaluationError(
            f"windows of {widest} tokens exceed the model's context of {max_tokens}; "
            "pass a smaller --window-tokens"
        )
    needed: dict[str, int] = {}
    for item, prompt in zip(workload.items, workload.prompts, strict=True):
        longest = max(map(len, prompt.choices), default=prompt.max_tokens)
        # A dialog's later turns stand on all that was said before them.
        before = needed[item.follows] if item.follows is not None else 0
        needed[item.id] = before + len(prompt.token_ids) + longest
        if needed[item.id] > max_tokens:
            raise EvaluationError(
                f"item {item.id} needs {needed[item.id]} tokens with its answer, but the model's "
                f"context has {max_tokens}; use a suite with shorter items"
            )


def numerics_of(opened: Opened) -> Numerics:
    """How the candidate computes, for the report and the stamp."""
    found = opened.candidate.numerics()
    served = f"; answers by {opened.server.description}" if opened.server else ""
    return Numerics(
        description=opened.candidate.description + served,
        device_class=found["device_class"],
        compute_dtype=found["compute_dtype"],
        kv_cache_dtype=found["kv_cache_dtype"],
        lm_head_scheme=found["lm_head_scheme"],
        chat_template_sha256=opened.text.chat_template_sha256,
        num_threads=torch.get_num_threads(),
    )


def _is_same_place(left: str, right: str) -> bool:
    return left == right or Path(left).expanduser().resolve() == Path(right).expanduser().resolve()


def notes_on(opened: Opened, amounts: Amounts) -> tuple[str, ...]:
    """What a reader should know before trusting the numbers."""
    notes: list[str] = [opened.leakage.note]
    source = opened.artifact.manifest.source
    if not _is_same_place(opened.base.name, source.path):
        merged = f" with the adapter {source.adapter.name} merged into it" if source.adapter else ""
        notes.append(
            f"The base {opened.base.name} was named by hand; the artifact was made from "
            f"{source.path}{merged}. The verdict holds against the base that was used."
        )
    elif source.adapter is None and opened.base.source_digest != source.digest:
        notes.append(
            f"The base {opened.base.name} is not what it was when the artifact was made from it "
            "(its files have another digest). The verdict holds against the files that lie there "
            "now; what they lost or gained since counts as the artifact's."
        )
    if "de-quantized" in opened.base.description:
        notes.append(
            "The base was itself de-quantized from GGUF, so it sits on a coarse grid: schemes that "
            "meet that grid (asymmetric, small groups) look better here than on the original."
        )
    if opened.text.chat_template is None:
        notes.append("The model has no chat template: messages were joined by blank lines.")
    elif opened.base.chat_template_sha256 != opened.text.chat_template_sha256:
        notes.append(
            "The chat templates of base and artifact differ in their text, but render every "
            "prompt of this suite alike."
        )
    if len(opened.workload.windows) < amounts.num_windows:
        found = len(opened.workload.windows)
        notes.append(f"The suite gave {found} of {amounts.num_windows} windows asked for.")
    asked = {item.id for item in opened.workload.items}
    if unasked := [i.id for i in opened.suite.items if i.golden and i.id not in asked]:
        more = ", ..." if len(unasked) > _NAMED else ""
        notes.append(
            f"{len(unasked)} golden items, which must never be lost, were not asked "
            f"({', '.join(unasked[:_NAMED])}{more}); --items {opened.suite.largest_file} asks all."
        )
    notes += [
        f"{name} holds {len(rows)} of {amounts.num_items} items asked for."
        for name, rows in opened.suite.tasks.items()
        if len(rows) < amounts.num_items != Amounts.num_items
    ]
    return tuple(notes)
