"""The self-test: is this gate, with this suite and this base, able to say yes and to say no?

The base is judged against itself and must be accepted; copies with planted defects must not be.
Both go the way of every artifact: reading check, engine, measurements, `eval.gate.judge`. A defect
that the held-out text alone rejects is not asked the tasks: whatever they say, it stays rejected.
One candidate is in memory at a time.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eval.amounts import Amounts
from eval.asking import Asked, ask_all
from eval.checks.catalogue import pass_k, sampled
from eval.errors import EvaluationError, UsageError
from eval.evaluation import BaseFacts
from eval.gate import Verdict, judge
from eval.gate_spec import GateSpec, LoadedGates, load_gates
from eval.measurement import Measurement
from eval.metrics import answers, divergence, drift
from eval.noise import measure_noise
from eval.opening import Job, Opened, beside_reference, open_all
from eval.preflight import open_judgeable, source_of
from eval.progress import Progress
from eval.runner import ask_base, pair, score_windows
from eval.scratch import scratch_folder
from eval.self_test_defects import (
    FILE_DEFECTS,
    NAMES,
    WEIGHT_DEFECTS,
    FileDefect,
    Reading,
    WeightDefect,
    frequent_tokens,
)
from eval.self_test_models import (
    num_layers,
    plain_files,
    read_base,
    write_damaged,
    write_sound,
)
from eval.self_test_rows import CAUGHT, READING, Outcome, Row, defect_row, sound_row, spoke
from eval.stats import Sampling
from eval.suites import Suite, load_suite
from eval.targets.base import Advance, Answer, Candidate, Prompt, Reference
from eval.targets.checkpoint import Checkpoint, locate
from eval.targets.engine import EngineTarget
from eval.targets.reference import load_tokenizer, quiet_transformers
from eval.workload import Workload, check_same_reading, prepare
from quant.artifact.artifact import Artifact
from quant.artifact.errors import ArtifactError, StorageError
from runtime.config import ConfigError
from runtime.text import TextError, TextProcessor

# Items of each task file that a broken template's answers are asked on, beside the refusal.
_BESIDE_ITEMS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """The whole self-test; the base against itself is the first row."""

    base: BaseFacts
    suite: Suite
    gates: LoadedGates
    amounts: Amounts
    candidate: str
    rows: tuple[Row, ...]
    judged_at: datetime
    seconds: float

    @property
    def exit_code(self) -> int:
        """0 all as expected, 1 the gate failed its test."""
        return 0 if all(row.as_expected for row in self.rows) else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """What every candidate is held to. noise: the base against itself, by metric."""

    job: Job
    gates: LoadedGates
    suite: Suite
    base: BaseFacts
    checkpoint: Checkpoint
    workload: Workload
    text: TextProcessor
    reference: Reference
    base_answers: tuple[Asked, ...]
    sound: Artifact
    sampling: Sampling
    noise: Mapping[str, Measurement]
    work: Path

    @property
    def num_windows(self) -> int:
        return len(self.workload.windows)

    @property
    def edges(self) -> tuple[int, ...]:
        """Where buckets of input lengths end."""
        return self.gates.spec.length_edges


def self_test(
    job: Job, progress: Progress, *, artifact: Path | None, wanted: Collection[str] = ()
) -> SelfTest:
    """Run it. `job.base` names the base, or `artifact` does; `wanted` are names of defects.

    Raises:
        UsageError: an unknown defect, neither or both of base and artifact, a faulty suite or
            gates file. EvaluationError: the base cannot be loaded, written or judged.
    """
    if unknown := sorted(set(wanted) - set(NAMES)):
        raise UsageError(f"--defect {unknown[0]} is unknown; there are {', '.join(NAMES)}")
    if (artifact is None) == (job.base is None):
        raise UsageError("name what to test with: either an artifact ART or --base MODEL")
    try:
        base = job.base or source_of(open_judgeable(artifact or Path()))
        with scratch_folder("weighbridge-self-test-") as folder:
            return _run(replace(job, base=base), progress, wanted or NAMES, folder)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    except StorageError as error:
        said, _, _ = str(error).partition(". Make room")  # nothing is kept here to go on from
        raise EvaluationError(
            "the temporary folder cannot take two copies of the base; name another one with "
            f"TMPDIR ({said})"
        ) from error
    except (ArtifactError, TextError) as error:
        raise EvaluationError(str(error)) from error


def _run(job: Job, progress: Progress, wanted: Collection[str], work: Path) -> SelfTest:
    started = time.monotonic()
    bench, candidate = _set_up(job, progress, work)
    verdict = _weigh(bench, candidate, _Titled(progress, "base"))
    taken = time.monotonic() - started
    rows = [sound_row(verdict, num_windows=bench.num_windows, seconds=taken)]
    rows += _file_rows(bench, candidate, wanted, progress)
    description = candidate.description
    del candidate
    for defect in (d for d in WEIGHT_DEFECTS if d.name in wanted):
        gc.collect()  # the engine before this one is gone by now
        rows.append(_weight_row(bench, defect, _Titled(progress, defect.name)))
    return SelfTest(
        base=bench.base,
        suite=bench.suite,
        gates=bench.gates,
        amounts=job.amounts,
        candidate=description,
        rows=tuple(rows),
        judged_at=datetime.now(UTC),
        seconds=time.monotonic() - started,
    )


def _set_up(job: Job, progress: Progress, work: Path) -> tuple[_Bench, EngineTarget]:
    """The base as an artifact, opened as `evaluate` opens any, and the base's own answers."""
    load_gates(job.gates)  # a slip in them is said before the base is read
    load_suite(job.suite)
    quiet_transformers()
    checkpoint = locate(job.base or "")
    progress.stage("write the base", 1)
    sound = write_sound(read_base(checkpoint), checkpoint, work / "sound")
    progress.advance(1)
    job = replace(job, artifact=sound.path)
    opened = open_all(job, progress)
    text, reference, rules = opened.text, opened.reference, opened.gates.spec
    said = ask_base(opened.workload, text, reference, opened.candidate.stop_ids, progress)
    sampling = Sampling(confidence=rules.confidence, draws=rules.draws, seed=job.amounts.seed)
    bench = _Bench(
        job=job,
        gates=opened.gates,
        suite=opened.suite,
        base=opened.base,
        checkpoint=checkpoint,
        workload=opened.workload,
        text=text,
        reference=reference,
        base_answers=tuple(said),
        sound=sound,
        sampling=sampling,
        noise=_noise(opened, said, sampling, job.amounts.num_noise_items, progress),
        work=work,
    )
    return bench, opened.candidate


def _noise(
    opened: Opened, said: Sequence[Asked], sampling: Sampling, count: int, progress: Progress
) -> Mapping[str, Measurement]:
    """The noise floor, as the gate has it."""
    return measure_noise(
        opened.workload, opened.text, opened.reference, opened.candidate.stop_ids,
        pair(opened.workload, opened.text, said, said),
        count=count, sampling=sampling, progress=progress,
    ).measurements  # fmt: skip


class _Titled:
    """Progress of one candidate, with its name before each stage."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress, self._title = progress, title

    def stage(self, text: str, total: int) -> None:
        """A stage begins."""
        self._progress.stage(f"{self._title}: {text}", total)

    def advance(self, count: int) -> None:
        """Units are done."""
        self._progress.advance(count)


def _weigh(bench: _Bench, candidate: Candidate, progress: Progress) -> Verdict:
    """The gate's verdict on one candidate, from the held-out text alone where that rejects."""
    scores = score_windows(bench.workload.windows, bench.reference, candidate, progress)
    read = {m.name: m for m in divergence.measure(scores, bench.sampling, bench.edges)}
    early = _part(bench, read)
    if early is not None and early.result == "rejected":
        return early
    ours = _ask(bench.workload, bench.text, candidate, progress)
    exchanges = pair(bench.workload, bench.text, bench.base_answers, ours)
    pairs = [exchange.pair for exchange in exchanges]
    said = (
        *answers.measure(pairs, bench.sampling, bench.edges),
        *drift.measure(pairs, bench.sampling, bench.edges),
    )
    return judge(_greedy(bench.gates.spec), read | {m.name: m for m in said}, bench.noise)


def _greedy(spec: GateSpec) -> GateSpec:
    """The rules without those for drawn answers, which nobody is asked for here."""
    drawn = (sampled(""), pass_k(""))
    rules = {name: rule for name, rule in spec.metrics.items() if not name.endswith(drawn)}
    return spec.model_copy(update={"metrics": rules})


def _part(bench: _Bench, measured: Mapping[str, Measurement]) -> Verdict | None:
    """The verdict of those rules whose metrics were measured; None when there are none."""
    spec = bench.gates.spec
    rules = {name: rule for name, rule in spec.metrics.items() if name in measured}
    if not rules:
        return None
    return judge(spec.model_copy(update={"metrics": rules}), measured, bench.noise)


def _ask(
    workload: Workload, text: TextProcessor, candidate: Candidate, progress: Progress
) -> list[Asked]:
    progress.stage("answers", len(workload.items))

    def generate(prompts: Sequence[Prompt], advance: Advance) -> list[Answer]:
        return candidate.generate(prompts, advance)

    def choose(prompts: Sequence[Prompt], advance: Advance) -> list[Answer]:
        return candidate.choose(prompts, advance)

    return ask_all(workload, text, generate, choose, progress.advance)


def _weight_row(bench: _Bench, defect: WeightDefect, progress: Progress) -> Row:
    started = time.monotonic()
    progress.stage("plant", 1)
    out = bench.work / defect.name
    damaged = write_damaged(bench.sound, out, defect.change(num_layers(bench.sound)))
    progress.advance(1)
    verdict = _weigh(
        bench, EngineTarget(damaged.path, beside_reference(bench.job.engine)), progress
    )
    damaged.reader.close()
    shutil.rmtree(out)
    return defect_row(
        defect.name,
        defect.title,
        defect.planted,
        verdict,
        num_windows=bench.num_windows,
        seconds=time.monotonic() - started,
    )


def _file_rows(
    bench: _Bench, candidate: Candidate, wanted: Collection[str], progress: Progress
) -> Iterator[Row]:
    defects = [defect for defect in FILE_DEFECTS if defect.name in wanted]
    if not defects:
        return
    tokenizer = load_tokenizer(bench.checkpoint)
    tokens = (
        *(window.token_ids for window in bench.workload.windows),
        *(prompt.token_ids for prompt in bench.workload.prompts),
    )
    reading = Reading(template=bench.text.chat_template, token_ids=frequent_tokens(tokens))
    for defect in defects:
        started = time.monotonic()
        titled = _Titled(progress, defect.name)
        titled.stage("read", 1)
        folder = bench.work / defect.name
        for name, data in plain_files(bench.sound).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        row = _file_row(bench, defect, defect.plant(folder, reading), folder, tokenizer)
        titled.advance(1)
        if row.outcome == "refused" and defect.is_template:
            row = replace(row, beside=_answers_alone(bench, candidate, folder, titled))
        yield replace(row, seconds=time.monotonic() - started)


def _file_row(
    bench: _Bench, defect: FileDefect, impossible: str, folder: Path, tokenizer: Any
) -> Row:
    outcome: Outcome = "not applicable"
    reason = impossible
    if not impossible:
        outcome, reason = _read_alike(bench, folder, tokenizer)
    caught = outcome in CAUGHT
    advice = (
        "your suite holds no text that this changes: add items of the kind you serve "
        "(conversations for a template, your own texts for a tokenizer); 1 would do"
    )
    return Row(
        name=defect.name,
        title=defect.title,
        planted=defect.planted,
        outcome=outcome,
        spoke=READING if outcome == "refused" else "",
        reason=reason,
        advice="" if caught else advice,
        as_expected=caught,
        seconds=0.0,
    )


def _read_alike(bench: _Bench, folder: Path, tokenizer: Any) -> tuple[Outcome, str]:
    """What the reading check, before any question, says of an artifact with these files.

    Where it passes, all ids are those of the sound artifact, and so is the verdict.
    """
    try:
        text = TextProcessor.load(folder)
        check_same_reading(prepare(bench.suite, text, bench.job.amounts), text, tokenizer)
    except (EvaluationError, TextError) as error:
        return "refused", str(error)
    return "accepted", "the base reads every text of the suite alike"


def _answers_alone(bench: _Bench, candidate: Candidate, folder: Path, progress: Progress) -> str:
    """What the tasks would say of answers to these prompts if nobody compared the prompts, as
    where the base has the same fault or a server renders them its own way."""
    try:
        text = TextProcessor.load(folder)
        workload = prepare(bench.suite, text, _few(bench.job.amounts))
    except (EvaluationError, TextError) as error:
        return f"could not be asked: {error}"
    ours = _ask(workload, text, candidate, progress)
    known = {i.id: a for i, a in zip(bench.workload.items, bench.base_answers, strict=True)}
    theirs = [known[item.id] for item in workload.items]
    pairs = [e.pair for e in pair(workload, bench.text, theirs, ours)]
    verdict = _part(bench, {m.name: m for m in answers.measure(pairs, bench.sampling, bench.edges)})
    if verdict is None:
        return "no rule judges answers"
    if verdict.result == "rejected":
        return f"rejected by {spoke(verdict)}"
    return f"{verdict.result} on {len(pairs)} items"


def _few(amounts: Amounts) -> Amounts:
    """A part of the items, those that the number alone would pick; one window, which is unused."""
    return replace(amounts, num_items=min(amounts.num_items, _BESIDE_ITEMS), num_windows=1)
